"""The figures of papers as files, in the style of the reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from confide.papers.base import COLOURS, Figure

_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "svg.fonttype": "none",
    "svg.hashsalt": "confide",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "axes.prop_cycle": f"cycler('color', {list(COLOURS)})",
}


def save_figure(figure: Figure, out: Path) -> None:
    """The drawing as SVG and PNG, in that style."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(_STYLE):
        canvas = Canvas(figsize=figure.size, layout="constrained")
        FigureCanvasAgg(canvas)
        figure.draw(canvas)
        for kind in ("svg", "png"):
            canvas.savefig(out / f"{figure.name}.{kind}", dpi=150)
