"""Reads torchtune's datasets and checkpointer into ours, before anything else looks at a config."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from torchtune.training import FormattedCheckpointFiles, FullModelHFCheckpointer

from tcal_components.assets import PREFIX, resolve
from tcal_components.config.files import read_json_object
from tcal_components.config.parse import check_component
from tcal_components.config.schema import ConfigError, check_keys, shown
from tcal_components.config.torchtune_keys import TORCHTUNE_KEYS, line

PACKED = "tcal_components.data.packed_chat"
_DATASETS = "torchtune.datasets."
_SAMPLES = frozenset(
    f"{_DATASETS}{name}"
    for name in (
        *("alpaca_dataset", "alpaca_cleaned_dataset", "grammar_dataset", "samsum_dataset", "slimorca_dataset"),
        *("instruct_dataset", "chat_dataset", "text_completion_dataset", "TextCompletionDataset"),
        *("cnn_dailymail_articles_dataset", "wikitext_dataset"),
    )
)
# Keys of the packed dataset; all others are the torchtune dataset's own.
_OF_PACKING = ("seq_len", "max_sequences", "skip_tokens")
_CHECKPOINTER = "torchtune.training.FullModelHFCheckpointer"
_CHECKPOINTERS = (_CHECKPOINTER, "torchtune.training.checkpointing.FullModelHFCheckpointer")
TEACHER_CHECKPOINTER = "tcal_components.checkpoint.teacher.HFTeacherCheckpointer"
# By the model_type of config.json: what torchtune calls the family.
_FAMILIES = {"llama": ("LLAMA2", "LLAMA3", "LLAMA3_2"), "qwen2": ("QWEN2",), "qwen3": ()}


def read_torchtune_components(cfg: DictConfig, texts: tuple[str, ...]) -> None:
    """Puts ours in the place of torchtune's datasets and checkpointer, in place.

    Args:
        cfg: of a recipe.
        texts: keys of its texts.

    Raises:
        ConfigError: a component or an argument that nothing here does; in one line.
    """
    for where in ("model", "teacher_model", "tokenizer"):
        if _component(cfg.get(where)).startswith("torchtune."):
            raise ConfigError(line(f"{where}._component_"))
    read_torchtune_texts(cfg, texts)
    switch_off(cfg, "checkpointer")
    if cfg.get("checkpointer") is not None:
        ours = _read_checkpointer(cfg, "checkpointer")
        teacher = cfg.get("teacher_checkpointer")
        if teacher is not None and _folder_of(teacher) != _folder_of(ours):
            raise ConfigError(line("checkpointer"))
        cfg.teacher_checkpointer = ours if teacher is None else teacher
    if _component(cfg.get("teacher_checkpointer")).startswith("torchtune."):
        cfg.teacher_checkpointer = _read_checkpointer(cfg, "teacher_checkpointer")


def read_torchtune_texts(cfg: DictConfig, texts: tuple[str, ...]) -> None:
    """Packs torchtune's datasets, in place.

    Args:
        cfg: of a recipe.
        texts: keys of its texts.

    Raises:
        ConfigError: a dataset or an argument that nothing here does; in one line.
    """
    for where in texts:
        if isinstance(cfg.get(where), (DictConfig, ListConfig)):
            _read_dataset(cfg, where)


def switch_off(cfg: DictConfig, where: str) -> None:
    """Makes null what was set to null on the command line, where torchtune 0.6.1 sets the ``_component_`` inside.

    Args:
        cfg: of a recipe.
        where: key of a component.
    """
    node = cfg.get(where)
    if isinstance(node, DictConfig) and node.get("_component_", "") is None:
        cfg[where] = None


def _component(node: Any) -> str:
    name = node.get("_component_") if isinstance(node, (DictConfig, Mapping)) else None
    return name if isinstance(name, str) else ""


def _folder_of(node: Any) -> Any:
    return node.get("checkpoint_dir") if isinstance(node, (DictConfig, Mapping)) else None


def _read_dataset(cfg: DictConfig, where: str) -> None:
    """A dataset of torchtune's, or a list of them, as the inner dataset of a packed one."""
    given = OmegaConf.to_container(cfg[where])
    parts: list[Any] = given if isinstance(given, list) else [given]
    if not all(_component(part).startswith(_DATASETS) for part in parts):
        if isinstance(given, list):
            raise ConfigError(
                f"{where} is a list, in which only torchtune's datasets can stand; several texts are "
                "tcal_components.data.mixed_text"
            )
        if _component(given).startswith("tcal_components.data."):
            _drop_packing(cfg[where], where)
        return
    shared: dict[str, Any] = {}
    for part in parts:
        if part["_component_"] not in _SAMPLES:
            raise ConfigError(line("dataset._component_", section=where))
        _drop_packing(part, where)
        shared |= {key: part.pop(key) for key in _OF_PACKING if key in part}
        check_component(OmegaConf.create(part), where, supplied=("tokenizer",))
    if shared.get("seq_len") is None:
        shared["seq_len"] = _max_seq_len(cfg)
        if shared["seq_len"] is None:
            raise ConfigError(
                f"{where}.seq_len is missing: tokens a sequence; without it tokenizer.max_seq_len is taken, as in torchtune"
            )
    cfg[where] = {"_component_": PACKED, **shared, "dataset": parts if isinstance(given, list) else parts[0]}


