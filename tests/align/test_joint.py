"""The joint part of an alignment: what it minimises, what it keeps, and that it continues to the same numbers."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tcal_components.align.config import AlignConfig, JointConfig
from tcal_components.align.joint import JointAligner, align_jointly
from tcal_components.align.optimizer import LearningRates, learning_rates
from tcal_components.align.resumable import resumable_alignment
from tcal_components.checkpoint.run_state import RunState
from tcal_components.data import BatchStream, prepare_batch
from tcal_components.data.packed import IGNORE_INDEX
from tcal_components.distributed.preemption import Stopped
from tcal_components.initialize.initialize import initialize_mixers
from tcal_components.modules.conversion import build_mixers, converted, load_mixers
from tcal_components.modules.spec import GatedDeltaNetSpec

LAYERS = [0, 2]
GDN = GatedDeltaNetSpec()
RATES = LearningRates(1e-2, 2e-2, 3e-2)
CONFIG = AlignConfig(steps=3, batch_size=2, seq_len=32, warmup_steps=1, refit_tokens=64, joint=JointConfig(steps=4))


@pytest.fixture
def mixers(teacher):
    start = initialize_mixers("naive", teacher=teacher, layers=LAYERS, gdn_spec=GDN, statistics=None, batches=[])
    return lambda: load_mixers(build_mixers(teacher.spec, GDN, LAYERS), start.weights)


def divergence(teacher, mixers, batch):
    """Mean KL(teacher || student) over the counted tokens, written out in float64."""
    given = {"mask": batch.get("mask"), "input_pos": batch.get("input_pos")}
    with torch.no_grad():
        log_p = teacher(batch["tokens"], **given).double().log_softmax(-1)
        with converted(teacher, mixers):
            log_q = teacher(batch["tokens"], **given).double().log_softmax(-1)
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    return float(kl[batch["labels"] != IGNORE_INDEX].mean())


def test_the_divergence_falls_and_only_mixers_change(teacher, mixers, make_batch):
    trained, batch = mixers(), make_batch(3, rows=4, lengths=[12, 20])
    batch["labels"] = batch["tokens"].roll(-1, 1)
    batch["labels"][:, ::5] = IGNORE_INDEX
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    config = dataclasses.replace(CONFIG, joint=JointConfig(steps=20, lr_scale=1.0, warmup_steps=0))
    aligner = JointAligner(teacher=teacher, mixers=trained, config=config, rates=RATES)
    first = divergence(teacher, trained, batch)
    assert aligner.evaluate([batch]) == pytest.approx(first, rel=1e-5)
    kl, norm = aligner.train_step(batch)
    assert kl == pytest.approx(first, rel=1e-5) and norm > 0
    for _ in range(19):
        aligner.train_step(batch)
    assert aligner.evaluate([batch]) == pytest.approx(divergence(teacher, trained, batch), rel=1e-5)
    assert divergence(teacher, trained, batch) < 0.9 * first
    for name, value in teacher.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} belongs to the teacher"
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_rates_are_a_share_of_the_alignments(teacher, mixers, make_batch):
    """The first step of Adam moves every weight by its rate: there and back is no matter of the gradient's size."""
    config = dataclasses.replace(CONFIG, eps=0.0, joint=JointConfig(steps=4, lr_scale=0.1, warmup_steps=0))
    trained, start = mixers(), mixers()
    JointAligner(teacher=teacher, mixers=trained, config=config, rates=RATES).train_step(make_batch(3, rows=4))
    for name, rate in (("q_proj.weight", 1e-3), ("g_proj.weight", 2e-3), ("o_norm.scale", 3e-3)):
        moved = (trained["0"].get_parameter(name) - start["0"].get_parameter(name)).detach().abs()
        assert float(moved.median()) == pytest.approx(rate, rel=1e-3), name


