"""Variational dropout whose noise is the privacy noise, at a sound epsilon, beside the paper's figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from confide.papers.base import (
    COLOURS,
    MARKERS,
    Cell,
    Context,
    Experiment,
    Figure,
    Paper,
    PaperMeasure,
    PaperOutcome,
    PaperTable,
)
from confide.papers.dp_variational_dropout.claims import CLAIMS
from confide.papers.dp_variational_dropout.fits import (
    DELTA,
    DRAWS,
    DROPOUT,
    METHODS,
    SGD,
    SVI,
    DropoutScores,
    DropoutSetting,
    figures,
    fitted,
    images,
    measured,
    pixels,
    pruned,
    quality,
    scattering,
)
from confide.papers.dp_variational_dropout.printed import PRINTED, run_effects, run_printed
from confide.papers.dp_variational_dropout.rules import run_composition
from confide.papers.dp_variational_dropout.trials import settled
from confide.papers.mnist_cnn import DESCRIPTION
from confide.papers.protocol import ASSUMED_PUBLIC, CHOSEN_ON
from confide.papers.sets import Set
from confide.posteriors.base import Posterior
from confide.posteriors.variational import DiagonalGaussian
from confide.privacy.accountants.profiles import gaussian_mu

EPSILONS = (10.0, 1.0, 0.1)
PAPER_ACCURACY: Mapping[str, Mapping[str, tuple[float, float, float]]] = {
    "mnist": {
        DROPOUT: (0.9687, 0.9327, 0.9026),
        SVI: (0.9518, 0.9126, 0.8791),
        SGD: (0.9701, 0.9305, 0.8875),
    },
    "digits": {
        DROPOUT: (0.9417, 0.9278, 0.9038),
        SVI: (0.9375, 0.9107, 0.8712),
        SGD: (0.9450, 0.9265, 0.8943),
    },
}
"""Table 1 at epsilon 10, 1 and 0.1; variational dropout and SVI by the paper's zCDP rule."""
CNN, WIDE = "mnist-cnn", "mnist-wide"
PRINTED_UNITS = PRINTED["mnist"].units
Curve: TypeAlias = list[tuple[float, PaperMeasure, float]]

_TRIED: Mapping[str, Mapping[float, DropoutSetting]] = {
    "mnist": {
        10.0: DropoutSetting((64,), 2048, 25, 3.0, 0.3),
        1.0: DropoutSetting((64,), 4096, 15, 6.0, 0.25),
        0.1: DropoutSetting((64,), 4096, 6, 3.0, 0.15),
    },
    CNN: {
        10.0: DropoutSetting(None, 2048, 4, 2.0, 0.3),
        1.0: DropoutSetting(None, 2048, 4, 2.0, 0.3),
        0.1: DropoutSetting(None, 4096, 3, 2.0, 0.1),
    },
    "digits": {
        10.0: DropoutSetting((), 360, 40, 2.0, 0.3),
        1.0: DropoutSetting((), 360, 10, 1.0, 0.5),
        0.1: DropoutSetting((), 360, 4, 1.0, 0.1),
    },
}
SETTINGS: Mapping[str, Mapping[float, DropoutSetting]] = {
    **_TRIED,
    WIDE: {epsilon: replace(one, hidden=(PRINTED_UNITS,)) for epsilon, one in _TRIED["mnist"].items()},
}
QUICK: Mapping[str, DropoutSetting] = {
    WIDE: DropoutSetting((64,), 360, 5, 2.0, 0.3),
    "mnist": DropoutSetting((16,), 360, 5, 2.0, 0.3),
    CNN: DropoutSetting(None, 360, 5, 2.0, 0.3),
    "digits": DropoutSetting((16,), 360, 5, 2.0, 0.3),
}
FEATURES = DropoutSetting((), 7200, 14.4, 0.5, 60.0)
QUICK_FEATURES = DropoutSetting((), 360, 8, 0.3, 20.0)
SPARSE_WEIGHTS = (0.0, 0.3, 1.0)

DIVERGENCE_NOTE = (
    "The divergence from the log-uniform prior has weight 0 in these rows (training at given noise, as with a fixed "
    "dropout rate); the table of sparsity shows what its weight does."
)
MOMENTUM_NOTE = (
    "All weights are clipped as one vector, momentum 0.9 as post-processing; dropout noise zeta is the privacy noise "
    f"of one step, {DRAWS} draws for a prediction."
)
SOUND_NOTE = (
    "The paper's epsilon is not the sound one of what it ran: its algorithm carries a parameter without noise and "
    "releases noisy copies of it, and its batches are clipped layer by layer as if together (see composition)."
)


