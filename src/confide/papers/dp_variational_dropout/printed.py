"""Ermis and Cemgil's own settings: their noise under both composition rules, priced soundly, and sound noise beside it.

Rates of private models fall as eta_0 / t^gamma with gamma = 1, and gradients are clipped layer by layer to 2 together.
The paper states its noise for epsilon 1, by advanced composition (AC) and by zero-concentrated privacy (zCDP), as
sigma, with a deviation of 2 C sigma on a sum of gradients. Its figures 1, 2 and 4 have other epsilons, whose sigma it
does not state: those rows have the noise that is sound for them, by PLD or, for AC, by advanced composition itself.
Figure 5 changes one setting at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from confide.papers.base import COLOURS, Cell, Context, Figure, PaperMeasure, PaperOutcome, PaperTable
from confide.papers.dp_variational_dropout.fits import DELTA, DRAWS, pixels, quality
from confide.papers.dp_variational_dropout.rules import RUNS, advanced_noise
from confide.papers.sets import Set

DECAY = 1.0
"""The paper's power of the step."""
OPEN = "not private"
MNIST_RECORDS = 60_000
CURVE_IMAGES = 1000
"""Of the public half, on which a curve is measured."""
AC_EPSILONS = (10.0, 0.1)
"""Of AC's rows whose sigma the paper does not state."""
SIGMAS = {one.name.lower(): {"AC": one.advanced, "zCDP": one.zcdp} for one in RUNS}
"""For epsilon 1, as stated."""
STATED: Mapping[str, Mapping[str, float]] = {
    "digits": {
        "AC": 0.9139,
        "AC, sound, epsilon 10": 0.9361,
        "AC, sound, epsilon 0.1": 0.8217,
        "zCDP": 0.9278,
        "sound, epsilon 10": 0.9417,
        "sound, epsilon 1": 0.9278,
        "sound, epsilon 0.1": 0.9038,
        OPEN: 0.9535,
    },
    "mnist": {
        "AC": 0.9102,
        "AC, sound, epsilon 10": 0.9462,
        "AC, sound, epsilon 0.1": 0.8419,
        "zCDP": 0.9327,
        "sound, epsilon 10": 0.9687,
        "sound, epsilon 1": 0.9327,
        "sound, epsilon 0.1": 0.9026,
        OPEN: 0.9780,
    },
}
"""Table 1; beside noise by PLD stands what the paper has by zCDP at that epsilon."""


@dataclass(frozen=True)
class PrintedSetting:
    """As printed: hidden units, batch as a share of the records, passes, first rate, bound on gradients."""

    units: int
    share: float
    passes: float
    rate: float
    clip: float = 2.0


PRINTED = {"digits": PrintedSetting(1000, 0.05, 100, 0.05), "mnist": PrintedSetting(1000, 0.01, 200, 0.1)}
EFFECTS: Mapping[str, tuple[float, ...]] = {
    "units": (200, 500, 1000, 2000),
    "passes": (50, 100, 200, 400),
    "clip": (1, 2, 4, 6),
    "batch": (100, 300, 600, 1200),
}
"""Figure 5, on MNIST at epsilon 1; the paper prints no numbers, but the ranges of the first three."""


@dataclass(frozen=True)
class PrintedRun:
    """Accuracy on the measured half of the test part, (passes, accuracy) on its public half, and the sound epsilon."""

    accuracy: float
    curve: tuple[tuple[float, float], ...]
    epsilon: float


def run_printed(context: Context, name: str) -> PaperOutcome:
    """Rows of both rules, of sound noise and without noise, and figures 1, 2 and 4: accuracy over the passes."""
    data, setting = pixels(name, context), _sized(PRINTED[name], context)
    held = len(data.x_test) // 2
    rows: list[tuple[Cell, ...]] = []
    curves: dict[str, tuple[tuple[float, float], ...]] = {}
    asked = _asked(name, context)
    for rule, privacy in asked.items():
        runs = [printed_run(data, setting, privacy, context, seed, held) for seed in context.seeds]
        accuracy = PaperMeasure(tuple(one.accuracy for one in runs))
        rows.append((rule, STATED[name][rule], accuracy, max(one.epsilon for one in runs)))
        curves[rule] = runs[0].curve
        context.progress(f"as printed on {name}", len(rows), len(asked))
    table = PaperTable(
        f"{name.upper()}, variational dropout as printed",
        ("noise", "paper", "ours", "sound epsilon"),
        tuple(rows),
        (
            f"{_told(setting)}, seeds {_seeds(context)}. {_measured_on(data, held)}",
            "AC, zCDP: the sigma that the paper states for epsilon 1, of which its noise is 2 C sigma. Sound: noise by "
            "PLD, add/remove; AC, sound: by advanced composition with sampling, which wastes what its sound epsilon is "
            "below the one in its name. Rounds are read as steps, and gradients as means over the batch. "
            f"{_reach(setting, rows)}",
            *data.notes,
        ),
    )
    return PaperOutcome((table,), (_figure(name, curves),))


