"""vLLM as the check and the benchmark start it: the same for a teacher and its hybrid."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

# Tokens that the engine reads in one step.
TOKENS_A_STEP = 8192


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what both commands have."""
    parser.add_argument("folder", help="exported folder, or the teacher's")
    parser.add_argument("--output", required=True, help="JSON file to write")
    parser.add_argument("--eager", action="store_true", help="no compilation, no CUDA graphs")
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU's memory")
    parser.add_argument("--engine", nargs="*", default=[], help="other arguments of vLLM, as NAME=JSON")


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a folder."""
    return json.loads((Path(folder) / "config.json").read_text())


def start(options: argparse.Namespace, **settings: Any) -> Any:
    """Starts the engine.

    Args:
        options: Of ``add_arguments``.
        settings: More arguments of ``vllm.LLM``; ``--engine`` overrides them.

    Returns:
        vllm.LLM: The engine.
    """
    from vllm import LLM

    settings |= {
        "model": str(options.folder),
        "dtype": "bfloat16",
        "seed": 0,
        "enforce_eager": options.eager,
        "gpu_memory_utilization": options.memory,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": TOKENS_A_STEP,
    }
    if read_config(options.folder)["model_type"] == "qwen3_5_text":
        # On Hopper vLLM takes FlashInfer's kernel whatever the head sizes (0.26 to 0.34).
        settings["gdn_prefill_backend"] = "triton"
    given = dict(argument.split("=", 1) for argument in options.engine)
    return LLM(**settings | {name: json.loads(value) for name, value in given.items()})


def machine() -> dict[str, str]:
    """Versions and device, for a result."""
    from importlib.metadata import version

    import torch

    found = {name: version(name) for name in ("vllm", "torch", "transformers", "triton")}
    return found | {"device": torch.cuda.get_device_name()}
