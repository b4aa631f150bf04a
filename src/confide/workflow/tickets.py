"""The fits of a comparison, one by one: in this process, or in others that open the records by themselves.

A ticket says which steps of what the parent has paid for are a fit's own. Another process opens the records once,
however many fits it makes, and tries a method before the charge as well as it fits it after.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeAlias

import torch

from confide import rules
from confide.data.table import Table
from confide.errors import Refusal, Unfinished
from confide.report.evaluation import Evaluation
from confide.running.artefacts import POSTERIOR, save_run
from confide.running.processes import in_processes
from confide.sources.ahead import Purse
from confide.sources.base import Part
from confide.workflow import calibrate
from confide.workflow.facts import Settled, settle
from confide.workflow.forecast import expected_seconds
from confide.workflow.measure import measured
from confide.workflow.memory import peak_memory
from confide.workflow.ranking import Trial, trial_of
from confide.workflow.request import Request
from confide.workflow.run import Job, Progress, carry_out, job_of, rehearse_job
from confide.workflow.workers import forget, opened_once

Reopen: TypeAlias = Callable[[], tuple[Request, Table]]
"""Gives a request and its test records again, in whatever process it is called."""
Result: TypeAlias = tuple[Trial, Evaluation] | Refusal


@dataclass(frozen=True)
class Ticket:
    """One fit that is paid for.

    run      the name in the ledger under which all fits were paid
    parts    what this one may ask
    claimed  the last step under that name that belongs to the fits before it
    target   where it is saved
    stays    whether it is kept there, with its report; else it is gone when all have been compared
    """

    place: int
    method: str
    turn: int
    run: str
    parts: tuple[Part, ...]
    claimed: int
    target: Path
    stays: bool = True


@dataclass(frozen=True, repr=False, eq=False)
class Opened:
    """What all fits share. Holds private records: trusted side only."""

    request: Request
    settled: Settled
    test: Table

    def job(self, name: str, turn: int = 0) -> Job:
        seed = None if self.request.seed is None else self.request.seed + turn
        return job_of(self.request.with_method(name, seed), self.settled)

    def warm_up(self) -> None:
        """One step on made-up records: what is loaded once for all methods is not counted as the first one's memory."""
        shared = self.job(rules.SAMPLER)
        x, y = (part[:2] * 0 for part in (self.settled.x, self.settled.y))
        mechanism = replace(shared.plan.mechanism, sampling="poisson")  # others count the records
        plan = replace(shared.plan, blocks=((mechanism, 1),))
        request = replace(shared.request, ledger=None, chains=1, checkpoint=None)
        made_up = replace(shared, request=request, settled=replace(self.settled, x=x, y=y), plan=plan)
        carry_out(replace(made_up, histogram=None))

    def one(
        self, job: Job, purse: Purse, ticket: Ticket, test_source: str, progress: Progress, config: Mapping[str, Any]
    ) -> tuple[Trial, Evaluation]:
        """One fit of one method, saved and measured."""
        with peak_memory() as peak:
            outcome = carry_out(job, progress, purse)
        evaluation = measured(outcome.run.posterior, outcome.encoder, self.test, test_source)
        target = ticket.target
        try:
            kept = {**config, "hidden": outcome.hidden}
            if ticket.stays:
                save_run(outcome.run, target, evaluation=evaluation, config=kept, encoder=outcome.encoder)
            else:  # for its size alone
                target.mkdir()
                outcome.run.posterior.save(target / POSTERIOR)
        except Unfinished as error:
            if error.kept != target:  # else the model is there, and only its own report is not
                raise
        return trial_of(job.method.name, evaluation, outcome.run.seconds, peak.mb, target / POSTERIOR), evaluation


