"""Whether a folder is the one that an output was made from."""

import pytest

from tcal_components.checkpoint.fingerprint import changes, folder_fingerprint, plain

SIZE = 5 << 20


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(bytes(SIZE))
    return tmp_path


@pytest.mark.parametrize("place", [0, SIZE // 2, SIZE - 1])
def test_a_change_of_one_byte_is_seen(folder, place):
    before = folder_fingerprint(folder)
    assert folder_fingerprint(folder) == before
    with open(folder / "b.safetensors", "r+b") as file:
        file.seek(place)
        file.write(b"x")
    assert folder_fingerprint(folder) != before


def test_what_counts(folder):
    before = folder_fingerprint(folder)
    (folder / "README.md").write_text("text")
    assert folder_fingerprint(folder) == before
    (folder / "config.json").write_text("{ }")
    changed = folder_fingerprint(folder)
    assert changed != before
    (folder / "a.safetensors").rename(folder / "c.safetensors")
    assert folder_fingerprint(folder) != changed


def test_what_has_changed_is_named():
    before = plain({"align": {"steps": 8, "joint": {"steps": 0}}, "dataset": ["0" * 32, 64], "seed": 0, "gone": 1})
    now = plain({"align": {"steps": 4, "joint": {"steps": 0}}, "dataset": ["1" * 32, 64], "seed": 0, "new": None})
    assert changes(before, now) == ["align.steps 8 -> 4", "dataset", "gone 1 -> nothing", "new nothing -> null"]
    assert changes(before, before) == []
