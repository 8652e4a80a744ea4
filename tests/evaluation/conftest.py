"""Tiny models and text for the measurements."""

import json

import pytest
import torch

from tcal_components.models._decoder import build_decoder
from tcal_components.modules.spec import DecoderSpec

VOCABULARY = 61


def tiny_spec(**changes) -> DecoderSpec:
    numbers = {
        "family": "qwen3",
        "vocab_size": VOCABULARY,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "embed_dim": 24,
        "intermediate_dim": 32,
        "head_dim": 8,
        "max_seq_len": 256,
        "norm_eps": 1e-6,
        "rope_base": 10000.0,
        "rope_scaling": None,
        "qkv_bias": False,
        "qk_norm": True,
        "tie_word_embeddings": True,
    }
    return DecoderSpec(**{**numbers, **changes})


@pytest.fixture
def spec() -> DecoderSpec:
    return tiny_spec()


@pytest.fixture
def teacher(spec):
    torch.manual_seed(0)
    return build_decoder(spec)


@pytest.fixture
def hybrid(spec):
    torch.manual_seed(1)
    return build_decoder(spec, retained_layers=[1], gdn={"conv_size": 4})


class PackedRows:
    """A packed dataset made by hand: two documents in each row but the first."""

    def __init__(self, rows: int = 5, length: int = 40) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
        self.cut = [length] + [7 + 3 * row for row in range(1, rows)]
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= len(self):
            raise IndexError(index)
        tokens, cut, at = self.tokens[index], self.cut[index], torch.arange(self.length)
        labels = torch.cat([tokens[1:], torch.tensor([-100])])
        if cut < self.length:
            labels[cut - 1] = -100
        return {
            "tokens": tokens,
            "labels": labels,
            "input_pos": torch.where(at < cut, at, at - cut),
            "document": (at >= cut).long(),
        }


@pytest.fixture
def rows() -> PackedRows:
    return PackedRows()


@pytest.fixture
def hf_pair():
    """A Qwen3 of transformers and our decoder with the same weights."""
    transformers = pytest.importorskip("transformers")
    from tcal_components.checkpoint.names import hf_to_torchtune

    spec = tiny_spec()
    torch.manual_seed(4)
    config = transformers.Qwen3Config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.embed_dim,
        intermediate_size=spec.intermediate_dim,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_seq_len,
        rms_norm_eps=spec.norm_eps,
        rope_theta=spec.rope_base,
        tie_word_embeddings=True,
    )
    theirs = transformers.Qwen3ForCausalLM(config).eval()
    ours = build_decoder(spec)
    ours.load_state_dict(hf_to_torchtune(theirs.state_dict(), spec), strict=True)
    return theirs, ours


@pytest.fixture
def json_lines(tmp_path):
    """Writes dicts as a .jsonl file."""

    def write(name: str, rows: list[dict]):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write
