"""Generation: against plain forwards over the whole text, whatever stands in the batch, and how tokens are drawn."""

import pytest
import torch

from tcal_components import models
from tcal_components.modules import generation, replayed_step
from tcal_components.modules.generation import GREEDY, generate
from tcal_components.modules.sampling import Sampling, check_request

TINY = {
    "vocab_size": 31,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 24,
    "intermediate_dim": 20,
    "max_seq_len": 48,
    "head_dim": 8,
}
STUDENTS = {
    "teacher": {},
    "hybrid": {"retained_layers": [1], "gdn": {"conv_size": 4}},
    "first layer kept": {"retained_layers": [0], "gdn": {"conv_size": 0, "key_head_dim": 16}},
    "no attention": {"retained_layers": [], "gdn": {"conv_size": 2}},
}
LENGTHS = (5, 1, 9, 5, 2, 3)


def build(name="hybrid", decoder=models.qwen3_decoder):
    torch.manual_seed(0)
    model = decoder(**TINY, **STUDENTS[name]).double()
    with torch.no_grad():  # as it is made, a model repeats one token
        for key, parameter in model.named_parameters():
            if key.startswith("layers.") and parameter.ndim > 1:
                parameter.mul_(8.0)
    return model


def prompts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(31, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def continued(model, prompt, count, sampling=GREEDY, seed=0):
    """The same by its definition: the whole text is read again for every token."""
    tokens, noise = list(prompt), sampling.noise(seed, count)
    for step in range(count):
        tokens.append(int(sampling.choose(model(torch.tensor([tokens]))[:, -1], noise[step : step + 1])))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", STUDENTS)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, min_p=0.02)], ids=["greedy", "sampled"])
def test_equals_reading_the_whole_text_for_every_token(name, sampling):
    model = build(name)
    expected = [continued(model, prompt, 12, sampling, seed=7 + i) for i, prompt in enumerate(prompts())]
    assert generate(model, prompts(), max_new_tokens=12, sampling=sampling, seed=7) == expected
    assert len({token for row in expected for token in row}) > 8  # or the comparison would say little


@pytest.mark.parametrize("decoder", [models.llama3_2_decoder, models.qwen2_5_decoder], ids=["llama", "qwen2_5"])
def test_other_families(decoder):
    model = build(decoder=decoder)
    assert generate(model, prompts(), max_new_tokens=6) == [continued(model, prompt, 6) for prompt in prompts()]


@pytest.mark.parametrize(
    "options", [{"batch_size": 1}, {"batch_size": 4}, {"prefill_tokens": 1}, {"prefill_tokens": 12}]
)
def test_a_row_does_not_depend_on_the_others(options):
    model, sampling = build(), Sampling(temperature=1.0)
    together = generate(model, prompts(), max_new_tokens=10, sampling=sampling, seed=3)
    assert generate(model, prompts(), max_new_tokens=10, sampling=sampling, seed=3, **options) == together
    alone = generate(model, prompts()[2:3], max_new_tokens=10, sampling=sampling, seed=5)
    assert alone == together[2:3]  # prompt 2 draws with seed 3 + 2


def test_a_row_ends_with_its_first_stop_token(monkeypatch):
    model = build()
    free = generate(model, prompts(), max_new_tokens=20)
    stops = [free[0][6], free[3][2]]
    ends = [next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in free]
    assert 1 < len(set(ends))
    for steps in (1, 3, 32):  # rows that have ended leave the batch between two looks
        monkeypatch.setattr(generation, "CHECK_STEPS", steps)
        stopped = generate(model, prompts(), max_new_tokens=20, stop_tokens=stops)
        assert stopped == [row[:end] for row, end in zip(free, ends)]


def test_stops_early_when_all_rows_have(monkeypatch):
    model, calls = build(), []
    monkeypatch.setattr(generation, "CHECK_STEPS", 1)
    model.norm.register_forward_hook(lambda *_: calls.append(1))
    first = generate(model, prompts(), max_new_tokens=1)
    reading = len(calls)
    assert reading == len(set(LENGTHS))  # the first token comes of reading the prompt
    stops = [row[0] for row in first]
    assert generate(model, prompts(), max_new_tokens=20, stop_tokens=stops) == first and len(calls) == 2 * reading


@pytest.mark.parametrize("name", ["teacher", "hybrid"])
def test_leaves_the_model_as_it_was(name):
    model, tokens = build(name).train(), torch.tensor([prompts()[2]])
    before = model(tokens)
    generate(model, prompts(), max_new_tokens=5)
    assert model.training and not model.caches_are_setup() and not model.caches_are_enabled()
    assert all(layer.attn.kv_cache is None for layer in model.layers)
    torch.testing.assert_close(model(tokens), before, rtol=0, atol=0)
    with pytest.raises(IndexError):  # and it is so after an error in the middle
        generate(model, [[1, 2], [99]], max_new_tokens=5)
    torch.testing.assert_close(model(tokens), before, rtol=0, atol=0)


def test_autocast_computes_in_its_type():
    model = build("teacher").float()
    seen = []
    model.layers[1].attn._attention_call = lambda *args, original=model.layers[1].attn._attention_call, **options: (
        seen.append(args[0].dtype) or original(*args, **options)
    )
    made = generate(model, prompts(), max_new_tokens=4, autocast_dtype=torch.bfloat16)
    assert seen and set(seen) == {torch.bfloat16} and all(len(row) == 4 for row in made)


def test_refuses_what_cannot_be_generated():
    model = build()
    with pytest.raises(ValueError, match="max_new_tokens is 0, expected at least 1"):
        generate(model, prompts(), max_new_tokens=0)
    with pytest.raises(ValueError, match="an empty prompt"):
        generate(model, [[1], []], max_new_tokens=1)
    with pytest.raises(ValueError, match="are 49 tokens, the model's max_seq_len is 48"):
        generate(model, prompts(), max_new_tokens=40)
    check_request(prompts(), 40, max_seq_len=None)
    model.setup_caches(batch_size=1, dtype=torch.float64, decoder_max_seq_len=8)
    with pytest.raises(ValueError, match="has caches already"):
        generate(model, prompts(), max_new_tokens=1)
    assert generate(build(), [], max_new_tokens=3) == []


# ------------------------------------------------------------------------------------------------------------ sampling


def logits_of(*probabilities):
    return torch.tensor([probabilities]).log()


def shares(sampling, logits, count=4000):
    """How often each token is drawn over evenly spaced numbers."""
    uniform = (torch.arange(count) + 0.5) / count
    chosen = sampling.choose(logits.expand(count, -1), uniform)
    return torch.bincount(chosen, minlength=logits.shape[-1]) / count


def test_sampling_draws_by_probability():
    probabilities = torch.tensor([0.1, 0.05, 0.6, 0.25])
    torch.testing.assert_close(shares(Sampling(1.0), probabilities.log()[None]), probabilities, atol=1e-3, rtol=0)
    cold = (probabilities.log() / 0.5).softmax(-1)
    torch.testing.assert_close(shares(Sampling(0.5), probabilities.log()[None]), cold, atol=1e-3, rtol=0)
    assert Sampling(0.0).choose(probabilities.log()[None], torch.tensor([0.99])).tolist() == [2]


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    logits = logits_of(0.1, 0.05, 0.6, 0.25)
    expected = torch.tensor([0.0, 0.0, 0.6, 0.25])
    torch.testing.assert_close(shares(Sampling(1.0, top_p=0.8), logits), expected / 0.85, atol=1e-3, rtol=0)
    assert shares(Sampling(1.0, top_p=0.5), logits)[2] == 1


def test_min_p_keeps_what_is_near_the_most_likely():
    logits = logits_of(0.1, 0.05, 0.6, 0.25)
    expected = torch.tensor([0.0, 0.0, 0.6, 0.25])
    torch.testing.assert_close(shares(Sampling(1.0, min_p=0.2), logits), expected / 0.85, atol=1e-3, rtol=0)


def test_what_is_left_out_is_never_drawn():
    """Sums of float32 over a large vocabulary leave gaps at the end, which would be given to tokens left out."""
    logits = torch.randn(1, 60_000, generator=torch.Generator().manual_seed(0)) * 4
    kept = logits.softmax(-1)[0] >= 0.1 * logits.softmax(-1).max()
    uniform = torch.tensor([0.0, 1e-9, 0.3, 1 - 2**-24])
    chosen = Sampling(1.0, min_p=0.1).choose(logits.expand(4, -1), uniform)
    assert kept[chosen].all()


def test_sampling_refuses_numbers_out_of_range():
    for options in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": 1.0}):
        with pytest.raises(ValueError, match="sampling: temperature is"):
            Sampling(**options)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["teacher", "hybrid"])
def test_the_graph_on_cuda_equals_plain_steps(name, monkeypatch):
    model = build(name).float().cuda()
    graph = generate(model, prompts(), max_new_tokens=38)
    monkeypatch.setattr(replayed_step, "WARMUP_STEPS", 10**6)
    assert generate(model, prompts(), max_new_tokens=38) == graph
