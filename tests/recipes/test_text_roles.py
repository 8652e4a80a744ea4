"""Which text goes where: every part of the text has token ids of its own, and all that enters a model is watched."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tcal_components.checkpoint.teacher import load_teacher_state_dict
from tcal_components.data import hf_tokenizer, packed_text, prepare_batch
from tcal_components.measure.statistics import Statistics
from tcal_components.models import hybrid, teacher

ROOT = Path(__file__).resolve().parents[2]
FIRST_ID = {"calibration": 100, "heldout": 500, "training": 900, "evaluation": 1300}
IDS = 400  # a part
REPEATS = {"calibration": 1, "heldout": 3, "training": 2, "evaluation": 4}  # of an id in a row: losses differ plainly
DOCUMENT, SEQ_LEN, TOKENS, HELDOUT = 48, 64, 512, 256
RETAINED, CONVERTED = [0, 3], [1, 2]
SOURCES = {"calibration": "calibration", "heldout": "calibration", "training": "train", "evaluation": "eval"}


class Reads:
    """What enters the embeddings of any model meanwhile, and what of it weights are trained on.

    Attributes:
        rows: sequences by part of the text; those of less than 8 tokens, as a cached decoding has them, do not count.
        trained: the same of those after which something with trainable weights ran with gradients enabled.
    """

    def __init__(self):
        self.rows, self.trained, self._last = Counter(), Counter(), None

    def __enter__(self):
        self._hook = torch.nn.modules.module.register_module_forward_hook(self._look)
        return self

    def __exit__(self, *_):
        self._hook.remove()

    def _look(self, module, args, output):
        if isinstance(module, torch.nn.Embedding):
            ids = args[0].detach().reshape(-1, args[0].shape[-1])
            self._last = Counter(self._part(row) for row in ids.tolist() if len(row) >= 8)
            self.rows += self._last
        if self._last and torch.is_grad_enabled() and any(weight.requires_grad for weight in module.parameters()):
            self.trained += self._last
            self._last = None

    @staticmethod
    def _part(row):
        """By the first id that is of any: a greedy continuation may be of others."""
        return next((part for i in row for part, first in FIRST_ID.items() if first <= i < first + IDS), "none")


@pytest.fixture(scope="module")
def own_ids(tmp_path_factory, random_teacher):
    """Folder of token arrays: documents of random ids, each of one part's ids; the held-out ones follow the calibration's."""
    folder, end = tmp_path_factory.mktemp("own_ids"), hf_tokenizer(random_teacher).eos_id
    random = np.random.default_rng(0)

    def documents(part, count):
        ids = random.integers(FIRST_ID[part], FIRST_ID[part] + IDS, (count, DOCUMENT // REPEATS[part]))
        ids = ids.repeat(REPEATS[part], axis=1)
        ids[:, -1] = end
        return ids.reshape(-1)

    calibration = -(-TOKENS // DOCUMENT)  # whole documents
    np.save(
        folder / "calibration.npy", np.concatenate([documents("calibration", calibration), documents("heldout", 8)])
    )
    np.save(folder / "train.npy", documents("training", 50))
    np.save(folder / "eval.npy", documents("evaluation", 16))
    return folder


@pytest.fixture(scope="module")
def recipe(load_recipe, own_ids, random_teacher):
    """Runs a recipe in this process with a config of the repository on these texts; returns report and reads."""

    def run(name, config, output, *changes):
        args = [f"output_dir={output}", f"tokenizer.path={random_teacher}"]
        if name != "evaluate_hybrid":
            args += [f"teacher_checkpointer.checkpoint_dir={random_teacher}"]
            for key, source in (("calibration_dataset", "calibration"), ("dataset", "train")):
                args += [
                    f"{key}.source={own_ids / source}.npy",
                    f"{key}.seq_len={SEQ_LEN}",
                    f"{key}.max_tokens={TOKENS}",
                ]
            args += ["dataset.max_tokens=2048", "align.steps=4", "align.batch_size=2", f"align.seq_len={SEQ_LEN}"]
            args += ["align.eval_every=2", "align.heldout_batches=2"]
        args += [f"validation_dataset.source={own_ids}/eval.npy", f"validation_dataset.seq_len={SEQ_LEN}"]
        args += [f"validation_dataset.max_tokens={TOKENS}"]
        before, sys.argv = sys.argv, [name, "--config", str(ROOT / "configs" / f"{config}.yaml"), *args, *changes]
        try:
            with Reads() as reads, pytest.raises(SystemExit) as end:
                load_recipe(name).recipe_main()
            assert not end.value.code
        finally:
            sys.argv = before
        return json.loads((output / "report.json").read_text()), reads

    return run


@pytest.fixture(scope="module")
def texts(own_ids, random_teacher):
    """Each part of the text as one prepared batch."""
    found, tokenizer = {}, hf_tokenizer(random_teacher)
    for part, source in SOURCES.items():
        skip, limit = (TOKENS, HELDOUT) if part == "heldout" else (0, 2048 if part == "training" else TOKENS)
        text = packed_text(
            tokenizer, source=str(own_ids / f"{source}.npy"), seq_len=SEQ_LEN, skip_tokens=skip, max_tokens=limit
        )
        assert text.num_tokens == limit
        found[part] = prepare_batch({name: torch.stack([row[name] for row in text]) for name in text[0]}, "cpu")
    return found


@pytest.fixture(scope="module")
def on_each(texts):
    """A measurement of some models on each part of the text."""
    return lambda measure, *models: {part: measure(*models, batch) for part, batch in texts.items()}


@pytest.fixture(scope="module")
def weights(random_teacher):
    return load_teacher_state_dict(random_teacher, dtype=torch.float32)


@pytest.fixture(scope="module")
def teacher_model(random_teacher, weights):
    model = teacher(checkpoint_dir=random_teacher)
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def student(random_teacher, weights):
    """A student from the teacher's weights and the file of a stage, which has mixers or everything."""

    def build(path, retained=RETAINED):
        model = hybrid(checkpoint_dir=random_teacher, retained_layers=list(retained), gdn={"conv_size": 4})
        made = load_file(path)
        if "tok_embeddings.weight" not in made:  # mixers, perhaps of retained layers too
            made = {name: value for name, value in made.items() if int(name.split(".")[1]) not in retained}
        known = model.state_dict()
        model.load_state_dict({name: value for name, value in {**weights, **made}.items() if name in known})
        return model.eval().requires_grad_(False)

    return build


