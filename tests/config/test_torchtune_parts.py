"""Torchtune's own parts in a config: datasets, checkpointer, losses, numbers of training, profiler and metric loggers."""

from __future__ import annotations

import importlib.util
import json
import sys
import types

import pytest
import torch
from omegaconf import OmegaConf

from tcal_components.assets import asset_path
from tcal_components.config import ConfigError
from tcal_components.config.torchtune_keys import line
from tcal_components.config.torchtune_values import read_torchtune_training
from tcal_components.distill.profiling import profiled
from tcal_components.reporting.metric_logger import check_metric_logger, open_metric_logger

TEACHER = str(asset_path("quickstart"))
LOGGERS = "torchtune.training.metric_logging"
HF = "torchtune.training.FullModelHFCheckpointer"
LOSSES = "torchtune.modules.loss"
DATASETS = "torchtune.datasets"


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
    prints = mine.fingerprints(bench, uses_alignment=False)
    assert prints == other.fingerprints(other_bench, uses_alignment=False), "one goes on where the other was broken"
    again = OmegaConf.create(bench.container())  # as report.json has it
    again.output_dir = str(tmp_path / "again")
    parsed, third = checked(again)
    assert parsed.fingerprints(third, uses_alignment=False) == prints


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


# -------------------------------------------------------------------------------------------------- components


@pytest.mark.parametrize(
    "node",
    [
        {"_component_": f"{DATASETS}.instruct_dataset", "data_files": "instruct.jsonl",
         "column_map": {"input": "instruction", "output": "output"}},
        {"_component_": f"{DATASETS}.alpaca_dataset", "data_files": "instruct.jsonl", "train_on_input": False},
        {"_component_": f"{DATASETS}.chat_dataset", "data_files": "chat.jsonl", "conversation_column": "messages",
         "conversation_style": "openai"},
        {"_component_": f"{DATASETS}.text_completion_dataset", "data_files": "all.jsonl", "split_across_pack": False},
    ],
    ids=lambda node: node["_component_"].rpartition(".")[2],
)  # fmt: skip
def test_torchtunes_datasets_are_texts(config, checked, folder, node):
    """Each of the three texts; ``packed`` says what happens anyway."""
    length = 128 if "alpaca" in node["_component_"] else 64  # its prompts are long
    node = {**node, "source": "json", "data_files": str(folder / node["data_files"]), "packed": True, "seq_len": length}
    text = "text_completion" in node["_component_"]
    if text:  # long documents, of which a sequence has the beginning
        parts = {"dataset": {**node, "max_sequences": 8, "skip_tokens": 2600}}
    else:
        parts = {
            "calibration_dataset": {**node, "split": "train", "max_sequences": 4},
            "dataset": {**node, "split": "train", "max_sequences": 8, "skip_tokens": 25 * length},
            "validation_dataset": {**node, "split": "train", "max_sequences": 4, "skip_tokens": 40 * length},
        }
    align = {"seq_len": length if not text else 32, "batch_size": 4, "heldout_batches": 1}
    _, bench = checked(config(**parts, align=align, distill={"tokens": 4 * length, "batch_size": 4}))
    roles = {"calibration_dataset": "calibration", "dataset": "training", "validation_dataset": "evaluation"}
    for key, part in parts.items():
        data = bench.data[roles[key]]
        assert data.seq_len == length and 0 < len(data) <= part["max_sequences"]
        assert (data[0]["labels"] >= 0).any() and data.documents[0].where.startswith("sample")
    if not text:
        assert bench.data["heldout"].seq_len == length
        assert (bench.data["training"][0]["labels"] == -100).sum() > 4, "prompts are not learned"


