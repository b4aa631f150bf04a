"""Networks with a distribution in place of every weight, and back; `plain` alone works on a copy.

    with_layers(module, make)   a network whose layers are replaced wherever `make` has something better
    mean_field, local_noise     the Bayesian form of every layer that has one, its mean at the layer's weights
    plain                       the network of ordinary layers again, with the means and deviations of its weights
    with_shared_dropout         dropout layers whose masks all records of a step share

Linear and Conv2d layers have one. Under mean_field every other layer has one too (`drawn`), normalisations by choice.
What has none, or is shared between layers, stays as it is: a parameter without a distribution. A layer takes its new
form in place (`become_`), so that whoever holds it, by a second name, in a list or in a hook, holds it in that form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.errors import Refusal
from confide.layers.bayesian import BayesianLayer, MeanFieldConv2d, MeanFieldLinear, Norms
from confide.layers.drawn import DrawnParameters, draw_parameters_, may_be_drawn, ordinary_
from confide.layers.dropout import SharedDropout, SharedNoiseConv2d, SharedNoiseLinear, shared_dropout
from confide.layers.programs import MeanFieldProgram
from confide.layers.tables import MeanFieldEmbedding, MeanFieldTransposedLinear, is_transposed_linear
from confide.models.flat import copied, flatten_, named_slices
from confide.models.networks import ACTIVATIONS, MLP
from confide.models.programs import Program

SMALLEST_DEVIATION = 1e-18  # its square, 1e-36, is still a normal number in single precision
Make: TypeAlias = Callable[[nn.Module], nn.Module | None]


def with_layers(module: nn.Module, make: Make) -> nn.Module:
    """`module` with every layer exchanged for what `make` gives for it; a layer used twice is exchanged once.

    What `make` changes in place, or leaves as it is, keeps its inner layers, which are exchanged in their turn.
    """
    made: dict[int, nn.Module] = {}

    def exchanged(layer: nn.Module) -> nn.Module:
        if id(layer) not in made:
            new = make(layer)
            made[id(layer)] = layer if new is None else new
            if new is None or new is layer:
                for name, child in list(layer.named_children()):
                    setattr(layer, name, exchanged(child))
        return made[id(layer)]

    return exchanged(module)


def mean_field(module: nn.Module, deviation: float, norms: Norms = "exact", normalisations: bool = False) -> nn.Module:
    """Independent Gaussian weights N(weight, deviation^2), also for scales of normalisations if they are wanted."""
    rho = inverse_softplus(deviation)
    if isinstance(module, Program):
        return MeanFieldProgram(module, rho)
    options = {"initial_rho": rho, "norms": norms}

    def drawn(layer: nn.Module, names: list[str]) -> nn.Module | None:
        return draw_parameters_(layer, names, rho) if may_be_drawn(layer, normalisations) else None

    return _with_distributions(module, lambda layer: _mean_field_form(layer, options), drawn)


def _mean_field_form(layer: Any, options: dict[str, Any]) -> nn.Module | None:
    if type(layer) is nn.Embedding and layer.max_norm is None and not (layer.scale_grad_by_freq or layer.sparse):
        return MeanFieldEmbedding(layer.num_embeddings, layer.embedding_dim, layer.padding_idx, **options)
    if is_transposed_linear(layer):
        return MeanFieldTransposedLinear(type(layer), *layer.weight.shape, **options)
    return _usual_form(layer, MeanFieldLinear, MeanFieldConv2d, options)


def local_noise(module: nn.Module, deviation: float, norms: Norms = "exact") -> nn.Module:
    """The same for variational dropout; biases stay without a distribution."""
    options = {"initial_log_variance": 2 * math.log(deviation), "norms": norms}
    return _with_distributions(module, lambda layer: _usual_form(layer, SharedNoiseLinear, SharedNoiseConv2d, options))


def _usual_form(layer: nn.Module, linear: Any, convolution: Any, options: dict[str, Any]) -> nn.Module | None:
    form: nn.Module | None = None
    if type(layer) is nn.Linear:
        form = linear(layer.in_features, layer.out_features, layer.bias is not None, **options)
    elif type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        form = convolution(*_geometry(layer), **options)
    return form


def _with_distributions(
    module: nn.Module, form_of: Make, otherwise: Callable[[nn.Module, list[str]], nn.Module | None] | None = None
) -> nn.Module:
    """Layers in the form that they have; `otherwise` is asked about what is left, with the names of its parameters."""
    uses: dict[int, int] = {}
    for layer in module.modules():
        for parameter in layer._parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1

    def make(layer: nn.Module) -> nn.Module | None:
        own = {name: value for name, value in layer._parameters.items() if value is not None}
        trainable = [name for name, value in own.items() if value.requires_grad]
        # Layers that share a weight would each get a distribution of their own.
        if not trainable or any(uses[id(value)] > 1 for value in own.values()):
            return None
        form = form_of(layer) if len(trainable) == len(own) and _runs_as_written(layer) else None
        if form is not None:
            return _started(form, layer)
        return None if otherwise is None else otherwise(layer, trainable)

    converted = with_layers(module, make)
    if not any(True for _ in distributions(converted)):
        raise Refusal("module: has no trainable layer that a distribution could be put on, such as Linear or Conv2d")
    return converted


def _runs_as_written(layer: nn.Module) -> bool:
    """Whether its forward is that of its type, on the parameters of its type; else the forward is left as it is."""
    return "forward" not in vars(layer) and layer._parameters.keys() <= {"weight", "bias"}


def _geometry(layer: Any) -> tuple[Any, ...]:
    channels = layer.in_channels, layer.out_channels, layer.kernel_size
    return (*channels, layer.stride, layer.padding, layer.dilation, layer.groups, layer.bias is not None)


def _bias_mean(layer: Any) -> Tensor | None:
    bias: Tensor | None = layer.bias_mean if hasattr(layer, "bias_mean") else layer.bias
    return bias


@torch.no_grad()
def _started(layer: Any, plain_layer: Any) -> nn.Module:
    new: nn.Module = layer.to(plain_layer.weight.dtype)
    layer.weight_mean.copy_(_turned(layer, plain_layer.weight))
    bias = _bias_mean(layer)
    if bias is not None:
        bias.copy_(plain_layer.bias)
    return become_(plain_layer, new.train(plain_layer.training))


_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)
_CARRIED = "_carried"  # where a layer in another form keeps the names of what others had put on it


def become_(layer: nn.Module, new: nn.Module) -> nn.Module:
    """`layer`, changed into what `new` is. Hooks stay, and what others have put on it, there and back."""
    there, back = vars(layer), _CARRIED in vars(layer)
    names = there[_CARRIED] if back else tuple(there.keys() - vars(new).keys())
    kept = {name: there[name] for name in (*_HOOKS, *names) if name in there}
    there.clear()
    there.update(vars(new) | kept | ({} if back else {_CARRIED: names}))
    layer.__class__ = type(new)
    return layer


def _turned(layer: nn.Module, weight: Tensor) -> Tensor:
    """From the axes of the layer's own weight to those of the layer it stands for, or back."""
    return weight.t() if isinstance(layer, MeanFieldTransposedLinear) else weight


