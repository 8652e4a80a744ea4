"""The distillation loop: exact means, resume, and one process against two."""

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tcal_components.checkpoint.run_state import RunState
from tcal_components.data import prepare_batch
from tcal_components.distill import DistillConfig, LinearKL, NonFiniteLossError, parameter_groups, train
from tcal_components.distill.loop import backward
from tcal_components.distill.optimizer import build_schedule
from tcal_components.distributed import ParallelContext, gather_full_state_dict

CTX = ParallelContext.create("cpu")


@pytest.fixture(scope="module")
def run(tiny):
    """Trains a distiller, up to a step or to its end; returns its result and the student's weights."""

    def run(distiller, stop=None):
        result = tiny.train_until(distiller, stop)
        return result, gather_full_state_dict(distiller.student, ctx=CTX)

    return run


def assert_same(got, want, tolerance=0.0):
    assert got.keys() == want.keys()
    for name, value in want.items():
        if tolerance == 0.0:
            assert torch.equal(got[name], value), name
        else:
            torch.testing.assert_close(
                got[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def losses(curve):
    return [entry["loss"] for entry in curve]


def assert_same_curve(got, want):
    assert losses(got) == pytest.approx(losses(want), rel=1e-5)
    # Adam hides a wrong scale of the gradient, its norm does not.
    assert [e["grad_norm"] for e in got] == pytest.approx([e["grad_norm"] for e in want], rel=1e-4)


@pytest.fixture(scope="module")
def unbroken(tiny, run):
    return run(tiny.make_distiller(CTX))


def test_first_gradient_is_that_of_the_dense_mean_over_the_global_batch(tiny):
    distiller = tiny.make_distiller(CTX, config=tiny.make_config(micro_batch_size=1))
    batch = distiller.stream.batch(0)
    counted = int((batch["labels"] != -100).sum())
    kl_ce = backward(distiller, batch, counted)[:2]
    norm = distiller.clip()
    grads = {name: p.grad.clone() for name, p in distiller.student.named_parameters()}

    student, teacher = tiny.make_pair()
    inputs = prepare_batch(batch, "cpu")
    labels = inputs.pop("labels").flatten()
    tokens = inputs.pop("tokens")
    inputs.pop("document")
    log_q = F.log_softmax(student(tokens, **inputs).flatten(0, 1), -1)
    log_p = F.log_softmax(teacher(tokens, **inputs).flatten(0, 1), -1).detach()
    keep = labels != -100
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)[keep].mean()
    ce = F.nll_loss(log_q[keep], labels[keep])
    (0.7 * kl + 0.3 * ce).backward()
    assert kl_ce == pytest.approx([kl.item(), ce.item()], rel=1e-5)
    total = torch.stack([p.grad.norm() for p in student.parameters()]).norm().item()
    assert norm == pytest.approx(total, rel=1e-4)
    scale = min(1.0, 1.0 / (total + 1e-6))
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad * scale, rtol=1e-4, atol=1e-6)


def test_it_learns_and_reports(tiny, unbroken):
    result, _ = unbroken
    assert result.finished and result.steps == 6 and result.tokens == 480
    assert [entry["step"] for entry in result.curve] == [1, 2, 3, 4, 5, 6]
    assert result.curve[-1]["loss"] < 0.9 * result.curve[0]["loss"]
    assert result.curve[0]["lr"] == 0.0 and result.curve[1]["lr"] == pytest.approx(1e-2)

    logged, evaluated = [], []

    def evaluate(step):
        evaluated.append(step)
        assert not distiller.student.training and not torch.is_grad_enabled()
        return {"perplexity": 2.0 * step}

    config = tiny.make_config(eval_every_steps=4, log_every_steps=5)
    distiller = tiny.make_distiller(CTX, config=config)
    curve = train(distiller, on_eval=evaluate, on_log=lambda values, step: logged.append((step, values))).curve
    assert evaluated == [4, 6] and [entry["step"] for entry in curve] == [4, 5, 6]
    assert curve[0] == {"step": 4, "tokens": 320, "perplexity": 8.0}
    assert {"loss", "lr", "grad_norm", "tokens_per_second"} <= dict(logged)[5].keys()


