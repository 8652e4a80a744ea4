"""What is wrong with a source is one line that names file and row; nothing hangs, and nothing here is looked for on a hub."""

import os

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tcal_components.data import hf_tokenizer, packed_text

GOOD = b'{"text": "a good row"}\n'


def refusal(tokenizer, source, error=ValueError, **options):
    with pytest.raises(error) as caught:
        packed_text(tokenizer, source=str(source), seq_len=2, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"text": "\\ud800"}', "line 2: column 'text' holds half a surrogate pair"),
        (b'{"text": "ok \\udc00\\ud800"}', "line 2: column 'text' holds half a surrogate pair"),
        (b'{"text": ' + b"[" * 100_000, "line 2 is not valid JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "line 2 is not valid JSON"),
        (b'{"text": "a", "n": ' + b"9" * 5_000 + b"}", "line 2 is not valid JSON"),
        (b'{"text": "\xff"}', "line 2 is not UTF-8 text (byte 10 of the line)"),
        (b'{"text": "\xed\xa0\x80"}', "line 2 is not UTF-8 text"),
        (b'{"text": "a\x00"}', "line 2 is not valid JSON"),
        (b'{"text": "a"', "line 2 is not valid JSON"),
        (b"\xef\xbb\xbf" + GOOD.strip(), "line 2 is not valid JSON"),
        (b'{"text": ["a"]}', "line 2: column 'text' must hold text, got list"),
        (b'{"text": {"a": 1}}', "line 2: column 'text' must hold text, got dict"),
        (b'{"text": NaN}', "line 2: column 'text' must hold text, got float"),
        (b'{"text": true}', "line 2: column 'text' must hold text, got bool"),
        (b"null", "line 2 must be a JSON object"),
        (b'"text"', "line 2 must be a JSON object"),
        (b"{}", "line 2; its columns are"),
    ],
)
def test_rows_of_jsonl(tokenizer, tmp_path, row, message):
    (tmp_path / "a.jsonl").write_bytes(GOOD + row + b"\n" + GOOD)
    said = refusal(tokenizer, tmp_path / "a.jsonl")
    assert message in said and "a.jsonl" in said


def parquet(path, values, **options):
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), path, **options)
    return path


def test_rows_of_parquet(tokenizer, tmp_path):
    path = tmp_path / "a.parquet"
    cases = [
        (pyarrow.array([None, 1]), "row 1: column 'text' must hold text, got int"),
        (pyarrow.array([b"bytes"]), "row 0: column 'text' must hold text, got bytes"),
        (pyarrow.array([["a"], []]), "row 0: column 'text' must hold text, got list"),
        (pyarrow.array([{"text": "a"}]), "row 0: column 'text' must hold text, got dict"),
    ]
    for values, message in cases:
        said = refusal(tokenizer, parquet(path, values))
        assert message in said and "a.parquet" in said
    invalid = pyarrow.StringArray.from_buffers(
        2, pyarrow.py_buffer(np.array([0, 2, 4], np.int32).tobytes()), pyarrow.py_buffer(b"ok\xff\xfe")
    )
    assert "a.parquet row 1 cannot be read" in refusal(tokenizer, parquet(path, invalid))
    kept = parquet(path, pyarrow.array(["one", "two"] * 20).dictionary_encode())
    assert packed_text(tokenizer, source=str(kept), seq_len=2).sources["documents"] == 40


def test_damaged_parquet(tokenizer, tmp_path):
    """Any byte may be wrong: a refusal in one line, or other text, but nothing else."""
    whole = parquet(tmp_path / "a.parquet", [f"row {i} of the text" for i in range(300)]).read_bytes()
    rng, refused = np.random.default_rng(0), 0
    for _ in range(150):
        data = bytearray(whole)
        for at in rng.integers(len(data), size=3).tolist():
            data[at] = int(rng.integers(256))
        (tmp_path / "b.parquet").write_bytes(data[: int(rng.integers(20, len(data)))] if rng.random() < 0.3 else data)
        try:
            packed_text(tokenizer, source=str(tmp_path / "b.parquet"), seq_len=2)
        except ValueError as error:
            assert "b.parquet" in str(error) and "\n" not in str(error)
            refused += 1
    assert refused > 50