def _max_seq_len(cfg: DictConfig) -> Any:
    tokenizer = cfg.get("tokenizer")
    return tokenizer.get("max_seq_len") if isinstance(tokenizer, DictConfig) else None


def _drop_packing(part: Any, where: str) -> None:
    """Takes out switches of torchtune's packing that say what happens anyway."""
    for key in ("packed", "split_across_pack"):
        if key in part and part.pop(key) not in TORCHTUNE_KEYS[f"dataset.{key}"].accepts:
            raise ConfigError(line(f"dataset.{key}", section=where))


def _read_checkpointer(cfg: DictConfig, where: str) -> dict[str, Any]:
    """Our checkpointer with the folder of torchtune's; its other arguments may only say what is so here."""
    node = cfg[where]
    if not isinstance(node, DictConfig) or _component(node) not in (*_CHECKPOINTERS, TEACHER_CHECKPOINTER):
        raise ConfigError(line(f"{where}._component_"))
    if _component(node) == TEACHER_CHECKPOINTER:
        return OmegaConf.to_container(node)  # type: ignore[return-value]
    given: dict[str, Any] = OmegaConf.to_container(node, resolve=True)  # type: ignore[assignment]
    del given["_component_"]
    check_keys(given, list(inspect.signature(FullModelHFCheckpointer).parameters), where)
    if not isinstance(given.get("checkpoint_dir"), str):
        raise ConfigError(f"{where}.checkpoint_dir is {shown(given.get('checkpoint_dir'))}, expected a folder")
    text = given["checkpoint_dir"]
    folder = resolve(text) if text.startswith(PREFIX) else Path(text)
    may = {
        "checkpoint_files": lambda value: _names(value, where) == {file.name for file in folder.glob("*.safetensors")},
        "model_type": lambda value: value in _families(folder),
        "output_dir": lambda value: value == cfg.get("output_dir"),
    }
    for key in given if folder.is_dir() else ():
        row = TORCHTUNE_KEYS[f"{where}.{key}"]
        fits = may[key](given[key]) if key in may else given[key] in row.accepts
        if row.outcome == "some" and not fits:
            raise ConfigError(line(f"{where}.{key}"))
    return {"_component_": TEACHER_CHECKPOINTER, "checkpoint_dir": OmegaConf.to_container(node)["checkpoint_dir"]}  # type: ignore[index,call-overload]


def _names(given: Any, where: str) -> set[str]:
    if isinstance(given, dict):
        try:
            given = FormattedCheckpointFiles.from_dict(given).build_checkpoint_filenames()
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(f"{where}.checkpoint_files is {shown(given)}: {error}") from error
    return set(map(str, given)) if isinstance(given, list) else set()


def _families(folder: Path) -> tuple[str, ...]:
    return _FAMILIES.get(str(read_json_object(folder / "config.json").get("model_type")), ())
