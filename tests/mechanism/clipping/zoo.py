"""Modules that the clipping engine must get right, each with a loss and a batch, in float64."""

from __future__ import annotations

from tests.mechanism.clipping import zoo_bayesian, zoo_drawn, zoo_layers, zoo_networks
from tests.mechanism.clipping.zoo_tools import ZOO, Animal, Case

__all__ = ["ZOO", "Animal", "Case", "zoo_bayesian", "zoo_drawn", "zoo_layers", "zoo_networks"]
