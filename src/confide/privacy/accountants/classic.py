"""Accountants with closed formulae: Gaussian DP, zero-concentrated DP and advanced composition."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from confide.privacy.accountants.bound import (
    APPROXIMATION,
    EXACT,
    UPPER_BOUND,
    Bound,
    check_question,
    check_sampling,
    counted,
    is_exact_gaussian,
    is_plain_gaussian,
    non_private,
    not_applicable,
    pure_epsilon,
    sensitivity,
    slack,
    without_bound,
)
from confide.privacy.accountants.profiles import gaussian_delta, gaussian_epsilon
from confide.privacy.events import Adjacency, Event, GaussianEvent, PureEvent


@dataclass(frozen=True)
class GDP:
    """Gaussian differential privacy (Dong, Roth and Su 2022; Bu, Dong, Long and Su 2020).

    Exact for un-sampled Gaussians, whose composition is the Gaussian with mu^2 = sum (sensitivity / std)^2.
    With sampling it is the central limit theorem: an APPROXIMATION that may lie on either side of the truth.
    """

    @property
    def name(self) -> str:
        return "gdp_clt"

    def epsilon(self, events: Iterable[Event], delta: float, adjacency: Adjacency = "add-remove") -> Bound:
        check_question(delta, adjacency)
        listed = counted(events, adjacency)
        hopeless = without_bound(listed, delta, adjacency)
        if hopeless is not None:
            return hopeless
        delta -= slack(listed, adjacency)
        if any(isinstance(event, PureEvent) for event in listed):
            return not_applicable("a pure release is not Gaussian and need not be one of many")
        mu = math.sqrt(sum(event.count * _squared_mu(event, adjacency) for event in listed))
        epsilon = gaussian_epsilon(mu, delta) if mu > 0 else 0.0
        if not all(is_plain_gaussian(event) for event in listed):
            return Bound(epsilon, APPROXIMATION, f"central limit theorem, mu={mu:.6g}")
        return Bound(epsilon, EXACT if is_exact_gaussian(listed) else UPPER_BOUND, f"mu={mu:.6g}")

    def delta(self, events: Iterable[Event], epsilon: float, adjacency: Adjacency = "add-remove") -> float:
        """delta(epsilon) of the (limiting) Gaussian."""
        listed = counted(events, adjacency)
        if non_private(listed) is not None:
            return 1.0
        mu = math.sqrt(sum(event.count * _squared_mu(event, adjacency) for event in listed))
        return float(gaussian_delta(mu, np.array([epsilon]))[0]) if mu > 0 else 0.0


def _squared_mu(event: Event, adjacency: Adjacency) -> float:
    """What one release adds to mu^2: for sampled Gaussians the second moment of the loss in the limit q -> 0.

    poisson      q^2 (e^(1/z^2) - 1)
    replace-one  q^2 (2 e^(1/z^2) - 2 e^(-1/z^2)): the loss is q (r(-1) - r(1)) to first order, where r(m) is the
                 likelihood ratio of N(m, z^2) to N(0, z^2), and E r(m)^2 = e^(1/z^2), E r(-1) r(1) = e^(-1/z^2)
    fixed-size   2 q^2 (e^(m^2) Phi(1.5 m) + 3 Phi(-0.5 m) - 2), m = 2 / z   (Bu, Dong, Long and Su 2020)
    """
    from scipy.special import ndtr

    if not isinstance(event, GaussianEvent):
        raise TypeError(f"event={event!r}: only Gaussian releases have a mu")
    check_sampling(event, adjacency)
    z = event.noise_multiplier
    if is_plain_gaussian(event):
        return (sensitivity(adjacency) / z) ** 2
    if event.sampling == "fixed-size":
        m = 2 / z
        return float(2 * event.rate**2 * (_exp(m * m) * ndtr(1.5 * m) + 3 * ndtr(-0.5 * m) - 2))
    if adjacency == "replace-one":
        return 2 * event.rate**2 * (_exp(1 / z**2) - math.exp(-1 / z**2))
    return clt_mu(z, event.rate, 1) ** 2


def clt_mu(noise_multiplier: float, rate: float, steps: int) -> float:
    """mu of the central limit theorem for Poisson sampling: q sqrt(T (e^(1/z^2) - 1)) (Bu et al. 2020).

    The formula as the literature uses it, at rate 1 as well, where exact composition gives sqrt(T) / z.
    """
    return rate * math.sqrt(steps) * math.sqrt(_exp(1 / noise_multiplier**2) - 1)


def _exp(exponent: float) -> float:
    """e^exponent, kept finite: beyond this the limit theorem is meaningless anyway."""
    return math.exp(min(exponent, 500.0))


@dataclass(frozen=True)
class ZCDP:
    """Zero-concentrated differential privacy (Bun and Steinke 2016).

    zCDP is not amplified by sampling: the divergence of a sampled Gaussian, divided by the order, climbs back to that
    of the un-sampled one as the order grows. So a sampled Gaussian is charged as if its record were always in the
    batch, rho = (sensitivity / std)^2 / 2. That is sound, since the mixture over the coin is no worse than its worst
    component (quasi-convexity of Renyi divergences), and often far above PLD. A pure release costs epsilon^2 / 2.
    """

    @property
    def name(self) -> str:
        return "zcdp"

    def epsilon(self, events: Iterable[Event], delta: float, adjacency: Adjacency = "add-remove") -> Bound:
        check_question(delta, adjacency)
        listed = counted(events, adjacency)
        hopeless = without_bound(listed, delta, adjacency)
        if hopeless is not None:
            return hopeless
        delta -= slack(listed, adjacency)
        if not listed:
            return Bound(0.0, UPPER_BOUND, "nothing released")
        if delta == 0:
            return not_applicable("zCDP says nothing at delta = 0")
        rho = sum(event.count * _rho(event, adjacency) for event in listed)
        sampled = not all(is_plain_gaussian(event) or isinstance(event, PureEvent) for event in listed)
        note = f"rho={rho:.6g}" + (", no amplification by sampling" if sampled else "")
        return Bound(zcdp_epsilon(rho, delta), UPPER_BOUND, note)


def _rho(event: Event, adjacency: Adjacency) -> float:
    if isinstance(event, PureEvent):
        return pure_epsilon(event, adjacency) ** 2 / 2
    assert isinstance(event, GaussianEvent)
    check_sampling(event, adjacency)
    return (sensitivity(adjacency) / event.noise_multiplier) ** 2 / 2


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Epsilon of rho-zCDP: the least rho a + log(1 / (a delta)) / (a - 1) + log(1 - 1 / a) over a > 1.

    (Canonne, Kamath and Steinke 2020.) Every a gives a valid epsilon, so a search that stops early is still sound.
    """
    from scipy.optimize import minimize_scalar

    def epsilon(log_excess: float) -> float:
        excess = math.exp(log_excess)
        order = 1 + excess
        return rho * order - math.log(order * delta) / excess + math.log1p(-1 / order)

    start = math.log(math.sqrt(math.log(1 / delta) / rho))
    best = minimize_scalar(epsilon, bracket=(start - 1, start + 1))
    return max(0.0, float(best.fun))


