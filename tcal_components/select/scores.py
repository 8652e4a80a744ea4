"""Scores of a model with exchanged layers: its loss and its KL divergence to the teacher, on the same text each time.

Attention is exchanged in place, so that one copy of the weights serves all passes, and every measured number is kept in a
file, so that an interrupted ranking continues.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tcal_components.checkpoint.artifact import Artifact
from tcal_components.data.packed import IGNORE_INDEX
from tcal_components.distributed.collectives import all_sum_, rank
from tcal_components.evaluation.access import device_of, evaluating, final_hidden, gathered, head_of, inputs_for
from tcal_components.evaluation.perplexity import CHUNK_TOKENS, perplexity
from tcal_components.modules.conversion import converted

Batch = Mapping[str, Tensor]


class NoAttention(nn.Module):
    """Stands for a layer whose attention contributes nothing to the residual stream."""

    cache_enabled = False  # torchtune's decoder asks

    def forward(
        self, x: Tensor, y: Tensor | None = None, *, mask: Any = None, input_pos: Tensor | None = None
    ) -> Tensor:
        """Zeros.

        Args:
            x: input, shape [B, T, E].
            y: ignored.
            mask: ignored.
            input_pos: ignored.

        Returns:
            Tensor: shape [B, T, E].
        """
        return torch.zeros_like(x)


class ScoreFile:
    """Measured numbers by name, in a JSON file that is written whole after each of them.

    Args:
        artifact: the file; one of other inputs is started anew. None keeps the numbers in memory.

    Attributes:
        values: the numbers by name.
        seconds: time that measuring them took, earlier runs included.
    """

    def __init__(self, artifact: Artifact | None = None) -> None:
        self._artifact = artifact
        kept = artifact.load() if artifact is not None and artifact.current() else {}
        self.values: dict[str, float] = kept.get("values", {})
        self.seconds: float = kept.get("seconds", 0.0)

    def get(self, name: str, compute: Callable[..., float], *args: Any) -> float:
        """The stored number, or the computed one, which is then stored.

        Args:
            name: of the number.
            compute: measures it.
            *args: what ``compute`` is called with.

        Returns:
            float: the number.

        Raises:
            FloatingPointError: it is not finite.
        """
        return self.get_all([name], lambda: [compute(*args)])[0]

    def get_all(self, names: Sequence[str], compute: Callable[[], Sequence[float]]) -> list[float]:
        """Numbers that are measured together: the stored ones, or the computed ones, which are then stored.

        Args:
            names: of the numbers.
            compute: measures them all, in this order.

        Returns:
            list: the numbers.

        Raises:
            FloatingPointError: one is not finite.
        """
        if not all(name in self.values for name in names):
            began = time.perf_counter()
            found = {name: float(value) for name, value in zip(names, compute(), strict=True)}
            self.seconds += time.perf_counter() - began
            for name, value in found.items():
                if not math.isfinite(value):
                    raise FloatingPointError(
                        f"{name} is {value}: look for NaN in the teacher or its mixers, or use dtype fp32"
                    )
            self.values.update(found)
            if self._artifact is not None and rank() == 0:
                self._artifact.save({"seconds": self.seconds, "values": self.values})
        return [self.values[name] for name in names]


class Scorer:
    """Loss of a model with exchanged layers, and its KL divergence to the teacher, on the same text each time.

    Args:
        teacher: ``HybridDecoder``, plain or under FSDP2.
        batches: this process's batches of a packed dataset (``tokens``, ``labels``, ``input_pos``, ``document`` [B, T]); kept.
        autocast_dtype: compute under autocast to this type.
        progress: show a progress bar on rank 0.

    Attributes:
        tokens: tokens of the text that are predicted, of all processes.
    """

    def __init__(
        self,
        teacher: nn.Module,
        batches: Iterable[Batch],
        *,
        autocast_dtype: torch.dtype | None = None,
        progress: bool = True,
    ) -> None:
        self.teacher = teacher
        self.device = device_of(teacher)
        self._batches = list(batches)
        self._autocast_dtype = autocast_dtype
        self._progress = progress and rank() == 0
        self._teacher_hidden: list[Tensor] | None = None
        counted = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in self._batches)
        self.tokens = int(all_sum_(torch.tensor(counted, device=self.device)))
        if not self.tokens:
            raise ValueError("the calibration text has no token to predict, so layers cannot be ranked on it")

    def loss(self, replaced: nn.ModuleDict | None = None) -> float:
        """Mean negative log-likelihood in nats a token.

        Args:
            replaced: modules in the place of attention, by layer index; None measures the teacher.

        Returns:
            float: of all processes.
        """
        with converted(self.teacher, replaced or nn.ModuleDict()) as model:
            return perplexity(model, self._batches, autocast_dtype=self._autocast_dtype).loss

    def kl(self, replaced: nn.ModuleDict) -> float:
        """Mean KL(teacher || model) over the full vocabulary, in nats a token.

        Args:
            replaced: modules in the place of attention, by layer index.

        Returns:
            float: of all processes.
        """
        if self._teacher_hidden is None:
            self._teacher_hidden = []
            with evaluating(self.teacher, device=self.device, autocast_dtype=self._autocast_dtype):
                for inputs, counted in self._inputs():
                    self._teacher_hidden.append(gathered(self.teacher, final_hidden, self.teacher, inputs)[counted])
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with (
            converted(self.teacher, replaced),
            evaluating(self.teacher, device=self.device, autocast_dtype=self._autocast_dtype),
        ):
            for (inputs, counted), wanted in zip(self._inputs(), self._teacher_hidden):
                total += gathered(self.teacher, self._divergence, inputs, counted, wanted)
        return float(all_sum_(total)) / self.tokens

    def _inputs(self) -> Iterable[tuple[dict[str, Any], Tensor]]:
        for batch in self._batches:
            for inputs in inputs_for(self.teacher, batch, self.device):
                yield inputs, inputs["labels"] != IGNORE_INDEX

    def _divergence(self, inputs: dict[str, Any], counted: Tensor, wanted: Tensor) -> Tensor:
        hidden, head = final_hidden(self.teacher, inputs)[counted], head_of(self.teacher)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for h, t in zip(hidden.split(CHUNK_TOKENS), wanted.split(CHUNK_TOKENS)):
            log_q, log_p = head(h).float().log_softmax(-1), head(t).float().log_softmax(-1)
            total += (log_p.exp() * (log_p - log_q)).sum(-1).double().sum()
        return total

    def bar(self, total: int, description: str) -> tqdm:
        """A progress bar over passes of the text."""
        return tqdm(total=total, desc=description, unit="pass", disable=not self._progress)
