"""Checkpoints: killed at any moment, a run goes on as if nothing had happened, and pays for all it may have done."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import confide
from confide import methods, sources
from confide.errors import LedgerError, Refusal
from confide.methods.base import Problem
from confide.methods.sgd import SGD
from confide.posteriors.draws import Draws
from confide.running import checkpoint_files, journal
from confide.running.checkpoint_files import Kept
from confide.running.journal import Checkpoints, KeptJournal
from confide.sources.private_data import PrivateData
from confide.sources.queries import Release, StatisticQuery
from confide.sources.replay import Recorder, Replay
from tests.conformance.conftest import Case, case_for, classification, small_plan
from tests.running.journal_runs import EVERY, STEPS

every_method = pytest.mark.parametrize("name", methods.names())


class Stop(Exception):  # noqa: N818
    """The end of an attempt."""


@pytest.fixture(autouse=True)
def nothing_is_rescued(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt ends here as one does that is killed: nothing is written after it."""
    monkeypatch.setattr(KeptJournal, "rescue", lambda self, error: None)


def stop_after(step: int) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done == step:
            raise Stop

    return progress


def recorded(method: Any, case: Case, plan: confide.Plan) -> list[Release]:
    recorder = Recorder(case.data())
    confide.fit(method, case.module, recorder, plan, seed=5)
    return recorder.releases


def interrupted(method: Any, case: Case, plan: confide.Plan, where: Path, releases: list[Release]) -> Any:
    """A run from recorded releases that stops after 8 steps and goes on from its checkpoint, in another `fit`."""
    checkpoint = Checkpoints(where, every=3)
    source = Replay(releases, case.schema)
    with pytest.raises(Stop):
        confide.fit(method, case.module, source, plan, seed=5, progress=stop_after(8), checkpoint=checkpoint)
    # Another seed: what the method draws must come from the checkpoint, not from a fresh start.
    rest = Replay(releases[6:], case.schema)
    return confide.fit(method, case.module, rest, plan, seed=99, checkpoint=checkpoint).posterior


def same(one: Any, other: Any) -> bool:
    draws = [posterior.sample(5, generator=torch.Generator().manual_seed(3)) for posterior in (one, other)]
    return torch.equal(*draws) and dict(one.facts) == dict(other.facts)


@every_method
def test_a_run_that_goes_on_is_bit_identical(name: str, tmp_path: Path) -> None:
    method, case = methods.get(name)(), case_for(methods.get(name))
    plan = small_plan(case)
    releases = recorded(method, case, plan)
    whole = confide.fit(method, case.module, Replay(releases, case.schema), plan, seed=5).posterior
    assert same(whole, interrupted(method, case, plan, tmp_path / "run", releases))


def test_a_checkpoint_without_the_generator_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method, case = methods.SGLD(step_size=1e-3), classification()
    plan = small_plan(case)
    releases = recorded(method, case, plan)
    whole = confide.fit(method, case.module, Replay(releases, case.schema), plan, seed=5).posterior
    monkeypatch.setattr(KeptJournal, "_put_back", _put_back_all_but_the_generator)
    assert not same(whole, interrupted(method, case, plan, tmp_path / "run", releases))


_put_back = KeptJournal._put_back


def _put_back_all_but_the_generator(self: KeptJournal, kept: Kept) -> None:
    state = self.problem.generator.get_state()
    _put_back(self, kept)
    self.problem.generator.set_state(state)


