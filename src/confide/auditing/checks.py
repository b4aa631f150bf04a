"""Deterministic checks of what an audit by guessing sees badly or not at all.

sensitivity   noise off, one record more or less, the same batch: the sum moves by at most C
noise size    R_t minus the sum without noise has the stated standard deviation (chi-square test, two-sided)
fresh noise   that difference is uncorrelated between steps
empty batch   a batch without records is noise of the stated size, not silence
sampling      every row joins every batch as stated: how often, how unevenly over rows and over steps, and whether one
              step tells about the next

A check that is a test of significance fails below LEVEL, so that right code hardly ever fails one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide.auditing.canaries import CanarySource, Marked, marked_rows
from confide.auditing.problems import AuditProblem
from confide.data.schema import Schema
from confide.mechanism.clipping.structure import kept_generators
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.methods.base import Problem
from confide.running.fit import make_problem
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, Query, StatisticQuery

LEVEL = 1e-7
ROUNDING = 1e-4
STEPS = 4
ROWS, BATCHES = 200, 400
SIZES = (1.0, 1e6)
MakeData = Callable[..., PrivateData]


@dataclass(frozen=True)
class Check:
    """What was measured beside what it should be. `measured` and `expected` are for people."""

    name: str
    passed: bool
    measured: str
    expected: str


def silent(mechanism: SampledGaussian) -> SampledGaussian:
    """The same sampling and clip without noise."""
    return replace(mechanism, noise_multiplier=0.0, private=False)


def run_checks(method: Any, problem: AuditProblem, plan: Plan, make_data: MakeData, seed: int = 0) -> list[Check]:
    """All checks of a method's own queries on the audit's records. `make_data` is PrivateData, or something faulty."""
    bench = _Bench(method, problem, plan, make_data, seed)
    return [bench.sensitivity(), *bench.noise(), bench.empty_batch(), check_sampling(plan.mechanism, make_data, seed)]


class _Bench:
    """A method at its starting state and the twins of private data that answer it."""

    def __init__(self, method: Any, problem: AuditProblem, plan: Plan, make_data: MakeData, seed: int) -> None:
        self.method, self.given, self.plan = method, problem, plan
        self.make_data, self.seed = make_data, seed
        self.modules: dict[int, Marked] = {}
        self.public = problem.schema(plan.records)
        self.problem = make_problem(method, problem.module, self.public, plan, seed=seed)

    def source(self, x: Tensor, y: Tensor, canary: bool) -> CanarySource:
        """Ordinary records and one canary, the last row."""
        rows = marked_rows(x, [canary])
        targets = torch.cat([y, torch.zeros_like(y[:1])])
        data = self.make_data(rows, targets, schema=self.public, seed=self.seed)
        return CanarySource(data, x.shape[1:], 1, len(rows), self.seed, self.modules)

    def queries(self) -> Iterator[Query]:
        """The method's queries along a run on the whole data."""
        data = self.source(self.given.x, self.given.y, canary=True)
        state = self.method.init(self.problem)
        for _ in range(STEPS):
            query = self.method.ask(self.problem, state)
            yield query
            state = self.method.tell(self.problem, state, data.answer(query, self.plan.mechanism))

    def answer(self, source: CanarySource, query: Query, mechanism: SampledGaussian) -> Tensor:
        with _same_randomness(self.problem, query):
            return source.answer(query, mechanism).sum.double().clone()

    def sensitivity(self) -> Check:
        """With every record in the batch, since one that is not drawn moves nothing."""
        mechanism = replace(silent(self.plan.mechanism), sampling="full-batch", rate=1.0)
        x, y = self.given.x, self.given.y
        sources = [self.source(x, y, canary=True), self.source(x, y, canary=False)]
        for size in SIZES:
            other = x.clone()
            other[-1] *= size
            gone = torch.where(torch.arange(len(x))[:, None] == len(x) - 1, torch.nan, other)
            sources += [self.source(other, y, canary=False), self.source(gone, y, canary=False)]
        moved = []
        for query in self.queries():
            sums = [self.answer(source, query, mechanism) for source in sources]
            moved += [(one - two).norm().item() for one, two in zip(sums[::2], sums[1::2], strict=True)]
        largest = max(moved) / mechanism.clip
        passed = 0 < largest <= 1 + ROUNDING
        return Check("sensitivity", passed, f"a record moves the sum by up to {largest:.4f} C", "at most 1 C")

    def noise(self) -> list[Check]:
        mechanism = self.plan.mechanism
        noisy, quiet = (self.source(self.given.x, self.given.y, canary=True) for _ in range(2))
        found = []
        for query in self.queries():
            plain = self.answer(quiet, query, silent(mechanism))
            found.append((self.answer(noisy, query, mechanism) - plain) / mechanism.noise_std)
        return [_size("noise size", found), _freshness(found)]

    def empty_batch(self) -> Check:
        nobody = torch.full_like(self.given.x, torch.nan)
        source = self.source(nobody, self.given.y, canary=False)
        mechanism = self.plan.mechanism
        found = [self.answer(source, query, mechanism) / mechanism.noise_std for query in self.queries()]
        return _size("empty batch", found)


