import json

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from tcal_components.data import assert_disjoint, hf_tokenizer, packed_text


def stream(texts, tokenizer):
    """Naive reference: (token, document number) of the concatenated documents."""
    pairs = []
    for number, text in enumerate(texts):
        pairs += [(token, number) for token in tokenizer.encode(text, add_eos=True)]
    return pairs


def check_against_stream(dataset, pairs):
    length = dataset.seq_len
    assert len(dataset) == len(pairs) // length
    for row in range(len(dataset)):
        item = dataset[row]
        numbers = [number for _, number in pairs[row * length : (row + 1) * length]]
        position = 0
        for t in range(length):
            absolute = row * length + t
            token, number = pairs[absolute]
            assert item["tokens"][t] == token
            position = 0 if t == 0 or numbers[t] != numbers[t - 1] else position + 1
            assert item["input_pos"][t] == position
            assert item["document"][t] == number - numbers[0]
            follows = absolute + 1 < len(pairs) and pairs[absolute + 1][1] == number
            assert item["labels"][t] == (pairs[absolute + 1][0] if follows else -100)


TEXTS = ["abcde", "x", "the quick brown fox jumps", "", "  ", "ünïcödé €", "zzzz" * 9]


def test_items_equal_a_naive_packing(tmp_path, tokenizer, write_jsonl):
    dataset = packed_text(tokenizer, source=write_jsonl(tmp_path / "a.jsonl", TEXTS), seq_len=8)
    pairs = stream([text for text in TEXTS if text.strip()], tokenizer)
    check_against_stream(dataset, pairs)
    assert dataset.num_tokens == len(pairs) // 8 * 8 and dataset.padding_fraction == 0
    assert dataset.sources["documents"] == 5 and dataset.sources["tokens"] == dataset.num_tokens
    assert torch.equal(dataset[-1]["tokens"], dataset[len(dataset) - 1]["tokens"])
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_every_kind_of_local_source_gives_the_same_sequences(tmp_path, tokenizer, write_jsonl):
    texts = ["first document, rather long", "second", "third and last of them"]
    folder = tmp_path / "folder" / "below"
    folder.mkdir(parents=True)
    (folder / "1.txt").write_text(texts[0])
    write_jsonl(folder / "2.jsonl", texts[1:2])
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[2:], "n": [1]}), folder / "3.parquet")
    (folder / "notes.md").write_text("not text for training")
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")
    one = packed_text(tokenizer, source=write_jsonl(tmp_path / "all.jsonl", texts), seq_len=5)
    np.save(tmp_path / "all.npy", one.tokens.astype(np.uint16))
    for source in ("folder", "saved", "all.npy"):
        other = packed_text(tokenizer, source=str(tmp_path / source), seq_len=5)
        assert len(other) == len(one)
        for a, b in zip(one, other):
            assert all(torch.equal(a[key], b[key]) for key in a)
        assert other.sources["sha256"] == one.sources["sha256"]


def test_hub_dataset_by_name(monkeypatch, tokenizer):
    calls = []

    def load_dataset(name, subset, *, split, streaming):
        calls.append((name, subset, split, streaming))
        data = datasets.Dataset.from_dict({"body": ["hello there"] * 3, "n": [1, 2, 3]})
        return data.to_iterable_dataset() if streaming else data

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for streaming in (False, True):
        arguments = {"source": "some/name", "subset": "en", "text_column": "body", "streaming": streaming}
        dataset = packed_text(tokenizer, seq_len=6, **arguments)
        assert len(dataset) == 6
    assert calls == [("some/name", "en", "train", False), ("some/name", "en", "train", True)]
    with pytest.raises(ValueError, match="no text column 'text' in some/name; its columns are: body, n"):
        packed_text(tokenizer, source="some/name", seq_len=6)


def test_hub_failure_is_one_line(monkeypatch, tokenizer):
    def load_dataset(*args, **kwargs):
        raise RuntimeError("Couldn't find it\nlong traceback")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"source 'some/name' is no file or folder here.*Couldn't find it$"):
        packed_text(tokenizer, source="some/name", seq_len=6)


