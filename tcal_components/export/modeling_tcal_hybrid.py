"""The model of a folder exported as ``hf_custom``: transformers' Qwen3.5 text class without q/k norm.

This file is copied into the exported folder and loaded from there with ``trust_remote_code=True``; it needs nothing but
transformers >= 5.6.2. Qwen3.5 always normalises q and k. Teachers that do not (Qwen2.5, Llama-3.2) fit the stock class
only with heads of twice the size; here their retained attention keeps its own size.
"""

from torch import nn
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM


class TcalHybridConfig(Qwen3_5TextConfig):
    """Qwen3.5's text configuration under a name of its own; ``tcal["qk_norm"]`` says whether q and k are normalised."""

    model_type = "tcal_hybrid"


class TcalHybridForCausalLM(Qwen3_5ForCausalLM):
    """Hybrid of attention and Gated DeltaNet layers whose q/k norm is optional."""

    config_class = TcalHybridConfig
    config: TcalHybridConfig

    def __init__(self, config: TcalHybridConfig) -> None:
        super().__init__(config)
        if not config.tcal["qk_norm"]:
            for layer in self.model.layers:
                if hasattr(layer, "self_attn"):
                    layer.self_attn.q_norm = nn.Identity()
                    layer.self_attn.k_norm = nn.Identity()
