"""An export in llama.cpp against transformers: logits of a prefill and of single steps, and perplexity."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tcal_components.export.stock_model import load_stock_model, quiet_transformers, usable_kernels
from tcal_components.export.verify import PROBE_TEXT, ExportError
from tcal_components.serving.gguf import CONVERTER, last_line, why, write_gguf

KINDS = ("f32", "f16", "q8_0", "q4_k_m")
# Allowed root mean square difference of logits over that of the logits themselves (without their mean). A wrong layout
# gives 1 or more. f32: measured 2e-7 to 3e-3, the most where the teacher's norms have eps 1e-5, which llama.cpp adds to
# the length of q and k too. f16: its multiplications round activations to 11 bits.
TOLERANCE = {"f32": 1e-2, "f16": 3e-2}
# Allowed perplexity as a multiple of the export's. The engine makes these files of the first one, so nothing but their
# rounding can differ; what is beyond this is no use to anybody.
PERPLEXITY_TOLERANCE = {"q8_0": 1.05, "q4_k_m": 2.0}


class EngineMissing(RuntimeError):
    """The engine or its converter is not there: nothing was checked."""


def find_engine(source: str | Path | None, python: str | Path = sys.executable) -> str:
    """Looks for the converter and the engine.

    Args:
        source: A llama.cpp checkout, or None.
        python: A Python that has llama-cpp-py-sync.

    Returns:
        str: The engine's version.

    Raises:
        EngineMissing: If one of them is not usable; says why.
    """
    if source is None:
        raise EngineMissing("no llama.cpp checkout is named, whose converter writes GGUF")
    if not (Path(source) / CONVERTER).is_file():
        raise EngineMissing(f"{source} has no {CONVERTER}; a llama.cpp checkout is needed")
    try:
        found = _run([str(python), _worker()])
    except OSError as error:
        raise EngineMissing(f"{python} does not start: {error}") from error
    if found.returncode:
        said = found.stdout.strip() or last_line(found.stderr)
        raise EngineMissing(f"{python} cannot use llama-cpp-py-sync: {said}")
    return json.loads(found.stdout)["version"]


def check_llama_cpp(
    export_dir: str | Path,
    tokens: Sequence[int],
    windows: torch.Tensor,
    *,
    source: str | Path | None,
    python: str | Path = sys.executable,
    kinds: Sequence[str] = KINDS,
    gguf_dir: str | Path | None = None,
    strict: bool = True,
) -> dict[str, Any]:
    """Converts an export, quantizes it and compares llama.cpp with transformers, both on this machine's CPU.

    Args:
        export_dir: The exported folder.
        tokens: Token ids [T] whose logits are compared: the first half as a prefill, then one at a time.
        windows: Token ids [N, L] of the perplexities.
        source: A llama.cpp checkout.
        python: A Python that has llama-cpp-py-sync. Default: this one.
        kinds: Of ``KINDS``; ``f32`` is always made. Default: all.
        gguf_dir: Where the GGUF files stay. Default: None, nowhere.
        strict: Whether a difference beyond ``TOLERANCE`` raises. Default: True.

    Returns:
        dict[str, Any]: ``version``, ``max_abs_logit_diff`` (f32, all tokens) and ``reference_logit_max``,
        ``perplexity`` (``student``: transformers), ``logits`` by kind (``prefill`` and ``decode``, the largest
        differences, and ``relative_error``, as in ``TOLERANCE``), ``bytes`` by kind, ``tokenizer_equal``, ``rope_error``
        (of llama3 RoPE scaling, else None), ``problems`` and ``ok``.

    Raises:
        EngineMissing: If the engine or the converter is not there.
        ExportError: If the export cannot be converted or loaded, or ``strict`` and llama.cpp computes something else.
        ValueError: If the folder is not an export.
    """
    folder = Path(export_dir).resolve()
    version = find_engine(source, python)
    assert source is not None
    kinds = ["f32", *(kind for kind in KINDS if kind in kinds and kind != "f32")]
    with tempfile.TemporaryDirectory(prefix=".llama_cpp.", dir=folder.parent) as scratch_dir:
        scratch = Path(scratch_dir)
        work = Path(gguf_dir).resolve() if gguf_dir else scratch
        work.mkdir(parents=True, exist_ok=True)
        (scratch / "read").mkdir()
        rope_error = write_gguf(folder, work / "f32.gguf", source=Path(source), scratch=scratch / "read")
        np.save(scratch / "tokens.npy", np.asarray(tokens))
        np.save(scratch / "windows.npy", windows.numpy())
        request = {
            "folder": str(work),
            "scratch": str(scratch),
            "tokens": f"{scratch}/tokens.npy",
            "windows": f"{scratch}/windows.npy",
            "kinds": kinds,
            "keep": gguf_dir is not None,
            "probe": PROBE_TEXT,
        }
        (scratch / "request.json").write_text(json.dumps(request))
        ran = _run([str(python), _worker(), f"{scratch}/request.json"])
        if ran.returncode:
            raise ExportError(f"llama.cpp {version} does not run the export in {folder}: {why(ran)}")
        measured = json.loads((scratch / "result.json").read_text())
        found = {kind: torch.from_numpy(np.load(scratch / f"{kind}.npy")) for kind in kinds}
    expected, perplexity = _reference(folder, tokens, windows)
    logits = {kind: _compare(found[kind], expected) for kind in kinds}
    tokenizer_equal = measured["f32"]["probe"] == _probe_ids(folder)
    problems = [  # written so that NaN is one too
        f"logits of {kind} are off by {logits[kind]['relative_error']:.3g} of their size (allowed: {TOLERANCE[kind]:g})"
        for kind in kinds
        if kind in TOLERANCE and not logits[kind]["relative_error"] <= TOLERANCE[kind]
    ]
    problems += [
        f"perplexity of {kind} is {measured[kind]['perplexity']:.4g}, the export's {perplexity:.4g} (allowed: "
        f"{PERPLEXITY_TOLERANCE[kind]:g} times that)"
        for kind in kinds
        if kind in PERPLEXITY_TOLERANCE and not measured[kind]["perplexity"] <= PERPLEXITY_TOLERANCE[kind] * perplexity
    ]
    if not tokenizer_equal:
        problems.append("its tokenizer splits text otherwise than the teacher's")
    if strict and problems:
        raise ExportError(
            f"llama.cpp {version} does not compute what the export in {folder} does: {'; '.join(problems)}"
        )
    return {
        "version": version,
        "max_abs_logit_diff": max(logits["f32"]["prefill"], logits["f32"]["decode"]),
        "reference_logit_max": float(expected.abs().max()),
        "perplexity": {"student": perplexity, **{kind: measured[kind]["perplexity"] for kind in kinds}},
        "logits": logits,
        "bytes": {kind: measured[kind]["bytes"] for kind in kinds},
        "tokenizer_equal": tokenizer_equal,
        "rope_error": rope_error,
        "problems": problems,
        "ok": not problems,
    }


def _compare(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Differences of logits [T, V]; the first half is of a prefill, the others of single steps."""
    difference, half = (found - expected).abs(), len(expected) // 2
    spread = (expected - expected.mean()).square().mean().sqrt()
    return {
        "prefill": float(difference[:half].max()),
        "decode": float(difference[half:].max()),
        "relative_error": float(difference.square().mean().sqrt() / spread),
    }


def _reference(folder: Path, tokens: Sequence[int], windows: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Logits [T, V] and perplexity of the export in transformers, float32."""
    with quiet_transformers(), torch.no_grad():
        model, _ = load_stock_model(folder, trust_remote_code=False)
        model = model.eval()
        with usable_kernels(model, torch.device("cpu")):
            logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
            loss = 0.0
            for window in windows:
                found = model(input_ids=window[None], use_cache=False).logits[0, :-1]
                loss += float(torch.nn.functional.cross_entropy(found, window[1:], reduction="sum"))
    return logits, math.exp(loss / (windows.shape[0] * (windows.shape[1] - 1)))


def _probe_ids(folder: Path) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)(PROBE_TEXT, add_special_tokens=False)["input_ids"]


def _worker() -> str:
    return str(Path(__file__).with_name("llama_cpp_worker.py"))


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
