"""For the ledger's tests: a stand-in accountant in closed form, monotone and quick, and processes to try things in."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterable
from statistics import NormalDist
from typing import Any

from confide.errors import BudgetExceeded
from confide.privacy.events import Event, GaussianEvent, NonPrivateEvent
from confide.privacy.ledger import Ledger

DELTA = 1e-5
# Un-sampled Gaussians charged one by one are held against this part of it: the Gaussian filter's share, nine tenths, of
# which a tenth is kept for covers.
FILTERED = 0.9 * 0.9 * DELTA
STEP = GaussianEvent(noise_multiplier=10.0)
POISSON = GaussianEvent(noise_multiplier=1.0, sampling="poisson", rate=0.1)

_PHI = NormalDist().cdf


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon at which a shift of `mu` standard deviations is (epsilon, delta)-private, by bisection."""

    def delta_at(epsilon: float) -> float:
        return _PHI(mu / 2 - epsilon / mu) - math.exp(epsilon) * _PHI(-mu / 2 - epsilon / mu)

    low, high = 0.0, mu * mu / 2 + 10 * mu
    if mu == 0 or delta_at(0.0) <= delta:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return high


def closed_form(events: Iterable[Event], delta: float, adjacency: str = "add-remove") -> float:
    """Gaussian events by their total shift, times the rate (a stand-in, not a bound); pure ones on top."""
    factor = 2.0 if adjacency == "replace-one" else 1.0
    square, pure = 0.0, 0.0
    for event in events:
        if isinstance(event, NonPrivateEvent):
            return math.inf
        if isinstance(event, GaussianEvent):
            square += event.count * (factor * event.rate / event.noise_multiplier) ** 2
        else:
            pure += factor * event.count * event.epsilon
    return pure + gaussian_epsilon(math.sqrt(square), delta)


class CountingPrice:
    """The stand-in accountant, counting how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0
        self.hook: Callable[[], None] | None = None

    def __call__(self, events: Iterable[Event], delta: float, adjacency: str = "add-remove") -> float:
        self.calls += 1
        if self.hook is not None:
            self.hook()
        return closed_form(events, delta, adjacency)


def most(event: Event, ceiling: float, factor: float = 1.0, delta: float = DELTA) -> int:
    """How many full-batch Gaussian events fit below the ceiling, counted one by one."""
    assert isinstance(event, GaussianEvent)
    number = 0
    while gaussian_epsilon(factor * math.sqrt(number + 1) / event.noise_multiplier, delta) <= ceiling:
        number += 1
    return number


def charge_until_refused(ledger: Ledger, event: Event, **names: Any) -> tuple[int, BudgetExceeded]:
    for number in range(10_000):
        try:
            ledger.charge(event, **names)
        except BudgetExceeded as refusal:
            return number, refusal
    raise AssertionError("never refused")


# The modules are imported once, in the server that forks the processes: starting one costs little.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.privacy.ledger.test_stress", "tests.privacy.ledger.test_file"])


def _report(send: Any, function: Callable[..., Any], *arguments: Any) -> None:
    send.send(function(*arguments))


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns in a process of its own with a single thread; None if the process dies of it."""
    receive, send = FORKSERVER.Pipe(duplex=False)
    process = FORKSERVER.Process(target=_report, args=(send, function, *arguments))
    process.start()
    send.close()
    try:
        return receive.recv()
    except EOFError:
        return None
    finally:
        process.join()
        receive.close()
