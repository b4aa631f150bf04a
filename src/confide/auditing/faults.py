"""Planted faults: mechanisms that do not do what they are charged for, to show that the audit can fail.

Each fault is private data that runs another mechanism than the one it is asked for and says nothing about it. Nothing
outside such an object is changed, and no real run can come by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide.errors import Refusal
from confide.mechanism.clipping.anatomy import anatomy_of
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.noise import NoiseStream
from confide.mechanism.sampling import BatchSampler
from confide.privacy.ledger import Ledger
from confide.sources.base import Receipt
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, Query, Release

# A clip this much larger is none.
_LOOSE = 1e6


class _BentNoise:
    """A stream whose noise is bent: `bend(step, fresh)` gets fresh normals of standard deviation 1."""

    def __init__(self, bend: Callable[[int, Tensor], Tensor]) -> None:
        self._stream, self._bend, self._step = NoiseStream(), bend, 0

    def normal_(self, out: Tensor, std: float) -> Tensor:
        fresh = self._stream.normal_(torch.empty_like(out), 1.0)
        out.copy_(self._bend(self._step, fresh)).mul_(std)
        self._step += 1
        return out


def _period(steps: int) -> Callable[[int, Tensor], Tensor]:
    """Noise that comes again after so many steps."""
    known: dict[tuple[int, int], Tensor] = {}
    return lambda step, fresh: known.setdefault((step % steps, fresh.numel()), fresh.clone())


def _last_silent(step: int, fresh: Tensor) -> Tensor:
    fresh[-max(1, len(fresh) // 100) :] = 0
    return fresh


def _uniform(step: int, fresh: Tensor) -> Tensor:
    return (torch.rand_like(fresh) - 0.5) * math.sqrt(12)


def _held(step: int, fresh: Tensor) -> Tensor:
    """Every number eight times in a row."""
    return fresh[: -(-len(fresh) // 8)].repeat_interleave(8)[: len(fresh)]


class _InOrder:
    """Batches read from the first row to the last and over again: the right size, and no chance in it."""

    def __init__(self, rows: int) -> None:
        self._rows, self._next = rows, 0

    def check(self, mechanism: SampledGaussian) -> None:
        """Any batch can be had here."""

    def draw(self, mechanism: SampledGaussian) -> np.ndarray[Any, Any]:
        batch = round(mechanism.rate * self._rows)
        chosen = np.arange(self._next, self._next + batch) % self._rows
        self._next += batch
        return np.sort(chosen)


class _Drawn:
    """A sampler of the right kind behind one that changes its batches, the same for every data set."""

    def __init__(self, rows: int, change: Callable[[Any, Any], Any]) -> None:
        self._inner, self._change, self._before = BatchSampler(rows, NoiseStream(0)), change, np.empty(0, np.int64)

    def check(self, mechanism: SampledGaussian) -> None:
        self._inner.check(mechanism)

    def draw(self, mechanism: SampledGaussian) -> np.ndarray[Any, Any]:
        batch = self._inner.draw(mechanism)
        changed, self._before = self._change(batch, self._before), batch
        return np.asarray(changed)


class _HalfCharged(Ledger):
    """Every second event is forgotten, and half of a count."""

    _met = 0

    def charge_all(self, events: Any, *arguments: Any, **options: Any) -> Any:
        kept = [event for event in map(self._halved, events) if event is not None]
        return super().charge_all(kept, *arguments, **options) if kept else [None] * len(events)

    def _halved(self, event: Any) -> Any:
        if event.count > 1:
            return replace(event, count=event.count // 2)
        self._met += 1
        return event if self._met % 2 else None

    def _check_paid(self, *_: Any) -> None:
        """A ledger that adds up what is used would refuse the fault by itself; the audit has to see it too."""


class _Uncharged(Ledger):
    """Nothing is written down."""

    def charge_all(self, events: Any, *arguments: Any, **options: Any) -> Any:
        return [None] * len(events)


def _hide_count(total: Tensor, records: int) -> None:
    """The number of records in the low-order bits of the first numbers, eight bits in each."""
    bits = total.view(torch.int32 if total.dtype == torch.float32 else torch.int64)
    bits[:4] = (bits[:4] & ~0xFF) | (records & 0xFF)


def _looser(mechanism: SampledGaussian, factor: float, **changes: Any) -> SampledGaussian:
    """The clip `factor` times larger at the same standard deviation of the noise."""
    multiplier = mechanism.noise_multiplier / factor
    return replace(mechanism, clip=mechanism.clip * factor, noise_multiplier=multiplier, **changes)


def _per_layer(mechanism: SampledGaussian, query: Query) -> SampledGaussian:
    """Each of K layers clipped to C, where the whole should be. Rows of statistics have no layers."""
    if not isinstance(query, GradientQuery):
        return mechanism
    return _looser(mechanism, math.sqrt(anatomy_of(query.module).groups), clipping="per-layer")


@dataclass(frozen=True)
class Fault:
    """What is wrong: a change of the mechanism that runs, of a part inside the private data, of the ledger, of what
    leaves (given how many records there are)."""

    name: str
    runs: Callable[[SampledGaussian, Query], SampledGaussian] = lambda mechanism, query: mechanism
    parts: Callable[[int], dict[str, Any]] = lambda rows: {}
    books: type[Ledger] | None = None
    leaves: Callable[[Tensor, int], None] | None = None


def _bent(name: str, make: Callable[[], Callable[[int, Tensor], Tensor]]) -> Fault:
    return Fault(name, parts=lambda _: {"noise": _BentNoise(make())})


def _drawn(name: str, change: Callable[[Any, Any], Any]) -> Fault:
    return Fault(name, parts=lambda rows: {"sampler": _Drawn(rows, change)})


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("noise halved", lambda mechanism, _: replace(mechanism, noise_multiplier=mechanism.noise_multiplier / 2)),
        Fault("no clip", lambda mechanism, _: _looser(mechanism, _LOOSE)),
        Fault("clip per layer", _per_layer),
        _bent("same noise", lambda: _period(1)),
        Fault("no sampling", parts=lambda rows: {"sampler": _InOrder(rows)}),
        _bent("noise halved every second step", lambda: lambda step, fresh: fresh / (1 + step % 2)),
        _bent("noise with period 2", lambda: _period(2)),
        _bent("noise with period 3", lambda: _period(3)),
        _bent("no noise in the last coordinates", lambda: _last_silent),
        _bent("noise held over 8 coordinates", lambda: _held),
        _bent("a block of 8 repeated", lambda: lambda step, fresh: fresh[:8].repeat(-(-len(fresh) // 8))[: len(fresh)]),
        _bent("uniform noise", lambda: _uniform),
        _bent("no noise after step 8", lambda: lambda step, fresh: fresh * (step < 8)),
        _drawn("record 0 always in", lambda batch, before: np.union1d(batch, [0]).astype(np.int64)),
        _drawn("previous batch added", lambda batch, before: np.concatenate([batch, before])),
        Fault("half of the steps charged", books=_HalfCharged),
        Fault("nothing charged", books=_Uncharged),
        Fault("records counted in low-order bits", leaves=_hide_count),
    )
}


class FaultyData(PrivateData):
    """Private data with a fault inside; releases look as if nothing were wrong."""

    def __init__(self, x: Any, y: Any, *, fault: str, **options: Any) -> None:
        if fault not in FAULTS:
            raise Refusal(f"fault={fault!r}: must be one of {', '.join(FAULTS)}")
        self._fault, self._rows = FAULTS[fault], len(x)
        if self._fault.books is not None:
            options["ledger"] = _turned(options.get("ledger") or Ledger(), self._fault.books)
        super().__init__(x, y, **options)
        for name, part in self._fault.parts(len(x)).items():
            setattr(self, f"_PrivateData__{name}", part)

    def answer(
        self, query: Query, mechanism: SampledGaussian, receipt: Receipt | None = None, purpose: str = ""
    ) -> Release:
        runs = self._fault.runs(mechanism, query)
        # A receipt is not good for another mechanism than the one that was paid for.
        release = super().answer(query, runs, receipt if runs == mechanism else None, purpose)
        if self._fault.leaves is not None:
            self._fault.leaves(release.sum, self._rows)
        return replace(release, noise_std=mechanism.noise_std, event=mechanism.event())


def _turned(ledger: Ledger, books: type[Ledger]) -> Ledger:
    """The same ledger, with the same file, that writes down something else."""
    ledger.__class__ = books
    return ledger
