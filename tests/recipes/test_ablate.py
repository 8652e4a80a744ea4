import dataclasses
import gc
import json
import weakref
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tcal_components.ablation import recovery
from tcal_components.ablation.comparison import lower_envelope
from tcal_components.align.config import AlignConfig
from tcal_components.config import ConfigError, section
from tcal_components.distributed import ParallelContext
from tcal_components.setup import processes

SMALL = [
    "starts=[naive,{name: mine, strategy: taylor, pull: 1.0}]",
    "alignments.published.steps=2",
    "alignments.published.seq_len=64",
    "alignments.published.eval_every=1",
    "ablate.batch_size=4",
    "ablate.after_steps=2",
    "ablate.target_steps=[2,4]",
    "recovery.starts=[naive/none,mine/ours]",
    "recovery.tokens=512",
    "recovery.batch_size=2",
    "recovery.warmup_steps=1",
    "recovery.eval_every_tokens=256",
    "recovery.save_every_tokens=128",
    "recovery.lr=[1.0e-3,3.0e-3]",
]
TWO_ALIGNMENTS = "alignments={none: null, ours: {steps: 4, batch_size: 2, seq_len: 64, eval_every: 2}}"


@pytest.fixture
def module(load_recipe):
    return load_recipe("ablate_initialization")


@pytest.fixture
def run(module, small_config, tmp_path):
    def run(*changes, output=tmp_path / "out"):
        cfg = small_config("ablate_quickstart", "seed=0", output=output)
        module.AblateInitialization(_changed(cfg, [*SMALL, *changes])).run()
        return json.loads((output / "report.json").read_text())

    return run


def _changed(cfg, changes):
    for change in changes:
        key, value = change.split("=", 1)
        OmegaConf.update(cfg, key, OmegaConf.create(f"value: {value}").value, merge=False)
    return cfg


def _numbers(report):
    """What two runs with the same numbers have in common."""
    cells = [
        {key: cell[key] for key in ("perplexity", "curve", "error_by_layer", "tokens")}
        for cell in report["ablation"]["cells"]
    ]
    return {"cells": cells, "curves": report["recovery_curve"], "teacher": report["teacher"]["perplexity"]}


def test_the_table_and_the_recovery(run, tmp_path):
    report = run("ablate.seeds=[0,1]")
    assert report["schema"] == 1 and report["recipe"] == "ablate_initialization"
    cells = {(c["start"], c["alignment"], c["seed"]): c for c in report["ablation"]["cells"]}
    assert set(cells) == {(s, a, n) for s in ("naive", "mine") for a in ("none", "published", "ours") for n in (0, 1)}
    assert cells["naive", "none", 0]["tokens"] == {"calibration": 0, "alignment": 0}
    assert cells["mine", "published", 0]["tokens"] == {"calibration": 512, "alignment": 2 * 4 * 64}
    assert cells["mine", "ours", 0]["tokens"] == {"calibration": 512, "alignment": 4 * 2 * 64}
    for start in ("naive", "mine"):
        first = {cells[start, alignment, 0]["curve"][0][1] for alignment in ("none", "published", "ours")}
        assert max(first) == pytest.approx(min(first), rel=1e-4), (
            "every alignment of a start begins at the same weights"
        )
        ours = cells[start, "ours", 0]
        assert ours["error_last"] <= ours["curve"][0][1] and [step for step, _ in ours["curve"]] == [0, 2, 4]
    assert cells["naive", "none", 0]["perplexity"] != cells["naive", "none", 1]["perplexity"]

    rows = {(row["start"], row["alignment"]): row for row in report["ablation"]["rows"]}
    assert rows["naive", "ours"]["steps_to"]["4"]["mean"] == pytest.approx(4, abs=1e-6)
    assert rows["naive", "ours"]["perplexity"]["of"] == 2

    recovery = report["recovery"]["starts"]
    assert set(recovery) == {"naive/none", "mine/ours"} and all(len(start["runs"]) == 2 for start in recovery.values())
    spent = recovery["mine/ours"]["tokens_before"]
    assert spent == 512 + 512 and recovery["naive/none"]["tokens_before"] == 0
    best = recovery["mine/ours"]["best"]
    assert [row["tokens"] for row in best["curve"]] == [spent, spent + 128, spent + 256, spent + 512], "early ones too"
    assert best["curve"][0]["perplexity"] == cells["mine", "ours", 0]["perplexity"]
    assert best["curve"][-1]["perplexity"] == min(r["curve"][-1]["perplexity"] for r in recovery["mine/ours"]["runs"])
    assert report["recovery_curve"]["mine/ours"] == lower_envelope(recovery["mine/ours"]["runs"])

    out = tmp_path / "out"
    text = (out / "report.md").read_text()
    assert "| mine | published |" in text and "| mine/ours |" in text and "![Ablation](ablation.png)" in text
    assert (out / "ablation.png").stat().st_size > 10_000 and (out / "recovery.png").is_file()
    assert not list(out.glob("**/*.state")), "states of finished work are removed"


