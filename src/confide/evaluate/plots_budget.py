"""Plots over several runs: what privacy costs in quality, how a budget was spent, and how methods compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from confide.errors import Refusal
from confide.evaluate.drawing import BLUE, GREY, ORANGE, SKY, VERMILION, Plot, legend, logarithmic, plot
from confide.wording import epsilon as shown


def privacy_utility(
    epsilons: Sequence[float],
    values: Sequence[float],
    errors: Sequence[float] | None = None,
    *,
    name: str = "Accuracy",
    without_privacy: float | None = None,
    baseline: float | None = None,
) -> Plot:
    """A measure of quality against epsilon, with one standard error, between what needs no data and what needs all."""
    if len(epsilons) != len(values) or not epsilons or min(epsilons) <= 0:
        raise Refusal(f"epsilons={epsilons}: need one above 0 for each of {len(values)} values")
    points = sorted(zip(epsilons, values, errors or [0.0] * len(values), strict=True))
    places, heights, bars = (list(column) for column in zip(*points, strict=True))

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.errorbar(
            places, heights, bars, color=BLUE, linewidth=2, marker="o", markersize=6, capsize=3, label="private"
        )
        for level, look, label in (
            (without_privacy, {"color": ORANGE, "linestyle": (0, (5, 2))}, "without privacy"),
            (baseline, {"color": GREY, "linestyle": (0, (1, 1.5))}, "without learning"),
        ):
            if level is not None:
                axes.axhline(level, linewidth=1.8, label=label, **look)
        axes.set(xlabel="Epsilon, logarithmic: smaller protects more", ylabel=name)
        logarithmic(axes, places[0] / 1.3, places[-1] * 1.3)
        legend(axes, 3)

    said = ", ".join(f"{height:.3g} at epsilon {place:g}" for place, height, _ in points)
    reading = "Where the curve flattens, a larger epsilon buys nothing. The bars are one standard error."
    return plot("utility", "What does privacy cost in quality?", f"{name}: {said}.", reading, draw, 320)


def budget_over_time(
    times: Sequence[Any],
    epsilons: Sequence[float],
    limit: float | None = None,
    *,
    title: str = "How was the budget spent?",
    identifier: str = "budget",
) -> Plot:
    """Epsilon spent after each charge, as a staircase under its ceiling. `times` are dates or numbers, in order."""
    if len(times) != len(epsilons) or not times:
        raise Refusal(f"times: need one for each of {len(epsilons)} values, at least one")

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        places = [*range(len(times)), len(times)]
        axes.fill_between(places, [*epsilons, epsilons[-1]], step="post", color=SKY, alpha=0.45, linewidth=0)
        axes.step(places, [*epsilons, epsilons[-1]], where="post", color=BLUE, linewidth=2, label="spent")
        if limit is not None:
            axes.axhline(limit, color=VERMILION, linewidth=1.8, linestyle=(0, (5, 2)), label="ceiling")
        day = f" on {times[0][:10]}, by time (UTC)" if _one_day(times) else ""
        axes.set(
            xlabel=f"Charge{day}", ylabel="Epsilon", ylim=(0, 1.12 * max(*epsilons, limit or 0)), xlim=(0, len(times))
        )
        few, dates = sorted({0, len(times) // 2, len(times) - 1}), _dates(times)
        axes.set_xticks([place + 0.5 for place in few], [dates[place] for place in few])
        legend(axes, 2)

    rest = "" if limit is None else f" The ceiling is {limit:g}."
    alt = f"Epsilon spent over {len(times)} charges, from {shown(epsilons[0])} to {shown(epsilons[-1])}.{rest}"
    refused = "" if limit is None else " A charge that would cross the ceiling is refused."
    reading = f"Every step is a charge, and none is ever given back.{refused}"
    return plot(identifier, title, alt, reading, draw, 290)


def plan_curve(values: Sequence[float], epsilons: Sequence[float], name: str, identifier: str, own: int) -> Plot:
    """Epsilon against one setting of a plan, the plan itself marked."""

    def draw(figure: Any) -> None:
        from matplotlib.ticker import NullLocator

        axes = figure.subplots()
        axes.plot(values, epsilons, color=BLUE, linewidth=2, marker="o", markersize=6)
        axes.scatter([values[own]], [epsilons[own]], s=90, c=VERMILION, marker="D", zorder=3, label="the plan")
        axes.set(xlabel=f"{name}, logarithmic", ylabel="Epsilon, logarithmic")
        logarithmic(axes, min(values) / 1.3, max(values) * 1.3)
        axes.set_xticks(list(values), [f"{value:.4g}" for value in values])
        axes.set_yscale("log")
        axes.set_yticks(list(epsilons), [shown(value) for value in epsilons])
        axes.yaxis.set_minor_locator(NullLocator())
        legend(axes, 1)

    said = ", ".join(f"{shown(epsilon)} at {value:.4g}" for value, epsilon in zip(values, epsilons, strict=True))
    reading = "Every point is a plan by itself, priced as a whole. Lower protects more."
    title = f"Epsilon against {name.lower()}"
    return plot(identifier, title, f"{title}: {said}.", reading, draw, 300)


def _dates(times: Sequence[Any]) -> list[str]:
    """Days, or times of the day where all are of one."""
    if not all(isinstance(time, str) for time in times):
        return [time.strftime("%d %b %Y") if hasattr(time, "strftime") else str(time)[:16] for time in times]
    return [time[11:] if _one_day(times) else time[:10] for time in times]


def _one_day(times: Sequence[Any]) -> bool:
    """Whether several texts such as "2026-01-31T12:00" name one day."""
    whole = len(times) > 1 and all(isinstance(time, str) and len(time) > 10 for time in times)
    return whole and len({time[:10] for time in times}) == 1


def method_points(
    names: Sequence[str],
    values: Sequence[float],
    errors: Sequence[float | None],
    *,
    name: str,
    title: str,
    reading: str,
    baseline: tuple[str, float] | None = None,
    best: str | None = None,
    identifier: str = "methods",
) -> Plot:
    """One measure of several methods with two standard errors to either side."""
    places = range(len(names))
    reaches = [2 * (error or 0.0) for error in errors]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        if baseline is not None:
            axes.axvline(baseline[1], color=GREY, linestyle=(0, (4, 3)), linewidth=1.4, label=baseline[0])
        for place, one, value, reach in zip(places, names, values, reaches, strict=True):
            colour, marker = (VERMILION, "D") if one == best else (BLUE, "o")
            label = "the best" if one == best else None
            axes.errorbar(
                value, place, xerr=reach or None, color=colour, marker=marker, markersize=7, capsize=3, label=label
            )
        axes.set_yticks(places, names)
        axes.tick_params("y", length=0)
        axes.set(xlabel=name, ylim=(len(names) - 0.5, -0.5))
        if baseline is not None or best is not None:
            legend(axes, 2, 0.4)

    said = ", ".join(
        f"{one} {value:.3g}" + (f" ± {error:.2g}" if error else "")
        for one, value, error in zip(names, values, errors, strict=True)
    )
    beside = "" if baseline is None else f" {baseline[0].capitalize()}: {baseline[1]:.3g}."
    span = 110 + 34 * max(1, len(names))
    return plot(identifier, title, f"{name} by method: {said}.{beside}", reading, draw, math.ceil(span))
