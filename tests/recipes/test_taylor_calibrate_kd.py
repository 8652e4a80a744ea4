"""The pipeline on the embedded teacher: the report, the weights, the export, stages that are not run again, two processes."""

import importlib.util
import json
import shutil
import sys
from itertools import combinations

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from tcal_components.assets import asset_path
from tcal_components.checkpoint.teacher import load_teacher_state_dict
from tcal_components.distill import distill
from tcal_components.export.import_hybrid import import_hybrid
from tcal_components.initialize.initialize import initialize_mixers
from tcal_components.models import hybrid
from tcal_components.pipeline import config as pipeline
from tcal_components.pipeline import finish

RETAINED, CONVERTED = [0, 3], [1, 2, 4, 5]
OUTPUTS = {
    "measure": "statistics.safetensors",
    "initialize": "mixers.safetensors",
    "align": "mixers.safetensors",
    "distill": "student.safetensors",
    "export": "model.safetensors",
}


@pytest.fixture(scope="module")
def whole(run_main, quick_args, tmp_path_factory):
    """Folder of a run of all stages."""
    out = tmp_path_factory.mktemp("whole")
    run_main(quick_args(out))
    return out


@pytest.fixture(scope="module")
def teacher_weights():
    return load_teacher_state_dict(asset_path("quickstart"), dtype=torch.float32)


def report_of(out):
    return json.loads((out / "report.json").read_text())


def numbers(report):
    """What two runs of the same config have in common, whatever the machine did meanwhile."""
    keys = ("teacher", "student", "perplexity", "alignment_error", "tokens", "recovery_curve", "alignment_curve")
    return {key: report[key] for key in keys}


def outputs(out):
    return {stage: load_file(out / stage / name) for stage, name in OUTPUTS.items() if (out / stage / name).is_file()}


def assert_same_outputs(first, second):
    for stage in OUTPUTS:
        a, b = outputs(first)[stage], outputs(second)[stage]
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a), stage


def changed_at(out):
    return {stage: (out / stage / name).stat().st_mtime_ns for stage, name in OUTPUTS.items()}


def test_the_report_keeps_its_contract(whole):
    report = report_of(whole)
    assert report["schema"] == 1 and report["recipe"] == "taylor_calibrate_kd" and report["world_size"] == 1
    assert len(report["config_sha256"]) == 64 and report["versions"]["torchtune"] == "0.6.1"
    assert report["device"].startswith("cpu")
    assert report["teacher"]["family"] == "qwen3" and report["teacher"]["parameters"] == 3_050_688
    assert report["student"]["retained_layers"] == RETAINED and report["student"]["converted_layers"] == CONVERTED
    assert report["student"]["parameters"] == sum(t.numel() for t in outputs(whole)["distill"].values())

    perplexity = report["perplexity"]
    assert set(perplexity) == {"naive", "analytic", "aligned", "distilled"}
    assert report["teacher"]["perplexity"] < perplexity["aligned"] < perplexity["analytic"] < perplexity["naive"]
    # A dozen small steps from a good start say little of the perplexity, and each step's text differs; the loss must fall.
    assert report["teacher"]["perplexity"] < perplexity["distilled"] < perplexity["analytic"]
    losses = logged(whole, "distill/loss")
    assert sum(losses[-4:]) < sum(losses[:4])
    assert set(report["alignment_error"]) == {str(layer) for layer in CONVERTED}
    errors = report["alignment_error"].values()  # a layer that eight steps did not help keeps its start
    assert all(error["last"] <= error["first"] * (1 + 1e-6) for error in errors), errors
    assert sum(error["last"] for error in errors) < 0.99 * sum(error["first"] for error in errors)
    spent = {"calibration": 2048, "alignment": 8 * 4 * 64 + 1024, "distillation": 3072, "generated": 4 * 16 * 32}
    assert report["tokens"] == spent
    assert [row["tokens"] for row in report["recovery_curve"]] == [5120, 5120 + 6 * 256, 5120 + 12 * 256]
    for table in ("seconds", "peak_memory_gib"):
        assert set(report[table]) == {*OUTPUTS, "generate"} and all(value > 0 for value in report[table].values())
    assert all(report["tokens_per_second"][stage] > 0 for stage in OUTPUTS if stage != "export")
    export = report["export"]
    assert export["path"] == str(whole / "export") and export["format"] == "qwen3_5_text" and export["ok"]
    assert export["max_abs_logit_diff"] < 1e-4 * export["reference_logit_max"]
    assert report["stages"] == dict.fromkeys([*OUTPUTS, "generate"], "finished")
    judged = report["distill"]
    assert judged["best_step"] in (0, 6, 12) and judged["heldout_loss"]["best"] <= judged["heldout_loss"]["last"]
    (kept,) = [row for row in report["recovery_curve"] if row["tokens"] == 5120 + 256 * judged["best_step"]]
    assert kept["perplexity"] == pytest.approx(perplexity["distilled"], rel=1e-5)
    text = (whole / "report.md").read_text()
    assert "after distillation" in text and list(whole.glob("*.png")) and (whole / "export" / "README.md").is_file()
    # The lock goes with the recipe, which Python may or may not have collected by now.
    assert {path.name for path in whole.glob("**/.*")} <= {".lock"}, "nothing half written"
    assert not list(whole.glob("*/state")), "a finished stage needs no state"


