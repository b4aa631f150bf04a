"""Recurrent layers shown as their linear maps: one over all inputs, one over the states of all steps.

Gates and states follow torch.nn.LSTM, GRU and RNN; every step of the state map is a position of one linear layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from confide.errors import Refusal
from confide.mechanism.clipping.rules.explicit import Linear, explicit_forward_for
from confide.mechanism.clipping.rules.recurrence import gru_steps, lstm_steps, states_before

# as they were when confide was imported: they may be given all records at once
_linear, _stack = F.linear, torch.stack
_sigmoid, _tanh, _relu = torch.sigmoid, torch.tanh, torch.relu


def _supported(layer: nn.RNNBase) -> bool:
    return True


def _at_once(layer: Any) -> bool:
    """Records first, and nothing is drawn: then every operation below treats the entries of axis 0 alone."""
    return layer.batch_first and not (layer.dropout and layer.training)


@explicit_forward_for(nn.LSTM, nn.GRU, nn.RNN, accepts=_supported, at_once=_at_once)
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
    ends = tuple(_stack(parts) for parts in zip(*finals, strict=True))
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
    """One direction of one depth.

    What an LSTM or a plain layer makes of its state is added to what it makes of its input, so that both have one
    gradient, and all steps of the state's map are one call. A GRU multiplies a part of it by a gate in between.
    """
    biases = (f"bias_ih{suffix}", f"bias_hh{suffix}") if layer.bias else (None, None)
    whole = linear(layer, sequence, f"weight_ih{suffix}", biases[0])
    if linear.at_once and _by_hand(layer, whole):
        return _all_steps(linear, layer, whole, suffix, biases[1], backwards)
    together = not isinstance(layer, nn.GRU) and whole.requires_grad
    weight, bias = getattr(layer, f"weight_hh{suffix}"), getattr(layer, biases[1]) if biases[1] else None
    outputs, before, pieces = [], [], []
    steps = whole.unbind(1)
    for step in reversed(steps) if backwards else steps:
        if together:
            from_state = _linear(state[0], weight, bias)
            before.append(state[0].detach())
            pieces.append((from_state, state[0]))
        else:
            from_state = linear(layer, state[0], f"weight_hh{suffix}", biases[1])
        state = _next_state(layer, step, from_state, state)
        if layer.proj_size:
            state = (linear(layer, state[0], f"weight_hr{suffix}", None), *state[1:])
        outputs.append(state[0])
    if together:
        states = _stack(before[::-1] if backwards else before, 1)
        linear.added(layer, states, f"weight_hh{suffix}", biases[1], whole, pieces)
    return _stack(outputs[::-1] if backwards else outputs, 1), state


def _by_hand(layer: Any, whole: Tensor) -> bool:
    """Whether the steps begin at zero, in one type, and somebody asks for their gradient."""
    kind = whole.dtype == layer.weight_hh_l0.dtype and not torch.is_autocast_enabled(whole.device.type)
    return isinstance(layer, nn.LSTM | nn.GRU) and not layer.proj_size and whole.requires_grad and kind


def _all_steps(
    linear: Linear, layer: Any, whole: Tensor, suffix: str, named: str | None, backwards: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """All steps of a direction as one node; the gradient at the map of the states is that of the inputs' map for an
    LSTM, and of zeros beside it for a GRU."""
    weight, bias = (None if name is None else getattr(layer, name)[:] for name in (f"weight_hh{suffix}", named))
    if isinstance(layer, nn.LSTM):
        beside = whole
        outputs, *ends = lstm_steps(whole, weight, bias, backwards)
    else:
        beside = whole.new_zeros(()).expand(whole.shape).requires_grad_()
        outputs, *ends = gru_steps(whole, beside, weight, bias, backwards)
    linear.added(
        layer, states_before(outputs.detach(), backwards), f"weight_hh{suffix}", named, beside, [(outputs, whole)]
    )
    return outputs, tuple(ends)


def _next_state(layer: Any, step: Tensor, from_state: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if isinstance(layer, nn.LSTM):
        enter, forget, candidate, leave = (step + from_state).chunk(4, -1)
        cell = _sigmoid(forget) * state[1] + _sigmoid(enter) * _tanh(candidate)
        return _sigmoid(leave) * _tanh(cell), cell
    if isinstance(layer, nn.GRU):
        reset, update, candidate = step.chunk(3, -1)
        reset_state, update_state, candidate_state = from_state.chunk(3, -1)
        gate = _sigmoid(update + update_state)
        proposal = _tanh(candidate + _sigmoid(reset + reset_state) * candidate_state)
        return ((1 - gate) * proposal + gate * state[0],)
    activation = _relu if layer.nonlinearity == "relu" else _tanh
    return (activation(step + from_state),)
