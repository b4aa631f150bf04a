"""The slow and plain way: every record's gradient by ordinary autograd. What the engine is measured against."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from confide.mechanism.clipping.anatomy import anatomy_of
from confide.mechanism.clipping.factors import GAMMA, Style
from confide.mechanism.clipping.running import Inputs, Loss, per_record_losses
from confide.mechanism.clipping.tape import Tape


def per_record_gradients(module: nn.Module, loss: Loss, x: Inputs, y: Any, same_masks: bool = False) -> Tensor:
    """(records, trainable parameters): one backward pass per record through the graph of the whole batch.

    One forward pass serves all records, so dropout masks and weight draws are those of the batch. The engine runs
    attention and recurrent layers by equivalent forwards that draw masks in another order; with `same_masks` this
    does too.
    """
    anatomy = anatomy_of(module)
    rows = []
    with Tape(anatomy, 0).explicit_forwards() if same_masks else nullcontext(), torch.enable_grad():
        losses = per_record_losses(module, loss, x, y, anatomy.draws)
        for value in losses:
            found = torch.autograd.grad(value, anatomy.parameters, retain_graph=True, allow_unused=True)
            rows.append(
                torch.cat(
                    [
                        torch.zeros_like(parameter).flatten() if gradient is None else gradient.flatten()
                        for parameter, gradient in zip(anatomy.parameters, found, strict=True)
                    ]
                )
            )
    return torch.stack(rows) if rows else torch.zeros(0, sum(anatomy.sizes))


def reference_clipped_sum(
    module: nn.Module,
    loss: Loss,
    x: Inputs,
    y: Any,
    *,
    clip: float,
    out: Tensor,
    style: Style = "flat",
    same_masks: bool = False,
) -> Tensor:
    """The same as `clipped_sum`, record by record."""
    gradients = per_record_gradients(module, loss, x, y, same_masks)
    norms: Tensor = torch.linalg.vector_norm(gradients, dim=1)
    if style == "automatic":
        factors = (clip / (norms + GAMMA)).unsqueeze(1)
    elif style == "flat":
        factors = (clip / norms).clamp(max=1).unsqueeze(1)
    else:
        factors = _per_layer_factors(module, gradients, clip)
    out.add_((gradients * factors).sum(0))
    return norms


def _per_layer_factors(module: nn.Module, gradients: Tensor, clip: float) -> Tensor:
    """One factor per record and parameter, equal within a layer."""
    anatomy = anatomy_of(module)
    group_of = {index: slot.group for slot in anatomy.slots for index in slot.parameters}
    columns = torch.cat([torch.full((size,), group_of[index]) for index, size in enumerate(anatomy.sizes)])
    share = clip / math.sqrt(anatomy.groups)
    factors = torch.ones_like(gradients)
    for group in range(anatomy.groups):
        mine = columns == group
        norms = gradients[:, mine].norm(dim=1, keepdim=True)
        factors[:, mine] = (share / norms).clamp(max=1)
    return factors