def test_the_report_says_what_the_student_writes(whole, again, run_main, quick_args, capsys):
    report = report_of(whole)
    row, written = report["generation"]["continuation"], report["continuations"]
    assert row.keys() == {"teacher", "student", "win_or_tie"} and row["teacher"] == 1.0
    assert all(0 <= value <= 1 for value in row.values()) and row["student"] < 1
    assert (written["prompts"], written["new_tokens"]) == (16, 32) and written["models"].keys() == {
        "teacher",
        "student",
    }
    teacher, student = written["models"].values()
    assert teacher["agreement_tokens"] == 32 > student["agreement_tokens"]
    assert teacher["teacher_nll"]["greedy"] < student["teacher_nll"]["greedy"]
    assert "## Continuations of held-out text" in (whole / "report.md").read_text()

    # Other prompts: this part alone is measured again, of the student that lies there.
    run_main(quick_args(again, "generation.prompts=4", "generation.new_tokens=8"))
    changed = report_of(again)
    assert changed["continuations"]["prompts"] == 4 and changed["tokens"]["generated"] == 4 * 4 * 8
    assert numbers({**changed, "tokens": report["tokens"]}) == numbers(report) and changed_at(again) == changed_at(
        whole
    )
    run_main(quick_args(again, "generation=null"))
    assert "generation" not in report_of(again) and "generate" not in report_of(again)["stages"]
    with pytest.raises(SystemExit):
        run_main(quick_args(again, "generation.new_tokens=4000"))
    assert (
        "generation.prompt_tokens and new_tokens are 4032 tokens, but the models' max_seq_len is"
        in capsys.readouterr().err
    )


