"""Ermis and Cemgil's own settings, with their noise under both composition rules, priced soundly; learning curves.

Rates fall as eta_0 / t^gamma with gamma = 1, gradients are clipped layer by layer to 2 together, and the noise is what
the paper computes for epsilon 1 by advanced composition (AC) and by zero-concentrated privacy (zCDP).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from confide.papers.base import COLOURS, Cell, Context, Figure, PaperMeasure, PaperOutcome, PaperTable
from confide.papers.dp_variational_dropout.fits import DELTA, pixels, quality
from confide.papers.sets import Set

RULES = ("AC", "zCDP", "not private")
CLIP, DECAY = 2.0, 1.0
"""The paper's bound on gradients and power of the step."""


@dataclass(frozen=True)
class PrintedSetting:
    """As printed for one data set: units, batch as a share of the records, passes, first rate, noise of each rule."""

    units: int
    share: float
    passes: float
    rate: float
    noise: dict[str, float]
    stated: dict[str, float | None]


PRINTED = {
    "digits": PrintedSetting(
        1000, 0.05, 100, 0.05, {"AC": 9.73, "zCDP": 2.97}, {"AC": None, "zCDP": None, "not private": 0.9535}
    ),
    "mnist": PrintedSetting(
        1000, 0.01, 200, 0.1, {"AC": 8.24, "zCDP": 2.68}, {"AC": None, "zCDP": None, "not private": 0.9780}
    ),
}


def run_printed(context: Context, name: str) -> PaperOutcome:
    """Rows of both rules and without noise, and figures 1, 2 and 4: accuracy on a public part over the passes."""
    data, setting = pixels(name, context), PRINTED[name]
    held = len(data.x_test) // 2
    rows: list[tuple[Cell, ...]] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    for rule in RULES:
        runs = [_run(data, setting, rule, context, seed, held) for seed in context.seeds]
        spent = max(epsilon for _, _, epsilon in runs)
        rows.append((rule, setting.stated[rule], PaperMeasure(tuple(one for one, _, _ in runs)), spent))
        curves[rule] = runs[0][1]
        context.progress(f"as printed on {name}", len(rows), len(RULES))
    units, passes = _sizes(setting, context)
    table = PaperTable(
        f"{name.upper()}, variational dropout as printed, noise of the paper's rules for epsilon 1",
        ("rule", "paper", "ours", "sound epsilon"),
        tuple(rows),
        (
            f"{units} hidden units, batches of {setting.share:g} of the records, {passes:g} passes, rate "
            f"{setting.rate:g} / t^{DECAY:g}, clip {CLIP:g} shared by the layers, delta {DELTA:g}; seeds "
            f"{', '.join(map(str, context.seeds))}. Accuracy is on the last {len(data.x_test) - held} test images; the "
            f"curves are on the first {held}, which are public.",
            "Rounds are read as steps. Rates that fall as 1 / t add up to few first rates however many passes follow.",
            *data.notes,
        ),
    )
    return PaperOutcome((table,), (_figure(name, curves),))


def _sizes(setting: PrintedSetting, context: Context) -> tuple[int, float]:
    return (50, 4.0) if context.quick else (setting.units, setting.passes)


def _run(
    data: Set, setting: PrintedSetting, rule: str, context: Context, seed: int, held: int
) -> tuple[float, list[tuple[float, float]], float]:
    """Accuracy on the measured half, the curve on the public half, and the sound epsilon."""
    from confide.mechanism.plan import plan
    from confide.methods.variational_dropout import VariationalDropout
    from confide.models.networks import mlp
    from confide.running.fit import fit

    units, passes = _sizes(setting, context)
    batch = max(1, round(setting.share * data.records))
    facts: dict[str, Any] = {"delta": DELTA, "records": data.records, "batch": batch, "epochs": passes, "clip": CLIP}
    noise = setting.noise.get(rule)
    privacy: dict[str, Any] = {"private": False} if noise is None else {"noise_multiplier": noise}
    made = plan(**facts, **privacy, clipping="per-layer")
    method = VariationalDropout(optimiser="sgd", learning_rate=setting.rate, decay=DECAY, weight=0.0)
    network = mlp(data.x.shape[1], 10, (units,), "tanh", torch.Generator().manual_seed(seed))
    public = (data.x_test[:held], data.y_test[:held])
    curve: list[tuple[float, float]] = []

    def look(moment: Any) -> None:
        curve.append((moment.step * batch / data.records, moment.metrics["accuracy"]))

    run = fit(method, network, data.private(context), made, seed=seed, callbacks=[look], validation=public)
    measured = replace(data, x_test=data.x_test[held:], y_test=data.y_test[held:])
    return quality(run.posterior, measured)[0], curve, run.privacy.epsilon()


def _figure(name: str, curves: dict[str, list[tuple[float, float]]]) -> Figure:
    def draw(canvas: Any) -> None:
        axes = canvas.subplots()
        for place, (rule, points) in enumerate(curves.items()):
            axes.plot([at for at, _ in points], [right for _, right in points], color=COLOURS[place], label=rule)
        axes.set(xlabel="passes", ylabel="accuracy on a public part")
        axes.legend()

    return Figure(f"curves-{name}", f"Learning curves as printed, {name} (figures 1, 2 and 4)", draw)
