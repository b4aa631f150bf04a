"""What a method may ask of one record, and what it gets back.

A query is pure in the record: its answer depends on that record, on public parameters and on nothing else. The
boundary evaluates it, clips every record's answer to the mechanism's bound, sums, adds noise, and returns a Release.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from confide.devices import HOST
from confide.models.flat import is_half
from confide.privacy.events import Event

Loss: TypeAlias = Callable[[Any, Tensor], Tensor]
Statistic: TypeAlias = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Origin:
    """Who asks: a method, the problem it works on and its state. A source that cannot be handed code is told this."""

    method: Any
    problem: Any
    state: Any


@dataclass(frozen=True)
class GradientQuery:
    """The gradient of `loss(module(x), y)`, one loss per record, with respect to the module's trainable parameters.

    The answer is a flat vector in the order of `module.parameters()`: tied parameters once, frozen ones left out.
    With `parts` each of several processes gets its own numbers of it alone (`confide.sources.crew.Parts`).
    """

    module: nn.Module
    loss: Loss
    parts: tuple[tuple[int, ...], ...] | None = None
    origin: Origin | None = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad)

    @property
    def inputs(self) -> torch.dtype:
        """The type in which the module takes real numbers: that of its trainable parameters."""
        return next(p.dtype for p in self.module.parameters() if p.requires_grad)

    @property
    def dtype(self) -> torch.dtype:
        """Of the answer: single precision for a module of half."""
        return torch.float32 if is_half(self.inputs) else self.inputs

    @property
    def device(self) -> torch.device:
        """Where the module is: records are taken there, and the answer is made there."""
        return next(p.device for p in self.module.parameters() if p.requires_grad)


@dataclass(frozen=True)
class StatisticQuery:
    """Any vectorised per-record function: `function(x, y)` maps a batch to a matrix of shape (batch, size)."""

    function: Statistic
    size: int
    dtype: torch.dtype = torch.float64
    device: torch.device = HOST
    origin: Origin | None = field(default=None, compare=False, repr=False)


Query: TypeAlias = GradientQuery | StatisticQuery


@dataclass(frozen=True)
class Release:
    """A noisy sum over a batch: the only thing about the records that a method ever sees.

    sum             the clipped answers of the batch, summed, plus Gaussian noise. It belongs to whoever asked, who may
                    keep it or work in it
    noise_std       standard deviation of that noise in every coordinate; methods credit it against noise they need
    event           what this release costs
    expected_batch  public expected number of records in the batch: divide by this, never by a realised size
    """

    sum: Tensor
    noise_std: float
    event: Event
    expected_batch: float
