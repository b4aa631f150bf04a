"""What so few test records can say: 95 % intervals for every metric, in closed form where there is one.

    shares                    Wilson's interval (1927)
    means over records        mean +- z s / sqrt n
    root mean squared error   the root of the interval of the mean square
    area under the ROC        the variance of DeLong, DeLong and Clarke-Pearson (1988), on the scale of log-odds
    average precision         Wilson's for m records, 1 / m = 1 / positives + 1 / negatives: the binomial variance of
                              Boyd, Eng and Page (ECML 2013), who leave the second part out, as a rare class allows
    calibration errors        e +- q, with q the 95 % point of the noise in the bins' gaps

The last is conservative: with gaps S of the bins and their expectations E, |sum |S| - sum |E|| <= sum |S - E|, so that
what bounds the noise bounds the error. It holds 0 exactly when the gaps could be chance. Averages over classes take the
averages of the ends, which is conservative as well: a mean's deviation is at most the mean of the deviations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from confide.evaluate import metrics
from confide.evaluate.ordering import average_precision_of, defined_classes, placements
from confide.models.predictive import ClassPredictive, Predictive, RealPredictive
from confide.models.survival import SurvivalPredictive

Z = 1.959963984540054
"""Of a 95 % interval under the normal distribution."""
SIMULATIONS = 4000
"""Of the noise in a reliability diagram: its 95 % point is known to one in a hundred."""

Interval = tuple[float, float]


def intervals(predictive: Predictive, y: Tensor) -> dict[str, Interval]:
    """The 95 % interval of every metric of `confide.evaluate.metrics.evaluate`, by its name."""
    if isinstance(predictive, ClassPredictive):
        return _of_classes(predictive.probabilities, y)
    if isinstance(predictive, RealPredictive) and not isinstance(predictive, SurvivalPredictive):
        return _of_reals(predictive, y)
    return {}


def mean_interval(values: Tensor) -> Interval:
    """Of a mean over records."""
    values = values.double()
    centre, half = float(values.mean()), 0.0
    if len(values) > 1:
        half = Z * float(values.std()) / math.sqrt(len(values))
    return centre - half, centre + half


def auroc_interval(scores: Tensor, positive: Tensor) -> Interval:
    """Of the area under the ROC curve; where nothing varies, Wilson's for the smaller group."""
    among, beside = placements(scores, positive)
    area = float(among.mean())
    few = min(len(among), len(beside))
    if not 0 < area < 1 or few < 2:
        return metrics.proportion_interval(area, few)
    variance = float(among.var()) / len(among) + float(beside.var()) / len(beside)
    return _on_log_odds(area, math.sqrt(variance) / (area * (1 - area)))


def average_precision_interval(scores: Tensor, positive: Tensor) -> Interval:
    """Of the area under the precision-recall curve."""
    value, count = average_precision_of(scores, positive), int(positive.sum())
    return metrics.proportion_interval(min(1.0, value), 1 / (1 / count + 1 / (len(positive) - count)))


def calibration_intervals(probability: Tensor, truth: Tensor) -> tuple[Interval, Interval]:
    """Of the expected and of the largest gap between a probability and what came true, over bins of equal width."""
    table = metrics.calibration(probability, truth)
    filled = table.counts > 0
    counts = table.counts[filled].double()
    spread = torch.zeros(len(table.counts), dtype=torch.float64)
    spread.index_add_(0, torch.bucketize(probability, table.edges[1:-1]), (truth - probability).square())
    # The sums of the gaps have this variance in every bin, at most: the square of their mean is not taken off.
    deviation = spread[filled].sqrt()
    noise = torch.randn(SIMULATIONS, len(counts), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sums = noise.abs() * deviation
    expected = float(torch.quantile(sums.sum(1) / counts.sum(), 0.95))
    largest = float(torch.quantile((sums / counts).amax(1), 0.95))
    return _around(table.expected_gap, expected), _around(table.largest_gap, largest)


def _of_classes(probabilities: Tensor, y: Tensor) -> dict[str, Interval]:
    p, labels = metrics.checked_classes(probabilities, y)
    confidence, guess = p.max(1)
    right = (guess == labels).double()
    surprise = -p.gather(1, labels[:, None]).squeeze(1).clamp(min=torch.finfo(torch.float32).tiny).log()
    squares = (p - torch.nn.functional.one_hot(labels, p.shape[1])).square().sum(1)
    expected, largest = calibration_intervals(confidence, right)
    each = [calibration_intervals(p[:, k].contiguous(), (labels == k).double())[0] for k in range(p.shape[1])]
    share = float(right.mean())
    found = {
        "accuracy": metrics.proportion_interval(share, len(labels)),
        "nll": mean_interval(surprise),
        "brier": mean_interval(squares),
        "ece": expected,
        "mce": largest,
        "classwise_ece": _mean_of(each),
    }
    classes = defined_classes(p, labels)
    if classes:
        found["auroc"] = _mean_of([auroc_interval(p[:, k], labels == k) for k in classes])
        found["average_precision"] = _mean_of([average_precision_interval(p[:, k], labels == k) for k in classes])
    return found


def _of_reals(predictive: RealPredictive, y: Tensor) -> dict[str, Interval]:
    truth = y.detach().reshape(-1).double()
    errors = (predictive.mean.double() - truth).square()
    low, high = mean_interval(errors)
    return {
        "rmse": (math.sqrt(max(0.0, low)), math.sqrt(high)),
        "log_likelihood": mean_interval(predictive.log_density(truth.to(predictive.means.dtype))),
        "coverage_90": metrics.proportion_interval(metrics.coverage(predictive, y, 0.9), len(truth)),
    }


def _on_log_odds(value: float, deviation: float) -> Interval:
    centre = math.log(value / (1 - value))
    low, high = (1 / (1 + math.exp(-(centre + side * Z * deviation))) for side in (-1, 1))
    return low, high


def _around(value: float, half: float) -> Interval:
    return max(0.0, value - half), min(1.0, value + half)


def _mean_of(ends: list[Interval]) -> Interval:
    return sum(low for low, _ in ends) / len(ends), sum(high for _, high in ends) / len(ends)
