"""Are the right ones first? Areas under the ROC and the precision-recall curve, for one class against the rest.

Both judge the order of probabilities alone, whatever their size: a model that names one class only may still rank well.
"""

from __future__ import annotations

import torch
from torch import Tensor


def auroc_of(scores: Tensor, positive: Tensor) -> float:
    """Chance that a positive has a higher score than a negative; ties count half (Mann and Whitney, 1947)."""
    return float(placements(scores, positive)[0].mean())


def placements(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """For every positive the share of negatives below it, and for every negative the share of positives above it."""
    inside, outside = scores[positive].double(), scores[~positive].double()
    return _share_below(outside, inside), 1 - _share_below(inside, outside)


def _share_below(reference: Tensor, values: Tensor) -> Tensor:
    ordered = reference.sort().values
    below = torch.searchsorted(ordered, values)
    not_above = torch.searchsorted(ordered, values, right=True)
    return (below + not_above).double() / (2 * len(reference))


def average_precision_of(scores: Tensor, positive: Tensor) -> float:
    """Sum over thresholds of precision times the step in recall; equal scores stand and fall together."""
    threshold, group = torch.unique(scores.double(), return_inverse=True)
    size = len(threshold)
    named = torch.bincount(group, minlength=size).flip(0).cumsum(0).double()
    hits = torch.zeros(size, dtype=torch.float64).index_add_(0, group, positive.double()).flip(0)
    return float((hits.cumsum(0) / named * hits).sum() / hits.sum())


def defined_classes(probabilities: Tensor, labels: Tensor) -> list[int]:
    """Classes that occur among the labels and not everywhere: only for these is there an order to judge.

    Of two classes the second alone: the first one's order is the same, read backwards.
    """
    counts = torch.bincount(labels, minlength=probabilities.shape[1]).tolist()
    found = [k for k, count in enumerate(counts) if 0 < count < len(labels)]
    return found[-1:] if probabilities.shape[1] == 2 else found
