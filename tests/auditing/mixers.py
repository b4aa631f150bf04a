"""Queries in which one record touches another, and a source that believes them: it asks the whole batch at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.noise import NoiseStream
from confide.sources.queries import GradientQuery, Query, Release, StatisticQuery

WIDTH, CLASSES = 4, 3


class Believing:
    """Answers by plain autograd through the batch: nothing keeps records apart, every row of the answer is clipped."""

    def __init__(self, x: Tensor, y: Tensor, *, schema: Any, seed: int) -> None:
        usable = torch.isfinite(x.flatten(1)).all(1)
        if schema.class_count is not None:
            usable &= (y >= 0) & (y < schema.class_count)
        self.x, self.y, self.noise = x[usable], y[usable], NoiseStream(seed)

    def rows(self, query: Query) -> Tensor:
        if not len(self.x):
            return torch.zeros(0, query.size)
        if isinstance(query, StatisticQuery):
            return query.function(self.x, self.y)
        parameters = list(query.module.parameters())
        losses = query.loss(query.module(self.x), self.y)
        found = []
        for value in losses:
            gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
            whole = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
            found.append(torch.cat([part.flatten() for part in whole]))
        return torch.stack(found)

    def answer(self, query: Query, mechanism: SampledGaussian) -> Release:
        rows = self.rows(query).detach().double()
        usable = torch.isfinite(rows).all(1, keepdim=True)
        rows = torch.where(usable, rows, torch.zeros_like(rows))
        norms = rows.norm(dim=1, keepdim=True).clamp(min=1e-300)
        total = (rows * (mechanism.clip / norms).clamp(max=1)).sum(0)
        if mechanism.private:
            total = total + self.noise.normal_(torch.empty_like(total), mechanism.noise_std)
        return Release(total, mechanism.noise_std, mechanism.event(), mechanism.expected_batch)


def plain(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


class Net(nn.Module):
    """Two layers with something before and between them."""

    def __init__(self, before: Any = None, between: Any = None) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.before, self.between = before, between
        self.kept: Any = None
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.before is None else self.before(self, x)
        hidden = torch.tanh(self.body(x))
        hidden = hidden if self.between is None else self.between(self, hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def _running(self: Any, x: Tensor) -> Tensor:
    self.mean.lerp_(x.detach().mean(0), 0.1)
    return x - self.mean


def _remembers(self: Any, x: Tensor) -> Tensor:
    before, self.kept = self.kept, x.detach().mean(0)
    return x if before is None else x + before


def _capacity(self: Any, x: Tensor) -> Tensor:
    first = x[:, 0] > 0
    limit = max(2, len(x) // 2)
    keep = torch.where(first, first.cumsum(0) <= limit, (~first).cumsum(0) <= limit)
    return x * keep[:, None]


def _cropped(self: Any, x: Tensor) -> Tensor:
    longest = int((x != 0).sum(1).max())
    return F.pad(x[:, :longest], (0, WIDTH - longest)) * longest


def _unless_far(self: Any, x: Tensor) -> Tensor:
    return x * 0 if (x.abs() > 100).any() else x


def _first_masked(self: Any, x: Tensor) -> Tensor:
    return x * (torch.arange(len(x)) > 0)[:, None]


def _once_each(self: Any, x: Tensor) -> Tensor:
    same = torch.cdist(x, x) < 1e-9
    return x / same.sum(1, keepdim=True)


class _MeanBackward(torch.autograd.Function):
    """The gradient that goes back is the batch's mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.scale = x.detach().abs().max()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.scale


def _hooked(self: Any, x: Tensor) -> Tensor:
    size = len(x)
    x.register_hook(lambda gradient: gradient * size**2)
    return x


def _class_weights(output: Tensor, y: Tensor) -> Tensor:
    counts = torch.bincount(y, minlength=CLASSES).clamp(min=1)
    return plain(output, y) * len(y) / counts[y]


def _hardest(output: Tensor, y: Tensor) -> Tensor:
    losses = plain(output, y)
    return losses * (losses >= losses.median())


def _contrastive(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output @ output.T, torch.arange(len(y)), reduction="none")


def _shuffled_labels(output: Tensor, y: Tensor) -> Tensor:
    return plain(output, y[output[:, 0].argsort()])


