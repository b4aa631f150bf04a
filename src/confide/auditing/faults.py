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
from confide.sources.base import Receipt
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, Query, Release

# A clip this much larger is none.
_LOOSE = 1e6


class _RepeatedNoise:
    """A stream that hands out its first vector of every size again and again."""

    def __init__(self) -> None:
        self._stream = NoiseStream()
        self._known: dict[tuple[int, torch.dtype], Tensor] = {}

    def normal_(self, out: Tensor, std: float) -> Tensor:
        key = (out.numel(), out.dtype)
        if key not in self._known:
            self._known[key] = self._stream.normal_(torch.empty_like(out), 1.0)
        return out.copy_(self._known[key]).mul_(std)


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
    """What is wrong, as a change of the mechanism that runs or of a part inside the private data."""

    name: str
    runs: Callable[[SampledGaussian, Query], SampledGaussian] = lambda mechanism, query: mechanism
    parts: Callable[[int], dict[str, Any]] = lambda rows: {}


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("noise halved", lambda mechanism, _: replace(mechanism, noise_multiplier=mechanism.noise_multiplier / 2)),
        Fault("no clip", lambda mechanism, _: _looser(mechanism, _LOOSE)),
        Fault("clip per layer", _per_layer),
        Fault("same noise", parts=lambda _: {"noise": _RepeatedNoise()}),
        Fault("no sampling", parts=lambda rows: {"sampler": _InOrder(rows)}),
    )
}


class FaultyData(PrivateData):
    """Private data with a fault inside; releases look as if nothing were wrong."""

    def __init__(self, x: Any, y: Any, *, fault: str, **options: Any) -> None:
        super().__init__(x, y, **options)
        if fault not in FAULTS:
            raise Refusal(f"fault={fault!r}: must be one of {', '.join(FAULTS)}")
        self._fault = FAULTS[fault]
        for name, part in self._fault.parts(len(x)).items():
            setattr(self, f"_PrivateData__{name}", part)

    def answer(
        self, query: Query, mechanism: SampledGaussian, receipt: Receipt | None = None, purpose: str = ""
    ) -> Release:
        # Without the receipt, which is not good for another mechanism than the one that was paid for.
        release = super().answer(query, self._fault.runs(mechanism, query), None, purpose)
        return replace(release, noise_std=mechanism.noise_std, event=mechanism.event())
