"""What the plots share: canvas, colours, axes.

Series differ in lightness as well as in hue, so that they stay apart in a grey print. matplotlib is imported only when
a plot is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tcal_components.checkpoint.files import replacing
from tcal_components.reporting._format import short_number

DARK, MID, LIGHT, TEACHER, KEPT = "#12355b", "#e07b00", "#8cc4e8", "#000000", "#ececec"
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


def layer_axis(axis: Any, layers: Sequence[int], kept: Sequence[int] = ()) -> None:
    """The x axis of a plot by layer.

    Args:
        axis: matplotlib's.
        layers: that have points.
        kept: layers that keep attention, shaded.
    """
    everything = sorted({*layers, *kept})
    if not everything:
        return
    for number, layer in enumerate(kept):
        label = None if number else "keeps attention"
        axis.axvspan(layer - 0.5, layer + 0.5, color=KEPT, linewidth=0, zorder=0, label=label)
    # At an even step, at most about 16 of them so that the labels do not touch.
    step = max(1, math.ceil((everything[-1] - everything[0] + 1) / 16))
    axis.set_xticks(range(everything[0], everything[-1] + 1, step))
    axis.set_xlim(everything[0] - 0.8, everything[-1] + 0.8)
    axis.set_xlabel("layer")


def log_axis(
    axis: Any, low: float, high: float, *, side: str = "y", words: Callable[[float], str] = short_number
) -> None:
    """A logarithmic axis with plain numbers, labelled also within one decade.

    Args:
        axis: matplotlib's.
        low: where it begins.
        high: where it ends.
        side: ``x`` or ``y``.
        words: writes a number.
    """
    line = getattr(axis, f"{side}axis")
    getattr(axis, f"set_{side}scale")("log")
    getattr(axis, f"set_{side}lim")(low, high)
    if side == "y":
        axis.grid(True, which="minor", axis="y", linewidth=0.3)
    if high / low < 100:  # too few decades for matplotlib's powers of ten to label the axis
        from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

        if high / low < 4:
            ticks = MaxNLocator(6).tick_values(low, high)
        else:
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            digits = (1, 1.5, 2, 3, 5, 7) if side == "y" else (1, 2, 5)  # numbers side by side take more room
            ticks = [digit * 10.0**power for power in powers for digit in digits]
        line.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
        line.set_minor_locator(NullLocator())
    line.set_major_formatter(lambda value, _: words(value))
    line.set_minor_formatter(lambda value, _: "")
