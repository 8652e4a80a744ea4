"""Every key of torchtune's knowledge-distillation and full-finetune configs works, or gives its line of the table."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

import datasets
import pytest
import torchtune
from omegaconf import OmegaConf
from torchtune._recipe_registry import get_all_recipes

from tcal_components.assets import asset_path
from tcal_components.config import ConfigError
from tcal_components.config.torchtune_keys import TORCHTUNE_KEYS, line, page

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = Path(torchtune.__file__).parents[1] / "recipes"
TEACHER = str(asset_path("quickstart"))
HF = "torchtune.training.FullModelHFCheckpointer"
COSINE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
CROSS_ENTROPY = "torchtune.modules.loss.CEWithChunkedOutputLoss"


@functools.cache
def theirs() -> dict[str, list]:
    """Keys of all those configs, and the values that each has in them."""
    found: dict[str, list] = {}

    def walk(node: dict, prefix: str = "") -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                found.setdefault(f"{prefix}{key}", [])
                walk(value, f"{prefix}{key}.")
            elif value not in found.setdefault(f"{prefix}{key}", []):
                found[f"{prefix}{key}"].append(value)

    for recipe in get_all_recipes():
        if recipe.name.startswith(("knowledge_distillation", "full_finetune")):
            for config in recipe.configs:
                walk(OmegaConf.to_container(OmegaConf.load(RECIPES / "configs" / config.file_path)))
    assert len(found) > 80
    return found


# Values that name places of another machine are replaced, so one of each is enough.
_PLACES = ("checkpoint_dir", "output_dir", "path")
CASES = [
    (key, value)
    for key, values in sorted(theirs().items())
    for value in values[: 1 if key.rpartition(".")[2] in _PLACES else None]
]

# What stands beside a key in a config, so that it is this key's value that is looked at.
BESIDE: dict[str, dict] = {
    "batch_size": {"distill": {"tokens": 2048}},
    "checkpointer": {"teacher_checkpointer": None, "checkpointer": {"_component_": HF, "checkpoint_dir": TEACHER}},
    "epochs": {"distill": {"batch_size": 2}},
    "gradient_accumulation_steps": {"batch_size": 2, "distill": {"tokens": 2048}},
    "kd_loss": {"kd_ratio": 0.5},
    "loss": {"kd_ratio": 0.5},
    "lr_scheduler": {"lr_scheduler": {"_component_": COSINE, "num_warmup_steps": 1}},
    "max_steps_per_epoch": {"epochs": 1, "distill": {"batch_size": 2}},
    "metric_logger": {"metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "x"}},
    "optimizer": {"optimizer": {"_component_": "torch.optim.AdamW"}},
    "teacher_checkpointer": {"teacher_checkpointer": {"_component_": HF, "checkpoint_dir": TEACHER}},
}
# Values that name files or devices of another machine.
OURS = {
    "checkpointer.checkpoint_dir": TEACHER,
    "teacher_checkpointer.checkpoint_dir": TEACHER,
    "device": "cpu",
}
# Of the keys with `some` values that depend on the rest of the config, those that fit the one of these tests.
FITTING = {
    "checkpointer._component_": [HF],
    "checkpointer.checkpoint_files": [["model.safetensors"]],
    "checkpointer.output_dir": ["${output_dir}"],
    "dataset._component_": [
        "torchtune.datasets.alpaca_dataset",
        "torchtune.datasets.alpaca_cleaned_dataset",
    ],
    "kd_loss._component_": ["torchtune.modules.loss.ForwardKLWithChunkedOutputLoss"],
    "loss._component_": [CROSS_ENTROPY],
    "teacher_checkpointer._component_": [HF],
    "teacher_checkpointer.checkpoint_files": [["model.safetensors"]],
    "teacher_checkpointer.output_dir": ["${output_dir}"],
}


# What works needs a GPU, several processes or a network.
NEEDS = {
    (
        "enable_activation_offloading",
        "True",
    ): "enable_activation_offloading is true and device is cpu; it moves activations",
    ("fsdp_cpu_offload", "True"): "parallel.cpu_offload needs several processes",
}


def with_key(config, folder, key: str, value):
    """The tests' config with one of torchtune's keys in it."""
    section = key.partition(".")[0]
    cfg = config(**BESIDE.get(section, {}))
    if key == "dataset._component_" and "multimodal" not in value:
        data = {"source": "json", "data_files": str(folder / "instruct.jsonl"), "seq_len": 64}
        cfg.dataset = {"_component_": value, **data}
    elif key == "tokenizer.path":
        cfg.tokenizer.path = str(folder / "tokenizer")
    elif key == "output_dir":
        cfg.output_dir = f"{cfg.output_dir}/{value.strip('/')}"
    elif key == "dataset.subset":
        cfg.dataset = {**cfg.dataset, "subset": value, "source": "owner/name", "skip_tokens": 0}
    elif key.startswith("checkpointer.checkpoint_files."):
        cfg.checkpointer.checkpoint_files = {"filename_format": "model-{}-of-{}.safetensors", "max_filename": "00003"}
        cfg.checkpointer.checkpoint_files[key.rpartition(".")[2]] = value
    else:
        OmegaConf.update(cfg, key, OURS.get(key, value), force_add=True)
    return cfg


def test_the_table_has_every_key_and_the_page_is_the_table():
    assert not [key for key in theirs() if key not in TORCHTUNE_KEYS]
    assert (REPOSITORY / "docs/torchtune_keys.md").read_text() == page(), (
        "python -m tcal_components.config.torchtune_keys > docs/torchtune_keys.md"
    )


def test_the_table_has_what_the_recipes_read_besides():
    for path in RECIPES.glob("*.py"):
        if path.name.startswith(("knowledge_distillation", "full_finetune")):
            read = set(re.findall(r"\bcfg\.(?:get\(\s*\")?(\w+)", path.read_text())) - {"get"}
            assert not read - set(TORCHTUNE_KEYS) - {"ac_mode", "ac_option"}, (
                path
            )  # those two are of one config in dev/


@pytest.mark.parametrize(("key", "value"), CASES, ids=[f"{key}={value}"[:60] for key, value in CASES])
def test_a_key_works_or_gives_its_line(config, folder, checked, monkeypatch, key, value):
    row, cfg = TORCHTUNE_KEYS[key], with_key(config, folder, key, value)
    said = None
    if key == "optimizer._component_" and importlib.util.find_spec(value.split(".")[0]) is None:
        said = f"optimizer._component_ '{value}' cannot be imported: the package bitsandbytes is not installed"
    elif (key, str(value)) in NEEDS:
        said = NEEDS[key, str(value)]
    elif row.outcome == "line" or (row.outcome == "some" and value not in (*row.accepts, *FITTING.get(key, []))):
        nested = key.startswith(("checkpointer.checkpoint_files.", "tensor_parallel_plan."))
        said = line(key.rpartition(".")[0] if nested else key)
    if key == "dataset.subset":  # without a network
        rows = [{"text": f"Of the subset, number {i}. " + "Some more text. " * 20} for i in range(9)]
        hub = {("owner/name", value): datasets.Dataset.from_list(rows)}
        monkeypatch.setattr(datasets, "load_dataset", lambda source, subset, **given: hub[source, subset])
    if said is None:
        checked(cfg)
        return
    with pytest.raises(ConfigError) as error:
        checked(cfg)
    assert "\n" not in str(error.value)
    assert str(error.value) == said or ((key, str(value)) in NEEDS and str(error.value).startswith(said))
