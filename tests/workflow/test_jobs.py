"""Fits of a comparison in several processes: all paid for by the parent, no record passed on, no step taken twice."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import joblib
import pytest
import torch
from joblib.parallel import ThreadingBackend

import confide
from confide.data.loaders import load_dataset
from confide.data.table import Table
from confide.errors import RankLost, Refusal
from confide.report.evaluation import SEPARATE
from confide.running.processes import in_processes
from confide.sources.ahead import PaidAhead, Purse, pay_ahead
from confide.sources.base import Part, priced
from confide.sources.private_data import PrivateData
from confide.workflow import calibrate
from confide.workflow.compare import compare
from confide.workflow.facts import settle
from confide.workflow.request import Request
from confide.workflow.run import job_of, records_of
from confide.workflow.tickets import Ticket, _fit_in_worker
from confide.workflow.workers import forget, opened_once

METHODS = ["sgd", "sgld"]


def grown(megabytes: int) -> int:
    """Who did this, having kept so much more memory than before."""
    KEPT.append(bytearray(os.urandom(1 << 20) * megabytes))
    time.sleep(1.1)  # loky looks once a second
    return os.getpid()


KEPT: list[bytearray] = []


@pytest.mark.slow
def test_a_worker_that_has_grown_stays() -> None:
    """What a fit loads is 300 MB; a process that is ended for it has to load and open everything again."""
    pytest.importorskip("psutil")  # without it nobody looks
    calls = [joblib.delayed(grown)(size) for size in (1, 1, 330, 330, 1, 1)]
    assert len(set(in_processes(calls, 2))) <= 2


class TellsAtTheEnd(ThreadingBackend):  # type: ignore[misc]
    """As Ray's backend of joblib: nothing is heard before the last call has ended."""

    supports_return_generator = False


@pytest.mark.parametrize("in_order", [False, True])
def test_backends_that_tell_everything_at_the_end(in_order: bool) -> None:
    joblib.register_parallel_backend("at the end", TellsAtTheEnd)
    calls = [joblib.delayed(abs)(-number) for number in range(5)]
    with joblib.parallel_config("at the end"):
        assert sorted(in_processes(calls, 2, in_order=in_order)) == list(range(5))


def opened(ledger: Path | None, epsilon: float = 3.0) -> tuple[Request, Table]:
    found = load_dataset("digits")
    assert found.test is not None
    assert found.schema is not None
    request = Request(
        found.train,
        epsilon=epsilon,
        delta=1e-4,
        facts=found.schema,
        steps=4,
        batch=64,
        hidden=(),
        ledger=ledger,
        name="d",
    )
    return request, found.test


