"""Dropout whose noise is drawn once per step and shared by all records.

A query must be pure in the record: with one mask per row of a batch, taking a record out would hand its neighbours
other masks. Here the noise of a step is fixed by a seed that `sample_` draws, whatever records follow, and every
record meets the same noise. Each record's expected gradient is the same as with noise of its own. Several draws per
step (see `bayesian.draw_`) make up for the shared noise, averaged before clipping.

    SharedDropout       masks on activations (Srivastava et al., JMLR 2014)
    SharedNoiseLinear   variational dropout with local reparameterisation (Kingma et al., NeurIPS 2015;
    SharedNoiseConv2d   Molchanov et al., ICML 2017): activations are drawn instead of weights
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from confide.devices import HOST
from confide.errors import Refusal
from confide.layers.bayesian import (
    SMALLEST_VARIANCE,
    BayesianLayer,
    Source,
    VariationalDropoutConv2d,
    VariationalDropoutLinear,
)

_SEEDS = 2**62  # the seed of a stream is an int64


def new_seed(source: Source) -> int:
    """A seed from a generator or noise stream."""
    if source is None or isinstance(source, torch.Generator):
        return int(torch.randint(_SEEDS, (), generator=source))
    return int(source.integers(_SEEDS, 1)[0])


class SharedDropout(BayesianLayer, nn.Dropout):
    """Zero each activation with probability `rate` and scale the others by 1 / (1 - rate), in training and after.

    channels=True drops whole channels, (rows, channels, ...) in one piece, as Dropout2d does. A model that reads `p`,
    to drop something by itself, finds the rate there.
    """

    def __init__(self, rate: float, channels: bool = False) -> None:
        if not 0 <= rate < 1:
            raise Refusal(f"rate={rate}: must be in [0, 1)")
        super().__init__(float(rate))
        self.rate, self.channels = float(rate), channels
        self.seed: int | None = 0

    def sample_(self, generator: Source = None, draws: int = 1) -> Self:
        self.draws, self.seed = draws, new_seed(generator)
        return self

    def use_mean_(self) -> Self:
        self.draws, self.seed = 1, None
        return self

    def mask(self, shape: torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
        """The masks of all draws for activations of that shape (without rows): (draws, *shape)."""
        if self.seed is None:
            return torch.ones(1, *shape, dtype=dtype, device=HOST)
        if self.channels:
            shape = torch.Size([shape[0], *[1] * (len(shape) - 1)])
        generator = torch.Generator().manual_seed(self.seed)
        numbers = torch.rand((self.draws, *shape), generator=generator, dtype=torch.float32, device=HOST)
        return (numbers >= self.rate).to(dtype).div_(1 - self.rate)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.seed is None or self.rate == 0:
            return inputs
        mask = self.mask(inputs.shape[1:], inputs.dtype).to(inputs.device)
        if self.draws == 1:
            return inputs * mask
        self._check_rows(inputs)
        rows = inputs.view(self.draws, -1, *inputs.shape[1:])
        return (rows * mask.unsqueeze(1)).view(inputs.shape)

    def extra_repr(self) -> str:
        return f"rate={self.rate}" + (", channels=True" if self.channels else "")


class _SharedNoise:
    """Local reparameterisation with one vector of activation noise per draw in place of one per row.

    tied   of a linear layer: all weights have one variance, which is not learnt; then all outputs have, and no product
           is needed
    """

    seed: int = 0
    tied: bool = False

    def sample_(self, generator: Source = None, draws: int = 1) -> Self:
        super().sample_(None, draws)  # type: ignore[misc]
        self.seed = new_seed(generator)
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        layer: VariationalDropoutLinear = self  # type: ignore[assignment]
        mean = layer._map(inputs, layer.weight_mean, layer.bias)
        if not layer.noisy:
            layer._remember(torch.zeros_like(mean, requires_grad=False))
            return mean
        deviation = (self._variance_of(inputs) + SMALLEST_VARIANCE).sqrt()
        noise = self._noise(mean)
        layer._remember(noise / deviation.detach())
        return mean + deviation * noise

    def _variance_of(self, inputs: Tensor) -> Tensor:
        """Of the activations, in a shape that goes with theirs."""
        layer: VariationalDropoutLinear = self  # type: ignore[assignment]
        if self.tied:
            return inputs.square().sum(-1, keepdim=True) * layer.weight_log_variance.flatten()[0].exp()
        return layer._map(inputs * inputs, layer._variance(), None)

    def _noise(self, mean: Tensor) -> Tensor:
        layer: VariationalDropoutLinear = self  # type: ignore[assignment]
        layer._check_rows(mean)
        generator = torch.Generator().manual_seed(self.seed)
        one = torch.randn((layer.draws, 1, *mean.shape[1:]), generator=generator, dtype=mean.dtype, device=HOST)
        rows = one.expand(-1, len(mean) // layer.draws, *mean.shape[1:])
        return rows.reshape(mean.shape).to(mean.device)


class SharedNoiseLinear(_SharedNoise, VariationalDropoutLinear):  # type: ignore[misc, override]
    """A linear layer under variational dropout; see VariationalDropoutLinear."""


class SharedNoiseConv2d(_SharedNoise, VariationalDropoutConv2d):  # type: ignore[misc, override]
    """A convolution under variational dropout; see VariationalDropoutConv2d."""


_MASKS: dict[type[nn.Module], bool] = {
    nn.Dropout: False,
    nn.Dropout1d: True,
    nn.Dropout2d: True,
    nn.Dropout3d: True,
}


def shared_dropout(layer: nn.Module) -> SharedDropout | None:
    """The shared form of one of torch's dropout layers; None for any other layer."""
    channels = _MASKS.get(type(layer))
    if channels is None:
        return None
    rate = float(getattr(layer, "p"))  # noqa: B009
    if rate >= 1:
        raise Refusal(f"p={rate}: a dropout layer that drops everything lets nothing be learnt; use a rate below 1")
    return SharedDropout(rate, channels)
