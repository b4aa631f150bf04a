"""Additive models: one smooth effect for every number, one level for every category, and their sum.

    f(x) = w_0 + sum over numbers j of f_j(u_j) + sum over columns of categories c of g_c(x_c)
    f_j(u) = sum_k w_jk a_k (cos(pi k u) - m_jk),        a_k = k^-smoothness

u_j is a quantile scale with room for tails: a monotone map of the column onto [0, 1], the normal law of a part of the
normal score, so that a heavy tail takes little room and a square or an exponential is still smooth in it. A prior N(0,
tau^2) of all w makes f_j smooth: it is the Sobolev norm of that order. Where scales come from is the business of a
method; here they are buffers that start as the plain scale between the declared bounds.

Inputs are those of `confide.data.preprocessing.Encoder`: numbers in [-1, 1], categories 0 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from confide.data.schema import Schema
from confide.devices import computes_for
from confide.errors import Refusal

NUMBER = 0
"""A block of one input that holds a number; any other block is the width of a column of categories."""
WAVES = 12
"""Cosines of a number: steps of a twelfth of all records are resolved."""
EVEN_BINS, FEW_EVEN_BINS, FINEST = 64, 16, 20
"""Bins of equal width, and powers of 1/2 down to which both ends and the middle are divided further: a millionth of the
declared range, so that bounds may be wide, and zero may be an end, the middle or a value of most records."""
MANY_NUMBERS = 100
"""Above so many numbers bins are few: noise grows with the root of their number, and time with all bins."""


@dataclass(frozen=True)
class AdditiveRecipe:
    """blocks   in the order of the inputs: NUMBER, or how many inputs the categories of one column take
    outputs  of the network
    waves    cosines of every number
    """

    blocks: tuple[int, ...]
    outputs: int
    waves: int = WAVES

    def __post_init__(self) -> None:
        if not self.blocks or any(width < 0 for width in self.blocks):
            raise Refusal(f"blocks={self.blocks}: need at least one column, and widths that are not negative")
        for name, value in (("outputs", self.outputs), ("waves", self.waves)):
            if value < 1:
                raise Refusal(f"{name}={value}: must be at least 1")

    @property
    def inputs(self) -> int:
        return sum(max(1, width) for width in self.blocks)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Places of the numbers among the inputs."""
        return tuple(place for place, width in self._places() if width == NUMBER)

    @property
    def categories(self) -> tuple[int, ...]:
        """Places of all categories among the inputs."""
        return tuple(first + i for first, width in self._places() for i in range(width))

    @property
    def features(self) -> int:
        return 1 + len(self.numbers) * self.waves + len(self.categories)

    def groups(self) -> list[slice]:
        """Which features belong to each block, in the order of the blocks; the constant, feature 0, to none."""
        number, category = 1, 1 + len(self.numbers) * self.waves
        found: list[slice] = []
        for width in self.blocks:
            if width == NUMBER:
                found.append(slice(number, number + self.waves))
                number += self.waves
            else:
                found.append(slice(category, category + width))
                category += width
        return found

    def _places(self) -> list[tuple[int, int]]:
        place = 0
        found: list[tuple[int, int]] = []
        for width in self.blocks:
            found.append((place, width))
            place += max(1, width)
        return found

    def to_dict(self) -> dict[str, Any]:
        return {"blocks": list(self.blocks), "outputs": self.outputs, "waves": self.waves}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> AdditiveRecipe:
        return cls(**{**values, "blocks": tuple(values["blocks"])})


def blocks_of(schema: Schema, features: int) -> tuple[int, ...]:
    """What the inputs of a schema are; a plain array of so many features is all numbers."""
    blocks: list[int] = []
    for column in schema.columns:
        if column.kind == "categorical":
            blocks.append(column.width)
        else:
            blocks += [NUMBER, *([1] if column.missing == "category" else [])]
    return tuple(blocks) or (NUMBER,) * features


def column_names(schema: Schema, recipe: AdditiveRecipe) -> list[str]:
    """One name for every block of a network."""
    names: list[str] = []
    for column in schema.columns:
        names.append(column.name)
        if column.kind == "numeric" and column.missing == "category":
            names.append(f"{column.name} is missing")
    return names if len(names) == len(recipe.blocks) else [f"input {place}" for place in range(len(recipe.blocks))]


