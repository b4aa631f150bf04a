"""Plots of a posterior's draws: what they predict one by one, how they moved, and how sure they are along an axis."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.evaluate.chains import autocorrelation, effective_sample_size
from confide.evaluate.drawing import BLUE, GREEN, GREY, ORANGE, SKY, VERMILION, Plot, legend, plot
from confide.models.predictive import ClassPredictive, RealPredictive

MOST_CHAINS = 4  # as many lines as can be told apart; also the default number of chains
_CHAIN_COLOURS = (BLUE, ORANGE, GREEN, VERMILION)


def draw_distribution(predictive: ClassPredictive | RealPredictive, which: int, label: int | None = None) -> Plot:
    """What the single draws predict for one input: the probability of its label, or its mean.

    label   the class whose probability is shown; the most probable one if left out
    """
    if isinstance(predictive, ClassPredictive):
        label = int(predictive.labels[which]) if label is None else label
        values, centre = predictive.draws[:, which, label], float(predictive.probabilities[which, label])
        name, reach = f"Probability of class {label}", (0.0, 1.0)
    else:
        values, centre = predictive.means[:, which], float(predictive.mean[which])
        name = "Predicted mean"
        room = max(1e-9, 0.08 * float(values.max() - values.min()))
        reach = (float(values.min()) - room, float(values.max()) + room)
    spread = math.sqrt(float((predictive.weights * (values - centre).square()).sum()))
    bins = max(5, min(25, round(math.sqrt(len(values)) * 2)))

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        weights = predictive.weights.tolist()
        look = {"color": SKY, "edgecolor": "#FFFFFF", "label": "draws"}
        axes.hist(values.tolist(), bins, range=reach, weights=weights, **look)
        axes.axvline(centre, color=VERMILION, linewidth=2, label="their average")
        axes.set(xlim=reach, xlabel=name, ylabel="Share of draws")
        legend(axes, 2)

    alt = (
        f"{name} of one input under {len(values)} posterior draws: {centre:.3g} on average, with a standard deviation "
        f"of {spread:.2g}, from {float(values.min()):.3g} to {float(values.max()):.3g}."
    )
    reading = (
        "A narrow heap means that the draws agree. A wide one is doubt about the model, which more records shrink."
    )
    return plot("draws", "What do the single draws say?", alt, reading, draw, 290)


def uncertainty_bands(
    axis: Tensor, predictive: RealPredictive, y: Tensor | None = None, name: str = "Input", level: float = 0.9
) -> Plot:
    """The predictive mean along one input, with the band of doubt inside the band of doubt and noise together."""
    if len(axis) != predictive.means.shape[1]:
        raise Refusal(f"axis of shape {tuple(axis.shape)}: need one place for each of {predictive.means.shape[1]}")
    order = axis.argsort()
    place = axis[order].double().tolist()
    reach = math.sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64)))
    mean = predictive.mean[order].double()
    doubt = reach * predictive.epistemic[order].double().sqrt()
    total = reach * predictive.total[order].double().sqrt()

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        outer = {"color": SKY, "alpha": 0.35, "linewidth": 0}
        axes.fill_between(
            place, (mean - total).tolist(), (mean + total).tolist(), label="with noise in the data", **outer
        )
        inner = {"color": BLUE, "alpha": 0.55, "linewidth": 0}
        axes.fill_between(
            place, (mean - doubt).tolist(), (mean + doubt).tolist(), label="doubt about the model", **inner
        )
        axes.plot(place, mean.tolist(), color="#1F2933", linewidth=1.8, label="mean")
        if y is not None:
            axes.scatter(place, y.reshape(-1)[order].tolist(), s=9, c=VERMILION, zorder=3, label="actual")
        axes.set(xlabel=name, ylabel="Target")
        legend(axes, 2)

    alt = (
        f"Predicted mean along {name} from {place[0]:.3g} to {place[-1]:.3g} with two bands at {level:.0%}: doubt "
        f"about the model is {float(doubt.mean()):.3g} wide to either side, with noise {float(total.mean()):.3g}."
    )
    reading = "The dark band shrinks with more records; the light one is noise that no number of records removes."
    return plot("bands", "How sure is it, and where?", alt, reading, draw, 330)


def trace(draws: Tensor, name: str = "Parameter") -> Plot:
    """The path of one parameter through the draws of each chain: (draws,) or (chains, draws)."""
    paths = _paths(draws)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for place, path in enumerate(paths[:MOST_CHAINS].tolist()):
            look = {"color": _CHAIN_COLOURS[place], "linewidth": 1.3, "linestyle": ("-", "--", "-.", ":")[place]}
            axes.plot(range(1, len(path) + 1), path, label=f"chain {place + 1}", **look)
        axes.set(xlabel="Draw", ylabel=name)
        if len(paths) > 1:
            legend(axes, min(len(paths), MOST_CHAINS))

    alt = (
        f"Trace of {name} over {paths.shape[1]} draws in {len(paths)} chain{'s' if len(paths) > 1 else ''}: mean "
        f"{float(paths.mean()):.3g}, standard deviation {float(paths.std()):.2g}."
    )
    reading = "A chain that has settled wanders about one level. A slope means that burn-in was too short."
    return plot("trace", f"How did {name} move?", alt, reading, draw, 290)


def autocorrelations(draws: Tensor, name: str = "Parameter", most: int = 40) -> Plot:
    """Correlation of draws at a distance of 0, 1, ... draws, averaged over the chains."""
    paths = _paths(draws)
    lags = min(most, paths.shape[1] - 1)
    values = autocorrelation(paths[..., None])[: lags + 1, 0].tolist()
    size = float(effective_sample_size(paths[..., None])[0]) if paths.shape[1] >= 4 else float("nan")
    noise = 1.96 / math.sqrt(paths.numel())

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.axhspan(-noise, noise, color=GREY, alpha=0.2, linewidth=0, label="what chance alone gives")
        axes.vlines(range(lags + 1), 0, values, color=BLUE, linewidth=2.2)
        axes.scatter(range(lags + 1), values, s=14, c=BLUE, zorder=3)
        axes.axhline(0, color=GREY, linewidth=1)
        axes.set(xlabel="Distance in draws", ylabel="Correlation", ylim=(min(-0.25, *values) - 0.05, 1.05))
        legend(axes, 1)

    alt = (
        f"Autocorrelation of {name}: {values[1] if lags else 1:.2f} between neighbouring draws. {paths.numel()} draws "
        f"tell as much as about {size:.0f} independent ones."
    )
    reading = "The faster it falls into the grey band, the more the draws tell."
    return plot("autocorrelation", "How independent are the draws?", alt, reading, draw, 290)


def _paths(draws: Tensor) -> Tensor:
    paths = draws.detach().double()
    paths = paths[None] if paths.ndim == 1 else paths
    if paths.ndim != 2 or paths.shape[1] < 2:
        raise Refusal(f"draws of shape {tuple(draws.shape)}: must be (draws,) or (chains, draws), two draws at least")
    return paths