def _reach(setting: PrintedSetting, rows: Sequence[tuple[Cell, ...]]) -> str:
    """How far falling rates carry private rows, and where those ended."""
    steps = round(setting.passes / setting.share)
    rates = math.fsum(step**-DECAY for step in range(1, steps + 1))
    means = [cell.mean for rule, _, cell, _ in rows if rule != OPEN and isinstance(cell, PaperMeasure)]
    return (
        f"The rates of {steps} steps that fall as 1 / t^{DECAY:g} add up to {rates:.3g} first rates: private rows end "
        f"between {min(means):.3f} and {max(means):.3f}."
    )


def _asked(name: str, context: Context) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {rule: {"noise_multiplier": 2 * sigma} for rule, sigma in SIGMAS[name].items()}
    for epsilon in AC_EPSILONS[:1] if context.quick else AC_EPSILONS:
        found[f"AC, sound, epsilon {epsilon:g}"] = {"noise_multiplier": advanced_noise(name, epsilon)}
    for epsilon in (1.0,) if context.quick else (10.0, 1.0, 0.1):
        found[f"sound, epsilon {epsilon:g}"] = {"epsilon": epsilon}
    return found | {OPEN: {"private": False}}


def run_effects(context: Context) -> PaperOutcome:
    """Figure 5: hidden units, passes, clip and batch, one at a time, at a sound epsilon of 1."""
    data, base = pixels("mnist", context), _sized(PRINTED["mnist"], context)
    held = len(data.x_test) // 2
    rows: list[tuple[Cell, ...]] = []
    points: dict[str, list[tuple[float, PaperMeasure]]] = {}
    every = [(name, value) for name, values in EFFECTS.items() for value in (values[1:3] if context.quick else values)]
    known: dict[PrintedSetting, list[PrintedRun]] = {}  # each setting varies around one that all four have
    for name, value in every:
        setting = _sized(_changed(PRINTED["mnist"], name, value), context)
        if setting not in known:
            known[setting] = [
                printed_run(data, setting, {"epsilon": 1.0}, context, seed, held) for seed in context.seeds
            ]
        runs = known[setting]
        accuracy = PaperMeasure(tuple(one.accuracy for one in runs))
        rows.append((f"{name} {value:g}", None, accuracy, max(one.epsilon for one in runs)))
        points.setdefault(name, []).append((value, accuracy))
        context.progress("effects", len(rows), len(every))
    table = PaperTable(
        "MNIST, hidden units, passes, clip and batch (figure 5; the paper prints no numbers)",
        ("setting", "paper", "ours", "sound epsilon"),
        tuple(rows),
        (
            f"Where one setting varies the others are: {_told(base)}; seeds {_seeds(context)}. "
            f"{_measured_on(data, held)}",
            *(["The quick run has a hundredth of the passes and a twentieth of the units."] if context.quick else []),
            *data.notes,
        ),
    )
    return PaperOutcome((table,), (_effects_figure(points),))


def _changed(setting: PrintedSetting, name: str, value: float) -> PrintedSetting:
    changed: Mapping[str, PrintedSetting] = {
        "units": replace(setting, units=int(value)),
        "passes": replace(setting, passes=float(value)),
        "clip": replace(setting, clip=float(value)),
        "batch": replace(setting, share=value / MNIST_RECORDS),
    }
    return changed[name]


