"""A party: the boundary of one owner's records, which answers a server that it does not trust.

Whatever is asked, the party decides by itself: it adds its own noise, at least as much as its floor; it charges its own
ledger, whose ceiling can refuse, before it reads; it answers every step of a run once. What it has paid for and which
steps it has answered stand in its ledger, so that a restart forgets neither: a run that is opened again is not paid for
again, and a step that was answered is not answered again, by nobody.

The noise of a step is fixed when the run is opened and paid for. A server says later which step, and where in the
space of parameters; it cannot say how much noise. Errors are about messages, sizes and budgets, never about records.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from confide.data import trees
from confide.data.schema import Schema
from confide.errors import BudgetExceeded, Refusal, StepsClaimed
from confide.federated import wire
from confide.federated.peers import Peers, facts_of
from confide.federated.question import (
    BY_DRAW,
    BY_GRADIENT,
    IN_ROUNDS,
    MOST_AT_ONCE,
    MOST_BLOCKS,
    MOST_STEPS,
    Inquiry,
    query_of,
)
from confide.federated.wire import Message
from confide.mechanism.clipping.places import hearing_of_uneven
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.secure import lattice_for
from confide.mechanism.secure_sum import Cover
from confide.methods.base import Problem
from confide.privacy.events import merged
from confide.privacy.ledger import Ledger
from confide.sources.base import Part, Stretch, priced
from confide.sources.private_data import PrivateData
from confide.sources.queries import Query

PROTOCOL = 1  # raised when messages of before could be misread
LONGEST_COMPLAINT = 400  # signs of an error that are told to a server
UNKNOWN_RUN = "unknown run"
"""What a party says that does not know a run, or does not know it any more: open it (again), and ask again."""
UNFIT = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, AssertionError, ArithmeticError)
"""What a question or a state raises that does not fit; all of it before a record is read."""
MOST_OPEN_RUNS = 16  # each holds a network; the one that was opened first is forgotten, and can be opened again


@dataclass(frozen=True)
class OpenRun:
    """A run that is paid for: its question, what each step adds in noise, and the problem that answers it."""

    question: Inquiry
    blocks: tuple[Part, ...]
    problem: Problem
    start: Any  # the state that the method begins with
    trust: str
    level: str
    told: str  # digest of the message that opened it
    alike: bool  # whether the place of a record in a batch was seen not to matter here

    @property
    def steps(self) -> int:
        return sum(steps for _, steps in self.blocks)

    def mechanism(self, step: int) -> SampledGaussian:
        for mechanism, steps in self.blocks:
            if step <= steps:
                return mechanism
            step -= steps
        raise Refusal(f"step={step}: the run has fewer steps")


class Party:
    """Records of one owner, behind a door that opens on the owner's terms.

    x, y         features and targets, one row per record
    schema       the public facts, with the nominal number of records
    ledger       the owner's: its ceiling is the party's ceiling
    name         the data set's name in the ledger
    least_noise  floor: the smallest noise multiplier that the party ever answers with
    key          shared with the server alone, so that nobody between them can change a message; b"": a checksum
    peers        the other parties, for a secure sum (trust "sum"); None: the party answers under "nobody" alone
    vouched      what the owner vouches for, such as facts assumed public; a run's statement repeats it
    seed         for tests only, as for PrivateData
    """

    def __init__(
        self,
        x: Any,
        y: Any,
        *,
        schema: Schema,
        ledger: Ledger | str | os.PathLike[str],
        name: str,
        least_noise: float,
        key: bytes = b"",
        peers: Peers | None = None,
        vouched: Sequence[str] = (),
        seed: int | None = None,
    ) -> None:
        if not (math.isfinite(least_noise) and least_noise > 0):
            raise Refusal(f"least_noise={least_noise}: must be a finite number > 0")
        if schema.records is None:
            raise Refusal("records=None: a party declares a nominal number of records, public and not exact; add it")
        features = trees.tree_of(x)
        if not isinstance(features, Tensor):
            raise Refusal(f"x: has {len(features)} tensors per record; a party answers about one tensor of features")
        self.schema, self.records, self.least_noise = schema, schema.records, least_noise
        self._shape, self._key, self._peers, self._vouched = tuple(features.shape[1:]), key, peers, tuple(vouched)
        self._data = PrivateData(features, y, schema=schema, ledger=ledger, name=name, seed=seed)
        self._runs: dict[str, OpenRun] = {}
        self._lock = threading.Lock()
        self._answers: dict[str, Callable[[Message], Message]] = {
            "facts": self._facts,
            "open": self._open,
            "answer": self._answer,
        }

    @property
    def ledger(self) -> Ledger:
        return self._data.ledger

    def respond(self, frame: bytes) -> bytes:
        """The reply to a request: an answer, or one sentence that says why not."""
        with self._lock:
            try:
                request = wire.unpacked(frame, self._key)
                asked = request.text("ask", 20)
                if asked not in self._answers:
                    raise Refusal(f"message: ask must be one of {', '.join(self._answers)}")
                reply = self._answers[asked](request)
            except BudgetExceeded as error:
                values = [error.epsilon_after, error.limit, error.delta]
                told = [value if math.isfinite(value) else None for value in values]
                reply = refused(str(error), budget=told)
            except Refusal as error:
                reply = refused(str(error))
            except Exception as error:  # nobody foresaw it, so nobody knows what it would tell
                sys.stderr.write(f"confide party: unexpected {type(error).__name__}; no answer was given\n")
                reply = refused("the party could not answer; its owner's terminal names the kind of error")
            return wire.packed(reply, self._key, wire.digest(frame))

    # -- what can be asked -----------------------------------------------------------------------------------------

    def _facts(self, _: Message) -> Message:
        """What is public here."""
        facts = {
            "protocol": PROTOCOL,
            "schema": self.schema.to_dict(),
            "shape": list(self._shape),
            "least_noise": self.least_noise,
            "vouched": list(self._vouched),
            "seeded": self._data.seeded,
            "peers": facts_of(self._peers),
        }
        return Message({"facts": facts})

    def _open(self, request: Message) -> Message:
        """Try a run on made-up records and pay for it, unless it is paid for; `try`: without paying."""
        run = request.text("run", 64)
        opened = self._tried(request)
        if request.header.get("try") is True:
            self._check_room(run, opened)
            return Message({"fits": True, "alike": opened.alike})
        self._pay(run, opened)
        self._runs.pop(run, None)
        while len(self._runs) >= MOST_OPEN_RUNS:
            del self._runs[next(iter(self._runs))]
        self._runs[run] = opened
        return Message({"open": True})

    def _answer(self, request: Message) -> Message:
        """One step: claimed in the ledger, then answered."""
        run = request.text("run", 64)
        step = request.whole("step", 1, MOST_STEPS)
        opened = self._runs.get(run)
        if opened is None:
            return Message({"unknown": UNKNOWN_RUN})
        if "steps" in request.header:
            return self._answer_round(run, step, opened, request)
        mechanism = opened.mechanism(step)
        query = self._query(opened, request)
        cover = self._cover(run, step, opened, request) if opened.trust == "sum" else None
        try:
            receipt = self._data.charge((), "federated step", Stretch(run, (step, step), ((mechanism, 1),)))
        except StepsClaimed:
            return refused(
                f"step={step}: was answered before, and is answered once; go on with the next", replayed=True
            )
        as_one = self.records if opened.level == "client" else None
        if cover is not None:
            covered = self._data.answer_covered(query, mechanism, receipt, cover, as_one)
            return Message({"covered": True}, {"sum": covered})
        if as_one is not None:
            total, std = self._data.answer_as_one(query, mechanism, receipt, as_one)
            return Message({"std": std}, {"sum": total.to(query.dtype)})
        release = self._data.answer(query, mechanism, receipt)
        return Message({"std": release.noise_std}, {"sum": release.sum})

    def _answer_round(self, run: str, step: int, opened: OpenRun, request: Message) -> Message:
        """Several steps, each a release with its own noise, claimed together; meanwhile the others stand still.

        The party tells itself what it has just released, so that everything it asks of its records is a function of
        releases. Where the message brings what the others answered last, that stands for them.
        """
        method, problem = opened.question.method, opened.problem
        count = request.whole("steps", 1, MOST_AT_ONCE)
        if method.name not in IN_ROUNDS or opened.trust != "nobody" or opened.level != "record":
            raise Refusal(f"steps={count}: this run is answered one step at a time")
        mechanisms = [opened.mechanism(step + place) for place in range(count)]
        self._query(opened, request)  # whether position and state fit, before anything is claimed
        others = request.tensors.get("others")
        if others is not None:
            others = request.tensor("others", problem.position.numel(), problem.position.dtype)
        state = self._state(opened, request)
        parts = tuple((mechanism, 1) for mechanism in mechanisms)
        try:
            receipt = self._data.charge((), "federated steps", Stretch(run, (step, step + count - 1), parts))
        except StepsClaimed:
            return refused(f"step={step}: was answered before, or one after it was; go on", replayed=True)
        sums, std, whole = [], 0.0, opened.question.plan.mechanism.expected_batch
        for place, mechanism in enumerate(mechanisms):
            release = self._data.answer(method.ask(problem, state), mechanism, receipt)
            sums.append(release.sum.clone())
            std = release.noise_std
            if place + 1 < count:
                total = release.sum if others is None else release.sum + others
                state = method.tell(problem, state, replace(release, sum=total, expected_batch=whole))
        return Message({"std": std}, {"sum": torch.cat(sums)})

    # -- what the party holds to -----------------------------------------------------------------------------------

    def _tried(self, request: Message) -> OpenRun:
        """The run as it would be answered; what cannot be is refused here, before anything is paid."""
        trust = request.text("trust", 20)
        if trust != "nobody" and (trust != "sum" or self._peers is None):
            raise Refusal(f"trust={trust!r}: this party answers under 'nobody' alone, for it was given no peers")
        level = request.text("level", 20)
        if level not in ("record", "client"):
            raise Refusal(f"level={level!r}: must be record or client")
        question = Inquiry.from_dict(request.table("question"))
        if question.recipe.features != math.prod(self._shape):  # before a network of any size is made
            raise Refusal(f"features={question.recipe.features}: records here have {math.prod(self._shape)}")
        # On one lattice all parties count the records of all of them; by itself a party counts its own.
        blocks = self._own_blocks(request, question.plan.records if trust == "sum" else self.records)
        if level == "client" and any(mechanism.sampling != "full-batch" for mechanism, _ in blocks):
            raise Refusal("level='client': parties that the server knows are no sample; use full-batch")
        if sum(steps for _, steps in blocks) < question.plan.steps:
            raise Refusal("own: must have as many steps as the plan of the question")
        try:
            problem = question.problem(self.schema)
            problem.generator.seed()  # draws of weights, where the method makes some, are this party's own
            start = question.method.init(problem)
            query = query_of(question, problem, start)
            with hearing_of_uneven() as uneven:
                self._data.rehearse(query)
        except UNFIT as error:
            raise Refusal(f"question: does not fit records like these ({type(error).__name__})") from None
        if trust == "sum":
            self._check_shares(request, blocks, query.size)
        asked = {name: request.header.get(name) for name in ("trust", "level", "question", "own", "shares")}
        return OpenRun(question, blocks, problem, start, trust, level, wire.asked_alike(asked), not uneven)

    def _check_shares(self, request: Message, blocks: tuple[Part, ...], size: int) -> None:
        """Noise is shared out by the owner's numbers; a server that counts on others would state something wrong."""
        assert self._peers is not None
        if request.header.get("shares") != self._peers.agreed():
            raise Refusal("shares: the server counts on other parties, or other numbers of them, than the peers file")
        for mechanism, steps in blocks:
            self._peers.shares.check(lattice_for(mechanism, size), size * steps)

    def _cover(self, run: str, step: int, opened: OpenRun, request: Message) -> Cover:
        assert self._peers is not None
        roster = request.header.get("roster")
        if not isinstance(roster, list) or not all(isinstance(name, str) for name in roster):
            raise Refusal("message: roster must be a list of names")
        tensors = [part for name in sorted(request.tensors) for part in (name, request.tensors[name])]
        asked = wire.asked_alike(opened.told, request.header.get("state"), *tensors)
        return Cover(self._peers.shares, self._peers.masks(run, step, roster, asked))

    def _own_blocks(self, request: Message, records: int) -> tuple[Part, ...]:
        """The noise that is asked for, held against the owner's floor."""
        given = request.header.get("own")
        if not isinstance(given, list) or not 1 <= len(given) <= MOST_BLOCKS:
            raise Refusal(f"own: must be a list of 1 to {MOST_BLOCKS} blocks")
        try:
            pairs = [(mechanism_of(values, records), steps) for values, steps in given]
        except (TypeError, KeyError, ValueError, ArithmeticError) as error:
            raise Refusal(f"own: {error}" if isinstance(error, Refusal) else "own: cannot be read") from None
        for mechanism, steps in pairs:
            if type(steps) is not int or not 1 <= steps <= MOST_STEPS:
                raise Refusal(f"own: steps must be a whole number from 1 to {MOST_STEPS}")
            if mechanism.noise_multiplier < self.least_noise:
                raise Refusal(
                    f"noise_multiplier={mechanism.noise_multiplier:g}: below this party's floor, {self.least_noise:g}; "
                    "ask with more noise: fewer steps, smaller batches or more parties make room for it"
                )
        return tuple(pairs)

    def _pay(self, run: str, opened: OpenRun) -> None:
        """Charge the owner's ledger for the whole run, once, whoever opens it how often."""
        wanted, paid = merged(priced(opened.blocks)), self.ledger.paid(run)
        if paid and not self._data.seeded and set(paid) != set(wanted):
            raise Refusal(f"run={run!r}: was paid for with another plan; open it as before, or as a new run")
        purpose = f"federated {opened.question.method.name}, {opened.told[:16]}"
        if not paid:
            self._data.charge(opened.blocks, purpose, Stretch(run, None, ()))
        elif not any(entry.purpose == purpose for entry in self.ledger.entries() if entry.run == run):
            raise Refusal(f"run={run!r}: was opened with another question or trust; open it as before, or as a new run")

    def _check_room(self, run: str, opened: OpenRun) -> None:
        if not self.ledger.paid(run):
            self.ledger.check_room([priced(opened.blocks)], self._data.name)

    def _query(self, opened: OpenRun, request: Message) -> Query:
        """The question at the position and in the state that were sent; nothing of it depends on a record."""
        problem, method = opened.problem, opened.question.method
        problem.position.copy_(request.tensor("position", problem.position.numel(), problem.position.dtype))
        if method.name in (*BY_GRADIENT, *BY_DRAW):
            return query_of(opened.question, problem, None)
        state = self._state(opened, request)
        try:
            return query_of(opened.question, problem, state)
        except UNFIT as error:
            raise Refusal(f"message: state does not fit the question ({type(error).__name__})") from None

    def _state(self, opened: OpenRun, request: Message) -> Any:
        shapes = opened.question.method.shapes_of_state(opened.problem, opened.start)
        return wire.state_from_message(opened.start, shapes, request.table("state"), request.tensors.get)


def mechanism_of(values: dict[str, Any], records: int) -> SampledGaussian:
    """What a server asks a party to answer with; by which sampling, and never without noise.

    On a lattice, whatever the server says: it sees every bit of the answer, and is not trusted with low-order ones.
    """
    asked = SampledGaussian(**{**values, "records": records, "secure": True})
    if not asked.private or asked.sampling not in ("poisson", "full-batch"):
        raise Refusal(f"sampling={asked.sampling!r}, private={asked.private}: use poisson or full-batch, with noise")
    return asked


def mechanism_to_dict(mechanism: SampledGaussian) -> dict[str, Any]:
    return {name: value for name, value in asdict(mechanism).items() if name != "records"}


def refused(sentence: str, **more: Any) -> Message:
    return Message({"refused": " ".join(sentence.split())[:LONGEST_COMPLAINT], **more})
