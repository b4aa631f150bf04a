"""One training step of each contender on the same case: clipping at 1, noise multiplier 1, SGD.

Every maker takes a case and returns a function that does one whole step: forward, backward, clipping, noise from the
contender's own generator, update of the parameters. A maker raises where its library is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._models import Case

Step = Callable[[], None]
CLIP = 1.0
NOISE_MULTIPLIER = 1.0
LEARNING_RATE = 0.01


class Criterion:
    """A per-record loss in the shape of `torch.nn` losses, for libraries that set `reduction`."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.loss = loss
        self.reduction = "mean"

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        losses = self.loss(output, y)
        return losses if self.reduction == "none" else losses.mean()


def sgd(module: nn.Module, scale: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE * scale)


def plain(case: Case) -> Step:
    """Ordinary SGD: no clipping, no noise."""
    optimizer = sgd(case.module)

    def step() -> None:
        optimizer.zero_grad()
        case.loss(case.module(case.x), case.y).mean().backward()
        optimizer.step()

    return step


def opacus_hooks(case: Case) -> Step:
    """Opacus as it comes: hooks that store the gradient of every record."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    module = GradSampleModule(case.module)
    optimizer: Any = DPOptimizer(
        sgd(module),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP,
        expected_batch_size=case.batch,
    )
    return _opacus_step(case, module, optimizer, Criterion(case.loss))


def opacus_ghost(case: Case) -> Step:
    """Opacus with ghost clipping: norms without gradients, and a second backward pass."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    module = GradSampleModuleFastGradientClipping(case.module, max_grad_norm=CLIP, use_ghost_clipping=True)
    optimizer: Any = DPOptimizerFastGradientClipping(
        sgd(module),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP,
        expected_batch_size=case.batch,
    )
    criterion = DPLossFastGradientClipping(module, optimizer, Criterion(case.loss))
    return _opacus_step(case, module, optimizer, criterion)


def _opacus_step(case: Case, module: nn.Module, optimizer: Any, criterion: Any) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        criterion(module(case.x), case.y).backward()
        optimizer.step()

    return step


def vmap(case: Case) -> Step:
    """torch.func: the gradient of one record, vectorised over the batch."""
    from torch.func import functional_call, grad
    from torch.func import vmap as vectorise

    parameters = dict(case.module.named_parameters())
    buffers = dict(case.module.named_buffers())

    def record_loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        output = functional_call(case.module, (weights, buffers), (x[None],))
        return case.loss(output, y[None]).squeeze(0)

    gradients_of = vectorise(grad(record_loss), in_dims=(None, 0, 0))

    @torch.no_grad()
    def step() -> None:
        weights = {name: p.detach() for name, p in parameters.items()}
        gradients = gradients_of(weights, case.x, case.y)
        squares = torch.stack([(g.flatten(1) ** 2).sum(1) for g in gradients.values()]).sum(0)
        factors = (CLIP / squares.sqrt()).clamp(max=1.0)
        for name, gradient in gradients.items():
            total = torch.tensordot(factors, gradient, dims=1)
            total += torch.randn_like(total) * (NOISE_MULTIPLIER * CLIP)
            parameters[name].sub_(total, alpha=LEARNING_RATE / case.batch)

    return step


def jax(case: Case) -> Step:
    """JAX: vmap of grad, the whole step compiled."""
    from benchmarks._jax import make_step

    return make_step(case, CLIP, NOISE_MULTIPLIER, LEARNING_RATE)


def confide(case: Case) -> Step:
    """The clipping engine, adding onto a buffer that holds noise; the update as `confide.fit` does it."""
    return confide_step(case.module, case.loss, case.x, case.y)


def confide_step(module: nn.Module, loss: Callable[..., Tensor], x: Tensor, y: Tensor, **options: Any) -> Step:
    """Parameters and gradient are one vector each, so the update is one operation."""
    from confide.mechanism.clipping import clipped_sum
    from confide.mechanism.noise import NoiseStream
    from confide.models.flat import flatten_

    position, noise = flatten_(module), NoiseStream()
    total = torch.empty_like(position)

    def step() -> None:
        noise.normal_(total, NOISE_MULTIPLIER * CLIP)
        clipped_sum(module, loss, x, y, clip=CLIP, out=total, **options)
        position.add_(total, alpha=-LEARNING_RATE / len(x))

    return step


CONTENDERS: dict[str, Callable[[Case], Step]] = {
    "plain": plain,
    "confide": confide,
    "opacus_ghost": opacus_ghost,
    "opacus_hooks": opacus_hooks,
    "vmap": vmap,
    "jax": jax,
}
