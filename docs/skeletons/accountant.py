"""Basic composition: an accountant that anybody can check by hand, sound and loose."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from confide.privacy.accountants.bound import (
    UPPER_BOUND,
    Bound,
    check_question,
    check_sampling,
    known,
    not_applicable,
    sensitivity,
    without_bound,
)
from confide.privacy.accountants.profiles import gaussian_epsilon
from confide.privacy.events import Adjacency, Event, GaussianEvent


@dataclass(frozen=True)
class BasicComposition:
    """Every step gets an equal share of delta, and the epsilons add up. Sampling is not credited.

    A release of noise z C, of a sum that one record moves by at most s C, is a Gaussian mechanism of mu = s / z; with T
    steps in all, epsilon = sum_t epsilon_t(delta / T) (Dwork et al., EUROCRYPT 2006).
    """

    @property
    def name(self) -> str:
        return "basic_composition"

    def epsilon(self, events: Iterable[Event], delta: float, adjacency: Adjacency = "add-remove") -> Bound:
        check_question(delta, adjacency)
        listed = known(events)
        hopeless = without_bound(listed, delta, adjacency)
        if hopeless is not None:
            return hopeless
        steps = sum(event.count for event in listed)
        total = 0.0
        for event in listed:
            if not isinstance(event, GaussianEvent):
                return not_applicable("basic composition is written for Gaussian releases only")
            check_sampling(event, adjacency)
            mu = sensitivity(adjacency) / event.noise_multiplier
            total += event.count * gaussian_epsilon(mu, delta / steps)
        return Bound(total, UPPER_BOUND, f"{steps} steps at delta / {steps} each")
