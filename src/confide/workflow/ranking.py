"""Rows of a comparison: what each fit showed on the test records, and how sure a difference is.

standard error   of a mean over n test records, s / sqrt(n); the root mean squared error by the delta method,
                 se(mse) / (2 rmse); the calibration error by the bootstrap. Several fits per method add the
                 variance of their means, var / fits, which shows what the privacy noise does
as good as best  the paired difference d_i of per-record losses to the best method: |mean d| <= 2 s_d / sqrt(n)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from confide.models.predictive import ClassPredictive, of_numbers
from confide.report.evaluation import Evaluation

BOOTSTRAPS = 100
"""A standard error from so many is itself right to about 1 / sqrt(2 * 100), 7%."""
CLASS_COLUMNS = ("accuracy", "nll", "brier", "ece")
REAL_COLUMNS = ("rmse", "log_likelihood", "coverage_90", "width_90", "crps")
LARGER_IS_BETTER = ("accuracy", "log_likelihood")
"""Of the columns; the others are losses, widths or shares that should be 90%."""


@dataclass(frozen=True)
class Trial:
    """One fit of one method.

    losses    one value per test record, smaller is better: 1 for a wrong label, or the squared error
    """

    method: str
    metrics: Mapping[str, float]
    errors: Mapping[str, float]
    losses: Tensor = field(repr=False)
    seconds: float
    peak_mb: float | None
    storage_mb: float


@dataclass(frozen=True)
class Row:
    """One method: means over its fits, with standard errors."""

    method: str
    metrics: Mapping[str, float]
    errors: Mapping[str, float]
    seconds: float
    peak_mb: float | None
    storage_mb: float
    fits: int
    best: bool = False
    as_good: bool = False

    def flat(self) -> dict[str, Any]:
        """As one JSON object: every metric beside its standard error."""
        numbers: dict[str, Any] = {}
        for name, value in self.metrics.items():
            numbers[name] = value
            if name in self.errors:
                numbers[f"{name}_standard_error"] = self.errors[name]
        rest = {name: getattr(self, name) for name in ("seconds", "peak_mb", "storage_mb", "fits", "best")}
        return {"method": self.method, **numbers, **rest, "as_good_as_best": self.as_good}


def trial_of(
    method: str,
    evaluation: Evaluation,
    seconds: float,
    peak_mb: float | None,
    posterior: Path,
) -> Trial:
    """What one fit showed on the test records; `posterior` is its file, whose size is the storage."""
    found = evaluation.metrics()
    errors = standard_errors(evaluation)
    size = posterior.stat().st_size / 2**20
    return Trial(method, found, errors, losses_of(evaluation), seconds, peak_mb, size)


def losses_of(evaluation: Evaluation) -> Tensor:
    y = evaluation.y.reshape(-1)
    if isinstance(evaluation.predictive, ClassPredictive):
        return (evaluation.predictive.labels != y).double()
    return (of_numbers(evaluation.predictive).mean.double() - y.double()).square()


def standard_errors(evaluation: Evaluation) -> dict[str, float]:
    """By name of the metric: how far the number may be off because the test records are so few."""
    y, losses = evaluation.y.reshape(-1), losses_of(evaluation)
    predictive = evaluation.predictive
    if not isinstance(predictive, ClassPredictive):
        numbers = of_numbers(predictive).double()
        rmse = math.sqrt(float(losses.mean()))
        covered = numbers.inside(y.double(), 0.9)
        return {
            "rmse": _error(losses) / (2 * rmse) if rmse > 0 else 0.0,
            "log_likelihood": _error(numbers.log_density(y.double())),
            "coverage_90": _error(covered),
        }
    p = predictive.probabilities.double()
    right = p.gather(1, y.long()[:, None]).squeeze(1)
    squares = (p - torch.nn.functional.one_hot(y.long(), p.shape[1])).square().sum(1)
    return {
        "accuracy": _error(losses),
        "nll": _error(right.clamp(min=1e-38).log()),
        "brier": _error(squares),
        "ece": _bootstrap_error(p, y.long()),
    }


def _error(values: Tensor) -> float:
    return float(values.double().std(correction=0)) / math.sqrt(len(values))


def _bootstrap_error(probabilities: Tensor, y: Tensor) -> float:
    from confide.evaluate.metrics import ece

    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(BOOTSTRAPS):
        chosen = torch.randint(len(y), (len(y),), generator=generator)
        found.append(ece(probabilities[chosen], y[chosen]))
    return statistics.pstdev(found)


def baseline_of(evaluation: Evaluation) -> float:
    """Accuracy of the most frequent class of the test records, or the error of their mean."""
    y = evaluation.y.reshape(-1)
    if isinstance(evaluation.predictive, ClassPredictive):
        return float(torch.bincount(y.long()).max()) / len(y)
    return float(y.double().std(correction=0))


def ranked(trials: Sequence[Trial], utility: str) -> tuple[Row, ...]:
    """One row per method, the best first; the best and those that the test records cannot tell from it are marked."""
    by_method: dict[str, list[Trial]] = {}
    for trial in trials:
        by_method.setdefault(trial.method, []).append(trial)
    rows = {name: _row(name, found) for name, found in by_method.items()}
    losses = {name: torch.stack([trial.losses for trial in found]).mean(0) for name, found in by_method.items()}
    sign = -1 if utility in LARGER_IS_BETTER else 1
    order = sorted(rows, key=lambda name: sign * rows[name].metrics[utility])
    best = order[0]
    marked = []
    for name in order:
        difference = losses[name] - losses[best]
        as_good = abs(float(difference.mean())) <= 2 * _error(difference)
        marked.append(_marked(rows[name], name == best, as_good))
    return tuple(marked)


def _marked(row: Row, best: bool, as_good: bool) -> Row:
    return replace(row, best=best, as_good=as_good)


def _row(method: str, trials: Sequence[Trial]) -> Row:
    metrics = {name: statistics.fmean(trial.metrics[name] for trial in trials) for name in trials[0].metrics}
    errors = {}
    for name in trials[0].errors:
        within = statistics.fmean(trial.errors[name] for trial in trials)
        values = [trial.metrics[name] for trial in trials]
        between = statistics.variance(values) / len(values) if len(values) > 1 else 0.0
        errors[name] = math.sqrt(within**2 + between)
    peaks = [trial.peak_mb for trial in trials if trial.peak_mb is not None]
    return Row(
        method,
        metrics,
        errors,
        statistics.fmean(trial.seconds for trial in trials),
        max(peaks, default=None),
        max(trial.storage_mb for trial in trials),
        len(trials),
    )
