"""Outputs of one network under many parameter vectors.

A chain of linear layers and elementwise activations runs for a group of draws at once. With the weights of K draws
stacked, the first layer of all of them is one product

    [W_1; ...; W_K] x^T          (K * width, inputs)

and every later layer a batched product of (K, width, width') with (K, width', inputs). Inputs stand in columns, so that
no layer has to be rearranged for the next. Groups of draws and of inputs are chosen so that the activations stay in the
processor's cache. Where the native kernel is built and knows the layers, it does the same without leaving the cache
between them. Any other network runs draw by draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from confide.data.trees import Tree, called, inputs_of, numbers_of, rows_of, size_of
from confide.devices import moved, on_host
from confide.errors import Refusal
from confide.layers.dropout import SharedDropout
from confide.mechanism.clipping.proven import listens
from confide.models.flat import copied, flatten_, is_half, trainable
from confide.models.networks import MLP
from confide.models.tokens import logits_of
from confide.posteriors.prediction import native

INPUTS_AT_ONCE = 1024  # columns of one product: enough to fill it, few enough for the cache
ACTIVATIONS_AT_ONCE = 1 << 21
"""Activations of the widest layer in one block, 8 MB of float32: within the cache, and few calls."""
WEIGHTS_AT_ONCE = 1 << 24
"""Weights of a group of draws, 64 MB of float32."""
ELEMENTS_AT_ONCE = 1 << 24
"""Inputs of a network that runs draw by draw."""
WHOLE = 64
"""Pieces have a multiple of so many inputs, so that none is left over and an input rounds alike wherever it stands."""

Groups = Callable[[int], Iterator[Tensor]]
"""Parameter vectors in groups of at most so many rows: (rows, parameters), in the order of the draws."""

_ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity)
_IN_PLACE: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.ReLU: torch.relu_,
    nn.Tanh: torch.tanh_,
    nn.Sigmoid: torch.sigmoid_,
}
_SILENT_AFTER_TRAINING = (nn.Dropout, SharedDropout)


@dataclass(frozen=True)
class Block:
    """Outputs of draws `first`, ..., first + len(outputs) - 1 at the inputs in `rows`: (draws, inputs, ...).

    The memory may be used again for the next block.
    """

    first: int
    rows: slice
    outputs: Tensor


@dataclass(frozen=True)
class Layer:
    """One layer of a chain: a linear map, given by where its weights stand in the flat vector, or an activation."""

    weight: slice | None = None
    bias: slice | None = None
    shape: tuple[int, int] = (0, 0)
    activation: nn.Module | None = None


def blocks(module: nn.Module, groups: Groups, x: Tree, masked: bool = False) -> Iterator[Block]:
    """The outputs of all draws at all inputs, block by block; made where the module is, given on the host.

    masked: dropout layers are left out, since their masks are part of the draws.
    """
    for block in _blocks(module, groups, x, masked):
        found = on_host(block)
        yield replace(found, outputs=found.outputs.float()) if is_half(found.outputs.dtype) else found


def _blocks(module: nn.Module, groups: Groups, x: Tree, masked: bool) -> Iterator[Block]:
    """Where the module is."""
    chain, inputs = _prepared(module, x, masked)
    if chain is None or not isinstance(inputs, Tensor):
        yield from _one_by_one(module, groups, inputs)
        return
    network = native.network_of(chain, inputs)
    if network is None:
        yield from _stacked(chain, groups, inputs)
    else:
        yield from _natively(network, groups, inputs)


def native_network(module: nn.Module, x: Tree, masked: bool = False) -> tuple[native.Network, Tensor] | None:
    """The network for the native kernel, and the inputs as it takes them; None where torch has to do the work."""
    chain, inputs = _prepared(module, x, masked)
    if chain is None or not isinstance(inputs, Tensor):
        return None
    network = native.network_of(chain, inputs)
    return None if network is None else (network, inputs)


def _prepared(module: nn.Module, x: Tree, masked: bool) -> tuple[tuple[Layer, ...] | None, Tree]:
    """The layers where they can be stacked, and the inputs in the network's number type, flat where they can."""
    dtype, chain = trainable(module)[0].dtype, chain_of(module, masked)
    inputs = moved(inputs_of(x, dtype), trainable(module)[0].device)
    if chain is None or not isinstance(inputs, Tensor) or not (inputs.ndim == 2 or starts_flat(module)):
        return None, inputs
    return chain, inputs.to(dtype).flatten(1)


