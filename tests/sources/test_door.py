"""One locked door: threads and forks of every kind get no release that was not paid for, and no noise twice."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import confide
from confide import methods
from confide.mechanism.clipping import apart, sealed
from confide.mechanism.gaussian import SampledGaussian
from confide.privacy.events import NonPrivateEvent
from confide.sources import private_data
from confide.sources.private_data import PrivateData
from confide.sources.queries import StatisticQuery

RECORDS = 50
X = torch.rand(RECORDS, 4, generator=torch.Generator().manual_seed(0))
SCHEMA = confide.Schema(classes=2, records=RECORDS)
FORKS: dict[str, Callable[[], int]] = {"python": os.fork, "c": ctypes.PyDLL(None).fork}
each_fork = pytest.mark.parametrize("fork", FORKS.values(), ids=FORKS)


def rows(x: Tensor, y: Tensor) -> Tensor:
    return x.double()


QUERY = StatisticQuery(rows, 4)


def private(**options: Any) -> PrivateData:
    return PrivateData(X, torch.zeros(RECORDS), schema=SCHEMA, name="d", **options)


def full_batch(noise: float = 3.0, secure: bool = False) -> SampledGaussian:
    return SampledGaussian(noise, 10.0, 1.0, RECORDS, "full-batch", secure=secure)


def paid(ledger: confide.Ledger) -> int:
    return sum(event.count for event in ledger.events("d"))


def in_children(number: int, fork: Callable[[], int], work: Callable[[], Any]) -> list[Any]:
    """What `work` returns in so many forked children that live at the same time; None where it was refused."""
    pipes = []
    for _ in range(number):
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = fork()
        if child == 0:
            try:
                said = json.dumps(work())
            except ValueError:
                said = "null"
            os.write(writing, said.encode())
            os._exit(0)
        os.close(writing)
        pipes.append((child, reading))
    found = []
    for child, reading in pipes:
        with os.fdopen(reading, "rb") as pipe:
            found.append(json.loads(pipe.read()))
        os.waitpid(child, 0)
    return found


class Meeting:
    """How many were inside at a time."""

    def __init__(self) -> None:
        self.inside = 0
        self.met: list[int] = []


class TestThreads:
    @pytest.mark.parametrize("secure", [False, True])
    def test_four_threads_get_right_sums_with_their_own_noise(self, secure: bool) -> None:
        """A shared buffer, or a shared space for noise, gave wrong sums and noise twice."""
        data, mechanism, size = private(), full_batch(secure=secure), 300
        data.charge([(mechanism, 4 * size)])
        switch = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            with ThreadPoolExecutor(4) as pool:
                work = [pool.submit(data.answer, QUERY, mechanism) for _ in range(4 * size)]
                sums = torch.stack([each.result().sum for each in work])
        finally:
            sys.setswitchinterval(switch)
        noise = (sums - X.double().sum(0)) / mechanism.noise_std
        assert len(np.unique(sums.numpy(), axis=0)) == len(sums), "noise was used twice"
        assert abs(noise.std().item() - 1) < 4 / np.sqrt(2 * noise.numel())
        assert noise.abs().max() < 6
        assert paid(data.ledger) == 4 * size

    def test_a_release_stays_as_it_is(self) -> None:
        """The sum belongs to whoever asked: no later answer, of any thread, writes into it."""
        data, mechanism = private(), full_batch()
        held = data.answer(QUERY, mechanism).sum
        before = held.clone()
        with ThreadPoolExecutor(2) as pool:
            others = list(pool.map(lambda _: data.answer(QUERY, mechanism).sum, range(50)))
        assert torch.equal(held, before)
        assert len({each.data_ptr() for each in (held, *others)}) == 51

    def test_without_the_lock_it_is_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Planted: a door that lets everybody in at once is seen by queries that meet inside."""
        monkeypatch.setattr(apart, "is_possible", lambda: False)  # in processes of their own they would not meet
        monkeypatch.setattr(sealed.Reachable, "check", lambda self: None)  # no statistic may wait for another thread
        keep = sealed.Reachable._kept  # what a statistic writes is put back; here it shall stay
        monkeypatch.setattr(
            sealed.Reachable,
            "_kept",
            lambda self, value, again: [] if isinstance(value, Meeting) else keep(self, value, again),
        )
        meeting = Meeting()

        def slow(x: Tensor, y: Tensor) -> Tensor:
            meeting.inside += 1
            meeting.met.append(meeting.inside)
            threading.Event().wait(0.002)
            meeting.inside -= 1
            return x.double()

        def ask() -> int:
            data, query = private(), StatisticQuery(slow, 4)
            other = private()
            meeting.met.clear()
            with ThreadPoolExecutor(4) as pool:
                work = [pool.submit(each.answer, query, full_batch()) for each in (data, other) * 4]
                for each in work:
                    each.result()
            return max(meeting.met)

        assert ask() == 1
        monkeypatch.setattr(private_data, "_DOOR", _OpenDoor())
        assert ask() > 1

    def test_fits_at_the_same_time_pay_each_for_itself(self) -> None:
        data = private()
        plan = confide.plan(noise_multiplier=2.0, delta=1e-5, records=RECORDS, batch=10, steps=20)

        def fit(_: int) -> confide.Run:
            return confide.fit(methods.SGD(), torch.nn.Linear(4, 2), data, plan)

        with ThreadPoolExecutor(4) as pool:
            runs = list(pool.map(fit, range(4)))
        assert paid(data.ledger) == 4 * 20
        assert all(run.privacy.events == plan.events() for run in runs)
        draws = torch.cat([run.posterior.sample(1) for run in runs])
        assert len(torch.unique(draws)) == draws.numel()


