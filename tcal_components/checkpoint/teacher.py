"""Teacher weights from a Hugging Face folder: safetensors, one file or many, checked before and while they are read."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torchtune import training

from tcal_components.checkpoint.names import teacher_tensors
from tcal_components.config import read_json, read_json_object
from tcal_components.config.schema import shown
from tcal_components.models.hf_config import read_config, read_spec, spec_from_config
from tcal_components.precision.dtypes import is_finite, parse_dtype, refuse_overflow

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
    tied = {"lm_head.weight"} if spec.tie_word_embeddings else set()
    model = f"a {spec.family} model with {spec.num_layers} layers"
    check_headers(folder, location, {item.hf: item.shape for item in teacher_tensors(spec)}, optional=tied, model=model)

    torchtune_name = {entry.hf: entry.torchtune for entry in teacher_tensors(spec)}
    names_of_file: dict[Path, list[str]] = {}
    for name in torchtune_name:
        names_of_file.setdefault(location[name], []).append(name)
    state_dict: dict[str, torch.Tensor] = {}
    for path, names in names_of_file.items():
        with open_safetensors(path) as file:
            for name in names:
                state_dict[torchtune_name[name]] = _converted(file.get_tensor(name), dtype, name, path)
    if spec.tie_word_embeddings:
        check_tied_head(folder, location)
    return {entry.torchtune: state_dict[entry.torchtune] for entry in teacher_tensors(spec)}


class HFTeacherCheckpointer:
    """Reads a teacher for a recipe (config key ``teacher_checkpointer`` or ``checkpointer``).

    Args:
        checkpoint_dir: Hugging Face model folder.
        dtype: Type to convert the weights to, such as ``bf16``, ``fp32`` or a torch dtype. Default: None, as stored.

    Raises:
        FileNotFoundError: If the folder or its config.json is missing.
        ValueError: For another family, an unsupported variant, token ids beyond the embedding or an unknown type.
    """

    def __init__(self, checkpoint_dir: str | Path, *, dtype: str | torch.dtype | None = None) -> None:
        self.checkpoint_dir = Path(checkpoint_dir)
        self.spec = read_spec(self.checkpoint_dir)
        check_token_ids(self.checkpoint_dir, self.spec.vocab_size)
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


def check_token_ids(folder: Path, vocab_size: int) -> None:
    """Checks the ids of special tokens that config.json and generation_config.json name.

    Args:
        folder: Model folder.
        vocab_size: Rows of the embedding. A negative id stands for no token, as in older files.

    Raises:
        ValueError: For the first one that is no id, or has no row.
    """
    for name in ("config.json", "generation_config.json"):
        for key, value in read_json(folder / name).items():
            if not key.endswith("_token_id") or value is None:
                continue
            for index in value if isinstance(value, list) else [value]:
                if type(index) is not int or index >= vocab_size:
                    raise ValueError(
                        f"{folder / name}: {key} is {shown(value)}; the embedding has rows for the ids 0 to {vocab_size - 1}"
                    )


def locate_tensors(folder: Path) -> dict[str, Path]:
    """Maps the name of every tensor in the folder to the file that holds it.

    Raises:
        FileNotFoundError: If the folder has no weights, or lacks a shard.
        ValueError: For a damaged index or file, weights that are no safetensors, or a tensor in two files.
    """
    index = _read_index(folder / INDEX_NAME)
    if index and (folder / SINGLE_NAME).is_file():  # of the two, transformers reads this one
        files = sorted({*index.values(), folder / SINGLE_NAME})
    else:
        files = sorted(set(index.values())) or _files_without_index(folder)
    location: dict[str, Path] = {}
    for path in files:
        with open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors file is not a mapping)
                if name in location:
                    raise ValueError(
                        f"tensor {name} is in two files of {folder}, {location[name].name} and {path.name}; "
                        "remove the file that is not meant"
                    )
                location[name] = path
    for name, path in index.items():
        if location.get(name) != path:
            raise ValueError(f"tensor {name} is missing in {path}, although {INDEX_NAME} puts it there")
    return location


def _read_index(path: Path) -> dict[str, Path]:
    """The files that an index names, by tensor; {} without an index."""
    if not path.exists():
        return {}
    weight_map = read_json_object(path).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise ValueError(f"{path} is not a valid index with a weight_map of tensors and their files")
    index = {name: path.parent / file for name, file in weight_map.items()}
    for file in sorted(set(index.values())):
        if file.suffix != ".safetensors" or file.parent != path.parent:
            raise ValueError(
                f"{path} names {shown(str(file))}; only .safetensors files are read, and only those beside it"
            )
        if not file.is_file():
            raise FileNotFoundError(f"shard {file.name}, named in {INDEX_NAME}, is missing in {path.parent}")
    return index


def _files_without_index(folder: Path) -> list[Path]:
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
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


def check_headers(
    folder: Path,
    location: Mapping[str, Path],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    optional: Collection[str] = (),
    model: str,
) -> None:
    """Checks names, shapes and types of a folder's tensors in the headers of its files.

    Args:
        folder: Model folder.
        location: Its tensors, as ``locate_tensors`` finds them.
        shapes: Every tensor that a model of this kind has.
        optional: Those of them that may be missing, and any further one that may be there.
        model: What kind of model it is, for messages.

    Raises:
        ValueError: For the first tensor that is missing, unknown, or of another shape or type; in one line.
    """
    for name in shapes:
        if name not in location and name not in optional:
            raise ValueError(f"tensor {name} is missing in {folder} ({model})")
    for path in sorted(set(location.values())):
        with open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors file is not a mapping)
                if _IGNORED.fullmatch(name):
                    continue
                if name not in shapes and name not in optional:
                    raise ValueError(f"{path} holds {name}, which {model} does not have")
                header = file.get_slice(name)
                shape = tuple(header.get_shape())
                if shape != shapes.get(name, shape):
                    raise ValueError(f"tensor {name} in {path} has shape {shape}; config.json asks for {shapes[name]}")
                if header.get_dtype() not in _FLOAT_DTYPES:
                    raise ValueError(
                        f"tensor {name} in {path} is stored as {header.get_dtype()}; allowed: {', '.join(_FLOAT_DTYPES)}"
                    )


def _converted(tensor: torch.Tensor, dtype: torch.dtype | None, name: str, path: Path) -> torch.Tensor:
    if not is_finite(tensor):
        raise ValueError(f"tensor {name} in {path} holds NaN or infinite values")
    if dtype is None:
        return tensor
    refuse_overflow(tensor, dtype, f"tensor {name} in {path}")
    return tensor.to(dtype)


def check_tied_head(folder: Path, location: Mapping[str, Path]) -> None:
    """Some folders store a tied head once more (Qwen3-0.6B); dropping it is right only if it is the embedding.

    Raises:
        ValueError: If it is not.
    """
    if "lm_head.weight" not in location:
        return
    head, embedding = (
        open_safetensors(location[name]).get_tensor(name) for name in ("lm_head.weight", "model.embed_tokens.weight")
    )
    if not torch.equal(head, embedding):
        raise ValueError(
            f"{folder} has a lm_head.weight that differs from the embedding, although config.json says "
            "tie_word_embeddings: true"
        )


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
