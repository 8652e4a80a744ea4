"""Hybrids as a whole: cached decoding, packed documents, teacher weights and gradients."""

import copy

import pytest
import torch
from torchtune import training
from torchtune.modules import TransformerSelfAttentionLayer

from tcal_components import models

TINY = {
    "vocab_size": 31,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 24,
    "intermediate_dim": 20,
    "max_seq_len": 32,
    "head_dim": 8,
}
DECODERS = [models.llama3_2_decoder, models.qwen2_5_decoder, models.qwen3_decoder]


def hybrid(decoder, retained_layers, **gdn):
    torch.manual_seed(0)
    return decoder(**TINY, retained_layers=retained_layers, gdn=gdn).eval()


def tokens_for(batch=2, length=18):
    return torch.randint(31, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.__name__)
# With a converted and with a retained first layer, because torchtune asks layer 0 whether caches are on.
@pytest.mark.parametrize("retained_layers", [[1, 3], [0]])
@torch.no_grad()
def test_cached_decoding_equals_full_forward(decoder, retained_layers):
    model, tokens = hybrid(decoder, retained_layers), tokens_for()
    expected = model(tokens)
    model.setup_caches(batch_size=2, dtype=torch.float32, decoder_max_seq_len=20)
    causal = torch.ones(20, 20, dtype=torch.bool).tril()
    for prompt_len in (5, 1):
        out = [model(tokens[:, :prompt_len], mask=causal[None, :prompt_len], input_pos=torch.arange(prompt_len)[None])]
        for t in range(prompt_len, 18):
            out.append(model(tokens[:, t : t + 1], mask=causal[None, t : t + 1], input_pos=torch.tensor([t, t])))
        torch.testing.assert_close(torch.cat(out, dim=1), expected, atol=1e-4, rtol=0)
        model.reset_caches()


@pytest.mark.parametrize("gdn", [{}, {"conv_size": 0, "key_head_dim": 16}])
@torch.no_grad()
def test_packed_documents_equal_separate_ones(gdn):
    model, tokens = hybrid(models.qwen3_decoder, [2], **gdn), tokens_for(batch=1)
    document = torch.tensor([[0] * 7 + [1] * 11])
    mask = (document[:, :, None] == document[:, None, :]) & torch.ones(18, 18, dtype=torch.bool).tril()
    packed = model(tokens, mask=mask, input_pos=torch.cat([torch.arange(7), torch.arange(11)])[None])
    separate = [model(part) for part in tokens.split([7, 11], dim=1)]
    torch.testing.assert_close(packed, torch.cat(separate, dim=1), atol=1e-4, rtol=0)


@torch.no_grad()
def test_fully_retained_hybrid_is_the_teacher():
    teacher = models.qwen2_5_decoder(**TINY)
    student = models.qwen2_5_decoder(**TINY, retained_layers=range(4))
    student.load_state_dict(teacher.state_dict())
    torch.testing.assert_close(student(tokens_for()), teacher(tokens_for()), rtol=0, atol=0)


@torch.no_grad()
def test_layers_before_the_first_converted_one_equal_the_teacher():
    teacher = models.qwen3_decoder(**TINY)
    student = models.qwen3_decoder(**TINY, retained_layers=[0, 1])
    replaced = ("layers.2.attn.", "layers.3.attn.")
    weights = {key: tensor for key, tensor in teacher.state_dict().items() if not key.startswith(replaced)}
    missing, unexpected = student.load_state_dict(weights, strict=False)
    assert not unexpected and all(key.startswith(replaced) for key in missing)
    for model in (teacher, student):
        model.output_hidden_states = [2, 3]
    expected, got = teacher(tokens_for()), student(tokens_for())
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=0)
    assert (got[1] - expected[1]).abs().max() > 1e-3


def test_activation_checkpointing_keeps_every_gradient():
    plain = hybrid(models.llama3_2_decoder, [1])
    checkpointed = copy.deepcopy(plain)
    training.set_activation_checkpointing(checkpointed, auto_wrap_policy={TransformerSelfAttentionLayer})
    for model in (plain, checkpointed):
        model(tokens_for()).square().mean().backward()
    gradients = dict(plain.named_parameters())
    for name, parameter in checkpointed.named_parameters():
        original = gradients[name.replace("_checkpoint_wrapped_module.", "")]
        assert original.grad is not None and original.grad.abs().max() > 0, name
        torch.testing.assert_close(parameter.grad, original.grad)


def test_copy_keeps_the_head_tied():
    model = copy.deepcopy(hybrid(models.llama3_2_decoder, [1]))
    assert model.output.tied_module is model.tok_embeddings


@torch.no_grad()
def test_autocast_stays_near_float32():
    model, tokens = hybrid(models.qwen3_decoder, [1]), tokens_for()
    expected = model(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(tokens)
    assert rounded.dtype == torch.float32
    assert (rounded - expected).norm() < 0.03 * expected.norm()