class TestCharging:
    def attempt(self, where: Path, ledger: confide.Ledger, stop: int | None, **options: Any) -> confide.Run | None:
        case = classification()
        data = case.data(ledger=ledger, name="d", seed=None)
        checkpoint = Checkpoints(where, every=3)
        settings = {"checkpoint": checkpoint, "seed": 5, "progress": None if stop is None else stop_after(stop)}
        try:
            return confide.fit(methods.SGD(), case.module, data, small_plan(case, **options), **settings)
        except Stop:
            return None

    def charged(self, ledger: confide.Ledger) -> int:
        return sum(event.count for event in ledger.events("d"))

    def test_what_may_have_been_done_twice_is_paid_twice(self, tmp_path: Path) -> None:
        ledger = confide.Ledger(tmp_path / "budget.db")
        self.attempt(tmp_path / "run", ledger, 8)
        assert self.charged(ledger) == 12
        self.attempt(tmp_path / "run", ledger, 7)  # from 6; the attempt before can have got to 9
        assert self.charged(ledger) == 12 + 3
        run = self.attempt(tmp_path / "run", ledger, None)
        assert run is not None
        assert self.charged(ledger) == 12 + 3 + 3
        assert sum(event.count for event in run.privacy.events) == 12 + 3 + 3

    def test_a_run_without_interruption_costs_the_plan(self, tmp_path: Path) -> None:
        ledger = confide.Ledger()
        run = self.attempt(tmp_path / "run", ledger, None)
        assert run is not None
        assert self.charged(ledger) == 12
        assert run.privacy.events == run.plan.events()

    def test_a_finished_run_gives_its_result_again_for_nothing(self, tmp_path: Path) -> None:
        ledger = confide.Ledger(tmp_path / "budget.db")
        first = self.attempt(tmp_path / "run", ledger, None)
        again = self.attempt(tmp_path / "run", ledger, None)
        assert first is not None
        assert again is not None
        assert same(first.posterior, again.posterior)
        assert self.charged(ledger) == 12

    def test_a_ledger_that_knows_nothing_is_told_everything(self, tmp_path: Path) -> None:
        self.attempt(tmp_path / "run", confide.Ledger(), 8)
        ledger = confide.Ledger()  # the one in memory went with the process
        run = self.attempt(tmp_path / "run", ledger, None)
        assert run is not None
        assert self.charged(ledger) == 12 + 3
        assert sum(event.count for event in run.privacy.events) == 12 + 3

    def test_a_ledger_that_was_rolled_back_is_noticed(self, tmp_path: Path) -> None:
        """An older copy in its place has forgotten the run; it must not pass for a ledger that never knew it."""
        confide.Ledger(tmp_path / "budget.db").close()
        shutil.copy(tmp_path / "budget.db", tmp_path / "older.db")
        with confide.Ledger(tmp_path / "budget.db") as ledger:
            self.attempt(tmp_path / "run", ledger, 8)
        shutil.copy(tmp_path / "older.db", tmp_path / "budget.db")
        with confide.Ledger(tmp_path / "budget.db") as ledger:
            with pytest.raises(LedgerError, match=r"entries up to \d+, which the ledger does not hold any more"):
                self.attempt(tmp_path / "run", ledger, None)
            assert self.charged(ledger) == 0

    def test_a_ceiling_refuses_before_anything_is_read_again(self, tmp_path: Path) -> None:
        ledger = confide.Ledger(tmp_path / "budget.db")
        self.attempt(tmp_path / "run", ledger, 8)
        ledger.limit(epsilon=ledger.spent(1e-5, "d") * 1.001, delta=1e-5)
        with pytest.raises(confide.BudgetExceeded):
            self.attempt(tmp_path / "run", ledger, None)
        assert self.charged(ledger) == 12

    def test_a_charge_that_an_interrupt_follows_is_found_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between the charge and the journal: the next start has the plan, and pays for what may have been claimed."""
        ledger, write_note = confide.Ledger(tmp_path / "budget.db"), KeptJournal._write_note

        def ends(self: KeptJournal, intended: Any = ()) -> None:
            if not intended:
                raise Stop
            write_note(self, intended)

        with monkeypatch.context() as patched:
            patched.setattr(KeptJournal, "_write_note", ends)
            assert self.attempt(tmp_path / "run", ledger, None) is None
        assert self.charged(ledger) == 12
        run = self.attempt(tmp_path / "run", ledger, None)
        assert run is not None
        assert self.charged(ledger) == sum(event.count for event in run.privacy.events) == 12 + 3

    def test_a_full_disk_shows_before_the_charge(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ledger = confide.Ledger(tmp_path / "budget.db")

        def full(path: Path, body: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

        with monkeypatch.context() as patched:
            patched.setattr(journal, "write", full)
            with pytest.raises(OSError, match="No space left"):
                self.attempt(tmp_path / "run", ledger, None)
        assert self.charged(ledger) == 0
        assert self.attempt(tmp_path / "run", ledger, None) is not None
        assert self.charged(ledger) == 12

    def test_a_plan_that_was_refused_leaves_its_directory_to_another(self, tmp_path: Path) -> None:
        ledger = confide.Ledger(tmp_path / "budget.db")
        ledger.limit(epsilon=20.0, delta=1e-5)
        with pytest.raises(confide.BudgetExceeded):
            self.attempt(tmp_path / "run", ledger, None, noise_multiplier=0.3)
        assert self.attempt(tmp_path / "run", ledger, None, noise_multiplier=4.0) is not None

    def test_what_is_lost_without_a_checkpoint_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also where the interrupt comes before the receipt. What was refused, and cost nothing, says nothing."""
        case, ledger = classification(), confide.Ledger()
        data = case.data(ledger=ledger, name="d", seed=None)

        def paid_and_interrupted(*_: Any, **__: Any) -> Any:
            raise Stop

        for owner, name in ((PrivateData, "answer"), (sources.private_data, "Receipt")):
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, paid_and_interrupted)
                with pytest.raises(Stop) as caught:
                    confide.fit(methods.SGD(), case.module, data, small_plan(case))
            assert "the whole plan was charged before this" in "".join(caught.value.__notes__)
        assert self.charged(ledger) == 24
        ledger.limit(epsilon=0.1, delta=1e-5)
        with pytest.raises(confide.BudgetExceeded) as refused:
            confide.fit(methods.SGD(), case.module, data, small_plan(case))
        assert not getattr(refused.value, "__notes__", [])

    def test_a_new_pass_of_a_shuffled_run_is_paid(self, tmp_path: Path) -> None:
        """4 passes of 3 batches; after step 8 the rest of the pass cannot be taken up, so 2 more passes are due."""
        ledger = confide.Ledger(tmp_path / "budget.db")
        options = {"sampling": "shuffle", "adjacency": "replace-one"}
        self.attempt(tmp_path / "run", ledger, 8, **options)
        assert self.charged(ledger) == 4
        assert self.attempt(tmp_path / "run", ledger, None, **options) is not None
        assert self.charged(ledger) == 4 + 2

    def test_plans_of_several_blocks(self, tmp_path: Path) -> None:
        case = classification()
        first = small_plan(case).mechanism
        plan = confide.Plan(((first, 5), (replace(first, noise_multiplier=2.0), 7)), 1e-5)
        ledger = confide.Ledger(tmp_path / "budget.db")
        checkpoint = Checkpoints(tmp_path / "run", every=4)
        for progress in (stop_after(6), None):
            data = case.data(ledger=ledger, name="d", seed=None)
            try:
                run = confide.fit(methods.SGD(), case.module, data, plan, checkpoint=checkpoint, progress=progress)
            except Stop:
                continue
        counts = {event.noise_multiplier: event.count for event in ledger.events("d")}
        assert counts == {1.0: 5 + 1, 2.0: 7 + 3}  # from 4 on; steps 5 to 8 once more
        assert sum(event.count for event in run.privacy.events) == 16