def _sized(setting: PrintedSetting, context: Context) -> PrintedSetting:
    return replace(setting, units=setting.units // 20, passes=setting.passes / 100) if context.quick else setting


def _told(setting: PrintedSetting) -> str:
    return (
        f"{setting.units} hidden ReLU units, batches of {setting.share:g} of the records, {setting.passes:g} passes, "
        f"rate {setting.rate:g} / t^{DECAY:g} (constant where nothing is private), clip {setting.clip:g} shared by the "
        f"layers, delta {DELTA:g}"
    )


def _measured_on(data: Set, held: int) -> str:
    return (
        f"Accuracy is on the last {len(data.x_test) - held} test images; learning curves, of the first seed, are on "
        f"{min(held, CURVE_IMAGES)} of the first {held}, which are public."
    )


def _seeds(context: Context) -> str:
    return ", ".join(map(str, context.seeds))


def printed_run(
    data: Set, setting: PrintedSetting, privacy: Mapping[str, Any], context: Context, seed: int, held: int
) -> PrintedRun:
    """One fit; the first `held` test images are public, and the curve is theirs."""
    curved = seed == context.seeds[0]  # one curve is drawn, and a look costs as much as many steps
    what = ("dp-variational-dropout", data.name, setting, privacy, seed, held, curved)
    return context.part(PrintedRun, what, lambda: _printed_run(data, setting, privacy, context, seed, held, curved))


def _printed_run(
    data: Set,
    setting: PrintedSetting,
    privacy: Mapping[str, Any],
    context: Context,
    seed: int,
    held: int,
    curved: bool,
) -> PrintedRun:
    from confide.mechanism.plan import plan
    from confide.methods.variational_dropout import VariationalDropout
    from confide.models.networks import mlp
    from confide.running.fit import fit

    batch = max(1, round(setting.share * data.records))
    facts: dict[str, Any] = {"delta": DELTA, "records": data.records, "batch": batch, "epochs": setting.passes}
    made = plan(**facts, **privacy, clip=setting.clip, clipping="per-layer")
    decay = DECAY if made.mechanism.private else 0.0  # which the paper has for its private models alone
    method = VariationalDropout(
        optimiser="sgd", learning_rate=setting.rate, decay=decay, weight=0.0, predictive_draws=DRAWS
    )
    network = mlp(data.x.shape[1], 10, (setting.units,), "relu", torch.Generator().manual_seed(seed))
    shown = min(held, CURVE_IMAGES)
    public = (data.x_test[:shown], data.y_test[:shown])
    curve: list[tuple[float, float]] = []

    def look(moment: Any) -> None:
        curve.append((moment.step * batch / data.records, moment.metrics["accuracy"]))

    looks = [look] if curved else []
    run = fit(method, network, data.private(context), made, seed=seed, callbacks=looks, validation=public)
    measured = replace(data, x_test=data.x_test[held:], y_test=data.y_test[held:])
    return PrintedRun(quality(run.posterior, measured)[0], tuple(curve), run.privacy.epsilon())


def _figure(name: str, curves: Mapping[str, tuple[tuple[float, float], ...]]) -> Figure:
    def draw(canvas: Any) -> None:
        axes = canvas.subplots()
        for place, (rule, points) in enumerate(curves.items()):
            style: dict[str, Any] = {
                "color": COLOURS[place % len(COLOURS)],
                "linestyle": "-" if place < len(COLOURS) else "--",
            }
            axes.plot([at for at, _ in points], [right for _, right in points], label=rule, **style)
        axes.set(xlabel="passes", ylabel="accuracy on a public part")
        axes.legend()

    return Figure(f"curves-{name}", f"Learning curves as printed, {name} (figures 1, 2 and 4)", draw)


def _effects_figure(points: Mapping[str, list[tuple[float, PaperMeasure]]]) -> Figure:
    def draw(canvas: Any) -> None:
        for axes, (name, found) in zip(canvas.subplots(2, 2, sharey=True).flat, points.items(), strict=True):
            deviations = [one.deviation or 0.0 for _, one in found]
            axes.errorbar([at for at, _ in found], [one.mean for _, one in found], deviations, marker="o", capsize=3)
            axes.set(xlabel=name)
        canvas.supylabel("test accuracy")

    return Figure("effects", "Hidden units, passes, clip and batch at epsilon 1 (figure 5)", draw, (8.0, 6.0))
