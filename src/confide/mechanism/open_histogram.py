"""A histogram whose bins are partly unknown: counts of listed bins, and of every value that many records hold.

Each record adds 1 to at most `ones` bins, of which at most `open_ones` are values that nobody has listed. All counts
get Gaussian noise of standard deviation sigma = z sqrt(ones); an unlisted value is shown only where its noisy count
reaches

    T = 1 + sigma q,    with  P(N(0, 1) > q) = slack / open_ones.

*What it costs.* Let D' be D with one record more, and U the values that this record alone holds: at most `open_ones`.
The noise of their counts is independent of everything else, so the release on D' is the following: with probability
1 - s, where s <= slack, no value of U is shown, and then everything else has the law of counts of the values of D with
Gaussian noise, which the Gaussian mechanism covers; otherwise values of U are shown as well. On D no value of U is
shown. So the release is a function of two independent ones: the Gaussian one, of norm sqrt(ones) over z, and one that
gives a record away with probability s and says nothing otherwise: e^{-e} P <= P' <= P + s for e = -log(1 - s). These
are the two events that are charged. QED.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from confide.errors import Refusal
from confide.mechanism.noise import NoiseStream
from confide.privacy.calibration import noise_multiplier_for
from confide.privacy.events import Adjacency, Event, GaussianEvent, PureEvent

Value = TypeVar("Value", bound=Hashable)

SLACK_SHARE = 0.25  # of delta: the threshold grows with its logarithm alone, so the noise gets the rest
_ABOVE = 1 + 1e-6  # what the quantile and the square root may have lost to rounding, and far more


@dataclass(frozen=True)
class OpenHistogram:
    """The mechanism; `ones` and `open_ones` are of one record, `slack` is the part of delta behind the threshold."""

    noise_multiplier: float
    ones: int
    open_ones: int
    slack: float

    def __post_init__(self) -> None:
        if not 0 <= self.open_ones <= self.ones or self.ones < 1:
            raise Refusal(f"open_ones={self.open_ones}, ones={self.ones}: must be 0 <= open_ones <= ones and ones >= 1")
        if not (0 < self.slack < 1 or self.slack == self.open_ones == 0):
            raise Refusal(f"slack={self.slack}: must be in (0, 1) for values that nobody has listed")

    @classmethod
    def within(
        cls, epsilon: float, delta: float, ones: int, open_ones: int, adjacency: Adjacency = "add-remove"
    ) -> OpenHistogram:
        """The one with the least noise whose release stays within epsilon at delta."""
        slack = 0.0 if open_ones == 0 else SLACK_SHARE * delta / (2 if adjacency == "replace-one" else 1)
        spent = _given_away(slack)
        noise = noise_multiplier_for(epsilon, delta, 1, 1.0, "full-batch", adjacency, spent=spent)
        return cls(noise, ones, open_ones, slack)

    @property
    def std(self) -> float:
        """Of the noise of every count."""
        return self.noise_multiplier * math.sqrt(self.ones) * _ABOVE

    @property
    def threshold(self) -> float:
        """From this noisy count on an unlisted value is shown."""
        if self.open_ones == 0:
            return math.inf
        return 1 - self.std * NormalDist().inv_cdf(self.slack / self.open_ones) * _ABOVE

    def events(self) -> tuple[Event, ...]:
        return (GaussianEvent(self.noise_multiplier, "full-batch"), *_given_away(self.slack))

    def release(
        self, listed: NDArray[Any], unlisted: Mapping[Value, int], noise: NoiseStream
    ) -> tuple[NDArray[np.float64], dict[Value, float]]:
        """Noisy counts of the listed bins, and of the unlisted values that reach the threshold.

        The counts must be paid for, and each record in no more bins than was said.
        """
        counts = np.concatenate(
            [np.asarray(listed, dtype=np.float64), np.array([*unlisted.values()], dtype=np.float64)]
        )
        noisy = torch.empty(len(counts), dtype=torch.float64)
        if len(counts):
            noise.normal_(noisy, self.std)
        found = noisy.numpy() + counts
        shown = zip(unlisted, found[len(listed) :].tolist(), strict=True)
        # in an order that tells nothing of who held a value first
        seen = sorted(((value, count) for value, count in shown if count >= self.threshold), key=repr)
        return found[: len(listed)], dict(seen)


def _given_away(slack: float) -> tuple[PureEvent, ...]:
    return (PureEvent(-math.log1p(-slack) * _ABOVE, "add-remove", 1, slack),) if slack else ()
