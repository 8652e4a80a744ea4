"""Texts that are tokenised once: the same tokens from the file, and when the file is made anew."""

import errno
import json
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from tcal_components.checkpoint import files
from tcal_components.checkpoint.files import WriteError
from tcal_components.data import assert_disjoint, mixed_text, packed_chat, packed_text, token_files
from tcal_components.data.token_files import TokenFiles

TEXT = "tcal_components.data.packed_text"


@pytest.fixture
def source(tmp_path, write_jsonl):
    return write_jsonl(tmp_path / "text.jsonl", [f"document {i} " * (i + 1) for i in range(9)])


@pytest.fixture
def start(tmp_path, tokenizer, source):
    """A start of a run: its text, and how often that was made."""

    def begin(folder=tmp_path / "tokens", tokenizer_section=None, **changes):
        made = []
        section = {"_component_": TEXT, "source": source, "seq_len": 8, **changes}

        def make():
            made.append(packed_text(tokenizer, **{key: section[key] for key in ("source", "seq_len")}))
            return made[-1]

        text = TokenFiles(folder, tokenizer, tokenizer_section or {}).get("training", section, make)
        return text, len(made)

    return begin


def chat_file(tmp_path):
    turns = [{"role": "user", "content": "to be?"}, {"role": "assistant", "content": "or not"}]
    rows = [json.dumps({"messages": turns[: 2 - i % 2] + turns * i}) for i in range(2, 6, 2)]
    (tmp_path / "chat.jsonl").write_text("\n".join(rows) + "\n")
    chat = {"_component_": "torchtune.datasets.chat_dataset", "source": "json", "conversation_column": "messages"}
    return {**chat, "conversation_style": "openai", "data_files": str(tmp_path / "chat.jsonl"), "split": "train"}


@pytest.mark.parametrize("kind", ["text", "long", "begun late", "mixed", "chat"])
def test_the_file_holds_what_was_made(tmp_path, tokenizer, source, write_jsonl, kind):
    (tmp_path / "long.txt").write_text("word " * 400_000)
    mixture = [{"source": source, "weight": 3}, {"source": write_jsonl(tmp_path / "b\udcff.jsonl", ["another"] * 30)}]
    component, given = {
        "text": (packed_text, {"source": source, "seq_len": 8}),
        "long": (packed_text, {"source": str(tmp_path / "long.txt"), "seq_len": 64}),
        "begun late": (packed_text, {"source": source, "seq_len": 8, "skip_tokens": 30, "max_tokens": 200}),
        "mixed": (mixed_text, {"sources": mixture, "seq_len": 8}),
        "chat": (packed_chat, {"dataset": chat_file(tmp_path), "seq_len": 128}),
    }[kind]
    make = partial(component, tokenizer, **given)
    section = {"_component_": f"tcal_components.data.{component.__name__}", **given}
    made, kept = make(), TokenFiles(tmp_path / "tokens", tokenizer, {}).get("a", section, make)
    for name in ("tokens", "starts", "targets", "used"):
        one, other = getattr(made.pack, name), getattr(kept.pack, name)
        assert (one is None and other is None) or (one.dtype == other.dtype and np.array_equal(one, other)), name
    assert made.documents == kept.documents and made.sources == kept.sources and made.seq_len == kept.seq_len
    assert made.num_tokens == kept.num_tokens and made.padding_fraction == kept.padding_fraction
    assert kept.tokenizer is tokenizer
    for index in (0, len(made) - 1):
        assert all(torch.equal(value, kept[index][key]) for key, value in made[index].items())
    assert TokenFiles(tmp_path / "tokens", tokenizer, {}).get("a", section, pytest.fail).sources == made.sources


def test_the_arrays_are_mapped(start, tmp_path):
    text, _ = start()
    maps = Path("/proc/self/maps").read_text()
    assert str((tmp_path / "tokens" / "training.safetensors").resolve()) in maps
    text.tokens[0] += 1  # private to this process
    assert start()[1] == 0


def test_a_second_start_makes_nothing(start):
    first, again = start(), start()
    assert (first[1], again[1]) == (1, 0)
    assert first[0].sources == again[0].sources