PAIRS = [
    ("weight_mean", "weight_rho"),
    ("bias_mean", "bias_rho"),
    ("weight_mean", "weight_log_variance"),
    ("unconstrained_mean", "unconstrained_rho"),
]


class Distribution:
    """One weight or bias with its distribution: `mean` and `spread` are the names of its parameters in the network."""

    def __init__(self, prefix: str, layer: Any, mean: str, spread: str) -> None:
        self.layer, self.mean, self.spread = layer, prefix + mean, prefix + spread
        self._mean, self._spread = mean, spread

    @property
    def is_rho(self) -> bool:
        return self._spread.endswith("rho")

    @property
    def means(self) -> Tensor:
        values: Tensor = getattr(self.layer, self._mean).detach()
        return values

    @property
    def spread_parameter(self) -> nn.Parameter:
        """rho, or the log variance."""
        parameter: nn.Parameter = getattr(self.layer, self._spread)
        return parameter

    @property
    def raw(self) -> Tensor:
        return self.spread_parameter.detach()

    @property
    def noise(self) -> Tensor | None:
        """The noise of the last `sample_`, (draws, *shape); None where the layer draws activations instead."""
        return getattr(self.layer, f"{self._mean.removesuffix('_mean')}_noise", None)

    def deviations(self) -> Tensor:
        """softplus(rho), or exp(log variance / 2); never so small that dividing by it overflows."""
        values = F.softplus(self.raw) if self.is_rho else torch.exp(self.raw / 2)
        return values.clamp_(min=SMALLEST_DEVIATION)

    def plain_deviations(self) -> Tensor:
        """Those of the weight as an ordinary layer keeps it."""
        values = self.deviations()
        if isinstance(self.layer, MeanFieldEmbedding) and self.layer.padding_idx is not None:
            values[self.layer.padding_idx] = 0
        return _turned(self.layer, values) if self._mean == "weight_mean" else values

    def chain(self, deviations: Tensor) -> Tensor:
        """d deviation / d raw: sigmoid(rho), or deviation / 2."""
        return torch.sigmoid(self.raw) if self.is_rho else deviations / 2


