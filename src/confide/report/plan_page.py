"""An explorer of plans as one page: epsilon against noise, batch and epochs, with what an attacker can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from confide import wording
from confide.evaluate.drawing import Plot
from confide.evaluate.plots_budget import plan_curve
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.privacy.statement import Privacy
from confide.report.sheet import Sheet, SheetSection, SheetTable, cells
from confide.report.verdict import Card
from confide.wording import epsilon, share_up, up

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the plan's own value, along every axis: each step halves or doubles it."""


@dataclass(frozen=True)
class PlanPoint:
    """One plan near the given one, and what it costs."""

    value: float
    epsilon: float
    right: float
    found: float
    own: bool


def render_plan(plan: Plan) -> str:
    """The page as text. No data is read for it."""
    mechanism, steps = plan.mechanism, plan.steps
    noisier = [(f, replace(mechanism, noise_multiplier=mechanism.noise_multiplier * f), steps) for f in FACTORS]
    longer = [(f, mechanism, max(1, round(steps * f))) for f in FACTORS]
    axes = [
        ("noise", "Noise multiplier", "More noise, at the same steps and batch", _points(plan, noisier, _noise)),
        (
            "epochs",
            "Epochs",
            "More passes, at the same noise and batch",
            _points(plan, longer, _epochs),
        ),
    ]
    if mechanism.sampling != "full-batch":
        larger = [(f, _with_batch(mechanism, f), max(1, round(steps / f))) for f in FACTORS if mechanism.rate * f < 1]
        batches = _points(plan, larger, lambda one, _: one.expected_batch)
        axes.insert(1, ("batch", "Expected batch", "Larger batches, at the same noise and epochs", batches))
    own = next(point for point in axes[0][3] if point.own)
    return Sheet(
        "Plan of a private run",
        f"Epsilon {epsilon(own.epsilon)} at delta {wording.delta(plan.delta)}",
        f"{plan.records:,} records, {steps:,} steps of about {wording.number(plan.expected_batch)}. No data was read.",
        _lead(plan, own),
        _cards(plan, own),
        [
            SheetSection(
                f"Epsilon against {name}",
                f"{text}. Everything else is as planned.",
                [_curve(name, title, points)],
                [_table(title, points)],
            )
            for name, title, text, points in axes
        ],
    ).html()


def _curve(name: str, title: str, points: Sequence[PlanPoint]) -> Plot:
    own = next(place for place, point in enumerate(points) if point.own)
    values, epsilons = [point.value for point in points], [point.epsilon for point in points]
    return plan_curve(values, epsilons, title, f"plan-{name}", own)


def _noise(mechanism: SampledGaussian, steps: int) -> float:
    return mechanism.noise_multiplier


def _epochs(mechanism: SampledGaussian, steps: int) -> float:
    return mechanism.rate * steps


def _with_batch(mechanism: SampledGaussian, factor: float) -> SampledGaussian:
    """With so many times the batch, a whole number of records."""
    if factor == 1:
        return mechanism
    return replace(mechanism, rate=max(1, round(mechanism.expected_batch * factor)) / mechanism.records)


def _points(
    plan: Plan,
    near: Sequence[tuple[float, SampledGaussian, int]],
    value: Callable[[SampledGaussian, int], float],
) -> list[PlanPoint]:
    """What these plans cost; the plan itself is priced as it is."""
    found = []
    for factor, mechanism, steps in near:
        events = plan.events() if factor == 1 else (mechanism.event(steps),)
        privacy = Privacy(events, plan.delta, plan.adjacency)
        attacker = privacy.attacker()
        size = value(mechanism, steps)
        found.append(PlanPoint(size, privacy.epsilon(), attacker.accuracy, attacker.tpr_at_fpr[0.01], factor == 1))
    return found


def _lead(plan: Plan, own: PlanPoint) -> str:
    return (
        f"With a noise multiplier of {up(plan.mechanism.noise_multiplier, decimals=4)} this run satisfies epsilon = "
        f"{epsilon(own.epsilon)} at delta = {wording.delta(plan.delta)}. An attacker who knows every other record, "
        "asked "
        f"whether a given one was used, is right at most {share_up(own.right)} of the time; a coin toss is right "
        f"50% of the time. At 1% false alarms at most {share_up(own.found)} of the members are found."
    )


def _cards(plan: Plan, own: PlanPoint) -> list[Card]:
    mechanism = plan.mechanism
    return [
        Card("Noise multiplier", up(mechanism.noise_multiplier, decimals=4), "Standard deviation over the clip."),
        Card(
            "Privacy loss ε",
            epsilon(own.epsilon),
            f"Proven, at delta {wording.delta(plan.delta)}, {plan.adjacency}.",
        ),
        Card("Attacker right at most", share_up(own.right), "When both answers are equally likely."),
    ]


def _table(title: str, points: Sequence[PlanPoint]) -> SheetTable:
    rows = tuple(
        cells(
            f"{wording.number(round(point.value, 6))}{' (the plan)' if point.own else ''}",
            epsilon(point.epsilon),
            share_up(point.right),
            share_up(point.found, 2),
        )
        for point in points
    )
    columns = (title, "Epsilon", "Attacker right at most", "Members found at 1% false alarms")
    return SheetTable("What an attacker can do", "", columns, rows, (1, 2, 3))
