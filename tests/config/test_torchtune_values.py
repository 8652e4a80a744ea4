"""Torchtune's own words in a config: losses, numbers of training, profiler and metric loggers."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch
from omegaconf import OmegaConf

from tcal_components.config import ConfigError
from tcal_components.config.torchtune_keys import line
from tcal_components.config.torchtune_values import read_torchtune_training
from tcal_components.distill.profiling import profiled
from tcal_components.reporting.metric_logger import check_metric_logger, open_metric_logger

LOGGERS = "torchtune.training.metric_logging"
LOSSES = "torchtune.modules.loss"


# ---------------------------------------------------------------------------------------------------- numbers of training


def test_a_config_in_torchtunes_words_is_the_same_run(config, checked, tmp_path):
    theirs = config(
        distill=None,
        batch_size=2,
        gradient_accumulation_steps=2,
        epochs=2,
        max_steps_per_epoch=3,
        clip_grad_norm=None,
        log_every_n_steps=5,
        loss={"_component_": f"{LOSSES}.CEWithChunkedOutputLoss"},
        kd_loss={"_component_": f"{LOSSES}.ReverseKLLoss"},
        kd_ratio=0.25,
        fsdp_reshard_after_forward=False,
        shuffle=True,
        optimizer={"_component_": "torch.optim.AdamW", "lr": "3e-4"},
    )
    numbers = {"tokens": 2 * 3 * 4 * 32, "batch_size": 4, "micro_batch_size": 2, "clip_grad_norm": None}
    ours = config(
        output_dir=str(tmp_path / "ours"),
        distill={**numbers, "log_every_steps": 5, "lr": 3e-4, "base_lr": 3e-4},
        optimizer={"_component_": "torch.optim.AdamW"},
        kd_loss={"_component_": "tcal_components.distill.LinearKL", "direction": "reverse", "kd_ratio": 0.25},
        parallel={"reshard_after_forward": False},
    )
    (mine, bench), (other, other_bench) = checked(theirs), checked(ours)
    assert mine.distill == other.distill and mine.distill.clip_grad_norm is None
    assert mine.loss.settings == other.loss.settings
    assert bench.parallel == other_bench.parallel and not bench.parallel.reshard_after_forward
    inputs = mine.inputs(bench)
    assert inputs == other.inputs(other_bench), "one goes on where the other was broken"
    again = OmegaConf.create(bench.container())  # as report.json has it
    again.output_dir = str(tmp_path / "again")
    parsed, third = checked(again)
    assert parsed.inputs(third) == inputs


def test_an_epoch_is_the_whole_batches_of_the_text(config, checked):
    parsed, bench = checked(config(distill={"batch_size": 3}, epochs=2))
    assert parsed.distill.steps == 2 * (len(bench.data["training"]) // 3)


def test_a_batch_is_of_each_process(config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    cfg = config(distill={"tokens": 10**4}, batch_size=2, gradient_accumulation_steps=4)
    read_torchtune_training(cfg)
    assert cfg.distill == {"tokens": 10**4, "batch_size": 24, "micro_batch_size": 2}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"log_every_n_steps": 5, "distill": {"log_every_steps": 2}},
            "log_every_n_steps gives distill.log_every_steps 5",
        ),
        ({"batch_size": 2}, "batch_size x gradient_accumulation_steps x 1 processes gives distill.batch_size 2, but"),
        (
            {"epochs": 1},
            "the length in epochs gives distill.tokens 512, but distill.tokens is 256; leave one of them out",
        ),
        ({"epochs": 1, "distill": {"batch_size": 99}}, "epochs: the training text has 16 sequences, fewer than the 99"),
        ({"epochs": 0}, "epochs is 0, expected at least 1"),
        ({"clip_grad_norm": "no"}, "clip_grad_norm is 'no', expected"),
        ({"kd_ratio": 2}, "kd_ratio is 2, expected at least 0 and at most 1"),
        ({"max_steps_per_epoch": 5}, line("max_steps_per_epoch")),
        ({"gradient_accumulation_steps": 5}, line("gradient_accumulation_steps")),
        ({"optimizer": {"_component_": "torch.optim.AdamW", "lr": "fast"}}, "optimizer.lr is 'fast', expected float"),
        ({"shuffle": False}, line("shuffle")),
        ({"optimizer_in_bwd": True}, line("optimizer_in_bwd")),
        ({"tensor_parallel_dim": 2}, line("tensor_parallel_dim")),
        ({"loss": {"_component_": f"{LOSSES}.CEWithChunkedOutputLoss"}}, line("loss")),
        ({"loss": {"_component_": "torch.nn.MSELoss"}, "kd_ratio": 0.5}, line("loss._component_")),
        ({"kd_loss": {"_component_": f"{LOSSES}.CEWithChunkedOutputLoss"}}, line("kd_loss._component_")),
        (
            {"kd_loss": {"_component_": f"{LOSSES}.ForwardKLLoss"}},
            f"kd_loss {LOSSES}.ForwardKLLoss needs kd_ratio beside",
        ),
        (
            {"kd_loss": {"_component_": f"{LOSSES}.ForwardKLWithChunkedOutputLoss", "num_output_chunks": 8}},
            line("kd_loss.num_output_chunks"),
        ),
        (
            {"kd_loss": {"_component_": f"{LOSSES}.SymmetricKLLoss", "sym_kd_ratio": 0.3}, "kd_ratio": 1},
            line("kd_loss.sym_kd_ratio"),
        ),
        ({"stages": ["measure"], "distill": None, "clip_grad_norm": 1}, "clip_grad_norm is of the distillation, which"),
        (
            {"profiler": {"_component_": "torch.profiler.profile"}},
            "profiler._component_ is 'torch.profiler.profile'; allow",
        ),
        ({"profiler": {"enable": True}}, "unknown key 'enable' in profiler (did you mean 'enabled'?)"),
    ],
)
def test_what_contradicts_or_is_not_here_is_one_line(config, checked, changes, said):
    with pytest.raises(ConfigError) as error:
        checked(config(**changes))
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_components_are_switched_off_on_the_command_line(config, checked):
    """Torchtune 0.6.1 makes ``loss._component_=null`` of ``loss=null``."""
    off = {"_component_": None, "checkpoint_dir": "x"}
    cfg = config(loss={"_component_": None}, profiler={"_component_": None, "enabled": True}, checkpointer=off)
    checked(cfg)
    assert cfg.loss is None and cfg.profiler is None and cfg.checkpointer is None


# -------------------------------------------------------------------------------------------------- loggers and profiler


@pytest.mark.parametrize(
    ("name", "package"), [("WandBLogger", "wandb"), ("TensorBoardLogger", "tensorboard"), ("CometLogger", "comet_ml")]
)
def test_a_loggers_package_that_is_missing_is_said_first(config, checked, monkeypatch, name, package):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda given, *rest: None if given == package else real(given, *rest)
    )
    cfg = config(metric_logger={"_component_": f"{LOGGERS}.{name}", "log_dir": "x"}, teacher_checkpointer=None)
    with pytest.raises(ConfigError) as error:
        checked(cfg)
    assert str(error.value) == f"metric_logger {name} needs the package {package}: pip install {package}"


@pytest.mark.parametrize("name", ["DiskLogger", "StdoutLogger", "WandBLogger", "TensorBoardLogger", "CometLogger"])
def test_every_logger_gets_numbers_and_config(config, tmp_path, monkeypatch, capsys, name):
    """With stand-ins for the packages of the services."""
    told = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda *given: object())
    service = types.ModuleType("service")
    run = types.SimpleNamespace(_label=lambda **given: None)
    service.run, service.init = None, lambda **given: setattr(service, "run", run)
    service.define_metric = service.save = lambda *given, **rest: None
    service.config = types.SimpleNamespace(update=lambda given, **rest: told.append(sorted(given)[:1]))
    service.log, service.finish = lambda given, **rest: told.append(given), lambda: None
    experiment = types.SimpleNamespace(
        set_name=lambda *given: None,
        add_tags=lambda *given: None,
        log_other=lambda *given: None,
        log_parameters=lambda given, **rest: told.append(sorted(given)[:1]),
        log_asset=lambda *given, **rest: None,
        log_metrics=lambda given, **rest: told.append(dict(given)),
        end=lambda: None,
    )
    service.ExperimentConfig = lambda **given: None
    service.start = lambda **given: experiment
    writer = types.ModuleType("torch.utils.tensorboard")
    writer.SummaryWriter = lambda log_dir: types.SimpleNamespace(
        add_scalar=lambda name, value, **rest: told.append({name: value}), close=lambda: None
    )
    for module, stand_in in (("wandb", service), ("comet_ml", service), ("torch.utils.tensorboard", writer)):
        monkeypatch.setitem(sys.modules, module, stand_in)
    given = {} if name in ("StdoutLogger", "CometLogger") else {"log_dir": str(tmp_path / "logs")}
    cfg = config(output_dir=str(tmp_path), metric_logger={"_component_": f"{LOGGERS}.{name}", **given})
    logger = open_metric_logger(cfg)
    logger.log_dict({"loss": 1.5}, 3)
    logger.close()
    if name == "DiskLogger":
        assert "loss:1.5" in next((tmp_path / "logs").glob("*.txt")).read_text()
    elif name == "StdoutLogger":
        assert "Step 3 | loss:1.5" in capsys.readouterr().out
    else:
        assert [entry for entry in told if isinstance(entry, dict) and entry.get("loss") == 1.5]
    assert (tmp_path / "torchtune_config.yaml").exists() and open_metric_logger(config()) is None


def refusing(**given):
    raise RuntimeError("api_key not configured\n  call login")


def test_a_logger_that_cannot_start_is_one_line(config):
    check_metric_logger(None)
    with pytest.raises(ConfigError, match="^metric_logger .*refusing cannot start: api_key not configured"):
        open_metric_logger(config(metric_logger={"_component_": f"{__name__}.refusing"}))


def test_the_profiler_follows_the_steps(config, checked, tmp_path):
    cfg = config(profiler={"enabled": True, "wait_steps": 1, "warmup_steps": 1, "active_steps": 2, "num_cycles": 1})
    checked(cfg)
    assert cfg.profiler.output_dir == f"{cfg.output_dir}/profiling_outputs", "below the run's folder"
    device = torch.device("cpu")
    with profiled(cfg.profiler, device) as step:
        for _ in range(5):
            torch.ones(8, 8) @ torch.ones(8, 8)
            step()
    written = [path.name for path in (tmp_path / "out/profiling_outputs/iteration_4").iterdir()]
    assert any(name.endswith(".pt.trace.json.gz") for name in written) and "rank0_key_averages.txt" in written
    for node in (None, OmegaConf.create({"enabled": False, "_component_": "x"})):
        with profiled(node, device) as step:
            assert step is None
