"""Is it any good? A model beside one that learns nothing, and class by class.

The baseline of a classifier names the most frequent class of the test records whatever it sees, that of a regression
their mean. Both know the test records' own labels, so they are a little better than anybody without them: what does
not beat them has learnt nothing that shows.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from confide.evaluate import metrics
from confide.evaluate.intervals import (
    Interval,
    auroc_interval,
    average_precision_interval,
    calibration_intervals,
    mean_interval,
)
from confide.evaluate.ordering import auroc_of, average_precision_of
from confide.models.predictive import ClassPredictive, Predictive, RealPredictive
from confide.models.survival import SurvivalPredictive

BETTER, WORSE, UNTOLD = "better", "worse", "not told apart"


@dataclass(frozen=True)
class Measured:
    """A value, and what so few records can say of it: its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ClassLine:
    """One class against the rest; None where it does not occur among the test records, or is never named.

    records     of this class among the test records
    named       how many the model said to be of it
    recall      share of its records that the model named so
    precision   share of what was named so that is of it
    stated      the mean probability that the model gave it
    actual      the share of test records that are of it
    calibration mean gap between its stated probability and the share that came true, over bins
    """

    label: str
    records: int
    named: int
    recall: Measured | None
    precision: Measured | None
    auroc: Measured | None
    average_precision: Measured | None
    stated: float
    actual: Measured
    calibration: Measured


@dataclass(frozen=True)
class ClassJudgement:
    """baseline   accuracy of always naming `majority`, the most frequent class of the test records
    gain       accuracy beyond the baseline, on the same records
    confusion  one row per actual class, one column per named class
    """

    majority: str
    baseline: Measured
    gain: Measured
    confusion: tuple[tuple[int, ...], ...]
    classes: tuple[ClassLine, ...]

    @property
    def verdict(self) -> str:
        return _verdict(self.gain)

    @property
    def only(self) -> str | None:
        """The class that it names for every record, if it does."""
        named = [line.label for line in self.classes if line.named]
        return named[0] if len(named) == 1 else None

    @property
    def never(self) -> tuple[str, ...]:
        """Classes that occur and are never named."""
        return tuple(line.label for line in self.classes if line.records and not line.named)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the record of a run."""
        return {"task": "classification", "verdict": self.verdict, "only": self.only, **asdict(self)}


@dataclass(frozen=True)
class RealJudgement:
    """baseline   root mean squared error of always naming the mean of the test records
    gain       mean squared error below the baseline's, as a share of it: R squared
    """

    baseline: Measured
    gain: Measured

    @property
    def verdict(self) -> str:
        return _verdict(self.gain)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the record of a run."""
        return {"task": "regression", "verdict": self.verdict, **asdict(self)}


Judgement = ClassJudgement | RealJudgement


def judge(predictive: Predictive, y: Tensor, labels: tuple[Any, ...] | None = None) -> Judgement | None:
    """The judgement of predictions beside the truth; None for kinds of predictions that it does not know.

    labels   names of the classes, in the order of the probabilities; 0, 1, ... if left out
    """
    metrics.refuse_private("y", y)
    if isinstance(predictive, ClassPredictive):
        return judge_classes(predictive.probabilities, y, labels)
    if isinstance(predictive, RealPredictive) and not isinstance(predictive, SurvivalPredictive):
        return judge_reals(predictive, y)
    return None


def judge_classes(probabilities: Tensor, y: Tensor, labels: tuple[Any, ...] | None = None) -> ClassJudgement:
    """Baseline, confusion matrix and one line per class."""
    p, truth = metrics.checked_classes(probabilities, y)
    count = p.shape[1]
    names = [str(name) for name in (labels if labels is not None and len(labels) == count else range(count))]
    guess = p.argmax(1)
    table = torch.bincount(truth * count + guess, minlength=count * count).reshape(count, count)
    often = int(table.sum(1).argmax())
    share = float((truth == often).double().mean())
    return ClassJudgement(
        names[often],
        Measured(share, *metrics.proportion_interval(share, len(truth))),
        _mean((guess == truth).double() - (truth == often).double()),
        tuple(tuple(row) for row in table.tolist()),
        tuple(_line(names[k], p[:, k].contiguous(), truth == k, guess == k) for k in range(count)),
    )


def judge_reals(predictive: RealPredictive, y: Tensor) -> RealJudgement:
    """The mean as baseline, and how much of the variance is explained."""
    truth = y.detach().reshape(-1).double()
    spread = (truth - truth.mean()).square()
    low, high = (math.sqrt(max(0.0, end)) for end in mean_interval(spread))
    errors = (predictive.mean.double() - truth).square()
    whole = float(spread.mean())
    gain = _mean((spread - errors) / whole) if whole > 0 else Measured(-math.inf, -math.inf, -math.inf)
    return RealJudgement(Measured(math.sqrt(whole), low, high), gain)


def _line(label: str, p: Tensor, member: Tensor, named: Tensor) -> ClassLine:
    records, said, size = int(member.sum()), int(named.sum()), len(member)
    hits = int((member & named).sum())
    ordered = 0 < records < size
    truth = member.double()
    gap = metrics.calibration(p, truth).expected_gap
    return ClassLine(
        label,
        records,
        said,
        _share(hits, records) if records else None,
        _share(hits, said) if said else None,
        Measured(auroc_of(p, member), *auroc_interval(p, member)) if ordered else None,
        Measured(average_precision_of(p, member), *average_precision_interval(p, member)) if ordered else None,
        float(p.mean()),
        _share(records, size),
        Measured(gap, *calibration_intervals(p, truth)[0]),
    )


def _share(part: int, whole: int) -> Measured:
    return Measured(part / whole, *metrics.proportion_interval(part / whole, whole))


def _mean(values: Tensor) -> Measured:
    found: Interval = mean_interval(values)
    return Measured(float(values.mean()), *found)


def _verdict(gain: Measured) -> str:
    if gain.low > 0:
        return BETTER
    return WORSE if gain.high < 0 else UNTOLD