def test_max_tokens_reads_no_further_than_needed(tmp_path, tokenizer, write_jsonl):
    source = write_jsonl(tmp_path / "a.jsonl", ["word " * 300_000] * 2)
    with open(source, "a") as file:
        file.write("{broken\n")
    dataset = packed_text(tokenizer, source=source, seq_len=100, max_tokens=1050)
    assert len(dataset) == 10 and dataset.sources["documents"] == 1
    assert dataset[9]["labels"][-1] >= 0  # the token after the last row is its last label
    with pytest.raises(ValueError, match="line 3 is not valid JSON"):
        packed_text(tokenizer, source=source, seq_len=100)


def test_parts_of_one_source_are_disjoint(tmp_path, tokenizer, write_jsonl):
    texts = [f"document number {i} " + chr(97 + i) * (20 + i) for i in range(20)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    for shuffle in (False, True):
        options = {"source": source, "seq_len": 10, "shuffle_documents": shuffle, "seed": 3}
        parts = {
            "calibration": packed_text(tokenizer, max_tokens=200, **options),
            "training": packed_text(tokenizer, skip_tokens=200, max_tokens=300, **options),
            "evaluation": packed_text(tokenizer, skip_tokens=550, **options),
        }
        assert_disjoint(parts)
        assert sum(len(part.documents) for part in parts.values()) <= len(texts)
        with pytest.raises(ValueError, match="same document is in calibration .*line.* and in training"):
            assert_disjoint({**parts, "training": packed_text(tokenizer, skip_tokens=100, **options)})
    first = packed_text(tokenizer, source=source, seq_len=10, skip_documents=19)
    assert first.documents[0].where.endswith("line 20")


def test_a_part_begins_where_the_one_before_it_ends(tmp_path, tokenizer, write_jsonl):
    """Whole documents are skipped, so a part may begin behind its own ``skip_tokens``, and the next one must know."""
    texts = [f"document number {i:02d} " + chr(97 + i) * (20 + 7 * i % 40) for i in range(24)]
    options = {"source": write_jsonl(tmp_path / "a.jsonl", texts), "seq_len": 10, "max_tokens": 150}
    parts = {"0": packed_text(tokenizer, skip_documents=1, skip_tokens=55, **options)}
    assert parts["0"].sources["skipped_tokens"] > 55
    for number in range(1, 4):
        before = parts[str(number - 1)]
        skip = before.sources["skipped_tokens"] + before.num_tokens
        parts[str(number)] = packed_text(tokenizer, skip_documents=1, skip_tokens=skip, **options)
    assert_disjoint(parts)
    lines = [int(d.where.rsplit(" ", 1)[1]) for part in parts.values() for d in part.documents]
    assert lines == list(range(lines[0], lines[0] + len(lines))), "none twice, none lost"


def test_disjointness_compares_text_and_token_arrays(tmp_path, tokenizer, write_jsonl):
    texts = [f"document number {i} which has enough tokens to be compared" for i in range(4)]
    text = packed_text(tokenizer, source=write_jsonl(tmp_path / "a.jsonl", texts), seq_len=10)
    np.save(tmp_path / "a.npy", text.tokens)
    array = packed_text(tokenizer, source=str(tmp_path / "a.npy"), seq_len=10, skip_documents=1, max_tokens=50)
    with pytest.raises(ValueError, match="training .*a.jsonl line 2.* evaluation .*a.npy tokens"):
        assert_disjoint({"training": text, "evaluation": array})
    short = packed_text(tokenizer, source=write_jsonl(tmp_path / "b.jsonl", ["Contents"] * 3), seq_len=10)
    assert_disjoint({"training": short, "evaluation": short})


def test_shuffle_is_a_permutation_by_seed(tmp_path, tokenizer, write_jsonl):
    source = write_jsonl(tmp_path / "a.jsonl", [f"text {i:03d}" for i in range(50)])

    def order(**options):
        return [d.where for d in packed_text(tokenizer, source=source, seq_len=9, **options).documents]

    assert order(shuffle_documents=True, seed=1) == order(shuffle_documents=True, seed=1)
    assert order(shuffle_documents=True, seed=1) != order(shuffle_documents=True, seed=2)
    assert sorted(order(shuffle_documents=True)) == sorted(order())


@pytest.mark.parametrize(
    ("name", "content", "options", "error", "message"),
    [
        ("nowhere.jsonl", None, {}, FileNotFoundError, "no such file or folder: .*nowhere.jsonl"),
        ("nowhere.npy", None, {}, FileNotFoundError, "no such file or folder: .*nowhere.npy"),
        ("a.csv", b"a,b", {}, ValueError, "must be one of .txt, .jsonl, .parquet .* got .*a.csv"),
        ("a.txt", b" \n", {}, ValueError, "no text in .*a.txt: every document is empty"),
        ("a.txt", b"hello", {}, ValueError, "shorter than one sequence: .*a.txt gives 6 tokens, seq_len is 8"),
        ("a.txt", b"hello world", {"skip_tokens": 5}, ValueError, r"gives 0 tokens after skip_tokens 5 \(1 documents"),
        ("a.txt", b"\xff\xfe", {}, ValueError, r"a.txt is not UTF-8 text \(byte 0\)"),
        ("a.jsonl", b'{"text": "x"}\n{"text" 1}\n', {}, ValueError, "a.jsonl line 2 is not valid JSON"),
        ("a.jsonl", b"[1]\n", {}, ValueError, "line 1 must be a JSON object with the column 'text', got a list"),
        ("a.jsonl", b"null\n", {}, ValueError, "line 1 must be a JSON object with the column 'text', got null"),
        ("a.jsonl", b'{"body": "x", "id": 1}\n', {}, ValueError, "no text column 'text' in .* columns are: body, id"),
        ("a.jsonl", b'{"text": 7}\n', {}, ValueError, "line 1: column 'text' must hold text, got int"),
        ("a.parquet", b"PAR?", {}, ValueError, "a.parquet is not a parquet file"),
        ("a.npy", b"junk", {}, ValueError, "a.npy is not a plain .npy array"),
        ("a.txt", b"hello world", {"split": "train"}, ValueError, "split and subset are for Hugging Face datasets"),
        ("a.txt", b"hello world", {"max_tokens": 7}, ValueError, "max_tokens 7 is less than one sequence of seq_len 8"),
        ("a.txt", b"hello world", {"seq_len": 1}, ValueError, "seq_len must be at least 2, got 1"),
        ("a.txt", b"hello world", {"skip_tokens": -1}, ValueError, "must be >= 0"),
    ],
)
def test_user_mistakes_give_one_line(tmp_path, tokenizer, name, content, options, error, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message) as caught:
        packed_text(tokenizer, **{"source": str(tmp_path / name), "seq_len": 8, **options})
    assert "\n" not in str(caught.value)


def test_token_arrays_of_a_vocabulary_with_a_gap(tmp_path, tokenizer_folder):
    """The largest id counts, not the number of tokens."""
    content = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["a"] = 900
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((tokenizer_folder / name).read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = hf_tokenizer(tmp_path)
    ids = tokenizer.encode("banana", add_eos=True)
    assert max(ids) == 900 == tokenizer.vocab_size - 1 and len(tokenizer.tokenizer.get_vocab()) == 259
    np.save(tmp_path / "a.npy", np.array(ids, dtype=np.uint32))
    assert packed_text(tokenizer, source=str(tmp_path / "a.npy"), seq_len=3).num_tokens == 6
    np.save(tmp_path / "a.npy", np.array([*ids, 901], dtype=np.uint32))
    with pytest.raises(ValueError, match="token ids 0 to 901, the tokenizer has 0 to 900"):
        packed_text(tokenizer, source=str(tmp_path / "a.npy"), seq_len=3)


def test_empty_folder_and_wrong_arrays(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="no .txt, .jsonl, .parquet file below"):
        packed_text(tokenizer, source=str(tmp_path), seq_len=8)
    np.save(tmp_path / "a.npy", np.array([1, 70_000], dtype=np.uint32))
    with pytest.raises(ValueError, match="token ids 1 to 70000, the tokenizer has 0 to 258"):
        packed_text(tokenizer, source=str(tmp_path / "a.npy"), seq_len=2)
    np.save(tmp_path / "a.npy", np.zeros((2, 2)))
    with pytest.raises(ValueError, match="1-D array of token ids"):
        packed_text(tokenizer, source=str(tmp_path / "a.npy"), seq_len=2)
