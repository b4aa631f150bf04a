"""Federation: the source of a fit over several owners' records. It holds none, asks the parties and adds up.

What a plan promises is per record, and a record is in one party. Under trust="nobody" every party adds noise for its
own epsilon: N(0, (z C)^2) each, so that the sum of K answers carries K times the variance, and the plan that the method
sees has that noise. What is stated and charged is the party's own mechanism: z at the sampling rate q.

Which parties take part in a step is known to the server, so it earns no amplification: every party is charged for every
step. A party that does not reply is left out of the sum, and the expected batch with it; beyond `missing` of them
there is no release, and the run ends.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, TypeAlias, get_args

import torch
from torch import Tensor

from confide.data.schema import Schema
from confide.errors import BudgetExceeded, PartyLost, Refusal
from confide.federated import wire
from confide.federated.couriers import Courier
from confide.federated.party import PROTOCOL, UNKNOWN_RUN, mechanism_to_dict
from confide.federated.question import BY_GRADIENT, Question
from confide.federated.wire import Message
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.mechanism.posterior_sampling import PosteriorSampling
from confide.privacy.events import Event
from confide.sources.base import Part, Receipt, Stretch, priced
from confide.sources.crew import ALONE
from confide.sources.private_data import PrivateData
from confide.sources.queries import Origin, Query, Release

Trust: TypeAlias = Literal["nobody"]


@dataclass(frozen=True)
class Member:
    """What a party says of itself, all of it public."""

    schema: Schema
    shape: tuple[int, ...]
    least_noise: float
    vouched: tuple[str, ...]
    seeded: bool

    @property
    def records(self) -> int:
        return self.schema.records or 0


class Federation:
    """A source over several parties, for `confide.fit`.

    courier   the way to the parties
    trust     "nobody": every party adds noise for its own epsilon, and trusts neither the server nor the others
    missing   how many parties may be missing at a step; more end the run
    keys      of the parties, by name, where they have keys
    """

    ledger = None
    crew = ALONE

    def __init__(
        self, courier: Courier, *, trust: Trust = "nobody", missing: int = 0, keys: Mapping[str, bytes] | None = None
    ) -> None:
        if trust not in get_args(Trust):
            raise Refusal(f"trust={trust!r}: must be one of {', '.join(get_args(Trust))}")
        if not 0 <= missing < len(courier.parties):
            raise Refusal(f"missing={missing}: must be from 0 to {len(courier.parties) - 1}, one less than the parties")
        self.trust, self.missing = trust, missing
        self._courier, self._keys = courier, dict(keys or {})
        self.members = self._met()
        self.schema = self._agreed()
        self.seeded = any(member.seeded for member in self.members.values())
        self.name = f"{len(self.members)} parties"
        self._own: dict[SampledGaussian, SampledGaussian] = {}
        self._made: list[Plan] = []
        self._origin: Origin | None = None
        self._opening: Message | None = None
        self._run, self._step = "", 0

    # -- what a source is ------------------------------------------------------------------------------------------

    @property
    def assumptions(self) -> tuple[str, ...]:
        count = len(self.members)
        own = (
            f"no person has records at two of the {count} parties",
            f"each of the {count} parties added its own noise to its own answers, for this epsilon by itself, so that "
            "nobody else is trusted, neither the server nor another party (trust: nobody)",
        )
        vouched = [f"{name}: {said}" for name, member in self.members.items() for said in member.vouched]
        return (*own, *vouched)

    def within(self, plan: Plan) -> Plan:
        """The plan with the noise that the sum will carry; the noise of each party is what was planned."""
        if plan in self._made:
            return plan
        found = replace(plan, blocks=tuple((self._of_all(mechanism), steps) for mechanism, steps in plan.blocks))
        self._made.append(found)
        return found

    def price(self, parts: Sequence[Part]) -> tuple[Event, ...]:
        """What it costs a record, which is in one party."""
        return priced(self._of_each(parts))

    def rehearse(self, query: Query) -> None:
        """On made-up records of the shape that the parties declare. The parties try it again before they pay."""
        if query.origin is not None:
            Question.of(query.origin)
            self._origin = query.origin
        member = next(iter(self.members.values()))
        labels = torch.zeros(2, dtype=torch.int64 if self.schema.class_count else torch.float32)
        PrivateData(torch.zeros(2, *member.shape), labels, schema=self.schema).rehearse(query)

    def charge(self, parts: Sequence[Part], purpose: str = "", stretch: Stretch | None = None) -> Receipt:
        """Every party tries the run, then every party pays for it in its own ledger; the server has none."""
        own, run = self._of_each(parts), secrets.token_hex(16) if stretch is None else stretch.run
        header = {
            "ask": "open",
            "run": run,
            "trust": self.trust,
            "question": Question.of(self._origin).to_dict(),
            "own": [[mechanism_to_dict(mechanism), steps] for mechanism, steps in own],
        }
        self._everybody(Message({**header, "try": True}))  # who would refuse does so before anybody has paid
        self._opening, self._run, self._step = Message(header), run, 0
        self._everybody(self._opening)
        return Receipt(priced(own), parts)

    def answer(
        self, query: Query, mechanism: SampledGaussian, receipt: Receipt | None = None, purpose: str = ""
    ) -> Release:
        """One release: every party answers the step, once."""
        if receipt is None or not receipt.take(mechanism):
            raise Refusal("receipt: not good for this answer; parties answer the steps of a run, through confide.fit")
        self._step += 1
        request = self._request(query)
        replies = self._asked(dict.fromkeys(self.members, request))
        forgot = [name for name, reply in replies.items() if reply.header.get("unknown") == UNKNOWN_RUN]
        if forgot:  # a party that was started again in between; what it paid for stands in its ledger
            assert self._opening is not None
            back = self._asked(dict.fromkeys(forgot, self._opening))
            replies |= self._asked(dict.fromkeys(back, request))
        return self._added({name: reply for name, reply in replies.items() if "sum" in reply.tensors}, query, mechanism)

    def draw(self, mechanism: PosteriorSampling, purpose: str = "") -> NoReturn:
        raise Refusal(f"parties={len(self.members)}: a posterior draw reads all records at once, and no party has them")

    def check_resumable(self) -> None:
        raise Refusal("checkpoint: parties answer a step once, so that a run is not taken up again; fit without one")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _of_all(self, mechanism: SampledGaussian) -> SampledGaussian:
        """What the sum of all answers carries, where each party answers by `mechanism`."""
        if not mechanism.private or mechanism.sampling not in ("poisson", "full-batch"):
            raise Refusal(
                f"sampling={mechanism.sampling!r}, private={mechanism.private}: parties do not tell their sizes and "
                "answer with noise; use poisson or full-batch"
            )
        together = replace(mechanism, noise_multiplier=mechanism.noise_multiplier * math.sqrt(len(self.members)))
        self._own[together] = mechanism
        return together

    def _of_each(self, parts: Sequence[Part]) -> list[Part]:
        return [(self._own[mechanism], answers) for mechanism, answers in parts]

    def _request(self, query: Query) -> Message:
        """The step as a party is told of it: a position and, where the party works out the question, a state."""
        origin = query.origin
        if origin is None:
            raise Refusal("query: was not asked by a method, and code is not sent to parties; use confide.fit")
        header: dict[str, Any] = {"ask": "answer", "run": self._run, "step": self._step}
        tensors: dict[str, Tensor] = {"position": origin.problem.position}
        if origin.method.name not in BY_GRADIENT:
            header["state"], more = wire.state_to_message(origin.state)
            tensors |= more
        return Message(header, tensors)

    def _added(self, replies: Mapping[str, Message], query: Query, mechanism: SampledGaussian) -> Release:
        self._check_enough(replies)
        own = self._own[mechanism]
        total, variance = torch.zeros(query.size, dtype=torch.float64), 0.0
        for name, reply in replies.items():
            total += _checked(name, reply, query)
            variance += _deviation(name, reply, own) ** 2
        expected = mechanism.expected_batch
        if len(replies) < len(self.members):
            expected = own.rate * sum(self.members[name].records for name in replies)
        return Release(total.to(query.dtype), math.sqrt(variance), own.event(), expected)

    def _check_enough(self, replies: Mapping[str, Message]) -> None:
        absent = [name for name in self.members if name not in replies]
        if len(absent) > self.missing:
            raise PartyLost(
                f"step {self._step}: no answer from {', '.join(absent)}, and {self.missing} may be missing; nothing "
                "was released, and what was charged stays charged"
            )

    # -- talking ---------------------------------------------------------------------------------------------------

    def _asked(self, requests: Mapping[str, Message]) -> dict[str, Message]:
        """The replies of those who replied; a refusal of one is raised."""
        frames = {name: wire.packed(request, self._keys.get(name, b"")) for name, request in requests.items()}
        replies: dict[str, Message] = {}
        for name, frame in self._courier.exchange(frames).items():
            try:
                reply = wire.unpacked(frame, self._keys.get(name, b""), wire.digest(frames[name]))
            except Refusal as error:
                raise Refusal(f"party {name}: {error}") from None
            _raise_refusal(name, reply)
            replies[name] = reply
        return replies

    def _everybody(self, request: Message) -> dict[str, Message]:
        """A question before the first step, which all of them must answer."""
        replies = self._asked(dict.fromkeys(self.members, request))
        absent = [name for name in self.members if name not in replies]
        if absent:
            raise PartyLost(f"{', '.join(absent)}: did not reply when the run was opened; start them, and fit again")
        return replies

    def _met(self) -> dict[str, Member]:
        found = self._asked(dict.fromkeys(self._courier.parties, Message({"ask": "facts"})))
        absent = [name for name in self._courier.parties if name not in found]
        if absent:
            raise PartyLost(f"{', '.join(absent)}: did not reply; start every party first")
        return {name: _member(name, reply) for name, reply in found.items()}

    def _agreed(self) -> Schema:
        """The facts that all parties declare alike, with the records of all of them."""
        (first, one), *others = self.members.items()
        for name, other in others:
            odd = [key for key, value in _told(one).items() if _told(other)[key] != value]
            if odd:
                raise Refusal(f"party {name}: declares other facts than {first} ({', '.join(odd)}); use one facts file")
        return replace(one.schema, records=sum(member.records for member in self.members.values()), sources=())


def _told(member: Member) -> dict[str, Any]:
    """Facts that must be the same everywhere, for they decide how a record is encoded."""
    facts = {key: value for key, value in member.schema.to_dict().items() if key not in ("records", "sources")}
    columns = [{key: value for key, value in column.items() if key != "source"} for column in facts["columns"]]
    return {**facts, "columns": columns, "shape of a record": list(member.shape)}


def _member(name: str, reply: Message) -> Member:
    try:
        facts = reply.table("facts")
        if facts["protocol"] != PROTOCOL:
            raise Refusal(f"party {name}: speaks version {facts['protocol']}; this is {PROTOCOL}")
        schema, shape = Schema.from_dict(facts["schema"]), tuple(int(size) for size in facts["shape"])
        vouched = tuple(str(said)[:200] for said in facts["vouched"])
        found = Member(schema, shape, float(facts["least_noise"]), vouched, bool(facts["seeded"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(str(error) if isinstance(error, Refusal) else f"party {name}: its facts cannot be read") from None
    if not found.records:
        raise Refusal(f"party {name}: declares no number of records")
    return found


def _raise_refusal(name: str, reply: Message) -> None:
    said = reply.header.get("refused")
    if said is None:
        return
    budget = reply.header.get("budget")
    if isinstance(budget, list) and len(budget) == 3:
        after, limit, delta = (math.inf if value is None else float(value) for value in budget)
        raise BudgetExceeded(f"party {name}: {said}", after, limit, delta)
    raise Refusal(f"party {name}: {said}")


def _checked(name: str, reply: Message, query: Query) -> Tensor:
    total = reply.tensor("sum", query.size, query.dtype)
    if not bool(torch.isfinite(total).all()):
        raise Refusal(f"party {name}: its answer is not finite")
    return total


def _deviation(name: str, reply: Message, own: SampledGaussian) -> float:
    """Of the noise in an answer; on a lattice it is a little more than what was asked for."""
    std = reply.header.get("std")
    if not isinstance(std, float) or not own.noise_std <= std <= 2 * own.noise_std:
        raise Refusal(f"party {name}: says that its noise is {std!r}, and {own.noise_std:g} was asked for")
    return std
