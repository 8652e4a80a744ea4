"""Lets vLLM 0.25 and 0.26 serve an export; from 0.27.1 on vLLM does it by itself and this does nothing.

These versions have the class ``Qwen3_5ForCausalLM`` as a part of the multimodal model, but do not register it. vLLM calls
:func:`register`, an entry point of the group ``vllm.general_plugins``, in each of its processes. It needs nothing else of
this project: ``pip install --no-deps taylor-calibrate`` beside vLLM is enough.
"""

from __future__ import annotations

from typing import Any

ARCHITECTURE = "Qwen3_5ForCausalLM"


def register() -> None:
    """Registers the class where vLLM does not."""
    from vllm import ModelRegistry

    if ARCHITECTURE in ModelRegistry.get_supported_archs():
        return
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, Qwen3_5ForConditionalGenerationConfig

    class TextConfig(Qwen3_5ForConditionalGenerationConfig):
        """What the engine sets up for the state of the hybrid layers, without the positions of images."""

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            Qwen3_5ForConditionalGenerationConfig.verify_and_update_config(vllm_config)
            rope = getattr(vllm_config.model_config.hf_text_config, "rope_parameters", None) or {}
            for key in ("mrope_section", "mrope_interleaved"):
                rope.pop(key, None)

    MODELS_CONFIG_MAP[ARCHITECTURE] = TextConfig
    ModelRegistry.register_model(ARCHITECTURE, f"tcal_components.serving.vllm_model:{ARCHITECTURE}")
