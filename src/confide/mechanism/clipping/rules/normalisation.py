"""Normalising layers: output = weight * xhat + bias with xhat made of one record alone.

    dweight = sum over positions of  g * xhat,     dbias = sum over positions of  g

Their parameters are small beside the activations, so the gradients are simply formed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from confide.mechanism.clipping.rules.registry import Call, rule_for

AFFINE = ("weight", "bias")
# as they were when confide was imported: what somebody put in their place would see several records
_layer_norm, _rms_norm, _group_norm = torch.layer_norm, torch.rms_norm, torch.group_norm
_instance_norm, _batch_norm = torch.instance_norm, torch.batch_norm


def affine_gradients(call: Call, normalised: Tensor, channel_axis: int | None) -> dict[str, Tensor]:
    """Sum over all axes that the parameters do not have: the trailing axes, or the channel axis, are theirs."""
    parameter = next(value for name in AFFINE if (value := getattr(call.layer, name, None)) is not None)
    products = {"weight": call.gradient * normalised, "bias": call.gradient}
    result = {}
    for name in call.trainable:
        values = products[name]
        if channel_axis is None:
            kept = values.reshape(values.shape[0], -1, parameter.numel()).sum(1)
        else:
            kept = values.flatten(2).sum(2) if values.dim() > 2 else values  # features without positions
        result[name] = kept.view(values.shape[0], *parameter.shape)
    return result


@rule_for(nn.LayerNorm, parameters=AFFINE, positions=True)
def layer_norm(call: Call) -> dict[str, Tensor]:
    layer: Any = call.layer
    return affine_gradients(call, _layer_norm(call.input, layer.normalized_shape, None, None, layer.eps), None)


@rule_for(nn.RMSNorm, parameters=AFFINE, positions=True)
def root_mean_square_norm(call: Call) -> dict[str, Tensor]:
    layer: Any = call.layer
    return affine_gradients(call, _rms_norm(call.input, list(layer.normalized_shape), None, layer.eps), None)


@rule_for(nn.GroupNorm, parameters=AFFINE)
def group_norm(call: Call) -> dict[str, Tensor]:
    layer: Any = call.layer
    return affine_gradients(call, _group_norm(call.input, layer.num_groups, None, None, layer.eps), 1)


def _fixed_statistics(layer: _BatchNorm | _InstanceNorm) -> bool:
    return not layer.training and layer.running_mean is not None


@rule_for(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, parameters=AFFINE)
def instance_norm(call: Call) -> dict[str, Tensor]:
    layer: Any = call.layer
    if _fixed_statistics(layer):
        return fixed_norm(call)
    return affine_gradients(call, _instance_norm(call.input, None, None, None, None, True, 0.0, layer.eps, False), 1)


@rule_for(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, parameters=AFFINE, accepts=_fixed_statistics)
def fixed_norm(call: Call) -> dict[str, Tensor]:
    """With running statistics held fixed (evaluation mode) batch normalisation does not mix records."""
    layer: Any = call.layer
    values = _batch_norm(call.input, None, None, layer.running_mean, layer.running_var, False, 0.0, layer.eps, False)
    return affine_gradients(call, values, 1)
