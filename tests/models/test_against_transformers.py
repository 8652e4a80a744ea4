"""Teachers read from folders that transformers wrote give transformers' logits."""

import json

import pytest
import torch

from tcal_components import models
from tcal_components.checkpoint.teacher import load_teacher_state_dict

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama_untied": ("llama", {}),
    "llama_tied_scaled": ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama_one_kv_head": ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-2}),
    "llama_own_head_dim": (
        "llama",
        {"hidden_size": 50, "head_dim": 20, "num_attention_heads": 5, "num_key_value_heads": 5},
    ),
    "qwen2_biased": ("qwen2", {}),
    "qwen2_tied_all_kv_heads": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2_window_not_in_use": ("qwen2", {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 1}),
    "qwen3_head_dim": ("qwen3", {"head_dim": 32}),
    "qwen3_tied_one_kv_head": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    # 4 heads of 14 on 50 dimensions: embed_dim is no multiple of the heads.
    "qwen3_indivisible": ("qwen3", {"hidden_size": 50, "head_dim": 14, "rope_parameters": {"rope_theta": 5e5}}),
}


def load(folder, **kwargs):
    model = models.teacher(checkpoint_dir=folder, **kwargs)
    model.load_state_dict(load_teacher_state_dict(folder, dtype=torch.float32), strict=True)
    return model.eval()


