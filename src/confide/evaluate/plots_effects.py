"""Plots of an additive model: what every column adds, with the band in which its effect lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from confide.data.schema import Schema
from confide.evaluate.drawing import BLUE, GREEN, GREY, INK, ORANGE, VERMILION, Plot, plot
from confide.models.additive import column_names
from confide.models.likelihoods import Gaussian
from confide.posteriors.additive import AdditiveGaussian, Effect

MOST_COLUMNS = 12  # drawings of a page that are still looked at, the largest effects first
MOST_CLASSES = 4  # as many lines as can be told apart
MOST_CATEGORIES = 12  # bars of a drawing whose names can be read
REACH = 1.6449  # of a normal band of 90 %
_COLOURS = (BLUE, ORANGE, GREEN, VERMILION)


@dataclass(frozen=True)
class _ShownEffect:
    """One column, ready to be drawn: mean and deviation of shape (places, lines)."""

    name: str
    effect: Effect
    places: Sequence[float] | Sequence[str]
    mean: Tensor
    deviation: Tensor

    @property
    def size(self) -> float:
        return float(self.mean.std(0, correction=0).max())


def effect_plots(posterior: AdditiveGaussian, schema: Schema) -> list[Plot]:
    """One drawing for each of the columns that move the output most, in the units of the column and of the target."""
    scale = 1.0
    if isinstance(posterior.likelihood, Gaussian) and schema.target_bounds is not None:
        scale = (schema.target_bounds[1] - schema.target_bounds[0]) / 2
    names = column_names(schema, posterior.module.recipe)
    shown = [_shown(name, effect, schema, scale) for name, effect in zip(names, posterior.effects(), strict=True)]
    shown.sort(key=lambda one: -one.size)
    lines = _line_names(posterior, schema)
    return [_drawn(place, one, lines, _unit(posterior)) for place, one in enumerate(shown[:MOST_COLUMNS])]


def _shown(name: str, effect: Effect, schema: Schema, scale: float) -> _ShownEffect:
    mean, deviation = effect.mean * scale, effect.deviation * scale
    if mean.shape[1] == 2:  # of two logits their difference counts
        mean, deviation = mean[:, 1:] - mean[:, :1], deviation.square().sum(1, keepdim=True).sqrt()
    elif mean.shape[1] > 2:  # of several, how far each is from their average
        mean = mean - mean.mean(1, keepdim=True)
    places: Any = effect.places.tolist()
    column, place = _column_at(schema, effect.first_input)
    if effect.number:
        bounds = schema.bounds_of(place, column)
        if bounds is not None:
            places = (bounds[0] + (effect.places + 1) / 2 * (bounds[1] - bounds[0])).tolist()
    elif column is not None and column.categories:
        places = [str(label) for label in column.categories] + ["missing"] * (column.missing == "category")
    else:
        places = ["yes"]
    return _ShownEffect(name, effect, places, mean, deviation)


def _column_at(schema: Schema, first: int) -> tuple[Any, int]:
    """The column to which an input belongs, and its place; None for a plain array."""
    start = 0
    for place, column in enumerate(schema.columns):
        if first < start + column.width:
            return (column if first == start or column.kind == "categorical" else None), place
        start += column.width
    return None, first


def _line_names(posterior: AdditiveGaussian, schema: Schema) -> list[str]:
    outputs = posterior.module.recipe.outputs
    labels = [str(label) for label in schema.classes or ()]
    if outputs <= 2:
        return [f"for {labels[1]}" if len(labels) == 2 else "effect"]
    return labels if len(labels) == outputs else [f"output {place}" for place in range(outputs)]


def _unit(posterior: AdditiveGaussian) -> str:
    return "Added to the target" if isinstance(posterior.likelihood, Gaussian) else "Added to the log odds"


def _drawn(place: int, shown: _ShownEffect, names: Sequence[str], unit: str) -> Plot:
    strongest = shown.mean.std(0, correction=0).argsort(descending=True)[:MOST_CLASSES].sort().values.tolist()
    kept = _strongest_categories(shown)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.axhline(0, color=GREY, linewidth=1) if shown.effect.number else axes.axvline(0, color=GREY, linewidth=1)
        for colour, line in zip(_COLOURS, strongest, strict=False):
            mean, reach = shown.mean[:, line], REACH * shown.deviation[:, line]
            if shown.effect.number:
                band = {"color": colour, "alpha": 0.25, "linewidth": 0}
                axes.fill_between(shown.places, (mean - reach).tolist(), (mean + reach).tolist(), **band)
                axes.plot(shown.places, mean.tolist(), color=colour, linewidth=1.8, label=names[line])
            else:
                labels = [str(shown.places[one])[:24] for one in kept]
                look = {"fmt": "o", "color": colour, "ecolor": colour, "capsize": 3, "label": names[line]}
                axes.errorbar(mean[kept].tolist(), labels, xerr=reach[kept].tolist(), **look)
        if shown.effect.number:
            axes.set(xlabel=shown.name, ylabel=unit)
        else:
            axes.set(xlabel=unit, ylabel=shown.name)
            axes.invert_yaxis()
        if len(strongest) > 1:
            axes.legend(labelcolor=INK)

    low, high = float(shown.mean.min()), float(shown.mean.max())
    doubt = float(REACH * shown.deviation.square().mean().sqrt())
    alt = f"Effect of {shown.name}: from {low:.3g} to {high:.3g}, with a 90 % band of about {doubt:.2g} to either side."
    reading = "The line is the posterior mean, the band holds 90 %. A band across zero everywhere is no effect."
    height = 260 if shown.effect.number else 120 + 26 * len(kept)
    return plot(f"effect{place}", f"Effect of {shown.name}", alt, reading, draw, height)


def _strongest_categories(shown: _ShownEffect) -> list[int]:
    """Those with the largest effects, in their own order."""
    size = shown.mean.abs().amax(1)
    if not math.isfinite(float(size.sum())):
        return []
    found: list[int] = torch.argsort(size, descending=True)[:MOST_CATEGORIES].sort().values.tolist()
    return found
