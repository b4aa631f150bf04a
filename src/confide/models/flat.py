"""One flat vector for all trainable parameters of a module.

Samplers and optimisers work on one vector; the module sees views of it, so moving the vector moves the network and
nothing is copied per step. The order is that of `module.parameters()`: tied parameters once, frozen ones left out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from confide.devices import device_of
from confide.errors import Refusal


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters in the order of the flat vector."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def uncompiled(module: nn.Module) -> nn.Module:
    """A copy in which nothing is compiled: records run through the layers one tape, or one vmap, at a time, which
    torch.compile would only trace again for minutes. The parameters are the same."""
    module = getattr(module, "_orig_mod", module)
    if any(isinstance(layer, torch.jit.ScriptModule) for layer in module.modules()):
        raise Refusal(
            f"module: {type(module).__name__} is scripted or traced, of which torch makes no copy with parameters of "
            "its own; give the module that it was made from"
        )
    own = copied(module)
    for layer in own.modules():
        layer._compiled_call_impl = None  # what module.compile() leaves behind
        for name, child in list(layer.named_children()):
            if type(child).__name__ == "OptimizedModule":
                setattr(layer, name, child._orig_mod)
    return own


def copied(module: nn.Module) -> nn.Module:
    """A copy with parameters of its own. torch copies no tensor that was computed from others, such as the weight that
    a hook makes anew before every call (weight_norm, pruning), and no matrix by compressed rows or columns: the copy
    has its numbers. Recurrent layers keep a list of such weights."""
    lists = (value for layer in module.modules() for value in vars(layer).values() if type(value) is list)
    listed = (one for some in lists for one in some if isinstance(one, Tensor) and one.grad_fn is not None)
    compressed = (value for value in module.buffers() if value.layout not in (torch.strided, torch.sparse_coo))
    found = (*(value for _, _, value in computed(module)), *listed, *compressed)
    return copy.deepcopy(module, {id(value): value.detach().clone() for value in found})


def computed(module: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Attributes of layers that were computed from other tensors."""
    for prefix, layer in module.named_modules():
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                yield f"{prefix}.{name}".lstrip("."), layer, value


def shaped(module: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """The same network; a copy of one with lazy layers, which has seen a made-up record of this shape."""
    if not _waiting(module):
        return module
    found = copied(module)
    before = found.training
    with torch.no_grad():
        found.eval()(torch.zeros(1, *shape))
    return found.train(before)


def _waiting(module: nn.Module) -> list[str]:
    return [name for name, value in module.named_parameters() if isinstance(value, UninitializedParameter)]


def check_initialised(module: nn.Module) -> None:
    """Refuse lazy layers that have not seen a record yet."""
    waiting = _waiting(module)
    if waiting:
        raise Refusal(
            f"module: {', '.join(waiting[:3])} has no shape yet; call the module once on made-up records of the right "
            "shape, such as module(torch.zeros(1, features))"
        )


def training_(module: nn.Module) -> nn.Module:
    """In training, but for batch normalisations that were given in evaluation: these stay frozen, and mix nothing."""
    frozen = [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and not layer.training]
    module.train()
    for layer in frozen:
        layer.eval()
    return module


def is_half(dtype: torch.dtype) -> bool:
    """Whether it is a floating-point type of less than single precision."""
    return dtype.is_floating_point and torch.finfo(dtype).bits < 32


def widened_(module: nn.Module) -> None:
    """Trainable parameters of half precision in single; everything else stays as it is."""
    for parameter in trainable(module):
        if is_half(parameter.dtype):
            parameter.data = parameter.data.float()


def put_back_(found: nn.Module, given: nn.Module) -> None:
    """A network that was made of `given` to its place, and its parameters to its type where that is half precision."""
    found.to(device_of(given))
    dtype = next((value.dtype for value in trainable(given)), torch.float32)
    for parameter in trainable(found) if is_half(dtype) else ():
        parameter.data = parameter.data.to(dtype)


def flatten_(module: nn.Module) -> Tensor:
    """Re-point every trainable parameter of `module` into one contiguous vector, and return that vector."""
    parameters = trainable(module)
    if not parameters:
        raise Refusal("module: has no trainable parameters; give at least one with requires_grad=True")
    kinds = {parameter.dtype for parameter in parameters}
    if len(kinds) > 1:
        raise Refusal(f"module: trainable parameters mix {kinds}; {_one_type(kinds)}")
    vector = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = vector[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    return vector


def _one_type(kinds: set[torch.dtype]) -> str:
    if any(kind.is_complex for kind in kinds):
        return "confide.networks.real_pairs(module) makes complex ones of two real ones each"
    return "convert it to one type with module.to(...)"


def named_slices(module: nn.Module) -> dict[str, tuple[slice, torch.Size]]:
    """Where each named trainable parameter stands in the flat vector, with its shape."""
    slices: dict[str, tuple[slice, torch.Size]] = {}
    start = 0
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            slices[name] = (slice(start, start + parameter.numel()), parameter.shape)
            start += parameter.numel()
    return slices
