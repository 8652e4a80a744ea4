import copy
import dataclasses
import io
import itertools

import pytest
import torch

from tcal_components.align.aligner import Aligner
from tcal_components.align.config import AlignConfig
from tcal_components.align.loop import align
from tcal_components.align.optimizer import parameter_groups
from tcal_components.initialize.initialize import initialize_mixers
from tcal_components.measure.capture import capture_batch
from tcal_components.modules.conversion import build_mixers, load_mixers
from tcal_components.modules.spec import GatedDeltaNetSpec

LAYERS = [0, 2]
CONFIG = AlignConfig(steps=12, batch_size=4, seq_len=32, lr=6e-3, projection_lr=2e-3, warmup_steps=2, eval_every=4)


@pytest.fixture(params=[False, True], ids=["layer by layer", "stacked"])
def config(request):
    return dataclasses.replace(CONFIG, stack_layers=request.param)


@pytest.fixture
def make_mixers(teacher):
    def make():
        gdn = GatedDeltaNetSpec()
        start = initialize_mixers(
            "naive", teacher=teacher, layers=LAYERS, gdn_spec=gdn, statistics=None, batches=[], seed=1
        )
        return load_mixers(build_mixers(teacher.spec, gdn, LAYERS), start.weights)

    return make


@pytest.fixture
def stream(make_batch):
    """Fresh batches from a step on."""
    return lambda step=0: (make_batch(100 + number, rows=4, lengths=[12, 20]) for number in itertools.count(step))


@pytest.fixture
def heldout(make_batch):
    return [make_batch(50, rows=4), make_batch(51, rows=4, lengths=[12, 20])]


def relative_error(teacher, mixers, batches, layer):
    error = energy = 0.0
    for batch in batches:
        seen = []
        capture_batch(teacher, [layer], batch, seen.append)
        with torch.no_grad():
            output = mixers[str(layer)](seen[0].x, input_pos=batch.get("input_pos"))
        error += float((output - seen[0].y).square().sum())
        energy += float(seen[0].y.square().sum())
    return error / energy


def test_alignment_lowers_the_held_out_error_of_every_layer(config, teacher, make_mixers, stream, heldout):
    logged = []
    mixers = make_mixers()
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    result = align(
        teacher, mixers, stream(), heldout, config=config, progress=False, log=lambda m, step: logged.append((step, m))
    )
    assert [point["step"] for point in result.curve] == [0, 4, 8, 12]
    for layer in LAYERS:
        assert result.error[layer]["last"] < 0.8 * result.error[layer]["first"]
        assert result.error[layer]["last"] == pytest.approx(relative_error(teacher, mixers, heldout, layer), rel=1e-4)
        for name, parameter in mixers[str(layer)].named_parameters():
            assert torch.equal(result.weights[f"layers.{layer}.attn.{name}"], parameter)
    initial = make_mixers()
    changed = [n for (n, a), b in zip(mixers.named_parameters(), initial.parameters()) if not torch.equal(a, b)]
    assert changed == [name for name, _ in mixers.named_parameters()], "everything is trained, W_o and o_norm too"
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
    assert result.steps == 12 and result.tokens == 12 * 4 * 32
    steps = [step for step, metrics in logged if "align/error_mean" in metrics]
    assert steps == list(range(1, 13))
    assert {"align/error/0", "align/error_worst", "align/lr", "align/grad_norm_max"} <= set(logged[1][1])
    assert "align/heldout_error/2" in logged[0][1] and logged[0][0] == 0


def test_one_step_equals_the_written_out_computation(config, teacher, make_mixers, make_batch):
    batch = make_batch(7, rows=4, lengths=[12, 20])
    batch["document"][:2, -20:] = -1  # padding must not count
    mixers, reference = make_mixers(), make_mixers()
    aligner = Aligner(teacher=teacher, mixers=mixers, config=config)
    measured = aligner.train_step(batch)
    for layer in LAYERS:
        seen, mixer = [], reference[str(layer)]
        capture_batch(teacher, [layer], batch, seen.append)
        valid = batch["document"] >= 0
        y, output = seen[0].y[valid], mixer(seen[0].x, input_pos=batch["input_pos"])[valid]
        loss = (output - y).square().sum() / y.square().sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(mixer.parameters(), CONFIG.max_grad_norm)
        optimizer = torch.optim.AdamW(parameter_groups(mixer, CONFIG), betas=CONFIG.betas, weight_decay=0.0)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * 0.5  # first of two warm-up steps
        optimizer.step()
        assert measured["error"][layer] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert measured["grad_norm"][layer] == pytest.approx(float(norm), rel=1e-4)
        for (name, parameter), expected in zip(mixers[str(layer)].named_parameters(), mixer.parameters()):
            torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
            assert parameter.grad is None


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_resumed_run_equals_the_unbroken_one(config, teacher, make_mixers, stream, heldout, stop):
    unbroken = align(teacher, make_mixers(), stream(), heldout, config=config, progress=False)
    file = io.BytesIO()

    class Stop(Exception):
        pass

    def save(aligner):
        if aligner.step == stop:
            torch.save(aligner.state_dict(), file)
            raise Stop

    with pytest.raises(Stop):
        align(teacher, make_mixers(), stream(), heldout, config=config, progress=False, on_step=save)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state["progress"]["step"] == stop
    resumed = align(teacher, make_mixers(), stream(stop), heldout, config=config, progress=False, resume=state)
    assert resumed.curve == unbroken.curve and resumed.error == unbroken.error and resumed.tokens == unbroken.tokens
    for name, value in unbroken.weights.items():
        assert torch.equal(value, resumed.weights[name]), name


