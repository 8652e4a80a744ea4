"""Tiny teachers and batches that several folders of tests share."""

import signal

import pytest
import torch

from tcal_components.models._decoder import build_decoder
from tcal_components.modules.spec import DecoderSpec

# A shell's background process and nohup ignore these, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

SPEC = {
    "family": "llama3_2",
    "vocab_size": 64,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 48,
    "head_dim": 8,
    "max_seq_len": 64,
    "norm_eps": 1e-6,
    "rope_base": 10000.0,
    "rope_scaling": None,
    "qkv_bias": False,
    "qk_norm": False,
    "tie_word_embeddings": True,
}


@pytest.fixture
def make_teacher():
    """Builder of a tiny teacher with weights large enough for attention that is not uniform."""

    def make(**changes):
        torch.manual_seed(0)
        teacher = build_decoder(DecoderSpec(**{**SPEC, **changes}))
        with torch.no_grad():
            for name, parameter in teacher.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.5)
                elif name.endswith("_norm.scale"):
                    parameter.uniform_(0.5, 1.5)
                elif "attn" in name:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5 * 1.5)
            # A mean direction, as real hidden states have one.
            teacher.tok_embeddings.weight.add_(torch.randn(teacher.spec.embed_dim))
        return teacher.requires_grad_(False)

    return make


@pytest.fixture
def teacher(make_teacher):
    return make_teacher()


@pytest.fixture
def make_batch():
    """Builder of a batch; ``lengths`` packs each row from documents of these lengths."""

    def make(seed=0, rows=2, length=32, lengths=None):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 64, (rows, length), generator=generator)
        if lengths is None:
            return {"tokens": tokens}
        document = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).expand(rows, -1)
        input_pos = torch.cat([torch.arange(n) for n in lengths]).expand(rows, -1)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = (document[:, :, None] == document[:, None, :]) & causal
        return {"tokens": tokens, "document": document.clone(), "input_pos": input_pos.clone(), "mask": mask}

    return make
