"""From contributions to the certified sum: norms, factors, and the way of adding up that `rounding` proves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from confide.mechanism.clipping.anatomy import Anatomy
from confide.mechanism.clipping.calls import Cluster
from confide.mechanism.clipping.factors import Style, clip_factors, shrunk
from confide.mechanism.clipping.rounding import CANCELLING, ROWS, Tally, Way, error, way_of, working_type
from confide.mechanism.clipping.rows import norms_of, row_factors, unit_rows
from confide.mechanism.clipping.rules.squares import chunks, squared_norms_of

# A block's product costs at least as much as adding up so many entries.
CALL = 1 << 12


class ClipAsked(Protocol):
    """What is asked for; `allowed` is what rounding may take of the clip, `weights` what each record counts for."""

    @property
    def clip(self) -> float: ...
    @property
    def style(self) -> Style: ...
    @property
    def budget(self) -> int: ...
    @property
    def allowed(self) -> float: ...
    @property
    def weights(self) -> Tensor | None: ...


class Views(Protocol):
    out: Tensor
    parts: list[Tensor]


@contextmanager
def exact_products() -> Iterator[None]:
    """Products of single precision are made of single precision: no shorter formats, whatever was set outside.

    The certificate is about IEEE arithmetic; TF32, bfloat16 products and autocast would make its unit a thousand times
    too small.
    """
    backends: list[Any] = [torch.backends.mkldnn, torch.backends.cuda]
    before = [(backend.matmul, backend.matmul.fp32_precision) for backend in backends]
    shorter = [(setting, value) for setting, value in before if value not in ("ieee", "none")]
    for setting, _ in shorter:  # touched only where it must be: that takes longer than a small step
        setting.fp32_precision = "ieee"
    try:
        with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
            yield
    finally:
        for setting, value in shorter:
            setting.fp32_precision = value


def add_certified(clusters: Sequence[Cluster], anatomy: Anatomy, bound: ClipAsked, views: Views) -> Tensor:
    """Add the clipped sum of all records onto the views; the norms come back, 0 for records that count as zero."""
    squares = group_squares(clusters, working_type(anatomy.parameters))
    total = squared_total(squares)
    factors, norms = factors_of(squares, total, anatomy, bound)
    # what every record's parts come to beside C once they are scaled, layer by layer and in all
    spreads = [cluster.spread() * factors[cluster.group] / bound.clip for cluster in clusters]
    together = torch.stack([spread.to(norms.dtype).square() for spread in spreads]).sum(0) <= CANCELLING**2
    if bool(together.all()):  # false for what is not a number
        add_sums(clusters, factors, spreads, bound, views.parts)
        return norms
    chosen, rest = (~together).nonzero().flatten(), together.nonzero().flatten()
    weights = None if bound.weights is None else bound.weights[chosen].double()
    alone = [cluster.chosen(chosen) for cluster in clusters]
    total, of_rows = sum_of_rows(alone, len(chosen), anatomy, bound, weights)
    if len(rest):
        factors = {group: values[rest] for group, values in factors.items()}
        some = [cluster.chosen(rest) for cluster in clusters]
        add_sums(some, factors, [spread[rest] for spread in spreads], bound, views_of(total, anatomy))
    views.out.add_(total)
    return norms.index_copy(0, chosen, of_rows.to(norms.dtype))


def add_sums(
    clusters: Sequence[Cluster],
    factors: dict[int, Tensor],
    spreads: Sequence[Tensor],
    bound: ClipAsked,
    parts: list[Tensor],
) -> None:
    """Every cluster's weighted sum in the cheapest way that keeps the error of all within what is allowed.

    Clusters touch different parameters, so the squares of their errors add up. A cluster with error e and E entries
    that goes in B blocks has an error of about e / B and costs about E B: the cheapest shares of the allowed square are
    as (e E)^(2/3). Those that err least come first, and what they leave of their shares is there for the others.
    """
    plans = []
    for cluster, spread in zip(clusters, spreads, strict=True):
        each, size = factors[cluster.group].to(spread.dtype), float(spread.sum(dtype=torch.float64))
        plain = error(cluster.chain(len(each)), size, each.dtype)
        plans.append((plain, size, cluster, each, (min(plain, 1.0) * (cluster.entries + CALL)) ** (2 / 3)))
    left, rest = bound.allowed**2, sum(plan[-1] for plan in plans)
    for plain, size, cluster, each, share in sorted(plans, key=itemgetter(0)):
        allowed = math.sqrt(left * min(1.0, share / rest)) if rest > 0 else 0.0
        rest -= share
        way = Way() if plain <= allowed else way_of(len(each), cluster.chain, size, allowed, each.dtype)
        if way.wide and each.dtype != torch.float64:
            cluster, each = cluster.widened(), each.double()
            way = way_of(len(each), cluster.chain, size, allowed, torch.float64)
        if way.wide:  # millions of positions that cancel: formed records are as large as their norms
            cluster.add_formed(each, parts)
        else:
            cluster.add_weighted(each, parts, way.blocks)
        left = max(0.0, left - min(allowed, plain) ** 2)


def factors_of(
    squares: dict[int, Tensor], total: Tensor, anatomy: Anatomy, bound: ClipAsked
) -> tuple[dict[int, Tensor], Tensor]:
    """The factors of every group, and the norms.

    Per-layer clipping gives each of the K groups C / sqrt(K), whether it was used or not: the joint norm of a
    record over all groups is then at most C, the same sensitivity as flat clipping. A weight of at most 1 comes after
    the clip, so that it takes nothing of the bound away.
    """
    norms = total.sqrt()
    weights = 1.0 if bound.weights is None else bound.weights.to(norms.dtype)
    if bound.style != "per-layer":
        return dict.fromkeys(squares, clip_factors(norms, bound.clip, bound.style) * weights), norms
    share = bound.clip / math.sqrt(anatomy.groups)
    return {group: clip_factors(values.sqrt(), share) * weights for group, values in squares.items()}, norms


def group_squares(clusters: Sequence[Cluster], dtype: torch.dtype) -> dict[int, Tensor]:
    """Squared norms by group of per-layer clipping; groups without a call in this batch are absent.

    In layers of several types the shortest decides how much room rounding gets.
    """
    squares: dict[int, Tensor] = {}
    for cluster in clusters:
        known, found = squares.get(cluster.group), cluster.squared_norms().to(dtype)
        squares[cluster.group] = found if known is None else known + found
    return squares


def squared_total(squares: dict[int, Tensor]) -> Tensor:
    first, *rest = squares.values()
    return sum(rest, start=first)


def views_of(flat: Tensor, anatomy: Anatomy) -> list[Tensor]:
    """A flat vector over all parameters, in their shapes."""
    pieces = flat.split_with_sizes(anatomy.sizes)
    return [piece.view(value.shape) for piece, value in zip(pieces, anatomy.parameters, strict=True)]


def sum_of_rows(
    clusters: Sequence[Cluster], records: int, anatomy: Anatomy, bound: ClipAsked, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The clipped sum of records apart: those whose parts cancel, or whose norm is no number in the type of the layers.

    Their gradients are formed in full in double precision and clipped as rows, so that nothing depends on how their
    parts were rounded. A row that is not finite counts as zero. The sum and the norms come back, in double precision.
    """
    lost = lost_records(clusters)
    if lost is not None:  # of a network that runs away all records are, and forming them takes seconds each
        some = (~lost).nonzero().flatten()
        theirs = None if weights is None else weights[some]
        found, norms = sum_of_rows([cluster.chosen(some) for cluster in clusters], len(some), anatomy, bound, theirs)
        return found, norms.new_zeros(records).index_copy(0, some, norms)
    wide = [cluster.widened() for cluster in clusters]
    offsets = [0, *torch.tensor(anatomy.sizes).cumsum(0).tolist()]
    clip, style = shrunk(bound.clip, working_type(anatomy.parameters)), bound.style  # as for the others
    device = anatomy.parameters[0].device
    total = Tally([anatomy.size], device)
    norms = torch.zeros(records, dtype=torch.float64, device=device)
    for start, stop in chunks(records, max(16 * anatomy.size, bound.budget // ROWS), bound.budget):
        rows = torch.zeros(stop - start, anatomy.size, dtype=torch.float64, device=device)
        for cluster in wide:
            cluster.add_rows(rows, offsets, start, stop)
        rows, sizes, scale = unit_rows(rows)
        norms[start:stop] = norms_of(sizes, scale)
        each = torch.ones_like(sizes) if weights is None else weights[start:stop]
        if style == "per-layer":
            share = clip / math.sqrt(anatomy.groups)
            for columns in columns_by_group(wide, offsets):
                of_group = squared_norms_of(rows[:, columns]).sqrt_()
                rows[:, columns] *= row_factors(of_group, scale, share, style)[:, None]
            total.open.add_(torch.mv(rows.t(), each))
        else:
            total.open.add_(torch.mv(rows.t(), row_factors(sizes, scale, clip, style) * each))
        total.added()
    return total.total(), norms


def lost_records(clusters: Sequence[Cluster]) -> Tensor | None:
    """Records whose rows would be no numbers, as one side of their products shows; None where there are none.

    Not as norms or spreads show: those are no numbers too where single precision does not reach, of records whose rows
    are numbers in double precision.
    """
    found = [lost for cluster in clusters for lost in cluster.lost()]
    if not found:
        return None
    together = torch.stack(found).any(0)
    return together if bool(together.any()) else None


def columns_by_group(clusters: Sequence[Cluster], offsets: list[int]) -> list[Tensor]:
    """Where the parameters of every group stand in a row."""
    parameters: dict[int, set[int]] = {}
    for cluster in clusters:
        parameters.setdefault(cluster.group, set()).update(*(slot.parameters for slot, _ in cluster.members))
    return [
        torch.cat([torch.arange(offsets[index], offsets[index + 1]) for index in sorted(found)])
        for found in parameters.values()
    ]
