"""Writes a hybrid as a Hugging Face folder that stock transformers loads."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from tcal_components.checkpoint.files import flush
from tcal_components.checkpoint.teacher import check_token_ids
from tcal_components.config import read_json
from tcal_components.export.config_json import (
    CUSTOM_FORMAT,
    STOCK_FORMAT,
    ExportInfo,
    export_config,
    export_info,
    export_layout,
)
from tcal_components.export.custom_model import add_custom_model
from tcal_components.export.layout import HybridLayout
from tcal_components.export.weights import WeightExporter
from tcal_components.modules.spec import DecoderSpec, GatedDeltaNetSpec

# What an import needs to give back the student's norms bit for bit; without it, it gives an equivalent model. A file of
# its own, because config.json is read by people, and safetensors metadata of two keys has no fixed order.
NORM_RECORDS_FILE = "tcal_norms.json"
GENERATION_FILE = "generation_config.json"
INDEX_FILE = "model.safetensors.index.json"
# Copied as they are: writing them again with transformers 5 names a class that older versions do not have.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def export_hybrid(
    student_state_dict: Mapping[str, torch.Tensor],
    *,
    spec: DecoderSpec,
    gdn: GatedDeltaNetSpec,
    retained_layers: Iterable[int],
    teacher_dir: str | Path,
    output_dir: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    format: str = STOCK_FORMAT,
    max_shard_size: str | int = "5GB",
    pad_values: bool = True,
) -> ExportInfo:
    """Exports a student: config.json, generation_config.json, safetensors shards with an index, tokenizer files.

    A folder of that name is always complete, see ``whole_folder``.

    Args:
        student_state_dict: Complete (not sharded) weights of the hybrid, any float type.
        spec: Numbers of the teacher.
        gdn: Shape of the Gated DeltaNet layers.
        retained_layers: Layers that keep attention; may be empty or all.
        teacher_dir: Folder of the teacher (or of an earlier export): tokenizer files and special token ids.
        output_dir: Folder to write; an earlier export there is replaced, anything else is refused.
        dtype: ``torch.bfloat16`` or ``torch.float32``. Default: bfloat16.
        format: ``qwen3_5_text`` (a stock class) or ``hf_custom`` (a modeling file in the folder; retained attention
            without the doubled head size, and so half the key/value cache, for teachers without q/k norm).
            Default: ``qwen3_5_text``.
        max_shard_size: Largest weight file, bytes or a string such as ``5GB`` or ``200MB``. Default: ``5GB``.
        pad_values: Enlarge value heads smaller than key heads (see ``HybridLayout``): llama.cpp asks for one size.
            Default: True.

    Returns:
        ExportInfo: What was written.

    Raises:
        ValueError: For a student that cannot be exported, weights that do not fit or are not finite, special tokens
            beyond the embedding, or an ``output_dir`` that holds something else.
        FileNotFoundError: If ``teacher_dir`` does not exist.
    """
    teacher_dir, output_dir = Path(teacher_dir), Path(output_dir)
    if not teacher_dir.is_dir():
        raise FileNotFoundError(f"teacher folder {teacher_dir} does not exist; the export copies its tokenizer files")
    layout = export_layout(
        spec, gdn=gdn, retained_layers=retained_layers, format=format, dtype=dtype, pad_values=pad_values
    )
    shard_bytes = parse_size(max_shard_size)
    check_token_ids(teacher_dir, spec.vocab_size)
    teacher_config = read_json(teacher_dir / "config.json")
    config = export_config(layout, format=format, dtype=dtype, teacher_config=teacher_config)

    with whole_folder(output_dir) as folder:
        num_bytes, shards = _write_weights(folder, student_state_dict, layout, dtype=dtype, shard_bytes=shard_bytes)
        _copy_files(teacher_dir, folder, teacher_config, use_cache=config["use_cache"])
        if format == CUSTOM_FORMAT:
            config = add_custom_model(folder, config)
        write_json(folder / "config.json", config)
        for path in folder.glob("*.safetensors"):
            shutil.copymode(folder / "config.json", path)  # safetensors 0.8 lets only the owner read what it writes
    return export_info(layout, path=output_dir, format=format, dtype=dtype, num_bytes=num_bytes, shards=shards)


@contextlib.contextmanager
def whole_folder(output_dir: Path) -> Iterator[Path]:
    """Gives an empty folder to write into, which takes the name of an export at the end, in one step.

    Args:
        output_dir: Folder to be; an earlier export there is replaced.

    Yields:
        Path: A temporary folder beside it. What killed processes have left of such folders is removed.

    Raises:
        ValueError: If ``output_dir`` holds something else than an export.
    """
    check_replaceable(output_dir)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{output_dir.name}.writing-"
    for left in output_dir.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=output_dir.parent) as scratch:
        folder = Path(scratch) / "folder"
        folder.mkdir()
        yield folder
        for path in folder.rglob("*"):
            if path.is_file():
                flush(path)
        if output_dir.exists():
            os.replace(output_dir, Path(scratch) / "replaced")
        os.replace(folder, output_dir)


def parse_size(size: str | int) -> int:
    """Reads a size in bytes such as ``5GB``, ``200MB``, ``1GiB`` or a number.

    Raises:
        ValueError: If it is not such a size, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?B?)\s*", str(size), re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise ValueError(
            f"max_shard_size is {size!r}; allowed are a positive number of bytes or a string such as '5GB'"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def check_replaceable(output_dir: Path) -> None:
    """Checks that writing ``output_dir`` destroys nothing but an earlier export.

    Raises:
        ValueError: If something else lies there.
    """
    if not output_dir.exists() or (output_dir.is_dir() and not any(output_dir.iterdir())):
        return
    if not output_dir.is_dir() or "tcal" not in read_json(output_dir / "config.json"):
        raise ValueError(f"{output_dir} exists and is not an earlier export; name another folder or remove it")


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Writes a JSON object with a line break at its end."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_weights(
    folder: Path,
    state_dict: Mapping[str, torch.Tensor],
    layout: HybridLayout,
    *,
    dtype: torch.dtype,
    shard_bytes: int,
) -> tuple[int, int]:
    """Writes the shards one after another; returns total bytes of tensors and number of shards."""
    exporter = WeightExporter(state_dict, layout=layout, dtype=dtype)
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    total = pending_bytes = 0

    def flush() -> None:
        save_file(pending, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    with tqdm(total=layout.spec.num_layers, desc="export", unit="layer") as bar:
        for name, tensor in exporter.tensors():
            size = tensor.numel() * tensor.element_size()
            if pending and pending_bytes + size > shard_bytes:
                flush()
                pending_bytes = 0
            pending[name] = tensor
            pending_bytes += size
            total += size
            bar.update(name.endswith("post_attention_layernorm.weight"))
        flush()
    if exporter.norm_records:
        write_json(folder / NORM_RECORDS_FILE, exporter.norm_records)

    if len(shards) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return total, 1
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file_name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total, len(shards)


def _copy_files(teacher_dir: Path, folder: Path, teacher_config: Mapping[str, object], *, use_cache: bool) -> None:
    """Copies tokenizer and licence files; generation_config.json is copied or made of the special token ids."""
    licences = [path.name for pattern in ("LICENSE*", "NOTICE*", "USE_POLICY*") for path in teacher_dir.glob(pattern)]
    for name in (*TOKENIZER_FILES, *licences, GENERATION_FILE):
        if (teacher_dir / name).is_file():
            shutil.copyfile(teacher_dir / name, folder / name)
    if (templates := teacher_dir / "additional_chat_templates").is_dir():
        shutil.copytree(templates, folder / templates.name)
    generation = read_json(folder / GENERATION_FILE)
    if not generation:
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        generation = {name: teacher_config[name] for name in names if teacher_config.get(name) is not None}
    if not use_cache:
        generation["use_cache"] = False
    if generation != read_json(folder / GENERATION_FILE):
        write_json(folder / GENERATION_FILE, generation)
