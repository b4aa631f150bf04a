"""Geometry of public inputs: directions, clusters and a graph of neighbours. No private record is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide.errors import Refusal

WHITENING = 0.5
"""Directions are divided by so much of a power of their spread: full whitening lets noise speak as loud as shape."""
STEPS_OF_SPREADING, STAY = 100, 0.99
"""Labels spread until 0.99^100 of them is left to move (Zhou et al., NIPS 2003)."""
ROWS_AT_ONCE = 2048  # Distances of so many inputs to all others fit into the processor's nearer memory.


def principal_directions(inputs: Tensor, dimensions: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mean of public inputs, and the map of what is left to their leading directions, half whitened."""
    rows = inputs.flatten(1).float()
    centre = rows.mean(0)
    rows = rows - centre
    rank = min(dimensions, *rows.shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        _, spread, directions = torch.svd_lowrank(rows, q=rank, niter=2)
    kept = spread > 1e-6 * spread[0].clamp(min=1e-30)
    if not bool(kept.any()):
        raise Refusal("public_inputs: they are all alike, so that nothing tells them apart")
    found: Tensor = directions[:, kept] / (spread[kept] / spread[0]) ** WHITENING
    return centre, found


def coordinates(inputs: Tensor, dimensions: int, generator: torch.Generator) -> Tensor:
    """Public inputs along their leading directions."""
    centre, directions = principal_directions(inputs, dimensions, generator)
    found: Tensor = (inputs.flatten(1).float() - centre) @ directions
    return found


@dataclass(frozen=True)
class Neighbours:
    """The normalised weights of a graph that joins every input with its nearest ones."""

    weights: Any

    @classmethod
    def of(cls, places: Tensor, count: int) -> Neighbours:
        from scipy import sparse

        size = len(places)
        near, who = _nearest(places, min(count, size - 1))
        reach = near[:, -1].clamp(min=1e-12).sqrt()
        weights = torch.exp(-4 * near / (reach[:, None] * reach[who]))
        rows = np.repeat(np.arange(size), who.shape[1])
        joined = sparse.csr_array((weights.double().numpy().ravel(), (rows, who.numpy().ravel())), shape=(size, size))
        joined = joined.maximum(joined.T)
        scale = sparse.diags_array(1 / np.sqrt(np.maximum(np.asarray(joined.sum(1)).ravel(), 1e-12)))
        return cls(scale @ joined @ scale)

    def spread_out(self, seeds: Tensor) -> Tensor:
        """Scores (inputs, classes) that flow along the graph from those that are known."""
        start = seeds.double().numpy()
        found = np.zeros_like(start)
        for _ in range(STEPS_OF_SPREADING):
            found = STAY * (self.weights @ found) + (1 - STAY) * start
        return torch.from_numpy(found)

    def embedding(self, dimensions: int, seed: int) -> Tensor:
        """Leading eigenvectors, each input's row of length 1 (Ng, Jordan and Weiss, NIPS 2001)."""
        from scipy.sparse.linalg import eigsh

        size = self.weights.shape[0]
        start = np.random.default_rng(seed).uniform(-1, 1, size)
        _, vectors = eigsh(self.weights, k=min(dimensions, size - 2), which="LA", tol=1e-4, v0=start)
        found: Tensor = torch.from_numpy(np.ascontiguousarray(vectors))
        lengths: Tensor = found.norm(dim=1, keepdim=True)
        return found / lengths.clamp(min=1e-12)


def _nearest(places: Tensor, count: int) -> tuple[Tensor, Tensor]:
    squares, near, who = places.square().sum(1), [], []
    for start in range(0, len(places), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        distances = (squares[rows, None] + squares - 2 * places[rows] @ places.T).clamp_(min=0)
        own = torch.arange(start, start + len(distances))
        distances[torch.arange(len(distances)), own] = torch.inf
        values, indices = distances.topk(count, largest=False)
        near.append(values)
        who.append(indices)
    return torch.cat(near), torch.cat(who)


def representatives(places: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """One input near the middle of each of `count` clusters, and every input's cluster."""
    from sklearn.cluster import KMeans

    if count > len(places):
        raise Refusal(f"queries={count}: there are {len(places)} public inputs; ask about fewer, or bring more")
    fitted = KMeans(count, n_init=1, random_state=seed).fit(places.numpy())
    distances = torch.from_numpy(fitted.transform(places.numpy()))
    clusters = torch.from_numpy(fitted.labels_.astype(np.int64))
    outside = clusters[:, None] != torch.arange(count)
    chosen = distances.masked_fill(outside, torch.inf).argmin(0)
    empty = outside.all(0)
    if bool(empty.any()):  # inputs that are the same several times: any that is not chosen yet will do
        free = [row for row in range(len(places)) if row not in set(chosen[~empty].tolist())]
        chosen[empty] = torch.tensor(free[: int(empty.sum())])
    return chosen, clusters
