"""The journal of a run: what it has paid for, which steps are left, and what is kept in case it is killed.

    confide.fit(method, module, data, plan, checkpoint="DIR")

What is kept is the state of the method, the position and the method's own random generator: functions of releases, so
keeping them costs nothing. Those three are the whole state of a run. The position is the one part of it that `tell`
changes in place, for the network's parameters are views of it; `Kept` is where it joins the rest. Records, batches,
noise and the network's buffers are never written; noise keys come from the operating system at every start, so no noise
is used twice.

Charging. Every run has a random identity, which its charges in the ledger carry. The first start notes it, and charges
the whole plan. Before an attempt reads a record, and again after every checkpoint, it claims in the ledger the steps
that it can make until it writes the next one. Steps that somebody has claimed before are charged once more: a start
from checkpoint k pays for k+1, ..., reached, since the attempt before may have made them, and so does one from a copy
of the directory, whatever became of the other. Every release is so paid for at least once, whether or not anybody saw
it. A ledger that does not hold the charges of the earlier starts (one in memory, say) is charged for all of them. A
closing question is paid for with the plan, claimed after the last step, and its answer is kept: whoever goes on has it
for nothing.

Files. See `checkpoint_files`; the last two checkpoints are kept. What does not match its hash is not used: the last
good checkpoint is, or the run starts, and is charged, from the beginning.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from confide.errors import BudgetExceeded, LedgerError, Refusal, StepsClaimed
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.methods.base import Method, Problem
from confide.posteriors.frozen import fingerprint_of_frozen
from confide.privacy.events import Event, event_from_dict, event_to_dict
from confide.privacy.ledger import Head
from confide.running.checkpoint_files import (
    TENSORS,
    Kept,
    Tensors,
    locked,
    name_of,
    packed_state,
    sealed,
    tensors_of,
    unpacked_state,
    unsealed,
    write,
)
from confide.running.closing import Closing, closing_from_dict, closing_to_dict
from confide.sources.base import Part, Receipt, Source, Stretch
from confide.sources.queries import Release

FORMAT = 3  # Raised when checkpoints of before could be misread.
KEPT = 2  # Checkpoints: the last one, and the one before in case a write was cut off.
USUAL_CHECKPOINTS = 20  # In a run: a kill costs a twentieth of it at most, and writing takes next to no time.
JOURNAL, CLOSING = "journal.json", "closing.json"


@dataclass(frozen=True)
class Checkpoints:
    """Where checkpoints go, and after how many steps; None: so that a run writes about twenty."""

    directory: str | os.PathLike[str]
    every: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise Refusal(f"every={self.every}: must be at least 1")

    @classmethod
    def at(cls, place: str | os.PathLike[str] | Checkpoints) -> Checkpoints:
        return place if isinstance(place, Checkpoints) else cls(place)


CheckpointPlace: TypeAlias = str | os.PathLike[str] | Checkpoints | None
"""What is given as `checkpoint`; None: the run is kept nowhere."""


@dataclass(frozen=True)
class Attempt:
    """What a journal is about: a method at work on a problem, from its first state on."""

    method: Method
    problem: Problem
    source: Source
    state: Any
    closing: Closing | None = None


class Journal:
    """A run without checkpoints: paid for as a whole, and over when the process is."""

    def __init__(self, attempt: Attempt) -> None:
        method, problem, closing = attempt.method, attempt.problem, attempt.closing
        self.problem, self.source, self.state = problem, attempt.source, attempt.state
        self.purpose = f"fit {method.name}" if closing is None else f"fit {method.name} and {closing.purpose}"
        self.closing: tuple[Part, ...] = () if closing is None else (closing.part,)
        self.blocks: tuple[Part, ...] = (*problem.plan.blocks, *self.closing)
        self.last = sum(answers for _, answers in self.blocks)
        self.run = secrets.token_hex(16)
        self.done = 0
        self.receipt: Receipt | None = None
        self.events: tuple[Event, ...] = ()

    def charge(self, plan: Plan) -> None:
        """Pay for the whole plan, before a record is read."""
        self._pay((*self.closing, *plan.blocks), Stretch(self.run, (1, self.last), self.blocks))

    def left(self) -> Iterator[tuple[int, SampledGaussian]]:
        """The number of every step that is left, with its mechanism."""
        mechanisms = itertools.islice(self.problem.plan.mechanisms(), self.done, None)
        return enumerate(mechanisms, start=self.done + 1)

    def moving(self) -> None:
        """Called before every step: what is changed in place belongs to no step until it is over."""

    def keep(self, step: int, state: Any) -> None:
        """Called after every step."""

    def closed(self, ask: Callable[[], Release]) -> Release:
        """The answer to the closing question, after the last step."""
        return ask()

    def rescue(self, error: BaseException) -> None:
        """Say with an exception that ends a run what it had paid for."""
        if self.receipt is not None or self._is_paid():
            error.add_note(
                "confide: the whole plan was charged before this; without checkpoint= nothing of it is kept, and "
                "another fit pays again"
            )

    def _is_paid(self) -> bool:
        """Whether the ledger holds a charge of this run: an interrupt may come between that and the receipt."""
        with contextlib.suppress(Exception):  # it is the first error that counts
            return self.source.ledger is not None and bool(self.source.ledger.paid(self.run))
        return False

    def close(self) -> None:
        """Give up answers that were not used: no later run can have them for nothing."""
        if self.receipt is not None:
            self.receipt.void()

    def _put_back(self, kept: Kept) -> None:
        self.done, self.state = kept.step, kept.state
        self.problem.position.copy_(kept.position)
        self.problem.generator.set_state(kept.generator)

    def _pay(self, parts: Sequence[Part], stretch: Stretch) -> None:
        self.receipt = self.source.charge(parts, self.purpose, stretch)
        self.events += self.receipt.events


@contextmanager
def journal(place: CheckpointPlace, attempt: Attempt) -> Iterator[Journal]:
    """The journal of a run, with or without checkpoints. Two processes cannot share a directory of checkpoints."""
    if place is None:
        book = Journal(attempt)
        try:
            yield book
        except BaseException as error:
            book.rescue(error)
            raise
        finally:
            book.close()
        return
    settings = Checkpoints.at(place)
    attempt.source.check_resumable()
    with locked(Path(settings.directory)):
        book = KeptJournal(settings, attempt)
        try:
            yield book
        except BaseException as error:
            book.rescue(error)
            raise
        finally:
            book.close()


class KeptJournal(Journal):
    """A run with checkpoints. The state of an earlier attempt is put back when this object is made.

    done   steps that the last checkpoint holds
    next   the step after which the next one is written
    mine   the last step that this attempt may make
    over   the last step that is over, with its state; None within a step
    """

    over: tuple[int, Any] | None = None

    def __init__(self, settings: Checkpoints, attempt: Attempt) -> None:
        super().__init__(attempt)
        self.directory = Path(settings.directory)
        self.plan = attempt.problem.plan
        self.every = settings.every or math.ceil(self.plan.steps / USUAL_CHECKPOINTS)
        self.what = self._what(attempt)
        self.tensors = Tensors(self.directory)
        self.charged: list[tuple[int, int]] = []
        self.note = self._of_this_run(unsealed(self.directory / JOURNAL))
        kept = self._last_kept()
        if kept is not None:
            self._put_back(kept)
        self.next = self._next()
        self.mine = self.done
        self.tensors.packed(self.state)  # a state that cannot be kept is refused before anything is charged

    def _what(self, attempt: Attempt) -> str:
        return fingerprint_of(attempt.method, attempt.problem, attempt.source, self.closing)

    # -- charging --------------------------------------------------------------------------------------------------

    def charge(self, plan: Plan) -> None:
        """Pay for the plan, or for what earlier attempts may have made of the steps that are left."""
        numbered = list(enumerate(steps for _, steps in self.blocks))
        whole = numbered[len(plan.blocks) :] + numbered[: len(plan.blocks)]
        if self.note is not None and self.note.get("intended"):
            self._take_up(self.note)
        if self.note is None:
            # With a checkpoint and no note nothing is known of the attempts before; one more plan is charged for them.
            self._start(whole * 2 if self.done else whole, self._until())
        elif self._in_ledger(self.note):
            self.run, self.charged = self.note["identity"], _pairs(self.note["charged"])
            self.events = tuple(event_from_dict(event) for event in self.note["events"])
            self._take(min(max(self._until(), self._claimed()), plan.steps))
        else:
            reached = max(self._until(), self._reached(self.note))
            self._start(_pairs(self.note["charged"]) + self._steps(self.done, self._reached(self.note)), reached)
        self._write_note()

    def _start(self, charged: list[tuple[int, int]], reached: int) -> None:
        """A run that this ledger does not know: everything is charged, under a new identity."""
        claim = (self.done + 1, reached) if reached > self.done else None
        first = self.note is None and not self.done
        if first:  # a full disk shows before anything is charged, and a charge that an interrupt follows is found again
            self._write_note(intended=charged)
        try:
            answers = tuple(self._parts(self._steps(self.done, reached)))
            self._pay(self._parts(charged), Stretch(self.run, claim, answers))
        except (BudgetExceeded, Refusal) as error:
            if first and not isinstance(error, LedgerError):  # nothing was written: free for a plan that fits
                (self.directory / JOURNAL).unlink(missing_ok=True)
            raise
        self.charged, self.mine = charged, reached

    def _take_up(self, note: dict[str, Any]) -> None:
        """What became of a first start that noted what it was about to charge, and no more: it has released nothing."""
        if self._in_ledger(note):
            paid = () if self.source.ledger is None else self.source.ledger.paid(note["identity"])
            self.note = {**note, "events": [event_to_dict(event) for event in paid]}
        else:
            self.note = None

    def _take(self, stop: int) -> None:
        """Make the steps up to `stop` this attempt's own; those that somebody has claimed are paid for once more."""
        while self.mine < stop:
            claimed = max(self._claimed(), self.mine)
            again = self._steps(self.mine, min(claimed, stop))
            claim = (claimed + 1, stop) if claimed < stop else None
            answers = tuple(self._parts(self._steps(self.mine, stop)))
            try:
                self._pay(self._parts(again), Stretch(self.run, claim, answers))
            except StepsClaimed:
                continue  # another attempt was quicker by a moment
            self.charged += again
            self.mine = stop

    def _claimed(self) -> int:
        """The last step that any attempt has claimed; where nothing is charged, the last that was noted."""
        if self.source.ledger is None:
            return self.mine if self.note is None else self._reached(self.note)
        return self.source.ledger.claimed(self.run)

    def _reached(self, note: dict[str, Any]) -> int:
        """How far the last attempt can have come. A new start begins a new pass, so a shuffled one counts as done."""
        return max(self.plan.steps if self._shuffled else 0, int(note["reached"]))

    @property
    def _shuffled(self) -> bool:
        return any(mechanism.sampling == "shuffle" for mechanism, _ in self.plan.blocks)

    def _next(self) -> int:
        return min(self.done + self.every, self.plan.steps)

    def _until(self) -> int:
        """The last step that is to be this attempt's own for now. What is left of a pass nobody can take up."""
        return self.plan.steps if self._shuffled else self.next

    def _steps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Steps start+1, ..., stop as (number of the block, steps)."""
        blocks = (block for block, (_, steps) in enumerate(self.blocks) for _ in range(steps))
        chosen = itertools.islice(blocks, start, max(start, stop))
        return [(block, len(list(group))) for block, group in itertools.groupby(chosen)]

    def _parts(self, counted: Sequence[tuple[int, int]]) -> list[Part]:
        return [(self.blocks[block][0], steps) for block, steps in counted]

    def _in_ledger(self, note: dict[str, Any]) -> bool:
        """Whether the ledger holds what earlier attempts were charged."""
        ledger, head = self.source.ledger, note["head"]
        if ledger is None or head is None or ledger.head_record()["identity"] != head["identity"]:
            return False  # another ledger: everything is charged there
        try:
            ledger.verify(Head(int(head["count"]), str(head["hash"])))
        except LedgerError as error:
            raise LedgerError(
                f"{error}: checkpoint={str(self.directory)!r} was paid for by entries up to {head['count']}, which the "
                "ledger does not hold any more; a new directory starts, and pays, from the beginning"
            ) from error
        return bool(ledger.paid(note["identity"]))

    # -- keeping ---------------------------------------------------------------------------------------------------

    def moving(self) -> None:
        self.over = None

    def rescue(self, error: BaseException) -> None:
        """Keep the last step of a run that an exception ends between two steps, and say so with the exception."""
        if self.over is not None and self.over[0] > self.done:
            step, state = self.over
            with contextlib.suppress(OSError, Refusal):  # it is the first error that counts
                self._write(Kept(step, state, self.problem.position, self.problem.generator.get_state()))
                self.done = step
                self._write_note()
        if self.done or self.mine:
            error.add_note(
                f"confide: kept in {str(self.directory)!r} up to step {self.done} of {self.plan.steps}; the same call "
                "goes on with it"
            )

    def keep(self, step: int, state: Any) -> None:
        """Write a checkpoint where one is due, and claim the steps until the next one."""
        self.over = step, state
        if step < self.next:
            return
        self._write(Kept(step, state, self.problem.position, self.problem.generator.get_state()))
        self.done = step
        self.next = self._next()
        self._take(self._until())
        self._write_note()
        self._sweep()

    def closed(self, ask: Callable[[], Release]) -> Release:
        """The answer that an earlier attempt kept, or one to a question that is claimed before it is asked."""
        kept = self._closed_before()
        if kept is not None:
            return kept
        release = ask()
        write(self.directory / CLOSING, sealed({"what": self.what, **self._after(), **closing_to_dict(release)}))
        return release

    def _closed_before(self) -> Release | None:
        """What an attempt was answered after the very same last step; where there is none, the answer is claimed."""
        body = self._of_this_run(unsealed(self.directory / CLOSING))
        if body is not None and body["after"] == self._after()["after"]:
            return closing_from_dict(body, self.closing[0][0])
        self._take(self.last)
        self._write_note()
        return None

    def _after(self) -> dict[str, str]:
        return {"after": _digest(self.problem.position)}

    def _write_note(self, intended: Sequence[tuple[int, int]] = ()) -> None:
        """Note what was charged; or, before the first charge of all, what is about to be."""
        head = None if self.source.ledger is None else self.source.ledger.head_record()
        body = {
            "what": self.what,
            "identity": self.run,
            "charged": list(intended) or self.charged,
            "intended": bool(intended),
            "events": [event_to_dict(event) for event in self.events],
            "reached": self.mine,
            "head": head,
            "ranks": self.source.crew.size,
        }
        write(self.directory / JOURNAL, sealed(body))

    def _of_this_run(self, body: dict[str, Any] | None) -> dict[str, Any] | None:
        if body is not None and body.get("what") != self.what:
            raise Refusal(
                f"checkpoint={str(self.directory)!r}: belongs to another run (method, settings, plan, data set name or "
                "network differ); name a new directory"
            )
        return body

    def _write(self, kept: Kept) -> None:
        write(self.directory / name_of(kept.step), sealed(self._body(kept)))

    def _body(self, kept: Kept) -> dict[str, Any]:
        return {"what": self.what, **packed_state(self.tensors, kept)}

    def _sweep(self) -> None:
        """Remove what no kept checkpoint needs."""
        checkpoints = self._checkpoints()
        for path in checkpoints[KEPT:]:
            path.unlink(missing_ok=True)
        needed = {name for path in checkpoints[:KEPT] for name in tensors_of(unsealed(path))}
        for path in (self.directory / TENSORS).iterdir():
            if path.name not in needed:
                path.unlink(missing_ok=True)
        for path in self.directory.glob("*.partial"):
            path.unlink(missing_ok=True)

    # -- putting back ----------------------------------------------------------------------------------------------

    def _last_kept(self) -> Kept | None:
        """The last good checkpoint."""
        for path in self._checkpoints():
            body = self._of_this_run(unsealed(path))
            if body is None or body["state"]["type"] != type(self.state).__qualname__:
                continue
            try:
                tensors = {name: self.tensors.read(name) for name in tensors_of(body)}
            except (OSError, ValueError):
                continue
            return unpacked_state(body, tensors, self.state, self.problem.position.device)
        return None

    def _checkpoints(self) -> list[Path]:
        """Newest first."""
        return sorted(self.directory.glob("step-*.json"), reverse=True)


def fingerprint_of(method: Method, problem: Problem, source: Source, closing: Sequence[Part] = ()) -> str:
    """A hash of everything public that makes a run this run and not another."""
    plan, module = problem.plan, problem.module
    facts = {
        "format": FORMAT,
        "method": [method.name, repr(method)],
        "blocks": [[asdict(mechanism), steps] for mechanism, steps in (*plan.blocks, *closing)],
        "delta": [plan.delta, plan.adjacency],
        "likelihood": repr(problem.likelihood),
        "parameters": [[name, list(value.shape), str(value.dtype)] for name, value in module.named_parameters()],
        "buffers": [[name, str(value.dtype), _digest(value)] for name, value in module.named_buffers()],
        "data": [source.name, source.seeded],
    }
    frozen = fingerprint_of_frozen(module)
    if frozen is not None:
        facts["frozen"] = frozen  # no checkpoint holds them, and on another backbone the position means nothing
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _digest(tensor: Tensor) -> str:
    """Of the values of a buffer as it was given, which no checkpoint holds."""
    from safetensors.torch import save

    return hashlib.sha256(save({"value": tensor.detach().contiguous().cpu()})).hexdigest()


def _pairs(values: list[Any]) -> list[tuple[int, int]]:
    return [(int(block), int(steps)) for block, steps in values]