def run_mnist_cnn(context: Context) -> PaperOutcome:
    notes = (
        f"CNN: {DESCRIPTION}. {MOMENTUM_NOTE} The paper's network has one hidden layer, as in the experiment mnist.",
        DIVERGENCE_NOTE,
        SOUND_NOTE,
    )
    return _accuracy(CNN, "MNIST, CNN (paper's table 1)", context, notes)


def run_mnist(context: Context) -> PaperOutcome:
    notes = (MOMENTUM_NOTE, DIVERGENCE_NOTE, SOUND_NOTE)
    return _accuracy("mnist", "MNIST, one hidden layer (paper's table 1)", context, notes)


def run_wide(context: Context) -> PaperOutcome:
    notes = (
        "As in the experiment mnist, with as many hidden units as the paper has; at epsilon 1 alone, for its time.",
        DIVERGENCE_NOTE,
        SOUND_NOTE,
    )
    return _accuracy(WIDE, "MNIST, hidden units as printed (paper's table 1)", context, notes)


def run_digits(context: Context) -> PaperOutcome:
    data = pixels("digits", context)
    deviation = math.sqrt(0.07 * 0.93 / len(data.y_test))
    notes = (
        f"At {data.records} records the noise in each of T steps on the mean gradient is about C sqrt(T) / "
        f"({data.records} mu) per coordinate, with mu the budget in Gaussian terms, and the clip C and the steps that "
        f"trials lie around: {'; '.join(_noise_amounts(data, context))}. A hidden layer has more coordinates, and all "
        "of them are noised.",
        f"{len(data.y_test)} test records, so an accuracy of 0.93 has a standard error of {deviation:.3f}. "
        f"scikit-learn's logistic regression, not private, reaches {_not_private(data):.3f} on the test part.",
        DIVERGENCE_NOTE,
        SOUND_NOTE,
    )
    return _accuracy("digits", "DIGITS (paper's table 1)", context, notes)


def _noise_amounts(data: Set, context: Context) -> list[str]:
    """By epsilon, from the settings."""
    told = []
    for epsilon in EPSILONS:
        setting, mu = _middle("digits", epsilon, context), gaussian_mu(epsilon, DELTA)
        steps = setting.epochs * data.records / min(setting.batch, data.records)
        amount = setting.clip * math.sqrt(steps) / (data.records * mu)
        told.append(f"{amount:.2g} at epsilon {epsilon:g} (mu {mu:.2g}, T {steps:.0f})")
    return told


def _not_private(data: Set) -> float:
    from sklearn.linear_model import LogisticRegression

    fitted_open = LogisticRegression(max_iter=2000).fit(data.x.numpy(), data.y.numpy())
    return float(fitted_open.score(data.x_test.numpy(), data.y_test.numpy()))


def _told(setting: DropoutSetting) -> str:
    """The settings of a row, in its row."""
    hidden = "CNN" if setting.hidden is None else "-".join(map(str, setting.hidden)) or "no"
    sizes = f"{hidden} hidden, batch {setting.batch}, {setting.epochs:g} passes"
    return f"{sizes}, clip {setting.clip:g}, rate {setting.rate:g}"


def _accuracy(name: str, title: str, context: Context, notes: tuple[str, ...]) -> PaperOutcome:
    data = images(context) if name == CNN else pixels("digits" if name == "digits" else "mnist", context)
    paper = PAPER_ACCURACY["digits" if name == "digits" else "mnist"]
    taken = settled(name, data, _middles(name, context), context)
    rows: list[tuple[Cell, ...]] = []
    curves: dict[str, Curve] = {}
    for method_name, place in _asked(name, context):
        epsilon = EPSILONS[place]
        setting = replace(_middle(name, epsilon, context), **taken.of(method_name, f"{epsilon:g}"))
        found = [figures(data, method_name, setting, epsilon, context, seed) for seed in context.seeds]
        accuracy, stated = measured(found, "accuracy"), paper[method_name][place]
        curves.setdefault(method_name, []).append((epsilon, accuracy, stated))
        spent = max(one.epsilon for one in found)
        cells = (stated, accuracy, spent, measured(found, "ece"), _told(setting), ASSUMED_PUBLIC)
        rows.append((method_name, f"epsilon {epsilon:g}", *cells))
        context.progress(name, len(rows), len(_asked(name, context)))
    columns = ("method", "target", "paper", "ours", "sound epsilon", "ECE", "settings", CHOSEN_ON)
    table = PaperTable(title, columns, tuple(rows), (taken.note, *notes, *data.notes))
    caption = "Test accuracy against epsilon, delta = 1e-5; ours at a sound epsilon, the paper's (dashed) at its own."
    figure = Figure(f"accuracy-{name}", caption, lambda drawing: _draw_accuracy(drawing, curves))
    return PaperOutcome((table, taken.table(("method", "epsilon asked for"))), (figure,))


