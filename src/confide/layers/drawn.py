"""Any layer with independent Gaussian parameters: attention, recurrent layers, experts, convolutions, bare parameters.

`draw_parameters_` gives a layer a subclass of its own type in which `layer.weight` is

    mean + softplus(rho) * noise,       parameters weight_mean and weight_rho, the noise of the last `sample_`,

so that its forward, which is left as it is, meets drawn weights wherever it reads them. Several draws at once meet the
first of them: what a forward does with its rows is not known here.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from confide.layers.bayesian import BayesianLayer, Source, _check_draws, _noise_like
from confide.models.flat import is_half
from confide.models.likelihoods import NoiseParameter


class DrawnParameters(BayesianLayer):
    """In the place of a layer of type `drawn_type`, with `drawn_order` of parameters."""

    drawn_type: type[nn.Module]
    drawn_order: tuple[str, ...]
    drawn_names: tuple[str, ...]

    def __reduce_ex__(self, protocol: Any) -> Any:  # the type is made anew where it is read
        return _empty, (self.drawn_type, self.drawn_order, self.drawn_names), self.__getstate__()  # type: ignore[no-untyped-call]

    def sample_(self, generator: Source = None, draws: int = 1) -> Self:
        _check_draws(draws)
        self.draws = draws
        for name in self.drawn_names:
            setattr(self, f"{name}_noise", _noise_like(getattr(self, f"{name}_mean"), 1, generator))
        return self

    def use_mean_(self) -> Self:
        self.draws = 1
        for name in self.drawn_names:
            mean = getattr(self, f"{name}_mean")
            setattr(self, f"{name}_noise", torch.zeros_like(mean, requires_grad=False).unsqueeze(0))
        return self

    def drawn_value(self, name: str) -> Tensor:
        """What the layer reads for this parameter; the mean before anything was drawn."""
        mean: Tensor = getattr(self, f"{name}_mean")
        noise: Tensor | None = self.__dict__.get(f"{name}_noise")
        return mean if noise is None else torch.addcmul(mean, F.softplus(getattr(self, f"{name}_rho")), noise[0])

    def drawn_slope(self, name: str) -> Tensor:
        """d drawn / d rho = noise * sigmoid(rho), in single precision at least: norms and sums are made of it."""
        noise: Tensor = getattr(self, f"{name}_noise")[0]
        slope = noise * torch.sigmoid(getattr(self, f"{name}_rho").detach())
        return slope.float() if is_half(slope.dtype) else slope


_NAMES = {*vars(BayesianLayer), *vars(DrawnParameters), *DrawnParameters.__annotations__} - {*dir(nn.Module)}


def draw_parameters_(layer: nn.Module, names: list[str], initial_rho: float) -> nn.Module:
    """A distribution for these parameters of the layer, which is changed in place."""
    kind = _type_of(type(layer), tuple(layer._parameters), tuple(names))
    rest = dict(layer._parameters)
    layer._parameters.clear()
    layer.__dict__.pop("_flat_weights", None)  # of a recurrent layer: found anew whenever they are read
    layer.__class__ = kind
    for name, value in rest.items():
        if name in names:
            assert value is not None
            layer.register_parameter(f"{name}_mean", nn.Parameter(value.detach().clone()))
            layer.register_parameter(f"{name}_rho", nn.Parameter(torch.full_like(value, initial_rho)))
        else:
            layer._parameters[name] = value
    return layer


def ordinary_(layer: DrawnParameters) -> nn.Module:
    """The layer as it was, changed in place, its parameters at their means and in their order."""
    held, drawn, order = dict(layer._parameters), layer.drawn_names, layer.drawn_order
    means = {name: nn.Parameter(getattr(layer, f"{name}_mean").detach().clone()) for name in drawn}
    for name in ("draws", *(f"{name}_noise" for name in drawn)):
        layer.__dict__.pop(name, None)
    layer._parameters.clear()
    layer.__class__ = layer.drawn_type  # type: ignore[assignment]
    layer._parameters.update({name: means.get(name, held.get(name)) for name in order})
    if isinstance(layer, nn.RNNBase):
        layer._flat_weights = _flat_weights(layer)
    return layer


def may_be_drawn(layer: nn.Module, normalisations: bool) -> bool:
    """Whether its type can be derived from, and nothing else than its forward makes weights of its parameters."""
    compiled = isinstance(layer, torch.jit.ScriptModule | parametrize.ParametrizationList)
    rescaled = getattr(layer, "max_norm", None) is not None or getattr(layer, "sparse", False)
    counted = getattr(layer, "scale_grad_by_freq", False)
    if isinstance(layer, NoiseParameter) or compiled or parametrize.is_parametrized(layer) or rescaled or counted:
        return False
    if any(hasattr(layer, name) for name in _NAMES):  # one of ours, or one that means something else by it
        return False
    return normalisations or not is_normalisation(layer)


def is_normalisation(layer: nn.Module) -> bool:
    """Of torch, or of a library by its name."""
    return "norm" in type(layer).__name__.lower()


def _type_of(original: type[nn.Module], order: tuple[str, ...], drawn: tuple[str, ...]) -> Any:
    made: Any = _made_type
    return made(original, order, drawn)


@cache
def _made_type(original: Any, order: tuple[str, ...], drawn: tuple[str, ...]) -> Any:
    def read(name: str) -> property:
        return property(lambda layer: layer.drawn_value(name))

    content: dict[str, Any] = {name: read(name) for name in drawn}
    content |= {"drawn_type": original, "drawn_order": order, "drawn_names": drawn, "__module__": original.__module__}
    if issubclass(original, nn.RNNBase):
        content["_flat_weights"] = property(_flat_weights, lambda layer, values: None)
    return type(f"Drawn{original.__name__}", (DrawnParameters, original), content)


def _flat_weights(layer: Any) -> list[Any]:
    return [getattr(layer, name) for name in layer._flat_weights_names]


def _empty(original: type[nn.Module], order: tuple[str, ...], drawn: tuple[str, ...]) -> nn.Module:
    kind: Any = _type_of(original, order, drawn)
    made: nn.Module = kind.__new__(kind)
    return made
