"""Runs an export in llama.cpp and compares it with transformers: logits of a prefill and of single steps, and perplexity.

    python -m tcal_components.serving.llama_cpp --export runs/quickstart/export --source llama.cpp --text text.jsonl
    python -m tcal_components.serving.llama_cpp --export a=runs/a/export b=runs/b/export ... --output results.json

``--source`` is a llama.cpp checkout (its converter is what users run, so it is what is checked):

    git clone --depth 1 --branch b11739 https://github.com/ggml-org/llama.cpp

or, from PyPI, the one inside a source package (77 MB):

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz && mv llama_cpp_python-0.3.36/vendor/llama.cpp .

The engine is ``pip install llama-cpp-py-sync==0.11739`` (needs glibc 2.38) in this Python, or in the one that ``--python``
names. ``--gguf DIR`` keeps the files; see ``gguf`` for why llama.cpp's own script does not write right ones of every export.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tcal_components.export.import_hybrid import read_exported_folder
from tcal_components.export.stock_model import quiet_transformers
from tcal_components.export.verify import ExportError
from tcal_components.serving.llama_cpp_check import KINDS, EngineMissing, check_llama_cpp


def read_text(path: str | Path) -> str:
    """Text of a file, or of the key ``text`` of the lines of a .jsonl file."""
    content = Path(path).read_text(encoding="utf-8")
    if Path(path).suffix == ".jsonl":
        content = "\n\n".join(json.loads(line)["text"] for line in content.splitlines() if line.strip())
    return content


def facts(folder: str | Path) -> dict[str, Any]:
    """What of an export an engine may stumble over."""
    layout, _, dtype = read_exported_folder(folder)
    spec = layout.spec
    return {
        "family": spec.family,
        "dtype": str(dtype).removeprefix("torch."),
        "layers": spec.num_layers,
        "retained_layers": list(layout.retained_layers),
        "heads": [spec.num_heads, spec.num_kv_heads],
        "head_dim": spec.head_dim,
        "exported_head_dim": layout.exported_head_dim,
        "key_head_dim": layout.gdn.key_head_dim,
        "value_head_dim": layout.gdn.value_head_dim,
        "exported_value_head_dim": layout.exported_value_dim,
        "biases": layout.exported_bias,
        "rope_scaling": "llama3" if spec.rope_scaling else None,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command (see the module's text)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", required=True, nargs="+", help="exported folders, each as FOLDER or NAME=FOLDER")
    parser.add_argument("--source", required=True, help="llama.cpp checkout")
    parser.add_argument("--text", required=True, help="text to evaluate on, .txt or .jsonl")
    parser.add_argument("--python", default=sys.executable, help="Python that has llama-cpp-py-sync")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--tokens", type=int, default=256, help="tokens whose logits are compared")
    parser.add_argument("--windows", type=int, default=16, help="windows of the perplexity")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--gguf", help="folder where the GGUF files stay, below each export's name")
    parser.add_argument("--output", help="JSON file to write")
    options = parser.parse_args(arguments)
    text = read_text(options.text)
    results: dict[str, Any] = {}
    for given in options.export:
        name, _, folder = given.rpartition("=")
        name = name or Path(folder).resolve().name
        try:
            ids = text_ids(folder, text, options.tokens, options.windows * options.window)
            results[name] = facts(folder) | check_llama_cpp(
                folder,
                ids[: options.tokens],
                torch.tensor(ids[: options.windows * options.window]).view(options.windows, options.window),
                source=options.source,
                python=options.python,
                kinds=options.kinds,
                gguf_dir=Path(options.gguf) / name if options.gguf else None,
                strict=False,
            )
        except EngineMissing as error:
            sys.exit(f"error: {error}")
        except (ExportError, ValueError, FileNotFoundError) as error:
            results[name] = {"problems": [str(error)], "ok": False}
        row = results[name]
        print(f"{name}: " + ("; ".join(row["problems"]) or f"agrees, {row['logits']}, perplexity {row['perplexity']}"))
        if options.output:  # after each, they take a while
            Path(options.output).write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(not all(row["ok"] for row in results.values()))


def text_ids(folder: str | Path, text: str, *counts: int) -> list[int]:
    """Token ids of a text, at least as many as the largest of ``counts``."""
    from transformers import AutoTokenizer

    with quiet_transformers():
        ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    if len(ids) < max(counts):
        raise ValueError(f"the text has {len(ids)} tokens; {max(counts)} are asked for (--tokens, --windows, --window)")
    return ids


if __name__ == "__main__":
    main()
