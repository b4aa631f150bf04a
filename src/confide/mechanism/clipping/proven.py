"""What is known to treat every record alone: layers and losses by their exact types, composed by known containers.

For these, and for nothing else, a batch runs through the module as it is. A layer is on the list with the number of
axes its input must have, so that axis 0 is the records' and nothing else (a convolution takes a tensor with one axis
less for a single image). Any subclass, hook, replaced forward, parametrisation or unknown container, and the module
runs inside of a `Region`. All of it is looked at before every pass (`unchanged` says how that
is quick), never remembered by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import _global_backward_hooks, _global_backward_pre_hooks, _has_any_global_hook

from confide.layers.bayesian import (
    MeanFieldConv2d,
    MeanFieldLinear,
    VariationalDropoutConv2d,
    VariationalDropoutLinear,
)
from confide.layers.dropout import SharedDropout, SharedNoiseConv2d, SharedNoiseLinear
from confide.layers.tables import MeanFieldEmbedding
from confide.mechanism.clipping.intact import EVERY_MODULE, is_intact, methods_of, places_of
from confide.models.additive import AdditiveFeatures, AdditiveNetwork
from confide.models.likelihoods import LIKELIHOODS, LearntNoise, Probit
from confide.models.networks import MLP, Shift
from confide.models.tabular import TabularNetwork

# from the axes of the input, records included, to those of the output; None: not proven
Axes: TypeAlias = Callable[[Any, int], int | None]


def _elementwise(layer: Any, axes: int) -> int | None:
    return axes


def _features_last(layer: Any, axes: int) -> int | None:
    return axes if axes >= 2 else None


def _linear(layer: Any, axes: int) -> int | None:
    """A weight with one axis would take the features away, and what comes next would see the records as features."""
    shape, bias = (layer.out_features, layer.in_features), layer.bias
    fits = layer.weight.shape == shape and (bias is None or bias.shape == shape[:1])
    return axes if axes >= 2 and fits else None


def _looked_up(layer: Any, axes: int) -> int | None:
    """Not with what rescales rows in place, or gradients by how often a batch has a row."""
    plain = layer.max_norm is None and layer.scale_grad_by_freq is False
    if isinstance(layer, nn.EmbeddingBag):
        return 2 if plain and axes == 2 and layer.include_last_offset is False else None
    return axes + 1 if plain else None


def _attention(layer: Any, axes: int) -> int | None:
    """Over positions, the records first."""
    width, ends = layer.embed_dim, layer._modules.keys() == {"out_proj"} and axes_after(layer.out_proj, 3) == 3
    weight = layer.in_proj_weight
    fits = weight is not None and weight.shape == (3 * width, width)
    return 3 if axes == 3 and layer.batch_first is True and ends and fits else None


def _encoder_layer(layer: Any, axes: int) -> int | None:
    parts, kind = layer._modules, type(layer)
    inner = parts.keys() == _ENCODER_PARTS and all(axes_after(child, 3) == 3 for child in parts.values())
    blocks = (kind._sa_block, kind._ff_block) == _BLOCKS and not {"_sa_block", "_ff_block"} & layer.__dict__.keys()
    return 3 if axes == 3 and inner and blocks and layer.activation in (F.relu, F.gelu) else None


def _encoder(layer: Any, axes: int) -> int | None:
    """Layers one after the other. A container gives no mask, so there are no nested tensors either."""
    if axes != 3 or layer._modules.keys() - {"norm"} != {"layers"} or layer.norm is not layer._modules.get("norm"):
        return None
    if type(layer.layers) is not nn.ModuleList or listens(layer.layers):
        return None
    inner = [*layer.layers, *([] if layer.norm is None else [layer.norm])]
    return 3 if all(axes_after(child, 3) == 3 for child in inner) else None


def _exactly(count: int, gives: int | None = None) -> Axes:
    return lambda layer, axes: (gives or count) if axes == count else None


def _along(layer: Any, axes: int) -> int | None:
    """A softmax along one axis that is not the records'; the axis is a number that torch reads as it is read here."""
    return axes if type(layer.dim) is int and -axes <= layer.dim < axes and layer.dim % axes else None


