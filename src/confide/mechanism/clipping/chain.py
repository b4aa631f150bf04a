"""Fully connected networks without autograd: a chain of linear layers with activations between them.

Regressions and small networks spend most of a step on bookkeeping, not on arithmetic. A chain

    a_1 = x,    z_k = a_k W_k^T + b_k,    a_{k+1} = f_k(z_k),    loss(z_K, y)

needs none of it: only the loss goes through autograd, from its output gradient g_K the others follow by

    g_k = (g_{k+1} W_{k+1}) * f_k'(z_k),

and (a_k, g_k) go to the same rules as everywhere. A chain is used where a module is one and where it gives the
ordinary gradients on made-up records; any hook, any other layer, and the engine takes the general way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from confide._native.arithmetic import ClipLayer, clip_kernel
from confide.devices import HOST
from confide.mechanism.clipping.anatomy import Anatomy, Slot
from confide.mechanism.clipping.factors import GAMMA, PRECISION, shrunk
from confide.mechanism.clipping.isolation import NotIsolable
from confide.mechanism.clipping.losses import output_gradient
from confide.mechanism.clipping.rounding import error
from confide.mechanism.clipping.rules.linear import OuterProduct, linear
from confide.mechanism.clipping.running import Inputs, Loss, isolated_losses, leaves
from confide.mechanism.clipping.workspace import Workspace
from confide.models.flat import is_half
from confide.models.networks import MLP

_ATEN = torch.ops.aten
# Multiply-adds up to which one native call beats the products and sums of torch.
SMALL_WORK = 1 << 19
# Records that the native call adds up in the type of the layers (BLOCK in clipping.cpp).
KERNEL_BLOCK = 32


@dataclass(frozen=True)
class Activation:
    """`forward(layer, z)` may overwrite z; `backward(layer, gradient, kept)` overwrites the gradient.

    What is kept is the activation's output, or its input where `keeps_input`.
    """

    forward: Callable[[Any, Tensor], Tensor]
    backward: Callable[[Any, Tensor, Tensor], object]
    keeps_input: bool = False


ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.ReLU: Activation(
        lambda _, z: z.relu_(), lambda _, g, a: _ATEN.threshold_backward.grad_input(g, a, 0, grad_input=g)
    ),
    nn.Tanh: Activation(lambda _, z: z.tanh_(), lambda _, g, a: _ATEN.tanh_backward.grad_input(g, a, grad_input=g)),
    nn.Sigmoid: Activation(
        lambda _, z: z.sigmoid_(), lambda _, g, a: _ATEN.sigmoid_backward.grad_input(g, a, grad_input=g)
    ),
    nn.GELU: Activation(
        lambda layer, z: nn.functional.gelu(z, approximate=layer.approximate),
        lambda layer, g, z: _ATEN.gelu_backward.grad_input(g, z, approximate=layer.approximate, grad_input=g),
        keeps_input=True,
    ),
}


@dataclass(frozen=True)
class Link:
    """One linear layer and the activations after it."""

    slot: Slot
    activations: list[tuple[Activation, weakref.ref[nn.Module]]]

    @property
    def layer(self) -> nn.Linear:
        layer = self.slot.reference()
        assert type(layer) is nn.Linear, "a slot never outlives its module"
        return layer


class LayerChain:
    """The links of a module in order.

    Like the slots it refers to them weakly, for engines live as long as their modules and must not keep them alive.
    """

    def __init__(self, links: list[Link], flat: bool) -> None:
        self.links, self.flat = links, flat
        self.dtype, self.device = links[0].layer.weight.dtype, links[0].layer.weight.device
        self.space = Workspace()
        shapes = [tuple(link.layer.weight.shape) for link in links]
        self.entries = sum(outputs * inputs for outputs, inputs in shapes)
        # hidden values forwards, their gradients backwards, with room to align each
        numbers = sum(outputs for outputs, _ in shapes) + sum(inputs for _, inputs in shapes[1:])
        self.row_bytes = numbers * links[0].layer.weight.element_size() + 64 * 2 * len(shapes)
        self.places = (ClipLayer * len(links))(*(ClipLayer(*shape) for shape in shapes))

    def fits(self, x: Inputs) -> bool:
        """Whether this batch may take the chain: nothing converted on the way. It is proven, so has no hooks."""
        if not isinstance(x, Tensor) or x.dtype != self.dtype or x.device != self.device:
            return False
        return (
            (x.dim() == 2 or (self.flat and x.dim() > 2))
            and not x.requires_grad
            and not torch.is_autocast_enabled(self.device.type)
        )

    def contributions(
        self, loss: Loss, x: Tensor, y: Any, space: Workspace, counted: int
    ) -> list[tuple[Slot, OuterProduct]]:
        """What the first `counted` records contribute by layer; nothing if the loss does not depend on the output."""
        self.space.begin(1 << 62, x.shape[0] * self.row_bytes)
        hidden = x.flatten(1) if self.flat else x
        inputs: list[Tensor] = []
        kept: list[list[Tensor]] = []
        # as attributes of their layers they would be looked for in Python, at every step
        layers: list[dict[str, Any]] = [link.layer._parameters for link in self.links]
        for link, layer in zip(self.links, layers, strict=True):
            inputs.append(hidden)
            hidden, remembered = self._forward(link, layer["weight"], layer["bias"], hidden)
            kept.append(remembered)
        gradient = output_gradient(loss, hidden, y)
        if gradient is None:
            gradient = self._isolated_gradient(loss, hidden, y)
        found: list[tuple[Slot, OuterProduct]] = []
        if gradient is None:
            return found
        last = len(self.links) - 1
        if self.links[last].activations:  # they overwrite it, and it may belong to the loss
            gradient = gradient.clone()
        for number in range(last, -1, -1):
            link, layer = self.links[number], layers[number]
            for (activation, place), values in zip(reversed(link.activations), reversed(kept[number]), strict=True):
                activation.backward(place(), gradient, values)
            left, right = gradient, inputs[number]
            if counted < len(left):
                left, right = left[:counted], right[:counted]
            product = OuterProduct(left, right, layer["bias"] is not None, space, number < last)
            found.append((link.slot, product))
            if number:
                wide = self.space.take(gradient, gradient.shape[0], layer["weight"].shape[1])
                gradient = torch.mm(gradient, layer["weight"], out=wide)
        return found[::-1]

    def _isolated_gradient(self, loss: Loss, output: Tensor, y: Any) -> Tensor | None:
        """Through a loss of the user's, which sees one record at a time; None where it does not look at the output."""
        leaf = output.detach().requires_grad_()
        with torch.enable_grad():
            losses = isolated_losses(loss, leaf, y, 1)
        if not losses.requires_grad:
            return None
        if any(found is not leaf for found in leaves(losses, {})):
            raise NotIsolable("uses parameters in its loss")
        # it may be a view of something that is not ours to overwrite
        (found,) = torch.autograd.grad(losses, leaf, torch.ones_like(losses), allow_unused=True)
        return None if found is None else found.contiguous()

    def add_small(
        self,
        found: list[tuple[Slot, OuterProduct]],
        clip: float,
        automatic: bool,
        parts: list[Tensor],
        allowed: float,
    ) -> Tensor | None:
        """All of the clipped sum in one native call; None where it is too large for that, or a norm is not finite.

        A record is one outer product in every layer, so that its parts do not cancel; the kernel adds up blocks of
        records, and their sums in double precision.
        """
        kernel, records = clip_kernel(self.dtype), found[0][1].records
        if kernel is None or records * self.entries > SMALL_WORK or parts[0].dtype != self.dtype:
            return None
        if self.device != HOST or parts[0].device != HOST:  # an address on another device means nothing here
            return None
        if error(KERNEL_BLOCK, records, self.dtype) > allowed:
            return None
        for place, (slot, product) in zip(self.places, found, strict=True):
            left, right = product.left.contiguous(), product.right.contiguous()
            product.left, product.right = left, right  # kept alive during the call
            place.left, place.right = left.data_ptr(), right.data_ptr()
            place.weight = parts[slot.targets["weight"].parameter].data_ptr()
            place.bias = parts[slot.targets["bias"].parameter].data_ptr() if product.bias else None
        norms = torch.empty(records, dtype=self.dtype)
        precision = PRECISION[self.dtype]
        bound = shrunk(clip, self.dtype)
        gamma = GAMMA if automatic else 0.0
        finite = kernel(records, len(found), self.places, norms.data_ptr(), bound, gamma, precision.tiny)
        return norms if finite else None

    def _forward(self, link: Link, weight: Tensor, bias: Tensor | None, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        if weight.shape[0] == 1:  # a product with a vector has a faster way
            row = weight[0]
            hidden = (torch.mv(inputs, row) if bias is None else torch.addmv(bias, inputs, row)).unsqueeze(1)
        else:
            hidden = self.space.take(inputs, inputs.shape[0], weight.shape[0])
            if bias is None:
                torch.mm(inputs, weight.t(), out=hidden)
            else:
                torch.addmm(bias, inputs, weight.t(), out=hidden)
        remembered = []
        for activation, reference in link.activations:
            before, hidden = hidden, activation.forward(reference(), hidden)
            remembered.append(before if activation.keeps_input else hidden)
        return hidden, remembered


def chain_of(module: nn.Module, anatomy: Anatomy) -> LayerChain | None:
    """The chain that the module is, or None."""
    slots = {id(slot.layer): slot for slot in anatomy.slots}
    if anatomy.copied or anatomy.draws != 1 or not slots:
        return None
    links: list[Link] = []
    flat = False
    for layer in _unrolled(module):
        if type(layer) is nn.Linear and _plain(slots.get(id(layer)), layer):
            links.append(Link(slots.pop(id(layer)), []))
        elif links and type(layer) in ACTIVATIONS:
            links[-1].activations.append((ACTIVATIONS[type(layer)], weakref.ref(layer)))
        elif not links and type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            flat = True
        elif type(layer) is not nn.Identity:
            return None
    kinds = {(link.layer.weight.dtype, link.layer.weight.device) for link in links}
    if slots or len(kinds) != 1 or _overwritten(links) or _shared(links):
        return None
    if is_half(links[0].layer.weight.dtype):  # the tape widens what it holds; a chain works in the type of its layers
        return None
    return LayerChain(links, flat or isinstance(module, MLP))


def _unrolled(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of nested Sequentials in the order of their calls."""
    if type(module).forward is nn.Sequential.forward or type(module) is MLP:
        for child in module._modules.values():
            if child is not None:
                yield from _unrolled(child)
    else:
        yield module


def _plain(slot: Slot | None, layer: nn.Linear) -> bool:
    """A linear layer with its own rule and nothing frozen; once only, for a slot is used up."""
    names = {name for name, value in layer._parameters.items() if value is not None}
    return slot is not None and slot.rule is not None and slot.rule.function is linear and slot.trainable == names


def _overwritten(links: list[Link]) -> bool:
    """Whether an activation would overwrite what the one before it has kept."""
    return any(len(link.activations) > 1 for link in links)


def _shared(links: list[Link]) -> bool:
    """Whether two layers share a parameter: then their gradients add up before any norm is taken."""
    return len(set[int]().union(*(link.slot.parameters for link in links))) < sum(
        len(link.slot.parameters) for link in links
    )
