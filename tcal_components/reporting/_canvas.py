"""What the plots share: canvas, colours, axes.

Series differ in lightness as well as in hue, so that they stay apart in a grey print. matplotlib is imported only when
a plot is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tcal_components.checkpoint.artifacts import replacing
from tcal_components.reporting._format import short_number

DARK, MID, LIGHT, TEACHER = "#12355b", "#e07b00", "#8cc4e8", "#000000"
SERIES = (
    (DARK, "-", "o"),
    (MID, "--", "s"),
    (LIGHT, "-.", "^"),
    ("#7a7a7a", ":", "D"),
    ("#5b1a4a", "-", "v"),
    ("#2e8b57", "--", "P"),
    ("#d4b106", "-", "X"),
    ("#c2185b", ":", "*"),
)
_DPI = 150
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.constrained_layout.use": True,
}


@contextmanager
def figure(columns: int, *, width: float = 5.4, height: float = 4.0, path: Path) -> Iterator[tuple[Any, list[Any]]]:
    """A row of axes that is saved to ``path`` and closed when the block ends."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        # Figure and canvas directly: pyplot would keep global state and might choose a window system.
        fig = Figure(figsize=(width * columns, height), dpi=_DPI)
        FigureCanvasAgg(fig)
        yield fig, list(fig.subplots(1, columns, squeeze=False)[0])
        with replacing(path) as temporary:
            fig.savefig(temporary, format=Path(path).suffix[1:])


def layer_ticks(axis: Any, layers: Sequence[int]) -> None:
    """Ticks at an even step over the layers, at most about 16 so that the labels do not touch."""
    if not layers:
        return
    step = max(1, math.ceil((layers[-1] - layers[0] + 1) / 16))
    axis.set_xticks(range(layers[0], layers[-1] + 1, step))
    axis.set_xlim(layers[0] - 0.8, layers[-1] + 0.8)
    axis.set_xlabel("layer")


def log_axis(axis: Any, low: float, high: float) -> None:
    """A logarithmic y axis from ``low`` to ``high`` with plain numbers, labelled also within one decade."""
    axis.set_yscale("log")
    axis.set_ylim(low, high)
    axis.grid(True, which="minor", axis="y", linewidth=0.3)
    if high / low < 100:  # too few decades for matplotlib's powers of ten to label the axis
        from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, NullLocator

        if high / low < 4:
            ticks = MaxNLocator(6).tick_values(low, high)
        else:
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            ticks = [digit * 10.0**power for power in powers for digit in (1, 1.5, 2, 3, 5, 7)]
        ticks = [tick for tick in ticks if low <= tick <= high]
        axis.yaxis.set_major_locator(FixedLocator(ticks))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(lambda value, _: short_number(value))