def _over_last(layer: Any, axes: int) -> int | None:
    return axes if type(layer.normalized_shape) is tuple and axes > len(layer.normalized_shape) else None


def _fixed(allowed: tuple[int, ...]) -> Axes:
    """Batch normalisation with statistics that are held fixed."""
    return lambda layer, axes: (
        axes if axes in allowed and layer.training is False and layer.running_mean is not None else None
    )


def _of_images(count: int) -> Axes:
    return lambda layer, axes: axes if axes == count and layer.track_running_stats is False else None


def _pooled(count: int) -> Axes:
    return lambda layer, axes: count if axes == count and getattr(layer, "return_indices", False) is False else None


def _flattened(layer: Any, axes: int) -> int | None:
    if not (type(layer.start_dim) is type(layer.end_dim) is int):
        return None
    start, end = (value + axes if value < 0 else value for value in (layer.start_dim, layer.end_dim))
    return axes - (end - start) if 1 <= start <= end < axes else None


def _sequence(layer: Any, axes: int) -> int | None:
    """Each child's output is the next one's input."""
    found: int | None = axes
    for child in layer._modules.values():
        found = None if found is None or child is None else axes_after(child, found)
    return found


def _beside_noise(layer: Any, axes: int) -> int | None:
    return 2 if axes_after(layer.network, axes) == 2 and axes_after(layer.raw, 2) == 2 else None


def _both(layer: Any, axes: int) -> int | None:
    """Effects and a network beside them, each on features of the record alone."""
    alone = layer._modules.keys() == {"effects", "network"} and axes_after(layer.effects, 2) == 2
    fits = layer.scales.shape == layer.chosen.shape and layer.unit.shape == (1,)
    return 2 if axes >= 2 and alone and fits and axes_after(layer.network, 2) == 2 else None


_ENCODER_PARTS = frozenset(["self_attn", "linear1", "linear2", "dropout", "dropout1", "dropout2", "norm1", "norm2"])
_BLOCKS = nn.TransformerEncoderLayer._sa_block, nn.TransformerEncoderLayer._ff_block
_KNOWN: dict[type[nn.Module], Axes] = {
    nn.Sequential: _sequence,
    MLP: lambda layer, axes: _sequence(layer, 2) if axes >= 2 else None,
    AdditiveNetwork: lambda layer, axes: _sequence(layer, 2) if axes >= 2 else None,
    AdditiveFeatures: _exactly(2),
    Shift: lambda layer, axes: 2 if axes >= 2 and layer.centre.dim() == 1 else None,
    TabularNetwork: _both,
    LearntNoise: _beside_noise,
    **dict.fromkeys(
        (nn.Identity, nn.ReLU, nn.ReLU6, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU,
         nn.LeakyReLU, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.LogSigmoid, nn.Dropout),
        _elementwise,
    ),
    **dict.fromkeys((nn.Linear, NonDynamicallyQuantizableLinear), _linear),
    nn.MultiheadAttention: _attention,
    nn.TransformerEncoderLayer: _encoder_layer,
    nn.TransformerEncoder: _encoder,
    type(LearntNoise(nn.Linear(1, 1)).raw): _features_last,
    **dict.fromkeys((nn.Softmax, nn.LogSoftmax), _along),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), _over_last),
    nn.GroupNorm: _features_last,
    nn.Flatten: _flattened,
    **dict.fromkeys((nn.Embedding, nn.EmbeddingBag, MeanFieldEmbedding), _looked_up),
    nn.BatchNorm1d: _fixed((2, 3)),
    nn.BatchNorm2d: _fixed((4,)),
    nn.BatchNorm3d: _fixed((5,)),
    **dict.fromkeys((MeanFieldLinear, SharedNoiseLinear), _features_last),
    **dict.fromkeys((MeanFieldConv2d, SharedNoiseConv2d), _exactly(4)),
    VariationalDropoutLinear: lambda layer, axes: _features_last(layer, axes) if layer.generator is None else None,
    VariationalDropoutConv2d: lambda layer, axes: axes if axes == 4 and layer.generator is None else None,
    SharedDropout: _features_last,
}  # fmt: skip
for _count, _kinds, _images, _pools in (
    (3, (nn.Conv1d, nn.ConvTranspose1d, nn.Dropout1d), nn.InstanceNorm1d,
     (nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool1d)),
    (4, (nn.Conv2d, nn.ConvTranspose2d, nn.Dropout2d), nn.InstanceNorm2d,
     (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool2d)),
    (5, (nn.Conv3d, nn.ConvTranspose3d, nn.Dropout3d), nn.InstanceNorm3d,
     (nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveMaxPool3d, nn.AdaptiveAvgPool3d)),
):  # fmt: skip
    _KNOWN |= {**dict.fromkeys(_kinds, _exactly(_count)), _images: _of_images(_count)}
    _KNOWN |= dict.fromkeys(_pools, _pooled(_count))

