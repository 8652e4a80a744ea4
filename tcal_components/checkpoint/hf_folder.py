"""Teacher weights from a Hugging Face folder: safetensors, one file or many, checked before and while they are read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torchtune import training

from tcal_components.checkpoint.artifacts import is_finite
from tcal_components.checkpoint.mapping import teacher_tensors
from tcal_components.models.hf_config import read_config, read_spec, spec_from_config
from tcal_components.models.spec import DecoderSpec
from tcal_components.precision.dtypes import parse_dtype

__all__ = [
    "HFTeacherCheckpointer",
    "load_teacher_state_dict",
    "locate_tensors",
    "open_safetensors",
    "read_config",
    "read_spec",
    "spec_from_config",
]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
# Buffers that old versions of transformers saved; the model computes them.
_IGNORED = re.compile(r".*rotary_emb\.inv_freq")


def load_teacher_state_dict(checkpoint_dir: str | Path, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Reads a teacher's weights on the CPU.

    Names, shapes and types are checked in the files' headers before any weight is read. Memory: the result plus one
    tensor.

    Args:
        checkpoint_dir: Hugging Face model folder with config.json and safetensors.
        dtype: Type to convert to, one tensor at a time. Default: None, as stored.

    Returns:
        dict[str, torch.Tensor]: Weights by torchtune name; no ``output.weight`` when the head is tied.

    Raises:
        FileNotFoundError: If the folder, its config.json, its weights or a shard is missing.
        ValueError: For another family or unsupported variant, pickled weights, a damaged file, a tensor that is missing,
            unknown, of another shape or type, or that holds NaN or infinity; in one line.
    """
    folder = Path(checkpoint_dir)
    spec = read_spec(folder)
    location = locate_tensors(folder)
    _check_headers(folder, spec, location)

    torchtune_name = {entry.hf: entry.torchtune for entry in teacher_tensors(spec)}
    names_of_file: dict[Path, list[str]] = {}
    for name in torchtune_name:
        names_of_file.setdefault(location[name], []).append(name)
    state_dict: dict[str, torch.Tensor] = {}
    for path, names in names_of_file.items():
        with open_safetensors(path) as file:
            for name in names:
                state_dict[torchtune_name[name]] = _converted(file.get_tensor(name), dtype, name, path)
    if spec.tie_word_embeddings and "lm_head.weight" in location:
        _check_tied_head(folder, location)
    return {entry.torchtune: state_dict[entry.torchtune] for entry in teacher_tensors(spec)}


class HFTeacherCheckpointer:
    """Reads a teacher for a recipe (config key ``teacher_checkpointer`` or ``checkpointer``).

    Args:
        checkpoint_dir: Hugging Face model folder.
        dtype: Type to convert the weights to, such as ``bf16``, ``fp32`` or a torch dtype. Default: None, as stored.

    Raises:
        FileNotFoundError: If the folder or its config.json is missing.
        ValueError: For another family, an unsupported variant or an unknown type.
    """

    def __init__(self, checkpoint_dir: str | Path, *, dtype: str | torch.dtype | None = None) -> None:
        self.checkpoint_dir = Path(checkpoint_dir)
        self.spec = read_spec(self.checkpoint_dir)
        if isinstance(dtype, str):
            dtype = parse_dtype(dtype, "dtype", allowed=("bf16", "fp16", "fp32", "fp64"))
        self.dtype = dtype

    def load_checkpoint(self) -> dict[str, Any]:
        """Reads the weights.

        Returns:
            dict[str, Any]: ``{"model": state dict with torchtune names}``.

        Raises:
            FileNotFoundError: See ``load_teacher_state_dict``.
            ValueError: See ``load_teacher_state_dict``.
        """
        return {training.MODEL_KEY: load_teacher_state_dict(self.checkpoint_dir, dtype=self.dtype)}