def test_resume_equals_the_unbroken_run_bit_for_bit(tiny, run, unbroken, tmp_path):
    state = RunState(tmp_path)
    first, _ = run(tiny.make_distiller(CTX, run_state=state), stop=4)
    assert not first.finished and state.latest() == 4
    second, weights = run(tiny.make_distiller(CTX, run_state=state, resume=True))
    assert second.finished and state.latest() == 6
    assert_same(weights, unbroken[1])
    assert second.curve == unbroken[0].curve
    again, weights = run(tiny.make_distiller(CTX, run_state=state, resume=True))  # finished already
    assert_same(weights, unbroken[1])
    assert again.steps == 6
    with pytest.raises(ValueError, match="batch_size and distill.seq_len"):
        run(tiny.make_distiller(CTX, run_state=state, resume=True, config=tiny.make_config(batch_size=2)))


def test_two_processes(tiny, run, unbroken, tmp_path):
    """FSDP2 over gloo against one process: losses, weights, and checkpoints in both directions."""
    run(tiny.make_distiller(CTX, run_state=RunState(tmp_path / "by_one")), stop=3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(here / "worker.py"), str(tmp_path)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    two = torch.load(tmp_path / "two.pt", weights_only=True)

    result, weights = unbroken
    untied = run(tiny.make_distiller(CTX, tied=False))
    for name, (want, want_weights) in {
        "tied": unbroken,
        "untied": untied,
        "resumed by_two": unbroken,
        "resumed by_one": unbroken,
    }.items():
        assert two[name]["finished"], name
        assert_same_curve(two[name]["curve"], want.curve)
        assert_same(two[name]["weights"], want_weights, 1e-5)
    for name in ("stopped", "offload", "hsdp"):
        assert not two[name]["finished"], name
        assert_same_curve(two[name]["curve"], result.curve[:3])
    assert losses(two["bf16"]["curve"]) == pytest.approx(losses(result.curve[:3]), rel=0.05)
    config = tiny.make_config(eval_every_steps=2)
    judged, got = run(tiny.make_distiller(CTX, config=config, heldout=lambda: tiny.heldout_batches(CTX)))
    for name in ("judged", "judged harmful"):
        assert two[name]["heldout_loss"]["first"] == pytest.approx(judged.heldout_loss["first"], rel=1e-5)
    assert two["judged"]["best_step"] == judged.best_step
    assert_same(two["judged"]["weights"], got, 1e-5)
    assert two["judged harmful"]["best_step"] == 0
    assert_same(two["judged harmful"]["weights"], tiny.make_pair()[0].state_dict())
    float8 = train(tiny.make_distiller(CTX, float8=True))
    assert losses(two["float8"]["curve"]) == pytest.approx(losses(float8.curve[:3]), rel=0.01)
    assert losses(float8.curve) != losses(result.curve)
    assert losses(float8.curve) == pytest.approx(losses(result.curve), rel=0.1)
    continued, got = run(tiny.make_distiller(CTX, run_state=RunState(tmp_path / "by_two"), resume=True))
    assert_same_curve(continued.curve, result.curve)
    assert_same(got, weights, 1e-5)


def test_a_loss_that_is_no_number_stops_and_loses_nothing(tiny, tmp_path):
    state = RunState(tmp_path)
    distiller = tiny.make_distiller(CTX, run_state=state)
    inner = distiller.model.loss.forward

    def broken(*args):
        total, parts = inner(*args)
        return total * (math.nan if distiller.step == 2 else 1.0), parts

    distiller.model.loss.forward = broken
    with pytest.raises(NonFiniteLossError, match=r"step 3 of 6.*after step 2.*lower distill.lr"):
        train(distiller)
    assert state.latest() == 2
    kept = gather_full_state_dict(distiller.student, ctx=CTX)
    assert all(value.isfinite().all() for value in kept.values())
    resumed = tiny.make_distiller(CTX, run_state=state, resume=True)
    resumed._load()
    assert_same(gather_full_state_dict(resumed.student, ctx=CTX), kept)


def test_stop_before_the_first_step_resumes_to_the_same_numbers(tiny, run, unbroken, tmp_path):
    state = RunState(tmp_path)
    assert run(tiny.make_distiller(CTX, run_state=state), stop=0)[0].steps == 0
    assert_same(run(tiny.make_distiller(CTX, run_state=state, resume=True))[1], unbroken[1])


def heldout_loss(tiny, student):
    teacher = tiny.make_pair()[1]
    (batch,) = tiny.heldout_batches(CTX)
    labels = batch["labels"].flatten()
    inputs = {key: batch[key] for key in ("mask", "input_pos")}
    with torch.no_grad():
        z, z_teacher = (model(batch["tokens"], **inputs).flatten(0, 1)[labels != -100] for model in (student, teacher))
    log_q, log_p = F.log_softmax(z, -1), F.log_softmax(z_teacher, -1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    return float(0.7 * kl + 0.3 * F.cross_entropy(z, labels[labels != -100]))


@pytest.fixture
def judged(tiny):
    """A distiller that judges itself every two steps; ``lr`` decides whether that helps."""

    def make(**arguments):
        changes = {name: arguments.pop(name) for name in ("lr", "base_lr", "keep_best") if name in arguments}
        config = tiny.make_config(eval_every_steps=2, **changes)
        return tiny.make_distiller(CTX, config=config, heldout=lambda: tiny.heldout_batches(CTX), **arguments)

    return make


HARMFUL = {"lr": 3.0, "base_lr": 3.0}


@pytest.mark.parametrize("saves", [True, False], ids=["on disk", "in memory"])
def test_it_never_ends_worse_than_it_began(tiny, run, judged, tmp_path, caplog, saves):
    distiller = judged(run_state=RunState(tmp_path) if saves else None, **HARMFUL)
    start = gather_full_state_dict(distiller.student, ctx=CTX)
    with caplog.at_level("WARNING"):
        result, weights = run(distiller)
    assert result.finished and result.steps == 6 and result.best_step == 0
    assert_same(weights, start)
    losses = result.heldout_loss
    assert losses["first"] == losses["best"] == pytest.approx(heldout_loss(tiny, distiller.student), rel=1e-5)
    assert losses["last"] > losses["first"]
    (said,) = [record.getMessage() for record in caplog.records if "held-out loss rose" in record.getMessage()]
    assert "after 2 steps; lower distill.lr (3)" in said and "\n" not in said


def test_the_best_weights_are_those_of_the_least_heldout_loss(tiny, run, judged, tmp_path):
    result, weights = run(judged(run_state=RunState(tmp_path)))
    rows = {row["step"]: row["heldout_loss"] for row in result.curve if "heldout_loss" in row}
    assert list(rows) == [2, 4, 6]
    best = min(rows, key=rows.get)
    assert result.best_step == best and result.heldout_loss["best"] == rows[best] < result.heldout_loss["first"]
    student = tiny.make_pair()[0]
    student.load_state_dict(weights)
    assert heldout_loss(tiny, student) == pytest.approx(rows[best], rel=1e-5)
    assert [path.name for path in (tmp_path / "best").glob("step-*")] == [f"step-{best:08d}"]


@pytest.mark.parametrize("rates", [{}, HARMFUL], ids=["helpful", "harmful"])
@pytest.mark.parametrize("stop", [0, 3, 5])
def test_resume_ends_with_the_same_best_weights(run, judged, tmp_path, stop, rates):
    unbroken, weights = run(judged(run_state=RunState(tmp_path / "unbroken"), **rates))
    state = RunState(tmp_path / "stopped")
    assert not run(judged(run_state=state, **rates), stop)[0].finished
    for _ in range(2):  # the second time it is finished already
        result, got = run(judged(run_state=state, resume=True, **rates))
        assert (result.best_step, result.heldout_loss) == (unbroken.best_step, unbroken.heldout_loss)
        assert result.curve == unbroken.curve
        assert_same(got, weights)


def test_a_kill_after_better_weights_costs_nothing(run, judged, tmp_path):
    """Killed at step 5: the last checkpoint is of step 3, which knows the best of step 2, those of step 4 are there too."""
    unbroken, weights = run(judged(run_state=RunState(tmp_path / "unbroken")))
    state = RunState(tmp_path / "killed")
    killed = judged(run_state=state)

    def kill():
        if killed.step == 5:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        train(killed, should_stop=kill)
    assert state.latest() == 3 and RunState(tmp_path / "killed" / "best").steps() == [2, 4]
    result, got = run(judged(run_state=state, resume=True))
    assert result.curve == unbroken.curve and result.best_step == unbroken.best_step
    assert_same(got, weights)


def test_without_keep_best_the_last_weights_stay(run, judged, unbroken):
    result, weights = run(judged(keep_best=False))
    assert result.best_step is None and result.heldout_loss == {}
    assert_same(weights, unbroken[1])


def test_parameter_groups(tiny):
    student, _ = tiny.make_pair(tied=False)
    groups = parameter_groups(student, lr=1e-3, base_lr=1e-4, weight_decay=0.1)
    names = {id(parameter): name for name, parameter in student.named_parameters()}
    assert sum(len(group["params"]) for group in groups) == len(names)
    for group in groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            mixer = name.startswith(("layers.0.attn.", "layers.2.attn."))
            assert group["lr"] == (1e-3 if mixer else 1e-4), name
            plain = any(part in name for part in ("scale", "A_log", "dt_bias", "conv"))
            assert group["weight_decay"] == (0.0 if plain else 0.1), name


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tokens": 79}, "at least one step"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"lr": -1.0}, "lr is -1"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm"),
    ],
)
def test_settings_out_of_range(tiny, changes, match):
    with pytest.raises(ValueError, match=match):
        tiny.make_config(**changes)