# as they were when confide was imported
PLACES = {kind: places_of(kind, "forward") for kind in _KNOWN}
_METHODS = {kind: frozenset((*methods_of(kind), "_call_impl", "_wrapped_call_impl")) for kind in _KNOWN}

_LOSSES: dict[type[Any], Callable[..., Tensor]] = {
    kind: kind.loss
    for kind in LIKELIHOODS.values()
    if kind is not Probit  # which only expectation propagation asks
}
_LOSS_PLACES = {kind: places_of(kind, "loss") for kind in _LOSSES}


def axes_after(layer: nn.Module, axes: int) -> int | None:
    """How many axes the output has; None where the layer is not known to treat every record alone."""
    known = _KNOWN.get(type(layer))
    return known(layer, axes) if known is not None and _as_made(layer) else None


def is_proven(module: nn.Module, x: Any) -> bool:
    return (
        isinstance(x, Tensor)
        and type(x) is Tensor
        and is_intact(EVERY_MODULE)
        and (axes_after(module, x.dim()) or 0) >= 2
        and not _has_any_global_hook()
    )


def is_proven_loss(loss: Any, y: Any) -> bool:
    """A likelihood of confide's own, by identity, with settings that do not watch what they meet."""
    owner: Any = getattr(loss, "__self__", None)
    known = _LOSSES.get(type(owner))
    if known is None or loss.__func__ is not known or type(y) is not Tensor or not is_intact(_LOSS_PLACES[type(owner)]):
        return False
    kinds = map(type, vars(owner).values())
    return all(kind is Tensor or not hasattr(kind, "__torch_function__") for kind in kinds)


def listens(layer: nn.Module) -> bool:
    """Whether somebody listens to this layer or has replaced how it runs."""
    return bool(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or hooked_backwards(layer)
        or layer._compiled_call_impl is not None
        or not layer.__dict__.keys().isdisjoint(_METHODS.get(type(layer), ("forward", "_call_impl")))
    )


def hooked_backwards(layer: nn.Module) -> bool:
    """Whether anybody listens to gradients: of this layer, or of all modules."""
    return bool(
        _global_backward_hooks
        or _global_backward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or any(value is not None and value._backward_hooks for value in layer._parameters.values())
    )


def _as_made(layer: nn.Module) -> bool:
    kind = type(layer)
    return (
        not listens(layer)
        and is_intact(PLACES[kind])
        and all(value is None or type(value) is nn.Parameter for value in layer._parameters.values())
        and all(value is None or type(value) is Tensor for value in layer._buffers.values())
    )
