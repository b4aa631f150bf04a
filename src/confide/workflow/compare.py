"""Comparison: several methods on one data set, each with the same budget, measured on the same public test records.

    found = confide.compare(request, test, methods=["sgld", "sgd"])
    found.rows[0].method, found.total_epsilon

Every fit of every method reads the private records and is charged, so that k methods cost what k runs compose to: each
model alone satisfies the budget of one run, and the whole table satisfies `total_epsilon`. All methods are rehearsed
first, then all fits are charged in one go, and only then is a record read: a budget that does not suffice for all
refuses all. The test records are public
or separate by the user's word. Network, plan and settings come from public rules alone, and are those that a single
fit of the same request would get.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from confide import methods as known
from confide import rules
from confide.data.schema import Task
from confide.data.table import Table
from confide.devices.default import default_aside
from confide.errors import BudgetExceeded, DataError, Refusal, Unfinished
from confide.mechanism.plan import Plan
from confide.posteriors.drafts import make_folder, sync
from confide.privacy.accountants import sound_epsilon
from confide.privacy.events import Adjacency, Event
from confide.privacy.ledger import Ledger
from confide.report.evaluation import SEPARATE, Evaluation
from confide.sources.ahead import Purse, pay_ahead
from confide.wording import json_text
from confide.workflow.facts import Settled, settle
from confide.workflow.measure import check_test
from confide.workflow.network import hidden_of
from confide.workflow.noise import SHARE
from confide.workflow.ranking import CLASS_COLUMNS, REAL_COLUMNS, Row, Trial, baseline_of, ranked
from confide.workflow.request import Request
from confide.workflow.run import Job, Progress, records_of, rehearse_job
from confide.workflow.tickets import Opened, Reopen, Result, Ticket, Workers
from confide.workflow.workers import check_jobs

TABLE, PAGE = "comparison.json", "report.html"
UNFINISHED = ".unfinished"
"""Ends the name of the folder in which the runs are until all are there."""


@dataclass(frozen=True)
class Comparison:
    """rows         the methods that ran, the best first
    not_run      methods that do not fit the problem, with the reason; nothing was charged for them
    events       everything that was charged, also for fits that failed afterwards
    baseline     what needs no learning: the most frequent class of the test records, or their mean
    name         of the data set
    hidden       widths of the hidden layers that all methods share; None for a network of the user's own
    plan         of one fit; that of another method differs in its noise, or in the releases that it wants
    noise_scale  of a regression target: given, or learnt in each fit
    """

    rows: tuple[Row, ...]
    not_run: Mapping[str, str]
    baseline: float
    inputs: int
    source: str
    events: tuple[Event, ...]
    name: str
    task: Task
    hidden: tuple[int, ...] | None
    plan: Plan
    noise_scale: float | Literal["learnt"] | None
    epsilon_each: float
    seeded: bool = False

    @property
    def utility(self) -> str:
        """The metric that methods are ranked by."""
        return utility_of(self.task)

    @property
    def columns(self) -> tuple[str, ...]:
        return CLASS_COLUMNS if self.task == "classification" else REAL_COLUMNS

    @property
    def delta(self) -> float:
        return self.plan.delta

    @property
    def adjacency(self) -> Adjacency:
        return self.plan.adjacency

    @property
    def total_epsilon(self) -> float:
        """What publishing the whole table costs."""
        return sound_epsilon(self.events, self.delta, self.adjacency)

    @property
    def fits(self) -> int:
        return sum(row.fits for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The whole table as plain values, with what all fits share."""
        plan, learnt = self.plan, self.noise_scale == "learnt"
        return {
            "data": self.name,
            "task": self.task,
            "delta": self.delta,
            "adjacency": self.adjacency,
            "epsilon_each": self.epsilon_each,
            "epsilon_total": self.total_epsilon,
            "fits": self.fits,
            "hidden": None if self.hidden is None else list(self.hidden),
            "steps": plan.steps,
            "batch": plan.expected_batch,
            "clip": plan.mechanism.clip,
            "noise_multiplier": plan.mechanism.noise_multiplier,
            "noise_scale": self.noise_scale,
            "noise_scale_epsilon": SHARE * self.epsilon_each if learnt else None,
            "test_records": self.inputs,
            "test": self.source,
            "baseline": {self.utility: self.baseline},
            "seeded": self.seeded,
            "outside_the_guarantee": ["seconds", "peak_mb"],  # they depend on private records, and nothing is padded
            "rows": [row.flat() for row in self.rows],
            "not_run": [{"method": name, "reason": reason} for name, reason in self.not_run.items()],
        }


