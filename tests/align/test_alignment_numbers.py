"""What an alignment computes, against the same training written out, and that stopping it changes nothing."""

import math

import pytest
import torch

from tcal_components.align.config import AlignConfig
from tcal_components.align.resumable import resumable_alignment
from tcal_components.checkpoint.run_state import RunState
from tcal_components.data import BatchStream, prepare_batch
from tcal_components.distributed.preemption import Stopped
from tcal_components.initialize.initialize import initialize_mixers
from tcal_components.modules.conversion import build_mixers, load_mixers
from tcal_components.modules.spec import GatedDeltaNetSpec

LAYERS = [0, 2]
NUMBERS = {"batch_size": 4, "seq_len": 32, "lr": 3e-2, "projection_lr": 1e-2}


class Rows(torch.utils.data.Dataset):
    """Packed rows of two documents; the rows of different seeds have different tokens."""

    def __init__(self, make_batch, seed, rows):
        batch = make_batch(seed, rows=rows, lengths=[12, 20])
        self.items = [{name: batch[name][row] for name in ("tokens", "document", "input_pos")} for row in range(rows)]
        for row, item in enumerate(self.items):
            item["labels"] = item["tokens"].roll(-1)
            if row % 3 == 0:  # padding counts nowhere
                item["document"], item["input_pos"] = item["document"].clone(), item["input_pos"].clone()
                item["document"][-5:], item["input_pos"][-5:] = -1, 0

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


@pytest.fixture
def text(make_batch):
    return Rows(make_batch, 100, 64)


@pytest.fixture
def heldout(make_batch):
    stream = BatchStream(Rows(make_batch, 50, 8), batch_size=4, seed=0)
    return [prepare_batch(stream.batch(step), "cpu") for step in range(2)]


@pytest.fixture
def make_mixers(teacher):
    gdn = GatedDeltaNetSpec()
    start = initialize_mixers(
        "naive", teacher=teacher, layers=LAYERS, gdn_spec=gdn, statistics=None, batches=[], seed=1
    )
    return lambda: load_mixers(build_mixers(teacher.spec, gdn, LAYERS), start.weights)


@pytest.fixture
def run(teacher, text, heldout, make_mixers, tmp_path):
    """An alignment as the stages run it; ``stop_after`` a number of steps it is asked to stop."""

    def run(config, *, name="state", stop_after=None, **options):
        steps = []
        state = RunState(tmp_path / name)
        return resumable_alignment(
            state,
            resume=state.begin({"align": "a"}),
            teacher=teacher,
            mixers=make_mixers(),
            stream=BatchStream(text, batch_size=config.batch_size, seed=3),
            prepare=lambda batch: prepare_batch(batch, "cpu"),
            heldout_batches=heldout,
            config=config,
            log=lambda values, step: steps.append(step),
            should_stop=lambda: stop_after is not None and steps[-1] == stop_after,
            **options,
        )

    return run


def captured(teacher, batch):
    """Inputs and outputs of the teacher's attention, by layer."""
    seen, hooks = {}, []
    for layer in LAYERS:
        hook = lambda module, args, kwargs, y, layer=layer: seen.update({layer: (args[0], y)})
        hooks.append(teacher.layers[layer].attn.register_forward_hook(hook, with_kwargs=True))
    with torch.no_grad():
        teacher(batch["tokens"], mask=batch["mask"], input_pos=batch["input_pos"])
    for hook in hooks:
        hook.remove()
    return seen


def relative_error(mixer, seen, batch):
    valid, (x, y) = batch["document"] >= 0, seen
    output = mixer(x, input_pos=batch["input_pos"])
    return (output - y)[valid].square().sum(), y[valid].square().sum()


def heldout_errors(teacher, mixers, batches):
    sums = {layer: torch.zeros(2, dtype=torch.float64) for layer in LAYERS}
    for batch in batches:
        seen = captured(teacher, batch)
        for layer in LAYERS:
            with torch.no_grad():
                sums[layer] += torch.stack(relative_error(mixers[str(layer)], seen[layer], batch)).double()
    return {layer: float(error / energy) for layer, (error, energy) in sums.items()}