def test_the_grid_has_lengths_and_batch_sizes(run, tmp_path):
    changes = [TWO_ALIGNMENTS, "recovery.lr=[1.0e-3]", "recovery.baseline=mine/ours"]
    changes += ["recovery.tokens=[256,512]", "recovery.batch_size=[1,4]", "recovery.micro_batch_size=2"]
    changes += ["recovery.ratios=[1000.0,0.001]", "recovery.save_every_tokens=null"]
    report = run(*changes)
    recovery = report["recovery"]
    assert recovery["baseline"] == "mine/ours"
    for name, start in recovery["starts"].items():
        spent, grid = start["tokens_before"], {(r["tokens"], r["batch_size"]): r for r in start["runs"]}
        assert set(grid) == {(256, 1), (256, 4), (512, 1), (512, 4)}
        assert all((r["lr"], r["base_lr"]) == (1e-3, 1e-4) for r in start["runs"])
        measured = {key: [row["tokens"] - spent for row in r["curve"]] for key, r in grid.items()}
        assert measured[512, 1] == [0, 64, 128, 256, 512], "a half, a quarter, then every 256 tokens"
        assert measured[512, 4] == [0, 256, 512] and measured[256, 4] == [0, 256]
        files = {path.name for path in (tmp_path / "out" / "recovery").glob(f"{name.replace('/', '.')}.*.json")}
        assert files == {f"{name.replace('/', '.')}.0.001.0.0001.{n}.{b}.json" for n, b in grid}
        assert start["tokens_to_run"]["0.001"] is start["tokens_to"]["0.001"] is start["fewer_than"]["0.001"] is None
        assert start["tokens_to"]["1000"] == spent, "it begins there"
        assert set(start["tokens_to_run"]["1000"]) == {"lr", "base_lr", "tokens", "batch_size"}
        assert report["recovery_curve"][name] == lower_envelope(start["runs"])
    assert recovery["starts"]["mine/ours"]["fewer_than"]["1000"] == 1.0
    assert recovery["starts"]["naive/none"]["fewer_than"]["1000"] is None, "no token was spent"
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| fewer tokens than mine/ours | to 1000x | to 0.001x |" in text and "| mine/ours | 1x | - |" in text
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "recovery").glob("*.json")}
    changed = run(*[c for c in changes if "batch_size=[" not in c], "recovery.batch_size=[4,2]")
    assert {r["batch_size"] for r in changed["recovery"]["starts"]["naive/none"]["runs"]} == {1, 2, 4}, (
        "an earlier grid counts too"
    )
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items()), "what is there is not made again"


def test_a_start_may_have_a_grid_of_its_own(run):
    grids = "recovery.grids={naive/none: {tokens: [256, 512], lr: [3.0e-3]}}"
    starts = run(TWO_ALIGNMENTS, "recovery.lr=[1.0e-3]", "recovery.tokens=256", grids)["recovery"]["starts"]
    points = {name: {(r["lr"], r["tokens"]) for r in start["runs"]} for name, start in starts.items()}
    assert points == {"naive/none": {(3e-3, 256), (3e-3, 512)}, "mine/ours": {(1e-3, 256)}}


def test_a_run_that_diverges_is_noted(run, module, monkeypatch):
    original = recovery.distill

    def distill(*args, config, **kwargs):
        if config.batch_size == 2:
            raise recovery.NonFiniteLossError("loss nan")
        return original(*args, config=config, **kwargs)

    monkeypatch.setattr(recovery, "distill", distill)
    changes = [TWO_ALIGNMENTS, "recovery.starts=[naive/none]", "recovery.lr=[1.0e-3]"]
    report = run(*changes, "recovery.batch_size=[2,4]")
    start = report["recovery"]["starts"]["naive/none"]
    assert [(r["finished"], len(r["curve"])) for r in start["runs"]] == [(False, 1), (True, 3)]
    assert start["best"]["batch_size"] == 4 and start["runs"][0]["note"] == "loss nan"


