"""What a distillation computes from its first step to its last, against the same training written out."""

import math

import pytest
import torch
import torch.nn.functional as F

from tcal_components.checkpoint.run_state import RunState
from tcal_components.data import BatchStream, prepare_batch
from tcal_components.distill import LinearKL, distill
from tcal_components.distributed import ParallelContext

CTX = ParallelContext.create("cpu")
STEPS, BATCH, LENGTH, WARMUP = 7, 4, 20, 3
LOSSES = {
    "forward KL": {},
    "temperature, reverse": {"temperature": 2.0, "direction": "reverse"},
    "with labels": {"kd_ratio": 0.7},
}


@pytest.fixture
def run(tiny):
    """A distillation as the recipes run it, of the tiny pair; returns its result and the student."""

    def run(loss=None, **changes):
        state = changes.pop("state", None)
        options = {"run_state": RunState(state), "resume": True} if state else {}
        options["should_stop"] = changes.pop("should_stop", None)
        config = tiny.make_config(**{"tokens": STEPS * BATCH * LENGTH, "warmup_steps": WARMUP, **changes})
        student, teacher = tiny.make_pair()
        stream = BatchStream(tiny.Packs(), batch_size=config.batch_size, seed=1)
        result = distill(
            student, teacher, stream, config=config, ctx=CTX, loss=LinearKL(chunk_tokens=16, **(loss or {})),
            progress=False, **options,
        )  # fmt: skip
        return result, student

    return run


def dense_loss(student, teacher, batch, *, temperature=1.0, direction="forward", kd_ratio=1.0):
    """Mean over the counted tokens, and the unscaled KL and cross-entropy."""
    inputs = prepare_batch(batch, "cpu")
    labels, tokens = inputs["labels"].flatten(), inputs["tokens"]
    arguments = {"mask": inputs["mask"], "input_pos": inputs["input_pos"]}
    z, z_teacher = (model(tokens, **arguments).flatten(0, 1)[labels != -100] for model in (student, teacher))
    log_q, log_p = F.log_softmax(z / temperature, -1), F.log_softmax(z_teacher.detach() / temperature, -1)
    if direction == "reverse":
        log_q, log_p = log_p, log_q
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    ce = F.cross_entropy(z, labels[labels != -100])
    return kd_ratio * temperature**2 * kl + (1 - kd_ratio) * ce, kl.item(), ce.item()


def rate_and_decay(name, decay):
    """Layers 0 and 2 are converted; only matrices decay."""
    mixer = name.startswith(("layers.0.attn.", "layers.2.attn."))
    vector = any(part in name for part in ("scale", "A_log", "dt_bias", "conv"))
    return 1e-2 if mixer else 3e-3, 0.0 if vector else decay


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("clip", [0.02, None], ids=["clipped", "not clipped"])
def test_the_training_is_that_written_out(tiny, run, loss, clip):
    """With a large eps, so that an update of Adam shows the size of the gradient."""
    optimizer = {"_component_": "torch.optim.AdamW", "betas": [0.8, 0.9], "eps": 0.005}
    result, student = run(loss, clip_grad_norm=clip, optimizer=optimizer, weight_decay=0.1)

    model, teacher = tiny.make_pair()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    stream, norms = BatchStream(tiny.Packs(), batch_size=BATCH, seed=1), []
    groups = []
    for name, parameter in model.named_parameters():
        rate, decay = rate_and_decay(name, 0.1)
        groups.append({"params": [parameter], "lr": rate, "peak": rate, "weight_decay": decay})
    reference = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=0.005)
    for step, entry in enumerate(result.curve):
        total, kl, ce = dense_loss(model, teacher, stream.batch(step), **loss)
        reference.zero_grad()
        total.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)))
        if step < WARMUP:
            factor = step / WARMUP
        else:
            factor = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))
        for group in reference.param_groups:
            group["lr"] = group["peak"] * factor
        reference.step()
        assert entry["step"] == step + 1 and entry["tokens"] == (step + 1) * BATCH * LENGTH
        assert entry["loss"] == pytest.approx(kl, rel=1e-4) and entry["ce"] == pytest.approx(ce, rel=1e-4)
        assert entry["grad_norm"] == pytest.approx(norms[-1], rel=1e-3)
        assert entry["lr"] == pytest.approx(1e-2 * factor)
    assert len(result.curve) == STEPS
    assert min(norms) > 0.02
    for name, value in student.state_dict().items():
        expected = model.state_dict()[name]
        assert (value - expected).norm() < 5e-3 * (expected - start[name]).norm() + 1e-6, name


def test_tokens_that_do_not_fill_a_step_are_left_out(run):
    a_step = BATCH * LENGTH
    for tokens in (2 * a_step, 3 * a_step - 1):
        result, _ = run(tokens=tokens)
        assert result.steps == 2 and result.tokens == 2 * a_step and result.finished
        assert [entry["step"] for entry in result.curve] == [1, 2]


def test_a_size_of_micro_batches_changes_nothing(run):
    """Rows have different numbers of counted tokens, so a mean of means would differ."""
    whole, student = run()
    for size in (3,):
        parts, other = run(micro_batch_size=size)
        for entry, expected in zip(parts.curve, whole.curve, strict=True):
            assert entry == {name: pytest.approx(value, rel=1e-4) for name, value in expected.items()}
        for name, value in student.state_dict().items():
            torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-3, atol=1e-4)


def test_the_default_optimizer_is_adamw_with_the_documented_numbers(tiny, run):
    named = {"_component_": "torch.optim.AdamW", "betas": [0.9, 0.95], "eps": 1e-8}
    (_, default), (_, given) = run(), run(optimizer=named)
    for name, value in given.state_dict().items():
        assert torch.equal(default.state_dict()[name], value), name


def test_the_teacher_stays_and_is_asked_in_evaluation_mode(tiny, run):
    seen = []
    student, teacher = tiny.make_pair()
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    stream = BatchStream(tiny.Packs(), batch_size=BATCH, seed=1)
    teacher.train()
    hook = teacher.norm.register_forward_hook(lambda module, args, y: seen.append((module.training, y.requires_grad)))
    distill(student, teacher, stream, config=tiny.make_config(), ctx=CTX, progress=False)
    hook.remove()
    assert seen and set(seen) == {(False, False)}
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


@pytest.mark.parametrize("stop", [1, 4])
def test_a_stopped_distillation_goes_on_with_the_next_batch(run, tmp_path, stop):
    whole, student = run()
    asked = []

    def should_stop():
        asked.append(None)
        return len(asked) > stop

    first, _ = run(state=tmp_path, should_stop=should_stop)
    assert not first.finished and first.steps == stop
    result, continued = run(state=tmp_path)
    assert result.curve == whole.curve and result.tokens == whole.tokens
    for name, value in student.state_dict().items():
        assert torch.equal(continued.state_dict()[name], value), name
