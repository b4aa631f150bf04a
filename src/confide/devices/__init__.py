"""Where numbers are. A run follows its module: whoever moves the module to a device moves the run there.

    records      stay on the host; each batch goes to the device, through pinned memory where there is such a thing
    the run      position, gradients, clipping, sums and the state of a method are on the device
    a posterior  keeps its draws on the host, where there is room for them, and its module on the device; predictions
                 are made there and given on the host, where they are compared, drawn and written

The host is torch's "cpu". Any other device that torch knows will do: nothing here asks for one by its name, except for
what only some of them have.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from confide.errors import Refusal

HOST = torch.device("cpu")
_WITHOUT_DOUBLES = ("mps",)  # Apple's processors compute in single precision
_PINNED = ("cuda",)  # ROCm calls itself cuda too

Value = TypeVar("Value")


def _in_a_child() -> None:
    """Torch's threads do not survive a fork, and whoever waits for them in a child waits for ever."""
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_child)


def device_of(module: nn.Module) -> torch.device:
    """Where a module is; one that is in several places, or nowhere, is refused."""
    kinds = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if any(device.type == "meta" for device in kinds):
        raise Refusal(
            "module: its parameters are on the device 'meta', which holds no numbers; fill it first, by "
            "module.to_empty(device='cpu') and its own initialisation"
        )
    if len(kinds) > 1:
        named = ", ".join(sorted(map(str, kinds)))
        raise Refusal(f"module: its parameters and buffers are on {named}; move it to one device with module.to(...)")
    return kinds.pop() if kinds else HOST


def named(device: Any, argument: str = "device") -> torch.device:
    """The device of that name, if this machine has it."""
    try:
        found = torch.device(device)
        if found.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        why = str(error).split("\n")[0].split(".")[0]
        raise Refusal(f"{argument}={str(device)!r}: there is no such device here ({why}); use 'cpu'") from None
    return found


def or_host(device: str) -> torch.device:
    """The device of that name, or the host on a machine that has none."""
    try:
        return named(device)
    except Refusal:
        return HOST


def computes_for(device: torch.device) -> torch.device:
    """Where a run on that device is made: a device without double precision has the host do it.

    Sums whose rounding is bounded are partly made in double precision, and so are the norms of what is near the bound.
    """
    return HOST if device.type in _WITHOUT_DOUBLES else device


def moved(tree: Value, device: torch.device) -> Value:
    """The same on a device. From pinned memory the copy goes on while the host does something else."""
    if device.type == HOST.type:
        return on_host(tree)
    pinned = device.type in _PINNED

    def move(tensor: Tensor) -> Tensor:
        return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=pinned)

    found: Value = _mapped(move, tree)
    return found


def on_host(value: Value) -> Value:
    """The same with every tensor on the host: tensors, tuples, dictionaries and dataclasses of them."""
    found: Value = _mapped(lambda tensor: tensor.cpu(), value)
    return found


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if is_dataclass(value) and not isinstance(value, type):
        found = {one.name: getattr(value, one.name) for one in fields(value) if one.init}
        changed = {name: _mapped(function, member) for name, member in found.items()}
        same = all(changed[name] is found[name] for name in found)
        return value if same else replace(value, **changed)
    if isinstance(value, tuple) and type(value) is tuple:
        parts = tuple(_mapped(function, member) for member in value)
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else parts
    return pytree.tree_map_only(Tensor, function, value) if isinstance(value, dict | list) else value


def free_bytes(device: torch.device) -> int | None:
    """What a device has left for a batch; None where it does not tell, or is the host."""
    if device.type == HOST.type:
        return None
    told = getattr(torch.get_device_module(device), "mem_get_info", None)
    if told is not None:
        return int(told(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    return None


def normals(shape: Any, generator: torch.Generator | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normals from a generator of the host, wherever they are needed: so that every device draws the same ones.

    Many of them are made on the device instead, by a stream whose key is drawn from the generator.
    """
    from confide.devices.stream import WORTH_IT, key_from, normal_

    count = torch.Size(shape).numel()
    if device.type == HOST.type or dtype != torch.float32 or count < WORTH_IT:
        return torch.randn(shape, generator=generator, dtype=dtype, device=HOST).to(device)
    return normal_(torch.empty(shape, dtype=dtype, device=device), 1.0, key_from(generator))


def generators() -> list[torch.Generator]:
    """The generators that a forward draws from when it names none: that of the host, and of every device in use."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized():
        found += torch.cuda.default_generators
    if torch.backends.mps.is_available():
        found.append(torch.mps._get_default_mps_generator())
    return found