def outputs_of(module: nn.Module, groups: Groups, x: Tree, count: int) -> Tensor:
    """All outputs of `count` draws together: (draws, inputs, ...)."""
    return collected(blocks(module, groups, x), count, size_of(x))


def in_pieces(network: nn.Module, inputs: Tree) -> Iterator[tuple[slice, Tensor]]:
    """The network's outputs at a bounded number of inputs at a time, with which they are."""
    count, size = size_of(inputs), max(1, ELEMENTS_AT_ONCE // max(1, numbers_of(inputs)))
    size -= size % WHOLE if size > WHOLE else 0
    for start in range(0, count, size):
        rows = slice(start, min(start + size, count))
        yield rows, logits_of(called(network, rows_of(inputs, rows)))


def collected(parts: Iterator[Block], count: int, inputs: int) -> Tensor:
    """The outputs of all blocks: (count, inputs, ...)."""
    whole: Tensor | None = None
    for block in parts:
        if whole is None:
            whole = block.outputs.new_empty((count, inputs, *block.outputs.shape[2:]))
        whole[block.first : block.first + len(block.outputs), block.rows] = block.outputs
    if whole is None:
        raise Refusal("x: must hold at least one input")
    return whole


def starts_flat(module: nn.Module) -> bool:
    """Whether the network flattens each input before its first layer."""
    if type(module) is MLP:
        return True
    first = next(iter(module), None) if type(module) is nn.Sequential else None
    return type(first) is nn.Flatten and (first.start_dim, first.end_dim) == (1, -1)


def chain_of(module: nn.Module, masked: bool = False) -> tuple[Layer, ...] | None:
    """The layers of a network that can be stacked; None for any other, and where somebody has changed how one runs."""
    if any(listens(layer) for layer in module.modules()):
        return None
    slices = _slices(module)
    layers: list[Layer] = []
    for place, layer in enumerate(_leaves(module)):
        kind = type(layer)
        if kind is nn.Linear:
            linear: Any = layer
            bias = linear.bias
            if id(linear.weight) not in slices or (bias is not None and id(bias) not in slices):
                return None  # frozen weights are not part of the draws
            where = None if bias is None else slices[id(bias)]
            layers.append(Layer(slices[id(linear.weight)], where, (linear.out_features, linear.in_features)))
        elif kind in _ELEMENTWISE:
            layers.append(Layer(activation=layer))
        elif not (kind in _SILENT_AFTER_TRAINING and (masked or kind is nn.Dropout)) and not (
            kind is nn.Flatten and place == 0
        ):
            return None
    return tuple(layers) if layers and layers[0].weight is not None else None


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    # Exactly these types: a subclass may do anything in its forward.
    if type(module) in (nn.Sequential, MLP):
        for child in module._modules.values():  # not children(), which lists a layer used twice once
            if child is not None:
                yield from _leaves(child)
    else:
        yield module


def _slices(module: nn.Module) -> dict[int, slice]:
    found, start = {}, 0
    for parameter in trainable(module):
        found[id(parameter)] = slice(start, start + parameter.numel())
        start += parameter.numel()
    return found


def _stacked(chain: tuple[Layer, ...], groups: Groups, x: Tensor) -> Iterator[Block]:
    count, widest = len(x), max(layer.shape[0] for layer in chain)
    weights = sum(layer.shape[0] * (layer.shape[1] + 1) for layer in chain)
    columns = min(INPUTS_AT_ONCE, max(1, count))
    size = max(1, min(ACTIVATIONS_AT_ONCE // (widest * columns), WEIGHTS_AT_ONCE // weights))
    # A row of ones carries the first bias, which saves a pass over the activations.
    ones = x.new_ones(1, count)
    inputs = torch.cat([x.t(), ones])
    # Made once: touching fresh memory costs as much as a small layer.
    buffers = [x.new_empty(size * layer.shape[0] * columns) for layer in chain]
    first = 0
    for draws in groups(size):
        run = _Stack(chain, draws.to(x), buffers)
        for start in range(0, count, columns):
            rows = slice(start, min(start + columns, count))
            yield Block(first, rows, run(inputs[:, rows]).transpose(1, 2))
        first += len(draws)


def _natively(network: native.Network, groups: Groups, x: Tensor) -> Iterator[Block]:
    columns = min(len(x), max(1, ACTIVATIONS_AT_ONCE // network.outputs))
    size = max(1, ACTIVATIONS_AT_ONCE // (network.outputs * columns))
    buffer = x.new_empty(size * columns * network.outputs)
    first = 0
    for draws in groups(min(size, draws_at_once(network))):
        for start in range(0, len(x), columns):
            rows = slice(start, min(start + columns, len(x)))
            shape = (len(draws), rows.stop - rows.start, network.outputs)
            out = buffer[: math.prod(shape)].view(shape)
            network.run(draws, x[rows], native.OUTPUTS, out=out)
            yield Block(first, rows, out)
        first += len(draws)


def draws_at_once(network: native.Network) -> int:
    """So many that their weights take a few megabytes: each group reads the inputs once."""
    return max(1, WEIGHTS_AT_ONCE // 4 // network.parameters)


class _Stack:
    """A chain under a group of draws, with buffers that every call uses again."""

    def __init__(self, chain: tuple[Layer, ...], draws: Tensor, buffers: list[Tensor]) -> None:
        self.chain, self.draws, self.buffers = chain, len(draws), buffers
        self.maps = [self._map(layer, draws, place == 0) for place, layer in enumerate(chain)]

    def _map(self, layer: Layer, draws: Tensor, first: bool) -> tuple[Tensor, Tensor | None] | None:
        if layer.weight is None:
            return None
        weight = draws[:, layer.weight].reshape(len(draws), *layer.shape)
        bias = None if layer.bias is None else draws[:, layer.bias].unsqueeze(2)
        if first:
            column = weight.new_zeros(len(draws), layer.shape[0], 1) if bias is None else bias
            return torch.cat([weight, column], 2).flatten(0, 1), None
        return weight.contiguous(), bias

    def __call__(self, inputs: Tensor) -> Tensor:
        """Outputs of shape (draws, width, inputs) for inputs in columns."""
        values = inputs
        for place, (layer, mapped, buffer) in enumerate(zip(self.chain, self.maps, self.buffers, strict=True)):
            if mapped is None:
                assert layer.activation is not None
                values = _IN_PLACE.get(type(layer.activation), layer.activation)(values)
                continue
            weight, bias = mapped
            width, columns = layer.shape[0], inputs.shape[1]
            out = buffer[: self.draws * width * columns].view(self.draws, width, columns)
            if place == 0:
                torch.mm(weight, values, out=out.view(-1, columns))
            elif bias is None:
                torch.bmm(weight, values, out=out)
            else:
                torch.baddbmm(bias, weight, values, out=out)
            values = out
        return values


def _one_by_one(module: nn.Module, groups: Groups, x: Tree) -> Iterator[Block]:
    network = copied(module).eval()
    position = flatten_(network)
    first = 0
    for draws in groups(max(1, WEIGHTS_AT_ONCE // len(position))):
        for draw in draws:
            position.copy_(draw)
            for rows, outputs in in_pieces(network, x):
                yield Block(first, rows, outputs[None])
            first += 1
