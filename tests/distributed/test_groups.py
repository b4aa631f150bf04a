"""How ranks find each other: patiently at the start, and never by each taking itself to be the only one."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from confide.distributed import groups, start
from confide.errors import RankLost, Refusal
from tests.distributed.launch import run


def test_a_short_timeout_is_not_that_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines load Python at different speeds; a limit for steps must not end a run before it has begun."""
    asked: list[timedelta] = []

    def rendezvous(url: str, timeout: timedelta) -> Any:
        asked.append(timeout)
        raise RuntimeError("[socket.cpp:1] nobody came")

    monkeypatch.setattr(groups, "rendezvous", rendezvous)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RankLost, match=r"did not find each other \(nobody came\)"), start(timeout=2):
        pass
    assert asked == [timedelta(seconds=groups.START)]


@pytest.mark.slow  # two processes that load torch, one of them late
def test_a_rank_may_come_later_than_the_timeout(tmp_path: Path) -> None:
    told = run(2, {"sums": ("sums", {})}, tmp_path, timeout=3.0, late=8.0)
    assert told[0] == told[1]


@pytest.mark.parametrize("name", groups.TASKS)
def test_copies_that_were_not_told_of_each_other_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """`srun python train.py`, or mpirun: each would be one process with all records."""
    for each in ("RANK", "WORLD_SIZE", *groups.TASKS):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "1")
    with start() as ranks:
        assert ranks.size == 1
    monkeypatch.setenv(name, "2")
    with pytest.raises(Refusal, match=f"{name}=2: .* torchrun"), start():
        pass
    monkeypatch.setenv("WORLD_SIZE", "1")  # torchrun, of one rank, in one of two tasks
    with start() as ranks:
        assert ranks.size == 1
