"""Recurrent layers shown as their linear maps: one over all inputs, one over the state at every step.

Gates and states follow torch.nn.LSTM, GRU and RNN; every call of the state map is a position of one linear layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from confide.errors import Refusal
from confide.mechanism.clipping.rules.explicit import Linear, explicit_forward_for


def _supported(layer: nn.RNNBase) -> bool:
    return True


@explicit_forward_for(nn.LSTM, nn.GRU, nn.RNN, accepts=_supported)
def recurrent(linear: Linear, layer: Any, inputs: Any, state: Any = None) -> tuple[Tensor, Any]:
    """The same function of the same arguments as the layer."""
    if isinstance(inputs, PackedSequence) or inputs.dim() != 3:
        raise Refusal(f"{type(layer).__name__}: needs a padded tensor (records, positions, features)")
    sequence = inputs if layer.batch_first else inputs.transpose(0, 1)
    directions = 2 if layer.bidirectional else 1
    initial = _initial_states(layer, sequence, state, directions)
    finals: list[tuple[Tensor, ...]] = []
    for depth in range(layer.num_layers):
        outputs = []
        for direction in range(directions):
            suffix = f"_l{depth}" + ("_reverse" if direction else "")
            start = initial[depth * directions + direction]
            output, final = _run(linear, layer, sequence, start, suffix, bool(direction))
            outputs.append(output)
            finals.append(final)
        sequence = torch.cat(outputs, -1) if directions == 2 else outputs[0]
        if layer.dropout > 0 and layer.training and depth < layer.num_layers - 1:
            sequence = F.dropout(sequence, layer.dropout)
    ends = tuple(torch.stack(parts) for parts in zip(*finals, strict=True))
    result = sequence if layer.batch_first else sequence.transpose(0, 1)
    return result, ends if isinstance(layer, nn.LSTM) else ends[0]


def _initial_states(layer: Any, sequence: Tensor, state: Any, directions: int) -> list[tuple[Tensor, ...]]:
    """(hidden,) or (hidden, cell) for every depth and direction; zeros unless given."""
    count, records = layer.num_layers * directions, sequence.shape[0]
    if state is None:
        hidden = sequence.new_zeros(count, records, layer.proj_size or layer.hidden_size)
        cell = sequence.new_zeros(count, records, layer.hidden_size)
        state = (hidden, cell) if isinstance(layer, nn.LSTM) else hidden
    parts = state if isinstance(state, tuple) else (state,)
    return list(zip(*parts, strict=True))


def _run(
    linear: Linear, layer: Any, sequence: Tensor, state: tuple[Tensor, ...], suffix: str, backwards: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One direction of one depth."""
    biases = (f"bias_ih{suffix}", f"bias_hh{suffix}") if layer.bias else (None, None)
    steps = linear(layer, sequence, f"weight_ih{suffix}", biases[0]).unbind(1)
    outputs = []
    for step in reversed(steps) if backwards else steps:
        from_state = linear(layer, state[0], f"weight_hh{suffix}", biases[1])
        state = _next_state(layer, step, from_state, state)
        if layer.proj_size:
            state = (linear(layer, state[0], f"weight_hr{suffix}", None), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs, 1), state


def _next_state(layer: Any, step: Tensor, from_state: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if isinstance(layer, nn.LSTM):
        enter, forget, candidate, leave = (step + from_state).chunk(4, -1)
        cell = torch.sigmoid(forget) * state[1] + torch.sigmoid(enter) * torch.tanh(candidate)
        return torch.sigmoid(leave) * torch.tanh(cell), cell
    if isinstance(layer, nn.GRU):
        reset, update, candidate = step.chunk(3, -1)
        reset_state, update_state, candidate_state = from_state.chunk(3, -1)
        gate = torch.sigmoid(update + update_state)
        proposal = torch.tanh(candidate + torch.sigmoid(reset + reset_state) * candidate_state)
        return ((1 - gate) * proposal + gate * state[0],)
    activation = torch.relu if layer.nonlinearity == "relu" else torch.tanh
    return (activation(step + from_state),)