def test_students_of_earlier_runs_are_gone(run, monkeypatch):
    """Also after a run that diverged, and where the student is a cycle, as under FSDP2."""
    original, student_of, made, alive = recovery.distill, recovery.Recovery._student, [], []

    def build(self, mixers):
        alive.append(sum(student() is not None for student in made))
        student = student_of(self, mixers)
        object.__setattr__(student, "itself", student)
        made.append(weakref.ref(student))
        return student

    def distill(*args, config, **kwargs):
        if config.batch_size == 2:
            raise recovery.NonFiniteLossError("loss nan")
        return original(*args, config=config, **kwargs)

    monkeypatch.setattr(recovery.Recovery, "_student", build)
    monkeypatch.setattr(recovery, "distill", distill)
    gc.disable()
    try:
        changes = [TWO_ALIGNMENTS, "recovery.starts=[naive/none]", "recovery.lr=[1.0e-3]"]
        run(*changes, "recovery.batch_size=[2,4,8]")
    finally:
        gc.enable()
    assert alive == [0, 0, 0]


def test_a_batch_that_the_processes_cannot_share(module, small_config, monkeypatch):
    create = ParallelContext.create
    two = lambda *args, **options: dataclasses.replace(create(*args, **options), world_size=2)
    monkeypatch.setattr(ParallelContext, "create", two)
    monkeypatch.setattr(processes, "Watch", lambda limit: None)  # there is one process
    cfg = _changed(small_config("ablate_quickstart"), [*SMALL, "alignments.published.batch_size=3"])
    with pytest.raises(
        ConfigError, match="^alignments.published.batch_size is 3, expected a multiple of the 2 processes"
    ):
        module.AblateInitialization(cfg)


def test_intervals_in_tokens_are_at_least_one_step(module, small_config):
    changes = ["recovery.tokens=4096", "recovery.batch_size=[2,3,16]", "recovery.save_every_tokens=1000"]
    grid = module.AblateInitialization(_changed(small_config("ablate_quickstart"), [*SMALL, *changes])).recovery.grids[
        "naive/none"
    ][:3]
    assert [(c.batch_size, c.eval_every_steps, c.save_every_steps) for c in grid] == [(2, 2, 8), (3, 1, 5), (16, 1, 1)]
    evaluated = [step for step in range(1, 50) if recovery._is_evaluated(step, 16)]
    assert evaluated == [2, 4, 8, 16, 32, 48]


def test_an_interrupted_run_continues_to_the_same_numbers(run, module, monkeypatch, tmp_path):
    less = "recovery.lr=[1.0e-3]"
    whole = run(less, output=tmp_path / "whole")
    made, original = [], module.AblateInitialization.align

    def align(self, start, alignment, *rest):
        made.append((start, alignment))
        if len(made) == 5:
            raise KeyboardInterrupt
        return original(self, start, alignment, *rest)

    monkeypatch.setattr(module.AblateInitialization, "align", align)
    with pytest.raises(KeyboardInterrupt):
        run(less)
    partial = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {row["start"] for row in partial["ablation"]["rows"]} == {"naive"}, "the table so far is there"

    evaluated, perplexity = [], module.Workbench.perplexity

    def stop_in_the_second_distillation(self, model, weights=None, label=""):
        evaluated.append(label)
        if evaluated.count("step 4") == 2:
            raise KeyboardInterrupt
        return perplexity(self, model, weights, label)

    monkeypatch.setattr(module.Workbench, "perplexity", stop_in_the_second_distillation)
    with pytest.raises(KeyboardInterrupt):
        run(less)
    assert made[4:] == [("mine", "published"), ("mine", "published"), ("mine", "ours")], "only what was missing"
    monkeypatch.setattr(module.Workbench, "perplexity", perplexity)
    assert _numbers(run(less)) == _numbers(whole)


