"""The one-run audit of a method: canaries in or out by the toss of a coin, one fit, guesses, a lower bound on epsilon.

white-box   canaries answer with directions of their own (see `canaries`); the score is their share in all releases
black-box   canaries are records with labels that follow from nothing; the score is how likely the finished posterior
            finds those labels
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import torch
from torch import Tensor

from confide.auditing.canaries import CanarySource, combined, marked_rows
from confide.auditing.checks import run_checks
from confide.auditing.faults import FaultyData
from confide.auditing.lower_bound import correct_guesses, epsilon_lower_bound, guesses_for
from confide.auditing.noise_checks import MakeData
from confide.auditing.problems import AuditProblem, mislabelled, problem_for
from confide.auditing.results import Check
from confide.errors import Refusal
from confide.mechanism.plan import Plan
from confide.mechanism.plan import plan as make_plan
from confide.models.predictive import ClassPredictive
from confide.running.fit import fit, make_problem
from confide.sources.private_data import PrivateData
from confide.sources.queries import Query

Attack: TypeAlias = Literal["white-box", "black-box"]
ATTACKS: tuple[Attack, ...] = get_args(Attack)
LARGEST_GROUP = 1000  # Canaries of one run: each has a direction of its own, as long as the answer.
SMALLEST_RATE = 0.01  # Below it so few canaries are ever drawn that nothing could be told from them.
Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    epsilon_claimed  what the plan promises at delta
    epsilon_lower    the run cannot be (epsilon, delta)-private for any smaller epsilon, with that confidence
    correct          right guesses among `guesses`, by the score that did best: "sum" over all steps, "in order" over
                     those steps that would hold the canary if batches were read in order, "posterior" for the black box
    checks           the deterministic checks (white box)
    """

    method: str
    attack: str
    epsilon_claimed: float
    epsilon_lower: float
    confidence: float
    delta: float
    canaries: int
    guesses: int
    correct: int
    score: str
    steps: int
    rate: float
    noise_multiplier: float
    checks: tuple[Check, ...] = ()

    @property
    def caught_by(self) -> tuple[str, ...]:
        """What speaks against the claim: nothing, if all is well."""
        bound = ("lower bound",) if self.epsilon_lower > self.epsilon_claimed else ()
        return bound + tuple(check.name for check in self.checks if not check.passed)

    @property
    def passed(self) -> bool:
        return not self.caught_by

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "checks": [asdict(check) for check in self.checks], "passed": self.passed}


