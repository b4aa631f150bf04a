"""All steps of an LSTM or a GRU in one node of the autograd graph, forwards and backwards by hand.

Step by step, autograd would keep a dozen nodes for each. What is given is a map of the inputs, made before, of every
step; what the backward pass gives is the gradient at that map and, where a gate stands between, at the map of the
states. Everything treats the entries of axis 0 alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from confide._native.recurrence import lstm, lstm_back, lstm_fits

_sigmoid_back = torch.ops.aten.sigmoid_backward.grad_input
_tanh_back = torch.ops.aten.tanh_backward.grad_input
_mm, _addmm, _lerp, _addcmul = torch.mm, torch.addmm, torch.lerp, torch.addcmul
_sigmoid, _tanh, _mul = torch.sigmoid, torch.tanh, torch.mul
_is_asked: Callable[[Any], bool] = torch._C._will_engine_execute_node


def _order(steps: int, backwards: bool) -> list[int]:
    return list(range(steps))[::-1] if backwards else list(range(steps))


def states_before(outputs: Tensor, backwards: bool) -> Tensor:
    """What each step started from: (records, steps, features), zero for the first."""
    found = torch.zeros_like(outputs)
    if backwards:
        found[:, :-1] = outputs[:, 1:]
    else:
        found[:, 1:] = outputs[:, :-1]
    return found


def _incoming(onto: Tensor, gradient: Tensor | None, step: int) -> Tensor:
    return onto if gradient is None else onto.add_(gradient[:, step])


def _of_weights(
    nodes: tuple[tuple[Any, int], ...], found: Tensor, outputs: Tensor, backwards: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the weight and the bias over the states, where a whole pass is looked at and not its records.

    They are asked for through views, for of those autograd says whether it will go there; a missing bias has no node.
    """
    of_weight, of_bias, *_ = *(node is not None and _is_asked(node) for node, _ in nodes), False
    weight = found.flatten(0, 1).t() @ states_before(outputs, backwards).flatten(0, 1) if of_weight else None
    return weight, found.sum((0, 1)) if of_bias else None


class _Lstm(torch.autograd.Function):
    """(map of the inputs, weight, bias, backwards) -> outputs, last hidden state, last cell state.

    The map is overwritten where a native kernel does the work: nobody else reads it.
    """

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, backwards: bool) -> Any:
        if lstm_fits(given, weight, bias):
            gates = given.contiguous()
            outputs, cells, bent = lstm(gates, weight, bias, backwards)
        else:
            gates, outputs, cells, bent = _lstm_by_torch(given, weight, bias, backwards)
        last = 0 if backwards else -1
        ctx.set_materialize_grads(False)
        ctx.kept, ctx.backwards = (gates, cells, bent, outputs.detach(), weight.detach()), backwards
        return outputs, outputs[:, last].clone(), cells[:, last].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        *kept, outputs, weight = ctx.kept
        of_outputs, *of_ends = gradients
        nothing = outputs[:, 0]
        state, cell = (torch.zeros_like(nothing) if one is None else one.clone() for one in of_ends)
        state, cell = state.contiguous(), cell.contiguous()
        work = lstm_back if lstm_fits(*kept, weight, of_outputs, state, cell) else _lstm_back_by_torch
        found = work(tuple(kept), weight, ctx.backwards, of_outputs, state, cell)
        return found, *_of_weights(ctx.next_functions[1:], found, outputs, ctx.backwards), None


def _lstm_by_torch(given: Tensor, weight: Tensor, bias: Tensor | None, backwards: bool) -> tuple[Tensor, ...]:
    """Gates, outputs, cells and their tanh, the records first."""
    records, steps, width = given.shape
    size = width // 4
    gates = given.new_empty(steps, records, width)
    gates.copy_(given.transpose(0, 1)) if bias is None else torch.add(given.transpose(0, 1), bias, out=gates)
    outputs = given.new_empty(records, steps, size)
    cells, bent = given.new_empty(steps, records, size), given.new_empty(steps, records, size)
    turned, state, cell = weight.t(), None, None
    for step in _order(steps, backwards):
        here = gates[step] if state is None else gates[step].addmm_(state, turned)
        enter, forget, candidate, leave = here.split(size, 1)
        _sigmoid(here[:, : 2 * size], out=here[:, : 2 * size])
        _tanh(candidate, out=candidate)
        _sigmoid(leave, out=leave)
        _mul(enter, candidate, out=cells[step])
        if cell is not None:
            cells[step].addcmul_(forget, cell)
        cell = cells[step]
        state = _mul(leave, _tanh(cell, out=bent[step]), out=outputs[:, step])
    return gates.transpose(0, 1), outputs, cells.transpose(0, 1), bent.transpose(0, 1)


