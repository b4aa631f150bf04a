"""Curves of a run while it lasts, on a terminal or in a notebook: metrics on records that are declared to be public.

    confide.fit(method, module, data, plan, validation=(x, y), callbacks=[LiveCurves()])

    nll       ▇▅▄▃▂▂▁▁  0.412  (best 0.409 at step 180)
    accuracy  ▁▄▅▆▇▇██  0.853  (best 0.855 at step 160)

A notebook shows them as one picture, which is drawn anew at every look; a file that is no terminal gets one line for
every look.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from confide.errors import Refusal
from confide.evaluate.metrics import LARGER_IS_BETTER, SMALLER_IS_BETTER

if TYPE_CHECKING:
    from confide.running.callbacks import Moment

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_BLOCKS = ".:-=+*#@"
"""For a terminal that cannot write the others."""
WIDEST = 40
"""Looks of which a terminal shows the curve: with names and numbers a line stays below 80 signs."""
USUAL = ("nll", "accuracy", "log_likelihood", "rmse", "label_accuracy", "concordance", "crps")
"""Metrics that are shown unless others are named; at most the first two that are measured."""
PICTURE = (240, 110)
"""Pixels of one curve in a notebook: three of them stand side by side on a phone turned sideways."""


@dataclass
class LiveCurves:
    """Metrics on the public validation set as curves that grow; needs `validation=(x, y)`.

    metrics   by name; none: those that say most about the task
    file      where lines go when no notebook shows them; None: standard error
    """

    metrics: Sequence[str] = ()
    every: int | None = None
    file: TextIO | None = field(default=None, repr=False)
    needs_validation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name not in (*SMALLER_IS_BETTER, *LARGER_IS_BETTER):
                raise Refusal(f"metrics={name!r}: must be among {', '.join((*SMALLER_IS_BETTER, *LARGER_IS_BETTER))}")
        self.steps: list[int] = []
        self.values: dict[str, list[float]] = {}
        self._handle: Any = None
        self._lines = 0

    def __call__(self, moment: Moment) -> None:
        measured = moment.metrics
        absent = [name for name in self.metrics if name not in measured]
        if absent:
            raise Refusal(f"metrics={absent[0]!r}: is not measured here; choose from {', '.join(measured)}")
        chosen = self.metrics or [name for name in USUAL if name in measured][:2] or list(measured)[:2]
        if self.steps and moment.step <= self.steps[-1]:  # the same curves are used for another run
            self.steps, self.values, self._handle, self._lines = [], {}, None, 0
        self.steps.append(moment.step)
        for name in chosen:
            self.values.setdefault(name, []).append(float(measured[name]))
        if in_notebook():
            self._show_picture(moment)
        else:
            self._write(moment)

    def _write(self, moment: Moment) -> None:
        file = sys.stderr if self.file is None else self.file
        if not file.isatty():
            said = ", ".join(f"{name} {values[-1]:.4g}" for name, values in self.values.items())
            file.write(f"step {moment.step:,} of {moment.steps:,}: {said}\n")
            file.flush()
            return
        if self._lines:
            file.write(f"\x1b[{self._lines}A")
        encoding = getattr(file, "encoding", None) or "ascii"
        lines = self.lines(moment.steps, _can_write(BLOCKS, encoding))
        file.writelines(f"\x1b[2K{line}\n" for line in lines)
        file.flush()
        self._lines = len(lines)

    def lines(self, steps: int, blocks: bool = True) -> list[str]:
        """What a terminal shows: the step, and a curve for each metric."""
        wide = max(len(name) for name in self.values)
        found = [f"step {self.steps[-1]:,} of {steps:,}, on public validation records"]
        for name, values in self.values.items():
            best, step = self._best(name)
            curve = sparkline(values[-WIDEST:], BLOCKS if blocks else PLAIN_BLOCKS)
            found.append(f"  {name:<{wide}}  {curve}  {values[-1]:.4g}  (best {best:.4g} at step {step:,})")
        return found

    def _best(self, name: str) -> tuple[float, int]:
        sign = -1.0 if name in LARGER_IS_BETTER else 1.0
        pairs = [(sign * value, step) for value, step in zip(self.values[name], self.steps, strict=True)]
        known = [pair for pair in pairs if not math.isnan(pair[0])]
        value, step = min(known) if known else (math.nan, self.steps[-1])
        return sign * value, step

    def _show_picture(self, moment: Moment) -> None:
        from IPython.display import HTML, display  # type: ignore[import-not-found,unused-ignore]

        picture: Any = HTML(self.picture(moment.steps))  # type: ignore[no-untyped-call,unused-ignore]
        if self._handle is None:
            self._handle = display(picture, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]
        else:
            self._handle.update(picture)

    def picture(self, steps: int) -> str:
        """What a notebook shows: one small drawing for each metric, with its last value in words."""
        parts = [self._curve(name, steps) for name in self.values]
        said = f"step {self.steps[-1]:,} of {steps:,}, on public validation records"
        return f"<div><div>{said}</div>{''.join(parts)}</div>"

    def _curve(self, name: str, steps: int) -> str:
        wide, high = PICTURE
        values = self.values[name]
        finite = [value for value in values if math.isfinite(value)] or [0.0]
        low, span = min(finite), (max(finite) - min(finite)) or 1.0
        places = [
            (10 + (wide - 20) * step / steps, high - 12 - (high - 36) * (value - low) / span)
            for step, value in zip(self.steps, values, strict=True)
            if math.isfinite(value)
        ]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        best, when = self._best(name)
        said = f"{name} {values[-1]:.4g}, best {best:.4g} at step {when:,}"
        dot = f'<circle cx="{places[-1][0]:.1f}" cy="{places[-1][1]:.1f}" r="3" fill="#1f5fa8"/>' if places else ""
        return (
            f'<svg role="img" aria-label="{escape(said)}" width="{wide}" height="{high}" style="background:#fff">'
            f'<text x="10" y="16" font-size="12" font-family="sans-serif" fill="#222">{escape(said)}</text>'
            f'<polyline points="{points}" fill="none" stroke="#1f5fa8" stroke-width="2"/>{dot}</svg>'
        )


def progress_in_notebook() -> Callable[[int, int], None]:
    """A function for `progress=` that keeps one bar of a notebook up to date, a hundred times in a run."""
    from IPython.display import HTML, display  # type: ignore[import-not-found,unused-ignore]

    handle: Any = None

    def progress(done: int, total: int) -> None:
        nonlocal handle
        if done != total and done % max(1, total // 100):
            return
        said = f"step {done:,} of {total:,} ({done / total:.0%})"
        bar: Any = HTML(f'<progress value="{done}" max="{total}"></progress> {said}')  # type: ignore[no-untyped-call,unused-ignore]
        if handle is None:
            handle = display(bar, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]
        else:
            handle.update(bar)

    return progress


def sparkline(values: Sequence[float], blocks: str = BLOCKS) -> str:
    """One sign for each value, from the lowest to the highest of them; a blank for what is no number."""
    finite = [value for value in values if math.isfinite(value)]
    low, span = (min(finite), max(finite) - min(finite)) if finite else (0.0, 0.0)
    top = len(blocks) - 1
    return "".join(
        " " if not math.isfinite(value) else blocks[round(top * (value - low) / span) if span > 0 else 0]
        for value in values
    )


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which shows pictures; a shell of IPython does not."""
    shell = sys.modules.get("IPython")
    found = None if shell is None else shell.get_ipython()
    return found is not None and type(found).__name__ == "ZMQInteractiveShell"


def _can_write(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
