"""Run state: what is saved comes back, only complete checkpoints are seen, and SIGKILL at any moment damages nothing."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from tcal_components.checkpoint.optimizer_state import initialize_optimizer, optimizer_state, restore_optimizer
from tcal_components.checkpoint.run_state import RunState


def state(value, n=5):
    return {
        "model": {"layers.0.w": torch.full((n, 3), float(value))},
        "optimizer": {"step": torch.tensor(float(value))},
    }


def test_round_trip_keeps_the_last_and_lists_them(tmp_path):
    run = RunState(tmp_path / "run", keep_last=2)
    assert run.latest() is None and run.steps() == []
    for step in (1, 2, 3):
        run.save(step, state(step), {"curve": [step, 0.5], "tokens": 10 * step})
    assert run.steps() == [2, 3] and run.latest() == 3
    target = state(0)
    assert run.load(target) == (3, {"curve": [3, 0.5], "tokens": 30})
    assert target["model"]["layers.0.w"].eq(3).all() and target["optimizer"]["step"] == 3
    assert run.load(target, step=2)[0] == 2
    assert target["model"]["layers.0.w"].eq(2).all()
    with pytest.raises(FileNotFoundError, match=r"step 1 .*\[2, 3\]"):
        run.load(target, step=1)


def test_only_a_stage_of_the_same_inputs_is_continued(tmp_path):
    run = RunState(tmp_path / "run")
    assert run.begin({"x": "a"}) is False and run.begin({"x": "a"}) is True  # killed before the first checkpoint
    run.save(1, state(1))
    assert RunState(tmp_path / "run").begin({"x": "a"}) is True and run.steps() == [1]
    assert run.begin({"x": "b"}) is False and run.steps() == []
    run.save(1, state(1))
    assert run.begin({"x": "b"}, resume=False) is False and run.steps() == []
    assert run.begin({"x": "a"}) is False


def test_a_step_saved_again_replaces_the_first(tmp_path):
    run = RunState(tmp_path, keep_last=2)
    run.save(4, state(1))
    run.save(4, state(2))
    target = state(0)
    run.load(target)
    assert target["model"]["layers.0.w"].eq(2).all()
    run.save(5, state(3))
    assert run.steps() == [4, 5]
    run.load(target, step=4)
    assert target["model"]["layers.0.w"].eq(2).all()


def test_incomplete_folders_are_never_listed(tmp_path):
    run = RunState(tmp_path, keep_last=3)
    path = run.save(1, state(1))
    (tmp_path / ".writing-step-00000002").mkdir()
    (tmp_path / "step-00000003").mkdir()
    other = run.save(4, state(4))
    data = next(file for file in other.iterdir() if file.suffix == ".distcp")
    data.write_bytes(data.read_bytes()[:-1])
    assert run.steps() == [1] and path.is_dir()
    run.save(5, state(5))
    assert not (tmp_path / ".writing-step-00000002").exists()


def test_a_checkpoint_of_another_shape_or_name_is_refused(tmp_path):
    run = RunState(tmp_path)
    run.save(1, state(1))
    with pytest.raises(ValueError, match=r"model.layers.0.w is \(5, 3\) there and \(6, 3\) here"):
        run.load(state(0, n=6))
    other = state(0)
    other["model"]["extra"] = torch.zeros(1)
    with pytest.raises(ValueError, match="model.extra is missing there"):
        run.load(other)
    with pytest.raises(FileNotFoundError, match="steps found: none"):
        RunState(tmp_path / "nothing").load(other)
    with pytest.raises(ValueError, match="keep_last"):
        RunState(tmp_path, keep_last=0)
    with pytest.raises(TypeError):
        run.save(2, state(2), {"no json": object()})
    assert run.steps() == [1]


class CountingAdam(torch.optim.Optimizer):
    """Adam that keeps plain numbers, as bitsandbytes does: its steps and a running product."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(step=0, product=1.0, unused=None)
                    state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
                state["step"] += 1
                state["product"] *= 0.9
                state["exp_avg"].lerp_(parameter.grad, 0.1)
                state["exp_avg_sq"].lerp_(parameter.grad.square(), 0.01)
                denominator = (state["exp_avg_sq"] / (1 - 0.99 ** state["step"])).sqrt() + 1e-8
                parameter -= group["lr"] / (1 - state["product"]) * state["exp_avg"] / denominator


@pytest.mark.parametrize("kind", ["adamw", "adamw 8 bit", "counting adam"])
def test_optimizer_state_comes_back_exactly(kind, tmp_path):
    from torchao.optim import AdamW8bit

    optimizers = {"adamw": torch.optim.AdamW, "adamw 8 bit": AdamW8bit, "counting adam": CountingAdam}

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 8))
        return model, optimizers[kind](model.parameters(), lr=1e-2)

    def train(model, optimizer, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            model(torch.randn(16, 64, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = build()
    # torchao compiles its step; half a minute of compiler would test nothing here.
    torch.compiler.set_stance("force_eager")
    train(model, optimizer, range(3))
    RunState(tmp_path).save(3, {"model": model.state_dict(), "optimizer": optimizer_state(model, optimizer)})
    train(model, optimizer, range(3, 6))

    again, fresh = build()
    before = {name: value.clone() for name, value in again.state_dict().items()}
    initialize_optimizer(fresh)
    assert all(torch.equal(before[name], value) for name, value in again.state_dict().items())
    assert all(state["step"] == 0 for state in fresh.state.values())
    moments = optimizer_state(again, fresh)
    RunState(tmp_path).load({"model": again.state_dict(), "optimizer": moments})
    restore_optimizer(again, fresh, moments)
    if kind == "counting adam":
        assert all(
            type(state["step"]) is int and state["step"] == 3 and type(state["product"]) is float
            for state in fresh.state.values()
        )
    train(again, fresh, range(3, 6))
    torch.compiler.set_stance("default")
    for name, value in model.state_dict().items():
        if kind != "adamw 8 bit":
            assert torch.equal(value, again.state_dict()[name]), name
        else:  # codes are the same, scales within a rounding
            torch.testing.assert_close(again.state_dict()[name], value, rtol=1e-6, atol=1e-7)


def test_an_optimizer_whose_state_would_be_lost_is_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["projector"] = object()
    with pytest.raises(ValueError, match="SGD keeps 'projector' of weight as object; a checkpoint holds tensors"):
        optimizer_state(model, optimizer)


SAVE_FOREVER = """
import sys, torch
from tcal_components.checkpoint.run_state import RunState
run = RunState(sys.argv[1], keep_last=2)
step = run.latest() or 0
while True:
    step += 1
    run.save(step, {"model": {"a": torch.full((20000,), float(step)), "b": torch.full((7,), float(step))}}, {"at": step})
    print(step, flush=True)
"""


def test_sigkill_at_any_moment(tmp_path):
    folder = tmp_path / "run"
    seen = 0
    moment = random.Random(0)
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        line = process.stdout.readline()  # imports are over and one save is done
        time.sleep(moment.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        lines = [line, *process.stdout.read().split()]
        process.wait()
        process.stdout.close()
        run = RunState(folder)
        assert int(line) == seen + 1  # it continued where the killed one stood
        assert run.latest() in (int(lines[-1]), int(lines[-1]) + 1)  # nothing reported as saved is lost
        for step in run.steps():
            target = {"model": {"a": torch.zeros(20000), "b": torch.zeros(7)}}
            assert run.load(target, step=step) == (step, {"at": step})
            assert all(value.eq(step).all() for value in target["model"].values())
        seen = run.latest()
