"""Canaries: records whose answer is a known direction, sent through the real boundary.

A canary is a row of the data like any other. It is drawn by the sampler, its answer goes through the clipping engine
beside those of ordinary records, and noise is added to the sum of all. Only the answer itself is made up: canary i says

    s_t RAW C u_i,        |u_i| = 1,   s_t = +1, -1, +1, ... over the steps,

which is RAW times too long, so that it counts for C u_i if the clip works and for more if it does not. The u_i are
orthonormal where there is room, so that canaries do not disturb each other. The sign alternates, so that noise which is
used twice cancels in the score while a canary adds up:

    score_i = sum over t of w_t s_t <R_t, u_i> / std_t,

where w_t is 1 unless the steps are quieter than they can be if their noise is what it should be, alone or together:
then they are weighed so that the noise which they share falls out (`combined`).

A canary that is left out of the game is a row that is not finite: the boundary counts it as zero, which under Poisson
and full-batch sampling is the same as a data set without it, and every row keeps its place. Which rows are canaries,
and which canary, is written in one more column of the features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from confide.mechanism.clipping import Call, Recordwise, rule_for
from confide.mechanism.gaussian import SampledGaussian
from confide.sources.base import Receipt, Wrapper
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, Loss, Query, Release, StatisticQuery

RAW = 10.0  # So far beyond the clip that a clip which fails shows at once.
# Scores of one step, and of any mean of steps, have a variance of 1 per step at least, if the noise is right. Far
# below, these steps say more than others. Guesses may go by everything that is released, so this costs no confidence.
QUIET, SILENT = 0.5, 1e-6
# Canaries per step that it takes to see what noise steps share.
_PER_STEP = 8
ORDINARY = -1.0


class Probe(nn.Module):
    """<parameters of one layer, direction of the canary>, one number per record; its gradient is the direction.

    It shares the layer's own parameters. One probe per layer, so that per-layer clipping sees the layers it would see
    without canaries.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], directions: dict[str, Tensor]) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        self.directions = directions

    def forward(self, canary: Tensor) -> Tensor:
        parts = [
            self.directions[name][canary].flatten(1) @ parameter.flatten()
            for name, parameter in self.named_parameters()
        ]
        return torch.stack(parts).sum(0)


@rule_for(Probe)
def _probe(call: Call) -> dict[str, Tensor]:
    layer, canary = call.layer, call.input
    assert isinstance(layer, Probe)
    found = {}
    for name in call.trainable:
        chosen = layer.directions[name][canary]
        found[name] = chosen * call.gradient.view(-1, *[1] * (chosen.dim() - 1))
    return found


class Marked(nn.Module):
    """A module beside the probes of its layers: its output, the canaries' losses, and which records are canaries."""

    def __init__(self, inner: nn.Module, directions: Tensor, shape: torch.Size) -> None:
        super().__init__()
        self.inner = inner
        self.probes = nn.ModuleList(_probes(inner, directions))
        self.shape = shape
        self.length = 0.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features, canary = split(x, self.shape)
        known = canary.clamp(min=0)
        marks = torch.stack([probe(known) for probe in self.probes]).sum(0)
        return self.inner(features), self.length * marks, canary >= 0


def _probes(inner: nn.Module, directions: Tensor) -> list[Probe]:
    """One probe per layer; the directions are cut along the flat order of the module's trainable parameters."""
    trainable = [parameter for parameter in inner.parameters() if parameter.requires_grad]
    pieces = directions.split([parameter.numel() for parameter in trainable], dim=1)
    cut = {
        id(parameter): piece.reshape(len(directions), *parameter.shape)
        for parameter, piece in zip(trainable, pieces, strict=True)
    }
    probes = []
    for layer in inner.modules():
        # A parameter that several layers share is probed once, by the first of them.
        own = {
            name: parameter
            for name, parameter in layer.named_parameters(recurse=False)
            if id(parameter) in cut and parameter.requires_grad
        }
        if own:
            probes.append(Probe(own, {name: cut.pop(id(parameter)) for name, parameter in own.items()}))
    return probes


