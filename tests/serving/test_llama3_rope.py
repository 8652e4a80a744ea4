"""The arrangement of heads against llama3 RoPE scaling, with llama.cpp's YaRN written out."""

import math

import numpy as np
import pytest

from tcal_components.serving.llama3_rope import REACH, arrange, head_permutation, llama3_frequencies

SCALING = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rotate(x, angles, position):
    """Rotates halves: pair i is (i, i + n)."""
    n = len(angles)
    cos, sin = np.cos(position * angles), np.sin(position * angles)
    return np.concatenate([x[:n] * cos - x[n:] * sin, x[n:] * cos + x[:n] * sin])


def engine_angles(rope, num_dims):
    """Angles a token of llama.cpp's ``rope_yarn`` with ext_factor 1, beta_fast 32, beta_slow 1 (float64)."""

    def place(turns):
        return num_dims * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.freq_base))

    low, high = max(0, math.floor(place(32.0))), min(num_dims - 1, math.ceil(place(1.0)))
    pair = np.arange(num_dims // 2)
    plain = rope.freq_base ** (-2.0 * pair / num_dims)
    ramp = 1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)
    return rope.freq_scale * plain * (1 - ramp) + plain * ramp


@pytest.mark.parametrize(("head_dim", "base"), [(64, 5e5), (128, 5e5), (64, 1e5)])
def test_scores_are_those_of_llama3_scaling(head_dim, base):
    rope = arrange(head_dim, base, SCALING)
    assert 0 < rope.error < 2e-3
    source, factor = head_permutation(rope, head_dim)
    wanted, _, _ = llama3_frequencies(head_dim, base, SCALING)
    given = engine_angles(rope, 2 * head_dim)
    rng = np.random.default_rng(0)
    constant = 2.0**40  # what the norm divides by: a norm weight of 0 keeps it out of scores
    norm = np.concatenate([np.ones(head_dim), np.zeros(head_dim)])
    for distance in (0, 1, 17, 900, REACH):
        q, k = rng.standard_normal((2, head_dim))
        expected = rotate(q, wanted, distance + 3) @ rotate(k, wanted, 3)
        wide = [np.concatenate([x, [constant], np.zeros(head_dim - 1)])[source] for x in (q, k)]
        weights = norm[source]
        found = rotate(wide[0] * weights * factor, given, distance + 3) @ rotate(wide[1] * weights, given, 3)
        assert abs(found - expected) <= rope.error * np.abs(q).max() * np.abs(k).max() * 8 + 1e-9
        assert (wide[0] == constant).sum() == 1 and (wide[1] == constant).sum() == 1


def test_plain_frequencies_are_what_is_lost_without_it():
    """The fault that this mends is large: unscaled, slow pairs turn 32 times as fast."""
    wanted, fast, slow = llama3_frequencies(64, 5e5, SCALING)
    plain = 5e5 ** (-2.0 * np.arange(32) / 64)
    assert np.allclose(wanted[:fast], plain[:fast]) and np.allclose(wanted[slow:] * 32, plain[slow:])


def test_a_scaling_without_an_arrangement_is_refused():
    with pytest.raises(ValueError, match="no way to express llama3 RoPE scaling"):
        arrange(8, 1.5, {**SCALING, "original_max_position_embeddings": 64})
