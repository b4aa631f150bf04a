"""The classes of pictures, learnt privately where nobody declared them: one noisy count of every label.

Labels are whole numbers of one byte, 0 to 255, as files of pictures have them: that they are whole numbers is said by
the type of the array, and no label is looked at for it. One full-batch Gaussian release counts all of them. The classes
are neighbours, from the lowest to the highest label that stands out of the noise, by itself or as one of a row of
labels that stand out together, and those beside them that seem to be there. A label outside counts for nothing, like
any other that is not declared: a class that few records have may be lost, and declared classes keep it.

What the fit costs does not follow from the classes, so that both are fixed in advance and are one charge (`run`).
"""

from __future__ import annotations

import warnings
from statistics import NormalDist

import torch
from torch import Tensor

from confide.data.table import Array
from confide.errors import CuratorNote, Refusal
from confide.mechanism.clipping import Recordwise
from confide.mechanism.gaussian import SampledGaussian
from confide.sources.ahead import PaidAhead
from confide.sources.queries import StatisticQuery
from confide.workflow.calibrate import one_release
from confide.workflow.request import LABELS, Request

PURPOSE = "count the labels"
SHARE = 0.1
"""Part of epsilon that the counts may cost; they compose with the fit, which loses about half a per cent of mu."""
DOUBT = 1e-3
"""Chance that noise alone passes for a label, or for a row of them."""
SEEMS = 2.0
"""Deviations of the noise from which on a label beside those that stand out is taken in: one in forty such labels is
a class without a record, which costs next to nothing, and a rarer class is lost less often."""
REHEARSED_CLASSES = 10
"""Stands for the number of classes while it is not known."""


def mechanism_of(request: Request) -> SampledGaussian | None:
    """The mechanism of the counts, in which a record answers 1 for its label; None where the classes are known."""
    return one_release(request, SHARE) if request.learns_classes else None


def learn_classes(source: PaidAhead, mechanism: SampledGaussian) -> tuple[int, ...]:
    """The labels that stand out; at least two of them, or the fit ends here."""
    query = StatisticQuery(Recordwise(lambda _, y: _one_hot(y)), LABELS)
    receipt = source.take_up([(mechanism, 1)], PURPOSE)
    counts = source.answer(query, mechanism, receipt).sum.flatten()
    found = standing_out(counts / mechanism.noise_std)
    if len(found) < 2:
        least, seen = mechanism.noise_std * _least(LABELS), "one" if found else "none"
        raise Refusal(
            f"classes: {seen} of the labels stood out of the noise, which takes about {least:.0f} records of each; "
            "the run stays charged, and declared classes or a larger epsilon make the next one work"
        )
    return tuple(found)


def tell_of_lost(before: Array, after: Array) -> None:
    """Tell the curator, who may see the records, how many have a label that is no class; no output holds it."""
    lost = int(((before >= 0) & (after < 0)).sum())
    if lost:
        note = (
            f"classes: {lost} of {len(after)} records have a label outside those that stood out of the noise, and "
            "count for nothing; declare the classes to keep them"
        )
        warnings.warn(note, CuratorNote, stacklevel=2)


def standing_out(counts: Tensor) -> range:
    """The labels, neighbours, that stand out of noise of deviation 1; none where nothing does."""
    strong = torch.nonzero(counts > _least(LABELS)).flatten().tolist()
    strong += _row(counts)
    if not strong:
        return range(0)
    low, high = min(strong), max(strong)
    while low > 0 and counts[low - 1] > SEEMS:
        low -= 1
    while high < LABELS - 1 and counts[high + 1] > SEEMS:
        high += 1
    return range(low, high + 1)


def _row(counts: Tensor) -> list[int]:
    """The ends of the row of neighbours whose sum stands out most, if it does: many small classes do so together."""
    edges = torch.cat([torch.zeros(1, dtype=counts.dtype), counts.cumsum(0)])
    lengths = torch.arange(LABELS + 1)[None, :] - torch.arange(LABELS + 1)[:, None]
    sums = (edges[None, :] - edges[:, None]) / lengths.clamp(min=1).sqrt()
    sums[lengths < 1] = -torch.inf
    start, end = divmod(int(sums.argmax()), LABELS + 1)
    return [start, end - 1] if sums[start, end] > _least(LABELS * (LABELS + 1) // 2) else []


def _least(places: int) -> float:
    """Deviations that noise reaches in none of so many places, but for a chance of DOUBT."""
    return NormalDist().inv_cdf(1 - DOUBT / places)


def _one_hot(labels: Tensor) -> Tensor:
    return (labels[:, None] == torch.arange(LABELS, device=labels.device)).double()
