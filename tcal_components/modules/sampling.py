"""How the next token is chosen, and which requests are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: Of the softmax; 0 takes the most likely token.
        top_p: Only the most likely tokens that together reach this probability. Sorts the vocabulary: slow.
        min_p: Only tokens of at least this share of the most likely one's probability (arXiv 2407.01082).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p < 1:
            raise ValueError(
                f"sampling: temperature is {self.temperature}, top_p {self.top_p}, min_p {self.min_p}; expected a "
                "temperature of at least 0, top_p above 0 and at most 1, min_p from 0 to below 1"
            )

    def noise(self, seed: int, steps: int) -> Tensor:
        """Uniform numbers for the ``steps`` choices of one row, float32 [steps] on the CPU: the same on any device."""
        return torch.rand(steps, generator=torch.Generator().manual_seed(seed))

    def choose(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """The next token of each row, a function of its own logits and number alone.

        Args:
            logits: [B, V].
            uniform: In [0, 1), [B]; not read when greedy.

        Returns:
            Tensor: Token ids [B].
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        p = (logits.float() / self.temperature).softmax(-1)
        least = self.min_p * p.amax(-1, keepdim=True)
        if self.top_p < 1:
            ordered, index = p.sort(-1, descending=True)
            ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= self.top_p, 0.0)
            p = torch.zeros_like(p).scatter_(-1, index, ordered)
        if self.min_p > 0:
            p = p.masked_fill(p < least, 0.0)
        # float64: rounding in a sum of float32 now and then gives a token that is left out a share.
        cumulative = p.cumsum(-1, dtype=torch.float64)
        target = uniform[:, None].double() * cumulative[:, -1:]
        return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def check_request(prompts: Sequence[Sequence[int]], max_new_tokens: int, *, max_seq_len: int | None) -> None:
    """Refuses what cannot be generated.

    Raises:
        ValueError: For an empty prompt, no tokens to make, or a prompt and answer longer than the model.
    """
    if max_new_tokens < 1:
        raise ValueError(f"generation: max_new_tokens is {max_new_tokens}, expected at least 1")
    if not all(prompts):
        raise ValueError("generation: an empty prompt; expected at least one token, such as the begin token")
    needed = max(map(len, prompts), default=0) + max_new_tokens
    if max_seq_len is not None and needed > max_seq_len:
        raise ValueError(
            f"generation: the longest prompt and max_new_tokens are {needed} tokens, the model's max_seq_len is {max_seq_len}"
        )
