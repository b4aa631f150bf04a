"""The Renyi accountant (moments accountant), on dp-accounting.

The Renyi divergence of one release at each order comes from dp-accounting's RdpAccountant, wrapped so that four of
its habits cannot hurt:

1. its REPLACE_ONE does not double the sensitivity, while its PLD accountant does: we pass std / (2 C) ourselves;
2. it knows no Poisson sampling under replace-one: the answer is "not applicable", never a guess;
3. rounding can leave a divergence below its true value, and one below zero is turned into epsilon = 0: we add
   beforehand what rounding can cost;
4. it logs a warning for each fractional order it gives up at small noise: those orders only drop out of a minimum,
   so the result stays an upper bound and the log is kept silent.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from confide.errors import Refusal
from confide.privacy.accountants.bound import (
    UPPER_BOUND,
    Bound,
    check_question,
    check_sampling,
    counted,
    is_plain_gaussian,
    known,
    not_applicable,
    pure_epsilon,
    sensitivity,
    slack,
    without_bound,
)
from confide.privacy.accountants.profiles import Array
from confide.privacy.events import Adjacency, Event, GaussianEvent, PureEvent

# Dense where epsilons between 0.1 and 10 have their best order, and far apart beyond.
DEFAULT_ORDERS: tuple[float, ...] = (
    1.015,
    1.03,
    1.06,
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *(float(order) for order in range(11, 65)),
    128.0,
    256.0,
    512.0,
    1024.0,
)


@dataclass(frozen=True)
class RDP:
    """Renyi differential privacy (Mironov 2017; Mironov, Talwar and Zhang 2019): sound, looser than PLD.

    orders      the orders tried; the best one counts
    conversion  "improved" (Canonne, Kamath and Steinke 2020) or "moments", the conversion of the moments
                accountant (Abadi et al. 2016): epsilon = D + log(1 / delta) / (order - 1)

    Batches of fixed size use the bound of Wang, Balle and Kasiviswanathan (2019).
    """

    orders: tuple[float, ...] = DEFAULT_ORDERS
    conversion: Literal["improved", "moments"] = "improved"

    def __post_init__(self) -> None:
        if not self.orders or min(self.orders) <= 1:
            raise Refusal(f"orders={self.orders}: must all be > 1")
        if self.conversion not in ("improved", "moments"):
            raise Refusal(f"conversion={self.conversion!r}: must be one of improved, moments")

    @property
    def name(self) -> str:
        return "rdp"

    def epsilon(self, events: Iterable[Event], delta: float, adjacency: Adjacency = "add-remove") -> Bound:
        """The smallest epsilon over all orders."""
        check_question(delta, adjacency)
        listed = known(events)
        hopeless = without_bound(listed, delta, adjacency)
        if hopeless is not None:
            return hopeless
        delta -= slack(listed, adjacency)
        if not listed:
            return Bound(0.0, UPPER_BOUND, "nothing released")
        if delta == 0:
            return not_applicable("Renyi divergences say nothing at delta = 0")
        divergence = divergences(listed, adjacency, self.orders)
        if divergence is None:
            return not_applicable("no Renyi bound is implemented for Poisson sampling under replace-one; use pld")
        epsilon, order = self.convert(divergence, delta)
        return Bound(epsilon, UPPER_BOUND, f"order {order:g}")

    def convert(self, divergence: Array, delta: float) -> tuple[float, float]:
        """(epsilon, order): the best order for these divergences at delta."""
        orders = np.array(self.orders)
        if self.conversion == "moments":
            epsilons = divergence - math.log(delta) / (orders - 1)
        else:
            epsilons = divergence + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
            # D >= KL, and delta(0) <= sqrt(1 - e^-KL): epsilon = 0 is shown when that is below delta.
            epsilons = np.where(delta**2 + np.expm1(-divergence) > 0, 0.0, epsilons)
        best = int(np.nanargmin(epsilons))
        return max(0.0, float(epsilons[best])), float(orders[best])


def divergences(events: Iterable[Event], adjacency: Adjacency, orders: tuple[float, ...]) -> Array | None:
    """Renyi divergence of all the events together at each order; None where no bound is implemented."""
    listed = counted(events, adjacency)
    if adjacency == "replace-one" and any(_poisson(event) for event in listed):
        return None
    start = np.zeros(len(orders))
    return sum((event.count * _divergence(event, adjacency, orders) for event in listed), start=start)


def _poisson(event: Event) -> bool:
    return isinstance(event, GaussianEvent) and event.sampling == "poisson" and event.rate < 1


def _divergence(event: Event, adjacency: Adjacency, orders: tuple[float, ...]) -> Array:
    if isinstance(event, PureEvent):
        return _pure_divergence(pure_epsilon(event, adjacency), np.array(orders))
    assert isinstance(event, GaussianEvent)
    check_sampling(event, adjacency)
    noise = event.noise_multiplier / sensitivity(adjacency)
    if is_plain_gaussian(event):
        return np.array(orders) / (2 * noise * noise)
    if event.sampling == "fixed-size":
        assert event.records is not None
        return _sampled_divergence(noise, event.batch, event.records, 0.0, orders)
    return _sampled_divergence(noise, 0, 0, event.rate, orders)


@lru_cache(maxsize=1024)
def _sampled_divergence(noise: float, batch: int, records: int, rate: float, orders: tuple[float, ...]) -> Array:
    """Divergence of one sampled release, whose noise is in units of the full sensitivity."""
    import dp_accounting
    from dp_accounting import rdp
    from scipy.special import gammaln

    gaussian = dp_accounting.GaussianDpEvent(noise)
    relation = dp_accounting.NeighboringRelation
    with _quiet():
        if batch:
            accountant = rdp.RdpAccountant(orders, relation.REPLACE_ONE)
            accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(records, batch, gaussian))
        else:
            accountant = rdp.RdpAccountant(orders, relation.ADD_OR_REMOVE_ONE)
            accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian))
    grid = np.array(orders)
    rounding = 8 * np.finfo(np.float64).eps * (1 + gammaln(grid + 1)) / (grid - 1)
    result: Array = np.maximum(np.asarray(accountant.rdp, dtype=np.float64), 0.0) + rounding
    result.setflags(write=False)
    return result


class _QuietThread(threading.local):
    depth = 0


_QUIET = _QuietThread()


def _is_heard(record: logging.LogRecord) -> bool:
    """What a quiet thread logs is dropped. A level of the logger would be every thread's: two that set it and put it
    back, one inside the other, would leave it silent for good."""
    return not _QUIET.depth or record.levelno >= logging.ERROR


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence dp-accounting's warnings about orders it leaves out."""
    import absl.logging  # noqa: F401 - which makes the logger, of a class of its own

    logging.getLogger("absl").addFilter(_is_heard)
    _QUIET.depth += 1
    try:
        yield
    finally:
        _QUIET.depth -= 1


def _pure_divergence(epsilon: float, orders: Array) -> Array:
    """Renyi divergence of randomised response, the largest that a pure epsilon-DP release can have.

    D = log(p^a (1-p)^(1-a) + (1-p)^a p^(1-a)) / (a - 1),   p = e^epsilon / (1 + e^epsilon);
    never more than epsilon itself.
    """
    log_p = -math.log1p(math.exp(-epsilon))
    log_rest = log_p - epsilon
    total = np.logaddexp(orders * log_p + (1 - orders) * log_rest, orders * log_rest + (1 - orders) * log_p)
    rounding = 8 * np.finfo(np.float64).eps * (1 + orders * epsilon)
    return np.minimum(np.maximum(total, 0.0) / (orders - 1) + rounding / (orders - 1), epsilon)
