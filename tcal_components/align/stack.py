"""All mixers of an alignment as one: small batches cost launches, and one layer's launches do as well for all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcal_components.modules.gated_delta_net import GatedDeltaNet
from tcal_components.ops.documents import document_boundaries
from tcal_components.ops.gated_delta_rule import gated_delta_rule, log_decay
from tcal_components.ops.gated_norm import gated_rms_norm
from tcal_components.ops.short_conv import short_conv


class LayerStack(nn.Module):
    """Mixers of the same shape that read inputs of their own at the same time, as the layers of an alignment do.

    Heads and channels of all layers lie side by side: convolution, recurrence and norm know nothing of layers, and the
    projections are batched products. The activations of all layers are alive until the backward pass.

    Parameters have the names of a mixer's and a first dimension of L layers. Those of the mixers become views of them, so
    that training the stack trains the mixers.

    Args:
        mixers: L layers of one shape, plain (not sharded).

    Raises:
        ValueError: if :meth:`fits` says no.
    """

    ones: Tensor

    def __init__(self, mixers: Sequence[nn.Module]) -> None:
        super().__init__()
        first = mixers[0]
        if not self.fits(mixers) or not isinstance(first, GatedDeltaNet):
            raise ValueError("only plain Gated DeltaNet layers of one shape stack")
        self.num_layers, self.num_heads, self.eps = len(mixers), first.num_heads, first.o_norm.eps
        for name, parameter in first.named_parameters():
            stacked = nn.Parameter(torch.stack([mixer.get_parameter(name).detach() for mixer in mixers]))
            stacked.requires_grad_(parameter.requires_grad)
            owner: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, stacked)
            for mixer, row in zip(mixers, stacked.detach().unbind()):
                mixer.get_parameter(name).data = row
        self.register_buffer("ones", torch.ones_like(first.o_norm.scale.detach()), persistent=False)

    @staticmethod
    def fits(mixers: Sequence[nn.Module]) -> bool:
        """Whether these layers can be stacked."""
        shapes = {tuple((name, tuple(p.shape), p.dtype, p.device) for name, p in m.named_parameters()) for m in mixers}
        plain = all(type(m) is GatedDeltaNet for m in mixers)
        sharded = any(hasattr(parameter, "full_tensor") for m in mixers for parameter in m.parameters())
        return len(shapes) == 1 and plain and not sharded

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        """Mixes tokens, each layer its own.

        Args:
            x: inputs, shape [L, B, T, E].
            input_pos: positions, shape [B, T] or [T], the same for all layers.

        Returns:
            Tensor: shape [L, B, T, E].
        """
        batch, length = x.shape[1:3]
        documents = document_boundaries(input_pos, batch_size=batch, seq_len=length)
        rows = x.flatten(1, 2)

        def project(name: str) -> Tensor:  # [B, T, L * out], layer by layer
            out = torch.bmm(rows, self.get_parameter(f"{name}.weight").mT)
            return out.transpose(0, 1).reshape(batch, length, -1)

        def heads(tensor: Tensor) -> Tensor:
            return tensor.unflatten(-1, (self.num_layers * self.num_heads, -1))

        def convolved(name: str) -> Tensor:
            projected = project(f"{name}_proj")
            if f"{name}_conv" not in self._modules:
                return heads(F.silu(projected))
            taps = self.get_parameter(f"{name}_conv.weight").flatten(0, 1)
            return heads(short_conv(projected, taps, documents=documents)[0])

        q, k, v = (convolved(name) for name in ("q", "k", "v"))
        decay = [self.get_parameter(f"decay.{name}").flatten() for name in ("A_log", "dt_bias")]
        g = log_decay(project("a_proj"), *decay)
        beta = project("b_proj").to(g.dtype).sigmoid()
        o = gated_delta_rule(q, k, v, g=g, beta=beta, documents=documents)[0]
        scale = self.get_parameter("o_norm.scale").repeat_interleave(self.num_heads, dim=0)
        normed = gated_rms_norm(o, heads(project("g_proj")), self.ones, eps=self.eps)
        features = (normed * scale).to(normed.dtype).flatten(0, 1).unflatten(1, (self.num_layers, -1)).flatten(2)
        out = torch.bmm(features.transpose(0, 1), self.get_parameter("output_proj.weight").mT)
        return out.unflatten(1, (batch, length))
