"""Batches in an order that is a function of seed and step only, so that any run can resume anywhere."""

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import Dataset


class BatchStream:
    """Endless iterator of this process's part of each global batch.

    Global batch s holds the samples s * B to (s + 1) * B - 1 of one endless sequence: permutations of the dataset one
    after the other, epoch e's permutation drawn from (seed, e). A process takes its B / world_size neighbours of them.
    Nothing else enters, so a run continues at any step, with any number of processes, with the same batches.

    Args:
        dataset (Dataset): map style, items are dicts of tensors of one shape.
        batch_size (int): B, sequences a step over all processes.
        seed (int): of the permutations.
        rank (int): this process.
        world_size (int): number of processes; must divide ``batch_size``.
        start_step (int): step of the first batch.
        shuffle (bool): False takes the dataset in its own order, epoch after epoch.

    Attributes:
        step (int): step of the next batch. Set it to continue elsewhere.

    Raises:
        ValueError: if the batch does not divide among the processes, a number is negative, or the dataset is empty.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        start_step: int = 0,
        shuffle: bool = True,
    ) -> None:
        if batch_size < 1 or batch_size % world_size:
            raise ValueError(
                f"batch_size counts the sequences a step over all processes and must be a positive multiple of their "
                f"number: got {batch_size} for {world_size} processes"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0..{world_size - 1}, got {rank}")
        if seed < 0 or start_step < 0:
            raise ValueError(f"seed and start_step must be >= 0, got {seed} and {start_step}")
        if len(dataset) == 0:  # type: ignore[arg-type]
            raise ValueError("the dataset has no sequence")
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.step = start_step
        self._epoch = -1
        self._order: list[int] = []

    def indices(self, step: int) -> list[int]:
        """Dataset indices of this process's part of batch ``step``."""
        share = self.batch_size // self.world_size
        first = step * self.batch_size + self.rank * share
        return [self._index(first + offset) for offset in range(share)]

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """This process's part of batch ``step``: tensors of shape [batch_size / world_size, ...]."""
        items = [self.dataset[index] for index in self.indices(step)]
        return {name: torch.stack([item[name] for item in items]) for name in items[0]}

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        batch = self.batch(self.step)
        self.step += 1
        return batch

    def _index(self, position: int) -> int:
        size = len(self.dataset)  # type: ignore[arg-type]
        epoch, offset = divmod(position, size)
        if not self.shuffle:
            return offset
        if epoch != self._epoch:
            # Seeded by two numbers: seed + epoch would give neighbouring seeds the same permutations.
            mixed = int(np.random.SeedSequence([self.seed, epoch]).generate_state(1, np.uint64)[0] >> np.uint64(1))
            generator = torch.Generator().manual_seed(mixed)
            self._order = torch.randperm(size, generator=generator).tolist()
            self._epoch = epoch
        return self._order[offset]
