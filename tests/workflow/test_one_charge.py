"""Everything that a request pays is one charge, before a record is read; what was paid and kept is not paid again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from confide.errors import BudgetExceeded
from confide.methods.sgld import SGLD
from confide.privacy.events import Event, merged
from confide.privacy.ledger import Ledger
from confide.running.artefacts import load_run
from confide.sources.private_data import PrivateData
from confide.workflow import noise
from tests.cli.conftest import Result, call
from tests.workflow.test_doors import PLAN, Doors

STEPS = PLAN["steps"]
NAMED = ("python", "estimator", "command")


class Stopped(BaseException):
    """Takes the place of a signal, and nobody handles it."""


class Entrance:
    """One door with a ledger, unseeded; a second try through it is the same request."""

    def __init__(self, doors: Doors, door: str, book: Path, kept: Path | None = None) -> None:
        self.doors, self.door, self.book, self.kept = doors, door, book, kept

    def go(self) -> Any:
        """The finished run."""
        shared = {"ledger": self.book, "seed": None, "name": "d", "checkpoint": self.kept, "hidden": ()}
        if self.door == "python":
            return self.doors.python(**shared).run
        if self.door == "estimator":
            return self.doors.estimator(**shared).run_
        result = self.command()
        if result.code == 3:
            raise BudgetExceeded(result.err, 0.0, 0.0, 0.0)
        if result.code == 130:
            raise Stopped(result.err)
        assert result.code == 0, result.err
        return load_run(self.doors.folder / "run")

    def command(self) -> Result:
        folder = self.doors.folder
        files = (folder / "train.csv", "--facts", folder / "facts.toml", "--out", folder / "run")
        plan = ("--epsilon", PLAN["epsilon"], "--delta", PLAN["delta"], "--steps", STEPS, "--hidden", "")
        kept = () if self.kept is None else ("--checkpoint", self.kept)
        return call("fit", *files, *plan, "--ledger", self.book, "--name", "d", *kept)

    def charged(self) -> tuple[Event, ...]:
        with Ledger(self.book) as ledger:
            return ledger.events("d")


def never(*_: Any) -> Any:
    raise AssertionError("a record was read")


@pytest.mark.parametrize("door", NAMED)
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("ceiling", [0.5, 4.0, 7.9])
def test_a_tight_ceiling_refuses_everything_and_spends_nothing(
    task: str, door: str, ceiling: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than the count costs, enough for count and histogram, and nearly enough for all."""
    entrance = Entrance(Doors(task, tmp_path, records=None), door, tmp_path / "book.db")
    with Ledger(entrance.book) as ledger:
        ledger.limit(ceiling, PLAN["delta"])
    monkeypatch.setattr(PrivateData, "_PrivateData__batch", never)
    with pytest.raises(BudgetExceeded):
        entrance.go()
    assert entrance.charged() == ()


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_ceiling_of_the_budget_suffices_for_count_and_fit(task: str, tmp_path: Path) -> None:
    """As two charges they would be two plans, the second chosen after the first, which a ceiling asks more for."""
    entrance = Entrance(Doors(task, tmp_path, records=None), "python", tmp_path / "book.db")
    with Ledger(entrance.book) as ledger:
        ledger.limit(PLAN["epsilon"], PLAN["delta"])
    run = entrance.go()
    assert set(merged(run.privacy.events)) == set(merged(entrance.charged()))
    assert 7.9 < run.privacy.epsilon() <= 8.0
    with Ledger(entrance.book) as ledger:
        charges = {entry.plan for entry in ledger.entries() if entry.event is not None}
    assert len(charges) == 1


def test_a_count_without_a_ledger(tmp_path: Path) -> None:
    """What was paid in memory is there for the fit, which holds the same records anew."""
    run = Doors("regression", tmp_path, records=None).python(seed=None).run
    assert [event.count for event in run.privacy.events] == [1, 1, STEPS]


def interrupted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, stop: type[BaseException]) -> None:
    """The call number `at` is interrupted; what comes after works again."""
    usual: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def stopping(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise stop
        return usual(*arguments, **more)

    monkeypatch.setattr(owner, name, stopping)


# where the first attempt ends, and how many histograms are paid for in the end
ENDS = {
    "in a step": (SGLD, "tell", 8, 1),
    "before the histogram is claimed": (noise, "residual_bins", 1, 1),
    "when the histogram is claimed and not kept": (PrivateData, "answer", STEPS + 1, 2),
    "when the histogram is kept": (noise, "scale_of", 1, 1),
}


@pytest.mark.parametrize("door", NAMED)
@pytest.mark.parametrize("end", ENDS)
def test_a_resumed_regression_keeps_its_histogram(
    end: str, door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, at, histograms = ENDS[end]
    monkeypatch.setattr("confide.cli.fit._tell_time", lambda job: None)  # its answers are about made-up records
    entrance = Entrance(Doors("regression", tmp_path), door, tmp_path / "book.db", tmp_path / "kept")
    interrupted(monkeypatch, owner, name, at, KeyboardInterrupt if door == "command" else Stopped)
    with pytest.raises(Stopped):
        entrance.go()
    run = entrance.go()
    charged = merged(entrance.charged())
    assert set(merged(run.privacy.events)) == set(charged)
    assert sum(event.count for event in charged if event.sampling == "full-batch") == histograms
    steps = sum(event.count for event in charged if event.sampling == "poisson")
    assert steps == STEPS if end != "in a step" else STEPS < steps <= STEPS + 1


def test_the_same_request_again_has_the_same_noise_for_nothing(tmp_path: Path) -> None:
    entrance = Entrance(Doors("regression", tmp_path), "python", tmp_path / "book.db", tmp_path / "kept")
    first, charged = entrance.go(), entrance.charged()
    again = entrance.go()
    assert again.posterior.likelihood == first.posterior.likelihood
    assert entrance.charged() == charged
    assert again.privacy.events == first.privacy.events
