"""Metrics of targets that are neither classes nor Gaussian numbers: counts, orders, labels, times, heavy tails.

The continuous ranked probability score of any law with distribution function F is

    CRPS = int_(-inf)^y F(z)^2 dz + int_y^inf (1 - F(z))^2 dz          (Gneiting and Raftery, JASA 2007)

found by Gauss's rule between quantiles, and for counts as a sum. Of classes in an order the sum over cumulative
probabilities is the ranked probability score (Epstein, 1969). Of times that are known from below only, the logarithm of
the density or of the survival is the proper score (Rindt, Hu, Steinsaltz and Sejdinovic, AISTATS 2022).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.models.counts import CountPredictive
from confide.models.predictive import LabelPredictive, RealPredictive
from confide.models.survival import SurvivalPredictive

LEVELS = (1e-6, 1e-3, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 0.999, 1 - 1e-6)
"""Between the quantiles of these a law is smooth enough for a rule of 16 points; what is beyond weighs 1e-12."""
POINTS = 16  # see LEVELS
MOST_COUNTS = 500
"""Counts up to which the score is a sum over all of them; larger ones are as good as continuous."""
PAIRS_AT_ONCE = 1 << 22  # some ten megabytes of comparisons
BINS = 15  # as usual for calibration errors


def crps_of_law(predictive: RealPredictive, y: Tensor) -> Tensor:
    """The score of every input, for distributions in double precision."""
    if isinstance(predictive, CountPredictive):
        most = max(float(predictive.quantile(1 - 1e-9).max()), float(y.max()))
        if most <= MOST_COUNTS:
            return _crps_of_counts(predictive, y, int(most))
    ends = [predictive.quantile(level) for level in LEVELS]
    ends = [torch.minimum(ends[0], y), *ends, torch.maximum(ends[-1], y)]

    def square(z: Tensor) -> Tensor:
        return predictive.cumulative(z).square()

    def square_beyond(z: Tensor) -> Tensor:
        return (1 - predictive.cumulative(z)).square()

    total = torch.zeros_like(y)
    for low, high in itertools.pairwise(ends):
        total += _integral(square, torch.minimum(low, y), torch.minimum(high, y))
        total += _integral(square_beyond, torch.maximum(low, y), torch.maximum(high, y))
    return total


@cache
def _rule() -> tuple[tuple[float, ...], tuple[float, ...]]:
    import numpy as np

    points, weights = np.polynomial.legendre.leggauss(POINTS)
    return tuple(points.tolist()), tuple(weights.tolist())


def _integral(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    if bool((low == high).all()):
        return torch.zeros_like(low)
    middle, half = (low + high) / 2, (high - low) / 2
    points, weights = _rule()
    return half * sum(weight * function(middle + half * point) for point, weight in zip(points, weights, strict=True))


def _crps_of_counts(predictive: CountPredictive, y: Tensor, most: int) -> Tensor:
    total = torch.zeros_like(y)
    for count in range(most + 1):
        reached = predictive.cumulative(torch.full_like(y, float(count)))
        total += (reached - (y <= count).double()).square()
    return total


def ordered_scores(probabilities: Tensor, y: Tensor) -> dict[str, float]:
    """Of classes in an order: the ranked probability score, and how many classes off the most probable one was."""
    p, label = probabilities.double(), y.reshape(-1).long()
    places = torch.arange(p.shape[1])
    truth = (label[:, None] <= places).double()
    return {
        "ranked_probability": _mean((p.cumsum(1) - truth).square().sum(1)),
        "class_distance": _mean((p.argmax(1) - label).abs()),
    }


def columns(y: Tensor, inputs: int, targets: int) -> Tensor:
    """Targets in columns, in double precision."""
    if y.shape != (inputs, targets):
        raise Refusal(f"y of shape {tuple(y.shape)}: must be ({inputs}, {targets}), one row for every input")
    exact = y.detach().double()
    if not bool(torch.isfinite(exact).all()):
        raise Refusal("y: must be finite")
    return exact


def label_scores(predictive: LabelPredictive, y: Tensor) -> dict[str, float]:
    """Of labels of which any may hold: means over inputs and labels, and the share of inputs with all labels right.

    The gap of calibration is that of every label's probability, over bins of equal width.
    """
    p = predictive.probabilities.double().clamp(0, 1)
    truth = columns(y, *p.shape)
    if not bool(((truth == 0) | (truth == 1)).all()):
        raise Refusal("y: labels must be 0 or 1")
    least = torch.finfo(predictive.draws.dtype).tiny
    right = (p > 0.5) == (truth == 1)
    said = torch.where(truth == 1, p, 1 - p).clamp(min=least)
    place = (p * BINS).ceil().clamp(1, BINS).long().flatten() - 1
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, (p - truth).flatten())
    return {
        "label_accuracy": _mean(right),
        "exact_match": _mean(right.all(1)),
        "nll": -_mean(said.log()),
        "brier": _mean((p - truth).square()),
        "ece": float(gaps.abs().sum()) / p.numel(),
    }


def survival_scores(predictive: SurvivalPredictive, y: Tensor) -> dict[str, float]:
    """Of times that are known, or known from below: the log-likelihood of what is known, and the concordance."""
    exact, y = predictive.double(), columns(y, predictive.means.shape[1], 2)
    if not bool(((y[:, 0] > 0) & ((y[:, 1] == 0) | (y[:, 1] == 1))).all()):
        raise Refusal("y: must hold (time, observed) with a time > 0 and a mark of 0 or 1")
    return {
        "log_likelihood": _mean(exact.log_density(y)),
        "concordance": concordance(exact.quantile(0.5), y[:, 0], y[:, 1]),
    }


def concordance(predicted: Tensor, time: Tensor, observed: Tensor) -> float:
    """Share of pairs, of which one is known to come first, that were predicted in that order; ties count half.

    (Harrell, Califf, Pryor, Lee and Rosati, JAMA 1982.) Without such a pair it is not a number.
    """
    right = pairs = 0.0
    for rows in (observed == 1).nonzero().squeeze(1).split(max(1, PAIRS_AT_ONCE // len(time))):
        later = (time[None, :] > time[rows, None]) | ((time[None, :] == time[rows, None]) & (observed[None, :] == 0))
        ahead = predicted[None, :] - predicted[rows, None]
        right += float(((ahead > 0) & later).sum()) + 0.5 * float(((ahead == 0) & later).sum())
        pairs += float(later.sum())
    return right / pairs if pairs else math.nan


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
