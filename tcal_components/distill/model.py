"""Student, teacher and loss as one module: everything that needs gathered weights happens in its forward."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torchtune import training

from tcal_components.distill.loss import LinearKL
from tcal_components.distributed.parallel import reshard
from tcal_components.modules.hybrid_decoder import HybridDecoder


class DistillModel(nn.Module):
    """The distillation loss of a batch of tokens.

    Student and teacher are FSDP2 roots of their own (see ``parallelize``): each gathers its head while ``hidden`` runs and
    keeps it gathered for the loss.

    Args:
        student: to train.
        teacher: frozen.
        loss: from hidden states to sums over tokens.
        activation_offloading: keep the student's saved activations on the CPU between forward and backward; CUDA only.

    Raises:
        ValueError: if the vocabularies differ, or for offloading without CUDA.
    """

    def __init__(
        self, student: HybridDecoder, teacher: HybridDecoder, loss: LinearKL, *, activation_offloading: bool = False
    ) -> None:
        super().__init__()
        if student.spec.vocab_size != teacher.spec.vocab_size:
            raise ValueError(
                f"vocabulary sizes differ: student {student.spec.vocab_size}, teacher {teacher.spec.vocab_size}; "
                "distillation over logits needs the same vocabulary"
            )
        self.student = student
        self.teacher = teacher.requires_grad_(False).eval()
        self.loss = loss
        self._offloading: Any = None
        if activation_offloading:
            if not torch.cuda.is_available():
                raise ValueError("activation_offloading moves activations from a GPU and needs device=cuda")
            # Not by torchtune's helper: it hooks the head, which runs in the loss here, outside of this context, and would
            # take the loss's fast path.
            self._offloading = training.OffloadActivations()

    def forward(
        self, tokens: Tensor, labels: Tensor, *, mask: Any = None, input_pos: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum the loss over the batch's counted tokens.

        Args:
            tokens: [B, T].
            labels: [B, T], already shifted; the loss's ``ignore_index`` does not count.
            mask: attention mask of packed documents, None for plain causal.
            input_pos: positions [B, T], restarting with each document.

        Returns:
            What ``LinearKL`` returns.
        """
        with torch.no_grad():
            teacher_hidden = self.teacher.hidden(tokens, mask=mask, input_pos=input_pos)
        with self._offloading or contextlib.nullcontext():
            hidden = self.student.hidden(tokens, mask=mask, input_pos=input_pos)
        out = self.loss(
            hidden.flatten(0, 1),
            self.student.output,
            teacher_hidden.flatten(0, 1),
            self.teacher.output,
            labels.flatten(),
        )
        if not torch.is_grad_enabled():
            reshard(self.student)  # with a backward pass to come it is that which frees the weights
        return out
