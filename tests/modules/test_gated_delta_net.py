import copy
from functools import partial
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tcal_components.modules.gated_delta_net import GatedDeltaNet
from tcal_components.modules.mixer_parts import DecayParameters, set_identity_conv_

E, H, K, V = 24, 3, 16, 8
STARTS_POS = [[*range(5), *range(1), *range(70)], [*range(40), *range(36)]]


def _mixer(conv_size=4, dtype=torch.float32, seed=0, **sizes):
    torch.manual_seed(seed)
    sizes = {"embed_dim": E, "num_heads": H, "key_head_dim": K, "value_head_dim": V} | sizes
    mixer = GatedDeltaNet(conv_size=conv_size, norm_eps=1e-5, **sizes)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if "proj" in name:  # larger than the default, so that gates and decays vary over tokens
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        mixer.o_norm.scale.uniform_(0.5, 1.5)
    return mixer.to(dtype)


def _input(batch=2, length=76, dtype=torch.float32, seed=1, embed_dim=E):
    return torch.randn(batch, length, embed_dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _relative(actual, expected):
    actual, expected = (t.detach().to("cpu", torch.float64) for t in (actual, expected))
    return ((actual - expected).norm() / expected.norm()).item()


def _naive(p, x, input_pos, heads, eps, part="output"):
    """The equations of the layer, token by token. p: parameters by name, float64; x [B, T, E]."""
    rows = []
    for b in range(x.shape[0]):
        state, begin, outputs = None, 0, []
        for t in range(x.shape[1]):
            if state is None or input_pos[b][t] == 0:
                state, begin = 0.0, t
            qkv = []
            for name in "qkv":
                past = [x[b, s] @ p[f"{name}_proj.weight"].T for s in range(begin, t + 1)]
                value = past[-1]
                if f"{name}_conv.weight" in p:
                    taps = p[f"{name}_conv.weight"][:, 0]
                    width = taps.shape[1]
                    value = sum(u * taps[:, width - 1 - lag] for lag, u in enumerate(reversed(past[-width:])))
                qkv.append((value * value.sigmoid()).view(heads, -1))
            q, k, v = qkv
            q, k = (u / (u.square().sum(-1, keepdim=True) + 1e-6).sqrt() for u in (q, k))
            beta = (x[b, t] @ p["b_proj.weight"].T).sigmoid()
            softplus = torch.log1p(torch.exp(x[b, t] @ p["a_proj.weight"].T + p["decay.dt_bias"]))
            decay = torch.exp(-p["decay.A_log"].exp() * softplus)
            # S <- decay S (I - beta k k^T) + beta v k^T, S: [H, V, K]
            eye = torch.eye(k.shape[-1], dtype=k.dtype)
            erase = eye - beta[:, None, None] * k.unsqueeze(-1) * k.unsqueeze(-2)
            kept = decay[:, None, None] * state @ erase if torch.is_tensor(state) else 0.0
            state = kept + beta[:, None, None] * v.unsqueeze(-1) * k.unsqueeze(-2)
            o = (state @ q.unsqueeze(-1)).squeeze(-1) / q.shape[-1] ** 0.5
            if part == "state":
                outputs.append(o)
                continue
            norm = o / (o.square().mean(-1, keepdim=True) + eps).sqrt() * p["o_norm.scale"]
            gate = (x[b, t] @ p["g_proj.weight"].T).view(heads, -1)
            features = (norm * gate * gate.sigmoid()).flatten()
            outputs.append(features if part == "features" else features @ p["output_proj.weight"].T)
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


def _parameters(mixer):
    return {n: p.detach().cpu().double().requires_grad_() for n, p in mixer.named_parameters()}


@pytest.mark.parametrize("conv_size", [0, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
def test_output_and_all_gradients_match_the_equations(conv_size, dtype, tolerance):
    mixer = _mixer(conv_size, dtype)
    x = _input(length=20, dtype=dtype).requires_grad_()
    input_pos = torch.tensor([[*range(3), *range(1), *range(16)], [*range(20)]])
    out = mixer(x, input_pos=input_pos)
    out.square().sum().backward()

    reference, x64 = _parameters(mixer), x.detach().double().requires_grad_()
    expected = _naive(reference, x64, input_pos.tolist(), H, 1e-5)
    expected.square().sum().backward()
    errors = {"output": _relative(out, expected), "x": _relative(x.grad, x64.grad)}
    errors |= {n: _relative(p.grad, reference[n].grad) for n, p in mixer.named_parameters()}
    assert len(errors) == len(reference) + 2
    assert all(error <= tolerance for error in errors.values()), errors


def test_parts_match_the_equations():
    mixer = _mixer(dtype=torch.float64)
    x = _input(length=12, dtype=torch.float64)
    input_pos = torch.tensor([[*range(5), *range(7)], [*range(12)]])
    naive = partial(_naive, _parameters(mixer), x, input_pos.tolist(), H, 1e-5)
    assert _relative(mixer.state_output(x, input_pos=input_pos), naive(part="state")) <= 1e-11
    features = mixer.features(x, input_pos=input_pos)
    assert features.shape == (2, 12, H * V)
    assert _relative(features, naive(part="features")) <= 1e-11
    assert torch.equal(mixer.output_proj(features), mixer(x, input_pos=input_pos))


@pytest.mark.parametrize("conv_size", [0, 4])
def test_packed_documents_equal_separate_sequences(conv_size):
    mixer, x = _mixer(conv_size), _input()
    packed = mixer(x, input_pos=torch.tensor(STARTS_POS))
    for row, bounds in enumerate([[0, 5, 6, 76], [0, 40, 76]]):
        for begin, end in pairwise(bounds):
            assert _relative(packed[row, begin:end], mixer(x[row : row + 1, begin:end])[0]) <= 1e-5


def test_left_padding_equals_no_padding():
    mixer, x = _mixer(), _input()
    input_pos = torch.tensor([[0] * 70 + [*range(6)], [*range(76)]])
    out = mixer(x, input_pos=input_pos)
    assert _relative(out[0, 70:], mixer(x[:1, 70:])[0]) <= 1e-5
    assert _relative(out[1], mixer(x[1:])[0]) <= 1e-5


@pytest.mark.parametrize("conv_size", [0, 4])
@pytest.mark.parametrize("prompt", [1, 2, 70])
def test_cached_decoding_equals_the_full_forward(conv_size, prompt):
    mixer, x = _mixer(conv_size), _input()
    # Row 0 is padded so that one real token is left of the prompt.
    input_pos = torch.tensor([[0] * (prompt - 1) + [*range(77 - prompt)], [*range(76)]])
    expected = mixer(x, input_pos=input_pos)
    mixer.setup_cache(3, torch.float32, max_seq_len=76)
    for buffer in mixer.kv_cache.buffers():
        buffer.fill_(1e4)
    mixer.reset_cache()
    if prompt > 1:
        for buffer in mixer.kv_cache.buffers():
            buffer.fill_(float("nan"))  # a prompt starts at position 0 and must not read what was there
    with torch.inference_mode():
        outputs = [mixer(x[:, :prompt], input_pos=input_pos[:, :prompt])]
        for t in range(prompt, 76):
            # torchtune gives [b]; [b, 1] must do too.
            position = input_pos[:, t] if t % 2 else input_pos[:, t : t + 1]
            outputs.append(mixer(x[:, t : t + 1], input_pos=position))
    assert _relative(torch.cat(outputs, dim=1), expected) <= 1e-5


def test_a_prompt_in_parts_continues_and_a_new_prompt_starts_anew():
    mixer, x = _mixer(), _input(batch=1)
    expected = mixer(x)
    mixer.setup_cache(1, torch.float32)
    with torch.no_grad():
        for _ in range(2):  # the second prompt starts at position 0 without reset_cache()
            parts = [mixer(x[:, i : i + 38], input_pos=torch.arange(i, i + 38)) for i in (0, 38)]
            assert _relative(torch.cat(parts, dim=1), expected) <= 1e-5


def test_a_single_token_at_position_zero_keeps_the_state():
    mixer, x = _mixer(), _input(length=5)
    expected = mixer(x)
    mixer.setup_cache(2, torch.float32)
    zero = torch.zeros(2, dtype=torch.long)
    with torch.no_grad():
        outputs = [mixer(x[:, t : t + 1], input_pos=zero) for t in range(5)]
    assert _relative(torch.cat(outputs, dim=1), expected) <= 1e-5


def test_cache_is_no_part_of_the_weights_and_can_be_switched_off():
    mixer, x = _mixer(), _input()
    keys, expected = mixer.state_dict().keys(), mixer(x)
    mixer.setup_cache(2, torch.bfloat16)
    assert mixer.state_dict().keys() == keys
    assert mixer.kv_cache.state.dtype == torch.float32
    mixer(x)
    mixer.cache_enabled = False
    assert torch.equal(mixer(x), expected)
    with pytest.raises(ValueError, match="batch of 3 rows; the cache was set up for at most 2"):
        mixer.cache_enabled = True
        mixer(_input(batch=3))


def test_it_stands_in_for_attention_in_a_torchtune_decoder():
    from torchtune.modules import RMSNorm, TransformerDecoder, TransformerSelfAttentionLayer, disable_kv_cache
    from torchtune.modules.feed_forward import FeedForward

    torch.manual_seed(0)
    mlp = FeedForward(gate_proj=torch.nn.Linear(E, 8), down_proj=torch.nn.Linear(8, E), up_proj=torch.nn.Linear(E, 8))
    layer = TransformerSelfAttentionLayer(_mixer(), mlp, sa_norm=RMSNorm(E), mlp_norm=RMSNorm(E))
    decoder = TransformerDecoder(
        tok_embeddings=torch.nn.Embedding(11, E),
        layers=[layer],
        max_seq_len=16,
        num_heads=H,
        head_dim=K,
        norm=RMSNorm(E),
        output=torch.nn.Linear(E, 11),
    )
    tokens = torch.arange(8).view(1, 8)
    with torch.no_grad():
        expected = decoder(tokens)
        decoder.setup_caches(1, torch.float32)
        assert decoder.caches_are_setup() and decoder.caches_are_enabled()
        mask = torch.ones(16, 16, dtype=torch.bool).tril()
        logits = [decoder(tokens[:, :5], input_pos=torch.arange(5), mask=mask[None, :5])]
        for t in range(5, 8):
            logits.append(decoder(tokens[:, t : t + 1], input_pos=torch.tensor([t]), mask=mask[None, t : t + 1]))
        assert _relative(torch.cat(logits, dim=1), expected) <= 1e-5
        with disable_kv_cache(decoder):
            assert torch.equal(decoder(tokens), expected)
        decoder.reset_caches()
    assert not layer.attn.kv_cache.state.any()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(use_reentrant):
    mixer, x = _mixer(), _input().requires_grad_()
    input_pos = torch.tensor(STARTS_POS)
    expected = torch.autograd.grad(mixer(x, input_pos=input_pos).square().sum(), [x, *mixer.parameters()])
    checkpoint(partial(mixer, input_pos=input_pos), x, use_reentrant=use_reentrant).square().sum().backward()
    actual = [x.grad, *(p.grad for p in mixer.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))


@pytest.fixture
def one_process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_fsdp2_with_the_decay_in_float32(one_process_group):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mixer, x = _mixer(), _input()
    input_pos = torch.tensor(STARTS_POS)
    mixer(x, input_pos=input_pos).square().sum().backward()
    sharded, mesh = copy.deepcopy(mixer), torch.distributed.init_device_mesh("cpu", (1,))
    sharded.zero_grad()
    fully_shard(sharded.decay, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    fully_shard(sharded, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32))
    seen = []
    sharded.decay.register_forward_hook(lambda module, args, out: seen.append((module.A_log.dtype, out.dtype)))
    checkpoint(partial(sharded, input_pos=input_pos), x, use_reentrant=False).float().square().sum().backward()
    assert set(seen) == {(torch.float32, torch.float32)}
    for (name, p), q in zip(sharded.named_parameters(), mixer.parameters()):
        assert _relative(p.grad.full_tensor(), q.grad) <= 5e-2, name
    sharded.reset_parameters()
    assert all(p.full_tensor().isfinite().all() for p in sharded.parameters())


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_bf16_is_close_and_keeps_float32_gates(weights):
    mixer, x = _mixer(), _input()
    input_pos = torch.tensor(STARTS_POS)
    expected = mixer(x, input_pos=input_pos)
    low = copy.deepcopy(mixer).to(weights)
    with torch.autocast("cpu", torch.bfloat16):
        out = low(x.to(weights), input_pos=input_pos)
    assert out.dtype == torch.bfloat16
    assert _relative(out, expected) <= 3e-2
    assert low.decay(x[..., :H].to(torch.bfloat16)).dtype == torch.float32
    out.float().square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == weights for p in low.parameters())


def test_default_decay_is_the_librarys():
    torch.manual_seed(0)
    decay = DecayParameters(num_heads=20_000)
    tenths = torch.tensor([0.1, 0.5, 0.9])
    # A ~ U(0, 16), dt log-uniform in [1e-3, 0.1]; the decay of a step at x = 0 is exp(-A dt).
    assert torch.quantile(decay.A_log.exp(), tenths).tolist() == pytest.approx([1.6, 8.0, 14.4], abs=0.3)
    dt = torch.nn.functional.softplus(decay.dt_bias)
    assert torch.quantile(dt.log10(), tenths).tolist() == pytest.approx([-2.8, -2.0, -1.2], abs=0.05)
    step = decay(torch.zeros(1)).exp()
    assert torch.quantile(step, tenths).tolist() == pytest.approx([0.600, 0.941, 0.9926], abs=0.012)


def test_reset_parameters_covers_every_parameter_after_meta_device():
    with torch.device("meta"):
        mixer = GatedDeltaNet(embed_dim=64, num_heads=4, key_head_dim=32, value_head_dim=32)
    mixer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.fill_(float("nan"))
    torch.manual_seed(0)
    mixer.reset_parameters()
    assert all(p.isfinite().all() for p in mixer.parameters())
    assert mixer.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert mixer.q_conv.weight.std().item() == pytest.approx(0.5 / 3**0.5, rel=0.1)
    assert mixer.q_conv.weight.abs().max() <= 0.5
    assert torch.equal(mixer.o_norm.scale, torch.ones(32))


def test_identity_convolution_equals_none():
    mixer, x = _mixer(), _input()
    for conv in (mixer.q_conv, mixer.k_conv, mixer.v_conv):
        set_identity_conv_(conv)
    bare = _mixer(conv_size=0)
    bare.load_state_dict(mixer.state_dict(), strict=False)
    assert _relative(mixer(x), bare(x)) <= 1e-6


def test_parameter_names_and_shapes():
    shapes = {name: list(p.shape) for name, p in _mixer().named_parameters()}
    assert shapes == {
        "q_proj.weight": [H * K, E],
        "k_proj.weight": [H * K, E],
        "v_proj.weight": [H * V, E],
        "g_proj.weight": [H * V, E],
        "a_proj.weight": [H, E],
        "b_proj.weight": [H, E],
        "output_proj.weight": [E, H * V],
        "q_conv.weight": [H * K, 1, 4],
        "k_conv.weight": [H * K, 1, 4],
        "v_conv.weight": [H * V, 1, 4],
        "decay.A_log": [H],
        "decay.dt_bias": [H],
        "o_norm.scale": [V],
    }


@pytest.mark.parametrize(("name", "value"), [("num_heads", 0), ("conv_size", -1)])
def test_impossible_sizes_are_refused(name, value):
    sizes = {"embed_dim": 8, "num_heads": 1, "key_head_dim": 4, "value_head_dim": 4}
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        GatedDeltaNet(**{**sizes, name: value})


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCuda:
    SIZES: ClassVar[dict[str, int]] = {"embed_dim": 256, "num_heads": 2, "key_head_dim": 64, "value_head_dim": 128}

    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize(("autocast", "tolerance"), [(True, 3e-2), (False, 5e-3)])
    def test_output_and_gradients_match_float64(self, packed, autocast, tolerance):
        # Under autocast the rounding of the bf16 projections is in the error as well as that of the kernels.
        reference = _mixer(dtype=torch.float64, **self.SIZES)
        x64 = _input(dtype=torch.float64, embed_dim=256).requires_grad_()
        input_pos = torch.tensor(STARTS_POS) if packed else torch.arange(76).expand(2, -1)
        expected = reference(x64, input_pos=input_pos)
        expected.square().sum().backward()
        mixer = copy.deepcopy(reference).to("cuda", torch.float32)
        mixer.zero_grad()
        x = x64.detach().to("cuda", torch.float32).requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            out = mixer(x, input_pos=input_pos.cuda())
        out.float().square().sum().backward()
        errors = {"output": _relative(out, expected), "x": _relative(x.grad, x64.grad)}
        pairs = zip(mixer.named_parameters(), reference.parameters())
        errors |= {name: _relative(p.grad, q.grad) for (name, p), q in pairs}
        assert all(error <= tolerance for error in errors.values()), errors

    def test_cached_decoding_equals_the_full_forward(self):
        mixer, x = _mixer(**self.SIZES).cuda(), _input(embed_dim=256).cuda()
        input_pos = torch.tensor([[0] * 69 + [*range(7)], [*range(76)]]).cuda()
        with torch.inference_mode():
            expected = mixer(x, input_pos=input_pos)
            mixer.setup_cache(2, torch.float32)
            outputs = [mixer(x[:, :70], input_pos=input_pos[:, :70])]
            outputs += [mixer(x[:, t : t + 1], input_pos=input_pos[:, t]) for t in range(70, 76)]
        assert _relative(torch.cat(outputs, dim=1), expected) <= 5e-3