@pytest.mark.parametrize("how", ["text", "same size and times", "renamed", "settings", "tokenizer", "its settings"])
def test_other_inputs_are_tokenised(start, source, tmp_path, how, variant, monkeypatch):
    folder, path = variant(), Path(source)
    changes, of_tokenizer = {}, {"path": str(folder)}
    assert start(tokenizer_section=of_tokenizer)[1] == 1
    if how == "text":
        path.write_text(path.read_text() + json.dumps({"text": "more"}) + "\n")
    elif how == "same size and times":
        before = path.stat()
        path.write_text(path.read_text().replace("document 4", "document X"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size
    elif how == "renamed":
        changes = {"source": str(path.rename(tmp_path / "other.jsonl"))}
    elif how == "settings":
        changes = {"seq_len": 16}
    elif how == "tokenizer":
        (folder / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text() + " ")
    else:
        of_tokenizer["max_seq_len"] = 7
    assert [start(tokenizer_section=of_tokenizer, **changes)[1] for _ in range(2)] == [1, 0]


def test_large_text_counts_by_its_times(start, source, monkeypatch):
    monkeypatch.setattr(token_files, "_READ_WHOLE", 10)
    assert [start()[1] for _ in range(2)] == [1, 0]
    path = Path(source)
    before = path.stat()
    path.write_text(path.read_text().replace("document 4", "document X"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [start()[1] for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("how", ["cut", "a byte", "empty", "gone", "of something else"])
def test_a_damaged_file_is_made_anew(start, tmp_path, how):
    whole, _ = start()
    path = tmp_path / "tokens" / "training.safetensors"
    data = bytearray(path.read_bytes())
    path.unlink()
    if how == "a byte":
        data[-1] ^= 1
    kept = {"cut": data[:-7], "a byte": data, "empty": b"", "of something else": b"no safetensors at all"}
    if how in kept:
        path.write_bytes(kept[how])
    again, made = start()
    assert made == 1 and np.array_equal(again.tokens, whole.tokens) and start()[1] == 0


def test_what_a_killed_run_was_writing_is_swept(start, tmp_path):
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / ".training.safetensors.123.tmp").write_bytes(b"half")
    start()
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == ["training.safetensors"]


@pytest.mark.parametrize(
    "error", [SafetensorError("IoError: No space left on device (os error 28)"), OSError(errno.ENOSPC, "No space left")]
)
def test_a_full_disk_is_one_line(start, tmp_path, monkeypatch, error):
    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(WriteError, match=r"^cannot write \S+tokens/training.safetensors: No space left[^\n]*$"):
        start()
    assert not list((tmp_path / "tokens").iterdir())


def test_content_that_nobody_can_tell_is_tokenised_at_every_start(start, tmp_path):
    assert [start(_component_="elsewhere.text")[1] for _ in range(2)] == [1, 1]
    pattern = {"_component_": "torchtune.datasets.chat_dataset", "source": "json", "data_files": f"{tmp_path}/*.jsonl"}
    assert [start(dataset=pattern)[1] for _ in range(2)] == [1, 1]
    named = {"_component_": "torchtune.datasets.chat_dataset", "source": "json", "data_files": [str(tmp_path)]}
    assert start(dataset={"_component_": "torchtune.datasets.alpaca_dataset"})[1] == 1
    assert [start(dataset=named)[1] for _ in range(2)] == [1, 0]


def test_a_dataset_of_the_hub_counts_by_its_commit(tmp_path, tokenizer, source, monkeypatch):
    class Builder:
        hash = "one"

    asked = []

    def builder(path, name=None, revision=None):
        asked.append((path, name))
        return Builder

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    made = []

    def make():
        made.append(1)
        return packed_text(tokenizer, source=source, seq_len=8)

    section = {"_component_": TEXT, "source": "owner/corpus", "subset": "10B", "seq_len": 8}
    for _ in range(2):
        TokenFiles(tmp_path / "tokens", tokenizer, {}).get("a", section, make)
    assert len(made) == 1 and asked == [("owner/corpus", "10B")] * 2
    Builder.hash = "two"
    TokenFiles(tmp_path / "tokens", tokenizer, {}).get("a", section, make)
    assert len(made) == 2


def test_documents_are_compared_once(tmp_path, tokenizer, source):
    def shares(seq_len):
        files, asked = TokenFiles(tmp_path / "tokens", tokenizer, {}), []
        section = {"_component_": TEXT, "source": source, "seq_len": seq_len}
        text = files.get("a", section, partial(packed_text, tokenizer, source=source, seq_len=seq_len))
        found = files.once("copies", ["a"], lambda: asked.append(1) or assert_disjoint({"a": text}))
        return found, len(asked)

    assert [shares(8), shares(8), shares(16)] == [({}, 1), ({}, 0), ({}, 1)]
    (tmp_path / "tokens" / "copies.json").write_text('{"made_of"')
    assert shares(16) == ({}, 1)


def test_two_processes_tokenise_once(tmp_path, tokenizer_folder, source):
    """And once at each start where the content cannot be told."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root, worker = Path(__file__).parents[2], Path(__file__).with_name("token_worker.py")
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = list(map(str, [sys.executable, worker, tokenizer_folder, source, tmp_path / "tokens"]))
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE)
        for rank in "01"
    ]
    first, second = (json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in ranks)
    assert [calls for calls, *_ in first] == [1, 0, 1, 1] and [calls for calls, *_ in second] == [0, 0, 0, 0]
    assert [rest for _, *rest in first] == [rest for _, *rest in second]