def _smoothed(output: Tensor, y: Tensor) -> Tensor:
    return plain(output, y) + (output.log_softmax(1) * -F.one_hot(y, CLASSES).double().mean(0)).sum(1)


def _first_of_class(output: Tensor, y: Tensor) -> Tensor:
    first = torch.stack([(y[:i] != label).all() for i, label in enumerate(y)])
    return plain(output, y) * first


def _cooled(output: Tensor, y: Tensor) -> Tensor:
    return plain(output / (1 + output.detach().std()), y)


def _seeded_by_content(self: Any, x: Tensor) -> Tensor:
    torch.manual_seed(int(x.detach().abs().sum() * 1e3) % 2**31)
    return F.dropout(x, 0.5)


def _dropped_and_counted(self: Any, x: Tensor) -> Tensor:
    """Chance, and the number of records: only one record more can show it, and chance hides that."""
    return F.dropout(x, 0.5, self.training) * len(x)


def _looked_up(self: Any, x: Tensor) -> Tensor:
    """The first record whose leading number rounds to the same is taken for all of them."""
    keys = x[:, 0].round().long().clamp(-9, 9)
    return torch.stack([x[(keys == key).nonzero()[0, 0]] for key in keys])


def _net(before: Any = None, between: Any = None, loss: Any = plain) -> Callable[[], Query]:
    return lambda: GradientQuery(Net(before, between).double(), loss)


def _statistic(function: Callable[[Tensor], Tensor]) -> Callable[[], Query]:
    return lambda: StatisticQuery(lambda x, y: function(x), WIDTH)


MIXERS: dict[str, Callable[[], Query]] = {
    "divides by the batch": _net(loss=lambda output, y: plain(output, y) / len(y)),
    "sign by parity": _net(loss=lambda output, y: plain(output, y) * (1 if len(y) % 2 else -1)),
    "class weights from the batch": _net(loss=_class_weights),
    "hardest half only": _net(loss=_hardest),
    "contrastive": _net(loss=_contrastive),
    "labels out of order": _net(loss=_shuffled_labels),
    "labels smoothed by the batch": _net(loss=_smoothed),
    "divides by the largest": _net(lambda self, x: x / x.abs().max()),
    "batch normalisation": _net(lambda self, x: (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-3)),
    "centred by constants": _net(lambda self, x: x - x.detach().mean(0)),
    "running mean": _net(_running),
    "remembers the last batch": _net(_remembers),
    "capacity": _net(between=_capacity),
    "cut to the longest": _net(_cropped),
    "nothing if one is far": _net(_unless_far),
    "first record masked": _net(_first_masked),
    "equal records share": _net(_once_each),
    "backward of its own": _net(between=lambda self, x: _MeanBackward.apply(x)),
    "gradient hook": _net(between=_hooked),
    "mixed with the next": _net(lambda self, x: 0.7 * x + 0.3 * x.roll(1, 0)),
    "attention over records": _net(between=lambda self, x: torch.softmax(x @ x.T, 1) @ x),
    "running sum": _net(between=lambda self, x: x.cumsum(0)),
    "first of a class only": _net(loss=_first_of_class),
    "temperature from the batch": _net(loss=_cooled),
    "chance seeded by the batch": _net(between=_seeded_by_content),
    "dropout and the batch's size": _net(between=_dropped_and_counted),
    "looked up by a rounded key": _net(_looked_up),
    "statistic of the largest alone": _statistic(lambda x: x * (x.norm(dim=1) == x.norm(dim=1).max())[:, None]),
    "statistic centred": _statistic(lambda x: x - x.mean(0)),
    "statistic of ranks": _statistic(lambda x: x.argsort(0).argsort(0).double() / len(x)),
    "statistic scaled": _statistic(lambda x: x / (x.std(0, unbiased=False) + 1e-9)),
    "statistic above the median": _statistic(lambda x: (x > x.median(0).values).double()),
}

SOUND: dict[str, Callable[[], Query]] = {
    "network": _net(),
    "normalised by itself": _net(lambda self, x: F.layer_norm(x, (WIDTH,))),
    "statistic": _statistic(lambda x: x),
    "dropout": _net(between=lambda self, x: F.dropout(x, 0.5)),
}
