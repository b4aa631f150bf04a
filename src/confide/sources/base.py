"""Source: whatever answers queries, as one complete type. Wrapper: a source around another, which forwards all of it.

    PrivateData            holds records; charges a ledger, reads, adds noise
    Replay                 holds the releases of an earlier run; charges nothing
    Recorder, HoldOut,     wrappers: each overrides what it changes and nothing else
    AdaptiveClip, PaidTogether, PaidAhead

A run may be made by several processes, each with records of its own: every one has a source, and they share a `Crew`.

What a run states is what its receipts say, and a receipt says what was written to the ledger for it: whoever charges
something beside the plan adds it to `price`, and so to both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeAlias

from torch import Tensor

from confide._native.process import mark
from confide.data.schema import Schema
from confide.data.trees import Tree
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.mechanism.posterior_sampling import PosteriorSampling
from confide.privacy.events import Event
from confide.privacy.ledger import Ledger
from confide.sources.crew import Crew
from confide.sources.queries import Query, Release

Part: TypeAlias = tuple[SampledGaussian, int]
"""A mechanism, and how many answers of it."""


@dataclass(frozen=True)
class Stretch:
    """Steps of a run that one attempt is about to make, and that no other attempt may make at the same price.

    run     the run's identity: random, the same in all its attempts
    claim   first and last step that this attempt takes for itself; None: they are paid for a second time instead
    parts   what those steps will ask; the receipt is good for these
    beside  what is paid in the same go and may be asked by anybody, in this process
    """

    run: str
    claim: tuple[int, int] | None
    parts: tuple[Part, ...]
    beside: tuple[Part, ...] = ()


class Receipt:
    """Answers that are paid for. Each can be had once, and only in the process that paid: a fork voids them.

    events  what was written to the ledger for it
    """

    def __init__(self, events: Sequence[Event], parts: Sequence[Part]) -> None:
        self.events = tuple(events)
        self._left: Counter[SampledGaussian] = Counter()
        for mechanism, answers in parts:
            self._left[mechanism] += answers
        self._mark = mark()

    def take(self, mechanism: SampledGaussian) -> bool:
        """Use up one answer; false if there is none left. The caller keeps threads apart."""
        if self._mark != mark() or self._left[mechanism] < 1:
            return False
        self._left[mechanism] -= 1
        return True

    @property
    def left(self) -> int:
        """How many answers it is still good for."""
        return self._left.total() if self._mark == mark() else 0

    def stating(self, events: Sequence[Event]) -> Receipt:
        """The same receipt, with that part of what was written which its run has to state."""
        self.events = tuple(events)
        return self

    def void(self) -> None:
        """Give up what is left: it stays paid for, and nobody can have it."""
        self._left.clear()

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("Receipt: a copy would be good for the same answers once more; charge for them instead")

    __reduce_ex__ = __copy__ = __deepcopy__ = _refuse


class Source(Protocol):
    """Everything that a run needs of what it reads."""

    @property
    def schema(self) -> Schema:
        """The public facts."""

    @property
    def seeded(self) -> bool:
        """Noise from a seed, as in a test: nothing is claimed for the run, and it is booked as not private."""

    @property
    def name(self) -> str:
        """The data set's name in the ledger."""

    @property
    def ledger(self) -> Ledger | None:
        """Where answers are charged; None where nothing is read and so nothing charged."""

    @property
    def crew(self) -> Crew:
        """The processes that make the run together; `ALONE` where there is one."""

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the user vouches for about the records, and nobody has proven; a run's statement repeats it."""

    def within(self, plan: Plan) -> Plan:
        """The plan with as much noise as its target needs once what is charged beside it is counted."""

    def price(self, parts: Sequence[Part]) -> tuple[Event, ...]:
        """What answering all of this costs, with what is charged beside it."""

    def form(self) -> tuple[Tree, Tensor] | None:
        """Made-up records within what is declared, targets all zero; None where no form of records is known."""

    def rehearse(self, query: Query) -> None:
        """Try the query on made-up records: what cannot work fails here, before any charge."""

    def charge(self, parts: Sequence[Part], purpose: str = "", stretch: Stretch | None = None) -> Receipt:
        """Pay for all parts or, if that is refused, for none, before any record is read.

        The receipt is good for the parts; with a stretch, for the steps of the stretch alone, and the rest stays with
        the run's name in the ledger until a later stretch takes it up.
        """

    def answer(
        self, query: Query, mechanism: SampledGaussian, receipt: Receipt | None = None, purpose: str = ""
    ) -> Release:
        """One release, paid for by the receipt; without one, by what was charged for anybody, or on the spot."""

    def draw(self, mechanism: PosteriorSampling, purpose: str = "") -> Tensor:
        """One posterior draw, charged on the spot."""

    def check_resumable(self) -> None:
        """Refuse checkpoints where something would be lost that cannot be written down."""


class Wrapper:
    """A source around another. Everything is passed on; derive from this and override what is to be different."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def schema(self) -> Schema:
        return self._source.schema

    @property
    def seeded(self) -> bool:
        return self._source.seeded

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def ledger(self) -> Ledger | None:
        return self._source.ledger

    @property
    def crew(self) -> Crew:
        return self._source.crew

    @property
    def assumptions(self) -> tuple[str, ...]:
        return self._source.assumptions

    def within(self, plan: Plan) -> Plan:
        return self._source.within(plan)

    def price(self, parts: Sequence[Part]) -> tuple[Event, ...]:
        return self._source.price(parts)

    def form(self) -> tuple[Tree, Tensor] | None:
        return self._source.form()

    def rehearse(self, query: Query) -> None:
        self._source.rehearse(query)

    def charge(self, parts: Sequence[Part], purpose: str = "", stretch: Stretch | None = None) -> Receipt:
        return self._source.charge(parts, purpose, stretch)

    def answer(
        self, query: Query, mechanism: SampledGaussian, receipt: Receipt | None = None, purpose: str = ""
    ) -> Release:
        return self._source.answer(query, mechanism, receipt, purpose)

    def draw(self, mechanism: PosteriorSampling, purpose: str = "") -> Tensor:
        return self._source.draw(mechanism, purpose)

    def check_resumable(self) -> None:
        self._source.check_resumable()


def priced(parts: Sequence[Part]) -> tuple[Event, ...]:
    """The events of the mechanisms themselves."""
    return tuple(mechanism.event(answers) for mechanism, answers in parts)


def leased(parts: Sequence[Part]) -> list[Part]:
    """What the events of these parts pay for: a shuffled pass is paid, and may be used, whole."""
    return [
        (mechanism, mechanism.event(answers).count * mechanism.batches_per_pass)
        if mechanism.sampling == "shuffle" and mechanism.private
        else (mechanism, answers)
        for mechanism, answers in parts
    ]