def test_several_datasets_are_one(config, checked, folder):
    node = {"_component_": f"{DATASETS}.alpaca_dataset", "source": "json", "data_files": str(folder / "instruct.jsonl")}
    chat = {
        "_component_": f"{DATASETS}.chat_dataset",
        "source": "json",
        "split": "train",
        "data_files": str(folder / "chat.jsonl"),
        "conversation_column": "messages",
        "conversation_style": "openai",
    }
    tokenizer = {
        "_component_": "tcal_components.data.hf_tokenizer",
        "path": str(folder / "tokenizer"),
        "max_seq_len": 96,
    }
    _, bench = checked(config(dataset=[node, chat], tokenizer=tokenizer, distill={"tokens": 1024, "batch_size": 4}))
    assert len(bench.data["training"].documents) == 160
    assert bench.data["training"].seq_len == 96, "tokenizer.max_seq_len, as in torchtune"
    with pytest.raises(ConfigError, match="^dataset is a list, in which only torchtune's datasets can stand"):
        checked(config(dataset=[node, {"_component_": "tcal_components.data.packed_text"}]))
    with pytest.raises(
        ConfigError, match="^dataset.seq_len is missing: tokens a sequence; without it tokenizer.max_seq"
    ):
        checked(config(dataset=node))


@pytest.mark.parametrize("where", ["dataset", "validation_dataset"])
def test_datasets_that_are_not_of_samples(config, checked, where):
    for name in ("multimodal.the_cauldron_dataset", "preference_dataset", "PackedDataset"):
        with pytest.raises(ConfigError, match=f"^{where}._component_ does not fit: it is not of samples"):
            checked(config(**{where: {"_component_": f"{DATASETS}.{name}", "seq_len": 64}}))


def test_switches_of_packing_beside_text(config, checked):
    text = OmegaConf.to_container(config().dataset)
    checked(config(dataset={**text, "packed": True, "split_across_pack": False}))
    for key, value in (("packed", False), ("split_across_pack", True)):
        with pytest.raises(ConfigError) as error:
            checked(config(dataset={**text, key: value}))
        assert str(error.value) == line(f"dataset.{key}")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder that torchtune's checkpointer could be of: its files and model_type are looked at, no weight is."""
    root = tmp_path_factory.mktemp("llama")
    (root / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for number in (1, 2):
        (root / f"model-{number:05d}-of-00002.safetensors").touch()
    return root


@pytest.mark.parametrize("where", ["checkpointer", "teacher_checkpointer"])
def test_the_checkpointer_of_torchtune_names_the_folder(config, llama, where):
    from tcal_components.config.torchtune_components import read_torchtune_components

    node = {
        "_component_": HF,
        "checkpoint_dir": str(llama),
        "model_type": "LLAMA3_2",
        "output_dir": "${output_dir}",
        "recipe_checkpoint": None,
        "safe_serialization": True,
    }
    files = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    for named in (files, {"filename_format": "model-{}-of-{}.safetensors", "max_filename": "00002"}):
        cfg = config(teacher_checkpointer=None)
        cfg[where] = {**node, "checkpoint_files": named}
        cfg.again = f"${{{where}.checkpoint_dir}}"
        read_torchtune_components(cfg, ())
        assert cfg.teacher_checkpointer == {
            "_component_": "tcal_components.checkpoint.teacher.HFTeacherCheckpointer",
            "checkpoint_dir": str(llama),
        }
        assert cfg.again == str(llama)
    for key, value in (
        ("checkpoint_files", files[:1]),
        ("model_type", "QWEN2"),
        ("output_dir", "/elsewhere"),
        ("recipe_checkpoint", "recipe_state.pt"),
        ("adapter_checkpoint", "adapter.pt"),
        ("safe_serialization", False),
        ("should_load_recipe_state", True),
    ):
        cfg = config(teacher_checkpointer=None)
        cfg[where] = {**node, key: value}
        with pytest.raises(ConfigError) as error:
            read_torchtune_components(cfg, ())
        assert str(error.value) == line(f"{where}.{key}")


def test_there_is_one_checkpointer(config, checked, tmp_path):
    teacher = {"_component_": HF, "checkpoint_dir": TEACHER}
    checked(config(checkpointer=teacher))
    with pytest.raises(ConfigError) as error:
        checked(config(checkpointer={**teacher, "checkpoint_dir": str(tmp_path)}))
    assert str(error.value) == line("checkpointer")
    for where, given in (("model", "llama3_2.llama3_2_1b"), ("teacher_model", "qwen2.qwen2_1_5b")):
        with pytest.raises(ConfigError) as error:
            checked(config(**{where: {"_component_": f"torchtune.models.{given}"}}))
        assert str(error.value) == line(f"{where}._component_")


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