def _lstm_back_by_torch(
    kept: tuple[Tensor, ...],
    weight: Tensor,
    backwards: bool,
    of_outputs: Tensor | None,
    state: Tensor,
    cell: Tensor,
) -> Tensor:
    """The gradient at the map of the inputs; those at the last states are overwritten."""
    gates, cells, bent = (one.transpose(0, 1) for one in kept)
    steps, records, width = gates.shape
    order, size = _order(steps, backwards), width // 4
    found, room = gates.new_empty(records, steps, width), torch.empty_like(state)
    for place in range(steps - 1, -1, -1):
        step = order[place]
        enter, forget, candidate, leave = gates[step].split(size, 1)
        at_enter, at_forget, at_candidate, at_leave = found[:, step].split(size, 1)
        _incoming(state, of_outputs, step)
        _sigmoid_back(_mul(state, bent[step], out=room), leave, grad_input=at_leave)
        cell.add_(_tanh_back(_mul(state, leave, out=room), bent[step], grad_input=room))
        _sigmoid_back(_mul(cell, candidate, out=room), enter, grad_input=at_enter)
        _tanh_back(_mul(cell, enter, out=room), candidate, grad_input=at_candidate)
        if place == 0:
            at_forget.zero_()  # there was nothing to forget
        else:
            _sigmoid_back(_mul(cell, cells[order[place - 1]], out=room), forget, grad_input=at_forget)
            cell.mul_(forget)
            _mm(found[:, step], weight, out=state)
    return found


class _Gru(torch.autograd.Function):
    """(map of the inputs, zeros beside the map of the states, weight, bias, backwards) -> outputs, last state.

    The zeros are there for their gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, beside: Tensor, weight: Tensor, bias: Tensor | None, backwards: bool
    ) -> tuple[Tensor, Tensor]:
        records, steps, width = given.shape
        size = width // 3
        outputs = given.new_empty(records, steps, size)
        maps, kept = given.new_empty(steps, records, width), given.new_empty(steps, records, width)
        turned, state = weight.t(), given.new_zeros(records, size)
        for step in _order(steps, backwards):
            of_state, here = maps[step], kept[step]
            _mm(state, turned, out=of_state) if bias is None else _addmm(bias, state, turned, out=of_state)
            both = here[:, : 2 * size]
            _sigmoid(torch.add(given[:, step, : 2 * size], of_state[:, : 2 * size], out=both), out=both)
            reset, update, proposal = here.split(size, 1)
            _addcmul(given[:, step, 2 * size :], reset, of_state[:, 2 * size :], out=proposal)
            state = _lerp(_tanh(proposal, out=proposal), state, update, out=outputs[:, step])
        ctx.set_materialize_grads(False)
        ctx.kept, ctx.backwards = (maps, kept, outputs.detach(), weight.detach()), backwards
        return outputs, state.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        (maps, kept, outputs, weight), order = ctx.kept, _order(len(ctx.kept[0]), ctx.backwards)
        steps, records, width = kept.shape
        size = width // 3
        of_outputs, of_state = gradients
        found, beside = kept.new_empty(records, steps, width), kept.new_empty(records, steps, width)
        state = kept.new_zeros(records, size) if of_state is None else of_state.clone()
        before_all = torch.zeros_like(state)
        for place in range(steps - 1, -1, -1):
            step = order[place]
            reset, update, proposal = kept[step].split(size, 1)
            before = outputs[:, order[place - 1]] if place else before_all
            here, there = found[:, step], beside[:, step]
            _incoming(state, of_outputs, step)
            at_proposal = here[:, 2 * size :]
            _tanh_back(torch.addcmul(state, state, update, value=-1), proposal, grad_input=at_proposal)
            _mul(at_proposal, reset, out=there[:, 2 * size :])
            _mul(at_proposal, maps[step][:, 2 * size :], out=here[:, :size])
            _mul(state, before - proposal, out=here[:, size : 2 * size])
            _sigmoid_back(here[:, : 2 * size], kept[step][:, : 2 * size], grad_input=there[:, : 2 * size])
            here[:, : 2 * size] = there[:, : 2 * size]
            state = state.mul_(update).addmm_(there, weight)
        return found, beside, *_of_weights(ctx.next_functions[2:], beside, outputs, ctx.backwards), None


# the functions as they were when confide was imported: they are given all records at once
lstm_steps: Callable[..., Any] = _Lstm.apply
gru_steps: Callable[..., Any] = _Gru.apply
