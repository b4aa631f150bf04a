"""Layers that cannot be clipped record by record, refused with the way out."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from confide.errors import UnclippableError


def refuse(layer: nn.Module) -> None:
    """Raise for a layer that mixes records or keeps statistics of them; the reason is structural, never a record."""
    reason = reason_to_refuse(layer)
    if reason is not None:
        raise UnclippableError(f"{type(layer).__name__}: {reason}")


def reason_to_refuse(layer: Any) -> str | None:
    if isinstance(layer, _InstanceNorm):
        if layer.track_running_stats and layer.training:
            return "keeps running statistics of private records; use track_running_stats=False"
        return None
    if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
        return (
            "mixes the records of a batch; confide.networks.group_normed(module) puts torch.nn.GroupNorm in its place"
        )
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        if layer.max_norm is not None:
            return "max_norm rescales the rows that private records use; use max_norm=None"
        if layer.scale_grad_by_freq:
            return "scale_grad_by_freq mixes the records of a batch; use scale_grad_by_freq=False"
    if isinstance(layer, nn.RReLU) and layer.training:
        return "draws a number wherever its input is negative, so that a record decides what others get; use nn.PReLU"
    if isinstance(layer, nn.EmbeddingBag) and layer.include_last_offset:
        return "offsets cut records apart by position; give (records, indices) and include_last_offset=False"
    return None
