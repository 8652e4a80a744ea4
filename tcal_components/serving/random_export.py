"""Exports of random weights with the features of each family, to check engines with where no teacher is at hand.

    python -m tcal_components.serving.random_export --family qwen3 --tokenizer FOLDER --output exports/qwen3

Every weight is random, norms, biases, decays and convolutions too, and of such a size that logits reach those of real
models and attention depends on position. ``--tokenizer`` is any folder with config.json and tokenizer files.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tcal_components.export.config_json import ExportInfo
from tcal_components.export.folder import export_hybrid
from tcal_components.models._decoder import build_decoder
from tcal_components.models.hf_config import read_config
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.modules.spec import DecoderSpec, GatedDeltaNetSpec

_BASE = DecoderSpec(
    family="qwen3",
    vocab_size=1,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    embed_dim=512,
    intermediate_dim=1024,
    head_dim=128,
    max_seq_len=131072,
    norm_eps=1e-6,
    rope_base=1e6,
    rope_scaling=None,
    qkv_bias=False,
    qk_norm=True,
    tie_word_embeddings=False,
)
_LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Small relatives: head sizes, biases, norms, RoPE and heads of Qwen3-8B, Qwen2.5-0.5B, Llama-3.2-3B and SmolLM2-135M.
SPECS = {
    "qwen3": _BASE,
    "qwen2_5": replace(
        _BASE, family="qwen2_5", num_heads=8, head_dim=64, qkv_bias=True, qk_norm=False, tie_word_embeddings=True
    ),
    "llama3_2": replace(
        _BASE,
        family="llama3_2",
        norm_eps=1e-5,
        rope_base=5e5,
        rope_scaling=_LLAMA3,
        qk_norm=False,
        tie_word_embeddings=True,
    ),
    "smollm2": replace(
        _BASE,
        family="llama3_2",
        num_heads=9,
        num_kv_heads=3,
        embed_dim=576,
        head_dim=64,
        max_seq_len=8192,
        norm_eps=1e-5,
        rope_base=1e5,
        qk_norm=False,
        tie_word_embeddings=True,
    ),
}
GDN = {"smollm2": GatedDeltaNetSpec(key_head_dim=128)}


def random_hybrid(
    spec: DecoderSpec, retained_layers: Iterable[int], gdn: GatedDeltaNetSpec, seed: int
) -> HybridDecoder:
    """Builds a hybrid of random weights.

    Args:
        spec: Numbers of the teacher.
        retained_layers: Layers that keep attention.
        gdn: Shape of the others.
        seed: Of the random numbers.

    Returns:
        HybridDecoder: The student.
    """
    student = build_decoder(spec, retained_layers=tuple(retained_layers), gdn=gdn)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in student.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if name.endswith("A_log"):
                value.copy_(0.5 * noise)
            elif name.endswith("dt_bias"):
                value.copy_(noise - 3.0)  # half-lives around a dozen tokens
            elif name.endswith("scale"):
                value.copy_(1.0 + 0.2 * noise)
            elif name.endswith("bias"):
                value.copy_(noise)
            elif "conv" in name:
                value.add_(0.2 * noise)
            elif name in ("tok_embeddings.weight", "output.weight"):
                value.copy_(0.1 * noise)
            else:
                sharper = 1.5 if ".q_proj" in name or ".k_proj" in name else 1.0
                value.copy_(sharper * value.shape[1] ** -0.5 * noise)
    return student.eval()


def random_export(
    family: str, output_dir: str | Path, *, tokenizer_dir: str | Path, retained_layers: Iterable[int], seed: int = 0
) -> ExportInfo:
    """Exports a hybrid of random weights.

    Args:
        family: One of ``SPECS``.
        output_dir: Folder to write.
        tokenizer_dir: Folder with config.json (vocabulary size, token ids) and tokenizer files.
        retained_layers: Layers that keep attention, of 8.
        seed: Of the random numbers. Default: 0.

    Returns:
        ExportInfo: What was written.
    """
    spec = replace(SPECS[family], vocab_size=read_config(tokenizer_dir)["vocab_size"])
    gdn, kept = GDN.get(family, GatedDeltaNetSpec()).resolve(spec), tuple(retained_layers)
    student = random_hybrid(spec, kept, gdn, seed)
    return export_hybrid(
        student.state_dict(),
        spec=spec,
        gdn=gdn,
        retained_layers=kept,
        teacher_dir=tokenizer_dir,
        output_dir=output_dir,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command (see the module's text)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", required=True, choices=sorted(SPECS))
    parser.add_argument("--tokenizer", required=True, help="folder with config.json and tokenizer files")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--retained-layers", nargs="*", type=int, default=[0, 2, 3, 6])
    options = parser.parse_args(arguments)
    info = random_export(
        options.family, options.output, tokenizer_dir=options.tokenizer, retained_layers=options.retained_layers
    )
    print(f"{info.path}: {info.parameters:,} parameters, attention in layers {list(info.retained_layers)}")


if __name__ == "__main__":
    main()
