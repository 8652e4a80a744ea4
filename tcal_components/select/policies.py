"""Which layers need their attention most: rankings of a teacher's layers, measured on calibration text alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tcal_components.models.retained import uniform_layers
from tcal_components.select.scores import NoAttention, ScoreFile, Scorer


@dataclass(frozen=True)
class Policy:
    """What a policy needs.

    Attributes:
        summary: one line for reports.
        mixers: whether it needs a mixer for every layer.
        alignment: whether it needs the errors of an alignment of all layers.
    """

    summary: str
    mixers: bool = False
    alignment: bool = False


POLICIES: dict[str, Policy] = {
    "uniform": Policy("evenly spaced"),
    "ablation": Policy("loss increase when the layer's attention puts out zero"),
    "single_keep": Policy("loss decrease when it alone keeps attention", mixers=True),
    "kl_guided": Policy("greedy: the layer whose attention lowers the KL to the teacher most", mixers=True),
    "gates": Policy("open gate of a joint training of one gate a layer towards the teacher", mixers=True),
    "alignment_error": Policy("held-out error after alignment", mixers=True, alignment=True),
}


@dataclass(frozen=True)
class Ranking:
    """Outcome of a policy.

    Attributes:
        layers: all layers, the most needed first.
        scores: by layer, higher means more needed; None where the policy has no number for the layer.
        details: what else was measured, JSON-serialisable.
    """

    layers: tuple[int, ...]
    scores: dict[int, float | None]
    details: dict[str, Any]


def order(scores: Mapping[int, float]) -> tuple[int, ...]:
    """Layers by falling score; the lower index first where scores are equal."""
    return tuple(sorted(scores, key=lambda layer: (-scores[layer], layer)))


def rank_uniform(num_layers: int, count: int) -> Ranking:
    """Evenly spaced layers first, then the others, both in order.

    Args:
        num_layers: L.
        count: how many are spaced evenly.

    Returns:
        Ranking: its first ``count`` layers are the set; a shorter head of it is *not* evenly spaced.
    """
    kept = uniform_layers(num_layers, count)
    rest = tuple(layer for layer in range(num_layers) if layer not in kept)
    return Ranking(kept + rest, dict.fromkeys(range(num_layers)), {})


def rank_by_ablation(scorer: Scorer, num_layers: int, scores: ScoreFile) -> Ranking:
    """One layer's attention is dropped at a time (the paper's AR); a larger loss means more needed.

    Args:
        scorer: the text.
        num_layers: L.
        scores: measured numbers; those that are there are not measured again.

    Returns:
        Ranking: score = loss without the layer's attention - loss of the teacher.
    """
    increase = {}
    with scorer.bar(num_layers + 1, "ablation") as bar:
        teacher = scores.get("teacher", scorer.loss)
        bar.update()
        for layer in range(num_layers):
            dropped = nn.ModuleDict({str(layer): NoAttention()})
            increase[layer] = scores.get(f"without {layer}", scorer.loss, dropped) - teacher
            bar.set_postfix_str(f"layer {layer}: +{increase[layer]:.4f}", refresh=False)
            bar.update()
    return Ranking(order(increase), dict(increase), {"teacher_loss": teacher})


def rank_by_single_keep(scorer: Scorer, mixers: nn.ModuleDict, scores: ScoreFile) -> Ranking:
    """One layer alone keeps its attention at a time (the paper's GA-S2); a smaller loss means more needed.

    Args:
        scorer: the text.
        mixers: of all layers, by index.
        scores: measured numbers; those that are there are not measured again.

    Returns:
        Ranking: score = loss with all layers converted - loss with this one kept.
    """
    layers = _layers(mixers)
    decrease = {}
    with scorer.bar(len(layers) + 1, "single keep") as bar:
        everything = scores.get("all converted", scorer.loss, mixers)
        bar.update()
        for layer in layers:
            others = _without(mixers, [layer])
            decrease[layer] = everything - scores.get(f"kept {layer}", scorer.loss, others)
            bar.set_postfix_str(f"layer {layer}: -{decrease[layer]:.4f}", refresh=False)
            bar.update()
    return Ranking(order(decrease), dict(decrease), {"all_converted_loss": everything})


def rank_by_kl(scorer: Scorer, mixers: nn.ModuleDict, count: int, scores: ScoreFile) -> Ranking:
    """Greedy: from all layers converted, again and again the layer is kept that lowers the KL to the teacher most.

    Args:
        scorer: the text.
        mixers: of all layers, by index.
        count: rounds, at L - r + 1 passes each; later ranks are the order of the last round.
        scores: measured numbers; those that are there are not measured again.

    Returns:
        Ranking: score = KL before the layer is kept - KL after, of the layer's own round or of the last one.
    """
    layers = _layers(mixers)
    kept: list[int] = []
    gains: dict[int, float] = {}
    rounds = []
    passes = 1 + sum(len(layers) - number for number in range(count))
    with scorer.bar(passes, "KL guided") as bar:
        before = scores.get("kl kept none", scorer.kl, mixers)
        bar.update()
        for _ in range(count):
            gain = {}
            for layer in layers:
                if layer in kept:
                    continue
                name = ",".join(map(str, sorted([*kept, layer])))
                others = _without(mixers, [*kept, layer])
                gain[layer] = before - scores.get(f"kl kept {name}", scorer.kl, others)
                bar.update()
            best = order(gain)[0]
            gains.update(gain)
            kept.append(best)
            before -= gain[best]
            rounds.append({"layer": best, "kl": before})
            bar.set_postfix_str(f"kept {best}: KL {before:.4f}", refresh=False)
    rest = order({layer: gains.get(layer, 0.0) for layer in layers if layer not in kept})
    return Ranking((*kept, *rest), {layer: gains.get(layer) for layer in layers}, {"rounds": rounds})


def rank_by(scores: Mapping[int, float]) -> Ranking:
    """Layers by a score that each of them has.

    Args:
        scores: by layer, such as how far its gate stays open when all are trained together
            (:mod:`tcal_components.select.gates`), or the relative held-out error of its aligned mixer.

    Returns:
        Ranking: with these scores.
    """
    return Ranking(order(scores), dict(scores), {})


def _layers(mixers: nn.ModuleDict) -> list[int]:
    return sorted(int(layer) for layer in mixers)


def _without(mixers: nn.ModuleDict, kept: Sequence[int]) -> nn.ModuleDict:
    return nn.ModuleDict({layer: mixer for layer, mixer in mixers.items() if int(layer) not in kept})
