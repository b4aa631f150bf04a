"""How every plot is drawn: inline SVG in one style, on a canvas of its own.

Text stays text, colours suit colour-blind readers, and a sentence says the numbers. There is no pyplot, no window and
no figure left behind in a notebook. Identifiers inside a drawing are prefixed with its name, so several
may share one page.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Okabe and Ito (2008), told apart with every common kind of colour blindness.
BLUE, ORANGE, GREEN, VERMILION, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#6B7280"
INK = "#1F2933"
WIDTH = 480  # of the drawing's own coordinates: shown at up to 640 px, still legible on a phone
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "confide",
    "font.size": 14,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9AA5B1",
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": "#9AA5B1",
    "ytick.color": "#9AA5B1",
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 13,
    "ytick.labelsize": 13,
    "legend.frameon": False,
    "legend.fontsize": 13,
    "hatch.linewidth": 1.0,
    "text.parse_math": False,
}


@dataclass(frozen=True)
class Plot:
    """title    a heading of a few words
    svg      the drawing, to stand inline in a page; its label for screen readers is `alt`
    alt      what it shows, in a sentence with the numbers
    reading  how to read it
    """

    title: str
    svg: str
    alt: str
    reading: str


def legend(axes: Any, columns: int, middle: float = 0.5, **given: Any) -> None:
    """Above the axes, where it can cover no data."""
    place = {"loc": "lower center", "bbox_to_anchor": (middle, 1.0), "borderaxespad": 0.2}
    axes.legend(ncols=columns, columnspacing=1.2, handlelength=1.5, handletextpad=0.5, **place, **given)


def key(axes: Any, entries: Sequence[tuple[str, dict[str, Any]]]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(label=label, **look) for label, look in entries]
    legend(axes, 2, 0.3, handles=handles)


def few_ticks(axis: Any, most: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(most, integer=True))


def logarithmic(axes: Any, low: float, high: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set(xscale="log", xlim=(low, high))
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def plot(name: str, title: str, alt: str, reading: str, draw: Callable[[Any], None], height: float) -> Plot:
    return Plot(title, _inline(_drawn(draw, height), name, alt), alt, reading)


def _drawn(draw: Callable[[Any], None], height: float) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained", facecolor="none")
        draw(figure)
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(buffer, metadata={"Date": None})
    return buffer.getvalue()


def _inline(svg: str, name: str, alt: str) -> str:
    """Strip what only a stand-alone file needs, keep identifiers apart, and label the drawing."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font-family:[^;\"]*", f"font-family: {FONTS}", svg.replace("&quot;", "'"))
    label = f'<svg role="img" aria-label="{html.escape(alt)}" class="plot"'
    size = re.sub(r'\s(width|height|version)="[^"]*"', "", svg[4 : svg.index(">")])
    return label + size + svg[svg.index(">") :]
