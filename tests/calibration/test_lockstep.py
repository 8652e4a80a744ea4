"""Two streams side by side, the sequential start and the closed-form polish."""

import copy

import pytest
import torch

from tcal_components.assets import asset_path
from tcal_components.calibration.alignment import AlignConfig, align
from tcal_components.calibration.capture import capture_batch, run_hidden
from tcal_components.calibration.initialize import InitializeOptions, initialize_mixers
from tcal_components.calibration.lockstep import Lockstep
from tcal_components.calibration.polish import polish, polish_alignment, polish_batches
from tcal_components.calibration.regression import RegressionSums, best_ridge
from tcal_components.calibration.scoring import Scorer
from tcal_components.calibration.statistics import measure
from tcal_components.checkpoint.hf_folder import HFTeacherCheckpointer
from tcal_components.data import BatchStream, hf_tokenizer, packed_text, prepare_batch
from tcal_components.models import teacher as build_teacher
from tcal_components.models.spec import GatedDeltaNetSpec
from tcal_components.modules.conversion import build_mixers, converted, load_mixers

LAYERS = [0, 2]
GDN = GatedDeltaNetSpec()


@pytest.fixture
def batches(make_batch):
    return [make_batch(seed, rows=4, lengths=[12, 20]) for seed in range(6)]


@pytest.fixture
def mixers(teacher, batches):
    start = initialize_mixers(
        "taylor",
        teacher=teacher,
        layers=LAYERS,
        gdn_spec=GDN,
        statistics=measure(teacher, LAYERS, batches).finalise(),
        batches=batches,
    )
    return load_mixers(build_mixers(teacher.spec, GDN, LAYERS), start.weights).requires_grad_(False)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_streams_are_those_of_whole_models(teacher, mixers, batches, offload, low):
    streams = Lockstep(teacher, batches[:2], gamma=0.5, autocast_dtype=low, offload=offload)
    targets = {}
    for layer in range(3):
        with streams.enter(layer):
            if layer in LAYERS:
                targets[layer] = list(streams.targets())
            streams.advance(mixers[str(layer)] if layer in LAYERS else None)
    with torch.autocast("cpu", dtype=low, enabled=low is not None), torch.no_grad():
        expected_teacher = run_hidden(teacher, batches[1])
        with converted(teacher, mixers) as student:
            expected = run_hidden(student, batches[1])
        got = teacher.norm(streams.student_states()[1])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got, expected_teacher, rtol=1e-2, atol=1e-2)
    if low is None:
        seen = []
        capture_batch(teacher, [0], batches[1], seen.append)
        torch.testing.assert_close(targets[0][1].target, seen[0].y)  # no drift before the first layer
        torch.testing.assert_close(targets[0][1].x, seen[0].x)
        assert not torch.allclose(targets[2][1].x, _input(teacher, batches[1]), rtol=1e-2, atol=1e-2)


def _input(teacher, batch):
    seen = []
    capture_batch(teacher, [2], batch, seen.append)
    return seen[0].x


def test_targets_ask_for_a_share_of_the_drift(teacher, mixers, batches):
    found, student = {}, None
    for gamma in (0.0, 0.5):
        streams = Lockstep(teacher, batches[:1], gamma=gamma)
        with streams.enter(0):
            list(streams.targets())  # moves the teacher's stream
            streams.advance(mixers["0"])
        with streams.enter(1):
            streams.advance(None)
        with streams.enter(2):
            student = streams.student_states()[0]
            found[gamma] = next(streams.targets())
    states, seen = [], []
    handle = teacher.layers[2].register_forward_pre_hook(lambda module, args: states.append(args[0]))
    capture_batch(teacher, [2], batches[0], seen.append)
    handle.remove()
    torch.testing.assert_close(found[0.0].target, seen[0].y)
    drift = states[0] - student
    assert float(drift.norm()) > 0.01 * float(states[0].norm())
    torch.testing.assert_close(found[0.5].target - found[0.0].target, 0.5 * drift, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0.5].weight, 1 / (states[0] + seen[0].y).square().mean(-1))


