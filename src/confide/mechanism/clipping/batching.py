"""What runs inside a region in the place of functions of torch that its vmap would do badly: the same functions.

Two kinds. Functions that have no batching rule, written with operations that have one (losses, a recurrent cell,
columns side by side, memory formats, which change no number). And the functions in which networks spend their time,
which vmap takes apart (a product and an addition for a linear map) or loops over (attention): those
treat every entry of their first axis alone, so that all records go through one call with the records on that axis.

    linear, addmm      rows of features, each alone             attention      over positions, batch by batch
    cross_entropy      rows of scores, each alone
    layer_norm         over the last axes                        group_norm     over the channels of one entry

Such a call sees what lies underneath the stacks of a region. It is made only where axes and types are as stated here
and weights are the same for all records; everything else is left to vmap. Kernels are taken as they were when confide
was imported, so that a function somebody put in their place never sees several records.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch.nn.attention import SDPBackend, sdpa_kernel

# losses without a batching rule ---------------------------------------------------------------------------------


# as torch hands on F.cross_entropy(input, target, reduction="none")
_OF_EVERY_ROW = {"weight": None, "size_average": None, "ignore_index": -100, "reduce": None} | {
    "reduction": "none",
    "label_smoothing": 0.0,
}


def _cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
    """The same as torch's; vmap would loop over the records there."""
    if len(args) == 2 and kwargs == _OF_EVERY_ROW:
        rows = _entropy_of_rows(*args)
        if rows is not None:
            return rows
    given = _given(F.cross_entropy, args, kwargs)
    input, target = given["input"], given["target"]
    if _is_deprecated(given) or given["label_smoothing"] or target.is_floating_point():
        return F.cross_entropy(**given)
    del given["label_smoothing"]
    return _nll_loss(**{**given, "input": F.log_softmax(input, 1 if input.dim() > 1 else 0)})