def tokens_for(vocab_size=61, batch=2, length=40):
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_equal_transformers(tiny_teacher, case):
    model_type, config = CASES[case]
    folder, reference = tiny_teacher(model_type, **config)
    model, tokens = load(folder), tokens_for()
    expected = reference(tokens).logits
    assert expected.abs().max() > 1, "a reference without contrast would prove little"

    torch.testing.assert_close(model(tokens), expected, atol=1e-4, rtol=0)
    positions = torch.arange(40)
    torch.testing.assert_close(model(tokens, input_pos=positions), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(model(tokens, input_pos=positions.expand(2, -1)), expected, atol=1e-4, rtol=0)
    # Not 0 .. T - 1, and different for each sequence.
    shifted = positions + torch.tensor([[3], [17]])
    expected = reference(tokens, position_ids=shifted).logits
    torch.testing.assert_close(model(tokens, input_pos=shifted), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_many_shards_with_index(tiny_teacher, model_type):
    folder, reference = tiny_teacher(model_type, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    tokens = tokens_for()
    torch.testing.assert_close(load(folder)(tokens), reference(tokens).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
@torch.no_grad()
def test_config_of_transformers_4(tiny_teacher, model_type, type_key):
    scaled = model_type == "llama"
    rope = LLAMA3_ROPE if scaled else {"rope_type": "default", "rope_theta": 3e4}
    folder, reference = tiny_teacher(model_type, rope_parameters=rope)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    parameters[type_key] = parameters.pop("rope_type")
    config["rope_scaling"] = parameters if scaled else None
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))
    tokens = tokens_for()
    torch.testing.assert_close(load(folder)(tokens), reference(tokens).logits, atol=1e-4, rtol=0)


@torch.no_grad()
def test_config_with_both_generations_of_keys(tiny_teacher):
    import transformers

    folder, _ = tiny_teacher("llama")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(rope_parameters={"rope_type": "default", "rope_theta": 7e3}, rope_theta=9e3, rope_scaling=LLAMA3_ROPE)
    path.write_text(json.dumps(config))
    reference, tokens = transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), tokens_for()
    torch.testing.assert_close(load(folder)(tokens), reference(tokens).logits, atol=1e-4, rtol=0)


@torch.no_grad()
def test_padded_vocabulary(tiny_teacher):
    # Qwen pads the embedding beyond the tokenizer; the folder's own vocab_size counts.
    folder, reference = tiny_teacher("qwen2", vocab_size=128)
    model, tokens = load(folder), tokens_for()
    assert model(tokens).shape == (2, 40, 128)
    torch.testing.assert_close(model(tokens), reference(tokens).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_loss_gradients_equal_transformers(tiny_teacher, model_type):
    folder, reference = tiny_teacher(model_type)
    model, tokens = load(folder), tokens_for(length=12)
    model(tokens).logsumexp(-1).sum().backward()
    reference(tokens).logits.logsumexp(-1).sum().backward()
    pairs = {
        "layers.1.attn.q_proj.weight": reference.model.layers[1].self_attn.q_proj.weight,
        "layers.0.attn.k_proj.weight": reference.model.layers[0].self_attn.k_proj.weight,
        "layers.2.mlp.w2.weight": reference.model.layers[2].mlp.down_proj.weight,
        "tok_embeddings.weight": reference.model.embed_tokens.weight,
        "layers.1.sa_norm.scale": reference.model.layers[1].input_layernorm.weight,
    }
    for name, parameter in pairs.items():
        gradient = model.get_parameter(name).grad
        assert (gradient - parameter.grad).norm() < 1e-5 * parameter.grad.norm(), name


@torch.no_grad()
def test_bfloat16_stays_near_transformers(tiny_teacher):
    folder, reference = tiny_teacher("qwen3")
    tokens = tokens_for()
    exact = reference(tokens).logits
    rounded = (load(folder).to(torch.bfloat16)(tokens) - exact).norm()
    reference_rounded = (reference.to(torch.bfloat16)(tokens).logits.float() - exact).norm()
    assert rounded < 1.5 * reference_rounded


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_cached_decoding_equals_full_forward(tiny_teacher, model_type):
    folder, _ = tiny_teacher(model_type)
    model, tokens = load(folder), tokens_for(length=20)
    expected = model(tokens)
    model.setup_caches(batch_size=2, dtype=torch.float32, decoder_max_seq_len=24)
    causal = torch.ones(24, 24, dtype=torch.bool).tril()

    def run(prompt_len):
        positions = torch.arange(prompt_len)
        out = [model(tokens[:, :prompt_len], mask=causal[None, :prompt_len], input_pos=positions[None])]
        for t in range(prompt_len, 20):
            # torchtune's generation passes one position per sequence, shape [B].
            out.append(model(tokens[:, t : t + 1], mask=causal[None, t : t + 1], input_pos=torch.tensor([t, t])))
        return torch.cat(out, dim=1)

    torch.testing.assert_close(run(7), expected, atol=1e-4, rtol=0)
    model.reset_caches()
    torch.testing.assert_close(run(1), expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_left_padded_generation_positions(tiny_teacher):
    folder, reference = tiny_teacher("qwen3")
    model, tokens = load(folder), tokens_for(length=10)
    pad = 3
    padded = torch.cat([torch.zeros(2, pad, dtype=torch.long), tokens], dim=1)
    positions = (torch.arange(13) - pad).clamp(min=0)
    mask = torch.ones(13, 13, dtype=torch.bool).tril()
    mask[pad:, :pad] = False
    logits = model(padded, mask=mask.expand(2, -1, -1), input_pos=positions.expand(2, -1))[:, pad:]
    torch.testing.assert_close(logits, reference(tokens).logits, atol=1e-4, rtol=0)


@torch.no_grad()
def test_packed_documents_equal_separate_ones(tiny_teacher):
    folder, reference = tiny_teacher("qwen2")
    model, tokens = load(folder), tokens_for(batch=1, length=20)
    document = torch.tensor([[0] * 8 + [1] * 12])
    mask = (document[:, :, None] == document[:, None, :]) & torch.ones(20, 20, dtype=torch.bool).tril()
    input_pos = torch.cat([torch.arange(8), torch.arange(12)])[None]
    packed = model(tokens, mask=mask, input_pos=input_pos)
    separate = [reference(part).logits for part in tokens.split([8, 12], dim=1)]
    torch.testing.assert_close(packed, torch.cat(separate, dim=1), atol=1e-4, rtol=0)


@torch.no_grad()
def test_disabled_cache_stays_causal(tiny_teacher):
    from torchtune.modules.common_utils import disable_kv_cache

    folder, _ = tiny_teacher("llama")
    model, tokens = load(folder), tokens_for(length=9)
    expected = model(tokens)
    model.setup_caches(batch_size=2, dtype=torch.float32, decoder_max_seq_len=16)
    with disable_kv_cache(model):
        torch.testing.assert_close(model(tokens), expected)


@torch.no_grad()
def test_hidden_states_and_attention_call(tiny_teacher):
    folder, reference = tiny_teacher("qwen3")
    model, tokens = load(folder), tokens_for(length=11)
    seen = {}

    def wrapped(q, k, v, mask, dropout_p, is_causal, *, call=model.layers[1].attn._attention_call):
        seen.update(q=q, k=k, v=v, context=call(q, k, v, mask=mask, dropout_p=dropout_p, is_causal=is_causal))
        return seen["context"]

    model.layers[1].attn._attention_call = wrapped
    hidden = model.hidden(tokens)
    expected = reference(tokens, output_hidden_states=True, output_attentions=True)
    torch.testing.assert_close(hidden, expected.hidden_states[-1], atol=1e-4, rtol=0)
    torch.testing.assert_close(model.output(hidden), expected.logits, atol=1e-4, rtol=0)
    # What calibration sees: heads repeated, after norm and RoPE, so that softmax(q k) is the teacher's attention.
    assert seen["q"].shape == seen["k"].shape == seen["v"].shape == (2, 4, 11, 16)
    future = torch.ones(11, 11, dtype=torch.bool).triu(1)
    scores = (seen["q"] @ seen["k"].mT / 16**0.5).masked_fill(future, float("-inf"))
    torch.testing.assert_close(scores.softmax(-1), expected.attentions[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.softmax(-1) @ seen["v"], seen["context"], atol=1e-5, rtol=0)
