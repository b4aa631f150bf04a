"""Multi-head attention shown as its linear maps: the three projections at the entrance and the one at the exit."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.errors import Refusal
from confide.mechanism.clipping.rules.explicit import Linear, explicit_forward_for


def _ordinary(layer: nn.MultiheadAttention) -> bool:
    """Learnt extra keys are left to the fallback."""
    return layer.bias_k is None and layer.bias_v is None and not layer.add_zero_attn


@explicit_forward_for(nn.MultiheadAttention, accepts=_ordinary)
def attention(
    linear: Linear,
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The same function of the same arguments as MultiheadAttention, with records on axis 0 inside."""
    if query.dim() != 3:
        raise Refusal(f"query={tuple(query.shape)}: attention needs (records, positions, features)")
    same = query is key, key is value
    if not layer.batch_first:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    heads = layer.num_heads
    queries, keys, values = (
        tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in _project(linear, layer, query, key, value, same)
    )
    mask = _joined_masks(attn_mask, key_padding_mask, queries, heads)
    rate = layer.dropout if layer.training else 0.0
    if need_weights or rate > 0:
        context, weights = _weighted_values(queries, keys, values, mask, rate)
    else:
        context, weights = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask), None
    output = linear(layer, context.transpose(1, 2).flatten(2), "out_proj.weight", _bias(layer, "out_proj.bias"))
    if not layer.batch_first:
        output = output.transpose(0, 1)
    if not need_weights or weights is None:
        return output, None
    return output, weights.mean(1) if average_attn_weights else weights


def _bias(layer: Any, name: str) -> str | None:
    present = layer.out_proj.bias if name == "out_proj.bias" else layer.in_proj_bias
    return None if present is None else name


def _project(
    linear: Linear, layer: Any, query: Tensor, key: Tensor, value: Tensor, same: tuple[bool, bool]
) -> list[Tensor]:
    """Queries, keys and values; in one product where they come from the same tensor."""
    width, bias = layer.embed_dim, _bias(layer, "in_proj_bias")
    if layer.in_proj_weight is None:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        thirds = ((0, width), (width, 2 * width), (2 * width, 3 * width))
        inputs = zip((query, key, value), names, thirds, strict=True)
        return [linear(layer, tensor, name, bias, None, third) for tensor, name, third in inputs]
    if all(same):
        return list(linear(layer, query, "in_proj_weight", bias).chunk(3, -1))
    queries = linear(layer, query, "in_proj_weight", bias, (0, width))
    if same[1]:
        keys, values = linear(layer, key, "in_proj_weight", bias, (width, 3 * width)).chunk(2, -1)
    else:
        keys = linear(layer, key, "in_proj_weight", bias, (width, 2 * width))
        values = linear(layer, value, "in_proj_weight", bias, (2 * width, 3 * width))
    return [queries, keys, values]


def _joined_masks(attn_mask: Tensor | None, padding: Tensor | None, queries: Tensor, heads: int) -> Tensor | None:
    """One additive mask (records or 1, heads or 1, targets, sources); a true entry of a mask means: do not look."""
    joined = None
    if attn_mask is not None:
        joined = _additive(attn_mask, queries)
        joined = joined.unflatten(0, (-1, heads)) if joined.dim() == 3 else joined[None, None]
    if padding is not None:
        hidden = _additive(padding, queries)[:, None, None, :]
        joined = hidden if joined is None else joined + hidden
    return joined


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill(mask, -math.inf)


def _weighted_values(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rate: float
) -> tuple[Tensor, Tensor]:
    scores = torch.matmul(queries / math.sqrt(queries.shape[-1]), keys.transpose(-2, -1))
    weights = torch.softmax(scores if mask is None else scores + mask, -1)
    weights = F.dropout(weights, rate) if rate > 0 else weights
    return torch.matmul(weights, values), weights
