"""Builders of teachers and of their hybrids, one file a family."""

from tcal_components.models._decoder import build_decoder
from tcal_components.models.from_checkpoint import hybrid, teacher
from tcal_components.models.hf_config import read_spec
from tcal_components.models.llama3_2 import (
    llama3_2_1b,
    llama3_2_1b_hybrid,
    llama3_2_3b,
    llama3_2_3b_hybrid,
    llama3_2_decoder,
    smollm2_135m,
    smollm2_135m_hybrid,
    smollm2_360m,
    smollm2_360m_hybrid,
)
from tcal_components.models.memory import MemoryEstimate, count_parameters, estimate_memory
from tcal_components.models.qwen2_5 import (
    qwen2_5_0_5b,
    qwen2_5_0_5b_hybrid,
    qwen2_5_1_5b,
    qwen2_5_1_5b_hybrid,
    qwen2_5_3b,
    qwen2_5_3b_hybrid,
    qwen2_5_7b,
    qwen2_5_7b_hybrid,
    qwen2_5_decoder,
)
from tcal_components.models.qwen3 import (
    qwen3_0_6b,
    qwen3_0_6b_hybrid,
    qwen3_1_7b,
    qwen3_1_7b_hybrid,
    qwen3_4b,
    qwen3_4b_hybrid,
    qwen3_8b,
    qwen3_8b_hybrid,
    qwen3_14b,
    qwen3_14b_hybrid,
    qwen3_decoder,
)
from tcal_components.modules.spec import DecoderSpec, GatedDeltaNetSpec

__all__ = [
    "DecoderSpec",
    "GatedDeltaNetSpec",
    "MemoryEstimate",
    "build_decoder",
    "count_parameters",
    "estimate_memory",
    "hybrid",
    "llama3_2_1b",
    "llama3_2_1b_hybrid",
    "llama3_2_3b",
    "llama3_2_3b_hybrid",
    "llama3_2_decoder",
    "qwen2_5_0_5b",
    "qwen2_5_0_5b_hybrid",
    "qwen2_5_1_5b",
    "qwen2_5_1_5b_hybrid",
    "qwen2_5_3b",
    "qwen2_5_3b_hybrid",
    "qwen2_5_7b",
    "qwen2_5_7b_hybrid",
    "qwen2_5_decoder",
    "qwen3_0_6b",
    "qwen3_0_6b_hybrid",
    "qwen3_1_7b",
    "qwen3_1_7b_hybrid",
    "qwen3_4b",
    "qwen3_4b_hybrid",
    "qwen3_8b",
    "qwen3_8b_hybrid",
    "qwen3_14b",
    "qwen3_14b_hybrid",
    "qwen3_decoder",
    "read_spec",
    "smollm2_135m",
    "smollm2_135m_hybrid",
    "smollm2_360m",
    "smollm2_360m_hybrid",
    "teacher",
]