def test_state_of_another_student_is_refused(teacher, make_mixers):
    aligner = Aligner(teacher=teacher, mixers=make_mixers(), config=CONFIG)
    state = copy.deepcopy(aligner.state_dict())
    other = {key: value for key, value in state.items() if "q_conv" not in key}
    with pytest.raises(ValueError, match="another student: best.0.q_conv.weight"):
        aligner.load_state_dict(other)
    state["mixer.0.q_proj.weight"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"mixer.0.q_proj.weight of shape \[3, 3\]"):
        aligner.load_state_dict(state)


def test_each_layer_keeps_the_weights_that_measured_best(config, teacher, make_mixers, stream, heldout):
    mixers = make_mixers()
    aligner = Aligner(teacher=teacher, mixers=mixers, config=config)
    data, snapshots, errors = stream(), {}, {}
    for step in range(4):
        with torch.no_grad():
            if step == 2:  # spoil layer 0 only: it must keep what it had
                mixers["0"].output_proj.weight.mul_(-5.0)
        errors[step] = aligner.evaluate(heldout)
        snapshots[step] = copy.deepcopy(mixers.state_dict())
        aligner.train_step(next(data))  # after the evaluation, so weights cloned too late would differ
    result = aligner.result()
    assert result.error[0]["step"] == 1 and result.error[2]["step"] == 3
    for layer, step in ((0, 1), (2, 3)):
        assert result.error[layer]["last"] == errors[step][layer] == min(point[layer] for point in errors.values())
        assert result.error[layer]["first"] == errors[0][layer]
        for name, value in mixers[str(layer)].state_dict().items():
            assert torch.equal(value, snapshots[step][f"{layer}.{name}"])


def test_groups_go_by_name(make_mixers):
    mixer = make_mixers()["0"]
    config = AlignConfig(weight_decay=0.1, lr=6e-3, projection_lr=2e-3)
    names = {id(parameter): name for name, parameter in mixer.named_parameters()}
    groups = {
        (group["lr"], group["weight_decay"]): sorted(names[id(parameter)] for parameter in group["params"])
        for group in parameter_groups(copy.copy(mixer), config)
    }
    assert groups == {
        (2e-3, 0.1): sorted(f"{name}_proj.weight" for name in ("q", "k", "v", "output")),
        (6e-3, 0.1): ["a_proj.weight", "b_proj.weight", "g_proj.weight"],
        (6e-3, 0.0): sorted(
            ["decay.A_log", "decay.dt_bias", "o_norm.scale", "q_conv.weight", "k_conv.weight", "v_conv.weight"]
        ),
    }


def test_schedule():
    config = AlignConfig(steps=20, warmup_steps=4, min_lr_ratio=0.1)
    values = [config.schedule(step) for step in range(21)]
    assert values[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert values[12] == pytest.approx(0.55) and values[20] == pytest.approx(0.1)
    assert values[4:] == sorted(values[4:], reverse=True)


def test_a_loss_that_is_not_finite_names_layer_and_step(config, teacher, make_mixers, stream, heldout):
    aligner = Aligner(teacher=teacher, mixers=make_mixers(), config=config)
    data = stream()
    aligner.train_step(next(data))
    with torch.no_grad():
        aligner.mixers["2"].v_proj.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="training error of layer 2 is nan at alignment step 1"):
        aligner.train_step(next(data))
    with pytest.raises(FloatingPointError, match="held-out error of layer 2 is nan"):
        aligner.evaluate(heldout)


def test_bf16_teacher_with_fp32_masters(config, teacher, make_mixers, stream, heldout):
    config = AlignConfig(steps=4, warmup_steps=1, eval_every=4, stack_layers=config.stack_layers)
    mixers = make_mixers()
    result = align(teacher, mixers, stream(), heldout, config=config, progress=False, autocast_dtype=torch.bfloat16)
    assert all(value.dtype == torch.float32 for value in result.weights.values())
    assert all(result.error[layer]["last"] < result.error[layer]["first"] for layer in LAYERS)


def test_no_steps_keep_the_start(config, teacher, make_mixers, stream, heldout):
    config = AlignConfig(steps=0, stack_layers=config.stack_layers)
    result = align(teacher, make_mixers(), stream(), heldout, config=config, progress=False)
    for name, value in make_mixers().named_parameters():
        assert torch.equal(result.weights[f"layers.{name[0]}.attn.{name[2:]}"], value)
    assert all(error["first"] == error["last"] for error in result.error.values())


def test_user_mistakes(teacher, make_mixers, stream, heldout, make_batch):
    with pytest.raises(ValueError, match="ended after 1 of align.steps 12"):
        align(teacher, make_mixers(), [make_batch()], heldout, config=CONFIG, progress=False)
    with pytest.raises(ValueError, match="at least one held-out batch"):
        align(teacher, make_mixers(), stream(), [], config=CONFIG, progress=False)
    for wrong in ({"steps": -1}, {"batch_size": 0}, {"lr": -1.0}, {"max_grad_norm": 0.0}, {"betas": (0.9, 1.0)}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))}(.1.)? is"):
            AlignConfig(**wrong)


def test_progress_bar_shows_mean_and_worst_layer(teacher, make_mixers, stream, heldout, capsys):
    align(teacher, make_mixers(), stream(), heldout, config=AlignConfig(steps=2, eval_every=1), progress=True)
    assert "held-out error" in (text := capsys.readouterr().err) and "(layer " in text