@pytest.mark.parametrize("stacked", [False, True], ids=["layer by layer", "stacked"])
@pytest.mark.parametrize("max_grad_norm", [0.1, 0.65, None], ids=["all clipped", "some clipped", "none clipped"])
def test_the_training_is_that_written_out(run, teacher, text, heldout, make_mixers, stacked, max_grad_norm):
    """With a large eps, so that an update of Adam shows the size of the gradient and with it the clipping."""
    config = AlignConfig(
        steps=7,
        warmup_steps=3,
        min_lr_ratio=0.1,
        weight_decay=0.2,
        betas=(0.8, 0.9),
        eps=0.05,
        max_grad_norm=max_grad_norm,
        eval_every=100,
        refit_tokens=0,
        stack_layers=stacked,
        **NUMBERS,
    )
    result = run(config)

    mixers, stream, clipped = make_mixers(), BatchStream(text, batch_size=4, seed=3), 0
    optimizers = {}
    for layer in LAYERS:
        groups = []
        for name, parameter in mixers[str(layer)].named_parameters():
            part = name.split(".")[0]
            rate = 1e-2 if part in ("q_proj", "k_proj", "v_proj", "output_proj") else 3e-2
            groups.append({"params": [parameter], "lr": rate, "weight_decay": 0.2 * part.endswith("_proj")})
        optimizers[layer] = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=0.05)
        for group in optimizers[layer].param_groups:
            group["peak"] = group["lr"]
    for step in range(7):
        batch = prepare_batch(stream.batch(step), "cpu")
        seen = captured(teacher, batch)
        if step < 3:
            factor = (step + 1) / 3
        else:
            factor = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 3) / 4))
        for layer in LAYERS:
            error, energy = relative_error(mixers[str(layer)], seen[layer], batch)
            (error / energy).backward()
            limit = math.inf if max_grad_norm is None else max_grad_norm
            norm = torch.nn.utils.clip_grad_norm_(mixers[str(layer)].parameters(), limit)
            clipped += bool(norm > limit)
            for group in optimizers[layer].param_groups:
                group["lr"] = group["peak"] * factor
            optimizers[layer].step()
            optimizers[layer].zero_grad()
    assert clipped in {0.1: [14], 0.65: range(2, 13), None: [0]}[max_grad_norm], "of seven steps of two layers"
    assert result.tokens == 7 * 4 * 32
    for layer, error in heldout_errors(teacher, mixers, heldout).items():
        assert result.curve[-1]["error"][layer] == pytest.approx(error, rel=1e-3)
        assert error < result.error[layer]["first"], "the last weights are those that are kept"
        for name, expected in mixers[str(layer)].named_parameters():
            got = result.weights[f"layers.{layer}.attn.{name}"]
            start = make_mixers()[str(layer)].get_parameter(name)
            assert (got - expected).norm() < 2e-3 * (expected - start).norm(), (layer, name)


@pytest.mark.parametrize("stacked", [False, True], ids=["layer by layer", "stacked"])
@pytest.mark.parametrize("stop", [1, 4])
def test_a_stopped_alignment_goes_on_with_the_next_batch(run, stacked, stop):
    config = AlignConfig(steps=6, eval_every=2, warmup_steps=2, refit_tokens=256, stack_layers=stacked, **NUMBERS)
    whole = run(config, name="whole")
    with pytest.raises(Stopped):
        run(config, stop_after=stop)
    continued = run(config)
    assert continued.curve == whole.curve and continued.error == whole.error and continued.tokens == whole.tokens
    assert continued.steps == whole.steps == 6
    for name, value in whole.weights.items():
        assert torch.equal(continued.weights[name], value), name


def test_the_refit_is_kept_where_it_lowers_the_heldout_error(run, teacher, heldout, make_mixers):
    numbers = {"steps": 1, "warmup_steps": 0, **NUMBERS}
    trained = run(AlignConfig(refit_tokens=0, **numbers))
    polished = run(AlignConfig(refit_tokens=1024, **numbers))
    mixers = make_mixers()
    errors = heldout_errors(teacher, load_mixers(mixers, polished.weights), heldout)
    for layer in LAYERS:
        error = polished.error[layer]
        assert error["trained"] == pytest.approx(trained.error[layer]["last"], rel=1e-5)
        assert error["last"] < 0.95 * error["trained"] and error["pull"] is not None
        assert error["last"] == pytest.approx(errors[layer], rel=1e-3), "the error is that of the weights"
        for name in make_mixers()[str(layer)].state_dict():
            key = f"layers.{layer}.attn.{name}"
            same = torch.equal(polished.weights[key], trained.weights[key])
            assert same == (name != "output_proj.weight"), key


def test_the_refit_takes_the_best_of_its_strengths(run, teacher, heldout, make_mixers):
    """One strength at a time shows which is best in each layer; all together find it."""
    numbers = {"steps": 1, "warmup_steps": 0, "refit_tokens": 512, **NUMBERS}
    pulls = (1e-3, 0.1, 10.0, 1e3)
    alone = [run(AlignConfig(refit_pulls=(pull,), **numbers)).error for pull in pulls]
    together = run(AlignConfig(refit_pulls=pulls, **numbers)).error
    for layer in LAYERS:
        best = min(range(len(pulls)), key=lambda number, layer=layer: alone[number][layer]["last"])
        assert together[layer]["pull"] == pulls[best]
        assert together[layer]["last"] == pytest.approx(alone[best][layer]["last"], rel=1e-6)


@pytest.mark.parametrize("stacked", [False, True], ids=["layer by layer", "stacked"])
def test_the_best_weights_of_before_a_stop_are_kept(run, stacked):
    """A rate that rises too far: the errors fall until the stop, and after it they only rise."""
    rising = {**NUMBERS, "lr": 1.0, "projection_lr": 0.5, "stack_layers": stacked}
    config = AlignConfig(steps=3, eval_every=1, warmup_steps=40, refit_tokens=0, **rising)
    whole = run(config, name="whole")
    assert [error["step"] for error in whole.error.values()] == [2, 2]
    with pytest.raises(Stopped):
        run(config, stop_after=2)
    continued = run(config)
    assert continued.error == whole.error
    for name, value in whole.weights.items():
        assert torch.equal(continued.weights[name], value), name
