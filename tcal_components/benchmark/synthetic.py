"""Random text and weights, for measurements that depend on sizes alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset


class SyntheticPacks(Dataset):
    """Random tokens in packs of several documents of unequal length.

    Args:
        rows: number of sequences.
        seq_len: tokens a sequence.
        vocab_size: tokens are below it.
        documents: documents a sequence.
    """

    def __init__(self, *, rows: int, seq_len: int, vocab_size: int, documents: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocab_size, (rows, seq_len + 1), generator=generator)
        # Lengths in the proportion 1 : 2 : 3 ...
        share = torch.arange(1, documents + 1).cumsum(0)
        starts = torch.cat([torch.zeros(1, dtype=torch.long), share[:-1] * seq_len // share[-1]])
        position = torch.arange(seq_len)
        self.document = torch.searchsorted(starts, position, right=True) - 1
        self.input_pos = position - starts[self.document]
        self.ends = starts[1:] - 1

    @property
    def attended(self) -> float:
        """Mean number of tokens that a token attends to."""
        return float((self.input_pos + 1).double().mean())

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index, 1:].clone()
        labels[self.ends] = -100
        return {
            "tokens": self.tokens[index, :-1],
            "labels": labels,
            "input_pos": self.input_pos,
            "document": self.document,
        }


@torch.no_grad()
def random_weights_(model: nn.Module, *, seed: int) -> None:
    """Fills the weights of a model in place, on its device; of a sharded one each process fills its part.

    Args:
        model: with storage.
        seed: of this process.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        generator = generators.setdefault(local.device, torch.Generator(local.device).manual_seed(seed))
        if name.endswith(".scale"):
            local.fill_(1.0)
        elif name.endswith((".A_log", ".bias")):
            local.zero_()
        elif name.endswith(".dt_bias"):
            local.fill_(-4.0)  # a decay of 0.98 a token
        else:
            local.normal_(std=0.5 if name.endswith("_conv.weight") else 0.02, generator=generator)