def _middle(name: str, epsilon: float, context: Context) -> DropoutSetting:
    return QUICK[name] if context.quick else SETTINGS[name][epsilon]


def _middles(name: str, context: Context) -> dict[tuple[str, float], DropoutSetting]:
    """By method and epsilon: what the trials lie around, the same for all methods."""
    asked = ((method_name, EPSILONS[place]) for method_name, place in _asked(name, context))
    return {(method_name, epsilon): _middle(name, epsilon, context) for method_name, epsilon in asked}


def _asked(name: str, context: Context) -> list[tuple[str, int]]:
    """Methods and places in EPSILONS; for their time, baselines of the convolutional network run at epsilon 1 alone,
    and so does the wide one."""
    places = range(len(EPSILONS) - 1 if context.quick else len(EPSILONS))
    every = [(method_name, place) for method_name in METHODS for place in places]
    if name == WIDE:
        return [(DROPOUT, EPSILONS.index(1.0))]
    return [(method, place) for method, place in every if name != CNN or method == DROPOUT or EPSILONS[place] == 1]


def _draw_accuracy(figure: Any, curves: Mapping[str, Curve]) -> None:
    axes = figure.subplots()
    for place, (method_name, points) in enumerate(curves.items()):
        epsilons = [epsilon for epsilon, _, _ in points]
        style: dict[str, Any] = {"color": COLOURS[place], "marker": MARKERS[place]}
        means, deviations = [one.mean for _, one, _ in points], [one.deviation or 0.0 for _, one, _ in points]
        axes.errorbar(epsilons, means, deviations, capsize=3, label=method_name, **style)
        stated = [accuracy for _, _, accuracy in points]
        axes.plot(epsilons, stated, linestyle="--", alpha=0.6, fillstyle="none", label=f"{method_name}, paper", **style)
    axes.set(xscale="log", xlabel="epsilon", ylabel="test accuracy")
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.minorticks_off()
    axes.legend(fontsize=8)


def run_features(context: Context) -> PaperOutcome:
    """The same method with one layer of weights, on features that no private record was used for."""
    data = scattering(context)
    setting = QUICK_FEATURES if context.quick else FEATURES
    found = [fitted(data, DROPOUT, setting, 1.0, context, seed) for seed in context.seeds]
    stated = PAPER_ACCURACY["mnist"][DROPOUT][1]
    spent = max(one.epsilon for one in found)
    accuracy, ece = measured(found, "accuracy"), measured(found, "ece")
    row = ("scattering features, one layer", "epsilon 1", stated, accuracy, spent, ece, measured(found, "sparsity"))
    notes = (
        "Wavelet scattering (81 channels of 7 x 7), a fixed map of each image by itself, less the mean feature of "
        f"scikit-learn's 8 x 8 digits, which are public. Batch {setting.batch}, {setting.epochs:g} passes, clip "
        f"{setting.clip:g}, momentum 0.9 with rate {setting.rate:g}; the full run's settings were chosen with plain "
        f"DP-SGD on the last 10 000 training records: {ASSUMED_PUBLIC}. The paper's network sees pixels.",
        DIVERGENCE_NOTE,
        *data.notes,
    )
    columns = ("network", "target", "paper", "ours", "sound epsilon", "ECE", "dropped")
    return PaperOutcome((PaperTable("MNIST, variational dropout on public features", columns, (row,), notes),))


