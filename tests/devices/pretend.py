"""A device that is not there: tensors that torch takes for those of an accelerator, whose numbers lie in host memory.

`start()` registers "pretend:0" as a backend of torch, before the first backward of the process. Its tensors have no
address (`data_ptr` raises), cannot become arrays, and refuse to be mixed with the host's, as those of CUDA do. Views,
autograd and torch.func are torch's own: the backend only runs the kernels, on the host, where each storage of the
device has a storage of the host behind it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
HOST = torch.device("cpu")
KEY = "PrivateUse1"
NOWHERE = 1 << 60
"""Addresses from here on are nobody's: whoever reads there is stopped by the operating system."""
_MIXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_copy_from", "copy_")
_MIXES = tuple(f"aten::{name}" for name in _MIXED)
_SHAPES = ("aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold", "aten::view_as_real", "aten::set_")


class Memory:
    """What is behind every storage of the device, and how much of it is said to be free."""

    def __init__(self) -> None:
        self.behind: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}
        self.free, self.total = 1 << 34, 1 << 34
        self.doubles = True  # False: like MPS, which knows no double precision
        self.kernels = self.storages = 0
        self._limit = 1000

    def keep(self, storage: torch.UntypedStorage, host: torch.UntypedStorage) -> None:
        if len(self.behind) > self._limit:
            self.behind = {key: pair for key, pair in self.behind.items() if not pair[0].expired()}
            self._limit = 2 * len(self.behind) + 1000
        self.behind[storage._cdata] = (StorageWeakRef(storage), host)

    def host(self, tensor: Tensor) -> Tensor:
        """The same numbers, as the host has them."""
        storage = self.behind[tensor.untyped_storage()._cdata][1]
        found = torch.empty(0, dtype=tensor.dtype)
        return found.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


MEMORY = Memory()


def is_pretended(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def on_device(host: Tensor) -> Tensor:
    """A tensor of the device with these numbers, which it shares."""
    if host.dtype == torch.float64 and not MEMORY.doubles:
        raise TypeError(f"{NAME}: no float64 on this device; use float32")
    return _point_to(torch._C._acc.create_empty_tensor([0], host.dtype), host)


def _point_to(tensor: Tensor, host: Tensor) -> Tensor:
    storage = _storage_over(host.untyped_storage())
    setter = torch.ops.aten.set_.source_Storage_storage_offset
    return _host_kernel(setter, tensor, storage, host.storage_offset(), host.shape, host.stride())


def _storage_over(host: torch.UntypedStorage) -> torch.UntypedStorage:
    MEMORY.storages += 1
    address = NOWHERE + MEMORY.storages
    storage: Any = torch._C._construct_storage_from_data_pointer(address, torch.device(NAME, 0), host.nbytes())
    MEMORY.keep(storage, host)
    return storage


def _host_kernel(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """The host's kernel on tensors of the device: for operators that look at shapes alone."""
    return operator.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)


def _run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    MEMORY.kernels += 1
    name = operator._schema.name
    if name in _SHAPES:
        return _host_kernel(operator, *args, **kwargs)
    given = tuple(_as_tensor(one, value) for one, value in zip(operator._schema.arguments, args, strict=False))
    leaves, structure = pytree.tree_flatten((given, kwargs))
    _check_alike(name, leaves)
    generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
    if generators:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{generators[0].device.type}'")
    known: list[tuple[Tensor, Tensor]] = []
    for place, leaf in enumerate(leaves):
        if is_pretended(leaf):
            leaves[place] = MEMORY.host(leaf)
            known.append((leaves[place], leaf))
        elif isinstance(leaf, torch.device):
            leaves[place] = HOST
    given, named = pytree.tree_unflatten(leaves, structure)
    found = operator(*given, **named)
    for host, device in known:
        if host.shape != device.shape:  # a result for which there was no room yet
            _point_to(device, host)

    def back(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for host, device in known:
            if value is host:
                return device
        for host, device in known:  # a view that another kernel has made
            if value.untyped_storage()._cdata == host.untyped_storage()._cdata and value.numel():
                return _host_kernel(
                    torch.ops.aten.as_strided.default, device, value.shape, value.stride(), value.storage_offset()
                )
        return on_device(value)

    return pytree.tree_map(back, found)


def _as_tensor(argument: Any, value: Any) -> Any:
    """A plain number comes here as itself where the operator wants a tensor."""
    plain = isinstance(value, bool | int | float) and str(argument.type) == "Tensor"
    return torch.tensor(value) if plain else value


def _check_alike(name: str, leaves: list[Any]) -> None:
    if name in _MIXES:
        return
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not is_pretended(leaf) and leaf.dim() > 0:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and "
                f"{leaf.device}! ({name})"
            )


def _empty(
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    host = torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)
    return on_device(_filled(host))


def _empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    return on_device(_filled(torch.empty_strided(size, stride, dtype=dtype)))


def _filled(host: Tensor) -> Tensor:
    """Fresh memory of a device holds anything."""
    return host.fill_(torch.nan) if host.is_floating_point() else host


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    given = MEMORY.host(source) if is_pretended(source) else source
    (MEMORY.host(target) if is_pretended(target) else target).copy_(given)
    return target


def _local_scalar(tensor: Tensor) -> Any:
    return MEMORY.host(tensor).item()


def _convolution(*args: Any) -> Any:
    return _run(torch.ops.aten.convolution.default, *args)


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    *shape, transposed, padding, groups, wanted = rest
    outputs = weight.shape[1] * groups if transposed else weight.shape[0]
    given = (grad, x, weight, [outputs], *shape, transposed, padding, groups, wanted)
    return _run(torch.ops.aten.convolution_backward.default, *given)


class Backend:
    """What torch and confide ask of a device's module."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return MEMORY.free, MEMORY.total


_LIBRARIES: list[torch.library.Library] = []


def start() -> torch.device:
    """Make the device known to torch; once in a process, before its first backward."""
    if not _LIBRARIES:
        _setup_privateuseone_for_python_backend(NAME, Backend())
        everything = torch.library.Library("_", "IMPL")
        everything.fallback(_run, KEY)
        aten = torch.library.Library("aten", "IMPL", KEY)
        for name, kernel in {
            "empty.memory_format": _empty,
            "empty_strided": _empty_strided,
            "_copy_from": _copy_from,
            "_local_scalar_dense": _local_scalar,
            "convolution_overrideable": _convolution,
            "convolution_backward_overrideable": _convolution_backward,
            "_fused_sdp_choice": lambda *args, **kwargs: 0,  # the formula: fused kernels belong to real devices
        }.items():
            aten.impl(name, kernel)
        _LIBRARIES.extend([everything, aten])
        address = torch.Tensor.data_ptr

        def data_ptr(self: Tensor) -> int:
            if is_pretended(self):
                raise RuntimeError("the address of a device's tensor was asked for by code of the host")
            return address(self)

        setattr(torch.Tensor, "data_ptr", data_ptr)  # noqa: B010
        copied = torch.UntypedStorage.clone

        def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
            if self.device.type != NAME:
                return copied(self)
            return _storage_over(MEMORY.behind[self._cdata][1].clone())

        setattr(torch.UntypedStorage, "clone", clone)  # noqa: B010
    return torch.device(NAME, 0)
