"""Votes of teachers, aggregated privately (PATE, Papernot et al., ICLR 2017; Confident-GNMax, the same, ICLR 2018).

Every record is given to one of K teachers by a coin of its own, each teacher learns from its records alone and votes on
public inputs, and what is released of a query is the class with the most votes, or all counts, under Gaussian noise.

    test     max_c n_c + N(0, s1^2) >= threshold, else the query is left unanswered        (one voter: at most 1)
    answer   n_c + N(0, s2^2) for all classes: its argmax, or the whole histogram          (one voter: at most sqrt 2)

Why sqrt 2 under either adjacency: whether a record is added, removed or replaced, the coins of all others keep their
law and the teacher of that one record alone sees other records. A teacher casts at most one vote per query, so one
count falls by one and another rises by one. A mixture over coins is no worse than its worst component.

All tests and all answers are charged, asked or not: which queries pass the test depends on the records. What is
charged does not depend on how sure the teachers are; a cost that does is itself private, and leaves under noise of its
own or not at all (`vote_costs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args

import torch
from torch import Tensor

from confide.data import trees
from confide.data.trees import Tree
from confide.errors import Refusal
from confide.mechanism.clipping.one_by_one import Asked, in_turn
from confide.mechanism.noise import NoiseStream
from confide.mechanism.vote_costs import CostEstimate
from confide.privacy.events import PureEvent, VotesEvent

Released: TypeAlias = Literal["labels", "histograms"]
RELEASED: tuple[Released, ...] = get_args(Released)
ONE_VOTE, MOVED_VOTE = 1.0, math.sqrt(2.0)
"""How far one teacher moves the largest count, and all counts together."""
UNANSWERED = -1  # no class: they are counted from 0


class Teacher(Protocol):
    """Learns from its records and says a class for every public input; anything else it says is no vote.

    A teacher may use torch's, numpy's or Python's own random numbers: every one starts from a seed of its own.
    """

    def votes(self, x: Any, y: Tensor, inputs: Any, classes: int, /) -> Tensor: ...


@dataclass(frozen=True)
class VotesAnswers:
    """What left the boundary: labels (queries), `UNANSWERED` where the test failed; and noisy counts, if released.

    cost   the noisy Renyi divergence of the answers, if the mechanism has an estimate
    """

    labels: Tensor
    histograms: Tensor | None = None
    cost: float | None = None


@dataclass(frozen=True)
class Votes:
    """The mechanism: settings, cost and release in one frozen object.

    teachers     parts that the records are split into
    queries      public inputs that are asked about
    noise        s2, standard deviation of the noise on every count
    threshold    votes that the largest noisy count needs; None: every query is answered, and no test is paid for
    test_noise   s1, standard deviation of the noise of the test
    releases     "labels", or "histograms": all noisy counts, at the same price
    estimate     how the cost that depends on the votes is released beside them; None: it is not
    """

    teachers: int
    queries: int
    noise: float
    threshold: float | None = None
    test_noise: float | None = None
    releases: Released = "labels"
    estimate: CostEstimate | None = None

    def __post_init__(self) -> None:
        for name, whole in (("teachers", self.teachers), ("queries", self.queries)):
            if whole < 1:
                raise Refusal(f"{name}={whole}: must be at least 1")
        if not (math.isfinite(self.noise) and self.noise > 0):
            raise Refusal(f"noise={self.noise}: must be a finite number > 0")
        if (self.threshold is None) != (self.test_noise is None):
            raise Refusal(
                f"threshold={self.threshold}, test_noise={self.test_noise}: a test needs both, and no test neither"
            )
        if self.test_noise is not None and not (math.isfinite(self.test_noise) and self.test_noise > 0):
            raise Refusal(f"test_noise={self.test_noise}: must be a finite number > 0")
        if self.releases not in RELEASED:
            raise Refusal(f"releases={self.releases!r}: must be one of {', '.join(RELEASED)}")

    def events(self) -> tuple[VotesEvent | PureEvent, ...]:
        """What all queries cost: every test and every answer, whatever comes out; and the estimate."""
        found: list[VotesEvent | PureEvent] = [VotesEvent(self.noise, MOVED_VOTE, self.queries)]
        if self.test_noise is not None:
            found.insert(0, VotesEvent(self.test_noise, ONE_VOTE, self.queries))
        return (*found, *([] if self.estimate is None else [self.estimate.event()]))

    def poll(
        self, teacher: Teacher, x: Tree, y: Tensor, inputs: Tree, classes: int, stream: NoiseStream
    ) -> VotesAnswers:
        """Ask all teachers, and release. Private inside."""
        parts = split(len(y), self.teachers, stream)
        counts = count_votes(teacher, parts, x, y, inputs, classes, self.queries)
        return self.release(counts, stream)

    def release(self, counts: Tensor, stream: NoiseStream) -> VotesAnswers:
        """Test and answer, from counts (queries, classes)."""
        noisy = counts + stream.normal_(torch.empty(counts.shape, dtype=torch.float64), self.noise)
        labels = noisy.argmax(1)
        if self.test_noise is not None and self.threshold is not None:
            largest = counts.amax(1) + stream.normal_(torch.empty(len(counts), dtype=torch.float64), self.test_noise)
            refused = largest < self.threshold
            labels[refused], noisy[refused] = UNANSWERED, 0.0
        cost = None if self.estimate is None else self.estimate.release(counts, self.teachers, self.noise, stream)
        return VotesAnswers(labels, noisy if self.releases == "histograms" else None, cost)


def split(records: int, teachers: int, stream: NoiseStream) -> list[Tensor]:
    """The rows of every teacher: a coin for every record, which no other record and no order has a part in."""
    coins = torch.from_numpy(stream.integers(teachers, records))
    order = torch.argsort(coins, stable=True)
    return list(order.split(torch.bincount(coins, minlength=teachers).tolist()))


def count_votes(
    teacher: Teacher, parts: list[Tensor], x: Tree, y: Tensor, inputs: Tree, classes: int, queries: int
) -> Tensor:
    """Votes (queries, classes) of teachers that each see one part; one that fails, or says no class, abstains."""
    counts = torch.zeros(queries, classes, dtype=torch.float64)

    def given(place: int) -> Any:
        rows = parts[place]
        return trees.map_tensors(Tensor.clone, (trees.rows_of(x, rows), y[rows], inputs))

    def add(_: int, said: Sequence[Tensor | None]) -> None:
        if said[0] is not None:
            counts.add_(ballot(said[0] - 1, queries, classes))

    private = [*trees.tensors_in((x, y)), counts]
    in_turn(_may_run(teacher), len(parts), _asked(teacher, given, classes, queries, private), add)
    return counts


def _may_run(teacher: Teacher) -> tuple[Any, ...]:
    """What is looked through for what a teacher could leave for the next one. A search that begins at an object takes
    `forward` and `__call__` alone for what runs; here it is this method."""
    return teacher, teacher.votes


def _asked(
    teacher: Teacher, given: Callable[[int], Any], classes: int, queries: int, private: Sequence[Tensor] = ()
) -> Asked:
    """Of every teacher, one whole number for each query: the class that it says and one, or 0 where it says none."""

    def of_teacher(one: Any) -> list[Tensor]:
        seen, known, inputs = one
        with torch.enable_grad():
            votes = ballot(teacher.votes(seen, known, inputs, classes), queries, classes)
        return [torch.where(votes.any(1), votes.argmax(1) + 1, 0)]

    return Asked(given, of_teacher, [torch.empty(queries, dtype=torch.int64, device="meta")], private)


def ballot(said: Any, queries: int, classes: int) -> Tensor:
    """One row per query with at most a single 1, whatever a teacher says."""
    if not isinstance(said, Tensor) or said.shape != (queries,) or said.is_floating_point() or said.is_complex():
        got = tuple(said.shape) if isinstance(said, Tensor) else type(said).__name__
        raise Refusal(f"teacher: said {got}; it must say one whole number, a class, for each of {queries} inputs")
    labels = said.detach().to(torch.int64)
    valid = (labels >= 0) & (labels < classes)
    votes = torch.zeros(queries, classes, dtype=torch.float64)
    votes[torch.arange(queries)[valid], labels[valid]] = 1.0
    return votes


def rehearse_votes(teacher: Teacher, x: Tree, y: Tensor, inputs: Tree, classes: int, queries: int) -> None:
    """One teacher on made-up records: what cannot work fails here, before any charge."""
    # The first optimiser of a process loads parts of torch that set variables of the machine, which no teacher may do
    # while it reads records.
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    in_turn(_may_run(teacher), 1, _asked(teacher, lambda _: (x, y, inputs), classes, queries), _nothing, strict=True)


def _nothing(place: int, votes: Sequence[Tensor | None]) -> None:
    """Votes on made-up records are thrown away."""