def test_damaged_arrays(tokenizer, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(1, 200, dtype=np.uint16))
    whole = (tmp_path / "a.npy").read_bytes()
    path = tmp_path / "b.npy"
    header = b"\x93NUMPY\x01\x00"
    cases = [
        (b"", "is not a plain .npy array"),
        (whole[:9], "is not a plain .npy array"),
        (whole[:200], "is not a plain .npy array"),
        (whole.replace(b"(199,)", b"(10**9,)"), "is not a plain .npy array"),
        (whole.replace(b"(199,)", b"(-19,)"), "is not a plain .npy array"),
        (whole.replace(b"'<u2'", b"'|O8'"), "is not a plain .npy array"),
        (whole.replace(b"'<u2'", b"'<f2'"), "must be a 1-D array of token ids (uint16 or uint32), got float16[199]"),
        (header + (9000).to_bytes(2, "little") + b"(" * 9000, "is not a plain .npy array"),
        (header + (60).to_bytes(2, "little") + b"{'descr': [('a', 'b')]}".ljust(60), "is not a plain .npy array"),
    ]
    for data, message in cases:
        path.write_bytes(data)
        said = refusal(tokenizer, path)
        assert message in said and "b.npy" in said, data[:20]
    np.savez(tmp_path / "c.npz", a=np.arange(3))
    (tmp_path / "c.npz").rename(path)
    assert "is not a plain .npy array" in refusal(tokenizer, path)


def test_damaged_saved_dataset(tokenizer, tmp_path):
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": ["a", "b"], "n": [[1], None]}).save_to_disk(folder)
    assert "row 0: column 'n' must hold text, got list" in refusal(tokenizer, folder, text_column="n")
    (folder / "state.json").write_text("[" * 100_000)
    assert "saved cannot be read as a saved dataset" in refusal(tokenizer, folder)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.npy"])
def test_pipes_and_devices_are_refused_at_once(tokenizer, tmp_path, name):
    os.mkfifo(tmp_path / name)
    assert f"{tmp_path / name} is a pipe or device" in refusal(tokenizer, tmp_path / name)
    if name != "a.npy":
        assert f"{tmp_path / name} is a pipe or device" in refusal(tokenizer, tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / name).symlink_to("/dev/zero")
    assert "is a pipe or device" in refusal(tokenizer, tmp_path / "b" / name)
    (tmp_path / f"c{name}").symlink_to(tmp_path / "nowhere")
    assert "no such file or folder" in refusal(tokenizer, tmp_path / f"c{name}", FileNotFoundError)


def test_devices_without_a_suffix(tokenizer, tmp_path):
    for device in ("/dev/zero", "/dev/null", "/dev/stdin"):
        assert "is a pipe or device" in refusal(tokenizer, device)
    (tmp_path / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(FileNotFoundError, match="expected a folder with tokenizer.json"):
        hf_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        *("train.json", "train.jsonl.gz", "TRAIN.TXT", "x.parquet", "x.npy", "x.csv", "owner/x.zst"),
        *("./data", "../data", "~/nothing-of-this-name", "/nothing", "a/b/c", "here/nothing"),
    ],
)
def test_what_looks_local_is_not_looked_for_on_a_hub(tokenizer, tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: pytest.fail("asked a hub"))
    assert "no such file or folder: " in refusal(tokenizer, source, FileNotFoundError)


@pytest.mark.parametrize("source", ["wikitext", "owner/name", "owner/name-v1.5"])
def test_names_of_datasets_are(tokenizer, tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *a, **k: datasets.Dataset.from_dict({"text": [name]}))
    assert packed_text(tokenizer, source=source, seq_len=2).sources["path"] == source
