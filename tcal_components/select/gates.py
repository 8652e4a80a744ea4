"""Ranks layers with one gate each: all layers at once, every weight frozen, by the divergence from the teacher.

A layer puts out ``g attention(x) + (1 - g) mixer(x)`` with ``g = sigmoid(theta)``. Only the gates are trained, towards the
teacher's next-token distribution and under a penalty that holds their sum at the number of layers to keep; so layers compete,
and what one layer's attention is worth depends on which others keep theirs. The idea is that of FlashMorph (arXiv 2606.30562),
which trains its gates on some twenty million tokens; on aligned mixers a hundred thousand do.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tcal_components.config import Count, Range, Rate, Settings, Steps
from tcal_components.data.packed import IGNORE_INDEX
from tcal_components.distributed.collectives import all_sum_, rank
from tcal_components.distributed.parallel import reshard
from tcal_components.measure.divergence import divergence
from tcal_components.modules.hybrid_decoder import HybridDecoder


@dataclass(frozen=True)
class GateConfig(Settings):
    """Numbers of the policy ``gates`` (config section ``select.gates``).

    Args:
        steps: optimizer steps.
        batch_size: sequences a step over all processes.
        lr: of Adam on the gates' logits.
        budget: weight of ((sum of gates - kept) / kept)^2 beside the divergence in nats a token.
        decided: weight, growing over the steps, of the mean g (1 - g), which asks gates to be open or shut.
        repeated: every so many steps the second half of each sequence is its first half once more, which a student predicts
            only by looking back; 0 never.
    """

    steps: Steps = 100
    batch_size: Count = 2
    lr: Rate = 0.1
    budget: Rate = 1.0
    decided: Rate = 1.0
    repeated: Annotated[int, Range(0, 10**9)] = 0


class GatedLayer(nn.Module):
    """Attention and mixer of one layer, mixed by a gate that somebody else owns.

    Args:
        attention: of the teacher.
        mixer: in its place.
        gates (Tensor): of all layers, each from 0 to 1, shape [L].
        layer: index of this one.
    """

    cache_enabled = False  # torchtune's decoder asks

    def __init__(self, attention: nn.Module, mixer: nn.Module, gates: Tensor, layer: int) -> None:
        super().__init__()
        self.attention, self.mixer = attention, mixer
        self._gates, self._layer = gates, layer

    def forward(
        self, x: Tensor, y: Tensor | None = None, *, mask: Any = None, input_pos: Tensor | None = None
    ) -> Tensor:
        """Mixes both outputs.

        Args:
            x (Tensor): input, shape [B, T, E].
            y: ignored.
            mask: of the attention.
            input_pos (Tensor | None): positions, shape [B, T].

        Returns:
            Tensor: shape [B, T, E].
        """
        gate = self._gates[self._layer].to(x.dtype)
        attended = self.attention(x, x, mask=mask, input_pos=input_pos)
        return gate * attended + (1 - gate) * self.mixer(x, input_pos=input_pos)


@contextlib.contextmanager
def gated(model: Any, mixers: nn.ModuleDict, gates: Tensor) -> Iterator[nn.Module]:
    """The model with every layer of ``mixers`` gated, restored on exit.

    Args:
        model: decoder with attention in every layer of ``mixers``.
        mixers: by layer index (as text).
        gates (Tensor): shape [L].

    Yields:
        The same model object.
    """
    attention = {name: model.layers[int(name)].attn for name in mixers}
    try:
        for name, mixer in mixers.items():
            model.layers[int(name)].attn = GatedLayer(attention[name], mixer, gates, int(name))
        yield model
    finally:
        for name, module in attention.items():
            model.layers[int(name)].attn = module


def repeat_halves(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch whose rows say their first half twice, each row one document.

    Args:
        batch: ``tokens`` and ``labels`` [B, T], T at least 2.

    Returns:
        dict: ``tokens``, and ``labels`` that count in the second half alone.
    """
    half = batch["tokens"].shape[1] // 2
    tokens = torch.cat([batch["tokens"][:, :half]] * 2, dim=1)
    labels = torch.cat([torch.full_like(tokens[:, :half], IGNORE_INDEX), tokens[:, half:].roll(-1, dims=1)], dim=1)
    labels[:, -1] = IGNORE_INDEX
    return {"tokens": tokens, "labels": labels}


def train_gates(
    teacher: HybridDecoder,
    mixers: nn.ModuleDict,
    batches: Iterable[Mapping[str, Any]],
    count: int,
    *,
    config: GateConfig,
    autocast_dtype: torch.dtype | None = None,
) -> Tensor:
    """Trains one gate a layer.

    Args:
        teacher: plain or under FSDP2, frozen.
        mixers: of all layers, by index (as text), on the teacher's device; frozen.
        batches: prepared batches, this process's part of each; ``config.steps`` of them are read.
        count: layers that are to keep attention, from 1 to L.
        config: numbers of the training.
        autocast_dtype: run the models under autocast to this type.

    Returns:
        Tensor: gates, float32, shape [L], on the CPU; the same on every process.

    Raises:
        ValueError: no layer is to keep attention, a layer has no mixer, or the batches end early.
        FloatingPointError: the divergence is not finite.
    """
    if count < 1:
        raise ValueError("select.policy gates needs select.num_layers of at least 1")
    if len(mixers) != teacher.spec.num_layers:
        raise ValueError(f"gates need a mixer for each of the {teacher.spec.num_layers} layers, not for {len(mixers)}")
    size, device = len(mixers), next(mixers.parameters()).device
    theta = torch.zeros(size, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([theta], lr=config.lr, betas=(0.9, 0.95))
    source = iter(batches)
    with tqdm(total=config.steps, desc="gates", unit="step", disable=rank() != 0) as bar:
        for step in range(config.steps):
            batch = next(source, None)
            if batch is None:
                raise ValueError(f"the text for the gates ended after {step} of {config.steps} steps")
            if config.repeated and step % config.repeated == config.repeated - 1:
                batch = repeat_halves(batch)
            gates = theta.sigmoid()
            # The models see a leaf, so that one sum over the processes gives its whole gradient.
            leaf = gates.detach().requires_grad_()
            total, counted = divergence(teacher, gated(teacher, mixers, leaf), batch, autocast_dtype=autocast_dtype)
            total.backward()
            reshard(teacher)
            assert leaf.grad is not None
            sums = all_sum_(torch.cat([leaf.grad.double(), torch.stack([total.detach(), counted]).double()]))
            mean = float(sums[-2] / sums[-1].clamp_min(1))
            if not math.isfinite(mean):
                raise FloatingPointError(
                    f"the divergence is {mean} at step {step} of the gates: look for NaN in a mixer"
                )
            budget = config.budget * ((gates.sum() - count) / count).square()
            decided = config.decided * (step + 1) / config.steps * (gates * (1 - gates)).mean()
            pull = (gates * (sums[:-2] / sums[-1].clamp_min(1)).to(gates.dtype)).sum()  # has the divergence's gradient
            (pull + budget + decided).backward()
            optimizer.step()
            optimizer.zero_grad()
            bar.set_postfix_str(f"KL {mean:.4f}, sum of gates {float(gates.detach().sum()):.1f}", refresh=False)
            bar.update()
    return theta.detach().sigmoid().cpu()