def test_the_export_is_the_student_and_writes_text(whole):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(whole / "export", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(whole / "export")
    student = hybrid(checkpoint_dir=asset_path("quickstart"), retained_layers=RETAINED, gdn={"conv_size": 4})
    student.load_state_dict(outputs(whole)["distill"])
    tokens = tokenizer("It is a truth universally acknowledged, that a single man", return_tensors="pt").input_ids
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, student.eval()(tokens), rtol=1e-4, atol=1e-3)
    made = model.generate(tokens, max_new_tokens=12, do_sample=False)
    assert made.shape[1] > tokens.shape[1]
    assert tokenizer.decode(made[0, tokens.shape[1] :], skip_special_tokens=True).strip()


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval: pip install '.[test]'")
def test_lm_eval_runs_on_the_exported_model(whole, tune, tmp_path):
    """A local task, teacher and export side by side."""
    args = ["--config", "configs/evaluate.yaml", "evaluate=[lm_eval]", f"output_dir={tmp_path}"]
    args += ["students.aligned=null", f"students.exported.folder={whole / 'export'}"]
    done = tune(tmp_path, "run", "recipes/evaluate_hybrid", *args)
    assert done.returncode == 0, done.stderr[-2000:]
    scores = report_of(tmp_path)["evaluation"]["lm_eval"]
    assert scores.keys() == {"teacher", "exported"}
    assert scores["teacher"]["tcal_local"]["acc"] > 0.5, "chance is 0.25"
    assert 0.0 <= scores["exported"]["tcal_local"]["acc"] <= 1.0
    assert "tcal_local" in (tmp_path / "report.md").read_text()


def test_parts_of_the_text_share_no_document(whole, texts):
    data = report_of(whole)["data"]
    roles = ("calibration", "heldout", "training", "evaluation")
    assert len({data[role]["sha256"] for role in roles}) == 4
    kept = {name: (texts / f"{name}.jsonl").read_text().splitlines() for name in ("calibration", "train", "eval")}
    assert not any(set(kept[a]) & set(kept[b]) for a, b in combinations(kept, 2))


def test_stages_one_after_the_other(whole, run_main, quick_args, teacher_weights, tmp_path):
    """In four runs, each exporting what there is, instead of one."""
    run_main(quick_args(tmp_path, "stages=[measure]"))
    report = report_of(tmp_path)
    assert report["perplexity"] == dict.fromkeys(("naive", "analytic", "aligned", "distilled"))
    assert report["stages"] == {"measure": "finished"} and report["tokens"]["calibration"] == 2048

    mixers = {name for name in teacher_weights for layer in CONVERTED if name.startswith(f"layers.{layer}.attn.")}
    for stage in ("initialize", "align"):
        run_main(quick_args(tmp_path, f"stages=[{stage},export]"))
        exported = import_hybrid(tmp_path / "export", dtype=torch.float32)
        assert exported.retained_layers == tuple(RETAINED)
        for name, weight in teacher_weights.items():
            if name not in mixers:
                assert torch.equal(exported.state_dict[name], weight), f"{name} after {stage}"
        for name, weight in outputs(tmp_path)[stage].items():
            assert torch.equal(exported.state_dict[name], weight), f"{name} after {stage}"
    assert report_of(tmp_path)["perplexity"]["distilled"] is None

    run_main(quick_args(tmp_path, "stages=[distill,export]"))
    assert numbers(report_of(tmp_path)) == numbers(report_of(whole))
    assert_same_outputs(tmp_path, whole)


def test_naive_is_the_plain_copy_on_the_same_layers(whole, run_main, quick_args, tmp_path):
    run_main(quick_args(tmp_path, "stages=[measure,initialize]", "initialize.strategy=naive"))
    perplexity = report_of(tmp_path)["perplexity"]
    assert perplexity["naive"] == perplexity["analytic"] == report_of(whole)["perplexity"]["naive"]


@pytest.fixture
def again(whole, tmp_path):
    """A copy of the run's folder with the times of its files."""
    return shutil.copytree(whole, tmp_path / "again")


def test_finished_stages_are_not_run_again(again, run_main, quick_args):
    before, report = changed_at(again), report_of(again)
    run_main(quick_args(again))
    # The path of the copy is in the report alone.
    assert changed_at(again) == before and report_of(again)["seconds"] == report["seconds"]
    assert numbers(report_of(again)) == numbers(report)

    run_main(quick_args(again, "align.steps=4", "distill.tokens=512", "distill.eval_every_steps=1"))
    after, second = changed_at(again), report_of(again)
    assert [stage for stage in OUTPUTS if after[stage] != before[stage]] == ["align", "distill", "export"]
    assert second["perplexity"]["analytic"] == report["perplexity"]["analytic"]
    assert second["perplexity"]["aligned"] != report["perplexity"]["aligned"]
    spent = {"calibration": 2048, "alignment": 4 * 4 * 64 + 1024, "distillation": 512, "generated": 4 * 16 * 32}
    assert second["tokens"] == spent
    assert [row["tokens"] for row in second["recovery_curve"]] == [4096, 4352, 4608]


