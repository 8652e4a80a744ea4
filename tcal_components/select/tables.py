"""What ``select_layers`` found: the file of a set, and tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tcal_components.reporting._format import short_number, short_tokens, table
from tcal_components.select.policies import POLICIES, Ranking


def selected_set(
    policy: str, ranking: Ranking, num_layers: int, *, seconds: float, tokens: Mapping[str, int]
) -> dict[str, Any]:
    """What ``retain: {policy: file}`` reads, and what it cost to find.

    Args:
        policy: its name.
        ranking: of all layers.
        num_layers: how many keep attention.
        seconds: that the ranking took.
        tokens: that it read, by their use.

    Returns:
        dict: JSON-serialisable.
    """
    return {
        "policy": policy,
        "ranking": list(ranking.layers),
        "retained_layers": sorted(ranking.layers[:num_layers]),
        "num_layers": num_layers,
        "total_layers": len(ranking.layers),
        "scores": {str(layer): score for layer, score in sorted(ranking.scores.items())},
        "score": POLICIES[policy].summary,
        "seconds": round(seconds, 3),
        "tokens": sum(tokens.values()),
        "tokens_by_use": dict(tokens),
        "details": ranking.details,
    }


def selection_markdown(selections: Mapping[str, Mapping[str, Any]]) -> str:
    """The sets side by side, and every layer's rank and score.

    Args:
        selections: by policy, the content of the files that ``select_layers`` writes.

    Returns:
        Markdown with two sections.
    """
    sets = [
        (
            name,
            ", ".join(map(str, found["retained_layers"])) or "none",
            short_number(found["seconds"]),
            short_tokens(found["tokens"]),
        )
        for name, found in selections.items()
    ]
    total = max(len(found["ranking"]) for found in selections.values())
    rows = []
    for layer in range(total):
        cells = []
        for found in selections.values():
            score = found["scores"].get(str(layer))
            rank = f"{found['ranking'].index(layer) + 1}{'*' if layer in found['retained_layers'] else ''}"
            cells.append(rank if score is None else f"{rank} ({score:+.4g})")
        rows.append((layer, *cells))
    return (
        "## Layers that keep attention\n\n"
        + table(("policy", "layers", "seconds", "tokens"), sets)
        + "\n\n## Rank of every layer (score; * keeps attention)\n\n"
        + table(("layer", *selections), rows)
        + "\n"
    )
