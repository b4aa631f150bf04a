"""A student that is not linear in its inputs: kernel ridge regression on class indicators, in closed form.

Its squared error averages over wrong labels, where a softmax layer goes out of its way to fit each of them. The kernel
follows from public inputs and the labels from what was released.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from confide.models.kernels import GaussianKernel, KernelNetwork
from confide.models.likelihoods import Categorical
from confide.pate.graphs import principal_directions
from confide.posteriors.draws import Draws

RIDGE = 0.3
"""Added to the kernel of an input with itself, which is 1 (docs/protocols.md)."""
COMPARED = 1500
"""Public inputs whose median distance is the unit of the kernel's width: a median of a million distances."""
SHARPNESS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""What scores may be multiplied by to be logits; the held-out tenth chooses."""
HELD_OUT = 10
"""One input in so many."""
MOST_LANDMARKS = 10_000
"""Inputs that are learnt from, by lot where there are more: the kernel of all pairs takes four bytes for each."""


def kernel_ridge(
    inputs: Tensor, x: Tensor, y: Tensor, classes: int, *, dimensions: int, width: float, seed: int
) -> Draws:
    """Learns y at x, some of the public `inputs`; `width` is that of the kernel in median distances of the inputs."""
    generator = torch.Generator().manual_seed(seed)
    if len(y) > MOST_LANDMARKS:
        lot = torch.randperm(len(y), generator=generator)[:MOST_LANDMARKS]
        x, y = x[lot], y[lot]
    centre, turned = principal_directions(inputs, dimensions, generator)
    some = torch.randperm(len(inputs), generator=generator)[:COMPARED]
    apart = torch.pdist((inputs[some].flatten(1).float() - centre) @ turned)
    unit = apart.median() if len(apart) else torch.tensor(1.0)  # a single input is at no distance
    places = (x.flatten(1).float() - centre) @ turned
    kernel = GaussianKernel(centre, turned, places, width * unit.clamp(min=1e-12))
    products, wanted = kernel(x), F.one_hot(y.long(), classes).float()
    bias = wanted.mean(0)
    sharpness = _sharpness(products, wanted, y, torch.randperm(len(y), generator=generator))
    module = KernelNetwork(kernel, classes)
    weights = sharpness * _solved(products, wanted - bias)
    flat = torch.cat([weights.T.reshape(-1), sharpness * bias])[None]
    return Draws(module, Categorical(classes), flat, torch.ones(1), {"method": "kernel ridge regression"})


def _solved(products: Tensor, wanted: Tensor) -> Tensor:
    root = torch.linalg.cholesky(products + RIDGE * torch.eye(len(products)))
    return torch.cholesky_solve(wanted, root)


def _sharpness(products: Tensor, wanted: Tensor, y: Tensor, order: Tensor) -> float:
    """The one with the least log loss on a tenth of the labels when the others are learnt from; 1 for too few."""
    held, rest = order[: len(order) // HELD_OUT], order[len(order) // HELD_OUT :]
    if not len(held):
        return SHARPNESS[0]
    bias = wanted[rest].mean(0)
    scores = products[held][:, rest] @ _solved(products[rest][:, rest], wanted[rest] - bias) + bias
    losses = [float(F.cross_entropy(value * scores, y[held].long())) for value in SHARPNESS]
    return SHARPNESS[losses.index(min(losses))]
