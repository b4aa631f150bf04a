"""Whether contributions account for the whole gradient: the unclipped sum against ordinary autograd.

Both are formed for a share of the parameters at a time, so that looking needs little more memory than a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from confide.mechanism.clipping.anatomy import Anatomy, Slot
from confide.mechanism.clipping.calls import Cluster, clusters_of
from confide.mechanism.clipping.rules.registry import Contribution
from confide.mechanism.clipping.workspace import Gaps, Workspace

# So many backward passes are made at most, or a few more where layers are of very different sizes.
SHARES = 8


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
    clusters, gaps = clusters_of(found, anatomy, space), Gaps()
    differences: dict[int, Tensor] = {}
    sizes: dict[int, Tensor] = {}
    for indices, members in _shares(clusters, anatomy):
        indices = [index for index in indices if index not in copies]
        if not indices:
            continue
        gradients = _gradients(losses, anatomy, indices)
        sizes |= {index: gradient.norm() for index, gradient in gradients.items()}
        recorded = [member for member in members if not _touched(member) & copies.keys()]
        _subtract_from_sums(gradients, recorded, anatomy, torch.ones_like(losses))
        differences |= {index: difference.norm() for index, difference in gradients.items()}
        gaps.taken([*gradients.values()])
        gradients.clear()  # before the next ones come
    if not sizes:
        return frozenset()
    scale = torch.stack(list(sizes.values())).norm()
    half = any(contribution.shortened for _, contribution in found)
    return frozenset(
        index
        for index, difference in differences.items()
        if not difference <= _tolerance(difference.dtype, half) * (sizes[index] + 1e-2 * scale)
    )


def _shares(clusters: list[Cluster], anatomy: Anatomy) -> Iterator[tuple[list[int], list[Cluster]]]:
    """Clusters with the parameters they touch, several of them together as long as they are small."""
    limit = sum(anatomy.sizes) // SHARES
    used = {index for cluster in clusters for index in _touched(cluster)}
    indices = [index for index in range(len(anatomy.parameters)) if index not in used]
    members: list[Cluster] = []
    for cluster in clusters:
        touched = _touched(cluster)
        if indices and sum(anatomy.sizes[index] for index in (*indices, *touched)) > limit:
            yield indices, members
            indices, members = [], []
        indices = indices + sorted(touched)
        members = [*members, cluster]
    yield indices, members


def _touched(cluster: Cluster) -> set[int]:
    return {index for slot, _ in cluster.members for index in slot.parameters}


def _gradients(losses: Tensor, anatomy: Anatomy, indices: list[int]) -> dict[int, Tensor]:
    """Dense gradients with memory of their own: autograd may hand out views, one tensor twice, or a parameter."""
    parameters = [anatomy.parameters[index] for index in indices]
    found = torch.autograd.grad(losses.sum(), parameters, retain_graph=True, allow_unused=True)
    gradients: dict[int, Tensor] = {}
    seen = {parameter.untyped_storage().data_ptr() for parameter in anatomy.parameters}
    for index, parameter, value in zip(indices, parameters, found, strict=True):
        dense = torch.zeros_like(parameter, requires_grad=False) if value is None else value.to_dense()
        storage = dense.untyped_storage()
        whole = storage.nbytes() == dense.numel() * dense.element_size()
        if not whole or not dense.is_contiguous() or storage.data_ptr() in seen:
            dense = dense.clone(memory_format=torch.contiguous_format)
        seen.add(dense.untyped_storage().data_ptr())
        gradients[index] = dense
    return gradients


@torch.no_grad()
def _subtract_from_sums(gradients: dict[int, Tensor], members: list[Cluster], anatomy: Anatomy, ones: Tensor) -> None:
    """Replace every gradient by the unclipped sum less the gradient, in its own memory."""
    for gradient in gradients.values():
        gradient.neg_()
    views = [gradients.get(index, ones) for index in range(len(anatomy.parameters))]
    for cluster in members:
        norms = cluster.squared_norms()  # decides how the sum is formed, so that the same way is examined
        cluster.add_weighted(ones.to(norms.dtype), views)


def _tolerance(dtype: torch.dtype, half: bool) -> float:
    """Half precision inside a layer leaves autograd's gradients three digits and this many roundings."""
    if half:
        return 3e-2
    return 1e-8 if dtype == torch.float64 else 1e-3
