"""Scores on private records, paid for.

A metric without noise publishes the records it was measured on. Here every record answers with one vector u of bounded
scores, the boundary sums them, adds Gaussian noise and charges the ledger before it reads:

    accuracy      1 if the most probable class is right, else 0
    brier         sum_k (p_k - 1[y = k])^2, in [0, 2]
    nll           -log p(y), clipped to [0, nll_bound]
    ece           in the bin of its confidence: right - confidence, in [-1, 1]
    rmse          (mean - y)^2, clipped to [0, error_bound^2]
    coverage_90   1 if y lies in the central 90 % interval, else 0

A score s in [0, B] enters as s / B - 1/2, a gap g as g / 2 and, where the number of records is not public, a record as
1/2, so that every part is at most 1/2 in size. With k parts the norm of u is at most C = sqrt(k) / 2, the clip of
one full-batch release, and

    mean of s = B (1/2 + S / n),     noise of standard deviation B sigma / n,     sigma = z C

where S is the noisy sum of that part and n the declared number of records, or twice the noisy sum of the 1/2's. Fewer
metrics at a time are less noisy. The same call for the records that were learnt from composes with the fit, if both
are charged to one ledger under one name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.mechanism.clipping.places import assumed_of_places, hearing_of_uneven
from confide.mechanism.gaussian import SampledGaussian
from confide.models.predictive import ClassPredictive, LabelPredictive, VectorPredictive
from confide.models.survival import SurvivalPredictive
from confide.posteriors.base import Posterior
from confide.posteriors.recordwise import recordwise
from confide.privacy.calibration import noise_multiplier_for
from confide.privacy.events import Adjacency
from confide.privacy.statement import Privacy
from confide.sources.private_data import PrivateData
from confide.sources.queries import StatisticQuery

CLASS_SCORES = ("accuracy", "brier", "nll", "ece")
REAL_SCORES = ("rmse", "coverage_90")
BINS = 10  # every bin is a noisy number of its own, so fewer than without privacy
NLL_BOUND = 5.0
"""Nats: a right class with a probability below e^-5 counts as e^-5."""
_ROWS_AT_ONCE = 2048  # predictions of all draws for so many records fit in memory


@dataclass(frozen=True)
class Score:
    """A released value, and the standard deviation of the noise in it."""

    value: float
    standard_error: float


@dataclass(frozen=True)
class PrivateScores:
    """scores    by the names of `confide.evaluate.metrics.evaluate`
    records   what the sums were divided by: the declared number, or the noisy count
    counted   whether the records were counted privately
    privacy   what the release cost
    """

    scores: Mapping[str, Score]
    records: float
    counted: bool
    privacy: Privacy


@dataclass(frozen=True)
class _Questions:
    """Which scores are asked for, and their bounds; the answer of one record is at most `norm_bound` long."""

    names: tuple[str, ...]
    nll_bound: float
    error_bound: float
    counted: bool

    @property
    def size(self) -> int:
        return sum(BINS if name == "ece" else 1 for name in self.names) + self.counted

    @property
    def norm_bound(self) -> float:
        return math.sqrt(len(self.names) + self.counted) / 2

    def bound_of(self, name: str) -> float:
        return {"brier": 2.0, "nll": self.nll_bound, "rmse": self.error_bound**2}.get(name, 1.0)

    def query(self, posterior: Posterior) -> StatisticQuery:
        def answer(x: Tensor, y: Tensor) -> Tensor:
            pairs = zip(x.split(_ROWS_AT_ONCE), y.split(_ROWS_AT_ONCE), strict=True)
            return torch.cat([self.answers(posterior.predict(part), truth) for part, truth in pairs])

        return StatisticQuery(recordwise(answer, posterior), self.size)

    def answers(self, predictive: Any, y: Tensor) -> Tensor:
        """One row per record: every score as a part of at most 1/2 in size."""
        if isinstance(predictive, LabelPredictive | VectorPredictive | SurvivalPredictive):
            raise Refusal(
                "posterior: its target is more than one number, for which there are no private scores; measure it on "
                "records that are public or separate (confide.evaluate.metrics.evaluate)"
            )
        scores = class_scores(predictive, y) if isinstance(predictive, ClassPredictive) else real_scores(predictive, y)
        parts = []
        for name in self.names:
            if name == "ece":
                parts.append(_binned(scores["confidence"], scores["accuracy"]))
            else:
                parts.append(_halved(scores[name], self.bound_of(name))[:, None])
        if self.counted:
            parts.append(torch.full((len(y), 1), 0.5, dtype=torch.float64))
        return torch.cat(parts, 1)


def private_scores(
    posterior: Posterior,
    data: PrivateData,
    *,
    epsilon: float,
    delta: float,
    metrics: Iterable[str] | None = None,
    nll_bound: float = NLL_BOUND,
    error_bound: float = 1.0,
    adjacency: Adjacency = "add-remove",
    secure: bool = False,
) -> PrivateScores:
    """Measure a posterior on private records with one noisy release of (epsilon, delta); charged, then read.

    metrics      of CLASS_SCORES, or of REAL_SCORES for a schema without classes; all of them if left out
    nll_bound    public: a negative log-likelihood beyond it counts as it
    error_bound  public: an error of regression beyond it counts as it, in the units of the records' target
    A schema without a number of records has them counted in the same release. A record that cannot be scored, such as
    one with a label outside the declared classes, counts as nothing.
    """
    if not isinstance(data, PrivateData):
        raise TypeError("data: must be a PrivateData; public records are measured by confide.evaluate.metrics.evaluate")
    for name, value in (("nll_bound", nll_bound), ("error_bound", error_bound)):
        if not (math.isfinite(value) and value > 0):
            raise Refusal(f"{name}={value}: must be a finite number > 0")
    records = data.schema.records
    asked = _Questions(_names(metrics, data), nll_bound, error_bound, records is None)
    noise = noise_multiplier_for(epsilon, delta, 1, 1.0, "full-batch", adjacency)
    mechanism = SampledGaussian(noise, asked.norm_bound, 1.0, records or 1, "full-batch", secure=secure)
    query = asked.query(posterior)
    data.rehearse(query)
    with hearing_of_uneven() as uneven:
        release = data.answer(query, mechanism, purpose=f"evaluate {', '.join(asked.names)}")
    total, sigma = release.sum.clone(), release.noise_std
    count = float(records) if records is not None else max(2 * float(total[-1]), 2 * sigma, 1.0)
    privacy = Privacy(
        (release.event,), delta, adjacency, data.seeded, (*data.assumptions, *assumed_of_places(bool(uneven)))
    )
    return PrivateScores(_read(asked, total, sigma, count), count, asked.counted, privacy)


def _names(metrics: Iterable[str] | None, data: PrivateData) -> tuple[str, ...]:
    known = REAL_SCORES if data.schema.class_count is None else CLASS_SCORES
    names = known if metrics is None else tuple(dict.fromkeys(metrics))
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        raise Refusal(f"metrics={', '.join(wrong) or 'none'}: must be among {', '.join(known)}")
    return names


def class_scores(predictive: ClassPredictive, y: Tensor) -> dict[str, Tensor]:
    """One value per record for every score of classes, not yet clipped."""
    p, labels = predictive.probabilities.double(), y.reshape(-1).long()
    right = p.gather(1, labels[:, None]).squeeze(1)
    truth = torch.nn.functional.one_hot(labels, p.shape[1])
    return {
        "accuracy": (p.argmax(1) == labels).double(),
        "brier": (p - truth).square().sum(1),
        "nll": -right.log(),
        "confidence": p.amax(1),
    }


def real_scores(predictive: Any, y: Tensor) -> dict[str, Tensor]:
    """One value per record for every score of numbers, not yet clipped."""
    truth = y.reshape(-1)
    return {
        "rmse": (predictive.mean.double() - truth.double()).square(),
        "coverage_90": predictive.inside(truth, 0.9).double(),
    }


def _halved(scores: Tensor, bound: float) -> Tensor:
    """Scores clipped to [0, bound], as numbers between -1/2 and 1/2."""
    return scores.clamp(0.0, bound) / bound - 0.5


def _binned(confidence: Tensor, right: Tensor) -> Tensor:
    """Half the gap of each record, in the bin (l, u] of its confidence."""
    place = (confidence * BINS).ceil().clamp(1, BINS).nan_to_num(1.0).long() - 1
    gap = (right - confidence).clamp(-1.0, 1.0) / 2
    return torch.nn.functional.one_hot(place, BINS) * gap[:, None]


def _read(asked: _Questions, total: Tensor, sigma: float, count: float) -> dict[str, Score]:
    """The scores from the noisy sums: post-processing."""
    found, place = {}, 0
    for name in asked.names:
        if name == "ece":
            found[name] = _expected_gap(total[place : place + BINS], sigma, count)
            place += BINS
            continue
        share, bound = float(total[place]) / count, asked.bound_of(name)
        place += 1
        error = bound * sigma / count * (math.sqrt(1 + 4 * share**2) if asked.counted else 1.0)
        value = min(max(bound * (0.5 + share), 0.0), bound)
        found[name] = _root(value, error) if name == "rmse" else Score(value, error)
    return found


def _root(square: float, error: float) -> Score:
    """The root of a noisy mean square, by the delta method where the square stands out of its noise."""
    return Score(math.sqrt(square), error / (2 * math.sqrt(square)) if square > error else math.sqrt(error))


def _expected_gap(sums: Tensor, sigma: float, count: float) -> Score:
    """Sum over bins of |gap|. Noise adds its variance to every square, which is taken off again."""
    squares = (2 * sums).square() - (2 * sigma) ** 2
    value = float(squares.clamp(min=0).sqrt().sum()) / count
    return Score(min(value, 1.0), 2 * sigma * math.sqrt(BINS) / count)