@torch.no_grad()
def logits_of(model, batch):
    """Of the counted tokens, and their labels."""
    counted = batch["labels"] != -100
    logits = model(batch["tokens"], mask=batch["mask"], input_pos=batch["input_pos"]).float()
    return logits[counted], batch["labels"][counted]


def loss_of(model, batch):
    return float(torch.nn.functional.cross_entropy(*logits_of(model, batch)))


def perplexity_of(model, batch):
    return float(np.exp(loss_of(model, batch)))


@torch.no_grad()
def errors_of(teacher_model, model, batch):
    """Of each converted layer on the teacher's inputs: |student - y|^2 / |y|^2."""
    seen, hooks = {}, []
    for layer in model.converted_layers:
        hook = lambda module, args, kwargs, y, layer=layer: seen.update({layer: (args[0], y)})
        hooks.append(teacher_model.layers[layer].attn.register_forward_hook(hook, with_kwargs=True))
    logits_of(teacher_model, batch)
    for hook in hooks:
        hook.remove()
    found = {}
    for layer, (x, y) in seen.items():
        error = model.layers[layer].attn(x, input_pos=batch["input_pos"]) - y
        found[str(layer)] = float(error.square().sum() / y.square().sum())
    return found


def only_of(part, measured, reported):
    """What is reported (a number, or one a layer) is what was measured on this part, and no other part gives it."""
    assert reported == pytest.approx(measured[part], rel=1e-4), f"not of {part}: {measured}"
    for other in measured.keys() - {part}:
        assert reported != pytest.approx(measured[other], rel=1e-3), f"{other} gives the same, so nothing was shown"


STAGES = {  # by stage, what it reads (besides the evaluation text of the teacher's perplexity), and what it trains on
    "measure": ({"calibration"}, set()),
    "initialize": ({"calibration", "heldout"}, set()),
    "align": ({"training", "heldout"}, {"training"}),
    "distill": ({"training", "heldout"}, {"training"}),
    "export": (set(), set()),
}

PIPELINE = [f"align.refit_tokens={HELDOUT}", "distill.tokens=512", "distill.batch_size=2"]
PIPELINE += ["distill.eval_every_steps=2", "distill.warmup_steps=1", "export.verify_tokens=32", "export.dtype=fp32"]
PIPELINE += ["generation=null"]  # what is generated is of no text


@pytest.fixture(scope="module")
def pipeline(recipe, tmp_path_factory):
    """Folder, report and what each stage read, of stages that run one after the other."""
    out, reads = tmp_path_factory.mktemp("pipeline"), {}
    for stage in STAGES:
        report, reads[stage] = recipe("taylor_calibrate_kd", "quickstart", out, f"stages=[{stage}]", *PIPELINE)
    assert set(report["stages"]) == set(STAGES)
    return out, report, reads


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_of_the_pipeline_reads_and_trains_on_its_own_text(pipeline, stage):
    read, trained = STAGES[stage]
    reads = pipeline[2][stage]
    assert set(reads.rows) == read | {"evaluation"}
    assert set(reads.trained) == trained