def audit(
    method: Any,
    *,
    epsilon: float,
    delta: float = 1e-5,
    canaries: int = 1000,
    steps: int = 16,
    rate: float = 0.25,
    clip: float = 1.0,
    attack: Attack = "white-box",
    confidence: float = 0.95,
    fault: str | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Attack `method` at a claim of (epsilon, delta) and report what was found.

    rate      share of the records in a batch (Poisson); 1 for the full batch, where attacks are strongest
    fault     plant one of `faults.FAULTS`, to see the audit fail
    seed      for tests; otherwise coins, sampling and noise come from the operating system
    """
    _check(attack, canaries, steps, rate)
    tosses = np.random.default_rng(seed)
    make_data: MakeData = PrivateData if fault is None else partial(FaultyData, fault=fault)
    game = _WhiteBox if attack == "white-box" else _BlackBox
    table = game(method, _Terms(epsilon, delta, canaries, steps, rate, clip), make_data, tosses, seed)
    rounds = [table.play(group, progress) for group in range(table.groups)]
    included = np.concatenate([one for one, _ in rounds])
    names = [name for name in rounds[0][1] if name != "in order" or rate < 1]
    risk = (1 - confidence) / len(names)  # shared by the scores, so that the better one may be reported
    guesses = guesses_for(canaries, 2 * table.separation, delta, 1 - risk)
    results = []
    for name in names:
        scores = np.concatenate([found[name] for _, found in rounds])
        scores = combined(scores) if scores.ndim == 2 else scores
        correct = correct_guesses(scores, included, guesses)
        results.append((epsilon_lower_bound(correct, guesses, canaries, delta, 1 - risk), correct, name))
    lower, correct, name = max(results)
    plan = table.plan
    return Audit(
        method=method.name,
        attack=attack,
        epsilon_claimed=epsilon,
        epsilon_lower=lower,
        confidence=confidence,
        delta=delta,
        canaries=canaries,
        guesses=guesses,
        correct=correct,
        score=name,
        steps=steps,
        rate=plan.mechanism.rate,
        noise_multiplier=plan.mechanism.noise_multiplier,
        checks=tuple(table.checks()),
    )


def _check(attack: str, canaries: int, steps: int, rate: float) -> None:
    if attack not in ATTACKS:
        raise Refusal(f"attack={attack!r}: must be one of {', '.join(ATTACKS)}")
    if canaries < 10:
        raise Refusal(f"canaries={canaries}: must be at least 10; a thousand say more")
    if steps < 2 or steps % 2:
        raise Refusal(f"steps={steps}: must be an even number, since canaries change their sign at every step")
    if not SMALLEST_RATE <= rate <= 1:
        raise Refusal(f"rate={rate}: must be between {SMALLEST_RATE} and 1")


@dataclass(frozen=True)
class _Terms:
    """What is claimed, and how the runs look."""

    epsilon: float
    delta: float
    canaries: int
    steps: int
    rate: float
    clip: float

    def plan(self, records: int) -> Plan:
        """A plan whose rate is exactly the one asked for, up to whole records."""
        full = self.rate == 1
        return make_plan(
            epsilon=self.epsilon,
            delta=self.delta,
            records=records,
            batch=None if full else max(1, round(self.rate * records)),
            steps=self.steps,
            clip=self.clip,
            sampling="full-batch" if full else "poisson",
        )


class _Game(ABC):
    """Groups of canaries, each with a fit of its own; together they are one run, see `auditing.lower_bound`."""

    problem: Any
    group: int
    ordinary: int

    def __init__(
        self, method: Any, terms: _Terms, make_data: MakeData, tosses: np.random.Generator, seed: int | None
    ) -> None:
        self.method, self.terms, self.make_data, self.tosses, self.seed = method, terms, make_data, tosses, seed
        self.settle()
        # All groups are of one size, or the noise would have to be found for each; the last one is cut short.
        self.groups = -(-terms.canaries // self.group)
        self.plan = terms.plan(self.ordinary + self.group)

    @abstractmethod
    def settle(self) -> None:
        """The problem, and how many canaries it has room for at once."""

    @abstractmethod
    def fit(self, included: Any, seed: int | None, progress: Progress | None) -> dict[str, Any]:
        """One run with these canaries in: the scores of all of them, by name; one for each step, or one altogether."""

    def play(self, group: int, progress: Progress | None) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
        """Toss the coins, fit once, and give the coins with the scores."""
        here = min(self.group, self.terms.canaries - group * self.group)
        included = self.tosses.random(self.group) < 0.5
        steps = self.terms.steps
        shown = None if progress is None else _shifted(progress, group * steps, self.groups * steps)
        found = self.fit(included, None if self.seed is None else self.seed + 1000 * (group + 1), shown)
        return included[:here], {name: scores[:here] for name, scores in found.items()}

    @property
    def separation(self) -> float:
        """What a canary adds to its score, in standard deviations of the noise in it, if all is as claimed."""
        mechanism = self.plan.mechanism
        return float(mechanism.rate * np.sqrt(self.terms.steps) / mechanism.noise_multiplier)

    def checks(self) -> list[Check]:
        return []


def _shifted(progress: Progress, before: int, total: int) -> Progress:
    return lambda done, _: progress(before + done, total)


class _WhiteBox(_Game):
    def settle(self) -> None:
        self.problem = problem_for(self.method)
        self.ordinary = len(self.problem.x)
        size = first_query(self.method, self.problem, self.terms.plan(self.ordinary)).size
        self.group = min(LARGEST_GROUP, size, self.terms.canaries)

    def fit(self, included: Any, seed: int | None, progress: Progress | None) -> dict[str, Any]:
        given = self.problem
        rows = marked_rows(given.x, included)
        targets = torch.cat([given.y, torch.zeros(len(included), dtype=given.y.dtype)])
        data = self.make_data(rows, targets, schema=given.schema(len(rows)), seed=seed)
        source = CanarySource(data, given.x.shape[1:], len(included), len(rows))
        fit(self.method, given.module, source, self.plan, seed=seed, progress=progress)
        return {"sum": source.scores, "in order": source.in_order_scores}

    def checks(self) -> list[Check]:
        seed = int(self.tosses.integers(2**31))
        return run_checks(self.method, self.problem, self.plan, self.make_data, seed)


class _BlackBox(_Game):
    def settle(self) -> None:
        self.group, self.ordinary = min(LARGEST_GROUP, self.terms.canaries), 0
        self.problem = mislabelled(self.method, self.group)

    def fit(self, included: Any, seed: int | None, progress: Progress | None) -> dict[str, Any]:
        given = self.problem
        x = torch.where(torch.as_tensor(included)[:, None], given.x, torch.nan)
        data = self.make_data(x, given.y, schema=given.schema(len(x)), seed=seed)
        run = fit(self.method, given.module, data, self.plan, seed=seed, progress=progress)
        return {"posterior": likelihood_of(run.posterior.predict(given.x), given.y)}


def first_query(method: Any, problem: AuditProblem, plan: Plan) -> Query:
    """What the method asks before it has seen anything."""
    public = make_problem(method, problem.module, problem.schema(plan.records), plan, seed=0)
    return cast("Query", method.ask(public, method.init(public)))


def likelihood_of(predictive: Any, y: Tensor) -> np.ndarray[Any, Any]:
    """How likely each label is under the posterior predictive: its probability, or its nearness to the mean."""
    if isinstance(predictive, ClassPredictive):
        scores = predictive.probabilities.gather(1, y[:, None])[:, 0].clamp(min=1e-30).log()
    else:
        scores = -(predictive.mean - y).square()
    return np.asarray(scores.double().numpy())