@cache
def edges(numbers: int) -> Tensor:
    """Of the bins of each of so many numbers on its plain scale [0, 1], ends included.

    The middle is the middle of a bin, and not the border of two, for it stands for what is missing.
    """
    count, stride = (EVEN_BINS, 1) if numbers <= MANY_NUMBERS else (FEW_EVEN_BINS, 4)
    even = torch.arange(count + 1, dtype=torch.float64) / count
    fine = 2.0 ** -torch.arange(FINEST, count.bit_length() - 1, -stride, dtype=torch.float64)
    found: Tensor = torch.cat([even, fine, 1 - fine, 0.5 - fine, 0.5 + fine]).unique()
    return found[found != 0.5]


def middles(numbers: int) -> Tensor:
    """Of the bins."""
    return (edges(numbers)[1:] + edges(numbers)[:-1]) / 2


def bins(numbers: int) -> int:
    return len(edges(numbers)) - 1


def plain_scale(inputs: Tensor) -> Tensor:
    """Numbers of an encoder on [0, 1]."""
    return ((inputs.double() + 1) / 2).clamp(0, 1)


def bin_of(inputs: Tensor) -> Tensor:
    """The bin of every number."""
    return torch.bucketize(plain_scale(inputs), edges(inputs.shape[1])[1:-1].to(inputs.device))


