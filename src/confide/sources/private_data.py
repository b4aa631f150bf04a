"""The boundary: the only reader of private records.

`PrivateData.answer` is the one door. In this order it charges the ledger, draws a batch, evaluates the query record by
record, clips every record's answer to C, sums, and adds Gaussian noise. What leaves is a Release; the records, their
number and everything computed from them stay inside.

Errors must not depend on records. A record that cannot answer (features that are not finite, a label outside the
declared classes, a gradient that overflows) counts as zero; an empty batch is a step of noise alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from confide.data.schema import Schema
from confide.data.streaming import MappedRecords
from confide.errors import Refusal
from confide.mechanism.clipping import clipped_sum, clipped_sum_of_rows
from confide.mechanism.clipping.workspace import keep_pages
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.noise import NoiseStream
from confide.mechanism.posterior_sampling import PosteriorSampling
from confide.mechanism.sampling import BatchSampler
from confide.mechanism.secure import LatticeNoise
from confide.privacy.events import Event
from confide.privacy.ledger import Ledger
from confide.sources.queries import GradientQuery, Query, Release

LARGEST_CLIP = 1e30
"""Stands for an infinite clip, which only a run marked as not private may have."""
ANSWER_BYTES = 8 << 20
"""Statistics are computed for so many bytes of answers at a time."""


class PrivateData:
    """Records behind the boundary. Not iterable, not indexable, without a length, not picklable, not copyable.

    x, y      features and targets, one row per record; tensors or arrays. More records than memory: x from
              `confide.data.streaming.from_parquet`, which holds the targets too, and y=None
    schema    the public facts: classes, nominal number of records, bounds
    ledger    where every answer is charged; in memory unless given
    name      the data set's name in the ledger, so that budgets add up over runs
    watch     called inside the boundary with every answer's mechanism and per-record norms, for accountants that know
              the data; what it gathers is private and must stay on the trusted side
    seed      for tests only: makes sampling and noise reproducible, so that nothing may be claimed for the run
    """

    def __init__(
        self,
        x: Any,
        y: Any,
        *,
        schema: Schema,
        ledger: Ledger | None = None,
        name: str = "",
        watch: Callable[[SampledGaussian, Tensor], None] | None = None,
        seed: int | None = None,
    ) -> None:
        keep_pages()
        mapped = isinstance(x, MappedRecords)
        features, targets, valid = (x.features, x.targets, x.usable) if mapped else _as_records(x, y, schema)
        self.schema = schema
        self.ledger = Ledger() if ledger is None else ledger
        self.name = name
        self.seeded = seed is not None
        self.__features = features
        self.__targets = targets
        self.__valid = valid
        self.__watch = watch
        self.__noise = NoiseStream(seed)
        self.__lattice = LatticeNoise(self.__noise)
        self.__sampler = BatchSampler(len(features), NoiseStream(None if seed is None else seed + 1))
        self.__prepaid: dict[SampledGaussian, int] = {}
        self.__buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def charge(self, mechanism: SampledGaussian, steps: int, purpose: str = "") -> None:
        """Pay for `steps` answers in one entry, before any record is read. A refusal costs nothing."""
        self.charge_all([(mechanism, steps)], purpose)

    def charge_all(self, parts: Sequence[tuple[SampledGaussian, int]], purpose: str = "") -> None:
        """Pay for the steps of every mechanism, or, if the budget does not suffice for all, for none."""
        for mechanism, _ in parts:
            self.__sampler.check(mechanism)
        events: list[Event] = [mechanism.event(steps) for mechanism, steps in parts]
        if len(events) == 1:
            self.ledger.charge(events[0], purpose=purpose, dataset=self.name)
        elif events:
            self.ledger.charge_all(events, purpose=purpose, dataset=self.name)
        for (mechanism, steps), event in zip(parts, events, strict=True):
            paid = steps if mechanism.sampling != "shuffle" else event.count * mechanism.batches_per_pass
            self.__prepaid[mechanism] = self.__prepaid.get(mechanism, 0) + paid

    def rehearse(self, query: Query) -> None:
        """Try the query on made-up records of the right shape: what cannot work fails here, before any charge."""
        x = torch.zeros((2, *self.__features.shape[1:]), dtype=self.__features.dtype)
        y = torch.zeros((2, *self.__targets.shape[1:]), dtype=self.__targets.dtype)
        if self.schema.class_count is not None:
            y[-1] = self.schema.class_count - 1  # a network with too few outputs fails here, not at such a record
        trial = SampledGaussian(1.0, 1.0, 1.0, 2, "full-batch")
        _add_answers(query, x, y, trial, torch.zeros(query.size, dtype=query.dtype))

    def answer(self, query: Query, mechanism: SampledGaussian, purpose: str = "") -> Release:
        """One release: pay, then read. An answer that was not paid in advance is charged here."""
        if not self.__prepaid.get(mechanism):
            self.charge(mechanism, 1, purpose)
        self.__prepaid[mechanism] -= 1
        x, y = self.__batch(mechanism)
        total, std = self.__buffer(query), mechanism.noise_std
        if std > 0 and not mechanism.secure:
            self.__noise.normal_(total, std)
        else:
            total.zero_()
        norms = _add_answers(query, x, y, mechanism, total)
        if mechanism.secure:
            std = self.__lattice.add_(total, mechanism)
        if self.__watch is not None:
            self.__watch(mechanism, norms)
        return Release(total, std, mechanism.event(), mechanism.expected_batch)

    def draw(self, mechanism: PosteriorSampling, purpose: str = "") -> Tensor:
        """One draw from the tempered posterior of a logistic regression on two classes: pay, then read all records."""
        if self.schema.class_count != 2:
            raise Refusal(f"classes={self.schema.classes}: a posterior draw needs a schema with two classes")
        self.ledger.charge(mechanism.event(), purpose=purpose, dataset=self.name)
        return mechanism.draw(self.__features[self.__valid], self.__targets[self.__valid], self.__noise)

    def __batch(self, mechanism: SampledGaussian) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(self.__sampler.draw(mechanism))
        rows = rows[self.__valid[rows]]
        return self.__features[rows], self.__targets[rows]

    def __buffer(self, query: Query) -> Tensor:
        key = (query.size, query.dtype)
        if key not in self.__buffers:
            self.__buffers[key] = torch.empty(query.size, dtype=query.dtype)
        return self.__buffers[key]

    def __repr__(self) -> str:
        return f"PrivateData({self.name!r}, records hidden)"

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError("PrivateData: records cannot be listed, counted, copied or pickled; ask through answer()")

    __iter__ = __len__ = __getitem__ = __contains__ = __reduce_ex__ = __copy__ = __deepcopy__ = _refuse


def _add_answers(query: Query, x: Tensor, y: Tensor, mechanism: SampledGaussian, total: Tensor) -> Tensor:
    """Add every record's clipped answer onto `total`; the norms before clipping stay inside."""
    clip = min(mechanism.clip, LARGEST_CLIP)
    if isinstance(query, GradientQuery):
        return clipped_sum(query.module, query.loss, x, y, clip=clip, out=total, style=mechanism.clipping)
    if not len(x):
        return x.new_zeros(0)
    rows = max(1, ANSWER_BYTES // (8 * query.size))
    with torch.no_grad():
        # A query is pure in the record, so that pieces of a batch give what the batch gives.
        pieces = zip(x.split(rows), y.split(rows), strict=True)
        return torch.cat([clipped_sum_of_rows(query.function(*piece), clip=clip, out=total) for piece in pieces])


def _as_records(x: Any, y: Any, schema: Schema) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors of features and targets, and which records can answer at all."""
    features, targets = torch.as_tensor(np.asarray(x)), torch.as_tensor(np.asarray(y))
    if features.ndim < 1 or targets.ndim < 1 or len(features) != len(targets):
        raise Refusal(
            f"x of shape {tuple(features.shape)} and y of shape {tuple(targets.shape)}: "
            "need one row of x and one entry of y per record"
        )
    valid = torch.ones(len(features), dtype=torch.bool)
    if features.is_floating_point():
        features = features.to(torch.float32) if features.dtype != torch.float64 else features
        valid &= torch.isfinite(features.flatten(1) if features.ndim > 1 else features[:, None]).all(1)
        features = torch.nan_to_num(features, nan=0.0, posinf=0.0, neginf=0.0)
    elif features.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.bool):
        features = features.to(torch.float32)
    targets, usable = _as_targets(targets, schema, features.dtype)
    return features, targets, valid & usable


def _as_targets(targets: Tensor, schema: Schema, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    count = schema.class_count
    if count is not None:
        usable = torch.isfinite(targets.double()) & (targets >= 0) & (targets < count)
        usable &= targets.double() == targets.double().floor()
        return torch.where(usable, targets, torch.zeros_like(targets)).to(torch.int64), usable
    targets = targets.to(dtype if dtype.is_floating_point else torch.float32)
    usable = torch.isfinite(targets.flatten(1) if targets.ndim > 1 else targets[:, None]).all(1)
    return torch.nan_to_num(targets, nan=0.0, posinf=0.0, neginf=0.0), usable
