"""Llama-3's RoPE scaling in llama.cpp, whose graph of these models takes no table of frequencies.

llama.cpp's ``qwen35`` graph knows YaRN alone: pair i of a head turns by ``r^i * (s + (1 - s) w_i)`` a token, where w falls
from 1 to 0 in a straight line over ln(32) / -ln(r) pairs, and a file chooses s, where that line begins, and how many
pairs turn. Llama-3 leaves fast pairs alone, divides slow ones by a factor and mixes a few in between (3 of 32 in
Llama-3.2-1B). Heads of an export without q/k norm are twice as large as the teacher's, so there are twice as many places
as pairs. Fast pairs keep their places, slow ones move behind the line to where s is right for them; both are exact. A
pair in between is held in three places of nearly its frequency, with weights that add up to its rotation:

    a1 exp(i f1 t) + a2 exp(i f2 t) + a3 exp(i f3 t) ~ exp(i f t)

which stays good to ``error`` at distances up to ``REACH`` and fades beyond.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

# Distance in tokens within which the weights are fitted.
REACH = 8192
# What llama.cpp takes for YaRN where a file of this architecture says nothing else (it reads no other values from it).
_BETA_FAST = 32.0


class EngineRope(NamedTuple):
    """How a head is arranged for llama.cpp.

    Args:
        places: For each pair of the teacher, ``((place, weight), ...)``: one entry of weight 1, or three.
        freq_base: RoPE base for ``2 * num_places`` rotated dimensions.
        freq_scale: s.
        original_context: Tokens, as the file names them, that put the line where it is wanted.
        error: Largest difference to the teacher's rotation within ``REACH`` tokens, of a unit vector.
    """

    places: tuple[tuple[tuple[int, float], ...], ...]
    freq_base: float
    freq_scale: float
    original_context: int
    error: float

    def converter_config(self) -> dict[str, Any]:
        """``rope_parameters`` of a config.json that llama.cpp's converter turns into these numbers."""
        return {
            "rope_type": "yarn",
            "rope_theta": self.freq_base,
            "factor": 1.0 / self.freq_scale,
            "original_max_position_embeddings": self.original_context,
            "partial_rotary_factor": 1.0,
        }


def llama3_frequencies(head_dim: int, base: float, scaling: Mapping[str, float]) -> tuple[np.ndarray, int, int]:
    """Angles a token of Llama-3's pairs.

    Args:
        head_dim: D.
        base: RoPE base.
        scaling: The four numbers of llama3 scaling.

    Returns:
        tuple[np.ndarray, int, int]: Angles [D / 2], how many at the start are unscaled, and the first that is divided
        by the whole factor.
    """
    plain = base ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    mix = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain * (mix + (1 - mix) / scaling["factor"]), int((turns >= high).sum()), int((turns > low).sum())


def arrange(head_dim: int, base: float, scaling: Mapping[str, float]) -> EngineRope:
    """Finds the arrangement of the smallest error.

    Args:
        head_dim: D of the teacher; the exported head has D places for its D / 2 pairs.
        base: RoPE base.
        scaling: The four numbers of llama3 scaling.

    Returns:
        EngineRope: The arrangement.

    Raises:
        ValueError: Where no arrangement fits.
    """
    angles, fast, slow = llama3_frequencies(head_dim, base, scaling)
    pairs, places = head_dim // 2, np.arange(head_dim)
    ratio = base ** (-2.0 / head_dim)
    width = math.log(_BETA_FAST) / -math.log(ratio)
    best: EngineRope | None = None
    for shift in range(1 - slow, head_dim - pairs + 1):
        scale = ratio**-shift / scaling["factor"]
        if 0.1 * math.log(scale) > 0.9:  # llama.cpp divides by 1 - 0.1 ln(s)
            continue
        # The engine rounds both ends of the line away from each other, so it has one of two widths.
        rest = width % 1.0
        starts = [n + part for n in range(max(fast - 1, 0), slow + shift) for part in ((1 - rest) / 2, 1 - rest / 2)]
        for start in starts:
            low, high = math.floor(start), math.ceil(start + width)
            if high > slow + shift:
                continue
            weight = np.clip(1 - (places - low) / (high - low), 0.0, 1.0)
            available = ratio**places * (scale + (1 - scale) * weight)
            free = [*range(fast, slow + shift), *range(pairs + shift, head_dim)]
            fits = [_mixture(available, free, angle) for angle in angles[fast:slow]]
            taken = [place for fit, _ in fits for place, _ in fit]
            error = max((e for _, e in fits), default=0.0)
            if len(set(taken)) < len(taken) or (best is not None and error >= best.error):
                continue
            best = EngineRope(
                places=(
                    *(((place, 1.0),) for place in range(fast)),
                    *(fit for fit, _ in fits),
                    *(((place + shift, 1.0),) for place in range(slow, pairs)),
                ),
                freq_base=base**2,
                freq_scale=scale,
                original_context=round(2 * math.pi * _BETA_FAST * ratio**-start),
                error=error,
            )
    if best is None:
        raise ValueError(
            f"llama.cpp has no way to express llama3 RoPE scaling {dict(scaling)} with base {base} on heads of {head_dim}"
        )
    return best


