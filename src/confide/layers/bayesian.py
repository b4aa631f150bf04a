"""Bayesian layers: weights with a distribution, drawn anew for every step.

    mean-field weights      w = mean + softplus(rho) * noise            (Blundell et al. 2015, ICML)
    variational dropout     activations drawn instead of weights:       (Kingma et al. 2015, NeurIPS;
                            out = A mean^T + sqrt(A^2 variance^T) * noise,     Molchanov et al. 2017, ICML)
                            with variance = exp(log_variance) as a parameter of its own

Several draws run through a network at once, folded into the batch: with N draws a batch of B records is given as
N * B rows, first all records under the first draw, then all under the second (`fold_draws`). Every layer that does
not look across rows, Bayesian or not, then works unchanged, so any Sequential of them does. `sample_` sets
the draws of one layer and `draw_` those of a whole network.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from confide._native.arithmetic import mean_field
from confide.devices import normals
from confide.errors import Refusal
from confide.models.flat import is_half

Pair: TypeAlias = int | tuple[int, int]


class Stream(Protocol):
    """A source of noise such as confide.mechanism.noise.NoiseStream."""

    def normal_(self, out: Tensor, std: float) -> Tensor: ...

    def integers(self, high: int, n: int) -> Any: ...


Source: TypeAlias = torch.Generator | Stream | None
Norms: TypeAlias = Literal["exact", "bound"]

# Keeps the square root of a variance differentiable where all inputs are zero.
SMALLEST_VARIANCE = 1e-12


class BayesianLayer(nn.Module):
    """What all layers here share: a number of draws and where their noise comes from."""

    draws: int = 1

    def sample_(self, generator: Source = None, draws: int = 1) -> Self:
        """Draw the noise of the next step from a generator or noise stream (torch's own generator without one)."""
        raise AssertionError("every layer below draws in its own way")

    def use_mean_(self) -> Self:
        """No noise: the layer at the mean of its distribution."""
        raise AssertionError("every layer below draws in its own way")

    def _check_rows(self, inputs: Tensor) -> None:
        if inputs.shape[0] % self.draws:
            raise Refusal(
                f"inputs={tuple(inputs.shape)}: {self.draws} draws need rows for each of them; use fold_draws first"
            )


class _Observation(threading.local):
    """Whether somebody keeps books of the forward pass, and whether drawn weights are leaves of its graph."""

    watching = False
    leaves = False


_OBSERVATION = _Observation()


@contextmanager
def observed(leaves: bool = True) -> Iterator[None]:
    """For book-keeping: layers remember what their rule needs of the last call.

    With `leaves` autograd ends at the drawn weights: means and rhos get their gradients from the rule alone.
    """
    before = _OBSERVATION.watching, _OBSERVATION.leaves
    _OBSERVATION.watching, _OBSERVATION.leaves = True, leaves
    try:
        yield
    finally:
        _OBSERVATION.watching, _OBSERVATION.leaves = before


# mean-field weights ---------------------------------------------------------------------------------------------


class _MeanFieldLayer(BayesianLayer):
    """Parameters weight_mean, weight_rho, bias_mean, bias_rho; noise (draws, *shape) for weight and bias.

    norms="bound" lets the clipping of several draws use an upper bound of the per-record norm, not the exact one: a
    valid clip, cheaper, and somewhat tighter than asked for, by 0.1 % at rho = -5 and a few % at rho = -3.
    """

    weight_noise: Tensor | None
    bias_noise: Tensor | None
    weight_jacobian: Tensor | None
    bias_jacobian: Tensor | None

    def __init__(self, shape: tuple[int, ...], bias: bool, initial_rho: float, norms: Norms) -> None:
        nn.Module.__init__(self)  # not that of the layer whose place it takes, which would make a weight of its own
        _check_norms(norms)
        self.norms = norms
        self.weight_mean = nn.Parameter(torch.empty(shape))
        self.weight_rho = nn.Parameter(torch.full(shape, float(initial_rho)))
        self.bias_mean = nn.Parameter(torch.empty(shape[0])) if bias else None
        self.bias_rho = nn.Parameter(torch.full(shape[:1], float(initial_rho))) if bias else None
        self.weight_noise = self.bias_noise = self.weight_jacobian = self.bias_jacobian = None
        _reset_mean(self.weight_mean, self.bias_mean)

    def sample_(self, generator: Source = None, draws: int = 1) -> Self:
        _check_draws(draws)
        self.draws = draws
        self.weight_noise = _noise_like(self.weight_mean, draws, generator)
        self.bias_noise = None if self.bias_mean is None else _noise_like(self.bias_mean, draws, generator)
        return self

    def use_mean_(self) -> Self:
        self.draws = 1
        self.weight_noise = torch.zeros_like(self.weight_mean, requires_grad=False).unsqueeze(0)
        if self.bias_mean is not None:
            self.bias_noise = torch.zeros_like(self.bias_mean, requires_grad=False).unsqueeze(0)
        return self

    def drawn(self) -> tuple[Tensor, Tensor | None]:
        """The weights and biases of all draws, (draws, *shape)."""
        if self.weight_noise is None:
            raise RuntimeError(f"{type(self).__name__}: call sample_() before the forward pass, or use_mean_()")
        weight, self.weight_jacobian = _perturbed(self.weight_mean, self.weight_rho, self.weight_noise)
        bias = self.bias_jacobian = None
        if self.bias_mean is not None and self.bias_rho is not None and self.bias_noise is not None:
            bias, self.bias_jacobian = _perturbed(self.bias_mean, self.bias_rho, self.bias_noise)
        return weight, bias

    def _one(self, which: Literal["weight", "bias"]) -> Tensor | None:
        """For code that reads a layer's weight instead of calling it: of the first draw, for all rows."""
        mean: Tensor | None = getattr(self, f"{which}_mean")
        noise: Tensor | None = getattr(self, f"{which}_noise")
        if mean is None or noise is None:
            return mean
        return torch.addcmul(mean, F.softplus(getattr(self, f"{which}_rho")), noise[0])

    @property
    def weight(self) -> Tensor:
        drawn = self._one("weight")
        assert drawn is not None
        return drawn

    @property
    def bias(self) -> Tensor | None:
        return self._one("bias")

    def jacobian(self, which: Literal["weight", "bias"]) -> Tensor:
        """d drawn / d rho = noise * sigmoid(rho) for every draw, as of the last forward pass; handed out once.

        In single precision at least: norms and sums are made of it.
        """
        found: Tensor | None = getattr(self, f"{which}_jacobian")
        setattr(self, f"{which}_jacobian", None)
        if found is None:
            noise: Tensor = getattr(self, f"{which}_noise")
            found = noise * torch.sigmoid(getattr(self, f"{which}_rho"))
        return found.float() if is_half(found.dtype) else found


def _perturbed(mean: Tensor, rho: Tensor, noise: Tensor) -> tuple[Tensor, Tensor | None]:
    """mean + softplus(rho) * noise and, where it comes for nothing, its derivative in rho."""
    if not _OBSERVATION.leaves:
        return torch.addcmul(mean, F.softplus(rho), noise), None
    with torch.no_grad():
        value, derivative = mean_field(mean, rho, noise) or (torch.addcmul(mean, _fast_softplus(rho), noise), None)
    return value.requires_grad_(mean.requires_grad or rho.requires_grad), derivative


def _fast_softplus(values: Tensor) -> Tensor:
    """softplus in half the time of torch's, which differs only in treating values above 20 apart."""
    return F.softplus(values) if bool(values.max() > 20) else values.exp().log1p_()


class MeanFieldLinear(_MeanFieldLayer, nn.Linear):  # type: ignore[misc, override]
    """A linear layer with independent Gaussian weights; rows on axis 0, features last."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        initial_rho: float = -5.0,
        norms: Norms = "exact",
    ) -> None:
        super().__init__((out_features, in_features), bias, initial_rho, norms)
        self.in_features, self.out_features = in_features, out_features

    def forward(self, inputs: Tensor) -> Tensor:
        weight, bias = self.drawn()
        if self.draws == 1:
            return F.linear(inputs, weight[0], None if bias is None else bias[0])
        self._check_rows(inputs)
        rows = inputs.reshape(self.draws, -1, self.in_features)
        if bias is None:
            output = torch.bmm(rows, weight.transpose(1, 2))
        else:
            output = torch.baddbmm(bias.unsqueeze(1), rows, weight.transpose(1, 2))
        return output.view(*inputs.shape[:-1], self.out_features)


class MeanFieldConv2d(_MeanFieldLayer, nn.Conv2d):  # type: ignore[override]
    """A convolution with independent Gaussian weights (zero padding)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        initial_rho: float = -5.0,
        norms: Norms = "exact",
    ) -> None:
        shape = (out_channels, in_channels // groups, *_pair(kernel_size))
        super().__init__(shape, bias, initial_rho, norms)
        _describe(self, in_channels, out_channels, kernel_size, stride, padding, dilation, groups)

    def forward(self, inputs: Tensor) -> Tensor:
        weight, bias = self.drawn()
        self._check_rows(inputs)
        parts = [
            self._convolved(rows, weight[draw], None if bias is None else bias[draw])
            for draw, rows in enumerate(inputs.chunk(self.draws))
        ]
        return parts[0] if self.draws == 1 else torch.cat(parts)

    def _convolved(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(rows, weight, bias, self.stride, self.padding, self.dilation, self.groups)


def _describe(
    layer: nn.Conv2d,
    in_channels: int,
    out_channels: int,
    kernel_size: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> None:
    """What a convolution says of itself."""
    layer.in_channels, layer.out_channels, layer.groups = in_channels, out_channels, groups
    layer.kernel_size, layer.stride = _pair(kernel_size), _pair(stride)
    layer.padding, layer.dilation = _pair(padding), _pair(dilation)
    layer.padding_mode, layer.transposed, layer.output_padding = "zeros", False, (0, 0)


# variational dropout --------------------------------------------------------------------------------------------


class _LocalReparameterisation(BayesianLayer):
    """Parameters weight_mean, weight_log_variance and bias (without a distribution of its own).

    Each row of a batch gets activation noise of its own, drawn in the forward pass, so draws need no storage.
    norms="bound" lets clipping replace the variances of an output by their largest in the norm of the log variances: a
    valid clip without a product of its own, exact while the variances of an output are equal. It is for linear layers;
    the norms of convolutions and of inputs with several positions are exact in any case.
    """

    noise_over_deviation: Tensor | None
    remembered_variance: Tensor | None

    def __init__(self, shape: tuple[int, ...], bias: bool, initial_log_variance: float, norms: Norms) -> None:
        nn.Module.__init__(self)  # not that of the layer whose place it takes
        _check_norms(norms)
        self.norms = norms
        self.weight_mean = nn.Parameter(torch.empty(shape))
        self.weight_log_variance = nn.Parameter(torch.full(shape, float(initial_log_variance)))
        self.bias = nn.Parameter(torch.empty(shape[0])) if bias else None
        self.generator: torch.Generator | None = None
        self.noisy = True
        self.noise_over_deviation = self.remembered_variance = None
        _reset_mean(self.weight_mean, self.bias)

    def sample_(self, generator: Source = None, draws: int = 1) -> Self:
        _check_draws(draws)
        if generator is not None and not isinstance(generator, torch.Generator):
            # activations are drawn in the forward pass: a generator of the layer's own can be copied with it
            seed = int(generator.integers(2**62, 1)[0])
            generator = torch.Generator().manual_seed(seed)
        self.generator, self.draws, self.noisy = generator, draws, True
        return self

    def use_mean_(self) -> Self:
        self.draws, self.noisy = 1, False
        return self

    @property
    def weight(self) -> Tensor:
        """The mean: for code that reads a layer's weight instead of calling it."""
        return self.weight_mean

    def _map(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise AssertionError("linear map or convolution")

    def forward(self, inputs: Tensor) -> Tensor:
        mean = self._map(inputs, self.weight_mean, self.bias)
        if not self.noisy:
            self._remember(torch.zeros_like(mean, requires_grad=False))
            return mean
        variance = self._map(inputs * inputs, self._variance(), None)
        deviation = (variance + SMALLEST_VARIANCE).sqrt()
        noise = normals(mean.shape, self.generator, mean.dtype, mean.device)
        if _OBSERVATION.watching:
            self._remember(noise / deviation.detach())
        return mean + deviation * noise

    def _variance(self) -> Tensor:
        """exp(log variance), remembered for the rule."""
        variance = self.weight_log_variance.exp()
        self.remembered_variance = variance.detach() if _OBSERVATION.watching else None
        return variance

    def variance(self) -> Tensor:
        """The variances of the last forward pass; handed out once."""
        known, self.remembered_variance = self.remembered_variance, None
        return self.weight_log_variance.detach().exp() if known is None else known

    def _remember(self, noise_over_deviation: Tensor) -> None:
        """What a rule needs of the last call: d out / d variance = noise / (2 deviation)."""
        if _OBSERVATION.watching:
            self.noise_over_deviation = noise_over_deviation

    def recall(self) -> Tensor:
        """Hand out what was remembered, and forget it."""
        remembered, self.noise_over_deviation = self.noise_over_deviation, None
        if remembered is None:
            raise RuntimeError(f"{type(self).__name__}: nothing is remembered outside observed()")
        return remembered

    def log_alpha(self) -> Tensor:
        """log(variance / mean^2): large where a weight is mostly noise and can be dropped."""
        return self.weight_log_variance - 2 * self.weight_mean.abs().clamp(min=1e-8).log()


class VariationalDropoutLinear(_LocalReparameterisation, nn.Linear):  # type: ignore[misc, override]
    """A linear layer under variational dropout, additive parametrisation."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        initial_log_variance: float = -8.0,
        norms: Norms = "exact",
    ) -> None:
        super().__init__((out_features, in_features), bias, initial_log_variance, norms)
        self.in_features, self.out_features = in_features, out_features

    def _map(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(inputs, weight, bias)


class VariationalDropoutConv2d(_LocalReparameterisation, nn.Conv2d):  # type: ignore[misc, override]
    """A convolution under variational dropout, additive parametrisation (zero padding)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        initial_log_variance: float = -8.0,
        norms: Norms = "exact",
    ) -> None:
        shape = (out_channels, in_channels // groups, *_pair(kernel_size))
        super().__init__(shape, bias, initial_log_variance, norms)
        _describe(self, in_channels, out_channels, kernel_size, stride, padding, dilation, groups)

    def _map(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(inputs, weight, bias, self.stride, self.padding, self.dilation, self.groups)


# a whole network ------------------------------------------------------------------------------------------------


def bayesian_layers(module: nn.Module) -> list[BayesianLayer]:
    return [layer for layer in module.modules() if isinstance(layer, BayesianLayer)]


def draw_(module: nn.Module, generator: Source = None, draws: int = 1) -> None:
    """Draw new noise in every Bayesian layer of a network, the same number of draws in each."""
    for layer in bayesian_layers(module):
        layer.sample_(generator, draws)


def use_mean_(module: nn.Module) -> None:
    """Put every Bayesian layer of a network at its mean."""
    for layer in bayesian_layers(module):
        layer.use_mean_()


def fold_draws(inputs: Tensor, draws: int) -> Tensor:
    """A batch repeated for every draw: (draws * records, ...)."""
    return inputs if draws == 1 else inputs.repeat(draws, *[1] * (inputs.dim() - 1))


def unfold_draws(outputs: Tensor, draws: int) -> Tensor:
    """(draws * records, ...) as (draws, records, ...)."""
    return outputs.view(draws, -1, *outputs.shape[1:])


def _noise_like(mean: Tensor, draws: int, source: Source) -> Tensor:
    if source is None or isinstance(source, torch.Generator):
        return normals((draws, *mean.shape), source, mean.dtype, mean.device)
    return source.normal_(torch.empty(draws, *mean.shape, dtype=mean.dtype, device=mean.device), 1.0)


def _check_norms(norms: str) -> None:
    if norms not in ("exact", "bound"):
        raise Refusal(f"norms={norms!r}: must be 'exact' or 'bound'")


def _check_draws(draws: Any) -> None:
    if not isinstance(draws, int) or draws < 1:
        raise Refusal(f"draws={draws}: must be a whole number of at least 1")


@torch.no_grad()
def _reset_mean(weight: Tensor, bias: Tensor | None) -> None:
    """Means start where torch starts ordinary weights."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(max(1, weight[0].numel()))
        nn.init.uniform_(bias, -bound, bound)
