"""Speed: the formula of the cache size equals the tensors' sizes, decoding is real decoding, mistakes are one line."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tcal_components.evaluation import speed as speed_module
from tcal_components.evaluation.cache_size import measured_cache_bytes, recurrent_state_bytes, theoretical_cache_bytes
from tcal_components.evaluation.speed import decode_speed, prefill_seconds, speed
from tcal_components.models._decoder import build_decoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "retained, gdn",
    [
        (None, None),
        ([1], {"conv_size": 4}),
        ([], {"conv_size": 0}),
        ([0], {"conv_size": 2, "key_head_dim": 16, "value_head_dim": 8}),
    ],
)
def test_formula_equals_the_tensors_of_our_caches(spec, retained, gdn, dtype):
    model = build_decoder(spec, retained_layers=retained, gdn=gdn)
    for batch_size, context in ((1, 32), (3, 100)):
        model.setup_caches(batch_size, dtype, decoder_max_seq_len=context)
        assert measured_cache_bytes(model) == theoretical_cache_bytes(
            model, context=context, batch_size=batch_size, dtype=dtype
        )
        for layer in model.layers:
            layer.attn.kv_cache, layer.attn.cache_enabled = None, False


def test_formula_by_hand(hybrid):
    # Layer 1 keeps attention with 2 key/value heads of 8; layer 0 is GDN with 4 heads of 8 x 8 and 4 places of q, k, v.
    expected = 2 * 50 * 2 * 8 * 2 + (4 * 8 * 8 * 4 + 4 * 3 * 4 * 8 * 2)
    assert theoretical_cache_bytes(hybrid, context=50, dtype=torch.bfloat16) == expected


def test_the_state_of_all_converted_layers_is_their_cache(spec):
    model = build_decoder(spec, retained_layers=[], gdn={"conv_size": 2, "key_head_dim": 16, "value_head_dim": 8})
    want = theoretical_cache_bytes(model, context=50, dtype=torch.bfloat16)
    assert recurrent_state_bytes(spec.num_heads, model.gdn, layers=spec.num_layers, dtype=torch.bfloat16) == want


def test_formula_equals_the_tensors_of_transformers_caches(hf_pair):
    theirs, _ = hf_pair
    tokens = torch.randint(0, 61, (2, 20))
    cache = theirs(input_ids=tokens, use_cache=True).past_key_values
    assert measured_cache_bytes(cache) == theoretical_cache_bytes(theirs, context=20, batch_size=2, dtype=torch.float32)


def test_formula_equals_the_tensors_of_an_exported_hybrid_in_transformers():
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Qwen3_5TextConfig"):
        pytest.skip("this transformers has no qwen3_5_text")
    config = transformers.Qwen3_5TextConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForCausalLM(config).eval()
    cache = model(input_ids=torch.randint(0, 61, (1, 33)), use_cache=True).past_key_values
    assert measured_cache_bytes(cache) == theoretical_cache_bytes(model, context=33, dtype=torch.float32)
    (row,) = speed(model, contexts=(24,), decode_tokens=6, repeats=1)
    assert row.cache_bytes > 0 and row.decode_tokens_per_second > 0


@pytest.mark.parametrize("kind", ["teacher", "hybrid"])
def test_measures_our_decoders_and_leaves_them_as_they_were(kind, request):
    model = request.getfixturevalue(kind)
    tokens = torch.randint(0, 61, (1, 12))
    before = model(tokens)
    rows = speed(model, contexts=(32, 64), batch_size=2, decode_tokens=8, repeats=1)
    assert [row.context for row in rows] == [32, 64]
    for row in rows:
        assert row.prefill_tokens_per_second > 0 and row.decode_tokens_per_second > 0
        assert row.cache_bytes == row.cache_bytes_theory and row.peak_memory_gib is None and row.dtype == "float32"
        assert row.graph_tokens_per_second is None, "a CUDA graph needs CUDA"
    growth = rows[1].cache_bytes - rows[0].cache_bytes
    attention_layers = 2 if kind == "teacher" else 1
    assert growth == attention_layers * 2 * 2 * 32 * 2 * 8 * 4  # only attention grows with the context
    assert not model.caches_are_setup()
    torch.testing.assert_close(model(tokens), before)


def test_decoding_runs_every_step_with_one_token(hybrid, monkeypatch):
    calls = []
    forward = hybrid.forward

    def counting(tokens, **options):
        calls.append((tuple(tokens.shape), int(options["input_pos"]), int(options["mask"].sum())))
        return forward(tokens, **options)

    monkeypatch.setattr(hybrid, "forward", counting)
    with torch.no_grad():
        decode_speed(hybrid, torch.randint(0, 61, (1, 20)), steps=5, dtype=torch.float32)
    assert calls == [((1, 1), at, at + 1) for at in range(15, 20)]


class Watch(TorchDispatchMode):
    """Counts reads of a tensor by the host, each of which waits for a GPU, and keeps the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("kind", ["teacher", "hybrid"])
