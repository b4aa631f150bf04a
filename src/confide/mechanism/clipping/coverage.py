"""Whether contributions account for the whole gradient: the unclipped sum against ordinary autograd.

Both are formed layer by layer in one backward pass, as autograd gets there, so that looking needs little more memory
than a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from confide.mechanism.clipping.anatomy import Anatomy, Slot
from confide.mechanism.clipping.calls import Cluster, clusters_of
from confide.mechanism.clipping.rules.registry import Contribution
from confide.mechanism.clipping.workspace import Workspace


def missed_parameters(
    losses: Tensor,
    anatomy: Anatomy,
    found: Sequence[tuple[Slot, Contribution]],
    space: Workspace,
    copies: Mapping[int, Tensor],
) -> frozenset[int]:
    """Parameters whose unclipped sum is not the gradient of the summed losses, whose graph must still be there.

    Copied parameters are not in that graph: what their copies got is all there is.
    """
    wanted = [index for index in range(len(anatomy.parameters)) if index not in copies]
    if not wanted:
        return frozenset()
    clusters = [one for one in clusters_of(found, anatomy, space) if not _touched(one) & copies.keys()]
    compared = Compared(anatomy, {index: one for one in clusters for index in _touched(one)}, torch.ones_like(losses))
    with _heard(anatomy, wanted, compared):
        parameters = [anatomy.parameters[index] for index in wanted]
        torch.autograd.grad(losses.sum(), parameters, retain_graph=True, allow_unused=True)
    for index in wanted:  # those that the losses do not depend on
        if index not in compared.differences:
            compared.take(index, torch.zeros_like(anatomy.parameters[index], requires_grad=False))
    scale = torch.stack(list(compared.sizes.values())).norm()
    half = any(contribution.shortened for _, contribution in found)
    return frozenset(
        index
        for index, difference in compared.differences.items()
        if not difference <= _tolerance(difference.dtype, half) * (compared.sizes[index] + 1e-2 * scale)
    )


class Compared:
    """Norms of gradients and of their differences to the unclipped sums, of every cluster as soon as it has come."""

    def __init__(self, anatomy: Anatomy, clusters: Mapping[int, Cluster], ones: Tensor) -> None:
        self.anatomy, self.clusters, self.ones = anatomy, clusters, ones
        self.waiting: dict[int, Tensor] = {}
        self.sizes: dict[int, Tensor] = {}
        self.differences: dict[int, Tensor] = {}

    @torch.no_grad()
    def take(self, index: int, gradient: Tensor) -> None:
        gradient = gradient.to_dense()
        self.sizes[index], cluster = gradient.norm(), self.clusters.get(index)
        if cluster is None:
            self.differences[index] = self.sizes[index]
            return
        self.waiting[index] = -gradient  # with memory of its own: autograd may use this elsewhere
        touched = _touched(cluster)
        if touched <= self.waiting.keys():
            views = [self.waiting.get(place, self.ones) for place in range(len(self.anatomy.parameters))]
            norms = cluster.squared_norms()  # decides how the sum is formed, so that the same way is examined
            cluster.add_weighted(self.ones.to(norms.dtype), views)
            self.differences |= {place: self.waiting.pop(place).norm() for place in touched}


@contextmanager
def _heard(anatomy: Anatomy, wanted: Sequence[int], compared: Compared) -> Iterator[None]:
    """Parameters of which autograd keeps no gradient: each is looked at when it comes, and a single zero is left."""

    def hear(index: int, gradient: Tensor) -> Tensor:
        compared.take(index, gradient)
        return gradient.new_zeros(()).expand(gradient.shape)

    handles = [anatomy.parameters[index].register_hook(partial(hear, index)) for index in wanted]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _touched(cluster: Cluster) -> set[int]:
    return {index for slot, _ in cluster.members for index in slot.parameters}


def _tolerance(dtype: torch.dtype, half: bool) -> float:
    """Half precision inside a layer leaves autograd's gradients three digits and this many roundings."""
    if half:
        return 3e-2
    return 1e-8 if dtype == torch.float64 else 1e-3
