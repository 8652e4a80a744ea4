import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tcal_components.config import ConfigError
from tcal_components.distributed import ParallelContext
from tcal_components.models.retained import RetainConfig, resolve_retained
from tcal_components.select import scores as scoring
from tcal_components.setup import Workbench, processes

ROOT = Path(__file__).resolve().parents[2]
POLICIES = ["uniform", "ablation", "single_keep", "kl_guided", "alignment_error"]


@pytest.fixture
def recipe(load_recipe):
    return load_recipe("select_layers").SelectLayers


def test_every_policy_writes_a_set_that_a_config_can_include(recipe, small_config, tmp_path):
    recipe(small_config("select_layers")).run()
    out = tmp_path / "out"
    report = json.loads((out / "report.json").read_text())
    text = (out / "report.md").read_text()
    for policy in POLICIES:
        found = json.loads((out / f"{policy}.json").read_text())
        assert found["policy"] == policy and found["num_layers"] == 2 and found["total_layers"] == 4
        assert sorted(found["ranking"]) == [0, 1, 2, 3] and found["retained_layers"] == sorted(found["ranking"][:2])
        assert set(found["scores"]) == {"0", "1", "2", "3"}
        assert found["config"]["seed"] == 0 and Path(found["teacher"]).is_dir()
        assert found["tokens"] == sum(found["tokens_by_use"].values())
        kept = resolve_retained(RetainConfig(policy="file", path=str(out / f"{policy}.json"), num_layers=1), 4)
        assert kept == (found["ranking"][0],)
        assert report["selection"][policy]["ranking"] == found["ranking"] and f"| {policy} |" in text
    errors = {int(layer): error["last"] for layer, error in report["alignment_error"].items()}
    assert json.loads((out / "alignment_error.json").read_text())["ranking"][0] == max(errors, key=errors.get)
    assert report["tokens"] == {"calibration": 512, "alignment": 4 * 2 * 64, "distillation": None}
    assert not (out / "align" / "state").exists()


def test_an_interrupted_run_continues(recipe, small_config, tmp_path, monkeypatch):
    changes = ["select.policy=single_keep", "select.mixers=initialize"]
    recipe(small_config("select_layers", *changes, output=tmp_path / "whole")).run()
    original, measured = scoring.Scorer.loss, []

    def loss(self, replaced=None):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(replaced)
        return original(self, replaced)

    monkeypatch.setattr(scoring.Scorer, "loss", loss)
    with pytest.raises(KeyboardInterrupt):
        recipe(small_config("select_layers", *changes)).run()
    measured.clear()
    recipe(small_config("select_layers", *changes)).run()
    assert len(measured) == 5 - 3, "what was measured before is not measured again"
    whole, continued = (json.loads((tmp_path / name / "single_keep.json").read_text()) for name in ("whole", "out"))
    assert continued["scores"] == whole["scores"] and continued["ranking"] == whole["ranking"]
    assert not (tmp_path / "out" / "align").exists(), "nothing was aligned, because nothing needed it"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("select.policy=[ablation,best]", "select.policy[1] is 'best'; allowed: uniform, ablation"),
        ("select.num_layers=9", "select.num_layers is 9, but the teacher has 4 layers"),
        ("select.mixers=aligned", "select.mixers is 'aligned' (did you mean 'align'?); allowed: initialize, align"),
        ("select.num_layer=2", "unknown key 'num_layer' in select"),
        ("initialize.strategy=best", "initialize.strategy is 'best'; allowed: naive"),
        ("align.steps=0", "select.policy alignment_error needs an alignment"),
        ("select.batch_size=0", "select.batch_size is 0, expected at least 1"),
        ("initialize.query_block=0", "initialize.query_block is 0, expected at least 1"),
        ("save_every=0", "save_every is 0, expected at least 1"),
        (
            "calibration_dataset.max_tokens=128 align.seq_len=192",
            "align.seq_len is 192, expected at most the 128 tokens",
        ),
    ],
)
def test_mistakes_are_found_before_the_teacher_is_read(recipe, small_config, change, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        recipe(small_config("select_layers", *change.split()))


def test_a_batch_that_the_processes_cannot_share(recipe, small_config, monkeypatch):
    create = ParallelContext.create
    two = lambda *args, **options: dataclasses.replace(create(*args, **options), world_size=2)
    monkeypatch.setattr(ParallelContext, "create", two)
    monkeypatch.setattr(processes, "Watch", lambda limit: None)  # there is one process
    with pytest.raises(ConfigError, match="^align.batch_size is 3, expected a multiple of the 2 processes"):
        recipe(small_config("select_layers", "align.batch_size=3"))
    recipe(small_config("select_layers", "align.batch_size=3", "select.policy=ablation"))  # which aligns nothing


def test_the_alignment_reads_no_more_text_than_it_is_told(recipe, small_config, monkeypatch):
    class Read(Exception):
        pass

    def stream(self, text, batch_size, *, seed):
        raise Read(text.num_tokens)

    monkeypatch.setattr(Workbench, "stream", stream)
    for change, tokens in (
        ("align.fixed_sequences=3", 3 * 64),
        ("align.steps=2", 2 * 2 * 64),
        ("align.steps=99", 512),
        ("calibration_dataset.max_tokens=540", 512),  # the rest is the beginning of the text that layers are scored on
    ):
        steps = [] if "steps" in change else ["align.steps=99"]
        made = recipe(small_config("select_layers", "align.refit_tokens=0", "align.seq_len=64", *steps, change))
        made.initialized = "of nothing"
        with pytest.raises(Read, match=f"^{tokens}$"):
            made.align(made.bench.mixers())


def test_a_mistake_is_one_line_on_the_command_line(random_teacher, tmp_path):
    arguments = ["--config", "configs/select_layers.yaml", f"output_dir={tmp_path}", "select.num_layers=-1"]
    arguments += [f"teacher_checkpointer.checkpoint_dir={random_teacher}"]
    command = [sys.executable, "-c", f"import sys, runpy; sys.path.insert(0, {str(ROOT)!r}); sys.argv = sys.argv[1:]; "]
    command[-1] += "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [*command, "recipes/select_layers.py", *arguments], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert (
        done.stderr.strip().splitlines()[-1] == "error: select.num_layers is -1, expected at least 0 and at most 65536"
    )
    assert "Traceback" not in done.stderr