class Counted(Recorder):
    """Counts the releases that were made, whoever made them."""

    made: ClassVar[list[int]] = []

    def answer(self, *arguments: Any, **options: Any) -> Release:
        release = super().answer(*arguments, **options)
        self.made.append(1)
        return release


class TestCopies:
    """A copy of the directory goes on like the original, and pays for what the original may have released."""

    @pytest.fixture(autouse=True)
    def _none_yet(self) -> None:
        Counted.made.clear()

    def attempt(self, where: Path, ledger: confide.Ledger, progress: Any = None) -> confide.Run | None:
        case = classification()
        source = Counted(case.data(ledger=ledger, name="d", seed=None))
        plan = small_plan(case, steps=30)
        try:
            return confide.fit(
                methods.SGD(), case.module, source, plan, checkpoint=Checkpoints(where, every=5), progress=progress
            )
        except Stop:
            return None

    def charged(self, ledger: confide.Ledger) -> int:
        return sum(event.count for event in ledger.events("d"))

    def test_a_copied_directory_cannot_be_run_again_for_nothing(self, tmp_path: Path) -> None:
        ledger = confide.Ledger(tmp_path / "budget.db")
        self.attempt(tmp_path / "run", ledger, stop_after(11))
        for copy in range(4):
            shutil.copytree(tmp_path / "run", tmp_path / str(copy))
        for copy in range(4):
            run = self.attempt(tmp_path / str(copy), ledger)
            assert run is not None
            assert sum(event.count for event in run.privacy.events) >= 30
            assert self.charged(ledger) >= len(Counted.made)
        assert len(Counted.made) == 11 + 4 * 20
        assert self.charged(ledger) == 30 + 5 + 3 * 20

    def test_copies_that_run_at_the_same_time(self, tmp_path: Path) -> None:
        """The second overtakes the first within a checkpoint's stretch: what the first goes on with is paid again."""
        ledger = confide.Ledger(tmp_path / "budget.db")
        self.attempt(tmp_path / "run", ledger, stop_after(6))
        shutil.copytree(tmp_path / "run", tmp_path / "copy")

        def overtaken(done: int, total: int) -> None:
            if done == 12:
                self.attempt(tmp_path / "copy", ledger)
            assert self.charged(ledger) >= len(Counted.made)

        self.attempt(tmp_path / "run", ledger, overtaken)
        assert len(Counted.made) == 6 + 25 + 25
        assert self.charged(ledger) >= len(Counted.made)

    def test_a_journal_that_ignores_the_others_is_caught(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Planted: what was noted in the folder is believed, as it was before runs had an identity in the ledger."""
        ledger = confide.Ledger(tmp_path / "budget.db")
        self.attempt(tmp_path / "run", ledger, stop_after(11))
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        self.attempt(tmp_path / "run", ledger)
        monkeypatch.setattr(KeptJournal, "_claimed", lambda self: self.mine)
        monkeypatch.setattr(confide.Ledger, "_check_unclaimed", lambda self, run, steps: None)
        with pytest.raises(Refusal, match="used before"):  # a second check, by what the run has used
            self.attempt(tmp_path / "copy", ledger)
        monkeypatch.setattr(confide.Ledger, "_check_paid", lambda self, run, uses, paid_now: None)
        self.attempt(tmp_path / "copy", ledger)
        assert self.charged(ledger) < len(Counted.made)

    def test_the_same_object_again_after_an_interrupt(self, tmp_path: Path) -> None:
        """Fit, interrupt, fit again and then ask: 150 answers were had for 110."""
        case = classification()
        data = case.data(name="d", seed=None)
        plan = small_plan(case, steps=30)
        for progress in (stop_after(8), None):
            with contextlib.suppress(Stop):
                confide.fit(
                    methods.SGD(), case.module, Counted(data), plan, progress=progress,
                    checkpoint=Checkpoints(tmp_path / "run", every=5),
                )  # fmt: skip
        query = StatisticQuery(lambda x, y: x.flatten(1)[:, :2].double(), 2)
        for _ in range(40):
            Counted(data).answer(query, plan.mechanism)
        assert len(Counted.made) == 8 + 25 + 40
        assert self.charged(data.ledger) >= len(Counted.made)


class TestDamage:
    def stopped(self, where: Path, ledger: confide.Ledger) -> None:
        assert TestCharging().attempt(where, ledger, 11) is None  # checkpoints at 6 and 9; can have got to 12

    def finish(self, where: Path, ledger: confide.Ledger) -> int:
        """Go on to the end; steps paid in all."""
        run = TestCharging().attempt(where, ledger, None)
        assert run is not None
        assert torch.isfinite(run.posterior.sample(2)).all()
        return TestCharging().charged(ledger)

    @pytest.mark.parametrize("damage", ["truncated", "flipped", "removed", "emptied"])
    def test_the_last_good_checkpoint_is_used(self, damage: str, tmp_path: Path) -> None:
        ledger = confide.Ledger(tmp_path / "budget.db")
        self.stopped(tmp_path / "run", ledger)
        hurt(sorted((tmp_path / "run").glob("step-*.json"))[-1], damage)
        assert self.finish(tmp_path / "run", ledger) == 12 + 6  # from 6, and the attempt before may have got to 12

    @pytest.mark.parametrize("damage", ["truncated", "flipped", "removed"])
    def test_a_damaged_tensor_takes_its_checkpoint_with_it(self, damage: str, tmp_path: Path) -> None:
        ledger = confide.Ledger(tmp_path / "budget.db")
        self.stopped(tmp_path / "run", ledger)
        newest = json.loads(json.loads(sorted((tmp_path / "run").glob("step-*.json"))[-1].read_text())["body"])
        hurt(tmp_path / "run" / "tensors" / newest["position"], damage)
        assert self.finish(tmp_path / "run", ledger) == 12 + 6

    def test_without_any_checkpoint_the_run_starts_again(self, tmp_path: Path) -> None:
        ledger = confide.Ledger(tmp_path / "budget.db")
        self.stopped(tmp_path / "run", ledger)
        for path in (tmp_path / "run").glob("step-*.json"):
            hurt(path, "flipped")
        assert self.finish(tmp_path / "run", ledger) == 12 + 12

    @pytest.mark.parametrize("damage", ["truncated", "flipped", "removed"])
    def test_a_damaged_journal_is_paid_for(self, damage: str, tmp_path: Path) -> None:
        ledger = confide.Ledger(tmp_path / "budget.db")
        self.stopped(tmp_path / "run", ledger)
        hurt(tmp_path / "run" / "journal.json", damage)
        assert self.finish(tmp_path / "run", ledger) == 12 + 24

    def test_any_flipped_bit_is_noticed(self, tmp_path: Path) -> None:
        """In every kind of file: 40 bits each, spread over the file."""
        ledger = confide.Ledger(tmp_path / "budget.db")
        self.stopped(tmp_path / "run", ledger)
        newest = sorted((tmp_path / "run").glob("step-*.json"))[-1]
        for path in (newest, tmp_path / "run" / "journal.json"):
            whole = path.read_bytes()
            for place in range(0, 8 * len(whole), max(1, 8 * len(whole) // 40)):
                path.write_bytes(flipped(whole, place))
                found = checkpoint_files.unsealed(path)
                # A flip inside JSON's own white space or in the key names may still be refused; it is never believed.
                assert found is None or found == json.loads(json.loads(whole)["body"])
            path.write_bytes(whole)


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def hurt(path: Path, damage: str) -> None:
    content = path.read_bytes()
    if damage == "removed":
        path.unlink()
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.write_bytes(flipped(content, 8 * (len(content) * 2 // 3)))


class TestRefusals:
    def test_another_run(self, tmp_path: Path) -> None:
        case = classification()
        confide.fit(methods.SGD(), case.module, case.data(), small_plan(case), checkpoint=tmp_path / "run")
        for method, plan in (
            (methods.SGD(learning_rate=0.1), small_plan(case)),
            (methods.SGD(), small_plan(case, steps=9)),
        ):
            with pytest.raises(ValueError, match="belongs to another run"):
                confide.fit(method, case.module, case.data(), plan, checkpoint=tmp_path / "run")

    def test_two_at_once(self, tmp_path: Path) -> None:
        case = classification()

        def second(done: int, total: int) -> None:
            confide.fit(methods.SGD(), case.module, case.data(), small_plan(case), checkpoint=tmp_path / "run")

        with pytest.raises(ValueError, match="another process is using it"):
            confide.fit(
                methods.SGD(), case.module, case.data(), small_plan(case), checkpoint=tmp_path / "run", progress=second
            )

    def test_a_file_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "run").write_text("")
        case = classification()
        with pytest.raises(ValueError, match="cannot be written"):
            confide.fit(methods.SGD(), case.module, case.data(), small_plan(case), checkpoint=tmp_path / "run")

    def test_a_state_that_cannot_be_kept(self, tmp_path: Path) -> None:
        @dataclass(frozen=True)
        class ListState:
            step: int = 0
            seen: list[float] = field(default_factory=list)

        @dataclass(frozen=True)
        class Hoarder(SGD):
            name: ClassVar[str] = "hoarder"

            def init(self, problem: Problem) -> Any:
                return ListState()

            def tell(self, problem: Problem, state: Any, release: Release) -> Any:
                return ListState(state.step + 1, [*state.seen, 1.0])

            def posterior(self, problem: Problem, state: Any) -> Draws:
                return Draws(problem.module, problem.likelihood, problem.position.clone()[None], torch.ones(1))

        case, ledger = classification(), confide.Ledger()
        data = case.data(ledger=ledger)
        with pytest.raises(TypeError, match=r"state.seen: list cannot be kept"):
            confide.fit(Hoarder(), case.module, data, small_plan(case), checkpoint=tmp_path / "run")
        assert not ledger.entries(), "refused before anything was charged"

    def test_every(self) -> None:
        with pytest.raises(ValueError, match="every=0: must be at least 1"):
            Checkpoints("run", every=0)


def test_old_checkpoints_are_swept_and_draws_written_once(tmp_path: Path) -> None:
    case, wrote = classification(), []
    write = checkpoint_files.write

    def counted(path: Path, content: bytes) -> None:
        wrote.append(path)
        write(path, content)

    method = methods.SGLD(burn_in=0.0, thinning=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_files, "write", counted)
        plan = small_plan(case)
        confide.fit(method, case.module, case.data(), plan, checkpoint=Checkpoints(tmp_path / "run", every=1))
    assert len(list((tmp_path / "run").glob("step-*.json"))) == 2
    tensors = [path for path in wrote if path.parent.name == "tensors"]
    assert len(tensors) == len(set(tensors))
    assert len(tensors) <= 12 + 12 + 1, "a position and a draw (the same vector) per step, and a few generator states"
    kept = {path.name for path in (tmp_path / "run" / "tensors").iterdir()}
    assert len(kept) <= 12 + 2


@pytest.mark.parametrize(("seed", "fresh"), [(None, True), (7, False)])
def test_noise_is_fresh_after_a_restart(seed: int | None, fresh: bool, tmp_path: Path) -> None:
    """Releases of noise alone. A seed, which is for tests, starts the same stream again: that would be seen."""
    case, sums = classification(), []
    nobody = replace(case, x=torch.full_like(case.x, torch.nan))
    for progress in (stop_after(8), None):
        recorder = Recorder(nobody.data(seed=seed))
        checkpoint = Checkpoints(tmp_path / "run", every=3)
        with contextlib.suppress(Stop):
            confide.fit(
                methods.SGD(), case.module, recorder, small_plan(case), checkpoint=checkpoint, progress=progress
            )
        sums += [tuple(release.sum[:4].tolist()) for release in recorder.releases]
    assert len(sums) == 8 + 6
    assert (len(set(sums)) == len(sums)) is fresh


def killed(directory: Path, cases: int, seed: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.running.journal_runs", str(directory), str(cases), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_killed(found: list[dict[str, Any]]) -> None:
    for case in found:
        assert case["charged"] >= max(case["releases"], STEPS)
        assert case["different"] == case["releases"] >= STEPS, "noise was used twice"
        # A kill costs at most one more stretch, also one between the first charge and the journal.
        assert case["charged"] <= STEPS + case["kills"] * EVERY
        assert case["events"] <= case["charged"]
        assert case["finite"]


def test_runs_killed_at_5_points(tmp_path: Path) -> None:
    found = killed(tmp_path / "runs", cases=3, seed=1)
    check_killed(found)
    assert sum(case["kills"] for case in found) >= 5


@pytest.mark.slow
def test_runs_killed_at_50_points(tmp_path: Path) -> None:
    found = killed(tmp_path / "runs", cases=30, seed=2)
    while sum(case["kills"] for case in found) < 50:  # by the clock, a busy machine may end a run before it is killed
        found += killed(tmp_path / f"more {len(found)}", cases=10, seed=len(found))
    check_killed(found)
