"""Plots of one run: how good it is, how honest, and what it costs. See `drawing` for how they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from confide.evaluate import metrics
from confide.evaluate.drawing import (
    BLUE,
    GREY,
    ORANGE,
    SKY,
    VERMILION,
    Plot,
    few_ticks,
    key,
    legend,
    logarithmic,
    plot,
)
from confide.models.predictive import ClassPredictive, RealPredictive
from confide.privacy.accountants.bound import Bound
from confide.wording import accountant, epsilon, share_up
from confide.wording import delta as shown_delta

MOST_POINTS = 200  # convention: more dots than this in a small drawing cover each other
_SOLID = {"color": BLUE}
_HATCHED = {"facecolor": "#FFFFFF", "edgecolor": ORANGE, "hatch": "////", "linewidth": 1.4}


def reliability_diagram(probabilities: Tensor, y: Tensor, bins: int = metrics.BINS) -> Plot:
    """Accuracy against confidence, bin by bin, with the number of inputs under each."""
    table = metrics.reliability(probabilities, y, bins)
    filled = table.counts > 0
    centres = _centres(table)[filled].tolist()
    confidence, right = table.confidence[filled].tolist(), table.accuracy[filled].tolist()
    counts = table.counts[filled].tolist()

    def draw(figure: Any) -> None:
        top, bottom = figure.subplots(2, sharex=True, height_ratios=(4, 1))
        top.plot((0, 1), (0, 1), color=GREY, linestyle=(0, (4, 3)), linewidth=1.2, label="ideal")
        top.bar(centres, right, 0.92 / bins, color=BLUE, label="share right")
        top.scatter(confidence, confidence, s=22, c=ORANGE, marker="D", zorder=3, label="stated confidence")
        top.set(ylim=(0, 1.02), ylabel="Share right")
        legend(top, 3)
        bottom.bar(centres, counts, 0.92 / bins, color=GREY)
        bottom.set(xlim=(0, 1), xlabel="Stated confidence", ylabel="Inputs")
        few_ticks(bottom.yaxis, 2)

    alt = (
        f"Reliability diagram of {len(y)} test inputs in {bins} bins, {len(counts)} of them in use. "
        "On average the stated confidence differs from the share that was right by "
        f"{table.expected_gap:.3f}, in the worst bin by {table.largest_gap:.3f}."
    )
    reading = (
        "Bars on the dashed line are honest. Below it, the model claimed more than it could; above it, less. Bars over "
        "few inputs say little."
    )
    return plot("reliability", "Does its confidence match its accuracy?", alt, reading, draw, 610)


def confidence_histogram(probabilities: Tensor, y: Tensor, bins: int = metrics.BINS) -> Plot:
    """How sure the model was when it was right, and when it was wrong."""
    table = metrics.reliability(probabilities, y, bins)
    right = (table.accuracy * table.counts).round().tolist()
    wrong = [count - hits for count, hits in zip(table.counts.tolist(), right, strict=True)]
    centres = _centres(table).tolist()
    sure = float((probabilities.amax(1) >= 0.9).double().mean())

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.bar(centres, right, 0.92 / bins, color=BLUE, label="right")
        striped = {"color": ORANGE, "hatch": "///", "edgecolor": "#FFFFFF", "linewidth": 0}
        axes.bar(centres, wrong, 0.92 / bins, right, label="wrong", **striped)
        axes.set(xlim=(0, 1), xlabel="Stated confidence", ylabel="Inputs")
        few_ticks(axes.yaxis, 5)
        legend(axes, 2)

    alt = (
        f"Histogram of the stated confidence of {len(y)} test inputs: {int(sum(right))} right and "
        f"{int(sum(wrong))} wrong. The mean confidence is {float(probabilities.amax(1).mean()):.3f}; "
        f"it is 0.9 or more for {sure:.0%} of the inputs."
    )
    reading = "A model that knows its limits is wrong mostly where it was unsure, on the left."
    return plot("confidence", "How sure was it?", alt, reading, draw, 290)


def uncertainty_of_classes(predictive: ClassPredictive, y: Tensor) -> Plot:
    """Mean aleatoric and epistemic uncertainty of the right and of the wrong answers."""
    right = predictive.labels == y.reshape(-1)
    groups = [(name, mask) for name, mask in (("right", right), ("wrong", ~right)) if bool(mask.any())]
    parts = [(float(predictive.aleatoric[m].mean()), float(predictive.epistemic[m].mean())) for _, m in groups]
    names = [f"{name} ({int(mask.sum())})" for name, mask in groups]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        _stacked_bars(axes, names, parts)
        axes.set(xlabel="Mean uncertainty (nats)", ylabel="Answers that were")
        axes.invert_yaxis()

    said = "; ".join(
        f"for {name} answers {a:.3f} nats of noise in the data and {e:.3f} of doubt about the model"
        for (name, _), (a, e) in zip(groups, parts, strict=True)
    )
    reading = "Doubt should be larger where it was wrong. More records would shrink the doubt about the model only."
    return plot("uncertainty", "Where does its doubt come from?", f"Mean uncertainty: {said}.", reading, draw, 215)


def predicted_against_actual(
    predictive: RealPredictive, y: Tensor, level: float = 0.9, individuals: bool = True
) -> Plot:
    """Predictions with their intervals against the actual values.

    `individuals=False` shows means over groups of similar predictions, about twenty inputs or more in each,
    so that no single record of the test set can be read off the drawing.
    """
    most = MOST_POINTS if individuals else 10 * MOST_POINTS
    order = predictive.mean.argsort()
    order = order[:: math.ceil(len(order) / most)]
    few = predictive.some(order)
    rows = torch.stack([few.mean, *few.interval(level).unbind(-1), y.reshape(-1)[order].to(few.mean.dtype)])
    if not individuals:
        groups = rows.tensor_split(min(20, max(1, len(order) // 20)), dim=1)
        rows = torch.stack([group.mean(1) for group in groups], 1)
    mean, low, high, actual = rows.tolist()

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        reach = (min(*actual, *low), max(*actual, *high))
        axes.plot(reach, reach, color=GREY, linestyle=(0, (4, 3)), linewidth=1.2, label="ideal")
        axes.vlines(mean, low, high, color=SKY, linewidth=1.4, alpha=0.45, label=f"{level:.0%} interval")
        name = "actual value" if individuals else "mean of a group"
        axes.scatter(mean, actual, s=14, c=BLUE, zorder=3, label=name)
        axes.set(xlabel="Predicted", ylabel="Actual")
        legend(axes, 3)

    inside = metrics.coverage(predictive, y, level)
    shown = f"{len(mean)} inputs" if individuals else f"{len(mean)} groups of similar predictions"
    alt = (
        f"Actual against predicted values, {shown} shown. Over all {len(y)} test inputs the root mean "
        f"squared error is {metrics.rmse(predictive, y):.4g} and {inside:.1%} lie inside their {level:.0%} "
        "interval."
    )
    kind = "Dots" if individuals else "Dots, each the mean of a group of similar predictions,"
    reading = f"{kind} near the dashed line are good predictions. The bars are the {level:.0%} intervals."
    return plot("predicted", "Predicted against actual", alt, reading, draw, 610)


def coverage_curve(predictive: RealPredictive, y: Tensor) -> Plot:
    """Observed against stated coverage of the central intervals, for every level."""
    levels = [step / 20 for step in range(1, 20)]
    exact, actual = predictive.double(), y.reshape(-1).double()
    observed = [float(exact.inside(actual, level).double().mean()) for level in levels]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.plot((0, 1), (0, 1), color=GREY, linestyle=(0, (4, 3)), linewidth=1.2, label="ideal")
        axes.plot(levels, observed, color=BLUE, linewidth=2, marker="o", markersize=4, label="this model")
        axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="Stated level of the interval", ylabel="Share inside")
        legend(axes, 2)

    worst = max(range(len(levels)), key=lambda i: abs(observed[i] - levels[i]))
    alt = (
        f"Share of {len(y)} test inputs inside their interval against the stated level. At 50% it is "
        f"{observed[9]:.1%}, at 90% it is {observed[17]:.1%}; the largest gap is at {levels[worst]:.0%}, "
        f"where it is {observed[worst]:.1%}."
    )
    reading = "On the dashed line, intervals hold as often as they say. Below it, they are too narrow."
    return plot("coverage", "Are its intervals honest?", alt, reading, draw, 290)


def uncertainty_of_reals(predictive: RealPredictive, y: Tensor) -> Plot:
    """Aleatoric and epistemic variance from the surest quarter to the least sure, and the squared error."""
    quarters = [part for part in predictive.total.argsort().chunk(4) if len(part)]
    squared = (predictive.mean - y.reshape(-1)).double().square()
    parts = [(float(predictive.aleatoric[q].mean()), float(predictive.epistemic[q].mean())) for q in quarters]
    errors = [float(squared[q].mean()) for q in quarters]
    names = (
        ["surest", "second", "third", "least sure"]
        if len(quarters) == 4
        else [f"{i + 1}" for i in range(len(quarters))]
    )

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        _stacked_bars(axes, names, parts)
        axes.scatter(errors, range(len(errors)), s=36, c=VERMILION, marker="D", zorder=3, label="squared error")
        axes.set(xlabel="Variance (units of the target, squared)", ylabel="Quarter of inputs")
        axes.invert_yaxis()
        legend(axes, 3, 0.4)

    said = "; ".join(
        f"{name}: noise {a:.3g}, doubt {e:.3g}, squared error {s:.3g}"
        for name, (a, e), s in zip(names, parts, errors, strict=True)
    )
    reading = "Where the diamond lies beyond its bar, the model was more wrong than it expected."
    alt = f"Mean variance by quarter: {said}."
    return plot("uncertainty", "Where does its doubt come from?", alt, reading, draw, 250)


def epsilon_bars(bounds: Mapping[str, Bound], delta: float) -> Plot:
    """Epsilon by accountant: guarantees are solid bars, approximations hatched outlines."""
    rows = [(name, b) for name, b in bounds.items() if b.epsilon is not None and math.isfinite(b.epsilon)]
    values = [float(b.epsilon or 0.0) for _, b in rows]

    wide = bool(values) and max(values) > 8 * min(values)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for place, ((_, bound), value) in enumerate(zip(rows, values, strict=True)):
            axes.barh(place, value, 0.62, **(_SOLID if bound.sound else _HATCHED))
            axes.annotate(epsilon(value), (value, place), (5, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(rows)), [accountant(name).heading for name, _ in rows])
        axes.tick_params("y", length=0)
        axes.invert_yaxis()
        axes.set_xlabel(f"Epsilon at delta = {shown_delta(delta)}" + (", logarithmic" if wide else ""))
        if wide:
            logarithmic(axes, min(values) / 4, max(values) * 2.2)
        else:
            axes.set_xlim(0, 1.18 * max(values, default=1.0))
        key(axes, [("a guarantee", _SOLID), ("an approximation", _HATCHED)])

    said = ", ".join(
        f"{accountant(name).heading} {epsilon(value)} ({bound.kind})"
        for (name, bound), value in zip(rows, values, strict=True)
    )
    alt = f"Epsilon at delta {shown_delta(delta)} by accountant: {said or 'no accountant gives a finite number'}."
    reading = "Every guarantee holds; the smallest of them counts. An approximation may be smaller than the truth."
    return plot("epsilon", "Epsilon by accountant", alt, reading, draw, 110 + 38 * max(1, len(rows)))


def attacker_curve(tpr_at_fpr: Mapping[float, float], naive: Mapping[float, float] | None = None) -> Plot:
    """The largest share of members that a test can find, against its share of false alarms."""
    points = sorted((fpr, tpr) for fpr, tpr in tpr_at_fpr.items() if fpr > 0)
    loose = sorted((fpr, tpr) for fpr, tpr in (naive or {}).items() if fpr > 0)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        ends = (points[0][0], 1.0)
        axes.plot(ends, ends, color=GREY, linestyle=(0, (4, 3)), linewidth=1.2, label="guessing")
        if loose:
            axes.plot(
                *zip(*loose, strict=True),
                color=ORANGE,
                linestyle=(0, (1, 1.2)),
                linewidth=1.8,
                label="from epsilon alone",
            )
        style = {"marker": "o", "markersize": 5} if len(points) < 12 else {}
        axes.plot(*zip(*points, strict=True), color=BLUE, linewidth=2, label="strongest attacker", **style)
        axes.set(xscale="log", yscale="log", xlabel="False alarms", ylabel="Members found")
        axes.set(xlim=(ends[0], 1), ylim=(ends[0], 1.05))
        _percent_ticks(axes, ends[0])
        legend(axes, 3)

    shown = [pair for pair in points if pair[0] in (0.001, 0.01, 0.1)] or points[:3]
    said = "; ".join(
        f"at {100 * fpr:.3g}% false alarms at most {share_up(tpr, 2)} of the members" for fpr, tpr in shown
    )
    reading = "The nearer to the dashed line, the less an attacker gains over guessing. Both scales are logarithmic."
    alt = f"Bound on any attacker: {said}."
    return plot("attacker", "What the strongest attacker can find", alt, reading, draw, 300)


def _centres(table: metrics.Reliability) -> Tensor:
    return (table.edges[1:] + table.edges[:-1]) / 2


def _stacked_bars(axes: Any, names: Sequence[str], parts: Sequence[tuple[float, float]]) -> None:
    places = range(len(names))
    noise, doubt = [a for a, _ in parts], [e for _, e in parts]
    axes.barh(places, noise, 0.55, color=SKY, label="noise in the data")
    axes.barh(places, doubt, 0.55, noise, color=BLUE, label="doubt about the model")
    axes.set_yticks(places, names)
    axes.tick_params("y", length=0)
    legend(axes, 2, 0.4)


def _percent_ticks(axes: Any, lowest: float) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ticks = [10.0**k for k in range(math.floor(math.log10(lowest)), 1) if 10.0**k >= lowest * 0.999]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
