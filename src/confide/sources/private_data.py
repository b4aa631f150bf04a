"""The boundary: the only reader of private records.

`PrivateData.answer` is the one door. In this order it charges the ledger, draws a batch, evaluates the query record by
record, clips every record's answer to C, sums, and adds Gaussian noise. What leaves is a Release; the records, their
number and everything computed from them stay inside.

The door is locked. One thread of the process at a time is inside, whichever data set it asks: what a query runs
through (a user's module, workspaces of the clipping engine, streams of noise) may be shared. The sum that leaves
belongs to the caller. What is paid in advance is a receipt, good once for each answer, in the process that paid.

Errors must not depend on records. A record that cannot answer (features that are not finite, an id outside the declared
vocabulary, a label outside the declared classes, a gradient that overflows) counts as zero; an empty batch is a step of
noise alone. A record may be one tensor, a tuple of tensors or tensors by name (`confide.data.trees`).

Several processes may hold parts of one data set (`confide.distributed`). Each goes through its own door: it draws from
its own records and clips; the sums are added up, and each adds the noise to its own part of the vector. The first pays.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, cast
from weakref import WeakSet

import torch
from torch import Tensor

from confide._native.process import ForkAwareLock, mark
from confide.data import trees
from confide.data.fingerprint import Sketch, key_for, known_name, register_sketch
from confide.data.loaders import refuse_loaders
from confide.data.schema import Schema
from confide.data.streaming import MappedRecords
from confide.data.table import Table
from confide.data.trees import Tree
from confide.devices.default import default_aside
from confide.errors import Refusal
from confide.mechanism.clipping.apart import keep_out
from confide.mechanism.clipping.statistics import refuse_silent
from confide.mechanism.clipping.workspace import keep_pages
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.noise import NoiseStream
from confide.mechanism.plan import Plan
from confide.mechanism.posterior_sampling import PosteriorSampling
from confide.mechanism.sampling import BatchSampler
from confide.mechanism.secure import LatticeNoise
from confide.mechanism.secure_sum import Cover
from confide.mechanism.votes import Teacher, Votes, VotesAnswers, rehearse_votes
from confide.privacy.events import Event, NonPrivateEvent, merged
from confide.privacy.ledger import Ledger
from confide.privacy.ledger.places import is_server
from confide.sources.answers import (
    Drawn,
    add_answers,
    check_batch,
    check_kind,
    check_range,
    drawn_in_secret,
    summed_in_double,
)
from confide.sources.base import Part, Receipt, Stretch, leased, priced
from confide.sources.crew import ALONE, Crew, check_alone
from confide.sources.features import FeatureStore
from confide.sources.queries import GradientQuery, Query, Release, StatisticQuery
from confide.sources.records import as_records, as_weights

ROOM_FOR_RANKS = 2.0**-20
"""What adding up the sums of several processes may take of C. Two data sets give sums of R terms in double precision of
which each is off by at most (R - 1) 2^-53 B C, for B records in the batch: within this for R B up to MOST_TERMS."""
MOST_TERMS = 1 << 32  # 2 (R - 1) B 2^-53 is within 2^-20 up to here
FORM = 160  # made-up records, so many that averages over their inputs are known to some per cent
SEEDED = "noise from a seed, which anybody can make again: no privacy"
"""What a ledger says of releases that a test made reproducible."""
_DOOR = ForkAwareLock()


class PrivateData:
    """Records behind the boundary. Not iterable, not indexable, without a length, not picklable, not copyable.

    x, y      features and targets, one row per record; tensors or arrays. x may also be a tuple of them, or a
              dictionary by the names of the module's arguments, each in the number type that the module wants; arrays
              of whole numbers that are mapped from a disk stay there. More records than memory: x from
              `confide.data.streaming.from_parquet`, which holds the targets too, and y=None
    schema    the public facts: classes, nominal number of records, bounds, vocabularies
    ledger    where every answer is charged, or the path of its file, which is then made at the first charge; in memory
              unless given
    name      the data set's name in the ledger, so that budgets add up over runs. In a ledger that outlives the process
              the records are known by a keyed sketch too, and a copy under another name has the name they are known by
    watch     called inside the boundary with every answer's mechanism and per-record norms, for accountants that know
              the data; what it gathers is private and must stay on the trusted side
    seed      for tests only: makes sampling and noise reproducible, so that nothing may be claimed for the run
    crew      the processes of which each holds a part of the records; `confide.distributed.Ranks.private` sets it
    vouched   what whoever made this source could not prove about the records; a run's statement repeats it
    read      the table that x and y were encoded from: a ledger recognises copies of it whatever facts encoded them
    weights   what each record counts for, between 0 and 1: it scales the record's answer after the clip. Weights
              outside are moved to the nearer end, and a record whose weight is no number counts for nothing
    """

    @default_aside
    def __init__(
        self,
        x: Any,
        y: Any,
        *,
        schema: Schema,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        name: str = "",
        watch: Callable[[SampledGaussian, Tensor], None] | None = None,
        seed: int | None = None,
        crew: Crew = ALONE,
        vouched: Sequence[str] = (),
        read: Table | None = None,
        weights: Any = None,
    ) -> None:
        keep_pages()
        if crew is ALONE:
            check_alone()
        elif watch is not None and crew.size > 1:
            raise Refusal(f"watch={watch!r}: sees the records of one rank of {crew.size}; use one process")
        refuse_loaders(x)
        mapped = isinstance(x, MappedRecords)
        features, targets, valid = (x.features, x.targets, x.usable) if mapped else as_records(x, y, schema)
        self.schema = schema
        self.__ledger = Ledger() if ledger is None else ledger
        self.__name = name
        self.__read, self.__sketch = read, cast(Sketch | None, None)
        self.__registered = self.__sketched = False
        self.seeded = seed is not None
        self.crew, self.assumptions = crew, tuple(vouched)
        self.__features, self.__seen = features, FeatureStore(crew.size)
        self.__targets = targets
        keep_out(features, targets, *(() if mapped else (x, y)))
        self.__weights, weighty = as_weights(weights, len(targets))
        self.__valid = valid if weighty is None else valid & weighty
        self.__watch = watch
        seed = seed if seed is None or crew.size == 1 else _seed_of(seed, crew.rank)
        self.__noise = NoiseStream(seed)
        self.__lattice = LatticeNoise(self.__noise)
        self.__sampler = BatchSampler(trees.size_of(features), NoiseStream(None if seed is None else seed + 1))
        self.__masks = NoiseStream(None if seed is None else seed + 2)
        self.__mark = mark()
        self.__issued: WeakSet[Receipt] = WeakSet()
        self.__open: list[Receipt] = []  # what was charged for anybody

    @property
    def ledger(self) -> Ledger:
        """Where answers are charged."""
        if not self.crew.leads:
            raise Refusal(f"ledger: rank {self.crew.rank} has none; rank 0 of {self.crew.size} keeps it, and asks it")
        if not isinstance(self.__ledger, Ledger):
            self.__ledger = Ledger(self.__ledger)
        return self.__ledger

    @property
    def name(self) -> str:
        """In the ledger: the name that the records are known by there, or else the one that was given."""
        if not self.__registered and self.__recognises():
            self.__look_up(register=False)
        return self.__name

    def __recognises(self) -> bool:
        """Whether the ledger is there already, and knows records by sketches."""
        if self.seeded or not self.crew.leads:
            return False
        kept = self.__ledger
        exists = isinstance(kept, Ledger) or is_server(kept) or os.path.exists(kept)
        return exists and self.ledger.outlives_the_process

    def __look_up(self, register: bool) -> None:
        """Find the name of the records, whoever named them; `register`: make them known if they are not."""
        key = key_for(self.ledger, make=register)
        if key is None or (self.crew.size > 1 and self.__sketch is None):  # nobody has asked the other members yet
            return
        if self.__sketch is None:
            self.__sketch = Sketch.of(self.__features, self.__targets, key, self.__read)
        if register:
            self.__name = register_sketch(self.ledger, self.__sketch, key, self.__name)
            self.__registered = True
        else:
            self.__name = known_name(self.ledger, self.__sketch, key) or self.__name

    def find_name_together(self) -> None:
        """The name of the records for all members, once each of them has sketched its own, where the ledger has a key.

        A part of them is too little to go by: next time another part may be the first member's, or one of a hundred.
        """
        if self.crew.size > 1 and not self.seeded:
            self.__sketch_together(make=False)
            self.__name = self.crew.led("name", lambda: self.name)

    def __sketch_together(self, make: bool) -> None:
        told = self.crew.led("key", lambda: self.__shared_key(make))
        if told is not None and self.__sketch is None:
            key = bytes.fromhex(told)
            own = self.crew.together(lambda: Sketch.of(self.__features, self.__targets, key, self.__read).sealed(key))
            self.__sketch = Sketch.of_all([Sketch.unsealed(one, key) for one in self.crew.everybody(own, "sketch")])
        self.__sketched = make or self.__sketch is not None

    def __shared_key(self, make: bool) -> str | None:
        """The first member's, for all of them: they belong to one owner. None: the ledger recognises nobody."""
        if not (self.ledger.outlives_the_process if make else self.__recognises()):
            return None
        key = key_for(self.ledger, make=make)
        return None if key is None else key.hex()

    def within(self, plan: Plan) -> Plan:
        """As it is: nothing is charged beside a plan."""
        return plan

    def price(self, parts: Sequence[Part]) -> tuple[Event, ...]:
        """What the mechanisms cost; see `charge` for how a seeded run is booked."""
        return priced(parts)

    def charge(self, parts: Sequence[Part], purpose: str = "", stretch: Stretch | None = None) -> Receipt:
        """Pay for all parts, or, if the budget does not suffice for all, for none, before any record is read.

        Noise from a seed protects nobody, so releases of a seeded source are booked as not private.
        """
        for mechanism, _ in (*parts, *(() if stretch is None else stretch.parts)):
            self.__check(mechanism)
            check_batch(mechanism)
        events = priced(parts)
        what = (events, purpose, None if stretch is None else (stretch.claim, stretch.parts, stretch.beside))
        with _DOOR.held():
            if self.crew.size > 1 and not (self.__sketched or self.seeded):
                self.__sketch_together(make=True)
            self.crew.led(f"charge {what}", lambda: self.__book(events, purpose, stretch))
            receipt = Receipt(events, leased(parts if stretch is None else stretch.parts))
            self.__issued.add(receipt)
            if stretch is None:
                self.__open.append(receipt)
            elif stretch.beside:
                self.__open.append(Receipt((), leased(stretch.beside)))
        return receipt

    def __check(self, mechanism: SampledGaussian) -> None:
        """Refuse batches that cannot be drawn. How many records each of several processes holds stays private."""
        check_kind(mechanism)
        check_range(mechanism)
        if self.crew.size == 1:
            self.__sampler.check(mechanism)
        elif mechanism.sampling not in ("poisson", "full-batch"):
            raise Refusal(
                f"sampling={mechanism.sampling!r}: {self.crew.size} ranks cannot draw such a batch without telling "
                "each other their sizes; use poisson or full-batch"
            )
        elif mechanism.private and 2 * mechanism.expected_batch * self.crew.size > MOST_TERMS:
            raise Refusal(
                f"expected_batch={mechanism.expected_batch}: the rounding of sums over {self.crew.size} ranks is "
                f"bounded for batches of up to {MOST_TERMS // (2 * self.crew.size)}; use smaller ones, or fewer ranks"
            )

    def __book(self, events: Sequence[Event], purpose: str, stretch: Stretch | None) -> None:
        """Write down what is paid and which steps of a run are taken, in one go."""
        written = self.__booked(events)
        if not (self.__registered or self.seeded) and self.ledger.outlives_the_process:
            self.__look_up(register=True)
        if stretch is None:
            self.ledger.charge_all(written, purpose, self.name)
            return
        uses = merged(self.__booked(priced((*stretch.parts, *stretch.beside))))
        first, last = stretch.claim or (None, None)
        if written:
            self.ledger.charge_all(
                written, purpose, self.name, run=stretch.run, first_step=first, last_step=last, uses=uses
            )
        elif stretch.claim is not None:
            self.ledger.claim(stretch.run, *stretch.claim, purpose, self.name, uses)
        elif uses:
            raise Refusal(f"claim=None of run {stretch.run!r}: steps that are not paid for now must be claimed")

    def __booked(self, events: Sequence[Event]) -> list[Event]:
        """The events as a ledger has to hold them."""
        return [NonPrivateEvent(SEEDED, event.count) if self.seeded else event for event in events]

    def form(self) -> tuple[trees.Tree, Tensor]:
        x = trees.scattered(self.__features, self.schema.inputs, FORM)
        return x, torch.zeros((FORM, *self.__targets.shape[1:]), dtype=self.__targets.dtype)

    @default_aside
    def rehearse(self, query: Query) -> None:
        """Try the query on made-up records of the right shape: what cannot work fails here, before any charge."""
        x = trees.made_up(self.__features, self.schema.inputs)
        y = torch.zeros((2, *self.__targets.shape[1:]), dtype=self.__targets.dtype)
        if self.schema.class_count is not None:
            y[-1] = self.schema.class_count - 1  # a network with too few outputs fails here, not at such a record
        trial = SampledGaussian(1.0, 1.0, 1.0, 2, "full-batch")
        total = torch.zeros(query.size, dtype=query.dtype, device=query.device)
        part = self.__seen.rehearsed(query, x)
        if part is not None:
            query, x = (
                part.asked,
                part.records(part.features(x, rehearsal=True), partial(trees.rows_of, x, slice(None))),
            )
        with trees.about_made_up(self.schema.inputs):
            add_answers(query, (x, y, None), trial, total, rehearsal=True)

    @default_aside
    def answer(
        self, query: Query, mechanism: SampledGaussian, receipt: Receipt | None = None, purpose: str = ""
    ) -> Release:
        """One release: pay, then read. An answer that was not paid in advance is charged here. The sum is yours."""
        with _DOOR.held():
            if isinstance(query, StatisticQuery):
                x = trees.made_up(self.__features, self.schema.inputs)
                refuse_silent(query.function, x, self.__targets[:0], query.size)
            self.__pay(mechanism, receipt, purpose)
            query, batch = self.__batch(query, mechanism)
            with drawn_in_secret(self.__masks):
                total, std, norms = self.__summed(query, batch, mechanism)
            if self.__watch is not None:
                self.__watch(mechanism, norms)
        return Release(total, std, mechanism.event(), mechanism.expected_batch)

    def answer_covered(
        self, query: Query, mechanism: SampledGaussian, receipt: Receipt, cover: Cover, as_one: int | None = None
    ) -> Tensor:
        """This party's part of a secure sum: whole numbers modulo 2^64, which tell nothing without the other parts.

        as_one   a declared number of records: all of them answer as one, by their mean over that number
        """
        with _DOOR.held():
            hidden = self.__hidden(query, mechanism, receipt, as_one)
            lattice = self.__lattice.place_(hidden, mechanism, cover.shares.parties)
            return cover.covered(hidden, lattice, self.__noise)

    def answer_as_one(
        self, query: Query, mechanism: SampledGaussian, receipt: Receipt, declared: int
    ) -> tuple[Tensor, float]:
        """All records answer as one, whose norm is at most C: one owner among many is protected, not one record.

        The answer is the sum of all clipped answers over the declared number of records, clipped once more.
        """
        with _DOOR.held():
            hidden = self.__hidden(query, mechanism, receipt, declared)
            return hidden, self.__lattice.add_(hidden, mechanism)

    def __hidden(self, query: Query, mechanism: SampledGaussian, receipt: Receipt, as_one: int | None = None) -> Tensor:
        """A paid sum in double precision that has not met its noise yet. Inside the door."""
        self.__pay(mechanism, receipt, "")
        with drawn_in_secret(self.__masks):
            hidden = summed_in_double(*self.__batch(query, mechanism), mechanism)[0]
        if as_one is not None:
            hidden.div_(as_one)
            norm = float(torch.linalg.vector_norm(hidden))
            hidden.mul_((1 - ROOM_FOR_RANKS) * min(1.0, mechanism.clip / norm if norm > 0 else 1.0))
        return hidden

    def __summed(self, query: Query, batch: Drawn, mechanism: SampledGaussian) -> tuple[Tensor, float, Tensor]:
        """The noisy sum that leaves, the standard deviation of its noise, and the norms that stay."""
        if self.crew.size > 1:
            return self.__summed_together(query, batch, mechanism)
        total, std = torch.empty(query.size, dtype=query.dtype, device=query.device), mechanism.noise_std
        if mechanism.secure:  # nobody holds the sum before its noise is on it
            hidden, norms = summed_in_double(query, batch, mechanism)
            std = self.__lattice.add_(hidden, mechanism)
            total.copy_(hidden)
        else:
            self.__noise.normal_(total, std)
            norms = add_answers(query, batch, mechanism, total)
        return total, std, norms

    def __summed_together(self, query: Query, batch: Drawn, mechanism: SampledGaussian) -> tuple[Tensor, float, Tensor]:
        """The same on several processes: their sums are added up, and then meet the noise in one addition."""
        std, what = mechanism.noise_std, f"answer {type(query).__name__} {query.dtype} {mechanism}"
        parts = query.parts if isinstance(query, GradientQuery) else None
        hidden = self.__blank(query, torch.float64 if mechanism.secure else query.dtype, parts is None)
        norms = add_answers(query, batch, mechanism, hidden, room=1 - ROOM_FOR_RANKS)
        hidden = hidden.cpu()  # ranks speak through the host
        if mechanism.secure:
            lattice = self.__lattice.place_(hidden, mechanism, self.crew.size)

            def whole(count: int) -> Tensor:
                return self.__lattice.add_whole_(torch.zeros(count, dtype=torch.float64), lattice.sigma)

            places = self.crew.add_up(hidden, what, whole, parts)
            return places.mul_(lattice.spacing).to(query.device, query.dtype), lattice.std, norms

        def normal(count: int) -> Tensor:
            return self.__noise.normal_(torch.empty(count, dtype=query.dtype), std)

        return self.crew.add_up(hidden, what, normal, parts).to(query.device), std, norms

    def __blank(self, query: Query, dtype: torch.dtype, together: bool) -> Tensor:
        """Zeros for the sum of this process: where the others reach it, if that is on the host and put together."""
        if together and query.device.type == "cpu":
            return self.crew.blank(query.size, dtype)
        return torch.zeros(query.size, dtype=dtype, device=query.device)

    @default_aside
    def draw(self, mechanism: PosteriorSampling, purpose: str = "") -> Tensor:
        """One draw from the tempered posterior of a linear model: pay, then read all records."""
        check_kind(mechanism, PosteriorSampling)
        if self.crew.size > 1:
            raise Refusal(f"ranks={self.crew.size}: a posterior draw reads all records at once; use one process")
        if mechanism.model == "linear":
            if self.schema.class_count is not None or self.__targets.ndim != 1:
                raise Refusal(f"classes={self.schema.classes}: a draw of a linear model needs numbers as targets")
        elif self.schema.class_count != mechanism.classes:
            count = "two" if mechanism.classes == 2 else str(mechanism.classes)
            raise Refusal(f"classes={self.schema.classes}: a posterior draw needs a schema with {count} classes")
        if self.__weights is not None:
            raise Refusal("weights: a posterior draw takes all records alike; leave them out, or use another method")
        features = self.__features
        if not isinstance(features, Tensor):
            raise Refusal(f"x: has {len(features)} tensors per record, and a posterior draw needs one of features")
        with _DOOR.held():
            self.__book((mechanism.event(),), purpose, None)
            return mechanism.draw(features[self.__valid], self.__targets[self.__valid], self.__noise)

    @default_aside
    def poll(self, mechanism: Votes, teacher: Teacher, inputs: Tree, purpose: str = "") -> VotesAnswers:
        """Votes of teachers on public inputs: try one on made-up records, pay for all queries, then read all records.

        The teachers' classes are the schema's; `inputs` are public and like the records' features.
        """
        classes = self.schema.class_count
        check_kind(mechanism, Votes)
        if self.crew.size > 1:
            raise Refusal(f"ranks={self.crew.size}: teachers are given records from one process; use one")
        if classes is None or self.__targets.ndim != 1:
            raise Refusal(f"classes={self.schema.classes}: teachers vote for classes; the schema must declare them")
        if trees.size_of(inputs) != mechanism.queries:
            raise Refusal(f"inputs: {trees.size_of(inputs)} of them for queries={mechanism.queries}; they must agree")
        y = torch.arange(2 * classes, dtype=self.__targets.dtype) % classes
        x = trees.rows_of(trees.made_up(self.__features, self.schema.inputs), torch.arange(2 * classes) % 2)
        rehearse_votes(teacher, x, y, inputs, classes, mechanism.queries)
        with _DOOR.held():
            self.__book(mechanism.events(), purpose, None)
            x, y = trees.rows_of(self.__features, self.__valid.nonzero()[:, 0]), self.__targets[self.__valid]
            return mechanism.poll(teacher, x, y, inputs, classes, self.__noise)

    def check_resumable(self) -> None:
        """Checkpoints hold functions of releases alone, so nothing of this is lost."""

    def __pay(self, mechanism: SampledGaussian, receipt: Receipt | None, purpose: str) -> None:
        """Use up one answer that is paid for. Inside the door."""
        check_kind(mechanism)
        if self.__mark != mark():  # torch's threads did not survive the fork: waiting for them would never end
            torch.set_num_threads(1)
            self.__mark = mark()
        if receipt is None:
            if not any(paid.take(mechanism) for paid in self.__open):
                self.charge([(mechanism, 1)], purpose).take(mechanism)
            self.__open = [paid for paid in self.__open if paid.left]
        elif receipt not in self.__issued or not receipt.take(mechanism):
            raise Refusal(
                "receipt: not good for this answer; each answer can be had once, from the source that was charged, and "
                "in the process that paid, not in a fork of it: charge again"
            )

    def __batch(self, query: Query, mechanism: SampledGaussian) -> tuple[Query, Drawn]:
        """The records that were drawn; where features of a frozen part are kept, those and a query of the rest."""
        rows = torch.from_numpy(self.__sampler.draw(mechanism))
        rows = rows[self.__valid[rows]]
        weights = None if self.__weights is None else self.__weights[rows]
        part, x = self.__seen.part(query), partial(trees.rows_of, self.__features, rows)
        seen = None if part is None else self.__seen.rows(part, self.__features, rows, self.__valid)
        if part is not None and seen is not None:
            return part.asked, (part.records(seen, x), self.__targets[rows], weights)
        return query, (x(), self.__targets[rows], weights)

    def __repr__(self) -> str:
        return f"PrivateData({self.name!r}, records hidden)"

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError("PrivateData: records cannot be listed, counted, copied or pickled; ask through answer()")

    __iter__ = __len__ = __getitem__ = __contains__ = __reduce_ex__ = __copy__ = __deepcopy__ = _refuse


def _seed_of(seed: int, rank: int) -> int:
    """The streams of a seeded test on several ranks: apart from each other, like those of the operating system."""
    return int.from_bytes(hashlib.sha256(f"seed {seed} of rank {rank}".encode()).digest()[:7])