def test_a_schedule_by_its_component(tiny):
    """torchtune's, with the numbers of the default, also from the middle."""
    cosine = {"_component_": "torchtune.training.get_cosine_schedule_with_warmup", "num_warmup_steps": 2}
    group = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.5, "initial_lr": 0.5}
    rates = []
    for changes in ({"warmup_steps": 2}, {"warmup_steps": 7, "lr_scheduler": cosine}):
        config = tiny.make_config(**changes)
        for step in (0, 1, 2, 3):
            schedule = build_schedule(torch.optim.SGD([dict(group)]), config, step=step)
            rates.append(schedule.get_last_lr())
    assert rates[:4] == rates[4:] and len({rate for (rate,) in rates}) == 4
    with pytest.raises(ValueError, match="lr_scheduler makes a dict; allowed is what returns a LambdaLR"):
        wrong = {"_component_": f"{__name__}.no_schedule"}
        build_schedule(torch.optim.SGD([dict(group)]), tiny.make_config(lr_scheduler=wrong))


def no_schedule(optimizer, num_training_steps, last_epoch):
    return {}


def test_mistakes_are_one_line(tiny):
    with pytest.raises(ValueError, match="needs device=cuda"):
        tiny.make_distiller(CTX, config=tiny.make_config(activation_offloading=True))
    with pytest.raises(ValueError, match="_component_"):
        tiny.make_distiller(CTX, config=tiny.make_config(optimizer={"lr": 1.0}))
    with pytest.raises(ValueError, match="lr is 1.0; set distill.lr and distill.base_lr instead"):
        tiny.make_distiller(CTX, config=tiny.make_config(optimizer={"_component_": "torch.optim.AdamW", "lr": 1.0}))
    with pytest.raises(ValueError, match="data come 4 a step"):
        distiller = tiny.make_distiller(CTX)
        type(distiller)(
            distiller.student,
            distiller.model.teacher,
            distiller.stream,
            config=DistillConfig(tokens=1000, batch_size=8, seq_len=20),
            ctx=CTX,
            loss=LinearKL(),
        )