def _mixture(available: np.ndarray, free: list[int], angle: float) -> tuple[tuple[tuple[int, float], ...], float]:
    """The three free places nearest to an angle, with weights, and the error within ``REACH``."""
    nearest = sorted(free, key=lambda place: abs(math.log(available[place] / angle)))[:3]
    distance = np.linspace(0, REACH, 129)
    held = np.exp(1j * np.outer(distance, available[nearest]))
    wanted = np.exp(1j * angle * distance)
    stacked = np.concatenate([held.real, held.imag])
    weights = np.linalg.lstsq(stacked, np.concatenate([wanted.real, wanted.imag]), rcond=None)[0]
    error = float(np.abs(held @ weights - wanted).max())
    return tuple((place, float(weight)) for place, weight in zip(nearest, weights)), error


def head_permutation(rope: EngineRope, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each dimension of an exported head of size 2 D comes from, and by what the queries' norm is multiplied.

    Pair j of the export is dimensions (j, j + D / 2), pair p of the engine (p, p + D): halves are rotated.

    Args:
        rope: The arrangement.
        head_dim: D of the teacher.

    Returns:
        tuple[np.ndarray, np.ndarray]: Source dimensions [2 D] (an unused one where nothing is held: its norm weight is 0)
        and factors [2 D].
    """
    source = np.full(2 * head_dim, head_dim + 1)
    factor = np.ones(2 * head_dim, dtype=np.float32)
    used = {place for held in rope.places for place, _ in held}
    for pair, held in enumerate(rope.places):
        for place, weight in held:
            source[[place, place + head_dim]] = pair, pair + head_dim // 2
            factor[[place, place + head_dim]] = weight
    # The constant that the norm divides by; neither rotated into a score nor cached, since its norm weight is 0.
    source[next(place for place in range(head_dim) if place not in used)] = head_dim
    return source, factor


def rearrange(reader: Any, rope: EngineRope, *, head_dim: int, num_heads: int, num_kv_heads: int) -> None:
    """Moves the dimensions of q and k in a GGUF file of float tensors, in place.

    Args:
        reader: ``gguf.GGUFReader`` of the file, opened for writing.
        rope: The arrangement.
        head_dim: D of the teacher; the file's heads have 2 D.
        num_heads: Query heads.
        num_kv_heads: Key heads.
    """
    source, factor = head_permutation(rope, head_dim)
    for tensor in reader.tensors:
        name = tensor.name.split(".", 2)[-1]
        if name in ("attn_q.weight", "attn_q.bias", "attn_k.weight", "attn_k.bias"):
            heads = num_heads if "_q" in name else num_kv_heads
            rows = tensor.data.reshape(heads, -1, *tensor.data.shape[1:])  # a head of q has its gate's rows behind it
            rows[:, : 2 * head_dim] = rows[:, source]
        elif name == "attn_q_norm.weight":
            tensor.data[:] = tensor.data[source] * factor
        elif name == "attn_k_norm.weight":
            tensor.data[:] = tensor.data[source]
