"""Runs that are killed: `python -m tests.running.journal_runs DIRECTORY CASES SEED` forks runs, kills them with
SIGKILL, starts them again until they end, and prints one line of JSON per case.

The records are all unusable, so that every release is noise alone and noise used twice would show.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import confide
from confide.mechanism.gaussian import SampledGaussian
from confide.running.journal import Checkpoints
from confide.sources.base import Receipt
from confide.sources.queries import Query, Release

STEPS, EVERY, RECORDS = 20, 3, 40
OPERATIONS = 150  # about what an undisturbed run needs


class LoggedData(confide.PrivateData):
    """Writes the first numbers of every release to a file that outlives the process."""

    log: Path

    def answer(
        self, query: Query, mechanism: SampledGaussian, receipt: Receipt | None = None, purpose: str = ""
    ) -> Release:
        release = super().answer(query, mechanism, receipt, purpose)
        with self.log.open("a") as file:
            file.write(" ".join(value.hex() for value in release.sum[:4].tolist()) + "\n")
        return release


def start(directory: Path) -> None:
    """One attempt at the run."""
    x, y = torch.full((RECORDS, 4), torch.nan), torch.zeros(RECORDS, dtype=torch.long)
    ledger = confide.Ledger(directory / "budget.db")
    data = LoggedData(x, y, schema=confide.Schema(classes=3, records=RECORDS), ledger=ledger, name="d")
    data.log = directory / "releases"
    plan = confide.plan(noise_multiplier=1.0, delta=1e-5, records=RECORDS, batch=10, steps=STEPS)
    module = confide.networks.mlp(4, 3, hidden=(5,), generator=torch.Generator().manual_seed(0))
    checkpoint = Checkpoints(directory / "run", every=EVERY)
    run = confide.fit(confide.methods.SGHMC(), module, data, plan, checkpoint=checkpoint)
    counts = [event.count for event in run.privacy.events]
    finite = bool(torch.isfinite(run.posterior.sample(4)).all())
    (directory / "result.json").write_text(json.dumps({"events": sum(counts), "finite": finite}))


def die_at(operation: int) -> None:
    """Kill this process at its n-th write, rename, removal, charge or answer."""
    count = itertools.count()

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            if next(count) == operation:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return called

    for owner, name in (
        (os, "fsync"),
        (os, "replace"),
        (os, "unlink"),
        (confide.Ledger, "charge_all"),
        (confide.Ledger, "claim"),
    ):
        setattr(owner, name, deadly(getattr(owner, name)))
    LoggedData.answer = deadly(LoggedData.answer)  # type: ignore[method-assign]


def attempt(directory: Path, operation: int | None = None, seconds: float | None = None) -> bool:
    """Fork one attempt and maybe kill it; true if it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if operation is not None:
                die_at(operation)
            start(directory)
            code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(code)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    if os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError(f"an attempt failed in {directory}")
    return False


def case(directory: Path, chance: random.Random, longest: float | None) -> dict[str, Any]:
    """A run that is killed up to three times, by operations or by the clock, and then left to end."""
    directory.mkdir(parents=True)
    kills = 0
    for _ in range(3):
        if longest is not None:
            kills += attempt(directory, seconds=chance.uniform(0, longest))
        else:
            kills += attempt(directory, operation=chance.randrange(OPERATIONS))
    assert not attempt(directory)
    releases = (directory / "releases").read_text().split("\n")[:-1]
    charged = sum(event.count for event in confide.Ledger(directory / "budget.db").events("d"))
    result = json.loads((directory / "result.json").read_text())
    return {
        "kills": kills,
        "releases": len(releases),
        "different": len(set(releases)),
        "charged": charged,
        **result,
    }


def main() -> None:
    directory, cases, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    for name in ("here", "undisturbed"):
        (directory / name).mkdir(parents=True)
    start(directory / "here")  # what a first run imports and works out, the forks then have
    began = time.perf_counter()
    attempt(directory / "undisturbed")
    taken = time.perf_counter() - began
    for number in range(cases):
        found = case(directory / str(number), chance, longest=taken if number % 2 else None)
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