def test_the_report_counts_what_was_trained_on(pipeline):
    _, report, reads = pipeline
    assert report["tokens"] == {"calibration": TOKENS, "alignment": 4 * 2 * SEQ_LEN + HELDOUT, "distillation": 512}
    assert reads["align"].rows["training"] * SEQ_LEN == report["tokens"]["alignment"], "the polish is fitted on it too"
    assert reads["align"].trained["training"] * SEQ_LEN == 4 * 2 * SEQ_LEN
    assert reads["distill"].rows["training"] * SEQ_LEN == 2 * report["tokens"]["distillation"], "teacher and student"


def test_every_perplexity_is_of_the_evaluation_text(pipeline, texts, on_each, teacher_model, student, recipe, tmp_path):
    out, report, reads = pipeline
    recipe("taylor_calibrate_kd", "quickstart", tmp_path, "stages=[measure,initialize]", "initialize.strategy=naive")
    models = {
        "naive": student(tmp_path / "initialize" / "mixers.safetensors"),
        "analytic": student(out / "initialize" / "mixers.safetensors"),
        "aligned": student(out / "align" / "mixers.safetensors"),
        "distilled": student(out / "distill" / "student.safetensors"),
    }
    only_of("evaluation", on_each(perplexity_of, teacher_model), report["teacher"]["perplexity"])
    for name, value in report["perplexity"].items():
        only_of("evaluation", on_each(perplexity_of, models[name]), value)
    curve = report["recovery_curve"]
    assert [row["tokens"] for row in curve] == [1280, 1280 + 256, 1280 + 512]
    assert curve[0]["perplexity"] == report["perplexity"]["aligned"]
    assert curve[-1]["perplexity"] == report["perplexity"]["distilled"]
    a_pass = len(texts["evaluation"]["tokens"])
    passes = {"measure": 1, "initialize": 3, "align": 2, "distill": 3}  # the teacher's; two starts, one, two points
    assert {stage: reads[stage].rows["evaluation"] / a_pass for stage in passes} == passes


def test_statistics_are_of_the_calibration_text(pipeline, texts, teacher_model):
    found = Statistics.load(pipeline[0] / "measure" / "statistics.safetensors").layers[0].mean_x
    first = lambda batch: teacher_model.layers[0].sa_norm(teacher_model.tok_embeddings(batch["tokens"])).mean((0, 1))
    for part, batch in texts.items():
        assert torch.allclose(found, first(batch), atol=1e-4) == (part == "calibration"), part


def test_layers_are_judged_on_the_heldout_text(pipeline, on_each, teacher_model, student):
    out, report, _ = pipeline
    start, end = (
        on_each(errors_of, teacher_model, student(out / s / "mixers.safetensors")) for s in ("initialize", "align")
    )
    notes = report["initialization"]
    assert set(notes) == {str(layer) for layer in CONVERTED}
    only_of("heldout", start, {layer: note["heldout_error"] for layer, note in notes.items()})
    only_of("heldout", start, report["alignment_curve"][0]["error"])
    only_of("heldout", end, {layer: error["last"] for layer, error in report["alignment_error"].items()})
    for layer, note in notes.items():
        assert report["half_life"][layer]["before"] == pytest.approx(note["half_life"])