def test_a_run_says_what_is_outdated_and_why(again, run_main, quick_args, caplog):
    """Also of stages that it does not run; the exported folder says so itself, until it is made anew."""

    def said(*changes):
        caplog.clear()
        with caplog.at_level("INFO"):
            run_main(quick_args(again, *changes))
        return [line for line in caplog.messages if "because of" in line]

    assert said() == []
    card = again / "export" / "README.md"
    before = card.read_text()
    assert said("stages=[measure,initialize,align]", "align.steps=4", "distill.tokens=512") == [
        "align: made anew, because of align.steps 8 -> 4",
        f"distill: what is in {again}/distill/student.safetensors is outdated, because of align, distill.tokens 3072 -> 512",
        f"export: what is in {again}/export is outdated, because of align, distill",
        "generate: made anew, because of align, distill",
    ]
    first, _, *rest = card.read_text().split("\n")
    assert first.startswith("> **Outdated:**") and "because" not in first and rest == before.split("\n")
    assert said("validation_dataset.max_tokens=1024", "align.steps=4", "distill.tokens=512") == [
        "generate: made anew, because of align, distill, validation_dataset"
    ], "of what was made from the alignment before this one, no result is left"
    assert "Outdated" not in card.read_text()
    assert said("align.steps=4", "distill.tokens=512", "stages=[measure]")[:1] == [
        f"export: what is in {again}/export is outdated, because of validation_dataset"
    ]


def test_an_output_of_other_settings_is_not_used(again, run_main, quick_args, capsys):
    for stages, change, said in (
        ("distill,export", "align.lr=1.0e-3", "the output of align in"),
        ("export", "distill.lr=1.0e-3", "the output of distill in"),
        ("align", "seed=1", "the output of initialize is not in"),
    ):
        with pytest.raises(SystemExit):
            run_main(quick_args(again, f"stages=[{stages}]", change))
        assert said in capsys.readouterr().err


def test_another_evaluation_text_gives_new_numbers(again, run_main, quick_args):
    """Finished stages are measured again, not run again."""
    before, files = report_of(again), changed_at(again)
    run_main(quick_args(again, "validation_dataset.max_tokens=1024"))
    after, curve = report_of(again), report_of(again)["recovery_curve"]
    for name, value in before["perplexity"].items():
        assert after["perplexity"][name] not in (None, value)
    assert [stage for stage in OUTPUTS if changed_at(again)[stage] != files[stage]] == ["export"], "with its model card"
    assert after["alignment_error"] == before["alignment_error"] and after["tokens"] == before["tokens"]
    first, *_, last = (row["tokens"] for row in before["recovery_curve"])
    assert curve == [
        {"tokens": first, "perplexity": after["perplexity"]["aligned"]},
        {"tokens": last, "perplexity": after["perplexity"]["distilled"]},
    ]
    run_main(quick_args(again, "stages=[measure]"))
    assert report_of(again)["perplexity"] == pytest.approx(before["perplexity"], rel=1e-6)

    # A stage whose output is of other settings is run again, on the new text.
    run_main(quick_args(again, "validation_dataset.max_tokens=1024", "distill.tokens=512"))
    assert report_of(again)["perplexity"]["aligned"] == pytest.approx(after["perplexity"]["aligned"], rel=1e-6)
    assert [row["tokens"] for row in report_of(again)["recovery_curve"]] == [first, first + 512]


