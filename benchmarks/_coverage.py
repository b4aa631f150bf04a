"""Many noise-aware fits at once: the method's own formulas, with sums over records by matrices and its noise on them.

A fit through the boundary spends most of its time on what protects one record from another: rows that are cut one by
one, a rehearsal, a charge. None of it changes what is released. Here the same questions are answered by products of
matrices, noise of the plan's size is added, and the beliefs of all repeats are solved together. For made-up records
alone: nothing here is private. `tests/methods/test_noise_aware.py` holds it against the real thing.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from confide.methods._noise_aware import Belief, Model, believe, prior_belief, residual_clip
from confide.methods._noise_aware_query import Layout
from confide.methods.noise_aware import NoiseAware, evidence_of, stage_ends
from confide.models.likelihoods import Likelihood


def beliefs(
    method: NoiseAware, likelihood: Likelihood, z: Tensor, y: Tensor, steps: int, noise: float, seed: int
) -> tuple[Belief, Model]:
    """After all stages, one for every fit.

    z       inputs with the constant last, (fits, records, inputs);  y: targets, (fits, records)
    noise   noise multiplier of every release about all records
    """
    fits, records, inputs = z.shape
    layout = Layout(likelihood.name, 1, inputs)
    model, generator = method.model_of(layout, likelihood, records), torch.Generator().manual_seed(seed)
    first = prior_belief(model)
    clip = residual_clip(model, first, first=True).expand(fits)
    belief = Belief(*(part.expand(fits, *part.shape) for part in vars(first).values()))
    ends = (0, *stage_ends(steps))
    counts = [end - start for start, end in pairwise(ends)]
    points, sums, reaches = [], [], []
    for count in counts:
        points.append(belief.mean)
        reaches.append(clip)
        exact = answers(layout, z, y, belief.mean, clip)
        sums.append(exact + noise / math.sqrt(count) * torch.randn(exact.shape, generator=generator, dtype=exact.dtype))
        told = torch.tensor(counts[: len(points)], dtype=torch.float64)
        gathered = (torch.stack(points, 1), torch.stack(sums, 1), noise**2 / told, torch.stack(reaches, 1))
        evidence = evidence_of(layout, records, *gathered, torch.zeros_like(told))
        belief = believe(model, evidence, belief, last=len(points) == len(counts))
        clip = residual_clip(model, belief)
    return belief, model


def answers(layout: Layout, z: Tensor, y: Tensor, at: Tensor, reach: Tensor) -> Tensor:
    """The sum over records of what `Layout.answer` says of each, for every fit."""
    weights = (layout.row / z.square().sum(-1)).clamp(max=1)
    outputs = (z @ at[..., None])[..., 0]
    if layout.kind == "gaussian":
        residual, bend = (y - outputs).clamp(-reach[:, None], reach[:, None]), torch.ones_like(y)
    else:
        p = outputs.sigmoid()
        residual, bend = y - p, p * (1 - p)
    score_unit, curvature_unit, spread_unit = layout.units(reach)
    scores = ((weights * residual)[:, None] @ z)[:, 0] / score_unit[:, None]
    curvature = z.mT @ (z * (weights * bend)[..., None]) / curvature_unit
    rows, columns = torch.triu_indices(layout.weights, layout.weights)
    packed = curvature[:, rows, columns] * torch.where(rows == columns, 1.0, math.sqrt(2.0)).double()
    squares = (residual / reach[:, None]).square().sum(1, keepdim=True) / spread_unit
    return torch.cat([scores, packed, squares] if layout.kind == "gaussian" else [scores, packed], 1)
