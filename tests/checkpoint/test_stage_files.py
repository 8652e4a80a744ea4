"""Which outputs of earlier stages a run may use."""

import pytest
import torch

from tcal_components.checkpoint.artifacts import result_path, write_tensors
from tcal_components.checkpoint.stage_files import StageFiles
from tcal_components.config import ConfigError
from tcal_components.reporting import write_json

PRINTS = {stage: f"of {stage}" for stage in ("measure", "initialize", "align", "distill")}


@pytest.fixture
def files(tmp_path):
    """Files of the given stages, each ready with the present config's fingerprint."""

    def make(stages, *ready):
        found = StageFiles(tmp_path, stages)
        found.prints = PRINTS
        for stage in ready:
            found.write(stage, {"x": torch.ones(1)})
            write_json(result_path(tmp_path, stage), {"made_of": PRINTS[stage], "text": None, "report": {}})
        return found

    return make


def test_an_output_is_current_if_it_was_made_from_the_present_config(files):
    found = files(["align"], "initialize")
    assert found.current("initialize") and not found.current("align")
    assert found.read("initialize")["x"].item() == 1.0
    result_path(found.root, "initialize").unlink()
    assert not found.current("initialize"), "killed before its end"
    found = files(["align"], "initialize")
    found.prints = {**PRINTS, "initialize": "other settings"}
    assert not found.current("initialize")
    with pytest.raises(
        ConfigError, match="stages has align, but the output of initialize is not in .*; add initialize"
    ):
        found.check()


def test_an_alignment_of_other_settings_must_be_made_anew_or_go(files):
    found = files(["distill"], "initialize", "align")
    found.check()
    assert found.mixers == "align"
    found.prints = {**PRINTS, "align": "other settings"}
    with pytest.raises(
        ConfigError,
        match="the output of align in .* was made with other settings, or not to its end; add align to stages",
    ):
        found.check()
    again = files(["initialize", "distill"], "measure", "align")
    again.check()
    assert again.mixers == "initialize", "an alignment of the old start does not count"


def test_what_a_killed_run_was_writing_goes(files, tmp_path):
    found = files(["align"], "initialize")
    (tmp_path / "initialize" / ".mixers.safetensors.1.tmp").write_text("half")
    (tmp_path / ".export.abc").mkdir()
    found.sweep()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["initialize", "mixers.safetensors", "result.json"]


def test_files_are_as_readable_as_others(tmp_path):
    path = write_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(2)}, fingerprint="f")
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
