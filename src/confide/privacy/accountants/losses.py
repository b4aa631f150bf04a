"""Privacy loss distributions on a grid, each dominating the mechanism it stands for.

A mechanism with profile delta(epsilon) is replaced by the discrete pair of distributions whose profile connects
the dots (epsilon_i, delta(epsilon_i)) linearly in e^epsilon (Doroshenko, Ghazi, Kamath, Kumar and Manurangsi 2022).
A profile is convex in e^epsilon, so the new one lies above it everywhere: the grid can only add to epsilon.

The dots lie on multiples of one step, densely where the mass is and ever more sparsely in the tail, where a coarse
grid costs next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from confide.privacy.accountants.profiles import (
    Array,
    gaussian_delta,
    poisson_replace_delta,
    pure_delta,
    sampled_delta,
    sampled_delta_reversed,
)

Index = NDArray[np.int64]

# Each of the two parts of a mass is a difference, an expm1 and a quotient: accurate to twelve units in the last place.
_MASS = 12 * float(np.finfo(np.float64).eps)

# e to this power is a number, and to minus this power too.
_EXPONENT = 700.0
# Losses further out than this many standard deviations of the noise count as infinite.
_REACHES = tuple(half / 2 for half in range(6, 76))
# The grid is _WIDEN times sparser at each level of the tail; a level m times sparser than the bulk holds a mass of
# at most _THIN / m^2, so that all levels together add a small part of what the bulk adds to the variance.
_WIDEN = 4
_THIN = 1 / 64
# Dots of losses that are counted apart lie this part of the loss apart, which is what they can add to one of them.
_BETWEEN_JUMPS = 0.01


def on_grid(index: Index, step: float) -> Array:
    """The losses that belong to grid indices."""
    losses: Array = index.astype(np.float64) * step
    return losses


@dataclass(frozen=True, eq=False)
class LossPmf:
    """P(loss = index[i] * step) = probs[i], with rising index.

    infinity   P(loss = +infinity): what may happen under P alone
    only_q     Q(loss = -infinity): what may happen under Q alone, the infinity of the reversed pair
    log_probs  kept beside the masses: those of very negative losses are too small for a number, but not reversed
    """

    step: float
    index: Index
    probs: Array
    log_probs: Array
    infinity: float
    only_q: float

    @cached_property
    def losses(self) -> Array:
        return on_grid(self.index, self.step)

    def reversed(self) -> LossPmf:
        """The loss of the reversed pair (Q, P): mass p(l) e^-l at -l. Connecting the dots commutes with this."""
        logarithms = self.log_probs - self.losses
        far = self.losses < -_EXPONENT
        masses = np.where(far, np.exp(logarithms), self.probs * np.exp(-np.where(far, 0.0, self.losses)))
        return LossPmf(self.step, -self.index[::-1], masses[::-1], logarithms[::-1], self.only_q, self.infinity)

    def part(self, start: int, stop: int) -> LossPmf:
        """The losses of these places alone."""
        here = slice(start, stop)
        return replace(self, index=self.index[here], probs=self.probs[here], log_probs=self.log_probs[here])

    def with_more(self, place: int, mass: float) -> LossPmf:
        """With so much more mass in one place."""
        probs, log_probs = self.probs.copy(), self.log_probs.copy()
        if mass > 0:
            probs[place] += mass
            log_probs[place] = math.log(probs[place])
        return replace(self, probs=probs, log_probs=log_probs)


def dot_masses(deltas: Array, index: Index, step: float) -> Array:
    """The masses at the dots (index[i] * step, deltas[i]) after the first, whose profile passes through them all.

    Between neighbours a < b the profile falls by (1 - e^(a - b)) times a mass at b, and that leaves (e^(b - a) - 1)
    of it to be taken back at a. Where rounding has left a rise, the lower dot is lifted; each mass gets what rounding
    may have taken from it, and one below zero counts as zero. All of that only lifts the profile.
    """
    deltas = np.maximum.accumulate(deltas[::-1])[::-1]
    falls = -np.diff(deltas)
    gaps = np.minimum(np.diff(index) * step, _EXPONENT)  # beyond, e^-gap is zero to every digit
    masses = falls / -np.expm1(-gaps)
    taken = np.append(falls[1:] / np.expm1(gaps[1:]), 0.0)
    found: NDArray[np.float64] = np.maximum(masses - taken + _MASS * (masses + taken), 0.0)
    return found


Profile = Callable[[Array], Array]


def connect_the_dots(forward: Profile, up: Index, backward: Profile, down: Index, step: float) -> LossPmf:
    """The dominating distribution of a pair (P, Q) from its two profiles at epsilon >= 0.

    `forward` is the profile of (P, Q) and gives the masses at losses 0 = up[0] < up[1] < ...; `backward` is that of
    (Q, P) and gives those at losses -down[i], since delta(-epsilon) = 1 - e^-epsilon + e^-epsilon backward(epsilon)
    and p(-l) = e^-l q(l). Taking the left tail from the reversed pair keeps it accurate: differences of the forward
    profile, which is near 1 there, would drown it in rounding errors.
    """
    deltas, reverse = forward(on_grid(up, step)), backward(on_grid(down, step))
    first = float(down[1] * step)
    before = -math.expm1(-first) + math.exp(-first) * reverse[1]
    right = dot_masses(np.concatenate(([before], deltas)), np.concatenate((-down[1:2], up)), step)
    left, lower = dot_masses(reverse, down, step), on_grid(down[1:], step)
    probs = np.concatenate(((left * np.exp(-lower))[::-1], right))
    with np.errstate(divide="ignore"):
        log_probs = np.concatenate(((np.log(left) - lower)[::-1], np.log(right)))
    return LossPmf(step, np.concatenate((-down[:0:-1], up)), probs, log_probs, float(deltas[-1]), float(reverse[-1]))


@dataclass(frozen=True)
class Unit:
    """One release in the form that loss distributions are built from.

    shape      "gaussian", "poisson", "poisson-replace", "fixed-size" or "pure"
    parameter  mu = sensitivity / standard deviation of the noise; for "poisson-replace" C / standard deviation;
               for "pure" the epsilon
    """

    shape: str
    parameter: float
    rate: float = 1.0

    @property
    def symmetric(self) -> bool:
        return self.shape != "poisson"

    def highest_loss(self, reach: float, side: int = 1) -> float:
        """The loss (its size, on the negative side for side -1) beyond which lies a mass of at most Phi(-reach)."""
        return self._loss_at(self.parameter + reach if side > 0 else reach, side)

    def quantile(self, mass: float, side: int = 1) -> float:
        """A loss beyond which lies at most that mass, using that a sampled record is in few batches."""
        from scipy.special import ndtri

        if side < 0 or self.rate == 1:
            return self.highest_loss(float(-ndtri(mass)), side)
        share = mass / (2 * self.rate)
        with_record = self.parameter - ndtri(share) if share < 1 else -math.inf
        return self._loss_at(float(max(-ndtri(mass / 2), with_record)), side)

    def _loss_at(self, outcome: float, side: int) -> float:
        """The loss of an outcome `outcome` standard deviations towards the record (away from it for side -1)."""
        if self.shape == "pure":
            return self.parameter
        mu = self.parameter
        up = _mixed(self.rate, mu * side * outcome - mu * mu / 2)
        if self.shape == "poisson-replace":
            up -= _mixed(self.rate, -mu * side * outcome - mu * mu / 2)
        return up * side


def _mixed(rate: float, loss: float) -> float:
    """log(1 - q + q e^loss)."""
    if rate == 1.0:
        return loss
    return float(np.logaddexp(math.log1p(-rate), math.log(rate) + loss))


def reach_for(tail: float, rate: float = 1.0, mu: float = 0.0) -> float:
    """The smallest standard reach beyond whose loss lies at most `tail`, for a record that is sampled at a rate."""
    from scipy.special import ndtr

    for reach in _REACHES:
        if rate * ndtr(-reach) + (1 - rate) * ndtr(-reach - mu) <= tail:
            return reach
    return _REACHES[-1]


@dataclass(frozen=True)
class Grid:
    """Dots on multiples of `step`, at most `widest` apart in the tail, up to `reach` deviations of the noise.

    jumps  losses beyond this one are counted apart (`composition.Jumps`): their dots lie a part of the loss apart
    """

    step: float
    widest: float
    reach: float
    jumps: float = math.inf


def half_grid(unit: Unit, grid: Grid, side: int = 1) -> Index:
    """Grid points 0, 1, 2, ... for the losses of one sign, ever sparser beyond the bulk, up to the highest."""
    step = grid.step
    top = max(2, math.ceil(unit.highest_loss(grid.reach, side) / step))
    if unit.shape == "pure":
        # All mass sits at plus and minus epsilon and the profile is linear between them: two dots around each.
        return np.unique(np.array([0, top - 1, top]))
    pieces, start, stride, last = [], 0, 1, top
    if grid.jumps < top * step:
        top = max(2, math.ceil(grid.jumps / step))
    while stride * _WIDEN * step <= grid.widest:
        wider = stride * _WIDEN
        end = math.ceil(unit.quantile(_THIN / wider**2, side) / (step * wider)) * wider
        if end >= top:
            break
        if end > start:
            pieces.append(np.arange(start, end, stride))
            start = end
        stride = wider
    pieces.append(np.arange(start, top + stride, stride))
    if top < last:
        levels = math.ceil(math.log(last / top) / math.log1p(_BETWEEN_JUMPS))
        beyond = np.ceil(top * (1 + _BETWEEN_JUMPS) ** np.arange(1, levels + 1)).astype(np.int64)
        pieces.append(np.unique(beyond[beyond > pieces[-1][-1]]))
    return np.concatenate(pieces)


@lru_cache(maxsize=256)
def loss_pmf(unit: Unit, grid: Grid) -> LossPmf:
    """The dominating loss distribution of one release (a record removed, where the direction matters)."""
    up = half_grid(unit, grid)
    if unit.symmetric:
        profile = _symmetric_profile(unit)
        return connect_the_dots(profile, up, profile, up, grid.step)
    return connect_the_dots(
        lambda epsilon: sampled_delta(unit.parameter, unit.rate, epsilon),
        up,
        lambda epsilon: sampled_delta_reversed(unit.parameter, unit.rate, epsilon),
        half_grid(unit, grid, -1),
        grid.step,
    )


def _symmetric_profile(unit: Unit) -> Profile:
    """Profiles at epsilon >= 0.

    "fixed-size": batches of fixed size without replacement, one record replaced. q delta_mu(log(1 + (e^eps - 1)/q))
    with mu = 2 C / std bounds both directions for epsilon >= 0 (Balle, Barthe and Gaboardi 2018). Extended to
    epsilon < 0 by symmetry the curve stays convex in e^epsilon: its slope at 1 is -Phi(mu/2) + q (2 Phi(mu/2) - 1)
    from the left and -Phi(-mu/2) from the right, which is no less. So it is a privacy profile, has a dominating
    pair, and composes (Zhu, Dong and Wang 2022).
    """
    profiles: dict[str, Profile] = {
        "gaussian": lambda epsilon: gaussian_delta(unit.parameter, epsilon),
        "fixed-size": lambda epsilon: sampled_delta(unit.parameter, unit.rate, epsilon),
        "poisson-replace": lambda epsilon: poisson_replace_delta(1 / unit.parameter, unit.rate, epsilon),
        "pure": lambda epsilon: pure_delta(unit.parameter, epsilon),
    }
    return profiles[unit.shape]