def locate_tensors(folder: Path) -> dict[str, Path]:
    """Maps the name of every tensor in the folder to the file that holds it.

    Raises:
        FileNotFoundError: If the folder has no weights, or lacks a shard.
        ValueError: For a damaged index or file, or weights that are no safetensors.
    """
    index_path = folder / INDEX_NAME
    if index_path.is_file():
        try:
            weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
            location = {str(name): folder / file for name, file in weight_map.items()}
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index_path} is not a valid index with a weight_map: {error!r}") from error
        for path in sorted(set(location.values())):
            if path.suffix != ".safetensors":
                raise ValueError(f"{index_path} names {path.name}; only .safetensors files are read")
            if not path.is_file():
                raise FileNotFoundError(f"shard {path.name}, named in {INDEX_NAME}, is missing in {folder}")
        return location
    location = {}
    for path in _files_without_index(folder):
        with open_safetensors(path) as file:
            location.update(dict.fromkeys(file.keys(), path))
    return location


def _files_without_index(folder: Path) -> list[Path]:
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_SUFFIXES)
        if pickles:
            raise ValueError(
                f"{folder} has only pickled weights ({pickles[0]}), which can run code when loaded; "
                "safetensors are needed (save_pretrained writes them)"
            )
        raise FileNotFoundError(f"{folder} has no weights; {SINGLE_NAME} or shards with {INDEX_NAME} are needed")
    for path in files:
        shard = _SHARD_NAME.fullmatch(path.name)
        if shard is None:
            continue
        for number in range(1, int(shard["count"]) + 1):
            name = f"{shard['stem']}-{number:05d}-of-{shard['count']}.safetensors"
            if not (folder / name).is_file():
                raise FileNotFoundError(f"shard {name} is missing in {folder}")
    return files


def _check_headers(folder: Path, spec: DecoderSpec, location: dict[str, Path]) -> None:
    shape_of = {entry.hf: entry.shape for entry in teacher_tensors(spec)}
    for name in shape_of:
        if name not in location:
            raise ValueError(f"tensor {name} is missing in {folder} (family {spec.family}, {spec.num_layers} layers)")
    allowed_extra = {"lm_head.weight"} if spec.tie_word_embeddings else set()
    for name, path in location.items():
        if name not in shape_of and name not in allowed_extra and not _IGNORED.fullmatch(name):
            raise ValueError(
                f"{path} holds {name}, which a {spec.family} model with {spec.num_layers} layers does not have"
            )
    for path in sorted(set(location.values())):
        with open_safetensors(path) as file:
            stored = set(file.keys())
            for name, shape in shape_of.items():
                if location[name] != path:
                    continue
                if name not in stored:
                    raise ValueError(f"tensor {name} is missing in {path}, although {INDEX_NAME} puts it there")
                header = file.get_slice(name)
                if tuple(header.get_shape()) != shape:
                    raise ValueError(
                        f"tensor {name} in {path} has shape {tuple(header.get_shape())}; config.json asks for {shape}"
                    )
                if header.get_dtype() not in _FLOAT_DTYPES:
                    raise ValueError(
                        f"tensor {name} in {path} is stored as {header.get_dtype()}; allowed: {', '.join(_FLOAT_DTYPES)}"
                    )


def _converted(tensor: torch.Tensor, dtype: torch.dtype | None, name: str, path: Path) -> torch.Tensor:
    _refuse_non_finite(tensor, f"tensor {name} in {path} holds NaN or infinite values")
    if dtype is None or dtype == tensor.dtype:
        return tensor
    tensor = tensor.to(dtype)
    _refuse_non_finite(tensor, f"tensor {name} in {path} overflows when converted to {dtype}")
    return tensor


def _refuse_non_finite(tensor: torch.Tensor, message: str) -> None:
    if not is_finite(tensor):
        raise ValueError(message)


def _check_tied_head(folder: Path, location: dict[str, Path]) -> None:
    """Some folders store a tied head once more (Qwen3-0.6B); dropping it is right only if it is the embedding."""
    head, embedding = (_read(location[name], name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if not torch.equal(head, embedding):
        raise ValueError(
            f"{folder} has a lm_head.weight that differs from the embedding, although config.json says "
            "tie_word_embeddings: true"
        )


def _read(path: Path, name: str) -> torch.Tensor:
    with open_safetensors(path) as file:
        if name not in file.keys():  # noqa: SIM118 (a safetensors file is not a mapping)
            raise ValueError(f"tensor {name} is missing in {path}, although {INDEX_NAME} puts it there")
        return file.get_tensor(name)


def open_safetensors(path: Path) -> Any:
    """Opens a safetensors file for reading on the CPU.

    Raises:
        ValueError: For a damaged header or a short file, in one line.
    """
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is truncated or not a safetensors file: {reason}") from error
