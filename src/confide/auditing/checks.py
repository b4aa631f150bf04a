"""Checks of the mechanism, beside the audit by guessing, which sees much of this badly or not at all.

sensitivity   noise off, one record more or less, the same batch: the sum moves by at most C
noise         R_t minus the sum without noise, over a whole run: size, shape, freshness (`noise_checks`)
empty batch   batches without records are such noise too, not silence; no values come again
wide noise    the same for releases wider than the blocks in which noise is made, on two threads
no trace      records that answer with nothing leave nothing, to the last bit, neither of values nor of their number
sampling      every row joins every batch as stated (`sampling_checks`)
ledger        as many releases are charged and stated as were made (`books`)

Checks that go by chance share one LEVEL (`results`), so that right code hardly ever fails any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide.auditing import significance
from confide.auditing.books import check_ledger
from confide.auditing.canaries import CanarySource, Marked, marked_rows
from confide.auditing.noise_checks import MakeData, all_at_once, bits_of, noise_checks, wide_noise
from confide.auditing.problems import AuditProblem
from confide.auditing.results import Check, tested
from confide.auditing.sampling_checks import check_sampling
from confide.mechanism.clipping.structure import kept_generators
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.methods.base import Problem
from confide.running.fit import make_problem
from confide.sources.queries import GradientQuery, Query, StatisticQuery

ROUNDING = 1e-4  # In units of the clip: far more than single precision loses, far less than a record may move.
STEPS = 4  # Enough for a state that is not the first one any more; every step costs several answers.
# A fault may come late, and chances per coordinate need steps.
RUN_STEPS = 24
# Numbers of noise without which a size that is half as large in every second release might be chance.
FEWEST_NUMBERS = 2048
# Noise that is kept of one run; of longer ones every step still gives its size.
KEPT = 1 << 22
SIZES = (1.0, 1e6)
OTHERS = 5


def silent(mechanism: SampledGaussian) -> SampledGaussian:
    """The same sampling and clip without noise."""
    return replace(mechanism, noise_multiplier=0.0, private=False)


def run_checks(method: Any, problem: AuditProblem, plan: Plan, make_data: MakeData, seed: int = 0) -> list[Check]:
    """All checks of a method's own queries on the audit's records. `make_data` is PrivateData, or something faulty."""
    bench = Bench(method, problem, plan, make_data, seed)
    return [check for look in CHECKS.values() for check in look(bench)]


class Bench:
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
        """Noise of a whole run, by a twin that draws the same batches and adds none."""
        mechanism = self.plan.mechanism
        noisy, quiet = (self.source(self.given.x, self.given.y, canary=True) for _ in range(2))
        rows: dict[int, list[Any]] = {}  # by length: a method may ask for a histogram before its gradients
        sizes: list[tuple[float, int]] = []
        for step in range(max(RUN_STEPS, self.plan.steps)):
            if step % self.plan.steps == 0:  # a short run is made again, from the same data
                state = self.method.init(self.problem)
            query = self.method.ask(self.problem, state)
            plain = self.answer(quiet, query, silent(mechanism))
            with _same_randomness(self.problem, query):
                release = noisy.answer(query, mechanism)
            row = (release.sum.double() - plain).numpy() / mechanism.noise_std
            sizes.append((float((row**2).sum()), row.size))
            alike = rows.setdefault(row.size, [])
            if (len(alike) + 1) * row.size <= KEPT:
                alike.append(row)
            state = self.method.tell(self.problem, state, release)
        size, *others = noise_checks(np.stack(max(rows.values(), key=len)))
        squares, lengths = np.asarray(sizes).T
        later = significance.family(significance.chi_square(squares, lengths))
        chance = significance.family(size.chance, later)
        return [tested(size.name, chance, size.measured, size.expected), *others]

    def empty_batch(self) -> Check:
        nobody = torch.full_like(self.given.x, torch.nan)
        source = self.source(nobody, self.given.y, canary=False)
        mechanism, query = self.plan.mechanism, next(self.queries())
        steps = max(RUN_STEPS, -(-FEWEST_NUMBERS // query.size))
        released = torch.stack([source.answer(query, mechanism).sum.clone() for _ in range(steps)])
        return all_at_once("empty batch", released.double().numpy() / mechanism.noise_std, bits_of(released))

    def no_trace(self) -> Check:
        """The same noise beside other records, more of them or none: as long as they say nothing, the same bits."""
        x, y = self.given.x, self.given.y
        nobody, more = torch.full_like(x, torch.nan), torch.cat([x, x[:OTHERS]])
        tables = ((x, y), (x * 3 + 1, y.flip(0)), (more, torch.cat([y, y[:OTHERS]])), (nobody, y))
        query, found = _saying_nothing(next(self.queries())), []
        for rows, targets in tables:
            data = self.make_data(rows, targets, schema=self.public, seed=self.seed)
            answers = []
            for _ in range(STEPS):
                with _same_randomness(self.problem, query):
                    answers.append(data.answer(query, self.plan.mechanism).sum.clone())
            found.append(torch.stack(answers))
        differing = sum(int((bits != found[0]).sum()) for bits in found[1:])
        measured = f"{differing} of {found[0].numel() * (len(tables) - 1)} numbers differ"
        return Check("no trace", differing == 0, f"{measured} with the records that say nothing", "none")


def _saying_nothing(query: Query) -> Query:
    """The same query with every answer zero."""
    if isinstance(query, StatisticQuery):
        size, dtype = query.size, query.dtype
        return StatisticQuery(lambda x, y: torch.zeros(len(x), size, dtype=dtype), size, dtype)
    loss = query.loss
    return GradientQuery(query.module, lambda output, y: loss(output, y) * 0)


@contextmanager
def _same_randomness(problem: Problem, query: Query) -> Iterator[None]:
    """Whatever a query draws (masks, weights), it draws the same for the twins."""
    state = problem.generator.get_state()
    module = query.module if isinstance(query, GradientQuery) else problem.module
    with torch.random.fork_rng(devices=[]), kept_generators(module):
        torch.manual_seed(0)
        yield
    problem.generator.set_state(state)


CHECKS: dict[str, Callable[[Bench], list[Check]]] = {
    "sensitivity": lambda bench: [bench.sensitivity()],
    "noise": Bench.noise,
    "empty batch": lambda bench: [bench.empty_batch()],
    "wide noise": lambda bench: [wide_noise(bench.plan.mechanism, bench.make_data, bench.seed)],
    "no trace": lambda bench: [bench.no_trace()],
    "sampling": lambda bench: [check_sampling(bench.plan.mechanism, bench.make_data, bench.seed)],
    "ledger": lambda bench: [check_ledger(bench.method, bench.given, bench.plan, bench.make_data)],
}
"""What an audit looks at, in this order."""