def split(x: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """The features in their own shape, and the number of the canary (-1 for ordinary records)."""
    return x[:, :-1].reshape(len(x), *shape), x[:, -1].round().long()


def marked_rows(x: Tensor, included: Sequence[bool] | np.ndarray[Any, Any]) -> Tensor:
    """Ordinary records, then one row per canary; those that are left out are not finite."""
    flat = x.flatten(1)
    ordinary = torch.cat([flat, torch.full((len(flat), 1), ORDINARY, dtype=flat.dtype)], 1)
    canaries = torch.zeros(len(included), ordinary.shape[1], dtype=flat.dtype)
    canaries[:, -1] = torch.arange(len(included), dtype=flat.dtype)
    canaries[~torch.as_tensor(np.asarray(included, dtype=bool))] = torch.nan
    return torch.cat([ordinary, canaries])


@lru_cache(maxsize=4)
def unit_directions(count: int, size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """`count` unit vectors in random directions, orthogonal to each other if there is room for that."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(count, size, generator=generator, dtype=torch.float64)
    rows: Tensor = torch.linalg.qr(raw.T).Q.T if count <= size else raw / raw.norm(dim=1, keepdim=True)
    return rows.to(dtype).contiguous()


class CanarySource(Wrapper):
    """Answers a method's queries from private data with canaries among the records, and keeps the scores.

    data      rows made by `marked_rows`
    shape     of one record's features
    canaries  how many rows at the end are canaries
    rows      number of all rows, for the score of somebody who takes batches to be read in order
    modules   marked modules by the id of their own, to be shared by sources that have the same canaries
    """

    def __init__(
        self,
        data: PrivateData,
        shape: torch.Size,
        canaries: int,
        rows: int,
        seed: int = 0,
        modules: dict[int, Marked] | None = None,
    ) -> None:
        super().__init__(data)
        self.by_step: list[np.ndarray[Any, Any]] = []
        self.in_order_scores = np.zeros(canaries)
        self._shape, self._seed, self._rows = shape, seed, rows
        self._places = np.arange(rows - canaries, rows)
        self._directions: dict[tuple[int, torch.dtype], Tensor] = {}
        self._modules = {} if modules is None else modules
        self._step = 0

    def rehearse(self, query: Query) -> None:
        super().rehearse(self._marked(query, self.directions(query.size, query.dtype), 1.0))

    def answer(
        self, query: Query, mechanism: SampledGaussian, receipt: Receipt | None = None, purpose: str = ""
    ) -> Release:
        sign = -1.0 if self._step % 2 else 1.0
        directions = self.directions(query.size, query.dtype)
        marked = self._marked(query, directions, sign * RAW * mechanism.clip)
        release = super().answer(marked, mechanism, receipt, purpose)
        found = (directions @ release.sum).double().numpy() * (sign / (release.noise_std or 1.0))
        self.by_step.append(found)
        self.in_order_scores += np.where(self._due(mechanism), found * _weight(found), 0.0)
        self._step += 1
        return release

    @property
    def scores(self) -> np.ndarray[Any, Any]:
        """One row per canary, one column per step."""
        return np.stack(self.by_step, 1)

    def directions(self, size: int, dtype: torch.dtype) -> Tensor:
        key = (size, dtype)
        if key not in self._directions:
            self._directions[key] = unit_directions(len(self.in_order_scores), size, dtype, self._seed)
        return self._directions[key]

    def _due(self, mechanism: SampledGaussian) -> np.ndarray[Any, Any]:
        """Which canaries this step would hold if batches were read in order, first to last, over and over."""
        batch = round(mechanism.rate * self._rows)
        place = (self._places - self._step * batch) % self._rows
        return np.asarray(place < batch)

    def _marked(self, query: Query, directions: Tensor, length: float) -> Query:
        if isinstance(query, StatisticQuery):
            return _marked_statistic(query, directions, length, self._shape)
        known = self._modules.get(id(query.module))
        if known is None:
            known = self._modules[id(query.module)] = Marked(query.module, directions, self._shape)
        known.length = length
        return GradientQuery(known, _marked_loss(query.loss))


def combined(scores: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """One score per canary out of those of its steps: their sum, or the mean in which shared noise falls out.

    A canary adds the same to every step. Of all means that leave it as it is, the one with the least variance has
    weights S^-1 1, where S is the covariance of the steps.
    """
    canaries, steps = scores.shape
    alone = bool((scores.var(0) < QUIET).any())  # a step that is too quiet by itself counts for more by itself
    if canaries < _PER_STEP * steps or alone:
        return np.asarray(sum(column * _weight(column) for column in scores.T))
    covariance = np.cov(scores.T).reshape(steps, steps)
    # Of so many canaries the least eigenvalue of pure noise is about this.
    if np.linalg.eigvalsh(covariance)[0] >= QUIET * (1 - np.sqrt(steps / canaries)) ** 2:
        return np.asarray(scores.sum(1))
    weights = np.linalg.solve(covariance + SILENT * np.eye(steps), np.ones(steps))
    return np.asarray(scores @ weights * (steps / weights.sum()))


def _weight(scores: np.ndarray[Any, Any]) -> float:
    """What one step counts for, by how quiet it is."""
    variance = float(scores.var())
    return 1.0 if variance >= QUIET else 1.0 / max(variance, SILENT)


def _marked_loss(loss: Loss) -> Loss:
    def marked(output: Any, y: Tensor) -> Tensor:
        plain, marks, canary = output
        return torch.where(canary, marks, loss(plain, y))

    return marked


def _marked_statistic(query: StatisticQuery, directions: Tensor, length: float, shape: torch.Size) -> StatisticQuery:
    asked = query.function

    def function(x: Tensor, y: Tensor) -> Tensor:
        features, canary = split(x, shape)
        rows = asked(features, y)
        marks = directions[canary.clamp(min=0)].to(rows.dtype) * length
        return torch.where((canary >= 0)[:, None], marks, rows)

    marked = Recordwise(function, asked.module) if isinstance(asked, Recordwise) else function
    return StatisticQuery(marked, query.size, query.dtype)
