"""Writes an export as GGUF with llama.cpp's converter, and mends what converter and engine leave or get wrong.

    python -m tcal_components.serving.gguf --export runs/quickstart/export --source llama.cpp --output f32.gguf

The file is float32; ``llama-quantize`` makes the others of it. ``llama_cpp`` says where ``--source`` comes from, and checks.

- ``o_proj.bias``: transformers' class has it wherever q, k and v have one, so an export writes its zeros; llama.cpp has no
  place for it and refuses the file. The zeros are left out.
- llama3 RoPE scaling is dropped without a word: see ``llama3_rope``.
- A tokenizer that the converter does not know is refused; one that splits text as GPT-2's does is named so.

A file that llama.cpp's own script makes of an export has the first two faults.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tcal_components.checkpoint.teacher import locate_tensors, open_safetensors
from tcal_components.config import read_json
from tcal_components.export.engines import llama_cpp_refusal
from tcal_components.export.folder import INDEX_FILE
from tcal_components.export.import_hybrid import read_exported_folder
from tcal_components.export.verify import ExportError
from tcal_components.serving.llama3_rope import EngineRope, arrange, rearrange

CONVERTER = "convert_hf_to_gguf.py"
_UNREAD_BIAS = ".self_attn.o_proj.bias"


def write_gguf(folder: Path, target: Path, *, source: Path, scratch: Path) -> float | None:
    """Writes an export as a GGUF file of float32.

    Args:
        folder: The export.
        target: The file.
        source: A llama.cpp checkout.
        scratch: An empty folder, with room for a weight file or two of the export.

    Returns:
        float | None: The error of llama3 RoPE scaling (see ``EngineRope``), None without such scaling.

    Raises:
        ExportError: If llama.cpp cannot hold the export, or its converter refuses it.
    """
    layout, format, _ = read_exported_folder(folder)
    if (refused := llama_cpp_refusal(layout, format)) is not None:
        raise ExportError(f"{folder}: {refused}")
    spec, rope = layout.spec, None
    if spec.rope_scaling is not None and layout.retained_layers:
        try:
            rope = arrange(spec.head_dim, spec.rope_base, spec.rope_scaling)
        except ValueError as error:
            raise ExportError(str(error)) from error
    read = converter_input(folder, scratch, rope)
    launcher = str(Path(__file__).with_name("llama_cpp_convert.py"))
    options = ["--no-mtp", "--outtype", "f32", "--outfile", str(target)]
    command = [sys.executable, launcher, str(source), pre_tokenizer(folder) or "-", *options, str(read)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise ExportError(f"llama.cpp's converter refuses the export in {folder}: {why(ran)}")
    if rope is not None:
        reader = _reader(source)(target, "r+")
        rearrange(reader, rope, head_dim=spec.head_dim, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads)
    return None if rope is None else rope.error


def converter_input(folder: Path, scratch: Path, rope: EngineRope | None) -> Path:
    """Makes the folder that the converter reads: links to the export's files, and new ones in place of some.

    Args:
        folder: The export.
        scratch: An empty folder.
        rope: Arrangement of llama3 RoPE scaling, None without.

    Returns:
        Path: ``scratch``, or ``folder`` itself where it can be read as it is.

    Raises:
        ExportError: If an output projection's bias is not zero.
    """
    location = locate_tensors(folder)
    left_out = {name for name in location if name.endswith(_UNREAD_BIAS)}
    if not left_out and rope is None:
        return folder
    rewritten = {location[name] for name in left_out}
    for path in folder.iterdir():
        if path not in rewritten:
            (scratch / path.name).symlink_to(path.resolve())
    for path in rewritten:
        with open_safetensors(path) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
        for name in left_out & set(tensors):
            if bool(tensors.pop(name).any()):
                raise ExportError(
                    f"{folder}: {name} is not zero (trained since the export?), and llama.cpp has no place for it"
                )
        save_file(tensors, scratch / path.name, metadata={"format": "pt"})
    if left_out and (folder / INDEX_FILE).is_file():
        index = read_json(folder / INDEX_FILE)
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name not in left_out}
        _replace(scratch / INDEX_FILE, index)
    if rope is not None:
        config = read_json(folder / "config.json") | {"partial_rotary_factor": 1.0, "rope_theta": rope.freq_base}
        _replace(scratch / "config.json", config | {"rope_parameters": rope.converter_config(), "rope_scaling": None})
    return scratch


def pre_tokenizer(folder: Path) -> str | None:
    """llama.cpp's name for how a tokenizer splits text, where tokenizer.json alone shows that it is GPT-2's way."""
    tokenizer = read_json(folder / "tokenizer.json")
    splits = tokenizer.get("pre_tokenizer") or {}
    plain = splits.get("type") == "ByteLevel" and splits.get("use_regex", True) and not splits.get("add_prefix_space")
    return "gpt-2" if plain and tokenizer.get("normalizer") is None else None


def why(ran: subprocess.CompletedProcess[str]) -> str:
    """Says why a process failed: the signal that ended it, which leaves no text, and what it said."""
    ended = f"ended by signal {-ran.returncode}; " if ran.returncode < 0 else ""
    return ended + last_line(ran.stderr)


def last_line(text: str) -> str:
    """The line of an error output that says most: the last one, or the assertion that ended the process."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    broken = [line for line in lines if "GGML_ASSERT" in line]
    return (broken or lines or ["it says nothing"])[-1][:400]


def _replace(path: Path, content: dict[str, Any]) -> None:
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(content))


def _reader(source: Path) -> Any:
    """The class of llama.cpp's own package, which may be newer than an installed one."""
    sys.path.insert(0, str(source / "gguf-py"))
    try:
        from gguf import GGUFReader
    finally:
        sys.path.pop(0)
    return GGUFReader


def main(arguments: Sequence[str] | None = None) -> None:
    """The command (see the module's text)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", required=True, type=Path, help="exported folder")
    parser.add_argument("--source", required=True, type=Path, help="llama.cpp checkout")
    parser.add_argument("--output", required=True, type=Path, help="GGUF file to write")
    options = parser.parse_args(arguments)
    if not (options.source / CONVERTER).is_file():
        parser.error(f"{options.source} has no {CONVERTER}; name a llama.cpp checkout")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".gguf.", dir=options.output.parent) as scratch:
            error = write_gguf(
                options.export.resolve(), options.output.resolve(), source=options.source, scratch=Path(scratch)
            )
    except (ExportError, ValueError, FileNotFoundError) as problem:
        sys.exit(f"error: {problem}")
    print(f"{options.output}" + ("" if error is None else f": RoPE scaling with an error of {error:.1g} at most"))


if __name__ == "__main__":
    main()