def test_weights_of_the_lowest_heldout_divergence_stay_also_those_of_the_start(teacher, mixers, make_batch):
    rising = dataclasses.replace(CONFIG, joint=JointConfig(steps=3, eval_every=1, warmup_steps=0, lr_scale=100.0))
    trained, start = mixers(), mixers()
    aligner = JointAligner(teacher=teacher, mixers=trained, config=rising, rates=RATES.scaled(10))
    heldout = make_batch(9, rows=4, lengths=[12, 20])
    heldout["labels"] = heldout["tokens"].roll(-1, 1)
    weights = align_jointly(aligner, [make_batch(seed) for seed in range(3)], [heldout])
    assert [point["step"] for point in aligner.curve] == [0, 1, 2, 3]
    best = min(aligner.curve, key=lambda point: point["kl"])
    assert divergence(teacher, trained, heldout) == pytest.approx(best["kl"], rel=1e-5), "in the mixers"
    chosen = load_mixers(start, weights)
    assert divergence(teacher, chosen, heldout) == pytest.approx(best["kl"], rel=1e-5), "and in the weights"
    # With nothing better than the start, that is what stays.
    aligner._best_loss = dict.fromkeys(LAYERS, 0.0)
    aligner.train_step(heldout)
    aligner.evaluate([heldout])
    assert torch.equal(aligner.best_weights()["layers.0.attn.q_proj.weight"], weights["layers.0.attn.q_proj.weight"])


@pytest.mark.parametrize("stop_after", [2, 4, 6])
@pytest.mark.parametrize("stacked", [False, True], ids=["layer by layer", "stacked"])
def test_a_stopped_run_ends_with_the_numbers_of_an_unbroken_one(
    teacher, mixers, make_batch, tmp_path, stop_after, stacked
):
    """Stopped among the steps of the layers on their own, and twice among those of the joint part."""
    batches = [make_batch(seed, rows=1, lengths=[12, 20]) for seed in range(40)]
    rows = [{name: batch[name][0] for name in ("tokens", "document", "input_pos")} for batch in batches]
    rows = [{**row, "labels": row["tokens"].roll(-1)} for row in rows]
    config = dataclasses.replace(CONFIG, stack_layers=stacked)

    def run(name, stop=None):
        state, seen = RunState(tmp_path / name), []
        return resumable_alignment(
            state,
            resume=state.begin({"align": "a"}),
            teacher=teacher,
            mixers=mixers(),
            stream=BatchStream(rows, batch_size=2, seed=0),
            joint_stream=BatchStream(rows, batch_size=2, seed=1),
            prepare=lambda batch: prepare_batch(batch, "cpu"),
            heldout_batches=[make_batch(50, rows=4)],
            config=config,
            log=lambda values, step: seen.append(step),
            should_stop=lambda: stop is not None and seen[-1] == stop,
        )

    whole = run("whole")
    with pytest.raises(Stopped, match=f"step {stop_after}"):
        run("broken", stop_after)
    continued = run("broken")
    assert continued.error == whole.error and continued.joint_curve == whole.joint_curve
    assert (continued.steps, continued.tokens, continued.curve) == (whole.steps, whole.tokens, whole.curve)
    for name, value in whole.weights.items():
        assert torch.equal(continued.weights[name], value), name
    assert whole.steps == 7 and whole.tokens == (3 + 1 + 4) * 2 * 32
    assert all(entry["last"] != entry["layer"] for entry in whole.error.values()), "measured again"


def test_rates_do_not_depend_on_where_the_run_was_broken(teacher, mixers):
    """They are those of the start, not of the trained weights that a resumed run has."""
    assert learning_rates(mixers().values(), CONFIG) == learning_rates(mixers().values(), CONFIG)


def test_mistakes():
    for wrong, words in (({"steps": -1}, "steps is -1"), ({"speed": 1}, "unknown key 'speed' in joint")):
        with pytest.raises(ValueError, match=words):
            AlignConfig(joint=wrong)
    assert AlignConfig(joint={"steps": 5}).joint.text_tokens == 5 * 2 * 512
