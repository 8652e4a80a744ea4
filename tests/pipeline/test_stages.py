"""Which outputs of earlier stages a run may use."""

from types import SimpleNamespace

import pytest
import torch

from tcal_components.checkpoint.run_state import RunState
from tcal_components.config import ConfigError
from tcal_components.pipeline.stages import Stages

INPUTS = {
    "measure": {"teacher_checkpointer": "t"},
    "initialize": {"seed": 0},
    "align": {"align": {"steps": 8}},
    "distill": {"distill": {"tokens": 64}},
}


@pytest.fixture
def make(tmp_path):
    """The stages of a run in ``tmp_path`` that has these and no more, some with other settings."""

    def make(*stages, text="a", resume=False, **changed):
        ctx = SimpleNamespace(is_first=True, barrier=lambda: None, device="cpu", world_size=1, rank=0)
        bench = SimpleNamespace(output_dir=tmp_path, ctx=ctx, log=lambda text: None, container=dict)
        bench.data_fingerprint = lambda role: [text, 64]
        config = SimpleNamespace(stages=list(stages), generation=None, inputs=lambda bench: {**INPUTS, **changed})
        config.export = SimpleNamespace(settings=lambda: {"format": "qwen3_5_text"})
        config.run = SimpleNamespace(resume_from_checkpoint=resume, keep_last_checkpoints=2)
        return Stages(bench, config)

    return make


@pytest.fixture
def ready(make):
    """Runs some stages to their end."""

    def ready(*names, **changed):
        stages = make(*names, **changed)
        stages.open_report()
        for name in names:
            with stages.running(name):
                stages.write(name, {"x": torch.ones(1)})
        return stages

    return ready


def test_an_output_is_current_if_it_was_made_from_the_present_config(make, ready):
    ready("measure", "initialize")
    found = make("align")
    assert found.current("initialize") and not found.current("align")
    assert found.read("initialize")["x"].item() == 1.0
    other = {"initialize": {"seed": 1}}
    with pytest.raises(
        ConfigError, match="stages has align, but the output of initialize is not in .*; add initialize"
    ):
        make("align", **other)
    assert not make("initialize", **other).current("initialize")
    found.path("initialize").unlink()
    assert not found.current("initialize"), "the output is gone"
    found = ready("measure", "initialize")
    found.results["initialize"].path.unlink()
    assert not found.current("initialize"), "killed before its end"


def test_an_alignment_of_other_settings_must_be_made_anew_or_go(make, ready):
    ready("measure", "initialize", "align")
    assert make("distill").mixers == "align"
    with pytest.raises(
        ConfigError,
        match="the output of align in .* was made with other settings, or not to its end; add align to stages",
    ):
        make("distill", align={"align": {"steps": 4}})
    again = make("initialize", "distill")
    assert again.mixers == "initialize", "an alignment of the old start does not count"


def test_a_perplexity_is_of_a_stage_and_a_text(make, ready):
    """It is found once for both; another text or another output has none."""
    ready("measure", "initialize")
    asked = []

    def perplexity(stages):
        stages.open_report()
        stages.evaluated("initialize", lambda: asked.append(1) or {"perplexity": {"analytic": float(len(asked))}})
        return stages.report["perplexity"]["analytic"]

    found = [perplexity(make("align", text=text)) for text in ("a", "a", "b", "b", "a")]
    assert found == [1.0, 1.0, 2.0, 2.0, 3.0]
    ready("measure", "initialize", initialize={"seed": 1})
    changed = make("align", initialize={"seed": 1})
    changed.open_report()
    assert changed.report["perplexity"]["analytic"] is None
    assert perplexity(changed) == 4.0


def test_a_state_of_other_settings_is_not_resumed(make, ready):
    stages = ready("measure", "initialize")
    state, inputs = stages.state("align")
    state.begin(inputs)
    state.save(3, {"x": torch.ones(1)})
    assert make("align", resume=True).begin("align")[1]
    with pytest.raises(ConfigError, match=r"holds step 3 of a run with other settings or text \(align.steps 8 -> 4\)"):
        make("align", resume=True, align={"align": {"steps": 4}})
    assert RunState(state.directory).steps() == [3], "refused, not lost"


def test_what_a_killed_run_was_writing_goes(ready, make, tmp_path):
    stages = ready("measure", "initialize")
    (tmp_path / "initialize" / ".mixers.safetensors.1.tmp").write_text("half")
    (tmp_path / ".export.abc").mkdir()
    stages.open_report()
    assert not list(tmp_path.rglob(".*"))
    assert sorted(path.name for path in (tmp_path / "initialize").iterdir()) == ["mixers.safetensors", "result.json"]
