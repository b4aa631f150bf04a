"""Private selection: several settings are fitted and scored within one budget, and the best one is published.

Every trial reads the records, so every trial is paid for, the ones that lose as well. A record is kept back for scoring
or learnt from by a coin of its own. Each candidate is fitted once to the part that is learnt from; then it answers
one question about the part that was kept back, its noisy score; and the model with the highest one is the result.

    price     m fits and m scores, composed: all of it within epsilon, in one charge before any record is read. Each fit
              has about 1 / root(m) of the mu that a single one would have
    score     share of right classes, or the mean squared error as a part of the target's range, from one full-batch
              release each; a record moves a score's sum by at most 1/2
    outlook   what can be told apart: said before anything is charged

Nothing is claimed for records that are in one part only, nor for the losers staying secret: the price stands even if
all models and scores are published. So a ledger, which shows how many fits there were, shows nothing unpaid.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide.data.schema import Task
from confide.data.trees import rows_of, tree_of
from confide.devices.default import default_aside
from confide.errors import DataError, Refusal
from confide.mechanism.gaussian import SampledGaussian
from confide.posteriors.base import Posterior
from confide.posteriors.recordwise import recordwise
from confide.privacy.accountants import sound_epsilon
from confide.privacy.events import Event
from confide.privacy.ledger import Ledger
from confide.running.fit import head_behind
from confide.running.processes import in_processes
from confide.sources.ahead import PaidAhead, Purse, pay_ahead
from confide.sources.base import Part, priced
from confide.sources.queries import StatisticQuery
from confide.workflow.calibrate import multiplier_for
from confide.workflow.facts import Settled, settle
from confide.workflow.request import Request
from confide.workflow.run import Job, Outcome, carry_out, job_of, records_of, rehearse_job
from confide.workflow.workers import check_jobs, forget, opened_once

HELD_OUT = 0.2
"""Chance that a record is kept back for scores."""
SCORE_SHARE = 0.25
"""Part of epsilon that all scores together may cost: about a fifteenth of mu^2, for they are single numbers."""
WORTH = {"classification": 0.05, "regression": 0.02}
"""Differences of scores that must be told apart for a search to pay off: settings seldom differ by more."""
TOLD_APART = 2.0
"""In standard deviations of a difference of two scores: chance alone is beyond it once in twenty times."""
NEAR = 0.98
"""Part of epsilon that has to be used up by the whole search; closer takes more calibrations than it gains."""
MOST_CANDIDATES = 64
"""Beyond it every fit has less than an eighth of the mu that one alone would have."""
_ROWS_AT_ONCE = 2048  # predictions of all draws for so many records fit in memory

Progress = Callable[[int, int], None]
Reopen = Callable[[], tuple[Request, Sequence[Mapping[str, Any]]]]


@dataclass(frozen=True)
class Outlook:
    """What a search can find, from public sizes alone.

    epsilon_each   of every fit
    resolution     smallest difference of scores that noise and chance do not hide
    """

    candidates: int
    scored: int
    task: Task
    epsilon: float
    epsilon_each: float
    resolution: float

    @property
    def pays_off(self) -> bool:
        return self.resolution <= WORTH[self.task]

    def sentence(self) -> str:
        what = "share of right classes" if self.task == "classification" else "squared error over the squared range"
        price = (
            f"{self.candidates} settings within epsilon {self.epsilon:g}: each is fitted with epsilon "
            f"{self.epsilon_each:.3g} and scored on about {self.scored} records"
        )
        told = f"differences below {self.resolution:.2g} in the {what} cannot be told apart"
        if self.pays_off:
            return f"{price}; {told}."
        return f"{price}; {told}: the choice would be a matter of chance, so one fit with all of epsilon is better."


@dataclass(frozen=True)
class Searched:
    """The winner, and what was released on the way.

    best     place of the winner among the candidates
    scores   as released, each with noise of standard deviation `noise`; higher is better. That of the winner is too
             high by what made it win
    """

    outcome: Outcome
    best: int
    scores: tuple[float, ...]
    noise: float
    outlook: Outlook


@dataclass(frozen=True)
class Trials:
    """The fits and scores of a search, calibrated together; nothing is charged yet.

    coins    that divide the records. They stay secret, with the records
    """

    request: Request
    jobs: tuple[Job, ...]
    score: SampledGaussian
    coins: int
    held_out: Settled
    outlook: Outlook

    def charging(self, ledger: Any) -> Trials:
        """The same, charged there."""
        jobs = tuple(replace(job, request=replace(job.request, ledger=ledger)) for job in self.jobs)
        return replace(self, jobs=jobs, request=replace(self.request, ledger=ledger))

    @property
    def parts(self) -> tuple[Part, ...]:
        """Everything that will be asked of the records."""
        fits = tuple(part for job in self.jobs for part in job.parts)
        return (*fits, (self.score, len(self.jobs)))

    @property
    def events(self) -> tuple[Event, ...]:
        return priced(self.parts)


def prepare_search(request: Request, changes: Sequence[Mapping[str, Any]], coins: int | None = None) -> Trials:
    """Settle, divide the records, and find the noise at which all fits and scores stay within epsilon together.

    changes   one mapping per candidate: fields of the request that it has of its own
    coins     where the coins of the records start, for another process that divides them alike; secret
    """
    request.check()
    _check(request, changes)
    settled = settle(request)
    records = settled.schema.records
    assert records is not None  # `_check`
    if coins is None:
        coins = secrets.randbits(128) if request.seed is None else request.seed
    # One coin per record: whoever else is in the data does not move it to the other part.
    kept = np.random.default_rng(coins).random(len(settled.y)) < HELD_OUT
    scored = max(2, round(HELD_OUT * records))
    learnt, held_out = _part(settled, ~kept, max(2, records - scored)), _part(settled, kept, scored)
    requests = [replace(request, **change) for change in changes]
    for one in requests:
        one.check()
    count = len(changes)
    z = multiplier_for(SCORE_SHARE * request.epsilon, request.delta, count, 1.0, "full-batch", request.adjacency)
    score = SampledGaussian(z, 0.5, 1.0, 1, "full-batch", secure=request.secure)
    each, jobs = _within(request, requests, learnt, score)
    outlook = Outlook(count, scored, settled.task, request.epsilon, each, _resolution(score, scored, settled.task))
    return Trials(request, jobs, score, coins, held_out, outlook)


@default_aside
def run_search(
    trials: Trials, progress: Progress | None = None, jobs: int = 1, reopen: Reopen | None = None
) -> Searched:
    """Rehearse every candidate, charge everything, fit all, score all, and give back the best.

    jobs     fits that run at the same time, each in a process of its own. All are paid for before the first starts
    reopen   for jobs > 1: gives request and changes again. It is called in the other processes, so that no record
             passes from one to another; a function of a module, or a partial of one
    """
    check_jobs(trials.request.ledger, jobs, reopen)
    with TemporaryDirectory(prefix=".confide-search-") as folder:
        if trials.request.ledger is None:  # one book, or what one fit has paid ahead could not be taken by another
            trials = trials.charging(Ledger() if jobs == 1 else Path(folder) / "budget.db")
        for job in trials.jobs:
            rehearse_job(job)
        data = records_of(trials.jobs[0])
        purse = pay_ahead(data, trials.parts, f"search over {len(trials.jobs)} settings")
        if jobs == 1 or reopen is None:
            outcomes = _in_turn(trials, purse, progress)
        else:
            outcomes = _in_workers(trials, purse, progress, jobs, reopen)
        return _chosen(trials, outcomes, purse)


def _in_turn(trials: Trials, purse: Purse, progress: Progress | None) -> list[Outcome]:
    steps = sum(job.plan.steps for job in trials.jobs)
    outcomes: list[Outcome] = []
    done = 0
    for job in trials.jobs:
        outcomes.append(carry_out(job, _told(progress, done, steps), purse))
        done += job.plan.steps
    return outcomes


def _in_workers(trials: Trials, purse: Purse, progress: Progress | None, jobs: int, reopen: Reopen) -> list[Outcome]:
    import joblib

    ledger = trials.request.ledger
    assert isinstance(ledger, str | os.PathLike)  # `check_jobs`
    calls, claimed = [], 0
    for place, job in enumerate(trials.jobs):
        first, claimed = claimed, purse.next_steps(job.parts)[1]
        purse.take(job.parts)  # which are another process's from now on
        paid = (purse.run, job.parts, first)
        calls.append(joblib.delayed(_fit_in_worker)(reopen, trials.coins, place, os.fspath(ledger), paid))
    found: dict[int, Outcome] = {}
    for place, outcome in in_processes(calls, jobs):
        found[place] = outcome
        if progress is not None:
            progress(len(found), len(calls))
    forget(purse.run)
    return [found[place] for place in range(len(calls))]


def _fit_in_worker(
    reopen: Reopen, coins: int, place: int, ledger: str, paid: tuple[str, tuple[Part, ...], int]
) -> tuple[int, Outcome]:
    """In another process: open the records, divide them alike, and take up the steps that are paid for."""
    job = opened_once(paid[0], lambda: _opened(reopen, coins, ledger)).jobs[place].paid_as(paid[1])
    if job is None:
        raise Refusal(f"candidates: number {place + 1} is not what was paid for; the records' file has changed")
    return place, carry_out(job, purse=Purse(*paid))


def _opened(reopen: Reopen, coins: int, ledger: str) -> Trials:
    request, changes = reopen()
    return prepare_search(replace(request, ledger=ledger), changes, coins)


def _chosen(trials: Trials, outcomes: Sequence[Outcome], purse: Purse) -> Searched:
    scores = released_scores(trials, [outcome.run.posterior for outcome in outcomes], purse)
    best = int(np.argmax(scores))
    found = outcomes[best]
    noise = trials.score.noise_std / trials.outlook.scored
    facts = {
        **found.run.posterior.facts,
        "chosen_among": len(outcomes),
        "private_scores": [round(score, 4) for score in scores],
        "noise_of_a_score": noise,
    }
    posterior = found.run.posterior.with_likelihood(found.run.posterior.likelihood, facts)
    # The statement is about all that was read to find this model, and not about its own fit alone.
    privacy = replace(found.run.privacy, events=trials.events)
    data = records_of(trials.jobs[best])
    run = replace(found.run, posterior=posterior, privacy=privacy, ledger=head_behind(data, privacy))
    return Searched(replace(found, run=run), best, tuple(scores), noise, trials.outlook)


def released_scores(trials: Trials, posteriors: Sequence[Posterior], purse: Purse) -> list[float]:
    """One noisy score of every model, on the records that were kept back."""
    job = replace(trials.jobs[0], settled=trials.held_out, request=trials.request)
    source = PaidAhead(records_of(job), purse)
    receipt = source.take_up([(trials.score, len(posteriors))], "scores of a search")
    found = []
    for posterior in posteriors:
        release = source.answer(score_query(posterior, trials.outlook.task), trials.score, receipt)
        found.append(0.5 + float(release.sum) / trials.outlook.scored)
    return found


def score_query(posterior: Posterior, task: Task) -> StatisticQuery:
    """Of one record: its score in [0, 1], less 1/2; 1 is best."""

    def scores(x: Tensor, y: Tensor) -> Tensor:
        centre = posterior.summary(x).centre.double()
        if task == "classification":
            return (centre.argmax(1) == y.reshape(-1)).double()
        return 1 - ((centre.reshape(-1) - y.reshape(-1).double()) / 2).square().clamp(max=1)

    def answer(x: Tensor, y: Tensor) -> Tensor:
        pieces = zip(x.split(_ROWS_AT_ONCE), y.split(_ROWS_AT_ONCE), strict=True)
        return torch.cat([scores(some, truth) for some, truth in pieces])[:, None] - 0.5

    return StatisticQuery(recordwise(answer, posterior), 1)


def _check(request: Request, changes: Sequence[Mapping[str, Any]]) -> None:
    if not 2 <= len(changes) <= MOST_CANDIDATES:
        raise Refusal(f"candidates: {len(changes)} given; a search is among 2 to {MOST_CANDIDATES} of them")
    if request.counts_first:
        missing = "records" if request.counted else "classes"
        raise DataError(f"{missing}: not declared; every fit of a search would count them anew, so declare them")
    if request.checkpoint is not None or request.ranks is not None:
        raise Refusal("checkpoint: keeps one fit in one process, and a search makes several; leave it out")


def _part(settled: Settled, rows: Any, records: int) -> Settled:
    index = torch.from_numpy(np.flatnonzero(rows))
    schema = replace(settled.schema, records=records)
    x = rows_of(tree_of(settled.x), index)
    return replace(settled, x=x, y=settled.y[index.numpy()], encoder=replace(settled.encoder, schema=schema))


def _within(
    request: Request, requests: Sequence[Request], learnt: Settled, score: SampledGaussian
) -> tuple[float, tuple[Job, ...]]:
    """The largest epsilon of each fit at which all of them, and the scores, stay within the request's, up to NEAR."""

    def tried(each: float) -> tuple[float, tuple[Job, ...]]:
        jobs = tuple(job_of(replace(one, epsilon=each), learnt) for one in requests)
        parts = [*(part for job in jobs for part in job.parts), (score, len(jobs))]
        return sound_epsilon(priced(parts), request.delta, request.adjacency), jobs

    low, high = 0.0, request.epsilon
    best: tuple[float, tuple[Job, ...]] | None = None
    each = 0.9 * request.epsilon / math.sqrt(len(requests))
    for _ in range(30):
        total, jobs = tried(each)
        if total <= request.epsilon:
            best, low = (each, jobs), each
            if total >= NEAR * request.epsilon:
                break
        else:
            high = each
        # The whole grows about in proportion to each, so that the next guess aims a little below the end.
        guess = each * 0.995 * request.epsilon / total
        each = guess if low < guess < high else (low + high) / 2
    if best is None:
        raise Refusal(f"epsilon={request.epsilon:g}: no noise was found at which {len(requests)} fits stay within it")
    return best


def _resolution(score: SampledGaussian, scored: int, task: Task) -> float:
    """Noise of a difference of two scores, and how much the records that are scored differ by chance."""
    noise = score.noise_std / scored
    chance = math.sqrt((0.1 if task == "classification" else 0.01) / scored)  # most records score alike in both
    return TOLD_APART * math.sqrt(2 * noise**2 + chance**2)


def _told(progress: Progress | None, before: int, steps: int) -> Progress | None:
    return None if progress is None else lambda done, _: progress(before + done, steps)