def test_teacher_forcing_sees_the_teachers_stream(teacher, mixers, batches):
    streams = Lockstep(teacher, batches[:1], gamma=0.5, forced=False)
    for layer in range(2):
        with streams.enter(layer):
            if layer == 0:
                list(streams.targets())
            streams.advance(mixers["0"] if layer == 0 else None)
    with streams.enter(2):
        tokens = next(streams.targets())
    seen = []
    capture_batch(teacher, [2], batches[0], seen.append)
    torch.testing.assert_close(tokens.x, seen[0].x)
    torch.testing.assert_close(tokens.target, seen[0].y)


def test_best_ridge_chooses_by_held_out_error_and_never_raises_it():
    torch.manual_seed(0)
    truth, given = torch.randn(4, 6).double(), torch.randn(4, 6).double()
    sums = []
    for count in (30, 40):
        f = torch.randn(count, 6).double()
        part = RegressionSums.zeros(6, 4, torch.device("cpu"))
        part.add_(f, f @ truth.T + 0.1 * torch.randn(count, 4), torch.rand(count))
        sums.append(part)
    fit, heldout = sums
    found = best_ridge(fit, heldout, given, (0.01, 1.0, 100.0), keep=True)
    assert found.pull == 0.01 and found.error < 0.1 * found.before == 0.1 * heldout.error(given)
    kept = best_ridge(fit, heldout, truth, (1e-6,), keep=True)
    assert kept.pull is None and kept.error == kept.before and torch.equal(kept.weight, truth)
    assert best_ridge(fit, heldout, truth, (1e-6,), keep=False).pull == 1e-6
    # A weight of a token counts as so many tokens.
    twice, weighted = (RegressionSums.zeros(6, 4, torch.device("cpu")) for _ in range(2))
    twice.add_(f[[0, 0, 1]], f[[0, 0, 1], :4])
    weighted.add_(f[:2], f[:2, :4], torch.tensor([2.0, 1.0]))
    torch.testing.assert_close(weighted.gram, twice.gram)
    torch.testing.assert_close(weighted.energy, twice.energy)


@pytest.mark.parametrize("mode", ["teacher", "sequential"])
def test_polish_never_raises_the_held_out_error(teacher, mixers, batches, make_batch, mode):
    heldout, config = [make_batch(50, rows=4, lengths=[12, 20])], AlignConfig(polish=mode, polish_gamma=0.0)
    with torch.no_grad():  # layer 0 far from its optimum
        mixers["0"].output_proj.weight.mul_(0.5)
    before = copy.deepcopy(mixers.state_dict())
    notes = polish(teacher, mixers, batches, heldout, config=config)
    assert notes[0]["after"] < 0.9 * notes[0]["before"] and notes[0]["pull"] in config.polish_pulls
    for layer in LAYERS:
        assert notes[layer]["after"] <= notes[layer]["before"]
        assert (notes[layer]["pull"] is None) == (notes[layer]["after"] == notes[layer]["before"])
    changed = {name for name, value in mixers.state_dict().items() if not torch.equal(value, before[name])}
    assert changed <= {f"{layer}.output_proj.weight" for layer in LAYERS}
    if mode == "teacher":  # the error of the sums is the one that running the layer gives
        seen = []
        capture_batch(teacher, [0], heldout[0], seen.append)
        output = mixers["0"](seen[0].x, input_pos=heldout[0]["input_pos"])
        error = float((output - seen[0].y).square().sum() / seen[0].y.square().sum())
        assert notes[0]["after"] == pytest.approx(error, rel=1e-4)


