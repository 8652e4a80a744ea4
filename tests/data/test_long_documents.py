"""A document of any size is read and tokenised in pieces, to the same ids as whole, and no further than it is used."""

import json
import random
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tcal_components.assets import asset_path
from tcal_components.data import hf_tokenizer, packed_text
from tcal_components.data.sources import readers


@pytest.fixture(scope="module")
def prose():
    lines = (asset_path("quickstart") / "eval.jsonl").read_text().splitlines()
    return "\n".join(json.loads(line)["text"] for line in lines)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory, prose):
    """One of each kind: byte-level BPE, BPE over the whole text as one word (with a dummy prefix), and Unigram."""
    specials = ["<unk>", "</s>"]
    whole = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    whole.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    whole.pre_tokenizer = pre_tokenizers.Metaspace()
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=specials + bytes_, show_progress=False)
    whole.train_from_iterator([prose[:100_000]], trainer)
    whole.pre_tokenizer = None
    unigram = Tokenizer(models.Unigram())
    unigram.normalizer = normalizers.NFKC()
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=specials, unk_token="<unk>", show_progress=False, n_sub_iterations=1
    )
    unigram.train_from_iterator([prose[:30_000]], trainer)
    found = {"byte_level": hf_tokenizer(asset_path("quickstart"))}
    for name, tokenizer in (("whole", whole), ("unigram", unigram)):
        folder = tmp_path_factory.mktemp(name)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        found[name] = hf_tokenizer(folder)
    return found


def awkward(prose, size=60_000):
    rng = random.Random(0)
    yield prose[:size]
    yield prose[:size].replace("\n", " ")
    yield prose[:size].replace("\n", "").replace(" ", "")
    yield "a" * size
    yield "x" + " " * size + "y"
    yield "\r\n" * (size // 2)
    yield "".join(rng.choice("0123456789") for _ in range(size))
    yield "".join(rng.choice("é\u0301😀👍🏽漢字 \tab'’<|endoftext|>") for _ in range(size))


@pytest.mark.parametrize("kind", ["byte_level", "whole", "unigram"])
def test_pieces_give_the_ids_of_the_whole(kind, tokenizers, prose):
    tokenizer = tokenizers[kind]
    for number, text in enumerate(awkward(prose)):
        size = 17_001 + 3_001 * number
        pieces = (text[i : i + size] for i in range(0, len(text), size))
        assert np.concatenate(list(tokenizer.encode_pieces(pieces))).tolist() == tokenizer.encode(text, add_eos=True)


def test_long_documents_of_every_source(tmp_path, monkeypatch, prose):
    """Line ends, escapes and characters of several bytes across the cuts."""
    tokenizer = hf_tokenizer(asset_path("quickstart"))
    text = '“Quoted” \\ "and" é \U0001f600 漢\t' + prose[:90_000].replace("\n", "\r\n") + "\x00\x1f end"
    texts = [text, "short", text[::-1].strip(), " \n" * 45_000]
    rows = [{"id": {"n": [1, "text"]}, "text": text, "more": None} for text in texts]
    folder = tmp_path / "txt"
    folder.mkdir()
    for number, part in enumerate(texts):
        (folder / f"{number}.txt").write_text(part, newline="")
    (tmp_path / "ascii.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "utf8.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    last = [{"other": "x" * 90_000, "text": text} for text in texts]
    (tmp_path / "last.jsonl").write_text("".join(json.dumps(row) + "\n" for row in last))
    for name, kind in (("s", pyarrow.string()), ("l", pyarrow.large_string())):
        table = pyarrow.table({"text": pyarrow.array([*texts, None, ""], kind)})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    names = ("txt", "ascii.jsonl", "utf8.jsonl", "last.jsonl", "s.parquet", "l.parquet")
    for name, size in [(name, 20_011) for name in names] + [("utf8.jsonl", 1 << 20)]:
        monkeypatch.setattr(readers, "PIECE", size)
        wanted = [part.replace("\r\n", "\n").replace("\r", "\n") if name == "txt" else part for part in texts[:3]]
        stream = [token for part in wanted for token in tokenizer.encode(part, add_eos=True)]
        dataset = packed_text(tokenizer, source=str(tmp_path / name), seq_len=64)
        assert dataset.sources["documents"] == 3, name
        assert dataset.tokens.tolist() == stream[: len(dataset.tokens)] and len(stream) - len(dataset.tokens) < 64
        part = packed_text(tokenizer, source=str(tmp_path / name), seq_len=64, max_tokens=640)
        assert part.tokens.tolist() == stream[:641]
        behind = packed_text(tokenizer, source=str(tmp_path / name), seq_len=64, skip_tokens=10, max_tokens=640)
        assert behind.sources["skipped_tokens"] == stream.index(tokenizer.eos_id) + 1
        assert behind.tokens.tolist() == stream[behind.sources["skipped_tokens"] :][:641]


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ('"}', None),
        ('\\ud83d"}', "holds half a surrogate pair"),
        ('\\ud83dx"}', "holds half a surrogate pair"),
        ('\\ud83d\\u0041"}', "an escape is broken|half a surrogate"),
        ('\\x"}', "is not valid JSON"),
        ('\\u12"}', "is not valid JSON"),
        ("", "its text has no end"),
        ('"', "is not valid JSON behind its text"),
        ('", "id": }', "is not valid JSON behind its text"),
        ("\n", "is not valid JSON"),
        ("\udcff", "is not UTF-8 text"),
    ],
)
def test_a_long_row_that_is_broken_is_one_line(tmp_path, monkeypatch, end, message):
    monkeypatch.setattr(readers, "PIECE", 20_000)
    tokenizer = hf_tokenizer(asset_path("quickstart"))
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": "' + b"words " * 40_000 + end.encode("utf-8", "surrogateescape"))
    assert (
        len(packed_text(tokenizer, source=str(path), seq_len=64, max_tokens=128)) == 2
    )  # what is not read is not known
    if message is None:
        assert packed_text(tokenizer, source=str(path), seq_len=64).sources["documents"] == 2
        return
    with pytest.raises(ValueError, match=f"a.jsonl line 2 .*({message})") as caught:
        packed_text(tokenizer, source=str(path), seq_len=64)
    assert "\n" not in str(caught.value)


CODE = """
import resource, sys
from tcal_components.data import hf_tokenizer, packed_text
tokenizer = hf_tokenizer(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for source in sys.argv[2:]:
    assert packed_text(tokenizer, source=source, seq_len=500, max_tokens=10_000).num_tokens == 10_000
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_memory_of_a_huge_document_is_that_of_its_beginning(tmp_path):
    """150 MB in one line; whole, it would take gigabytes and minutes."""
    with (tmp_path / "a.txt").open("w") as text, (tmp_path / "a.jsonl").open("w") as row:
        row.write('{"text": "')
        for _ in range(150):
            text.write("some words of one line \u00e9 " * 40_000)
            row.write("some words of one line \\u00e9 " * 35_000)
        row.write('"}\n')
    args = [str(asset_path("quickstart")), str(tmp_path / "a.txt"), str(tmp_path / "a.jsonl")]
    done = subprocess.run([sys.executable, "-c", CODE, *args], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 400, f"{done.stdout} MB more than before"