def test_a_run_without_alignment(run_main, quick_args, tmp_path):
    """What the ablation of the whole pipeline needs: distillation from the analytic start."""
    stages = "stages=[measure,initialize,distill]"
    run_main(quick_args(tmp_path, stages, "distill.tokens=512", "distill.eval_every_steps=null"))
    report = report_of(tmp_path)
    assert report["perplexity"]["aligned"] is None and report["perplexity"]["distilled"] is not None
    assert report["recovery_curve"][0] == {"tokens": 2048, "perplexity": report["perplexity"]["analytic"]}


def test_what_is_made_anew_takes_nothing_from_an_earlier_run(again, run_main, quick_args):
    """Other layers, without alignment, in the folder of a whole run."""
    stages = "stages=[measure,initialize,distill]"
    short = ("distill.tokens=512", "distill.eval_every_steps=null", "retain.layers=[0]")
    run_main(quick_args(again, stages, *short))
    report, files = report_of(again), changed_at(again)
    assert report["perplexity"]["aligned"] is None and report["alignment_error"] == {}
    assert report["export"]["path"] is None and set(report["stages"]) == {
        "measure",
        "initialize",
        "distill",
        "generate",
    }
    assert report["recovery_curve"][0] == {"tokens": 2048, "perplexity": report["perplexity"]["analytic"]}
    assert not (again / "distill" / "state").exists(), "a finished stage needs no state"

    run_main(quick_args(again, stages, *short, "dataset.max_tokens=4096"))
    changed = changed_at(again)
    assert [stage for stage in OUTPUTS if changed.get(stage) != files.get(stage)] == ["distill"]


def test_distillation_needs_its_section_alone(run_main, quick_args, tmp_path):
    run_main(
        [arg for arg in quick_args(tmp_path, "stages=[measure]") if not arg.startswith("distill.")] + ["distill=null"]
    )
    assert report_of(tmp_path)["stages"] == {"measure": "finished"}


def test_two_processes_give_the_same_numbers(whole, tune, quick_args, tmp_path):
    _, config, *changes = quick_args(tmp_path / "out")
    result = tune(tmp_path, "run", "--nproc_per_node", 2, "recipes/taylor_calibrate_kd", "--config", config, *changes)
    assert result.returncode == 0, result.stderr[-3000:]
    one, two = report_of(whole), report_of(tmp_path / "out")
    assert two["world_size"] == 2 and two["stages"] == one["stages"] and two["tokens"] == one["tokens"]
    assert two["teacher"]["perplexity"] == pytest.approx(one["teacher"]["perplexity"], rel=1e-5)
    for name, value in one["perplexity"].items():
        assert two["perplexity"][name] == pytest.approx(value, rel=1e-4), name
    for layer, error in one["alignment_error"].items():
        other = two["alignment_error"][layer]
        assert other.keys() == error.keys()
        for name, value in error.items():  # None where no polish helped
            assert other[name] == (value if value is None else pytest.approx(value, rel=1e-5)), (layer, name)
    assert two["distill"]["best_step"] == one["distill"]["best_step"]
    # One token that rounding chose otherwise changes all that follow it: a few may.
    assert two["generation"]["continuation"] == pytest.approx(one["generation"]["continuation"], abs=0.15)
    teachers = [report["continuations"]["models"]["teacher"]["teacher_nll"]["greedy"] for report in (one, two)]
    assert teachers[1] == pytest.approx(teachers[0], rel=0.02)
    losses = [logged(out, "distill/loss") for out in (whole, tmp_path / "out")]
    assert len(losses[0]) == 12 and losses[1] == pytest.approx(losses[0], rel=1e-4)
    first, second = (load_file(out / "measure" / "statistics.safetensors") for out in (whole, tmp_path / "out"))
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-6, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def logged(out, name):
    """A metric's values in the log of the run."""
    text = "".join(path.read_text() for path in sorted((out / "logs").iterdir()))
    return [float(part.split(":", 1)[1]) for part in text.split() if part.startswith(f"{name}:")]


