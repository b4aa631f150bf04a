"""A comparison as one HTML page: the verdict, the table with its uncertainty, and what comparing cost."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from confide import wording
from confide.privacy.events import merged
from confide.report.render import POLICY, figures, style, template
from confide.report.trail import event_rows, fact_rows, versions
from confide.wording import METRICS, epsilon, share

if TYPE_CHECKING:
    from confide.data.schema import Schema
    from confide.workflow.compare import Comparison
    from confide.workflow.ranking import Row


def render_comparison(found: Comparison, summary: Mapping[str, Any], schema: Schema) -> str:
    """The page as text. It stands alone: no network, no script, and every text from outside is escaped."""
    moment = datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0")
    page: str = template("comparison.html").render(
        style=style(),
        policy=POLICY,
        title=f"{len(found.rows)} methods on {summary['data']}",
        subtitle=f"The same budget for each, measured on the same test records. Written on {moment}.",
        seeded=found.seeded,
        lead=_lead(found),
        cost=_cost(found),
        columns=[METRICS[name] for name in found.columns],
        rows=[_row(row, found) for row in found.rows],
        note=_note(found),
        plots=figures(_plots(found)),
        not_run=list(found.not_run.items()),
        settings=_settings(found, summary),
        events=event_rows(merged(found.events)),
        public_facts=fact_rows(schema),
        versions=list(versions().items()),
        version=versions()["confide"],
        created=moment,
    )
    return page


def _lead(found: Comparison) -> str:
    best = found.rows[0]
    others = [row.method for row in found.rows[1:] if row.as_good]
    value, error = best.metrics[found.utility], best.errors[found.utility]
    if found.utility == "accuracy":
        said = f"was right {share(value)} of the time, give or take {share(error)} (one standard error)"
        beside = f"always naming the most frequent class is right {share(found.baseline)} of the time"
    else:
        off, error_shown = wording.number(value), wording.number(error)
        said = f"was typically off by {off}, give or take {error_shown} (one standard error)"
        beside = f"always naming the mean of the test records is off by {wording.number(found.baseline)}"
    near = f" The test records cannot tell it from {', '.join(others)}." if others else ""
    return f"{best.method} came out best: on {found.inputs:,} test records it {said}; {beside}.{near}"


def _cost(found: Comparison) -> str:
    if found.seeded:
        return "The noise came from a fixed seed, so no privacy is claimed for any of these fits."
    return (
        f"Each fit alone satisfies epsilon = {found.epsilon_each:g} at delta = {wording.delta(found.delta)}. But every "
        f"fit read the private records: the {found.fits} fits behind this page together satisfy epsilon = "
        f"{epsilon(found.total_epsilon)} at the same delta. Whoever publishes this page, or chooses a method by "
        "it, has spent that. No setting was tuned on the records: all of them follow from public rules."
    )


def _row(row: Row, found: Comparison) -> dict[str, Any]:
    cells = []
    for name in found.columns:
        shown = wording.measure(name, row.metrics[name])
        error = row.errors.get(name)
        spread = "" if error is None else wording.measure_spread(name, error)
        cells.append({"name": METRICS[name].short, "value": shown, "spread": spread})
    memory = "not known" if row.peak_mb is None else f"{row.peak_mb:.0f} MB"
    cells += [
        {"name": "Time", "value": f"{row.seconds:.1f} s", "spread": ""},
        {"name": "Memory", "value": memory, "spread": ""},
        {"name": "Stored", "value": f"{row.storage_mb * 1024:.0f} kB", "spread": ""},
    ]
    mark = "best" if row.best else "as good" if row.as_good else ""
    return {"method": row.method, "mark": mark, "cells": cells, "best": row.best}


def _note(found: Comparison) -> str:
    several = "and the scatter between fits" if max(row.fits for row in found.rows) > 1 else ""
    once = "" if several else " Each method was fitted once, so what fresh privacy noise would change is not in it."
    return (
        f"Measured on {found.inputs:,} test records ({found.source}), which the guarantee does not cover. ± is one "
        f"standard error over the test records{' ' + several if several else ''}.{once} “As good” means that the "
        "paired difference to the best is within two standard errors. Memory is the most that a fit held beyond what "
        "was in use when it began. Times and memory depend on the private records and are outside the guarantee."
    )


def _plots(found: Comparison) -> list[Any]:
    from confide.evaluate.plots_budget import method_points

    names, best = [row.method for row in found.rows], found.rows[0].method
    classes = found.utility == "accuracy"
    quality = method_points(
        names,
        [row.metrics[found.utility] for row in found.rows],
        [row.errors.get(found.utility) for row in found.rows],
        name="Share right" if classes else "Root mean squared error",
        title="How good are they?",
        reading="Further to the right is better." if classes else "Further to the left is better.",
        baseline=("without learning", found.baseline),
        best=best,
        identifier="quality",
    )
    measure = "ece" if classes else "coverage_90"
    honesty = method_points(
        names,
        [row.metrics[measure] for row in found.rows],
        [row.errors.get(measure) for row in found.rows],
        name="Expected calibration error" if classes else "Share inside the 90% intervals",
        title="How honest are they?",
        reading="Further to the left is better." if classes else "On the dashed line, intervals hold what they say.",
        baseline=None if classes else ("as stated", 0.9),
        best=best,
        identifier="honesty",
    )
    return [quality, honesty]


def _noise_of_target(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    alone, scale = summary["noise_scale_epsilon"], summary["noise_scale"]
    if alone is not None:
        said = f"learnt in each fit from one histogram of residuals, alone epsilon {wording.number(alone)}"
        return [("Noise of the target", said)]
    return [] if scale is None else [("Noise of the target", f"given, {wording.number(scale)} of half the range")]


def _settings(found: Comparison, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    widths = summary["hidden"]
    layers = "those of your own network" if widths is None else ", ".join(map(str, widths)) or "none: a linear model"
    return [
        ("Hidden layers", layers),
        ("Steps", wording.number(summary["steps"])),
        ("Expected batch", wording.number(float(summary["batch"]))),
        ("Clip", wording.number(float(summary["clip"]))),
        ("Noise multiplier", wording.number(float(summary["noise_multiplier"]))),
        *_noise_of_target(summary),
        ("Method settings", "each method's own defaults, which read public sizes alone"),
        ("Fits", wording.number(found.fits)),
    ]
