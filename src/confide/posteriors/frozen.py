"""What of a network of one's own is no part of the draws: frozen parameters, buffers, and what lies about.

Draws hold trainable parameters alone. A network that its user builds anew in another process may have other random
features, another backbone or other statistics, and would answer with other numbers without a word.

    buffers, loose tensors     stand in the posterior's file; `load_posterior` puts them back into a copy of the network
                               that it is given. What a forward keeps for later (plain attributes, buffers that are not
                               persistent, such as tables of positions) may be missing there or have another length
    few frozen parameters      do so too: the random features of a small network are nowhere else
    more frozen parameters     are a backbone, which its user has already. The file holds their fingerprint, a hash of
                               shapes, types and values, and `load_posterior` refuses a network with another one

The network of a posterior never saw a record, so all of it is as public as when it was given to the fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from confide.errors import Refusal
from confide.models.flat import copied

FROZEN = "frozen."
"""Beginning of the names of these tensors in a file."""

LOOSE = "loose."
"""The same for tensors that are no part of a state_dict: plain attributes, and buffers that are not persistent."""

FEW = 4096
"""Frozen parameters that a file holds, 16 kB in single precision: no network that anybody trained before is so small,
and a draw weighs more."""


def frozen_of(module: nn.Module) -> dict[str, Tensor]:
    """What a file holds of it, by place, each with memory of its own."""
    listed = {f"{FROZEN}{place}": _kept(value).clone() for place, value in enumerate(_values(module))}
    return listed | {f"{LOOSE}{name}": _kept(value).clone() for name, value in _loose(module).items()}


def _kept(value: Tensor) -> Tensor:
    """In a form that a file holds: dense, and complex numbers as pairs."""
    value = value.detach() if value.layout == torch.strided else value.detach().to_dense()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _put(value: Tensor, found: Tensor) -> None:
    """What `_kept` gave, in the place of these numbers."""
    found = torch.view_as_complex(found.contiguous()) if value.is_complex() else found
    if value.layout == torch.strided:
        value.data.copy_(found)
    else:  # in place, with as many places as the file has
        given = found.to(value.device, value.dtype).to_sparse(layout=value.layout)
        value.resize_as_sparse_(given).copy_(given)


def fingerprint_of_frozen(module: nn.Module) -> str | None:
    """A hash of the frozen parameters, in order, wherever they are; None without any."""
    parameters = _parameters(module)
    if not parameters:
        return None
    found = hashlib.sha256()
    for value in parameters:
        found.update(f"{tuple(value.shape)} {value.dtype};".encode())
        found.update(_kept(value).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def kept_apart(module: nn.Module) -> str | None:
    """The fingerprint of frozen parameters that are too many for a file; None where the file holds them."""
    return None if _are_few(module) else fingerprint_of_frozen(module)


def check_frozen(module: nn.Module, fingerprint: str | None) -> None:
    """Refuse a network whose frozen parameters are not those that a posterior was fitted on."""
    if fingerprint is not None and fingerprint_of_frozen(module) != fingerprint:
        raise Refusal(
            f"module={type(module).__name__}: its frozen parameters are not those of the network that was fitted, of "
            "which the file holds a fingerprint alone; pass that network, its weights, types and frozen layers the same"
        )


def with_frozen(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the network with the frozen values that stand in a file; the network itself where none do."""
    kept = [tensors[f"{FROZEN}{place}"] for place in range(sum(name.startswith(FROZEN) for name in tensors))]
    loose = {name.removeprefix(LOOSE): value for name, value in tensors.items() if name.startswith(LOOSE)}
    if not (kept or loose):
        return module
    own = copied(module)
    values = _values(own)
    if len(values) != len(kept):  # files of earlier versions have no complex ones, and the oldest all buffers
        values = [value for value in values if not value.is_complex()]
    if len(values) != len(kept):
        values = [value for value in _values(own, persistent=False) if not value.is_complex()]
    if [_kept(value).shape for value in values] != [value.shape for value in kept]:
        raise Refusal(
            f"module={type(module).__name__}: its frozen parameters and buffers have other shapes than those of the "
            "network that was fitted; pass that one"
        )
    for value, found in zip(values, kept, strict=True):
        _put(value, found)
    for name, value in _loose(own).items():
        if name in loose and loose[name].shape == _kept(value).shape:  # what a forward keeps for later may differ
            value.data = value.data.clone()  # several may be views of one
            _put(value, loose[name])
    return own


def frozen_in(path: str | Path) -> dict[str, Tensor]:
    """The frozen values in a file whose draws are too many to be read."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as archive:
        names = [name for name in archive.keys() if name.startswith((FROZEN, LOOSE))]  # noqa: SIM118
        return {name: archive.get_tensor(name) for name in names}


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if not parameter.requires_grad]


def _are_few(module: nn.Module) -> bool:
    return sum(parameter.numel() for parameter in _parameters(module)) <= FEW


def _values(module: nn.Module, persistent: bool = True) -> list[Tensor]:
    fixed: list[nn.Parameter] = _parameters(module) if _are_few(module) else []
    passing = {id(value) for value in _passing(module).values()} if persistent else set()
    buffers = [value for value in module.buffers() if id(value) not in passing]
    return [*fixed, *buffers]


def _passing(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that are not persistent."""
    return {
        f"{place}.{name}": value
        for place, layer in module.named_modules()
        for name in sorted(layer._non_persistent_buffers_set)
        if (value := layer._buffers.get(name)) is not None
    }


def _loose(module: nn.Module) -> dict[str, Tensor]:
    attributes = {
        f"{place}.{name}": value
        for place, layer in module.named_modules()
        for name, value in vars(layer).items()
        if isinstance(value, Tensor)
    }
    found = attributes | _passing(module)
    return {name: value for name, value in found.items() if not value.requires_grad}
