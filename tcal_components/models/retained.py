"""Which layers keep attention: the retained set, from a config or from a ranking that ``select_layers`` wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tcal_components.config import Count, OneOf, Range, Settings, read_json_object
from tcal_components.config.schema import fit
from tcal_components.modules.spec import check_retained_layers

POLICIES = ("uniform", "file")


@dataclass(frozen=True)
class RetainConfig(Settings):
    """The config section ``retain``: either ``layers``, or a ``policy`` with its arguments.

    Args:
        layers: explicit indices of the layers that keep attention.
        policy: ``uniform`` (evenly spaced), or ``file`` (a set that ``recipes/select_layers`` wrote).
        num_layers: for ``uniform``, how many layers are kept, at ``floor(i * L / num_layers)``; for ``file``, how many of
            the ranking.
        every: for ``uniform``, keep every n-th layer instead.
        offset: first kept layer when ``every`` is given; ``every - 1`` gives the order that SGLang needs.
        path: for ``file``, the JSON file.
    """

    layers: list[int] | None = None
    policy: Annotated[str, OneOf(POLICIES)] | None = None
    num_layers: Annotated[int, Range(0, 2**16)] | None = None
    every: Count | None = None
    offset: Annotated[int, Range(0, 2**16)] = 0
    path: str | None = None


def uniform_layers(total: int, count: int) -> tuple[int, ...]:
    """Evenly spaced layers, the first always among them.

    Args:
        total: number of layers L.
        count: number to keep, 0 to L.

    Returns:
        ``floor(i * L / count)`` for i = 0 .. count - 1.
    """
    return tuple(i * total // count for i in range(count))


def read_selection(path: str | Path, num_layers: int | None, total: int) -> tuple[int, ...]:
    """Retained set from a file that ``recipes/select_layers`` wrote.

    Args:
        path: JSON with ``ranking`` (layers, the most needed first) and ``retained_layers``.
        num_layers: how many of the ranking to keep; None takes ``retained_layers`` as they are.
        total: number of layers of the teacher.

    Returns:
        The indices in order.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not such a file, or it ranks another number of layers.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"retain.path: no file {path}; recipes/select_layers writes one")
    try:
        content = read_json_object(path)
        ranking, retained = (fit(content.get(key), list[int], key) for key in ("ranking", "retained_layers"))
    except ValueError as error:
        raise ValueError(f"retain.path: {path} is not a file of recipes/select_layers ({error})") from error
    if num_layers is None:
        return check_retained_layers(retained, total)
    if num_layers > len(ranking):
        raise ValueError(f"retain.num_layers is {num_layers}, but {path} ranks {len(ranking)} layers")
    return check_retained_layers(ranking[:num_layers], total)


def resolve_retained(config: RetainConfig, total: int) -> tuple[int, ...]:
    """The layers that keep attention.

    Args:
        config: the section ``retain``.
        total: number of layers of the teacher.

    Returns:
        Indices in order; empty means that every layer is converted.

    Raises:
        ValueError: an index out of range, an unknown policy, or arguments that do not go together.
    """
    if (config.layers is None) == (config.policy is None):
        raise ValueError(
            "retain needs either layers or policy (and not both); for example {policy: uniform, num_layers: 8}, with "
            "retain.layers=null beside it where the config has layers"
        )
    if config.layers is not None:
        return check_retained_layers(config.layers, total)
    if config.policy == "uniform":
        if (config.num_layers is None) == (config.every is None):
            raise ValueError("retain with policy uniform needs either num_layers or every")
        if config.every is not None:
            if config.every > total or config.offset >= total:
                raise ValueError(
                    f"retain.every is {config.every} and offset {config.offset}; the teacher has {total} layers"
                )
            return tuple(range(config.offset, total, config.every))
        assert config.num_layers is not None
        if config.num_layers > total:
            raise ValueError(f"retain.num_layers is {config.num_layers}, but the teacher has {total} layers")
        return uniform_layers(total, config.num_layers)
    if config.path is None:
        raise ValueError("retain with policy file needs path: a file that recipes/select_layers wrote")
    return read_selection(config.path, config.num_layers, total)