def _nll_loss(*args: Any, **kwargs: Any) -> Tensor:
    given = _given(F.nll_loss, args, kwargs)
    input, target, weight, reduction = (given[name] for name in ("input", "target", "weight", "reduction"))
    axis = 1 if input.dim() > 1 else 0
    if _is_deprecated(given) or target.shape != input.shape[:axis] + input.shape[axis + 1 :]:
        return F.nll_loss(**given)
    counted = target != given["ignore_index"]
    known = torch.where(counted, target, 0)
    picked: Tensor = -input.gather(axis, known.unsqueeze(axis)).squeeze(axis)
    weights = counted.to(input.dtype) if weight is None else torch.where(counted, weight[known], 0.0)
    losses = torch.where(counted, picked if weight is None else picked * weights, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / weights.sum()


def _gaussian_nll_loss(*args: Any, **kwargs: Any) -> Tensor:
    """torch looks whether any variance is negative, and raises; here its record counts as zero, as it would alone."""
    given = _given(F.gaussian_nll_loss, args, kwargs)
    input, target, var, reduction = (given[name] for name in ("input", "target", "var", "reduction"))
    if not isinstance(var, Tensor) or var.shape != input.shape or reduction not in ("none", "mean", "sum"):
        return F.gaussian_nll_loss(**given)
    var = torch.where(var < 0, torch.nan, var)
    var = var + (var.clamp(min=given["eps"]) - var).detach()
    loss: Tensor = 0.5 * (var.log() + (input - target).square() / var)
    if given["full"]:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


# other functions without one -------------------------------------------------------------------------------------


def _lstm_cell(
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    hidden, cell = hx
    enter, forget, new, show = (_linear(input, w_ih, b_ih) + _linear(hidden, w_hh, b_hh)).chunk(4, -1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(show) * torch.tanh(cell), cell


def _column_stack(tensors: tuple[Tensor, ...] | list[Tensor], **more: Any) -> Tensor:
    if more:
        return torch.column_stack(tensors, **more)
    return torch.cat([one.reshape(-1, 1) if one.dim() < 2 else one for one in tensors], 1)


def _as_it_lies(function: Any) -> Callable[..., Any]:
    """Memory formats say how a tensor lies, which vmap cannot do with the records' axis; numbers are the same."""

    def called(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("memory_format"), torch.memory_format):
            del kwargs["memory_format"]
        return function(*(one for one in args if not isinstance(one, torch.memory_format)), **kwargs)

    return called


_signature = cache(inspect.signature)


def _given(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, those left out at torch's own values."""
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _is_deprecated(given: dict[str, Any]) -> bool:
    return given["size_average"] is not None or given["reduce"] is not None


# functions that treat every record alone -------------------------------------------------------------------------

_linear_kernel: Any = torch._C._nn.linear
_attention_kernel: Any = torch._C._nn.scaled_dot_product_attention
_cross_entropy_kernel: Any = torch._C._nn.cross_entropy_loss
_addmm_kernel, _layer_norm_kernel, _group_norm_kernel = torch.addmm, torch.layer_norm, torch.group_norm
_PLAIN = (Tensor, nn.Parameter)


def _stack(values: Any) -> Tensor | None:
    """What lies underneath, the records first; None for anything but a stack of this region."""
    if type(values) is not Tensor or not functorch.is_batchedtensor(values):
        return None
    below: Tensor = functorch.get_unwrapped(values)
    inner = functorch.maybe_get_level(values) != functorch.maybe_current_level()
    if inner or functorch.is_functorch_wrapped_tensor(below) or type(below) not in _PLAIN:
        return None
    axis = functorch.maybe_get_bdim(values)
    return below.movedim(axis, 0) if axis else below


def _wrapped(values: Tensor) -> Tensor:
    level = functorch.maybe_current_level()
    assert level is not None, "only a region calls this"
    wrapped: Tensor = functorch._add_batch_dim(values, 0, level)
    return wrapped


def _same_for_all(*weights: Any) -> bool:
    """Whether these are plain tensors, or absent, and depend on no record."""
    return all(
        weight is None or (type(weight) in _PLAIN and not functorch.is_functorch_wrapped_tensor(weight))
        for weight in weights
    )


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    stack = _stack(input)
    if stack is None or stack.dim() < 2 or not _same_for_all(weight, bias) or weight.dim() != 2:
        return F.linear(input, weight, bias)
    if bias is not None and bias.dim() != 1:
        return F.linear(input, weight, bias)
    found: Tensor = _linear_kernel(stack.reshape(-1, stack.shape[-1]), weight, bias)
    return _wrapped(found.view(*stack.shape[:-1], found.shape[-1]))


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **more: Any) -> Tensor:
    stack = _stack(mat1)
    if more or stack is None or stack.dim() != 3 or not _same_for_all(input, mat2) or input.dim() != 1:
        return torch.addmm(input, mat1, mat2, **more)
    found = _addmm_kernel(input, stack.flatten(0, 1), mat2)
    return _wrapped(found.view(*stack.shape[:2], found.shape[-1]))


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    stack, last = _stack(input), tuple(normalized_shape)
    fits = stack is not None and len(last) < stack.dim() and tuple(stack.shape[-len(last) :]) == last
    if stack is None or not fits or not _same_for_all(weight, bias):
        return F.layer_norm(input, list(normalized_shape), weight, bias, eps)
    return _wrapped(_layer_norm_kernel(stack, last, weight, bias, eps))


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    stack = _stack(input)
    if stack is None or stack.dim() < 3 or not _same_for_all(weight, bias):
        # made contiguous: torch asks a transposed input for a layout that vmap cannot tell
        return F.group_norm(input.contiguous(), num_groups, weight, bias, eps)
    found = _group_norm_kernel(stack.flatten(0, 1), num_groups, weight, bias, eps)
    return _wrapped(found.view(stack.shape))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor:
    stacks = [stack for stack in map(_stack, (query, key, value)) if stack is not None and stack.dim() == 5]
    learnt = attn_mask is not None and _below(attn_mask).requires_grad
    mask = None if learnt or len(stacks) < 3 else _mask(attn_mask, stacks[0].shape[:2])
    if len(stacks) < 3 or learnt or dropout_p or (mask is None and attn_mask is not None):
        # a mask that is learnt (relative positions) has a gradient in the plain formula only
        with sdpa_kernel(SDPBackend.MATH) if learnt else nullcontext():
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **more)
    folded = [stack.flatten(0, 1) for stack in stacks]
    found: Tensor = _attention_kernel(*folded, mask, 0.0, is_causal, **more)
    return _wrapped(found.view(*stacks[0].shape[:2], *found.shape[1:]))


def _below(values: Tensor) -> Tensor:
    return functorch.get_unwrapped(values) if functorch.is_batchedtensor(values) else values


def _mask(mask: Tensor | None, rows: Sequence[int]) -> Tensor | None:
    """The mask of every record, rows of a record behind each other; None for a form that is not known here."""
    if mask is None or (_same_for_all(mask) and 2 <= mask.dim() <= 4 and math.prod(mask.shape[:-3]) == 1):
        return mask
    stack = _stack(mask)
    if stack is None or not 3 <= stack.dim() <= 5:
        return None
    while stack.dim() < 5:
        stack = stack.unsqueeze(1)
    return stack.expand(*rows, *stack.shape[2:]).flatten(0, 1)


def _entropy_of_rows(input: Tensor, target: Tensor) -> Tensor | None:
    """One loss for every row of scores and its label; None for another form."""
    scores, labels = _stack(input), _stack(target)
    if scores is None or labels is None or scores.dim() != 3 or labels.dtype != torch.int64:
        return None
    if labels.shape != scores.shape[:2]:
        return None
    return _wrapped(_cross_entropy_kernel(scores.flatten(0, 1), labels.flatten(), None, 0).view(labels.shape))


def _requires_grad_(self: Tensor, requires_grad: bool = True) -> Tensor:
    """Libraries ask it of the first layer's output, for adapters behind frozen layers: no number depends on it.

    What would, a gradient that is taken inside of the forward, is not to be had in a region, and runs one by one.
    """
    return self if requires_grad and functorch.is_batchedtensor(self) else self.requires_grad_(requires_grad)


INSTEAD: dict[Any, Callable[..., Any]] = {
    Tensor.requires_grad_: _requires_grad_,
    F.linear: _linear,
    torch.addmm: _addmm,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    torch.lstm_cell: _lstm_cell,
    torch.column_stack: _column_stack,
    **{kind: _as_it_lies(kind) for kind in (Tensor.contiguous, Tensor.to, Tensor.clone, torch.clone)},
    F.scaled_dot_product_attention: _attention,
}