@dataclass(frozen=True)
class AdvancedComposition:
    """Advanced composition of amplified steps: the tool of the earlier literature, sound and loose.

    A Gaussian step is (e0, d0)-DP by the exact Gaussian profile. Sampling at rate q makes it
    (log(1 + q (e^e0 - 1)), q d0)-DP (Balle, Barthe and Gaboardi 2018), for Poisson sampling under either adjacency
    and for batches of fixed size under replace-one, with e0 taken at the sensitivity of that adjacency. Steps
    (e_i, d_i) then compose to (Kairouz, Oh and Viswanath 2015)

        epsilon = sum e_i (e^e_i - 1) / (e^e_i + 1) + sqrt(2 log(1 / d') sum e_i^2),   delta = d' + sum d_i

    or to sum e_i if that is less. How delta is shared between the steps and d' is tried out on a grid; each share is
    a valid bound, so the least is one too.
    """

    @property
    def name(self) -> str:
        return "advanced_composition"

    def epsilon(self, events: Iterable[Event], delta: float, adjacency: Adjacency = "add-remove") -> Bound:
        check_question(delta, adjacency)
        listed = counted(events, adjacency)
        hopeless = without_bound(listed, delta, adjacency)
        if hopeless is not None:
            return hopeless
        delta -= slack(listed, adjacency)
        gaussian = [event for event in listed if isinstance(event, GaussianEvent)]
        for event in gaussian:
            check_sampling(event, adjacency)
        if delta == 0:
            total = math.inf if gaussian else sum(e * n for e, n in _steps(listed, 0.0, adjacency))
            return Bound(total, UPPER_BOUND, "basic composition")
        shares = np.geomspace(1e-3, 0.999, 40) if gaussian else np.zeros(1)
        epsilon = min(_composed(_steps(listed, share * delta, adjacency), (1 - share) * delta) for share in shares)
        return Bound(epsilon, UPPER_BOUND, "Gaussian steps amplified by sampling" if gaussian else "pure steps")


def _steps(events: Sequence[Event], delta: float, adjacency: Adjacency) -> list[tuple[float, int]]:
    """(epsilon, count) of every kind of step when the steps together may spend delta."""
    gaussian = sum(event.count for event in events if isinstance(event, GaussianEvent))
    steps = []
    for event in events:
        if isinstance(event, PureEvent):
            steps.append((pure_epsilon(event, adjacency), event.count))
        elif isinstance(event, GaussianEvent):
            rate = 1.0 if is_plain_gaussian(event) else event.rate
            base_delta = min(delta / gaussian / rate, 0.5)
            base = gaussian_epsilon(sensitivity(adjacency) / event.noise_multiplier, base_delta)
            steps.append((_amplified(base, rate), event.count))
    return steps


def _amplified(epsilon: float, rate: float) -> float:
    """log(1 + q (e^epsilon - 1)) = epsilon + log(q + (1 - q) e^-epsilon), for any size of epsilon."""
    if epsilon < 30:
        return math.log1p(rate * math.expm1(epsilon))
    return epsilon + math.log(rate + (1 - rate) * math.exp(-epsilon))


def _composed(steps: Sequence[tuple[float, int]], slack: float) -> float:
    plain = sum(count * epsilon for epsilon, count in steps)
    drift = sum(count * epsilon * math.tanh(epsilon / 2) for epsilon, count in steps)
    spread = 2 * math.log(1 / slack) * sum(count * epsilon**2 for epsilon, count in steps)
    return min(plain, drift + math.sqrt(spread))