def test_the_config_of_smollm2_compares_at_the_same_number_of_tokens():
    cfg = OmegaConf.load(Path(__file__).resolve().parents[2] / "configs" / "ablate_smollm2.yaml")
    alignments = {
        name: section(AlignConfig, value, name) for name, value in cfg.alignments.items() if value is not None
    }
    tokens = {name: (a.steps + a.refit_steps) * a.batch_size * a.seq_len for name, a in alignments.items()}
    assert tokens["published"] == tokens["same_tokens"] == 300 * 4 * 256
    assert alignments["ours"] == section(AlignConfig, cfg.align, "align")
    assert tokens["ours"] <= 1_000_000 and alignments["published"].text_tokens == 4 * 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("starts=[naive,best]", "starts.1..strategy is 'best'; allowed: naive"),
        ("starts=[naive,naive]", "starts has 'naive' twice"),
        ("starts=[naive,{name: a/b, strategy: taylor}]", "starts has the name 'a/b'"),
        ("alignments=null", "alignments is missing"),
        ("alignments.ours={step: 4}", "unknown key 'step' in alignments.ours .did you mean 'steps'"),
        (
            "alignments.published.seq_len=512",
            "^alignments.published.seq_len is 512, but teacher_model.max_seq_len is 256",
        ),
        ("ablate.batch_size=0", "^ablate.batch_size is 0, expected at least 1"),
        ("ablate.query_block=0", "^ablate.query_block is 0, expected at least 1"),
        ("save_every=0", "^save_every is 0, expected at least 1"),
        ("ablate.seeds=[]", "ablate.seeds is .., expected at least 1"),
        ("ablate.target_steps=[400]", "ablate.target_steps has 400, but alignments.ours has 4 steps"),
        ("ablate.target_alignment=none", "ablate.target_start 'naive' with target_alignment 'none' is no cell"),
        ("recovery.starts=[naive/our]", "unknown key 'naive/our' in recovery.starts .did you mean 'naive/ours'"),
        ("recovery.lr=[]", "recovery.lr is .., expected at least 1"),
        ("recovery.batch_size=[]", "recovery.batch_size is .., expected at least 1"),
        ("recovery.tokens=[512,10]", "^recovery.tokens is 10, expected at least one step: batch_size 2 x seq_len 64"),
        ("recovery.tokens=[0]", "recovery.tokens.0. is 0, expected at least 1"),
        ("recovery.tokens=[1.5]", "recovery.tokens.0. is 1.5, expected int"),
        ("recovery.batch_size=[2,0]", "recovery.batch_size.1. is 0, expected at least 1"),
        (
            "recovery.batch_size=[2,16]",
            "recovery.tokens is 512, expected at least one step: batch_size 16 x seq_len 64",
        ),
        ("recovery.micro_batch_size=0", "^recovery.micro_batch_size is 0, expected at least 1"),
        ("recovery.eval_every_tokens=0", "recovery.eval_every_tokens is 0, expected at least 1"),
        ("recovery.eval_every_tokens=null", "recovery.eval_every_tokens is None, expected int"),
        ("recovery.save_every_tokens=-5", "recovery.save_every_tokens is -5, expected at least 1"),
        ("recovery.eval_every_steps=4", "unknown key 'eval_every_steps' in recovery"),
        (
            "recovery.grids={naive/our: {tokens: 512}}",
            "unknown key 'naive/our' in recovery.grids .did you mean 'naive/ours'",
        ),
        ("recovery.grids={naive/none: {token: 512}}", "unknown key 'token' in recovery.grids.naive/none"),
        ("recovery.grids={naive/none: {lr: []}}", "^recovery.grids.naive/none.lr is .., expected at least 1"),
        ("recovery.grids={naive/none: {tokens: 0}}", "^recovery.grids.naive/none.tokens is 0, expected"),
        ("recovery.starts=[]", "recovery.starts is .., expected at least 1"),
        ("recovery.lr=[-1.0]", "^recovery.lr.0. is -1.0, expected at least 0"),
        (
            "recovery.baseline=taylor/ours",
            "recovery.baseline is 'taylor/ours', expected one of recovery.starts: naive/none",
        ),
    ],
)
def test_mistakes_are_found_before_the_teacher_is_read(module, small_config, change, message):
    with pytest.raises(ValueError, match=message):
        module.AblateInitialization(_changed(small_config("ablate_quickstart"), [*SMALL, change]))