@pytest.mark.parametrize("mode", ["none", "teacher", "sequential"])
def test_polished_result_of_an_alignment(teacher, mixers, batches, make_batch, mode):
    heldout = [make_batch(50, rows=4)]
    config = AlignConfig(steps=2, batch_size=4, seq_len=32, warmup_steps=0, polish=mode)
    result = align(teacher, mixers, batches, heldout, config=config, progress=False)
    polished = polish_alignment(teacher, mixers, batches[2:], heldout, result, config=config)
    if mode == "none":
        assert polished is result
        return
    assert polished.tokens == result.tokens + 4 * 4 * 32
    for layer in LAYERS:
        error = polished.error[layer]
        assert error["trained"] == result.error[layer]["last"] and error["first"] == result.error[layer]["first"]
        assert mode == "sequential" or error["last"] <= error["trained"]
        weight = polished.weights[f"layers.{layer}.attn.output_proj.weight"]
        assert torch.equal(weight, mixers[str(layer)].output_proj.weight)
    with pytest.raises(ValueError, match=f"align.polish {mode} needs at least one training batch"):
        polish(teacher, mixers, [], heldout, config=config)


def test_polish_text_follows_that_of_the_alignment():
    data = [{"tokens": torch.full((32,), number)} for number in range(20)]
    stream = BatchStream(data, batch_size=4, seed=0)
    config = AlignConfig(steps=3, batch_size=4, seq_len=32, polish_tokens=2 * 4 * 32 - 5)
    got = [batch["tokens"] for batch in polish_batches(stream, config)]
    assert len(got) == 2 and torch.equal(got[0], stream.batch(3)["tokens"]) and stream.step == 0
    seen = torch.cat([stream.batch(step)["tokens"] for step in range(config.steps)] + got)[:, 0]
    assert config.text_tokens == len(seen) * 32 and len(seen.unique()) == len(seen), "no sequence twice"
    assert len(list(polish_batches(stream, AlignConfig(batch_size=4, seq_len=32)))) == 5, "at most the whole text"


def test_mistakes_and_frozen_output():
    assert not AlignConfig(frozen=("output_proj", "o_norm")).polishes and AlignConfig().polishes
    for wrong in ({"polish": "both"}, {"polish_gamma": -1.0}, {"polish_pulls": ()}, {"polish_tokens": 0}):
        with pytest.raises(ValueError, match=f"align.{next(iter(wrong))} is"):
            AlignConfig(**wrong)


@pytest.fixture
def embedded():
    """The embedded teacher and batches of its calibration text."""
    folder = asset_path("quickstart")
    teacher = build_teacher(checkpoint_dir=str(folder))
    teacher.load_state_dict(HFTeacherCheckpointer(checkpoint_dir=str(folder)).load_checkpoint()["model"])
    text = packed_text(
        hf_tokenizer(path=str(folder)), source=str(folder / "calibration.jsonl"), seq_len=128, max_tokens=6144
    )
    items = [text[number] for number in range(48)]
    batches = [
        prepare_batch({name: torch.stack([item[name] for item in items[at : at + 8]]) for name in items[0]}, "cpu")
        for at in range(0, 48, 8)
    ]
    return teacher.float().eval().requires_grad_(False), batches


def test_sequential_start_is_the_closest_to_the_embedded_teacher(embedded):
    teacher, batches = embedded
    # All layers: where attention in between mends the stream, there is little drift for a sequential fit to undo.
    layers, fit, heldout, judge = range(6), batches[:4], batches[4:5], batches[5:]
    statistics = measure(teacher, layers, fit[:2]).finalise()
    scorer, kl = Scorer(teacher, judge, progress=False), []
    for strategy, forcing in (
        ("taylor_b", "student"),
        ("taylor", "student"),
        ("taylor_sequential", "teacher"),
        ("taylor_sequential", "student"),
    ):
        found = initialize_mixers(
            strategy,
            teacher=teacher,
            layers=layers,
            gdn_spec=GDN,
            statistics=statistics,
            batches=fit,
            heldout_batches=heldout,
            options=InitializeOptions(fold="always", forcing=forcing),
        )
        kl.append(scorer.kl(load_mixers(build_mixers(teacher.spec, GDN, layers), found.weights)))
    taylor_b, taylor, teacher_forced, student_forced = kl
    assert student_forced < taylor < 0.9 * taylor_b, kl
    assert student_forced < teacher_forced, kl
    for notes in found.diagnostics.values():
        assert notes["pull"] in InitializeOptions().pulls and 0 < notes["sequential_error"] < 1
        assert notes["beta"] == pytest.approx([0.2] * 4, abs=0.06)
