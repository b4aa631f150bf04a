"""Networks by recipe: linear, logistic and softmax regression are an MLP without hidden layers.

A recipe is plain data, so that a saved posterior can rebuild its network without pickle.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from confide.errors import Refusal
from confide.models.flat import copied
from confide.models.tokens import logits_of

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


@dataclass(frozen=True)
class Recipe:
    """A fully connected network: features -> hidden... -> outputs."""

    features: int
    outputs: int
    hidden: tuple[int, ...] = ()
    activation: str = "relu"

    def __post_init__(self) -> None:
        for name, width in (("features", self.features), ("outputs", self.outputs)):
            if width < 1:
                raise Refusal(f"{name}={width}: must be at least 1")
        if any(width < 1 for width in self.hidden):
            raise Refusal(f"hidden={self.hidden}: every hidden layer needs at least one unit")
        if self.activation not in ACTIVATIONS:
            raise Refusal(f"activation={self.activation!r}: must be one of {', '.join(ACTIVATIONS)}")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "hidden": list(self.hidden)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        return cls(**{**values, "hidden": tuple(values.get("hidden", ()))})


class MLP(nn.Sequential):
    """The network of a recipe. Weights start from `generator`; a network without hidden layers starts at zero."""

    def __init__(self, recipe: Recipe, generator: torch.Generator | None = None) -> None:
        widths = (recipe.features, *recipe.hidden, recipe.outputs)
        layers: list[nn.Module] = []
        for width_in, width_out in itertools.pairwise(widths):
            layers += [
                _linear(width_in, width_out, bool(recipe.hidden), generator),
                ACTIVATIONS[recipe.activation](),
            ]
        super().__init__(*layers[:-1])
        self.recipe = recipe

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x.flatten(1))  # type: ignore[no-untyped-call]
        return output


class Shift(nn.Module):
    """Inputs less a public vector, times a public number; without parameters."""

    centre: Tensor

    def __init__(self, centre: Tensor, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("centre", centre.detach().clone())
        self.scale = float(scale)

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) - self.centre) * self.scale


def recipe_of(module: nn.Module) -> Recipe | None:
    """The recipe of a network of confide's own, also where a method has put other layers in it; None for any other."""
    return module.recipe if isinstance(module, MLP) else None


def _linear(width_in: int, width_out: int, random: bool, generator: torch.Generator | None) -> nn.Linear:
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, width_in, width_out)
    bound = 1 / math.sqrt(width_in) if random else 0.0
    with torch.no_grad():
        layer.weight.uniform_(-bound, bound, generator=generator)
        layer.bias.uniform_(-bound, bound, generator=generator)
    return layer


def linear(features: int, outputs: int = 1) -> MLP:
    """Linear regression."""
    return MLP(Recipe(features, outputs))


def logistic(features: int) -> MLP:
    """Logistic regression: one logit, for the Bernoulli likelihood."""
    return MLP(Recipe(features, 1))


def softmax(features: int, classes: int) -> MLP:
    """Softmax regression: one logit per class."""
    return MLP(Recipe(features, classes))


def mlp(
    features: int,
    outputs: int,
    hidden: tuple[int, ...] = (64,),
    activation: str = "relu",
    generator: torch.Generator | None = None,
) -> MLP:
    """A fully connected network with the given hidden widths."""
    return MLP(Recipe(features, outputs, tuple(hidden), activation), generator)


class LastLayerNetwork(nn.Module):
    """A linear layer on the features of a frozen module, each record's brought to the same length.

    The backbone stays in evaluation, whatever mode the network is set to: features are a fixed function of a record.
    """

    length = 4.0
    """Of the features that the head sees: the constant beside them then adds 3 % to a gradient's norm, and no more."""

    def __init__(self, backbone: nn.Module, features: int, outputs: int) -> None:
        super().__init__()
        self.backbone = copied(backbone).requires_grad_(False).eval()
        self.head = _linear(features, outputs, False, None)

    def train(self, mode: bool = True) -> LastLayerNetwork:
        super().train(mode)
        self.backbone.eval()
        return self

    def features(self, *inputs: Any, **named: Any) -> Tensor:
        """What the head sees: the backbone's output, averaged over positions where it has any, at its length."""
        found = pooled(self.backbone(*inputs, **named), named.get("attention_mask"))
        return self.length * F.normalize(found if found.dtype.itemsize > 2 else found.float(), dim=-1)

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        outputs: Tensor = self.head(self.features(*inputs, **named))
        return outputs


class FeatureNetwork(nn.Module):
    """The frozen part of a network, with the identity as a trainable layer behind it."""

    def __init__(self, frozen: nn.Module, identity: nn.Linear) -> None:
        super().__init__()
        self.frozen, self.identity = frozen, identity

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        seen: Tensor = self.identity(logits_of(self.frozen(*inputs, **named)))
        return seen


