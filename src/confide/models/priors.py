"""Priors over the flat parameter vector. A prior is not data: its gradient joins in `tell`, never clipped or noised."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Prior(Protocol):
    """A density over parameters, seen through its energy -log p."""

    def energy(self, position: Tensor) -> Tensor:
        """-log p(position), up to a constant."""

    def add_energy_gradient_(self, position: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        """out += factor * d(energy)/d(position), in place."""


def _check_scale(scale: float) -> None:
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale={scale}: must be a finite number > 0")


@dataclass(frozen=True)
class Gaussian:
    """Independent N(0, scale^2): energy |theta|^2 / (2 scale^2)."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    def energy(self, position: Tensor) -> Tensor:
        return position.square().sum() / (2 * self.scale**2)

    def add_energy_gradient_(self, position: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        return out.add_(position, alpha=factor / self.scale**2)


@dataclass(frozen=True)
class Laplace:
    """Independent Laplace(0, scale): energy |theta|_1 / scale."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    def energy(self, position: Tensor) -> Tensor:
        return position.abs().sum() / self.scale

    def add_energy_gradient_(self, position: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        return out.add_(torch.sign(position), alpha=factor / self.scale)


@dataclass(frozen=True)
class Flat:
    """The improper constant density: no pull at all."""

    def energy(self, position: Tensor) -> Tensor:
        return position.new_zeros(())

    def add_energy_gradient_(self, position: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        return out


PRIORS: dict[str, Any] = {"gaussian": Gaussian, "laplace": Laplace, "flat": Flat}
