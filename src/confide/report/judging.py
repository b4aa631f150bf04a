"""What a judgement says on a page: the sentences of the first paragraph, and tables class by class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from confide import wording
from confide.evaluate.intervals import Interval
from confide.evaluate.judgement import BETTER, UNTOLD, ClassJudgement, ClassLine, Judgement, Measured
from confide.evaluate.mixing import Mixing
from confide.report import words
from confide.wording import SHARES, share

MOST_CLASSES = 12
"""In a confusion matrix on a page; of more classes the most frequent confusions are listed."""
MOST_CONFUSIONS = 12  # what fits on a screen
MOST_LINES = 50
"""Of a table on a page; run.json holds all classes."""


class Cell(NamedTuple):
    """A value, and its interval under it."""

    value: str
    spread: str = ""


@dataclass(frozen=True)
class PageTable:
    """A table of a page: a name to the left in every row, figures to its right."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def sentences(judgement: Judgement | None) -> list[str]:
    """Beside no learning at all, and whether it names one class only."""
    if judgement is None:
        return []
    base = judgement.baseline.value
    if isinstance(judgement, ClassJudgement):
        beside = f"Always naming the most frequent class, “{judgement.majority}”, is right {share(base)} of the time"
    else:
        beside = f"Always naming the mean of the test inputs is off by {wording.number(base)}"
    verdict = {
        BETTER: ".",
        UNTOLD: ", and these test inputs cannot tell the two apart: no learning shows.",
    }.get(judgement.verdict, ", which is better.")
    found = [beside + verdict]
    if isinstance(judgement, ClassJudgement):
        if judgement.only is not None:
            found.append(f"It names one class only, “{judgement.only}”, whatever it sees.")
        elif judgement.never:
            missed = ", ".join(f"“{name}”" for name in judgement.never[:6])
            found.append(f"It never names {missed}{' and others' if len(judgement.never) > 6 else ''}.")
    return found


def metric_rows(metrics: Mapping[str, float], intervals: Mapping[str, Interval]) -> list[dict[str, str]]:
    """The table of metrics, with the interval of each where there is one."""
    rows = []
    for name, value in metrics.items():
        ends = intervals.get(name)
        rows.append({**words.metric(name, value), "interval": "" if ends is None else between(name, ends)})
    return rows


def baseline_row(judgement: Judgement | None) -> list[dict[str, str]]:
    """What a model that learns nothing reaches, as the first line of the table of metrics."""
    if judgement is None:
        return []
    name = "accuracy" if isinstance(judgement, ClassJudgement) else "rmse"
    base = judgement.baseline
    meaning = "what needs no learning: " + (
        "accuracy of always naming the most frequent class of the test inputs"
        if name == "accuracy"
        else "root mean squared error of always naming their mean"
    )
    row = words.metric(name, base.value)
    return [{**row, "name": "Baseline", "meaning": meaning, "interval": between(name, (base.low, base.high))}]


def between(name: str, ends: Interval) -> str:
    """An interval of a metric, as pages show it."""
    if name in SHARES:
        return f"{share(ends[0])} to {share(ends[1])}"
    return " to ".join(wording.measure(name, end) for end in ends)


def tables(judgement: Judgement | None) -> list[PageTable]:
    """Class by class: what was found, how it was ranked, how honest its probability was, and what was confused."""
    if not isinstance(judgement, ClassJudgement):
        return []
    return [_recall_table(judgement), _honesty_table(judgement), _confusion_table(judgement)]


def _recall_table(judgement: ClassJudgement) -> PageTable:
    note = (
        "Recall is the share of a class's inputs that were named so, precision the share of those named so that are of "
        "it; AUROC and average precision judge the order of its probabilities against the rest. 95% intervals below."
    )
    columns = ("Class", "Inputs", "Recall", "Precision", "AUROC", "Average precision")
    rows = tuple(
        (
            Cell(line.label),
            Cell(f"{line.records:,}"),
            _shares(line.recall),
            _shares(line.precision),
            _figures(line.auroc),
            _figures(line.average_precision),
        )
        for line in judgement.classes[:MOST_LINES]
    )
    return PageTable("Class by class", note + _rest(judgement), columns, rows)


