"""float8 layers: which are converted, and their numbers by emulation against full precision."""

import pytest
import torch
from torch import nn

from tcal_components.models._decoder import build_decoder
from tcal_components.modules.spec import DecoderSpec
from tcal_components.precision import RECIPES, apply_float8, float8_problem, without_float8


def make(intermediate_dim=64):
    torch.manual_seed(0)
    spec = DecoderSpec(
        family="qwen3",
        vocab_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        embed_dim=32,
        intermediate_dim=intermediate_dim,
        head_dim=16,
        max_seq_len=32,
        norm_eps=1e-6,
        rope_base=10000.0,
        rope_scaling=None,
        qkv_bias=False,
        qk_norm=True,
        tie_word_embeddings=False,
    )
    return build_decoder(spec, retained_layers=[1])


@pytest.mark.parametrize("recipe", RECIPES)
def test_numbers_and_gradients_stay_close(recipe):
    plain, quantised = make(), make()
    # Gradients of weights need counts of tokens in multiples of 16 too.
    tokens = torch.randint(64, (2, 16))
    layers = apply_float8(quantised, device="cpu", recipe=recipe, emulate=True)
    assert "layers.0.attn.q_proj" in layers.converted and "layers.1.mlp.w2" in layers.converted
    assert layers.kept == {"layers.0.attn.a_proj": "gates", "layers.0.attn.b_proj": "gates", "output": "head"}
    assert quantised.state_dict().keys() == plain.state_dict().keys()
    target = torch.randn(2, 16, 64)
    outputs = [model(tokens) for model in (plain, quantised)]
    assert not torch.equal(*outputs)
    error = (outputs[1] - outputs[0]).norm() / outputs[0].norm()
    assert error < 0.1
    for out in outputs:
        (out * target).sum().backward()
    for (name, a), b in zip(plain.named_parameters(), quantised.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 0.3 * a.grad.norm(), name


def test_shapes_that_do_not_fit_are_listed_and_unchanged():
    model = make(intermediate_dim=40)
    before = model.layers[0].mlp.w1
    layers = apply_float8(model, device="cpu", emulate=True, keep=lambda name, module: name.endswith("v_proj"))
    assert layers.kept["layers.0.mlp.w1"] == "shape not in multiples of 16"
    assert layers.kept["layers.1.attn.v_proj"] == "asked for"
    assert model.layers[0].mlp.w1 is before and type(before) is nn.Linear
    assert "layers.mlp.w1, layers.mlp.w2, layers.mlp.w3 (shape not in multiples of 16)" in layers.summary()
    model(torch.randint(64, (1, 5)))


def test_frozen_by_emulation_under_no_grad():
    model = make().requires_grad_(False)
    apply_float8(model, device="cpu", frozen=True, sharded=True, emulate=True)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        assert model(torch.randint(64, (1, 7))).isfinite().all()


def test_without_float8_is_the_full_precision_of_the_same_weights():
    plain, quantised = make(), make()
    apply_float8(quantised, device="cpu", emulate=True)
    tokens = torch.randint(64, (2, 16))
    want, rounded = plain(tokens), quantised(tokens)
    with without_float8(quantised):
        assert torch.equal(quantised(tokens), want)
        quantised(tokens).sum().backward()
    assert torch.equal(quantised(tokens), rounded) and not torch.equal(rounded, want)


def test_mistakes_are_one_line():
    with pytest.raises(ValueError, match="allowed: tensorwise, rowwise"):
        apply_float8(make(), device="cpu", recipe="fast", emulate=True)
    with pytest.raises(ValueError, match="needs a CUDA device"):
        apply_float8(make(), device="cpu")
    assert "set precision" in float8_problem("cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available() or float8_problem("cuda") is not None, reason="needs a float8 GPU")
@pytest.mark.parametrize("frozen", [False, True])
def test_on_the_gpu(frozen):
    plain, quantised = make().cuda().bfloat16(), make().cuda().bfloat16()
    tokens = torch.randint(64, (2, 16), device="cuda")
    if frozen:
        quantised.requires_grad_(False)
    apply_float8(quantised, device="cuda", frozen=frozen)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        a, b = plain(tokens), quantised(tokens)
    assert (a - b).norm() / a.norm() < 0.1
    if not frozen:
        b.sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in quantised.parameters())