@pytest.mark.slow
def test_two_at_a_time_cost_what_one_by_one_costs(tmp_path: Path) -> None:
    reopen = partial(opened, tmp_path / "budget.db")
    shown: list[int] = []
    found = compare(
        *reopen(),
        METHODS,
        repeats=2,
        out=tmp_path / "out",
        jobs=2,
        reopen=reopen,
        progress=lambda d, _: shown.append(d),
    )
    assert {row.method for row in found.rows} == set(METHODS)
    assert found.fits == 4
    assert shown[-1] == 4 * 4
    with confide.Ledger(tmp_path / "budget.db") as ledger:
        assert sum(event.count for event in ledger.events("d")) == 4 * 4
        assert {entry.purpose for entry in ledger.entries()} == {"compare sgd, sgld"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == [
        "sgd",
        "sgd-2",
        "sgld",
        "sgld-2",
    ]


@pytest.mark.slow
def test_a_ledger_in_memory_is_a_file_for_the_while() -> None:
    reopen = partial(opened, None)
    assert compare(*reopen(), ["sgd"], jobs=2, reopen=reopen).fits == 1


def test_steps_that_another_process_took_are_not_had_again(tmp_path: Path) -> None:
    """Two workers with one ticket: the second is refused before it reads a record."""
    request, _ = opened(tmp_path / "budget.db")
    job = job_of(request.with_method("sgd", None), settle(request))
    purse = pay_ahead(records_of(job), job.parts, "compare sgd")
    for attempt in range(2):
        source = PaidAhead(records_of(job), Purse(purse.run, job.parts))
        if attempt == 0:
            confide.fit(job.method, job.module, source, job.plan, likelihood=job.likelihood)
        else:
            with pytest.raises(Refusal, match="claimed"):
                confide.fit(job.method, job.module, source, job.plan, likelihood=job.likelihood)


def test_a_worker_takes_the_noise_that_was_paid_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process adds up in another order: its noise may differ in the last digits, and the fit is paid for.
    What its parent has found it does not look for again."""
    request, test = opened(tmp_path / "budget.db")
    job = job_of(request.with_method("tabular", None), settle(request))
    (noise, answers), *rest = job.parts

    def paid(**changes: Any) -> tuple[Part, ...]:
        return ((replace(noise, **changes), answers), *rest)

    found = job.paid_as(paid(noise_multiplier=noise.noise_multiplier * (1 + 1e-10)))
    assert found is not None
    assert found.parts == paid(noise_multiplier=noise.noise_multiplier * (1 + 1e-10))
    assert priced(found.parts[:1]) == found.plan.spent
    for parts in (
        paid(noise_multiplier=noise.noise_multiplier * 1.01),
        paid(clip=9.0),
        ((noise, 9), *rest),
        tuple(rest),
    ):
        assert job.paid_as(parts) is None
    quick = job_of(request.with_method("sgd", None), settle(request))
    parts = tuple(
        (replace(one, noise_multiplier=one.noise_multiplier * (1 - 1e-10)), count) for one, count in quick.parts
    )
    purse = pay_ahead(records_of(quick), parts, "compare sgd")
    ticket = Ticket(0, "sgd", 0, purse.run, parts, 0, tmp_path / "sgd")
    noise_found = calibrate.kept()
    monkeypatch.setattr(calibrate, "_found", {})  # as in another process
    monkeypatch.delattr(calibrate, "noise_multiplier_for")
    common = ("w", lambda: (request, test), noise_found)
    _, result = _fit_in_worker(common, ticket, str(tmp_path / "budget.db"), SEPARATE, {})
    forget("w")
    assert not isinstance(result, Exception), result


def chain_records(ledger: Path | None) -> PrivateData:
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    schema = confide.Schema(classes=2, records=200)
    return PrivateData(x, (x[:, 0] > 0).long(), schema=schema, ledger=ledger, name="d")


def test_chains_in_processes_of_their_own(tmp_path: Path) -> None:
    reopen = partial(chain_records, tmp_path / "budget.db")
    plan = confide.plan(noise_multiplier=2.0, delta=1e-5, records=200, batch=50, steps=20)
    network = torch.nn.Linear(3, 2)
    run = confide.fit_chains(confide.methods.SGLD(), network, reopen(), plan, chains=2, jobs=2, reopen=reopen)
    assert run.posterior.facts["chains"] == 2
    with confide.Ledger(tmp_path / "budget.db") as ledger:
        charged = sum(event.count for event in ledger.events("d"))
    assert charged == sum(event.count for event in run.privacy.events) == 40
    with pytest.raises(Refusal, match="in memory"):
        confide.fit_chains(confide.methods.SGLD(), network, chain_records(None), plan, chains=2, jobs=2, reopen=reopen)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_is_one_sentence() -> None:
    with pytest.raises(RankLost, match="a worker process was killed"):
        list(in_processes([joblib.delayed(killed)()], 2))


def test_a_process_opens_the_records_once() -> None:
    """Of one piece of work; another one's are opened in their place."""
    seen: list[str] = []
    for work in ("first", "first", "second", "first"):
        assert opened_once(work, lambda: seen.append("opened")) is None
    forget("first")
    assert len(seen) == 3


def test_refusals(tmp_path: Path) -> None:
    request, test = opened(tmp_path / "budget.db")
    with pytest.raises(Refusal, match="reopen"):
        compare(request, test, METHODS, jobs=2)
    with pytest.raises(Refusal, match="at least 1"):
        compare(request, test, METHODS, jobs=0)
    reopen = partial(opened, tmp_path / "budget.db", 1e-3)
    with confide.Ledger(tmp_path / "budget.db") as ledger:
        ledger.limit(1.0, 1e-4)
    with pytest.raises(confide.BudgetExceeded):  # nothing is started
        compare(*opened(tmp_path / "budget.db"), METHODS, jobs=2, reopen=reopen)