class AdditiveFeatures(nn.Module):
    """From the inputs of an encoder to the features of an additive model, by public buffers; nothing is trained.

    heights     (numbers, bins): the quantile scale at the middle of each bin; straight lines in between
    centres     of every feature, taken off
    amplitudes  by which what is left is multiplied
    """

    heights: Tensor
    centres: Tensor
    amplitudes: Tensor
    numbers: Tensor
    categories: Tensor

    def __init__(self, recipe: AdditiveRecipe) -> None:
        super().__init__()
        self.waves = recipe.waves
        amplitudes = torch.ones(recipe.features)
        for group, width in zip(recipe.groups(), recipe.blocks, strict=True):
            if width == NUMBER:
                amplitudes[group] = 1 / torch.arange(1, recipe.waves + 1)
        self.register_buffer("numbers", torch.tensor(recipe.numbers, dtype=torch.int64))
        self.register_buffer("categories", torch.tensor(recipe.categories, dtype=torch.int64))
        self.register_buffer("heights", middles(len(recipe.numbers)).float().repeat(len(recipe.numbers), 1))
        self.register_buffer("centres", torch.zeros(recipe.features))
        self.register_buffer("amplitudes", amplitudes)

    def forward(self, x: Tensor) -> Tensor:
        waves = self.cosines(self.quantiles(x)).flatten(1)
        constant = waves.new_ones(len(x), 1)
        features = torch.cat([constant, waves, x[:, self.categories].to(waves.dtype)], 1)
        return (features - self.centres) * self.amplitudes

    def quantiles(self, x: Tensor) -> Tensor:
        """(records, numbers): where every number stands among all records."""
        where = computes_for(x.device)  # in double precision
        value = plain_scale(x[:, self.numbers].to(where))
        knots = middles(len(self.numbers)).to(where)
        right = torch.bucketize(value, knots).clamp(1, len(knots) - 1)
        low, high = knots[right - 1], knots[right]
        share = ((value - low) / (high - low)).clamp(0, 1).to(self.heights.dtype).to(x.device)
        right = right.to(x.device)
        column = torch.arange(len(self.numbers), device=x.device) * self.heights.shape[1]
        flat = self.heights.reshape(-1)
        return torch.lerp(flat[column + right - 1], flat[column + right], share)

    def places(self, u: Tensor) -> Tensor:
        """(numbers, levels): the inputs that stand at these levels of each quantile scale."""
        knots, heights = middles(len(self.numbers)), self.heights.double().cpu()
        levels = u.double().expand(len(self.numbers), -1).contiguous()
        right = torch.searchsorted(heights.contiguous(), levels).clamp(1, len(knots) - 1)
        low, high = heights.gather(1, right - 1), heights.gather(1, right)
        share = ((levels - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
        return 2 * torch.lerp(knots[right - 1], knots[right], share) - 1

    def cosines(self, u: Tensor) -> Tensor:
        """(records, numbers, waves): cos(pi k u) by the recurrence of Chebyshev's polynomials."""
        found = [torch.ones_like(u), torch.cos(torch.pi * u)]
        for _ in range(self.waves - 1):
            found.append(2 * found[1] * found[-1] - found[-2])
        return torch.stack(found[1:], -1)


class AdditiveNetwork(nn.Sequential):
    """The network of a recipe: features, then one linear layer whose weights start at zero. Feature 0 is constant."""

    def __init__(self, recipe: AdditiveRecipe) -> None:
        linear: nn.Linear = nn.utils.skip_init(nn.Linear, recipe.features, recipe.outputs, bias=False)
        nn.init.zeros_(linear.weight)
        super().__init__(AdditiveFeatures(recipe), linear)
        self.recipe = recipe

    @property
    def features(self) -> AdditiveFeatures:
        return self[0]  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x.flatten(1))  # type: ignore[no-untyped-call]
        return output


def additive(blocks: Sequence[int], outputs: int = 1, waves: int = WAVES) -> AdditiveNetwork:
    """An additive model of columns: 0 for a number, a width for a column of so many categories."""
    return AdditiveNetwork(AdditiveRecipe(tuple(blocks), outputs, waves))


def smoothed(counts: Tensor, noise: float, records: float, width: Tensor, known: Tensor | None = None) -> Tensor:
    """Shares of all bins, from noisy counts (columns, bins) of a release whose every count has that noise.

    A tree over the bins, from all records down: a part is divided between its halves as the counts say if that is
    more than noise, else as is known beforehand. What lies in between is shrunk, by a factor
    1 - (REACH noise / deviation)^2. Halves add up to their whole, and no share is negative.

    known   (columns, bins): shares that are expected beforehand; None: in proportion to the widths
    """
    shares, known = torch.zeros_like(counts), width.expand_as(counts) if known is None else known

    def divide(first: int, last: int, mass: Tensor) -> None:
        if last - first == 1:
            shares[:, first] = mass
            return
        middle = (first + last) // 2
        left, right = counts[:, first:middle].sum(1), counts[:, middle:last].sum(1)
        many, few = middle - first, last - middle
        expected = mass * (known[:, first:middle].sum(1) / known[:, first:last].sum(1).clamp(min=1e-300))
        # The whole is known better than the sum of its noisy parts: the difference is spread over them.
        found = (left + (mass * records - left - right) * many / (many + few)) / records
        error = REACH * noise / records * (many * few / (many + few)) ** 0.5
        deviation = found - expected
        kept = (1 - (error / deviation.abs().clamp(min=1e-30)).square()).clamp(min=0)
        # Where noise is larger than any deviation can be, whatever is found is noise.
        kept = kept * (torch.where(deviation > 0, mass - expected, expected) > error)
        part = torch.minimum((expected + kept * deviation).clamp(min=0), mass)
        divide(first, middle, part)
        divide(middle, last, mass - part)

    divide(0, counts.shape[1], torch.ones(len(counts), dtype=counts.dtype))
    return (1 - EVEN_SHARE) * shares + EVEN_SHARE * width


REACH = 2.0
"""Standard deviations of noise that a difference of counts must exceed to be believed."""
EVEN_SHARE = 0.02
"""Of every quantile scale is the plain one: no part of the declared range is without a scale, whatever noise says."""


TAIL_ROOM = 0.5
"""How much room tails have: the scale is as long anywhere as the root of a normal number's density there, and with 1 it
would be the quantile scale, on which twelve cosines explain .88 of such a number's square; here .97. Looked at beside
.7 on made-up tables, see docs/protocols.md."""


ONE_VALUE = 0.95
"""Of the records in one bin, from which on a number has one value: where in the bin it lies nobody knows, so that its
waves would be constants that are not known."""


def heights_of(shares: Tensor) -> Tensor:
    """The scale at the middle of each bin: half of a bin's own records count as below.

    Phi(root(TAIL_ROOM) Phi^-1(share below)), so that what is smooth in a number or its logarithm takes few waves.
    """
    below = (shares.cumsum(1) - shares / 2).clamp(1e-9, 1 - 1e-9)
    heights: Tensor = torch.special.ndtr(math.sqrt(TAIL_ROOM) * torch.special.ndtri(below))
    return heights


HEAP, NEARLY_ALL = 0.2, 0.97
"""Of the records in one bin, from which on a number has values and no density; and of them in the fullest bins, which
says how many values: a histogram's shares are a little even everywhere."""
SURELY_THERE, MOST_ELSEWHERE = 4.0, 0.2
"""Deviations of noise above which a bin is one of a number's values; and what other bins hold at most, then: noise that
was believed gives them some, by twice the root of their number."""
TOLD_APART = 0.3
"""Radians by which a wave may turn at a value whose height is not known better."""


PLACES_IN_A_BIN = (-0.75, -0.25, 0.25, 0.75)
"""Where records may lie, from the middle of a bin to its edges."""


def wave_moments(shares: Tensor, heights: Tensor, waves: int, noise: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of every cosine (numbers, waves), and how cosines of a number are correlated (numbers, waves,
    waves), where such shares of the records lie in bins with these heights. A number of one value has no variance.

    On average over places in a bin: a number that has nine values lies at nine places that nobody knows, and if they
    were taken for the middles, some sums of its waves would seem not to vary at all.

    noise   in every share
    """
    order = torch.arange(1, waves + 1, dtype=heights.dtype)
    width = edges(len(shares)).diff().to(heights.dtype)
    cosines = torch.cat([torch.cos(torch.pi * order[:, None] * u[:, None, :]) for u in _within(heights, width)], -1)
    weights = (shares / len(PLACES_IN_A_BIN)).repeat(1, len(PLACES_IN_A_BIN))
    mean = (cosines * weights[:, None, :]).sum(-1)
    centred = cosines - mean[..., None]
    products = (centred * weights[:, None, :]) @ centred.transpose(1, 2)
    own = products.diagonal(dim1=1, dim2=2)
    root = own.clamp(min=1e-12).sqrt()
    used = (shares.amax(1, keepdim=True) < ONE_VALUE) & (order <= waves_told(shares, noise)[:, None])
    variance = own * used
    return mean, variance, products / (root[:, :, None] * root[:, None, :])


def waves_told(shares: Tensor, noise: float) -> Tensor:
    """How many waves of every number are used, where noise in its shares is of that size.

    Whatever depends on a number of so many values is a sum of one wave fewer. Further ones are sums of these, and of
    which is known only as well as heights of the values are: taken for waves of their own they would be pushed far off.
    """
    count = shares.shape[1]
    there = shares > SURELY_THERE * noise
    most = min(max(1 - NEARLY_ALL, 2 * noise * math.sqrt(count)), MOST_ELSEWHERE)
    values = torch.where(1 - (shares * there).sum(1) <= most, there.sum(1), count)
    if noise == 0:
        values = 1 + (shares.sort(1, descending=True).values.cumsum(1) < NEARLY_ALL).sum(1)
    heights = noise * math.sqrt(count) / 2  # their noise, about
    legible = min(TOLD_APART / (math.pi * heights), count) if heights > 0 else count
    few = torch.minimum(values - 1, torch.full_like(values, int(legible))).clamp(min=1)
    return torch.where(shares.amax(1) > HEAP, few, count)


def _within(heights: Tensor, width: Tensor) -> list[Tensor]:
    """Heights (numbers, bins) at every place in the bins: straight lines between their middles."""
    between = heights.diff(dim=1) / (width[1:] + width[:-1])
    flat = torch.zeros_like(heights[:, :1])
    left, right = torch.cat([flat, between], 1) * width, torch.cat([between, flat], 1) * width
    return [heights + place * (left if place < 0 else right) for place in PLACES_IN_A_BIN]


__all__ = ["NUMBER", "AdditiveFeatures", "AdditiveNetwork", "AdditiveRecipe", "additive", "blocks_of"]
