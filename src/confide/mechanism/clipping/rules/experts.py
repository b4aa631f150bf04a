"""Experts that keep their weights in two stacks, as models of the transformers library do: shown as linear maps.

A token goes to a few experts, chosen by its router. Shown are two linear maps for every expert, over all tokens, of
which those that did not go there count with weight zero: their gradients are zero, so norms and sums are the same. This
takes more products than picking weights token by token, but no copy of all experts for every record.

    gate, up = W_e x,     f_e(x) = V_e (act(gate) * up),     output = sum over chosen e of  r_e f_e(x)
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from confide.layers.drawn import DrawnParameters
from confide.mechanism.clipping.rules.explicit import Linear, explicit_forward_where

_STACKS = {"gate_up_proj", "down_proj"}
_PLAIN = {"has_gate": True, "has_bias": False, "has_post_expert_norm": False, "is_transposed": False,
          "is_concatenated": True, "_is_expert_parallel": False}  # fmt: skip
"""What such a layer says about itself where it is made as above."""


def _are_stacked(layer: Any) -> bool:
    """A layer of the library itself, with nothing of its own about the gate."""
    kind, home = type(layer), sys.modules.get("transformers.integrations.moe")
    if home is None or not kind.__module__.startswith("transformers.models."):
        return False
    told = {name: getattr(layer, name, None) for name in _PLAIN}
    gate = getattr(kind, "_apply_gate", None)
    return told == _PLAIN and _names(layer) == _STACKS and gate is vars(home).get("_default_apply_gate")


def _names(layer: Any) -> set[str]:
    return set(layer.drawn_order if isinstance(layer, DrawnParameters) else layer._parameters)


@explicit_forward_where(_are_stacked)
def experts(linear: Linear, layer: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The same function of the same arguments as the layer."""
    places = torch.arange(layer.num_experts, device=top_k_index.device)
    routed = (top_k_weights.unsqueeze(-1) * (top_k_index.unsqueeze(-1) == places)).sum(-2)  # (tokens, experts)
    found = torch.zeros_like(hidden_states)
    for place in range(layer.num_experts):
        part = (place, place + 1)
        gate, up = linear(layer, hidden_states, "gate_up_proj", None, part).chunk(2, -1)
        done = linear(layer, layer.act_fn(gate) * up, "down_proj", None, part)
        found = found + done * routed[..., place : place + 1]
    return found.to(hidden_states.dtype)