def pooled(output: Any, mask: Tensor | None = None) -> Tensor:
    """One vector per record: a pooled output where a library gives one, else the mean over positions or pixels."""
    for name in ("pooler_output", "image_embeds", "text_embeds"):
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found.flatten(1)
    for name in ("last_hidden_state", "logits"):
        found = getattr(output, name, None)
        output = found if isinstance(found, Tensor) else output
    if not isinstance(output, Tensor):
        raise Refusal(f"backbone: gives {type(output).__name__}; a tensor of features, one row per record, is needed")
    if output.dim() == 3 and mask is not None and mask.shape == output.shape[:2]:
        counted = mask.to(output.dtype).unsqueeze(2)
        return (output * counted).sum(1) / counted.sum(1).clamp(min=1)
    if output.dim() == 3:
        return output.mean(1)
    return output.mean((2, 3)) if output.dim() == 4 else output.flatten(1)


def last_layer(backbone: nn.Module, outputs: int, features: int | None = None) -> LastLayerNetwork:
    """A Bayesian last layer to be learnt on the features of a frozen module: the network of method `last-layer`.

    backbone   any module that gives features, from `from_pretrained` of a library, say; it is copied and frozen
    outputs    one per class, or one
    features   how many the backbone gives; None: as it says itself
    """
    width = _width_of(backbone) if features is None else features
    if width is None:
        raise Refusal("features=None: the backbone does not say how many it gives; pass features=")
    if outputs < 1 or width < 1:
        raise Refusal(f"outputs={outputs}, features={width}: must be at least 1")
    return LastLayerNetwork(backbone, width, outputs)


def _width_of(backbone: nn.Module) -> int | None:
    """As libraries say it (`config.hidden_size`, `num_features`), or the width of the last layer that has one."""
    config = getattr(backbone, "config", None)
    for place, name in ((config, "hidden_size"), (config, "d_model"), (config, "n_embd"), (backbone, "num_features")):
        found = getattr(place, name, None)
        if isinstance(found, int):
            return found
    widths = [
        getattr(layer, "out_features", getattr(layer, "out_channels", None))
        for layer in backbone.modules()
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d)
    ]
    return widths[-1] if widths else None


def group_normed(module: nn.Module) -> nn.Module:
    """A copy in which nn.GroupNorm stands for every batch normalisation, which mixes records and is refused.

    Scales and shifts are kept, running statistics are not: a pretrained network wants to be trained on. There are at
    most 32 groups, of four channels or more; a BatchNorm1d, which may see one number per channel, becomes one group.
    """
    module = copied(module)
    if isinstance(module, _BatchNorm):
        return _grouped(module)
    made: dict[nn.Module, nn.Module] = {}
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm):
                made[child] = made[child] if child in made else _grouped(child)
                setattr(parent, name, made[child])
    return module


def real_pairs(module: nn.Module) -> nn.Module:
    """A copy whose complex parameters are made of two real ones each, as state-space and Fourier layers need.

    A posterior is a law of real numbers. What the network computes stays the same.
    """
    module = copied(module)
    for layer in list(module.modules()):
        for name, value in list(layer.named_parameters(recurse=False)):
            if value.is_complex():
                parametrize.register_parametrization(layer, name, _OfPair())
                for part in layer.parametrizations[name].parameters():  # type: ignore[index, union-attr]
                    part.requires_grad_(value.requires_grad)
    return module


class _OfPair(nn.Module):
    def forward(self, real: Tensor, imaginary: Tensor) -> Tensor:
        return torch.complex(real, imaginary)

    def right_inverse(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return value.real.clone(), value.imag.clone()


def _grouped(layer: _BatchNorm) -> nn.Module:
    """Layers of libraries that also drop and activate what they have normalised go on doing so."""
    behind = dict(layer.named_children())
    own_forward = type(layer).__module__.partition(".")[0] != "torch"
    if layer.num_features < 1 or (own_forward and not {"act"} <= set(behind) <= {"drop", "act"}):
        raise Refusal(
            f"module: has a {type(layer).__name__}, of which nothing is known; put nn.GroupNorm there by hand"
        )
    channels = layer.num_features
    most = 1 if isinstance(layer, nn.BatchNorm1d) else max(1, min(32, channels // 4))
    groups = next(count for count in range(most, 0, -1) if channels % count == 0)
    norm = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        norm.weight, norm.bias = layer.weight, layer.bias
    norm.train(layer.training)
    return nn.Sequential(norm, *(behind[name] for name in ("drop", "act") if name in behind)) if behind else norm
