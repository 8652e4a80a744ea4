"""Tiny teachers that transformers itself builds and saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

CONFIG_CLASSES = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
BASE = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@pytest.fixture
def tiny_teacher(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """Returns ``make(model_type, *, max_shard_size=None, **config) -> (folder, transformers model in eval mode)``."""

    def make(model_type: str, *, max_shard_size: str | None = None, **config: Any) -> tuple[Path, Any]:
        torch.manual_seed(0)
        numbers = {**BASE, **({"head_dim": 16} if model_type == "qwen3" else {}), **config}
        model = transformers.AutoModelForCausalLM.from_config(
            CONFIG_CLASSES[model_type](**numbers), attn_implementation="eager"
        )
        with torch.no_grad():
            # Norm weights away from one, biases away from zero, scores far from uniform: nothing may hide.
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    parameter.normal_(std=0.5)
                else:
                    parameter.normal_(std=0.15)
        folder = tmp_path / f"{model_type}_teacher"
        model.save_pretrained(folder, **({"max_shard_size": max_shard_size} if max_shard_size else {}))
        return folder, model.eval()

    return make
