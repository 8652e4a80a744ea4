"""A teacher and its hybrid without weights: the configs that an engine needs to be timed with made-up ones.

python -m tcal_components.serving.outline qwen3_8b outlines
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from tcal_components import models
from tcal_components.export.config_json import STOCK_FORMAT, export_config, export_layout
from tcal_components.models.retained import uniform_layers
from tcal_components.modules.spec import GatedDeltaNetSpec

POSITIONS = 2**17 + 1024
_CLASSES = {
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen2_5": ("qwen2", "Qwen2ForCausalLM"),
    "llama3_2": ("llama", "LlamaForCausalLM"),
}


def write_outline(
    teacher_name: str,
    output_dir: str | Path,
    *,
    retained_layers: Sequence[int] | None = None,
    positions: int = POSITIONS,
) -> None:
    """Writes config.json of a teacher and of its hybrid.

    Args:
        teacher_name: A builder's name, such as ``qwen3_8b``.
        output_dir: Gets the folders ``teacher`` and ``hybrid``.
        retained_layers: Layers that keep attention. Default: None, every fourth or so.
        positions: Longest position, of both.
    """
    with torch.device("meta"):
        spec = getattr(models, teacher_name)(max_seq_len=positions).spec
    kept = retained_layers or uniform_layers(spec.num_layers, spec.num_layers // 4)
    teacher = {
        "architectures": [_CLASSES[spec.family][1]],
        "model_type": _CLASSES[spec.family][0],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.embed_dim,
        "intermediate_size": spec.intermediate_dim,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_seq_len,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_base,
        "rope_scaling": spec.rope_scaling and {"rope_type": "llama3", **spec.rope_scaling},
        "tie_word_embeddings": spec.tie_word_embeddings,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    layout = export_layout(
        spec, gdn=GatedDeltaNetSpec(), retained_layers=kept, format=STOCK_FORMAT, dtype=torch.bfloat16, pad_values=True
    )
    hybrid = export_config(layout, format=STOCK_FORMAT, dtype=torch.bfloat16, teacher_config=teacher)
    for name, config in (("teacher", teacher), ("hybrid", hybrid)):
        folder = Path(output_dir) / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        print(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command (see the module's text)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", help="a builder's name")
    parser.add_argument("output", help="gets the folders teacher and hybrid")
    parser.add_argument("--retained-layers", nargs="*", type=int, help="default: every fourth or so")
    parser.add_argument("--positions", type=int, default=POSITIONS, help="longest position, of both")
    options = parser.parse_args(arguments)
    write_outline(options.teacher, options.output, retained_layers=options.retained_layers, positions=options.positions)


if __name__ == "__main__":
    main()