def _honesty_table(judgement: ClassJudgement) -> PageTable:
    note = (
        "The mean probability that the model stated for a class, beside the share of inputs that are of it; and the "
        "average gap between stated probability and share that came true, over bins. A gap whose interval reaches "
        "0 could be chance."
    )
    columns = ("Class", "Stated on average", "Actual share", "Calibration error", "Could be chance")
    rows = tuple(_honesty_row(line) for line in judgement.classes[:MOST_LINES])
    return PageTable("Calibration, class by class", note + _rest(judgement), columns, rows)


def _honesty_row(line: ClassLine) -> tuple[Cell, ...]:
    chance = Cell("yes" if line.calibration.low <= 0 else "no")
    return Cell(line.label), Cell(share(line.stated)), _shares(line.actual), _figures(line.calibration), chance


def _rest(judgement: ClassJudgement) -> str:
    more = len(judgement.classes) - MOST_LINES
    return f" {more} more classes are in run.json." if more > 0 else ""


def _confusion_table(judgement: ClassJudgement) -> PageTable:
    names = [line.label for line in judgement.classes]
    if len(names) <= MOST_CLASSES:
        rows = tuple(
            (Cell(name), *(Cell(f"{count:,}") for count in counts))
            for name, counts in zip(names, judgement.confusion, strict=True)
        )
        note = "One row per actual class, one column per class that was named: right answers stand on the diagonal."
        return PageTable("What was taken for what", note, ("Actual", *(f"named {name}" for name in names)), rows)
    wrong = [
        (count, names[actual], names[named])
        for actual, counts in enumerate(judgement.confusion)
        for named, count in enumerate(counts)
        if count and actual != named
    ]
    wrong.sort(key=lambda entry: -entry[0])
    rows = tuple((Cell(actual), Cell(named), Cell(f"{count:,}")) for count, actual, named in wrong[:MOST_CONFUSIONS])
    note = "The most frequent confusions; run.json holds the whole matrix."
    return PageTable("What was taken for what", note, ("Actual", "Named", "Inputs"), rows)


def _shares(measured: Measured | None) -> Cell:
    if measured is None:
        return Cell("none")
    return Cell(share(measured.value), f"{share(measured.low)} to {share(measured.high)}")


def _figures(measured: Measured | None) -> Cell:
    if measured is None:
        return Cell("none")
    return Cell(f"{measured.value:.3f}", f"{measured.low:.3f} to {measured.high:.3f}")


def chain_table(found: Mixing | None) -> PageTable | None:
    """Whether a chain went round its posterior; None for what is no chain."""
    if found is None:
        return None
    wide = f"{found.chains} chains" if found.chains > 1 else "one chain"
    rows = [
        (Cell("Draws"), Cell(f"{found.draws:,}"), Cell(f"kept, of {wide}")),
        (
            Cell("Effective draws"),
            Cell(wording.number(round(found.effective))),
            Cell("independent draws that say as much of the median parameter; intervals want some 100, means 10"),
        ),
        (
            Cell("Fewest effective draws"),
            Cell(wording.number(round(found.fewest))),
            Cell("of the parameter at the 5% point: nearly all others have more"),
        ),
        (
            Cell("Split R-hat"),
            Cell(f"{found.r_hat:.2f}"),
            Cell("disagreement of the halves of the chains, at the median parameter; 1 is agreement"),
        ),
        (
            Cell("Largest split R-hat"),
            Cell(f"{found.largest:.2f}"),
            Cell("at the 95% point of the parameters"),
        ),
        (
            Cell("Way"),
            Cell(f"{found.way:.2f}"),
            Cell("from the first quarter of the draws to the last, in their deviations; above 1: still on its way"),
        ),
    ]
    if found.temperature is not None:
        rows.append(
            (
                Cell("Temperature"),
                Cell(f"{found.temperature:.3g}"),
                Cell("1: the privacy noise is no more than sampling asks for; above 1 it makes the draws too wide"),
            )
        )
    note = "Read off the kept draws, which are paid for. " + (
        "The chain went round: its halves agree."
        if found.converged
        else "It did not converge: quote no interval of a parameter from it, and take predictions with caution."
    )
    return PageTable("Did the chain settle?", note, ("Measure", "Value", "What it means"), tuple(rows))