class _OpenDoor:
    def held(self) -> Any:
        return warnings.catch_warnings()  # a context that keeps nobody out


@each_fork
class TestForks:
    def test_what_the_parent_paid_is_void_in_a_child(self, fork: Callable[[], int], tmp_path: Path) -> None:
        """Four children of a parent that paid for 10 answers released 40."""
        ledger = confide.Ledger(tmp_path / "budget.db")
        data, mechanism = private(ledger=ledger), full_batch()
        data.charge([(mechanism, 10)])
        found = in_children(4, fork, lambda: [data.answer(QUERY, mechanism).sum[0].item() for _ in range(10)])
        released = [value for each in found for value in each or ()]
        released += [data.answer(QUERY, mechanism).sum[0].item() for _ in range(10)]
        assert len(set(released)) == len(released) == 50
        assert paid(confide.Ledger(tmp_path / "budget.db")) >= len(released)

    def test_a_ledger_in_memory_does_not_follow(self, fork: Callable[[], int]) -> None:
        data, mechanism = private(), full_batch()
        data.charge([(mechanism, 10)])
        assert in_children(2, fork, lambda: data.answer(QUERY, mechanism).sum[0].item()) == [None, None]

    def test_a_fork_in_a_callback_has_no_second_posterior(self, fork: Callable[[], int], tmp_path: Path) -> None:
        ledger = confide.Ledger(tmp_path / "budget.db")
        data, parent, answered = private(ledger=ledger), os.getpid(), []
        plan = confide.plan(noise_multiplier=2.0, delta=1e-5, records=RECORDS, batch=10, steps=6)
        reading, writing = os.pipe()

        def progress(done: int, total: int) -> None:
            answered.append(done)
            if done == 3:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    fork()

        try:
            run = confide.fit(methods.SGD(), torch.nn.Linear(4, 2), data, plan, progress=progress)
        except ValueError:
            run = None
        if os.getpid() != parent:
            os.write(writing, b"1" if run is not None else b"0")
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            assert pipe.read() == b"0", "the child has a posterior that nobody paid for"
        os.wait()
        assert run is not None
        assert paid(confide.Ledger(tmp_path / "budget.db")) == len(answered) == 6

    def test_batches_of_parent_and_child_differ(self, fork: Callable[[], int], tmp_path: Path) -> None:
        data = PrivateData(
            torch.eye(RECORDS), torch.zeros(RECORDS), schema=SCHEMA, name="d", ledger=tmp_path / "budget.db"
        )
        drawn = SampledGaussian(0.0, 1.0, 0.5, RECORDS, private=False)
        query = StatisticQuery(rows, RECORDS)
        data.answer(query, drawn)
        found = in_children(2, fork, lambda: data.answer(query, drawn).sum.tolist())
        found.append(data.answer(query, drawn).sum.tolist())
        assert len({tuple(each) for each in found}) == 3


def test_a_child_computes_in_one_thread() -> None:
    """The threads of a parent that has fitted are not there: a fit that waits for them would never end."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert in_children(1, os.fork, torch.get_num_threads) == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


_shared: PrivateData | None = None


def _ask(_: int) -> float:
    assert _shared is not None
    return _shared.answer(QUERY, full_batch()).sum[0].item()


def test_a_pool_of_forked_processes(tmp_path: Path) -> None:
    global _shared
    ledger = confide.Ledger(tmp_path / "budget.db")
    _shared = private(ledger=ledger)
    _shared.charge([(full_batch(), 5)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with multiprocessing.get_context("fork").Pool(3) as pool:
            found = pool.map(_ask, range(24))
    found += [_ask(0) for _ in range(5)]
    assert len(set(found)) == 29
    assert paid(ledger) >= 29


def test_seeded_releases_are_booked_as_not_private() -> None:
    data = private(seed=1)
    plan = confide.plan(noise_multiplier=2.0, delta=1e-5, records=RECORDS, batch=10, steps=6)
    run = confide.fit(methods.SGD(), torch.nn.Linear(4, 2), data, plan)
    data.answer(QUERY, full_batch())
    assert data.ledger.spent(1e-5, "d") == float("inf")
    assert {type(event) for event in data.ledger.events("d")} == {NonPrivateEvent}
    assert paid(data.ledger) == 7
    assert run.privacy.seeded
    assert "no privacy claim" in run.privacy.statement()
    under_a_ceiling = confide.Ledger()
    under_a_ceiling.limit(100.0, 1e-5)
    with pytest.raises(confide.BudgetExceeded, match="non-private"):
        private(seed=1, ledger=under_a_ceiling).answer(QUERY, full_batch())