@contextmanager
def _same_randomness(problem: Problem, query: Query) -> Iterator[None]:
    """Whatever a query draws (masks, weights), it draws the same for the twins."""
    state = problem.generator.get_state()
    module = query.module if isinstance(query, GradientQuery) else problem.module
    with torch.random.fork_rng(devices=[]), kept_generators(module):
        torch.manual_seed(0)
        yield
    problem.generator.set_state(state)


def _size(name: str, found: list[Tensor]) -> Check:
    values = torch.stack(found)
    measured = values.square().mean().sqrt().item()
    chance = chi_square_chance(values.square().sum().item(), values.numel())
    return Check(name, chance > LEVEL, f"{measured:.4f} times the stated standard deviation", "1 times")


def _freshness(found: list[Tensor]) -> Check:
    """<n_t, n_{t+1}> / sqrt(d) is standard normal for independent noise; the correlation is shown."""
    values = torch.stack(found)
    products = (values[1:] * values[:-1]).sum()
    largest = products.item() / math.sqrt(values[1:].numel())
    correlation = products.item() / values[1:].numel()
    return Check("fresh noise", normal_chance(largest) > LEVEL, f"correlation {correlation:+.4f} between steps", "0")


def check_sampling(mechanism: SampledGaussian, make_data: MakeData, seed: int = 0) -> Check:
    """Which rows join, seen through the boundary itself: row i answers with the i-th unit vector, without noise."""
    joined = _inclusion(mechanism, make_data, seed)
    rate = mechanism.rate
    frequency = f"rows join with frequency {joined.mean():.4f}"
    if rate == 1:
        return Check("sampling", bool(joined.all()), frequency, "every row at every step")
    centred = (joined - rate) / math.sqrt(rate * (1 - rate))
    size = math.sqrt(joined.size)
    chances = {
        "how often": normal_chance(centred.sum() / size),
        "spread over rows": chi_square_chance((centred.sum(0) ** 2).sum() / BATCHES, ROWS),
        "spread over steps": chi_square_chance((centred.sum(1) ** 2).sum() / ROWS, BATCHES),
        "from one step to the next": normal_chance((centred[1:] * centred[:-1]).sum() / size),
    }
    wrong = [name for name, chance in chances.items() if chance <= LEVEL]
    measured = f"{frequency}; not by chance: {', '.join(wrong)}" if wrong else f"{frequency}, independently"
    return Check("sampling", not wrong, measured, f"{rate:.4f}, independently")


def _inclusion(mechanism: SampledGaussian, make_data: MakeData, seed: int) -> np.ndarray[Any, Any]:
    """(steps, rows): 1 where the row was in the batch."""
    rows = torch.arange(ROWS, dtype=torch.float32)[:, None]
    data = make_data(rows, torch.zeros(ROWS), schema=Schema(records=ROWS), seed=seed)
    asked = replace(silent(mechanism), clip=1.0, records=ROWS)
    query = StatisticQuery(lambda x, y: torch.eye(ROWS, dtype=torch.float64)[x[:, 0].long()], ROWS)
    data.charge([(asked, BATCHES)])
    answers = [data.answer(query, asked).sum.clone() for _ in range(BATCHES)]
    return np.asarray(torch.stack(answers).round().numpy())


def chi_square_chance(value: float, degrees: int) -> float:
    """Two-sided: the chance of a value as far out, on the side it lies on, doubled."""
    from scipy.special import gammainc, gammaincc

    half = degrees / 2
    return float(min(1.0, 2 * min(gammainc(half, value / 2), gammaincc(half, value / 2))))


def normal_chance(value: float) -> float:
    return math.erfc(abs(value) / math.sqrt(2))