def run_sparsity(context: Context) -> PaperOutcome:
    """Weights with log alpha > 3, for the divergence's weight from 0 to 1, and what is lost by dropping them."""
    data = pixels("mnist", context)
    base = QUICK["mnist"] if context.quick else SETTINGS["mnist"][1.0]
    rows: list[tuple[Cell, ...]] = []
    alphas: dict[str, Any] = {}
    for name, setting in _sparse_settings(base, context.quick):
        found = [fitted(data, DROPOUT, setting, 1.0, context, seed) for seed in context.seeds]
        rows.append(_sparse_row(name, found, data))
        alphas[name] = _log_alphas(found[0].posterior)
    notes = (
        "Variational dropout at epsilon 1 on the network of the accuracy table. The log-uniform prior pulls a weight "
        "to zero the harder the nearer it is; weight 1 of its divergence is the evidence lower bound. The paper states "
        "no sparsity.",
        f"Settings: {_told(base)}. Those of the full run are what that table's trials lie around: {ASSUMED_PUBLIC}.",
        *data.notes,
    )
    columns = ("variant", "paper", "ours", "sound epsilon", "dropped", "accuracy without them", "ECE")
    table = PaperTable("Sparsity: share of weights with log alpha > 3", columns, tuple(rows), notes)
    caption = "Distribution of log alpha over the weights; right of the line a weight counts as dropped."
    return PaperOutcome((table,), (Figure("log-alpha", caption, lambda drawing: _draw_alphas(drawing, alphas)),))


def _sparse_settings(base: DropoutSetting, quick: bool) -> list[tuple[str, DropoutSetting]]:
    weights = SPARSE_WEIGHTS[::2] if quick else SPARSE_WEIGHTS
    tied = [(f"tied noise, divergence x {weight:g}", replace(base, weight=weight)) for weight in weights]
    return [*tied, ("learnt noise, divergence x 0.05", replace(base, weight=0.05, deviation="learnt"))]


def _sparse_row(name: str, found: list[DropoutScores], data: Set) -> tuple[Cell, ...]:
    smaller = PaperMeasure(tuple(quality(pruned(one.posterior), data)[0] for one in found))
    spent = max(one.epsilon for one in found)
    shares = PaperMeasure(tuple(one.sparsity or 0.0 for one in found))
    return (name, None, measured(found, "accuracy"), spent, shares, smaller, measured(found, "ece"))


def _log_alphas(posterior: Posterior) -> Any:
    from confide.methods.variational_dropout import log_alpha

    assert isinstance(posterior, DiagonalGaussian)  # what variational dropout leaves behind

    with_noise = posterior.spread > 0
    return log_alpha(posterior.centre[with_noise], posterior.spread[with_noise]).clamp(-20, 10).numpy()


def _draw_alphas(figure: Any, alphas: Mapping[str, Any]) -> None:
    axes = figure.subplots()
    for place, (name, values) in enumerate(alphas.items()):
        axes.hist(values, bins=80, range=(-20, 10), histtype="step", density=True, color=COLOURS[place], label=name)
    axes.axvline(3, color="#6B7280", linestyle=":")
    axes.set(xlabel="log alpha", ylabel="density of weights")
    axes.legend(fontsize=8, loc="upper left")


PAPER = Paper(
    "dp-variational-dropout",
    "Differentially private variational dropout",
    "B. Ermis and A. T. Cemgil, arXiv:1712.02629, 2017 (its authors later asked to merge it into arXiv:1712.01665)",
    (
        Experiment(
            CNN, "test accuracy on MNIST, CNN learnt throughout, at epsilon 10, 1 and 0.1", run_mnist_cnn, minutes=3.3
        ),
        Experiment("mnist", "the same with one hidden layer, as in the paper (table 1)", run_mnist, minutes=2.5),
        Experiment(WIDE, f"the same at epsilon 1 with {PRINTED_UNITS} hidden units, as printed", run_wide, minutes=1.7),
        Experiment("digits", "test accuracy on DIGITS at epsilon 10, 1 and 0.1 (table 1)", run_digits, minutes=0.05),
        Experiment("features", "variational dropout on public features of MNIST", run_features, minutes=1),
        Experiment(
            "composition",
            "noise that each composition rule asks for (figure 3)",
            run_composition,
            minutes=0.2,
            once=True,
        ),
        *(
            Experiment(
                f"printed-{name}",
                f"as printed on {name}, both composition rules, learning curves (figures 1, 2, 4)",
                partial(run_printed, name=name),
                minutes=80 if name == "mnist" else 3,
                quick=name == "digits",
            )
            for name in PRINTED
        ),
        Experiment(
            "effects", "hidden units, passes, clip and batch, one at a time (figure 5)", run_effects, minutes=120
        ),
        Experiment("sparsity", "weights that the dropout rates switch off", run_sparsity, minutes=0.6),
    ),
    CLAIMS,
)