def distributions(module: nn.Module) -> Iterator[Distribution]:
    """All weights of a network that have a distribution."""
    for name, layer in module.named_modules():
        if isinstance(layer, BayesianLayer):
            prefix = f"{name}." if name else ""
            pairs = (
                [(f"{own}_mean", f"{own}_rho") for own in layer.drawn_names]
                if isinstance(layer, DrawnParameters)
                else PAIRS
            )
            for mean, spread in pairs:
                if getattr(layer, mean, None) is not None and getattr(layer, spread, None) is not None:
                    yield Distribution(prefix, layer, mean, spread)


def plain(module: nn.Module) -> tuple[nn.Module, Tensor, Tensor]:
    """The network of ordinary layers, with mean and deviation of its flat vector (0 for what has no distribution)."""
    network = with_layers(copied(module), _ordinary)
    mean = flatten_(network)
    deviation = torch.zeros_like(mean)
    slices = named_slices(network)
    for one in distributions(module):
        part, _ = slices[one.mean.removesuffix("_mean")]
        deviation[part] = one.plain_deviations().reshape(-1)
    return network, mean, deviation


@torch.no_grad()
def _ordinary(layer: nn.Module) -> nn.Module | None:
    if isinstance(layer, MeanFieldProgram):
        return layer.ordinary()
    if isinstance(layer, DrawnParameters):
        return ordinary_(layer)
    if not isinstance(layer, _CONVERTED):
        return None
    weight, bias = layer.weight_mean, _bias_mean(layer)
    ordinary: Any
    if isinstance(layer, MeanFieldTransposedLinear):
        ordinary = layer.ordinary().to(weight.dtype)
    elif isinstance(layer, MeanFieldEmbedding):
        ordinary = nn.utils.skip_init(
            nn.Embedding, layer.num_embeddings, layer.embedding_dim, layer.padding_idx, dtype=weight.dtype
        )
    elif isinstance(layer, MeanFieldLinear | SharedNoiseLinear):
        options = layer.in_features, layer.out_features, bias is not None
        ordinary = nn.utils.skip_init(nn.Linear, *options, dtype=weight.dtype)
    else:
        channels = weight.shape[1] * layer.groups, weight.shape[0], layer.kernel_size
        geometry = layer.stride, layer.padding, layer.dilation, layer.groups, bias is not None
        ordinary = nn.utils.skip_init(nn.Conv2d, *channels, *geometry, dtype=weight.dtype)
    ordinary.weight.copy_(_turned(layer, weight))
    if bias is not None and ordinary.bias is not None:
        ordinary.bias.copy_(bias)
    return become_(layer, ordinary.train(layer.training))


_CONVERTED = MeanFieldLinear | MeanFieldConv2d | MeanFieldEmbedding | SharedNoiseLinear | SharedNoiseConv2d


def with_shared_dropout(module: nn.Module, rate: float) -> tuple[nn.Module, bool]:
    """`module` with shared masks in its dropout layers, and whether such layers had to be inserted.

    A fully connected network of confide's own that has none gets one of this rate after every hidden activation, or
    on its inputs if it has no hidden layer.
    """
    converted = with_layers(module, _with_shared_masks)
    if any(isinstance(layer, SharedDropout) for layer in converted.modules()):
        return converted, False
    if not isinstance(converted, MLP):
        raise Refusal(
            "module: has no dropout layer (dropout that a forward calls as a function, or that is inside of attention "
            "or recurrent layers, is not one); add nn.Dropout where activations should be dropped"
        )
    activation = ACTIVATIONS[converted.recipe.activation]
    if converted.recipe.hidden:
        return with_layers(converted, lambda layer: _dropped(layer, rate) if type(layer) is activation else None), True
    converted[0] = nn.Sequential(SharedDropout(rate), converted[0])
    return converted, True


def _with_shared_masks(layer: nn.Module) -> nn.Module | None:
    new = shared_dropout(layer)
    return None if new is None else become_(layer, new)


def _dropped(activation: nn.Module, rate: float) -> nn.Module:
    return nn.Sequential(activation, SharedDropout(rate))


def inverse_softplus(value: float) -> float:
    """rho with log(1 + exp(rho)) = value."""
    return value + math.log(-math.expm1(-value))
