"""Watching a run on the trusted side, for accountants that know the data.

`Watch` keeps the norms that the clipping engine computes anyway; `HoldOut` looks at fresh records along the run. Both
hold private things: nothing of them can be printed, copied or pickled, and methods never see them.

    watch = Watch()
    data = PrivateData(x, y, schema=schema, watch=watch)
    source = HoldOut(data, x_fresh, y_fresh, looks=0.05)
    run = fit(method, module, source, plan)
    confide.privacy.bayesian.averaged(source.sequences(), delta)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from confide.data.trees import Tree, in_type, rows_of
from confide.devices import moved
from confide.errors import Refusal
from confide.mechanism.clipping import clipped_sum, clipped_sum_of_rows, isolated_rows
from confide.mechanism.clipping.factors import GAMMA
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.noise import NoiseStream
from confide.mechanism.sampling import poisson_batch
from confide.privacy.bayesian import Distances, Sequences, Trusted, covering_counts, level_kinds, level_of
from confide.privacy.events import GaussianEvent
from confide.sources.base import Receipt, Source, Wrapper
from confide.sources.queries import GradientQuery, Query, Release
from confide.sources.records import as_records

if TYPE_CHECKING:
    from confide.data.schema import Schema

# So many steps are joined at a time.
_PENDING = 512
# Norms are computed in single precision; this covers their rounding.
_SLACK = 1 + 1e-5
# The Student-t bound needs three records; a step with fewer counts as one at the clipping bound.
_FEWEST = 3


def contributions(norms: NDArray[Any], mechanism: SampledGaussian) -> NDArray[np.float64]:
    """Norms after clipping, in units of the bound C, rounded up.

    Clipping layer by layer shortens a gradient at least as much as it would have to be to pass as a whole, so
    min(1, norm / C) covers it.
    """
    norms = np.asarray(norms, dtype=np.float64)
    ratio = norms / (norms + GAMMA) if mechanism.clipping == "automatic" else norms / mechanism.clip
    return np.minimum(ratio * _SLACK, 1.0)


def single_event(mechanism: SampledGaussian) -> GaussianEvent:
    """What one step is, for accountants of given distances."""
    event = mechanism.event()
    if not isinstance(event, GaussianEvent):
        raise Refusal("private=False: a run without noise has no privacy to account for")
    return event


class Watch(Trusted):
    """Keeps the norms of every batch: pass it as `PrivateData(..., watch=watch)`.

    A call only puts the norms, which exist already, on a list; now and then the list is joined into one array, so that
    they take four bytes each.
    """

    def __init__(self) -> None:
        self.__pending: list[tuple[SampledGaussian, Tensor]] = []
        self.__joined: list[tuple[list[SampledGaussian], list[int], Tensor]] = []

    def __call__(self, mechanism: SampledGaussian, norms: Tensor) -> None:
        self.__pending.append((mechanism, norms))
        if len(self.__pending) >= _PENDING:
            self.__join()

    def distances(self) -> list[Distances]:
        """How far each record of each step moved the sum, for the rules `product` and `hoelder`."""
        self.__join()
        return [
            _distances(mechanism, norms)
            for mechanisms, sizes, joined in self.__joined
            for mechanism, norms in zip(mechanisms, joined.split(sizes), strict=True)
        ]

    def __join(self) -> None:
        if self.__pending:
            mechanisms, tensors = zip(*self.__pending, strict=True)
            joined = torch.cat(tensors).detach().float().cpu()
            self.__joined.append((list(mechanisms), [len(norms) for norms in tensors], joined))
            self.__pending.clear()


def _distances(mechanism: SampledGaussian, norms: Tensor) -> Distances:
    few = len(norms) < _FEWEST
    return Distances(single_event(mechanism), np.ones(_FEWEST) if few else contributions(norms.numpy(), mechanism))


class HoldOut(Trusted, Wrapper):
    """A source that passes everything on, and looks at fresh records along the run.

    source  what answers the queries, such as PrivateData
    x, y    hold-out records: drawn like the others, used neither for training nor for choosing anything
    looks   probability that a record is looked at in a step. 1: at every step, and its distance sequence is known.
            Less: each record sees its own random steps, and its sequence is covered from those with probability
            1 - missed, at the price of counting some unseen steps at the clipping bound. A step costs about
            looks * (number of hold-out records) more records. Looking at all records in every k-th step would cost as
            much and prove nothing: what happens between two looks need not lie below either
    levels  distances are rounded up to so many levels
    missed  share of records, on average, whose sequence may not be covered; it adds missed * delta_max to delta
    seed    fixes which steps are looked at; that choice protects nobody, so it need not be secret

    Distances are norms of the query at the iterates that came out. A record that cannot answer has distance zero, as in
    training. Modules with random layers draw for hold-out records too, without moving torch's generator.
    """

    def __init__(
        self,
        source: Source,
        x: Any,
        y: Any,
        *,
        looks: float = 1.0,
        levels: int = 64,
        missed: float = 1e-3,
        micro_batch: int = 1024,
        seed: int | None = None,
    ) -> None:
        if not 0 < looks <= 1:
            raise Refusal(f"looks={looks}: must be in (0, 1]")
        if not 0 < missed < 1:
            raise Refusal(f"missed={missed}: must be in (0, 1)")
        if levels < 1 or micro_batch < 1:
            raise Refusal(f"levels={levels}, micro_batch={micro_batch}: must be at least 1")
        super().__init__(source)
        self.__records = _HeldRecords(x, y, source.schema)
        self.__looks, self.__levels, self.__missed = looks, levels, missed
        self.__micro_batch = micro_batch
        self.__stream = NoiseStream(seed)
        self.__seen: dict[SampledGaussian, NDArray[np.int64]] = {}
        self.__steps: dict[SampledGaussian, int] = {}

    def answer(
        self, query: Query, mechanism: SampledGaussian, receipt: Receipt | None = None, purpose: str = ""
    ) -> Release:
        """Look, then pass the query on. Looking releases nothing, so it costs nothing."""
        self.__look(query, mechanism)
        return super().answer(query, mechanism, receipt, purpose)

    def check_resumable(self) -> None:
        raise Refusal(
            "checkpoint: what hold-out records met is private and not written down, so a run that goes on would "
            "have lost it; fit without a checkpoint"
        )

    def sequences(self) -> Sequences:
        """What the hold-out records met, for `averaged`."""
        if not self.__seen:
            raise Refusal("HoldOut: no step has been answered yet; fit through this source first")
        whole = self.__looks >= 1
        share = self.__missed / len(self.__seen)
        counts = [
            covering_counts(seen, self.__steps[mechanism], self.__looks, share)
            for mechanism, seen in self.__seen.items()
        ]
        kinds = tuple(kind for each in self.__seen for kind in level_kinds(single_event(each), self.__levels))
        return Sequences(kinds, np.concatenate(counts, axis=1), missed=0.0 if whole else self.__missed)

    def __look(self, query: Query, mechanism: SampledGaussian) -> None:
        size = len(self.__records)
        seen = self.__seen.setdefault(mechanism, np.zeros((size, self.__levels + 1), dtype=np.int64))
        self.__steps[mechanism] = self.__steps.get(mechanism, 0) + 1
        rows = poisson_batch(self.__stream, size, self.__looks)
        if len(rows):
            norms = self.__records.norms(query, mechanism, rows, self.__micro_batch)
            seen[rows, level_of(contributions(norms, mechanism), self.__levels)] += 1


class _HeldRecords:
    """Hold-out records, with which of them can answer at all."""

    def __init__(self, x: Any, y: Any, schema: Schema) -> None:
        self.x, self.y, self.usable = as_records(x, y, schema)
        if len(self.y) < 2:
            raise Refusal(f"y of shape {tuple(self.y.shape)}: need at least 2 hold-out records")

    def __len__(self) -> int:
        return len(self.y)

    def norms(
        self, query: Query, mechanism: SampledGaussian, rows: NDArray[np.int64], micro_batch: int
    ) -> NDArray[np.float64]:
        """Norms before clipping of the given rows' answers; zero for those that cannot answer."""
        chosen = torch.from_numpy(rows)
        able = self.usable[chosen]
        found = torch.zeros(len(rows), dtype=torch.float64)
        picked = chosen[able]
        if len(picked):
            with torch.random.fork_rng(devices=[]):
                x, y = rows_of((self.x, self.y), picked)
                found[able] = _norms(query, mechanism, x, y, micro_batch).cpu().double()
        return np.asarray(found.numpy())


def _norms(query: Query, mechanism: SampledGaussian, x: Tree, y: Tensor, micro_batch: int) -> Tensor:
    scratch = torch.zeros(query.size, dtype=query.dtype, device=query.device)
    x, y = moved((x, y), query.device)
    if isinstance(query, GradientQuery):
        options: dict[str, Any] = {"clip": mechanism.clip, "style": mechanism.clipping, "micro_batch": micro_batch}
        given, targets = in_type(x, query.inputs), in_type(y, query.dtype)
        return clipped_sum(query.module, query.loss, given, targets, out=scratch, **options)
    parts = []
    with torch.no_grad():
        for start in range(0, len(y), micro_batch):
            some_x, some_y = rows_of((x, y), slice(start, start + micro_batch))
            answers = isolated_rows(query.function, some_x, some_y, query.size)
            parts.append(clipped_sum_of_rows(answers, clip=mechanism.clip, out=scratch))
    return torch.cat(parts)
