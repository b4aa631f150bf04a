"""How much of a network's outputs is believed: as much as the same steps do not make of targets that are noise.

A network that has nothing to learn does not stay at zero: it follows the records' own chance and the noise of its
steps, the more the larger the budget is, and its outputs do harm. How far it goes is no secret. The same descent, with
made-up inputs on the released scale and noise of the released deviation as targets, shows it without a record. With V
the variance of the learnt network's outputs over made-up inputs, and V_0 that after descents on noise,

    share = V / V_0 - 1, between 0 and 1

of its outputs is believed: nothing where it varies no more than noise would make it, all from twice as much on. V / V_0
of noise itself scatters by a third about 1; where columns say something together it is 5 to 50, and there a share
below 1 would do harm, since steps do not get to the end of what they learn. Post-processing: it costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from confide.models.additive import TAIL_ROOM

NULLS = 3
"""Descents on noise: V_0 is then known to a fifth."""
MOST_RECORDS = 20_000
"""That are made up; with more of them chance matters less, which is then overstated."""

Layers = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class MadeUpDescent:
    """One hidden layer of rectified units, Adam, averaged last positions: what `Tabular` does to its network.

    start       first weights: of the hidden layer, its constants, of the output, its constant
    centres     of the inputs: of waves of numbers, or shares of categories;  numbers: how many come first
    used        which inputs the network sees at all
    unit, gain  of its outputs, and what residuals are divided by before they are asked
    deviation   of what effects leave
    """

    start: Layers
    centres: Tensor
    numbers: int
    used: Tensor
    unit: float
    gain: float
    deviation: float
    records: int
    sampling: float
    steps: int
    averaged: int
    rate: float
    clip: float
    noise: float

    def inputs(self, generator: torch.Generator) -> Tensor:
        """Of as many records, columns by themselves: numbers on the scale with room for tails, and categories."""
        count = min(self.records, MOST_RECORDS)
        place = torch.randn(count, self.numbers, generator=generator) * math.sqrt(TAIL_ROOM)
        waves = torch.cos(torch.pi * torch.special.ndtr(place))
        shares = self.centres[self.numbers :]
        present = (torch.rand(count, len(shares), generator=generator) < shares).float()
        return (torch.cat([waves, present], 1) - self.centres) * self.used

    def outputs(self, layers: Layers, z: Tensor) -> Tensor:
        hidden, constants, last, constant = layers
        outputs: Tensor = self.unit * ((z @ hidden.mT + constants).relu() @ last[0] + constant)
        return outputs

    def on_noise(self, seed: int) -> float:
        """Variance of the outputs that a descent on noise comes to."""
        generator = torch.Generator().manual_seed(seed)
        z = self.inputs(generator)
        y = self.deviation * torch.randn(len(z), generator=generator)
        layers = [layer.clone() for layer in self.start]
        first, second, mean = ([torch.zeros_like(layer) for layer in layers] for _ in range(3))
        batch = self.sampling * self.records
        for step in range(1, self.steps + 1):
            taken = torch.rand(len(z), generator=generator) < self.sampling
            for place, gradient in enumerate(self._gradients(layers, z[taken], y[taken])):
                # Fewer made-up records than there are stand for all of them.
                whole = gradient * (self.records / len(z))
                noisy = (whole + self.noise * torch.randn(whole.shape, generator=generator)) / batch
                first[place].mul_(0.9).add_(noisy, alpha=0.1)
                second[place].mul_(0.999).addcmul_(noisy, noisy, value=0.001)
                length = (second[place] / (1 - 0.999**step)).sqrt_().add_(1e-8)
                layers[place].sub_(first[place] / (1 - 0.9**step) / length, alpha=self.rate)
                if step > self.steps - self.averaged:
                    mean[place].add_(layers[place], alpha=1 / self.averaged)
        return float(self.outputs((mean[0], mean[1], mean[2], mean[3]), z).var())

    def _gradients(self, layers: list[Tensor], z: Tensor, y: Tensor) -> Layers:
        """Sums of clipped gradients."""
        hidden, constants, last, constant = layers
        inside = (z @ hidden.mT + constants).relu()
        residual = (self.unit * (inside @ last[0] + constant) - y) * (self.unit / self.gain)
        through = (inside > 0).float() * last
        square = inside.square().sum(1) + 1 + through.square().sum(1) * (z.square().sum(1) + 1)
        residual = residual * (self.clip / (residual.abs() * square.sqrt()).clamp(min=1e-12)).clamp(max=1)
        back = through * residual[:, None]
        return back.mT @ z, back.sum(0), (residual @ inside)[None], residual.sum()[None]


def believed_share(descent: MadeUpDescent, learnt: Layers) -> float:
    """Of the outputs of a network that was learnt, between 0 and 1."""
    own = float(descent.outputs(learnt, descent.inputs(torch.Generator().manual_seed(NULLS))).var())
    nothing = sum(descent.on_noise(seed) for seed in range(NULLS)) / NULLS
    return min(max(own / max(nothing, 1e-30) - 1, 0.0), 1.0)
