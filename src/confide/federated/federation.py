"""Federation: the source of a fit over several owners' records. It holds none, asks the parties and adds up.

What a plan promises is per record, and a record is in one party. z is the plan's noise multiplier, C its clip.

    nobody   every party adds N(0, (z C)^2) to its own answer, for its own epsilon. The server sees every answer; the
             sum of K of them carries K times the variance
    sum      a secure sum (`mechanism.secure_sum`): the server sees the sum alone, whose noise is shared out. Of K
             parties t may be missing or tell the server what they know, so that the sum carries K / (K - t) times the
             variance

The plan that the method sees has the noise of the sum. What is stated and charged is the mechanism that protects a
record: z at the sampling rate q, in both.

Which parties take part in a step is known to the server, so it earns no amplification: every party is charged for every
step. Under "nobody" a party that does not reply is left out of the sum, and the expected batch with it. Under "sum" the
parties of a step, its roster, are named when it is asked, and all of them must reply: else nothing can be read, and the
step is lost. One of the `spare` steps, which are paid for like the others, is then asked of those who are there.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, TypeAlias, get_args

import torch
from torch import Tensor

from confide.data.trees import Tree
from confide.errors import PartyLost, Refusal
from confide.federated import wire
from confide.federated.couriers import Courier
from confide.federated.members import Member, agreed_facts, member_of, raise_refusal, shares_of
from confide.federated.party import UNKNOWN_RUN, mechanism_to_dict
from confide.federated.question import BY_DRAW, BY_GRADIENT, IN_ROUNDS, MOST_AT_ONCE, Inquiry
from confide.federated.wire import Message
from confide.mechanism.clipping.places import tell_of_uneven
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.mechanism.posterior_sampling import PosteriorSampling
from confide.mechanism.secure import lattice_for
from confide.mechanism.secure_sum import Shares, summed
from confide.privacy.events import Event
from confide.sources.base import Part, Receipt, Stretch, priced
from confide.sources.crew import ALONE
from confide.sources.private_data import PrivateData
from confide.sources.queries import Origin, Query, Release

Trust: TypeAlias = Literal["nobody", "sum"]
Level: TypeAlias = Literal["record", "client"]
MOST_NOISE = 0.1
"""Of the largest answer of one party, in every coordinate of the mean of all: with more, and with some dozens of steps
and coordinates, what is learnt is noise. Ten hospitals at epsilon 1 have 0.84 (20 steps, delta 0.01, a secure sum)."""


@dataclass(frozen=True)
class Answered:
    """What one party answered at a step, and the deviation of its noise."""

    sum: Tensor
    std: float


class Federation:
    """A source over several parties, for `confide.fit`.

    courier   the way to the parties
    trust     "nobody": every party adds noise for its own epsilon, and trusts neither the server nor the others;
              "sum": a secure sum of parties that know each other's keys; so many may fail or collude as they agreed on
    missing   how many parties may be missing at a step; more end the run. Under "sum" the parties' own number
    spare     under "sum": steps that are paid for beside the plan's, in place of those that a missing party spoils
    level     what is protected: "record", one record of a party; "client", everything that a party holds
    local     steps that every party makes by itself before it hears of the others, where the method knows how (sep for
              networks, bbp) and nobody is trusted: fewer messages, the same number of steps and the same price
    keys      of the parties, by name, where they have keys
    """

    ledger = None
    crew = ALONE

    def __init__(
        self,
        courier: Courier,
        *,
        trust: Trust = "nobody",
        missing: int | None = None,
        spare: int = 0,
        level: Level = "record",
        local: int = 1,
        keys: Mapping[str, bytes] | None = None,
    ) -> None:
        count = len(courier.parties)
        if not 1 <= local <= MOST_AT_ONCE or (local > 1 and (trust, level) != ("nobody", "record")):
            raise Refusal(
                f"local={local}: must be from 1 to {MOST_AT_ONCE}, and more than 1 for trust='nobody' and "
                "level='record' alone, since a party may tell itself only what carries its whole noise"
            )
        if trust not in get_args(Trust):
            raise Refusal(f"trust={trust!r}: must be one of {', '.join(get_args(Trust))}")
        if missing is not None and not 0 <= missing < count:
            raise Refusal(f"missing={missing}: must be from 0 to {count - 1}, one less than the parties")
        if spare < 0 or (spare and trust != "sum"):
            raise Refusal(f"spare={spare}: steps in place of spoilt ones, at least 0, and for trust='sum' alone")
        if level not in get_args(Level):
            raise Refusal(f"level={level!r}: must be one of {', '.join(get_args(Level))}")
        self.trust, self.spare, self.level = trust, spare, level
        self._courier, self._keys = courier, dict(keys or {})
        self.members = self._met()
        self.schema = agreed_facts(self.members)
        self._shares = shares_of(self.members) if trust == "sum" else None
        self.missing = self._shares.missing if self._shares is not None else missing or 0
        if missing is not None and missing != self.missing:
            raise Refusal(f"missing={missing}: the parties agreed on {self.missing}; leave it out")
        self.seeded = any(member.seeded for member in self.members.values())
        self.name = f"{count} parties"
        self._own: dict[SampledGaussian, SampledGaussian] = {}
        self._made: list[Plan] = []
        self._origin: Origin | None = None
        self._opening: Message | None = None
        self._run, self._step = "", 0
        self._last = 0  # step that is paid for
        self._absent: set[str] = set()
        self._local, self._ahead = local, list[dict[str, Answered]]()
        self._latest: dict[str, Answered] = {}

    @property
    def features(self) -> int:
        """How many numbers one encoded record has."""
        return math.prod(next(iter(self.members.values())).shape)

    # -- what a source is ------------------------------------------------------------------------------------------

    @property
    def assumptions(self) -> tuple[str, ...]:
        count, shares = len(self.members), self._shares
        if shares is None:
            who = (
                f"each of the {count} parties added its own noise to its own answers, for this epsilon by itself, so "
                "that nobody else is trusted, neither the server nor another party (trust: nobody)"
            )
        else:
            who = (
                f"of the {count} parties, which shared the noise out among themselves and hid their answers in a "
                f"secure sum, at most {shares.colluding} told the server or each other more than the protocol says; up "
                f"to {shares.missing} of them could be missing at a step (trust: sum)"
            )
        whole = (
            f"what is protected is not one record but everything that one of the {count} parties holds, which the "
            "words about a record stand for (level: client)"
        )
        vouched = [f"{name}: {said}" for name, member in self.members.items() for said in member.vouched]
        people = f"no person has records at two of the {count} parties"
        return (people, who, *((whole,) if self.level == "client" else ()), *vouched)

    def within(self, plan: Plan) -> Plan:
        """The plan with the noise that the sum will carry, and with spare steps inside its target."""
        if plan in self._made:
            return plan
        planned = self._with_spare(plan)
        found = replace(plan, blocks=tuple((self._of_all(mechanism), steps) for mechanism, steps in planned.blocks))
        self._made.append(found)
        return found

    def price(self, parts: Sequence[Part]) -> tuple[Event, ...]:
        """What it costs a record, which is in one party."""
        return priced(self._of_each(parts))

    def form(self) -> tuple[Tree, Tensor]:
        return self._alike().form()

    def _alike(self) -> PrivateData:
        """Records of the shape that the parties declare."""
        member = next(iter(self.members.values()))
        labels = torch.zeros(2, dtype=torch.int64 if self.schema.class_count else torch.float32)
        return PrivateData(torch.zeros(2, *member.shape), labels, schema=self.schema)

    def rehearse(self, query: Query) -> None:
        """On made-up records of the shape that the parties declare. The parties try it again before they pay."""
        if query.origin is not None:
            Inquiry.of(query.origin)
            self._origin = query.origin
        self._alike().rehearse(query)

    def charge(self, parts: Sequence[Part], purpose: str = "", stretch: Stretch | None = None) -> Receipt:
        """Every party tries the run, then every party pays for it in its own ledger; the server has none."""
        own, run = self._of_each(parts), secrets.token_hex(16) if stretch is None else stretch.run
        header = {
            "ask": "open",
            "run": run,
            "trust": self.trust,
            "level": self.level,
            "question": Inquiry.of(self._origin).to_dict(),
            "own": [[mechanism_to_dict(mechanism), steps] for mechanism, steps in own],
            "shares": next(iter(self.members.values())).peers if self._shares is not None else None,
        }
        replies = self._everybody(Message({**header, "try": True}))  # who would refuse does so before anybody has paid
        if not all(reply.header.get("alike") is True for reply in replies.values()):
            tell_of_uneven()
        self._opening, self._run, self._step = Message(header), run, 0
        self._last, self._ahead, self._latest = sum(steps for _, steps in own), [], {}
        self._absent.clear()
        self._everybody(self._opening)
        return Receipt(priced(own), parts)

    def answer(
        self, query: Query, mechanism: SampledGaussian, receipt: Receipt | None = None, purpose: str = ""
    ) -> Release:
        """One release: every party answers the step, once."""
        if receipt is None or not receipt.take(mechanism):
            raise Refusal("receipt: not good for this answer; parties answer the steps of a run, through confide.fit")
        if self._shares is not None:
            return self._summed(query, mechanism, self._shares)
        self._step += 1
        if not self._ahead:
            self._ahead = self._round(query, mechanism)
        self._latest = self._ahead.pop(0)
        self._check_enough(list(self._latest))
        return self._added(self._latest, query, mechanism)

    def draw(self, mechanism: PosteriorSampling, purpose: str = "") -> NoReturn:
        raise Refusal(f"parties={len(self.members)}: a posterior draw reads all records at once, and no party has them")

    def check_resumable(self) -> None:
        raise Refusal("checkpoint: parties answer a step once, so that a run is not taken up again; fit without one")

    # -- noise and prices ------------------------------------------------------------------------------------------

    def _with_spare(self, plan: Plan) -> Plan:
        """The same plan, its noise calibrated for the spare steps too; what is not calibrated costs what it costs."""
        if not self.spare:
            return plan
        if len(plan.blocks) > 1:
            raise Refusal(f"spare={self.spare}: is for a plan of one block; this has {len(plan.blocks)}")
        if plan.target_epsilon is None:
            return plan
        from confide.privacy.calibration import noise_multiplier_for

        ((mechanism, steps),) = plan.blocks
        noise = noise_multiplier_for(
            epsilon=plan.target_epsilon,
            delta=plan.delta,
            steps=(steps + self.spare) * plan.chains,
            rate=mechanism.rate,
            sampling=mechanism.sampling,
            adjacency=plan.adjacency,
            records=mechanism.records,
            spent=plan.spent,
        )
        return replace(plan, blocks=((replace(mechanism, noise_multiplier=noise), steps),))

    def _of_all(self, mechanism: SampledGaussian) -> SampledGaussian:
        """What the sum of all answers carries, where `mechanism` protects a record."""
        if not mechanism.private or mechanism.sampling not in ("poisson", "full-batch"):
            raise Refusal(
                f"sampling={mechanism.sampling!r}, private={mechanism.private}: parties do not tell their sizes and "
                "answer with noise; use poisson or full-batch"
            )
        count, counted = len(self.members), 1 if self._shares is None else self._shares.counted
        noise = mechanism.noise_multiplier * math.sqrt(count / counted)
        if self.level == "client":
            self._check_clients(mechanism, noise / count)
            noise *= mechanism.records / count  # a party stands for as many records as all have on average
        together = replace(mechanism, noise_multiplier=noise)
        self._own[together] = mechanism
        return together

    def _check_clients(self, mechanism: SampledGaussian, ratio: float) -> None:
        """Refuse what drowns in noise: whole parties are protected by each other's number, not by their records."""
        if mechanism.sampling != "full-batch":
            raise Refusal(
                f"sampling={mechanism.sampling!r}: with level='client' every party answers every step, and parties "
                "that the server knows are no sample; use full-batch"
            )
        if ratio > MOST_NOISE:
            raise Refusal(
                f"level='client': with {len(self.members)} parties the noise in every coordinate of the mean answer is "
                f"{ratio:.2f} of the largest answer that a party can give, and {MOST_NOISE:g} is the most that leaves "
                "something to learn; protect records (level='record'), or ask more parties, or fewer steps"
            )

    def _of_each(self, parts: Sequence[Part]) -> list[Part]:
        own = [(self._own[mechanism], answers) for mechanism, answers in parts]
        return [*own[:-1], (own[-1][0], own[-1][1] + self.spare)] if own else []

    # -- one step --------------------------------------------------------------------------------------------------

    def _request(self, query: Query) -> Message:
        """The step as a party is told of it: a position and, where the party works out the question, a state."""
        origin = query.origin
        if origin is None:
            raise Refusal("query: was not asked by a method, and code is not sent to parties; use confide.fit")
        header: dict[str, Any] = {"ask": "answer", "run": self._run, "step": self._step}
        tensors: dict[str, Tensor] = {"position": origin.problem.position}
        if origin.method.name not in (*BY_GRADIENT, *BY_DRAW):
            header["state"], more = wire.state_to_message(origin.state)
            tensors |= more
        return Message(header, tensors)

    def _answers_to(self, requests: Mapping[str, Message]) -> dict[str, Message]:
        """The answers of those who answered. A party that was started again in between is told the run again."""
        replies = self._asked(requests)
        forgot = [name for name, reply in replies.items() if reply.header.get("unknown") == UNKNOWN_RUN]
        if forgot:  # what it paid for, and what it answered, stands in its ledger
            assert self._opening is not None
            back = self._asked(dict.fromkeys(forgot, self._opening))
            replies |= self._asked({name: requests[name] for name in back})
        return {name: reply for name, reply in replies.items() if "sum" in reply.tensors}

    def _round(self, query: Query, mechanism: SampledGaussian) -> list[dict[str, Answered]]:
        """What everybody answers at this step, and at those after it that they make by themselves."""
        request, origin, own = self._request(query), query.origin, self._own[mechanism]
        assert origin is not None
        count = 1
        if self._local > 1 and len(origin.problem.plan.blocks) == 1 and origin.method.name in IN_ROUNDS:
            left = origin.problem.plan.steps - self._step + 1
            count = min(self._local, left, origin.method.steps_apart(origin.problem, origin.state))
        if origin.method.name in BY_DRAW and not self._latest:
            count = 1  # nobody has answered yet
        requests = dict.fromkeys(self.members, request)
        if count > 1:
            requests = {name: self._of_a_round(request, name, count, origin) for name in self.members}
        found: list[dict[str, Answered]] = [{} for _ in range(count)]
        for name, reply in self._answers_to(requests).items():
            std = _deviation(name, reply, own)
            for place, part in enumerate(_checked(name, reply, query, count).split(query.size)):
                found[place][name] = Answered(part, std)
        return found

    def _of_a_round(self, request: Message, name: str, count: int, origin: Origin) -> Message:
        """The same with the number of steps and, for gradients, what the others answered last."""
        header, tensors = {**request.header, "steps": count}, dict(request.tensors)
        if "state" not in header:
            header["state"], more = wire.state_to_message(origin.state)
            tensors |= more
        if origin.method.name in BY_DRAW:
            others = [answered.sum for other, answered in self._latest.items() if other != name]
            tensors["others"] = sum(others, torch.zeros_like(origin.problem.position))
        return Message(header, tensors)

    def _added(self, answers: Mapping[str, Answered], query: Query, mechanism: SampledGaussian) -> Release:
        total, variance = torch.zeros(query.size, dtype=torch.float64), 0.0
        for answered in answers.values():
            total += answered.sum
            variance += answered.std**2
        return self._release(total, math.sqrt(variance), query, mechanism, list(answers))

    def _summed(self, query: Query, mechanism: SampledGaussian, shares: Shares) -> Release:
        """A secure sum over those who are there; where one of them fails in between, once more with a spare step."""
        own, lost = self._own[mechanism], list[str]()
        while True:
            roster = self._roster()
            self._step += 1
            if self._step > self._last:
                raise PartyLost(
                    f"step {self._step}: {self.spare} spare steps are used up, each spoilt by a missing party "
                    f"(last {', '.join(lost)}); nothing was released, and what was charged stays charged"
                )
            request = self._request(query)
            asked = Message({**request.header, "roster": roster}, request.tensors)
            replies = self._answers_to(dict.fromkeys(roster, asked))
            lost = [name for name in roster if name not in replies]
            self._absent |= set(lost)
            if not lost:
                break
        parts = [_sum_of(name, reply, query.size, torch.int64) for name, reply in replies.items()]
        lattice = lattice_for(own, query.size)
        return self._release(summed(parts, lattice), shares.std(lattice, len(roster)), query, mechanism, roster)

    def _release(
        self, total: Tensor, std: float, query: Query, mechanism: SampledGaussian, names: Sequence[str]
    ) -> Release:
        """In units of records: the mean of parties that answer as one stands for all records."""
        event = self._own[mechanism].event()
        if self.level == "client":
            scale = mechanism.records / len(names)
            return Release((total * scale).to(query.device, query.dtype), std * scale, event, mechanism.expected_batch)
        return Release(total.to(query.device, query.dtype), std, event, self._expected(mechanism, names))

    def _roster(self) -> list[str]:
        """Who takes part in the next step: those who were there, and those who are there again."""
        if self._absent:
            self._absent -= set(self._asked(dict.fromkeys(self._absent, Message({"ask": "facts"}))))
        roster = sorted(name for name in self.members if name not in self._absent)
        self._check_enough(roster)
        return roster

    def _expected(self, mechanism: SampledGaussian, names: Sequence[str]) -> float:
        """Records that a batch of these parties is expected to hold, by the numbers they declare."""
        if len(names) == len(self.members):
            return mechanism.expected_batch
        return mechanism.rate * sum(self.members[name].records for name in names)

    def _check_enough(self, there: Mapping[str, Message] | Sequence[str]) -> None:
        absent = [name for name in self.members if name not in there]
        if len(absent) > self.missing:
            raise PartyLost(
                f"step {self._step}: no answer from {', '.join(absent)}, and {self.missing} may be missing; nothing "
                "was released, and what was charged stays charged"
            )

    # -- talking ---------------------------------------------------------------------------------------------------

    def _asked(self, requests: Mapping[str, Message]) -> dict[str, Message]:
        """The replies of those who replied; a refusal of one is raised.

        Where a connection broke after a party had answered, and the frame was sent again, the answer is lost: the party
        counts as missing.
        """
        frames = {name: wire.packed(request, self._keys.get(name, b"")) for name, request in requests.items()}
        replies: dict[str, Message] = {}
        for name, frame in self._courier.exchange(frames).items():
            try:
                reply = wire.unpacked(frame, self._keys.get(name, b""), wire.digest(frames[name]))
            except Refusal as error:
                raise Refusal(f"party {name}: {error}") from None
            if reply.header.get("replayed") is True:
                continue
            raise_refusal(name, reply)
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
        return {name: member_of(name, reply) for name, reply in found.items()}


def _checked(name: str, reply: Message, query: Query, steps: int) -> Tensor:
    total = _sum_of(name, reply, steps * query.size, query.dtype)
    if not bool(torch.isfinite(total).all()):
        raise Refusal(f"party {name}: its answer is not finite")
    return total


def _sum_of(name: str, reply: Message, size: int, dtype: torch.dtype) -> Tensor:
    try:
        return reply.tensor("sum", size, dtype)
    except Refusal as error:
        raise Refusal(f"party {name}: {error}") from None


def _deviation(name: str, reply: Message, own: SampledGaussian) -> float:
    """Of the noise in an answer; on a lattice it is a little more than what was asked for."""
    std = reply.header.get("std")
    if not isinstance(std, float) or not own.noise_std <= std <= 2 * own.noise_std:
        raise Refusal(f"party {name}: says that its noise is {std!r}, and {own.noise_std:g} was asked for")
    return std