def test_another_evaluation_text_is_read_for_new_perplexities_alone(pipeline, recipe, tmp_path):
    again = shutil.copytree(pipeline[0], tmp_path / "again")
    stages = "stages=[measure,initialize,align,distill]"
    _, reads = recipe(
        "taylor_calibrate_kd", "quickstart", again, stages, *PIPELINE, "validation_dataset.max_tokens=256"
    )
    # Of the teacher, the plain copy, and the student after each of three stages.
    assert reads.rows == {"evaluation": 5 * 256 // SEQ_LEN} and not reads.trained


@torch.no_grad()
def kl_of(teacher_model, model, batch):
    log_p, log_q = (logits_of(one, batch)[0].log_softmax(-1) for one in (teacher_model, model))
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def test_the_best_weights_are_chosen_by_the_heldout_text(pipeline, on_each, teacher_model, student):
    out, report, _ = pipeline
    losses = on_each(kl_of, teacher_model, student(out / "distill" / "student.safetensors"))
    only_of("heldout", losses, report["distill"]["heldout_loss"]["best"])


def assert_the_start_of_the_pipeline(pipeline, path):
    """Whose text was shown above: the same layers, options and seed give the same weights."""
    expected, found = load_file(pipeline[0] / "initialize" / "mixers.safetensors"), load_file(path)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def test_layers_are_ranked_on_heldout_text_with_mixers_from_the_calibration_text(
    pipeline, recipe, texts, on_each, teacher_model, student, tmp_path
):
    policies = "select.policy=[ablation,single_keep,kl_guided,gates,alignment_error]"
    changes = [policies, "select.num_layers=1", f"align.refit_tokens={HELDOUT}"]
    report, reads = recipe("select_layers", "select_layers", tmp_path, "initialize.fold=always", *changes)
    assert set(reads.rows) == {"calibration", "heldout"} and set(reads.trained) == {"calibration"}
    assert_the_start_of_the_pipeline(pipeline, tmp_path / "initialize" / "mixers.safetensors")
    found = {policy: json.loads((tmp_path / f"{policy}.json").read_text()) for policy in report["selection"]}
    details = {policy: content["details"] for policy, content in found.items()}
    aligned = tmp_path / "align" / "mixers.safetensors"
    all_converted, one_kept = student(aligned, []), student(aligned, found["kl_guided"]["retained_layers"])
    only_of("heldout", on_each(loss_of, teacher_model), details["ablation"]["teacher_loss"])
    only_of("heldout", on_each(loss_of, all_converted), details["single_keep"]["all_converted_loss"])
    only_of("heldout", on_each(kl_of, teacher_model, one_kept), details["kl_guided"]["rounds"][0]["kl"])
    only_of("heldout", on_each(errors_of, teacher_model, all_converted), found["alignment_error"]["scores"])
    for policy in ("ablation", "single_keep", "kl_guided"):  # five passes each: the whole, and each of four layers
        assert found[policy]["tokens_by_use"]["scored"] == 5 * int((texts["heldout"]["labels"] != -100).sum()), policy


def test_an_ablation_trains_on_training_text_and_measures_on_the_evaluation_text(
    pipeline, recipe, texts, on_each, teacher_model, student, tmp_path
):
    cells = ["starts=[naive,{strategy: taylor, fold: always}]", "alignments.published=null", "ablate.after_steps=2"]
    cells += ["ablate.target_steps=[2]", f"align.refit_tokens={HELDOUT}"]
    distilled = ["recovery.starts=[taylor/none,taylor/ours]", "recovery.baseline=null", "recovery.tokens=512"]
    distilled += ["recovery.batch_size=2", "recovery.lr=[1.0e-3]", "recovery.eval_every_tokens=256"]
    report, reads = recipe("ablate_initialization", "ablate_quickstart", tmp_path, *cells, *distilled)
    assert set(reads.rows) == set(texts) and set(reads.trained) == {"training"}
    runs = [run for start in report["recovery"]["starts"].values() for run in start["runs"]]
    # The teacher's, one a cell, and the points of a distillation but the first, which is the cell's.
    passes = 1 + len(report["ablation"]["cells"]) + sum(len(run["curve"]) - 1 for run in runs)
    assert reads.rows["evaluation"] == passes * len(texts["evaluation"]["tokens"])
    aligned_on, distilled_on = 2 * (4 * 2 * SEQ_LEN + HELDOUT), len(runs) * 512  # two starts; teacher and student
    assert reads.rows["training"] * SEQ_LEN == aligned_on + 2 * distilled_on
    only_of("evaluation", on_each(perplexity_of, teacher_model), report["teacher"]["perplexity"])

    for cell in report["ablation"]["cells"]:
        if cell["start"] == "naive" or cell["alignment"] == "published":
            continue
        (path,) = tmp_path.glob(f"recovery/taylor.{cell['alignment']}*.safetensors")
        model = student(path)
        only_of("evaluation", on_each(perplexity_of, model), cell["perplexity"])
        errors = {layer: error["last"] for layer, error in cell["error_by_layer"].items()}
        only_of("heldout", on_each(errors_of, teacher_model, model), errors)
        if cell["alignment"] == "none":
            assert_the_start_of_the_pipeline(pipeline, path)


def test_students_are_evaluated_on_the_evaluation_text(
    pipeline, recipe, on_each, teacher_model, student, random_teacher, tmp_path
):
    out = pipeline[0]
    changes = ["evaluate=[perplexity,agreement]", f"teacher.checkpoint_dir={random_teacher}"]
    changes += [f"students.aligned.weights={out}/align/mixers.safetensors", f"students.exported.folder={out}/export"]
    changes += ["perplexity.context_lengths=[]", "agreement.max_sequences=64"]
    report, reads = recipe("evaluate_hybrid", "evaluate", tmp_path, *changes)
    assert set(reads.rows) == {"evaluation"} and not reads.trained
    found = report["evaluation"]
    models = {"teacher": teacher_model, "aligned": student(out / "align" / "mixers.safetensors")}
    models["exported"] = student(out / "distill" / "student.safetensors")
    for name, model in models.items():
        only_of("evaluation", on_each(perplexity_of, model), found["perplexity"][name]["perplexity"])
    for name in ("aligned", "exported"):
        only_of("evaluation", on_each(kl_of, teacher_model, models[name]), found["agreement"][name]["kl"])