def test_initialisation_trains_nothing(whole, load_recipe, quick_args, tmp_path):
    """The stage's weights are a function of teacher and text: calling it directly gives them again."""
    module = load_recipe("taylor_calibrate_kd")
    _, config, *changes = quick_args(tmp_path)
    recipe = module.TaylorCalibrateKD(OmegaConf.merge(OmegaConf.load(config), OmegaConf.from_dotlist(changes)))
    bench = recipe.bench
    with torch.no_grad():
        naive = initialize_mixers(
            "naive",
            teacher=recipe.models.teacher,
            layers=bench.converted,
            gdn_spec=bench.gdn,
            statistics=None,
            batches=[],
        )
    assert bench.perplexity(recipe.models.teacher, naive.weights) == report_of(whole)["perplexity"]["naive"]


def test_the_loop_in_the_recipe_is_that_of_the_components(again, load_recipe, quick_args):
    """Weights and losses bit for bit: the ablation distils with the one, the pipeline with the other."""
    module, want, losses = load_recipe("taylor_calibrate_kd"), outputs(again)["distill"], logged(again, "distill/loss")
    _, config, *changes = quick_args(again)
    recipe = module.TaylorCalibrateKD(OmegaConf.merge(OmegaConf.load(config), OmegaConf.from_dotlist(changes)))
    bench, settings = recipe.bench, recipe.config.distill
    student, _ = recipe.models.student(recipe.models.student_weights("align"))
    result = distill(
        student,
        recipe.models.teacher,
        bench.stream(bench.data["training"], settings.batch_size, seed=bench.seed + 1),
        config=settings,
        ctx=bench.ctx,
        loss=recipe.config.loss,
        heldout=lambda: bench.calibration_batches(settings.batch_size, "heldout"),
        progress=False,
    )
    assert [row["loss"] for row in result.curve] == losses
    assert all(torch.equal(value, want[name]) for name, value in student.state_dict().items())


def test_a_copied_recipe_has_its_loop(tune, tmp_path):
    assert tune(tmp_path, "cp", "recipes/taylor_calibrate_kd", "my.py").returncode == 0
    text = (tmp_path / "my.py").read_text()
    for part in ("while trainer.step < config.steps", "model(**micro)", ".backward()", "optimizer.step()"):
        assert part in text, part


def test_an_engine_is_asked_for_the_exported_folder(run_main, load_recipe, quick_args, tmp_path, monkeypatch):
    """What is given to it, and where its numbers go; the engine itself: tests/serving."""
    asked = {}

    def check(folder, tokens, windows, **where):
        asked.update(where, files={path.name for path in folder.iterdir()}, tokens=tokens, windows=windows)
        return {
            "version": "1",
            "max_abs_logit_diff": 0.5,
            "reference_logit_max": 9.0,
            "perplexity": {"student": 3.0, "f16": 3.1},
        }

    monkeypatch.setattr(pipeline, "find_engine", lambda source, python: f"of {source}")
    monkeypatch.setattr(finish, "check_llama_cpp", check)
    stages = "stages=[measure,initialize,export]"
    run_main(quick_args(tmp_path, stages, "export.check=[transformers,llama_cpp]", "export.llama_cpp_source=there"))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= asked["files"]
    assert len(asked["tokens"]) == 32 and asked["windows"].shape == (8, 64)
    assert asked["source"] == "there" and asked["python"] == sys.executable
    report = report_of(tmp_path)
    assert report["serving"]["llama_cpp"]["perplexity"] == {"student": 3.0, "f16": 3.1}
    assert report["export"]["ok"]
    assert "llama.cpp 1" in (tmp_path / "export" / "README.md").read_text()
    # The place of the engine is no part of what is exported.
    asked.clear()
    run_main(quick_args(tmp_path, stages, "export.check=[transformers,llama_cpp]", "export.llama_cpp_source=moved"))
    assert not asked and report_of(tmp_path)["serving"] == report["serving"]
