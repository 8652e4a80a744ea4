"""Teacher and student side by side, one layer at a time over many batches.

A layer that is fitted on the teacher's hidden states never sees the errors that the layers before it make. Here the hidden
states of all batches wait in front of the same layer: it is fitted on what the student really feeds it, then both streams
move on. All of it costs one forward of the teacher and one of the student, plus the features of the fit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tcal_components.calibration.capture import run_hidden, teacher_mode
from tcal_components.calibration.layer_sums import batch_documents
from tcal_components.modules.hybrid_decoder import HybridDecoder

Batch = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class LayerTokens:
    """One batch at the layer where the streams wait.

    Attributes:
        number: index of the batch.
        x: normed input of the layer in the student's stream, shape [B, T, E].
        target: what the mixer should add to the student's stream, y_T + gamma (h_T - h_S), float32, shape [B, T, E].
        weight: 1 / mean square of h_T + y_T, shape [B, T]: errors count relative to the stream that they disturb.
        input_pos: positions, shape [B, T], or None.
        valid: tokens that are no padding, shape [B, T].
    """

    number: int
    x: Tensor
    target: Tensor
    weight: Tensor
    input_pos: Tensor | None
    valid: Tensor


class Lockstep:
    """The two streams. Per layer: ``with enter(layer)``, then ``inputs()`` (optional), ``targets()``, ``advance()``.

    Memory: two hidden states a token, 4 E bytes in bf16, for all batches of this process (half with ``forced=False``).

    Args:
        teacher: plain or sharded by FSDP2; with attention in every layer.
        batches: this process's prepared batches, at least one.
        gamma: share of the student's drift h_T - h_S that each layer is asked to undo.
        forced: the student has its own stream; without, every layer sees the teacher's.
        autocast_dtype: run the teacher's modules under autocast to this type.
        offload: keep waiting hidden states in host memory.
    """

    def __init__(
        self,
        teacher: HybridDecoder,
        batches: Sequence[Batch],
        *,
        gamma: float,
        forced: bool = True,
        autocast_dtype: torch.dtype | None = None,
        offload: bool = False,
    ) -> None:
        self.batches = batches
        self._teacher = teacher
        self._gamma = gamma
        self._forced = forced
        self._autocast_dtype = autocast_dtype
        self._offload = offload
        self._block: Any = None
        if isinstance(teacher, FSDPModule):
            with teacher_mode(teacher):
                run_hidden(teacher, batches[0])  # FSDP2 prepares single layers in the first forward of the root
        with self._running(teacher), self._autocast():
            self._teacher_states = [self._away(teacher.tok_embeddings(batch["tokens"])) for batch in batches]
        self._student_states = list(self._teacher_states) if forced else self._teacher_states

    @contextlib.contextmanager
    def enter(self, layer: int) -> Iterator[None]:
        """Gathers the weights of the next layer; the caller goes through the layers in order."""
        blocks: Any = self._teacher.layers
        self._block = blocks[layer]
        try:
            with self._running(self._block):
                yield
        finally:
            self._block = None

    def inputs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Normed inputs of the layer in the student's stream, shape [B, T, E], and valid tokens, shape [B, T]."""
        for number, batch in enumerate(self.batches):
            with self._autocast():
                x = self._block.sa_norm(self._state(self._student_states, number))
            yield x, batch_documents(batch) >= 0

    def targets(self) -> Iterator[LayerTokens]:
        """What the mixer reads and should write, batch by batch; moves the teacher's stream over the layer."""
        for number, batch in enumerate(self.batches):
            student = self._state(self._student_states, number)
            with self._autocast():
                x = self._block.sa_norm(student)
            teacher, y, after = self._pass(self._teacher_states, number, None)
            target = y.float() + self._gamma * (teacher.float() - student.float())
            mean_square = after.float().square().mean(dim=-1)
            valid = batch_documents(batch) >= 0
            # Hidden states of zero must not weigh infinitely.
            floor = 1e-6 * (mean_square * valid).sum() / valid.sum().clamp_min(1)
            weight = 1.0 / mean_square.clamp_min(floor.clamp_min(torch.finfo(torch.float32).tiny))
            yield LayerTokens(number, x, target, weight, batch.get("input_pos"), valid)

    def advance(self, mixer: nn.Module | None) -> None:
        """Moves the student's stream over the layer.

        Args:
            mixer: in place of the attention; None keeps the attention and moves the teacher's stream as well.
        """
        for number in range(len(self.batches)):
            if mixer is None:
                self._pass(self._teacher_states, number, None)
            if self._forced:
                self._pass(self._student_states, number, mixer)

    def student_states(self) -> list[Tensor]:
        """Hidden states of the student behind the last layer that was advanced, shape [B, T, E] each."""
        return [self._state(self._student_states, number) for number in range(len(self.batches))]

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast in which mixers with float32 weights compute as the teacher does."""
        dtype = self._autocast_dtype or self._teacher_states[0].dtype
        low = dtype in (torch.bfloat16, torch.float16)
        device = self.batches[0]["tokens"].device.type
        return torch.autocast(device, dtype=dtype if low else None, enabled=low, cache_enabled=False)

    @contextlib.contextmanager
    def _running(self, module: nn.Module) -> Iterator[None]:
        sharded = module if isinstance(module, FSDPModule) else None
        if sharded is not None:
            sharded.unshard()
        try:
            with teacher_mode(self._teacher):
                yield
        finally:
            if sharded is not None:
                sharded.reshard()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = self._autocast_dtype
        return torch.autocast(self.batches[0]["tokens"].device.type, dtype=dtype, enabled=dtype is not None)

    def _pass(self, states: list[Tensor], number: int, mixer: nn.Module | None) -> tuple[Tensor, Tensor, Tensor]:
        """One batch through the layer; returns hidden state, output of attention or mixer, and their sum."""
        block, batch = self._block, self.batches[number]
        state = self._state(states, number)
        with self._autocast():
            x = block.sa_norm(state)
            if mixer is None:
                y = block.attn(x, x, mask=batch.get("mask"), input_pos=batch.get("input_pos"))
            else:
                with self.precision():
                    y = mixer(x, input_pos=batch.get("input_pos"))
            after = state + block.sa_scale(y)
            states[number] = self._away(after + block.mlp_scale(block.mlp(block.mlp_norm(after))))
        return state, y, after

    def _state(self, states: list[Tensor], number: int) -> Tensor:
        return states[number].to(self.batches[number]["tokens"].device, non_blocking=True)

    def _away(self, state: Tensor) -> Tensor:
        return state.cpu() if self._offload else state
