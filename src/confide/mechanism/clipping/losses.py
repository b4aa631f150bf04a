"""Output gradients of the losses that confide knows, in closed form; any other loss goes through autograd.

categorical   softmax(output) - onehot(y)
Bernoulli     sigmoid(output) - y
Gaussian      (output - y) / noise_scale^2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.mechanism.clipping.proven import is_proven_loss
from confide.models.likelihoods import Bernoulli, Categorical, Gaussian

_ATEN = torch.ops.aten
_NO_REDUCTION, _IGNORED = 0, -100  # As torch numbers them.


def _categorical(likelihood: Categorical, output: Tensor, y: Tensor) -> Tensor:
    """The two steps that autograd takes backwards through a cross entropy, labels to be ignored included."""
    _check_labels(y, output.shape[1])
    logs = torch.log_softmax(output, 1)
    each, weight = output.new_ones(output.shape[0]), output.new_zeros(())
    slopes = _ATEN.nll_loss_backward(each, logs, y, None, _NO_REDUCTION, _IGNORED, weight)
    found: Tensor = _ATEN._log_softmax_backward_data(slopes, logs, 1, output.dtype)
    return found


def _check_labels(y: Tensor, outputs: int) -> None:
    """The kernel does not look at labels, and one outside the outputs would write into memory that is not its own."""
    if not y.numel():
        return
    lowest, highest = (int(end) for end in torch.aminmax(y))
    if highest >= outputs or (lowest < 0 and bool(((y < 0) & (y != _IGNORED)).any())):
        raise Refusal(f"outputs={outputs}: the network has too few for the labels; give it one for each class")


def _bernoulli(likelihood: Bernoulli, output: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(output).sub_(y.reshape(-1, 1))


def _gaussian(likelihood: Gaussian, output: Tensor, y: Tensor) -> Tensor:
    return (output - y.reshape(output.shape)).mul_(1 / likelihood.noise_scale**2)


CLOSED_FORMS: dict[Callable[..., Tensor], Callable[[Any, Tensor, Tensor], Tensor]] = {
    Categorical.loss: _categorical,
    Bernoulli.loss: _bernoulli,
    Gaussian.loss: _gaussian,
}


def output_gradient(loss: Any, output: Tensor, y: Any) -> Tensor | None:
    """The gradient of the summed losses at the output (records, outputs), or None without a closed form."""
    closed = CLOSED_FORMS.get(getattr(loss, "__func__", None))  # type: ignore[arg-type]
    return closed(loss.__self__, output, y) if closed is not None and is_proven_loss(loss, y) else None


def check_losses(losses: Any, rows: int) -> None:
    """One loss per record."""
    if not isinstance(losses, Tensor) or losses.shape != (rows,):
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise Refusal(f"loss: returned {got} for {rows} records; one value per record is needed (reduction='none')")