def utility_of(task: Task) -> str:
    return "accuracy" if task == "classification" else "rmse"


@default_aside
def compare(
    request: Request,
    test: Table,
    methods: Sequence[str] | None = None,
    *,
    repeats: int = 1,
    test_source: str = SEPARATE,
    out: Path | None = None,
    config: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    jobs: int = 1,
    reopen: Reopen | Workers | None = None,
) -> Comparison:
    """Fit every method to the records of one request, each with its budget, and measure all of them on `test`.

    methods      by name; None: all that fit the task
    repeats      fits of each method, which shows what the privacy noise does; each fit is charged
    test_source  why the test records may be looked at, see `confide.report.Evaluation`
    out          new directory for the table, a report and one directory per method; None keeps nothing
    config       settings to keep beside every run, such as where the data came from
    jobs         fits that run at the same time, each in a process of its own (joblib's: loky, or another backend that
                 is set by joblib.parallel_config). All of them are paid for before the first starts
    reopen       for jobs > 1: gives the same request and test records again. It is called in the other processes, so
                 that no record passes from one to another; a function of a module, or a partial of one. Or `Workers`
                 that were started with it, and with as many jobs
    """
    request.check()
    if repeats < 1:
        raise Refusal(f"repeats={repeats}: must be at least 1")
    if request.counts_first:
        missing = "records" if request.counted else "classes"
        raise DataError(f"{missing}: not declared; every fit of a comparison would count them anew, so declare them")
    if request.method != "auto":
        raise Refusal(f"method={request.method!r}: a comparison takes its methods by methods=; leave it out")
    if request.checkpoint is not None:
        raise Refusal("checkpoint: keeps one fit, and a comparison makes several; leave it out")
    check_jobs(request.ledger, jobs, reopen)
    with _workers(jobs, reopen) as workers:
        settled = settle(request)
        check_test(test, settled.encoder)
        with _directory(out) as directory:
            if workers is not None and request.ledger is None:  # processes share a file; it goes when they are done
                request = replace(request, ledger=directory.parent / "budget.db")
            elif request.ledger is None:  # one book, or what one fit has paid ahead could not be taken by another
                request = replace(request, ledger=Ledger())
            shown = progress or (lambda *_: None)
            contest = _Contest(Opened(request, settled, test), test_source, repeats, shown, config or {})
            if workers is not None:  # the noise that all fits share is found while they open the records
                workers.ready()
            found = contest.run(*contest.fitting(methods), directory, workers, out is not None)
            if out is not None:
                _save(found, {**found.to_dict(), "out": str(out)}, settled, directory)
    return found


def _workers(jobs: int, reopen: Reopen | Workers | None) -> AbstractContextManager[Workers | None]:
    if reopen is None or jobs == 1:
        return nullcontext()
    return reopen if isinstance(reopen, Workers) else Workers(jobs, reopen)


