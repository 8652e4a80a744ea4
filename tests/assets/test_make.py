import json
import struct
import zlib

import numpy as np
import pytest
from embedded_teacher import make

from tcal_components.data import hf_tokenizer


def character_vector(lines):
    """A character vector in R's XDR serialisation."""
    data = struct.pack(">ii", 16, len(lines))
    for line in lines:
        data += struct.pack(">ii", 0x00040009, len(line.encode())) + line.encode()
    return data


def record(payload):
    raw = b"X\n\x00\x00\x00\x03" + payload + b"\x00\x00\x00\xfe"
    return struct.pack(">i", len(raw)) + zlib.compress(raw)


def test_string_vectors_of_an_r_database():
    novel = [f"línea {i}" for i in range(1200)] + [""]
    chance = b"\x00\x00\x00\x10\x00\x00\x00\x02nonsense"
    data = (
        record(chance + character_vector(novel))
        + record(character_vector(["short"]))
        + record(character_vector(novel[:1100]))
    )
    found = list(make.string_vectors(data))
    assert [len(lines) for lines in found] == [1201, 1100] and found[0] == novel


def test_tidy():
    assert make.tidy("One\nline  here.\r\n\r\n\r\n two\u00a0words \n") == "One line here.\n\ntwo words"


def test_take_bytes_passes_over_what_does_not_fit():
    texts = [make.Text("a", "x" * n) for n in (40, 90, 30, 31)]
    assert [len(text.text) for text in make.take_bytes(texts, 100)] == [40, 30]


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Small packages in the places where npm and apt-get would have put them."""
    package = tmp_path / "cache/npm/package"
    (package / "sotu/data").mkdir(parents=True)
    (package / "moby-dick/data").mkdir(parents=True)
    for year in range(1800, 1850):
        (package / f"sotu/data/{year}_x.txt").write_text(f"Address of {year}. " + f"word{year} " * 60)
    for chapter in range(1, 13):
        (package / f"moby-dick/data/chapter_{chapter}.txt").write_text(f"CHAPTER {chapter}. Whale\n\n" + "sea " * 50)
    database = tmp_path / "cache/deb/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    database.parent.mkdir(parents=True)
    novels = b""
    for title in ("Pride and Prejudice", "Northanger Abbey", "Persuasion", "Emma"):
        lines = [title, "", "by Jane Austen"]
        for chapter in range(1, 40):
            lines += ["", f"Chapter {chapter}", ""] + [f"{title} sentence {chapter} {i}" for i in range(30)]
        novels += record(character_vector(lines))
    database.write_bytes(novels)
    monkeypatch.setattr(make, "SHIPPED_BYTES", {"calibration": 4000, "train": 30_000, "eval": 4000})
    monkeypatch.setattr(make, "SHIPPED_NOVELS", {"PRIDE AND PREJUDICE": 10_000, "MOBY-DICK": 1500})
    monkeypatch.setattr(make, "VOCAB_SIZE", 300)
    return tmp_path / "cache"


def test_the_command_writes_disjoint_parts_tokenizer_and_tokens(packages, tmp_path, monkeypatch):
    output, array = tmp_path / "out", tmp_path / "text.npy"
    monkeypatch.setattr(
        "sys.argv", ["make", "--cache", str(packages), "--output", str(output), "--teacher-text", str(array)]
    )
    make.main()
    parts = {
        name: [json.loads(line) for line in (output / f"{name}.jsonl").read_text().splitlines()]
        for name in ("calibration", "train", "eval")
    }
    works = {name: {line["work"] for line in lines} for name, lines in parts.items()}
    assert works["calibration"] == {"NORTHANGER ABBEY", "1800_x", "1824_x", "1848_x"}
    assert works["eval"] == {"PERSUASION", "1812_x", "1836_x"}
    assert {"PRIDE AND PREJUDICE", "MOBY-DICK"} <= works["train"] and len(works["train"]) > 4
    assert not works["train"] & (works["calibration"] | works["eval"])
    for name, lines in parts.items():
        assert sum(len(line["text"]) for line in lines) <= make.SHIPPED_BYTES[name]

    tokenizer = hf_tokenizer(output)
    assert tokenizer.vocab_size == 300 and json.loads((output / "config.json").read_text())["vocab_size"] == 300
    tokens = np.load(array)
    documents = tokenizer.decode(tokens.tolist(), skip_special_tokens=False).split(make.END_OF_TEXT)[:-1]
    held = {line["text"] for name in ("calibration", "eval") for line in parts[name]}
    assert not held & set(documents)
    assert {line["text"] for line in parts["train"]} <= set(documents)
    assert any("Emma sentence" in text for text in documents)
    assert not any("Persuasion" in text or "Northanger" in text for text in documents)
