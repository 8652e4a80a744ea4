"""Whether a file was made from these inputs, and what has changed if not."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tcal_components.checkpoint.artifact import Artifact

INPUTS = {"align": {"steps": 8, "lr": 3e-3}, "dataset": ["0" * 32, 64], "retain.converted": (1, 2)}
CONTENT = {"json": {"rows": [1, 2.5, None], "name": "x"}, "safetensors": {"x": torch.arange(6.0).view(2, 3).T}}


@pytest.fixture(params=["json", "safetensors"])
def made(request, tmp_path):
    artifact = Artifact(tmp_path / "folder" / f"a.{request.param}", INPUTS)
    assert not artifact.current() and artifact.why() is None
    with pytest.raises(FileNotFoundError, match="no file .*folder/a"):
        artifact.load()
    artifact.save(CONTENT[request.param])
    return artifact


def test_what_is_saved_comes_back(made):
    assert made.current() and made.why() is None
    loaded, content = made.load(), CONTENT[made.path.suffix[1:]]
    assert loaded.keys() == content.keys()
    same = torch.equal(loaded["x"], content["x"]) if "x" in content else loaded == content
    assert same


def test_one_line_says_what_has_changed(made):
    again = Artifact(made.path, {**INPUTS, "retain.converted": [1, 2]})
    assert again.current() and again.fingerprint == made.fingerprint, "as it comes back from JSON"
    other = Artifact(made.path, {**INPUTS, "align": {"steps": 4, "lr": 3e-3}, "dataset": ["1" * 32, 64], "seed": 1})
    assert not other.current() and other.why() == "align.steps 8 -> 4, dataset, seed nothing -> 1"
    assert other.load().keys() == made.load().keys(), "whoever asks reads it all the same"


def test_a_damaged_file_is_not_current(made):
    made.path.write_bytes(made.path.read_bytes()[:20])
    assert not made.current() and made.why() is None


def test_files_that_name_no_inputs(tmp_path):
    """Of other programs, and of versions that kept the fingerprint alone."""
    path = tmp_path / "a.json"
    for content in ({"x": 1}, [1]):
        path.write_text(json.dumps(content))
        assert not Artifact(path, INPUTS).current() and Artifact(path, INPUTS).why() is None
    path.write_text(json.dumps({"made_of": "0" * 32}))
    assert Artifact(path, INPUTS).why() == "another version of this recipe"
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(1)}, str(path))
    assert not Artifact(path, INPUTS).current() and Artifact(path, INPUTS).why() is None


def test_tensors_may_share_their_memory(tmp_path):
    weight = torch.arange(4.0)
    artifact = Artifact(tmp_path / "a.safetensors", {})
    artifact.save({"whole": weight, "half": weight[:2], "again": weight})
    found = artifact.load()
    assert torch.equal(found["whole"], weight) and torch.equal(found["half"], weight[:2])
    assert torch.equal(found["again"], weight)


def test_files_are_as_readable_as_others(tmp_path):
    artifact = Artifact(tmp_path / "a.safetensors", {})
    artifact.save({"x": torch.zeros(2)})
    (tmp_path / "other").touch()
    assert artifact.path.stat().st_mode == (tmp_path / "other").stat().st_mode
