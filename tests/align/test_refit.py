"""W_o of aligned layers solved once more, and kept where that lowers the held-out error."""

import copy

import pytest
import torch

from tcal_components.align.config import AlignConfig
from tcal_components.align.loop import align
from tcal_components.align.refit import refit_alignment, refit_batches, refit_outputs
from tcal_components.data import BatchStream
from tcal_components.initialize.initialize import initialize_mixers
from tcal_components.initialize.output_projection import RegressionSums, best_ridge
from tcal_components.measure.capture import capture_batch
from tcal_components.measure.statistics import measure
from tcal_components.modules.conversion import build_mixers, load_mixers
from tcal_components.modules.spec import GatedDeltaNetSpec

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


def test_best_ridge_chooses_by_held_out_error_and_never_raises_it():
    torch.manual_seed(0)
    truth, given = torch.randn(4, 6).double(), torch.randn(4, 6).double()
    sums = []
    for count in (30, 40):
        f = torch.randn(count, 6).double()
        part = RegressionSums.zeros(6, 4, torch.device("cpu"))
        part.add_(f, f @ truth.T + 0.1 * torch.randn(count, 4))
        sums.append(part)
    fit, heldout = sums
    found = best_ridge(fit, heldout, given, (0.01, 1.0, 100.0))
    assert found.pull == 0.01 and found.error < 0.1 * found.before == 0.1 * heldout.error(given)
    kept = best_ridge(fit, heldout, truth, (1e-6,))
    assert kept.pull is None and kept.error == kept.before and torch.equal(kept.weight, truth)


def test_a_refit_never_raises_the_held_out_error(teacher, mixers, batches, make_batch):
    heldout, config = [make_batch(50, rows=4, lengths=[12, 20])], AlignConfig()
    with torch.no_grad():  # layer 0 far from its optimum
        mixers["0"].output_proj.weight.mul_(0.5)
    before = copy.deepcopy(mixers.state_dict())
    notes = refit_outputs(teacher, mixers, batches, heldout, config=config)
    assert notes[0]["after"] < 0.9 * notes[0]["before"] and notes[0]["pull"] in config.refit_pulls
    for layer in LAYERS:
        assert notes[layer]["after"] <= notes[layer]["before"]
        assert (notes[layer]["pull"] is None) == (notes[layer]["after"] == notes[layer]["before"])
    changed = {name for name, value in mixers.state_dict().items() if not torch.equal(value, before[name])}
    assert changed <= {f"{layer}.output_proj.weight" for layer in LAYERS}
    # The error of the sums is the one that running the layer gives.
    seen = []
    capture_batch(teacher, [0], heldout[0], seen.append)
    output = mixers["0"](seen[0].x, input_pos=heldout[0]["input_pos"])
    error = float((output - seen[0].y).square().sum() / seen[0].y.square().sum())
    assert notes[0]["after"] == pytest.approx(error, rel=1e-4)


@pytest.mark.parametrize("tokens", [0, 512])
def test_refit_of_an_alignment(teacher, mixers, batches, make_batch, tokens):
    heldout = [make_batch(50, rows=4)]
    config = AlignConfig(steps=2, batch_size=4, seq_len=32, warmup_steps=0, refit_tokens=tokens)
    result = align(teacher, mixers, batches, heldout, config=config, progress=False)
    refitted = refit_alignment(teacher, mixers, batches[2:], heldout, result, config=config)
    if not tokens:
        assert refitted is result
        return
    assert refitted.tokens == result.tokens + 4 * 4 * 32
    for layer in LAYERS:
        error = refitted.error[layer]
        assert error["trained"] == result.error[layer]["last"] and error["first"] == result.error[layer]["first"]
        assert error["last"] <= error["trained"]
        weight = refitted.weights[f"layers.{layer}.attn.output_proj.weight"]
        assert torch.equal(weight, mixers[str(layer)].output_proj.weight)
    with pytest.raises(ValueError, match="align.refit_tokens needs at least one training batch"):
        refit_outputs(teacher, mixers, [], heldout, config=config)


def test_refit_text_follows_that_of_the_alignment():
    data = [{"tokens": torch.full((32,), number)} for number in range(20)]
    stream = BatchStream(data, batch_size=4, seed=0)
    config = AlignConfig(steps=3, batch_size=4, seq_len=32, refit_tokens=2 * 4 * 32 - 5)
    got = [batch["tokens"] for batch in refit_batches(stream, config)]
    assert len(got) == 2 and torch.equal(got[0], stream.batch(3)["tokens"]) and stream.step == 0
    seen = torch.cat([stream.batch(step)["tokens"] for step in range(config.steps)] + got)[:, 0]
    assert config.text_tokens == len(seen) * 32 and len(seen.unique()) == len(seen), "no sequence twice"
    assert len(list(refit_batches(stream, AlignConfig(batch_size=4, seq_len=32)))) == 5, "at most the whole text"


def test_mistakes_and_frozen_output():
    assert not AlignConfig(frozen=("output_proj", "o_norm")).refit_steps and AlignConfig().refit_steps
    for wrong in ({"refit_pulls": ()}, {"refit_tokens": -1}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))} is"):
            AlignConfig(**wrong)