class Workers:
    """So many processes, each of which comes by the records through `reopen`.

    Inside the `with` block they are at it, while this process opens the records too.
    """

    def __init__(self, jobs: int, reopen: Reopen) -> None:
        self.jobs, self.reopen = jobs, reopen
        self.work = secrets.token_hex(16)
        self._threads = torch.get_num_threads()
        self._opening: Generator[Any, None, None] | None = None

    def __enter__(self) -> Self:
        import joblib

        if self._opening is None and self.jobs > 1:
            torch.set_num_threads(1)  # the cores are the workers'
            call = joblib.delayed(_open_in_worker)(self.work, self.reopen)
            self._opening = in_processes([call] * self.jobs, self.jobs)
        return self

    def __exit__(self, *_: object) -> None:
        if self._opening is not None:
            self._opening.close()
            torch.set_num_threads(self._threads)
        forget(self.work)  # where the workers are threads of this process

    def ready(self) -> None:
        """Wait until they have opened the records; what went wrong there is raised here."""
        for _ in self._opening or ():
            pass

    def rehearse(self, names: Sequence[str]) -> Iterator[tuple[str, float | Refusal]]:
        """Every method, on made-up records: how many seconds a fit may take, or why there can be none."""
        import joblib

        return in_processes([joblib.delayed(_rehearse_in_worker)(self._common(), name) for name in names], self.jobs)

    def fit(
        self, tickets: Sequence[Ticket], ledger: Any, test_source: str, config: Mapping[str, Any]
    ) -> Iterator[tuple[int, Result | Unfinished]]:
        """Several at a time, in the order that is given."""
        import joblib

        assert isinstance(ledger, str | os.PathLike)  # `check_jobs`
        common, fits = self._common(), (os.fspath(ledger), test_source, dict(config))
        calls = [joblib.delayed(_fit_in_worker)(common, ticket, *fits) for ticket in tickets]
        return in_processes(calls, self.jobs)

    def _common(self) -> _Common:
        return self.work, self.reopen, calibrate.kept()


_Common: TypeAlias = tuple[str, Reopen, Mapping[tuple[Any, ...], float]]
"""What every call in another process needs: the name of the work, its records, and the noise that was found before."""

_warm_works: set[str] = set()
"""For which a step was made in this process."""


def _opened(work: str, reopen: Reopen) -> Opened:
    def opening() -> Opened:
        request, test = reopen()
        return Opened(request, settle(request), test)

    return opened_once(work, opening)


def _warm(common: _Common) -> Opened:
    """What is opened, in a process that has made its first step; what its parent has found it need not find again."""
    work, reopen, noise = common
    calibrate.keep(noise)
    opened = _opened(work, reopen)
    if work not in _warm_works:
        opened.warm_up()
        _keep_what_is_loaded()
        _warm_works.add(work)
    return opened


def _keep_what_is_loaded() -> None:
    """What libraries have loaded stays until a worker ends: to look through it for garbage takes a quarter of a second,
    and that is done twice for every fit, here for the measurement of memory and by loky."""
    if multiprocessing.parent_process() is not None:
        gc.collect()
        gc.freeze()


def _open_in_worker(work: str, reopen: Reopen) -> None:
    _opened(work, reopen)


def _rehearse_in_worker(common: _Common, name: str) -> tuple[str, float | Refusal]:
    opened = _warm(common)
    try:
        job = opened.job(name)
        rehearse_job(job)
    except Refusal as error:
        return name, error
    return name, expected_seconds(job)


def _fit_in_worker(
    common: _Common, ticket: Ticket, ledger: str, test_source: str, config: dict[str, Any]
) -> tuple[int, Result | Unfinished]:
    """In another process: take up the steps that are paid for, and no others."""
    opened = _warm(common)
    opened = replace(opened, request=replace(opened.request, ledger=ledger))
    job = opened.job(ticket.method, ticket.turn).paid_as(ticket.parts)
    if job is None:
        return ticket.place, Refusal(f"methods={ticket.method!r}: not what was paid for; the records' file has changed")
    purse = Purse(ticket.run, ticket.parts, ticket.claimed)
    try:
        return ticket.place, opened.one(job, purse, ticket, test_source, lambda *_: None, config)
    except (Refusal, Unfinished) as error:
        return ticket.place, error
