import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tcal_components.models._decoder import build_decoder
from tcal_components.modules.spec import DecoderSpec, GatedDeltaNetSpec

LLAMA3_SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BASE = DecoderSpec(
    family="qwen3",
    vocab_size=61,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    embed_dim=32,
    intermediate_dim=48,
    head_dim=16,
    max_seq_len=256,
    norm_eps=1e-6,
    rope_base=10_000.0,
    rope_scaling=None,
    qkv_bias=False,
    qk_norm=True,
    tie_word_embeddings=False,
)


@pytest.fixture
def tiny_spec():
    """Builds the specification of a tiny teacher: ``tiny_spec(family, **changes)``."""

    def make(family: str, **changes) -> DecoderSpec:
        features = {
            "qwen3": {},
            "qwen2_5": {"qkv_bias": True, "qk_norm": False},
            "llama3_2": {"qk_norm": False, "norm_eps": 1e-5, "rope_scaling": LLAMA3_SCALING},
        }
        return replace(BASE, **({"family": family} | features[family] | changes))

    return make


@pytest.fixture
def random_hybrid():
    """Builds a hybrid whose every weight is random, norms and biases too; logits reach the size of real ones."""

    def make(spec: DecoderSpec, retained_layers=(1, 3), gdn: GatedDeltaNetSpec | None = None, seed: int = 0):
        torch.manual_seed(seed)
        student = build_decoder(spec, retained_layers=retained_layers, gdn=gdn or GatedDeltaNetSpec())
        with torch.no_grad():
            for name, value in student.named_parameters():
                if name.endswith("A_log"):
                    value.copy_(torch.randn_like(value) * 0.5)
                elif name.endswith("dt_bias"):
                    value.copy_(torch.randn_like(value) - 3.0)
                elif name.endswith("scale"):
                    # Around 1 but with small, negative and zero weights, which w - 1 stores badly.
                    value.copy_(torch.randn_like(value) * 0.4 + 0.7)
                    value[:3] = torch.tensor([0.01, -0.3, 0.0])
                elif name.endswith("bias"):
                    value.copy_(torch.randn_like(value))
                elif "conv" in name:
                    value.add_(torch.randn_like(value) * 0.2)
                elif value.ndim == 2:
                    size = {"tok_embeddings.weight": 1.5, "output.weight": 1.0}.get(name, value.shape[1] ** -0.5)
                    value.copy_(torch.randn_like(value) * size)
        return student.eval()

    return make


@pytest.fixture
def teacher_folder(tmp_path) -> Path:
    """A folder with what an export takes of the teacher: token ids and tokenizer files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path / "teacher"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "LICENSE").write_text("terms of the teacher\n")
    return folder