def test_decoding_never_waits_for_the_device(kind, request):
    model, tokens = request.getfixturevalue(kind), torch.randint(0, 61, (1, 20))
    with torch.no_grad(), Watch() as watch:
        decode_speed(model, tokens, steps=5, dtype=torch.float32)
    assert watch.reads == 0


def test_nothing_is_as_large_as_a_mask_or_all_logits(spec):
    context = 1024
    model = build_decoder(spec.with_max_seq_len(context))
    tokens = torch.randint(0, 61, (1, context))
    with torch.no_grad(), Watch() as watch:
        prefill_seconds(model, tokens, repeats=1)
    assert 0 < watch.largest < 61 * context * 4  # bytes of the logits of all tokens
    with torch.no_grad(), Watch() as watch:
        decode_speed(model, tokens, steps=4, dtype=torch.float32)
    assert 0 < watch.largest < 61 * context * 4


@pytest.mark.parametrize("kind", ["teacher", "hybrid"])
@torch.no_grad()
def test_a_mask_of_one_value_reads_the_first_places_of_the_cache(kind, request):
    model, tokens = request.getfixturevalue(kind), torch.randint(0, 61, (2, 20))
    expected = model(tokens)
    model.setup_caches(2, torch.float32, decoder_max_seq_len=30)
    for layer in model.layers:
        if hasattr(layer.attn.kv_cache, "k_cache"):  # what is not read may hold anything
            layer.attn.kv_cache.k_cache.fill_(float("nan"))
            layer.attn.kv_cache.v_cache.fill_(float("nan"))
    causal = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 12, 12)
    out = [model(tokens[:, :12], mask=causal, input_pos=torch.arange(12))]
    for at in range(12, 20):
        mask = torch.ones((), dtype=torch.bool).expand(2, 1, at + 1)
        out.append(model(tokens[:, at : at + 1], mask=mask, input_pos=torch.arange(at, at + 1)))
    torch.testing.assert_close(torch.cat(out, dim=1), expected, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="batch of 3 rows; the cache was set up for"):
        model(tokens[[0, 1, 0], :1], mask=torch.ones(3, 1, 30, dtype=torch.bool), input_pos=torch.arange(1))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"contexts": (512,)}, "exceeds the model's max_seq_len 256"),
        ({"contexts": (16,), "decode_tokens": 16}, "context 16 is not longer"),
        ({"contexts": (64,), "decode_tokens": 3}, "decode_tokens is 3"),
    ],
)
def test_mistakes_are_one_line(teacher, options, message):
    with pytest.raises(ValueError, match=message):
        speed(teacher, **options)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measures_on_cuda(spec):
    model = build_decoder(spec, retained_layers=[1]).to("cuda", torch.bfloat16)
    (row,) = speed(model, contexts=(128,), decode_tokens=8)
    assert row.dtype == "bfloat16" and row.cache_bytes == row.cache_bytes_theory and row.peak_memory_gib > 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["teacher", "hybrid"])
def test_a_decoding_step_as_a_cuda_graph(kind, request):
    model = request.getfixturevalue(kind).cuda()
    (row,) = speed(model, contexts=(64,), batch_size=2, decode_tokens=8, repeats=1)
    assert row.graph_tokens_per_second > 0


def test_a_step_that_cannot_be_captured_is_a_missing_number(hybrid, monkeypatch, caplog):
    def fail(*args, **options):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(speed_module, "graph_decode_seconds", fail)

    class OnGPU:
        device = torch.device("cuda")

    assert speed_module._graph_seconds(hybrid, OnGPU(), steps=5, dtype=torch.float32) is None
    monkeypatch.setattr(speed_module, "graph_decode_seconds", lambda *args, **options: 0.5)
    assert speed_module._graph_seconds(hybrid, OnGPU(), steps=5, dtype=torch.float32) == 0.5