class _Contest:
    """The data, the plan and the network that all methods share."""

    def __init__(
        self, opened: Opened, test_source: str, repeats: int, progress: Progress, config: Mapping[str, Any]
    ) -> None:
        self.opened, self.request, self.settled = opened, opened.request, opened.settled
        self.test_source, self.repeats, self.progress, self.config = test_source, repeats, progress, config
        self.shared = opened.job(rules.SAMPLER)

    def fitting(self, asked: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
        """The methods for this task; one that was asked for by name and is not for it is refused."""
        names: list[str] = []
        not_run: dict[str, str] = {}
        task = self.settled.task
        for name in known.names() if asked is None else dict.fromkeys(known.get(name).name for name in asked):
            tasks = known.get(name).tasks
            if task in tasks:
                names.append(name)
            elif asked is None:
                not_run[name] = f"is for {' and '.join(tasks)}"
            else:
                raise Refusal(f"methods={name!r}: is for {' and '.join(tasks)}, and this is {task}")
        return names, not_run

    def rehearsed(self, names: Sequence[str], not_run: dict[str, str]) -> dict[str, list[Job]]:
        """The fits of every method that passes its rehearsal; nothing is charged for the others."""
        jobs: dict[str, list[Job]] = {}
        for name in names:
            try:
                fits = self.fits(name)
                rehearse_job(fits[0])
                jobs[name] = fits
            except Refusal as error:
                not_run[name] = str(error)
        return jobs

    def rehearsed_by(self, workers: Workers, names: Sequence[str], not_run: dict[str, str]) -> dict[str, list[Job]]:
        """The same, by other processes; what will take longest comes first, so that nobody waits for it at the end."""
        # What is solved on the host takes longest to rehearse.
        trying = workers.rehearse(sorted(names, key=lambda name: not known.get(name).on_host))
        fits: dict[str, list[Job]] = {}
        for name in names:  # the noise of each, which is found here meanwhile
            try:
                fits[name] = self.fits(name)
            except Refusal as error:
                not_run[name] = str(error)
        seconds: dict[str, float] = {}
        for name, found in trying:
            if isinstance(found, Refusal):
                not_run[name] = str(found)
            elif name in fits:
                seconds[name] = found
        return {name: fits[name] for name in sorted(seconds, key=seconds.__getitem__, reverse=True)}

    def fits(self, name: str) -> list[Job]:
        return [self.opened.job(name, turn) for turn in range(self.repeats)]

    def run(
        self, names: Sequence[str], not_run: dict[str, str], directory: Path, workers: Workers | None, stays: bool
    ) -> Comparison:
        trials: list[Trial] = []
        evaluation: Evaluation | None = None
        if workers is None:
            jobs = self.rehearsed(names, not_run)
            self.opened.warm_up()
        else:
            jobs = self.rehearsed_by(workers, names, not_run)
        if not jobs:
            raise Refusal(f"methods={','.join(names)}: none of them could be fitted ({_reasons(not_run)})")
        first = records_of(self.shared)
        parts = [part for fits in jobs.values() for job in fits for part in job.parts]
        purse = pay_ahead(first, parts, f"compare {', '.join(name for name in names if name in jobs)}")
        tickets = _tickets(jobs, purse.run, directory, stays)
        done = self.in_turn(tickets, jobs, purse) if workers is None else self.in_workers(tickets, workers)
        for ticket, result in done:
            if isinstance(result, Refusal):  # it stays paid for
                not_run[ticket.method] = str(result)
            else:
                trials.append(result[0])
                evaluation = result[1]
        if not trials or evaluation is None:
            raise Refusal(f"methods={','.join(names)}: none of them could be fitted ({_reasons(not_run)})")
        request, shared, settled = self.request, self.shared, self.settled
        return Comparison(
            ranked([trial for trial in trials if trial.method not in not_run], utility_of(settled.task)),
            not_run,
            baseline_of(evaluation),
            evaluation.inputs,
            evaluation.source,
            first.ledger.paid(purse.run),
            request.name,
            settled.task,
            None if request.module is not None else hidden_of(request, settled.schema, settled.features),
            shared.plan,
            request.noise_scale if shared.histogram is None else "learnt",
            request.epsilon,
            request.seed is not None,
        )

    def in_turn(
        self, tickets: Sequence[Ticket], jobs: Mapping[str, list[Job]], purse: Purse
    ) -> Iterator[tuple[Ticket, Result]]:
        """One fit after the other, in this process; a method that was refused is not tried again."""
        refused: set[str] = set()
        for place, ticket in enumerate(tickets):
            if ticket.method in refused:
                continue
            try:
                job, shown = jobs[ticket.method][ticket.turn], self.shown(place, len(tickets))
                yield ticket, self.opened.one(job, purse, ticket, self.test_source, shown, self.config)
            except Refusal as error:
                refused.add(ticket.method)
                yield ticket, error

    def in_workers(self, tickets: Sequence[Ticket], workers: Workers) -> Iterator[tuple[Ticket, Result]]:
        """Several at a time, in processes that open the records by themselves."""
        results = workers.fit(tickets, self.request.ledger, self.test_source, self.config)
        for done, (place, result) in enumerate(results):
            self.shown(done, len(tickets))(self.shared.plan.steps * self.request.chains, 0)
            if isinstance(result, Unfinished):
                raise result
            yield tickets[place], result

    def shown(self, place: int, fits: int) -> Progress:
        """The progress of the fit at some place among all of them."""
        steps = self.shared.plan.steps * self.request.chains
        return lambda done, _: self.progress(place * steps + done, fits * steps)


def _tickets(jobs: Mapping[str, list[Job]], run: str, directory: Path, stays: bool) -> list[Ticket]:
    tickets: list[Ticket] = []
    claimed = 0
    for name, fits in jobs.items():
        for turn, job in enumerate(fits):
            target = directory / (name if turn == 0 else f"{name}-{turn + 1}")
            tickets.append(Ticket(len(tickets), name, turn, run, job.parts, claimed, target, stays))
            claimed += sum(answers for _, answers in job.parts)
    return tickets


def _reasons(not_run: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in not_run.items())


def _save(found: Comparison, summary: Mapping[str, Any], settled: Settled, directory: Path) -> None:
    from confide.report.comparison import render_comparison

    (directory / TABLE).write_text(json_text(summary, pretty=True), encoding="utf-8")
    (directory / PAGE).write_text(render_comparison(found, summary, settled.schema), encoding="utf-8")


@contextmanager
def _directory(out: Path | None) -> Iterator[Path]:
    """Where the runs go: a draft beside `out` that is renamed at the end, or a place that is thrown away.

    Runs that are paid for are kept whatever happens after them: those of a process that was killed, in the draft.
    """
    with _thrown_away() if out is None else _beside(out) as base:
        draft = base / "comparison"
        draft.mkdir()
        try:
            yield draft
        except BaseException as error:
            if out is None or not any(draft.iterdir()):
                raise
            draft.rename(out)
            sync(out.absolute().parent)
            if isinstance(error, BudgetExceeded) or not isinstance(error, Exception):
                raise
            message = f"out={str(out)!r}: could not be finished ({error}); the runs that were paid for are in it"
            raise Unfinished(message, out) from error
        if out is not None:
            draft.rename(out)
            sync(out.absolute().parent)


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    base = out.absolute().with_name(f"{out.name}{UNFINISHED}")
    make_folder(base.parent)
    try:
        base.mkdir()
    except FileExistsError:
        raise Refusal(
            f"out={str(out)!r}: {base.name} holds what a comparison that was killed has paid for; move it away first, "
            "or name another"
        ) from None
    try:
        yield base
    finally:
        shutil.rmtree(base, ignore_errors=True)


@contextmanager
def _thrown_away() -> Iterator[Path]:
    """A temporary folder with the number of this process; those of processes that are gone are swept away."""
    mark = ".confide-compare-"
    for left in Path(tempfile.gettempdir()).glob(f"{mark}*"):
        number = left.name.removeprefix(mark).partition("-")[0]
        if number.isdigit() and not _runs(int(number)):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{mark}{os.getpid()}-") as base:
        yield Path(base)


def _runs(process: int) -> bool:
    """Whether a process of this number is there, as far as the system tells."""
    if os.name == "nt":  # there, asking with a signal would end it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True
