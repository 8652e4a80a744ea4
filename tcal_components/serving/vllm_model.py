"""vLLM 0.25 and 0.26's text class of Qwen3.5 with the three methods that its state needs and later versions give it."""

from typing import Any

from vllm.model_executor.models.interfaces import IsHybrid
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM as TextModel
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForConditionalGeneration as Multimodal


class Qwen3_5ForCausalLM(TextModel, IsHybrid):
    """A text model whose cache holds states beside keys and values.

    The multimodal class has the methods. They read the engine's configuration and nothing of their class.
    """

    get_mamba_state_dtype_from_config: Any = classmethod(Multimodal.get_mamba_state_dtype_from_config.__func__)
    get_mamba_state_shape_from_config: Any = classmethod(Multimodal.get_mamba_state_shape_from_config.__func__)
    get_mamba_state_copy_func: Any = classmethod(Multimodal.get_mamba_state_copy_func.__func__)
