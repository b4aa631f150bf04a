"""What of a network of one's own is no part of the draws: frozen parameters and buffers, kept in the posterior's file.

Draws hold trainable parameters alone. A network that its user builds anew in another process may have other random
features or other statistics, and would answer with other numbers without a word. So the file holds them, in the order
in which the network lists them, and `load_posterior` puts them back into a copy of the network that it is given. The
network of a posterior never saw a record, so they are as public as when they were given to the fit.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from confide.errors import Refusal

FROZEN = "frozen."
"""Beginning of the names of these tensors in a file."""

LOOSE = "loose."
"""The same for tensors that are plain attributes of a layer, which torch does not list."""


def frozen_of(module: nn.Module) -> dict[str, Tensor]:
    """The frozen parameters and buffers by their place, each with memory of its own."""
    listed = {f"{FROZEN}{place}": value.detach().clone() for place, value in enumerate(_values(module))}
    return listed | {f"{LOOSE}{name}": value.detach().clone() for name, value in _loose(module).items()}


def with_frozen(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the network with the frozen values that stand in a file; the network itself where none do."""
    kept = [tensors[f"{FROZEN}{place}"] for place in range(sum(name.startswith(FROZEN) for name in tensors))]
    loose = {name.removeprefix(LOOSE): value for name, value in tensors.items() if name.startswith(LOOSE)}
    if not (kept or loose):
        return module
    own = copy.deepcopy(module)
    values = _values(own)
    if [value.shape for value in values] != [value.shape for value in kept]:
        raise Refusal(
            f"module={type(module).__name__}: its frozen parameters and buffers have other shapes than those of the "
            "network that was fitted; pass that one"
        )
    for value, found in zip(values, kept, strict=True):
        value.data.copy_(found)
    for name, value in _loose(own).items():
        if name in loose and loose[name].shape == value.shape:  # what a forward keeps for later may differ
            value.data = loose[name].to(value).clone()
    return own


def frozen_in(path: str | Path) -> dict[str, Tensor]:
    """The frozen values in a file whose draws are too many to be read."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as archive:
        names = [name for name in archive.keys() if name.startswith((FROZEN, LOOSE))]  # noqa: SIM118
        return {name: archive.get_tensor(name) for name in names}


def _values(module: nn.Module) -> list[Tensor]:
    fixed = [parameter for parameter in module.parameters() if not parameter.requires_grad]
    return [value for value in (*fixed, *module.buffers()) if not value.is_complex()]


def _loose(module: nn.Module) -> dict[str, Tensor]:
    return {
        f"{place}.{name}": value
        for place, layer in module.named_modules()
        for name, value in vars(layer).items()
        if isinstance(value, Tensor) and not value.is_complex() and not value.requires_grad
    }
