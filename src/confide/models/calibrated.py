"""Class probabilities that were set right after a fit; see `workflow/recalibrate`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.models.predictive import ClassPredictive

KEPT = 0.05
"""Of every probability a curve leaves at least so much: of less, counts of records tell too little."""


GAP = 3.0
"""Differences of log odds that a power leaves as they are; about where it moves a slope least, docs/protocols.md."""
LEAST_GAP, MOST_TIMES = 1e-12, 2.0
"""Below the first, a difference counts as this: a power less than 1 has no derivative at 0. And none is made larger
than so many times: of the very surest there are too few records to tell."""


def stretched(logits: Tensor, levels: Tensor, power: float) -> Tensor:
    """Probabilities whose likeliest class is as likely as a power of all log odds against it would make it.

    A power above 1 makes log odds beside the levels larger where they are large and smaller where they are small. What
    is known of a power is known of the likeliest class alone: the others share the rest as before, and it stays the
    likeliest.
    """
    plain = logits.softmax(-1)
    if power == 1:
        return plain
    beside = logits - levels
    gaps = (beside.amax(-1, keepdim=True) - beside).clamp(min=LEAST_GAP)
    powers = (levels - torch.minimum(GAP * (gaps / GAP).pow(power), MOST_TIMES * gaps)).softmax(-1)
    classes = torch.arange(logits.shape[-1], device=logits.device)
    likeliest = plain.argmax(-1, keepdim=True) == classes
    others = plain.masked_fill(likeliest, 0.0)
    others = others / others.sum(-1, keepdim=True).clamp(min=1e-30)
    # 1 less the first would be 0 in single precision where that is nearly sure
    most = 1 / (1 + others.amax(-1, keepdim=True))
    left = torch.minimum(powers.masked_fill(likeliest, 0.0).sum(-1, keepdim=True), most)
    return torch.where(likeliest, 1 - left, left * others)


def within(one: Tensor, added: Tensor) -> Tensor:
    """The probability of class 1 of two with what a curve adds to it."""
    return torch.minimum(torch.maximum(one + added, KEPT * one), 1 - KEPT * (1 - one))


@dataclass(frozen=True)
class Calibrated:
    """With p = (1 - floor) softmax(slope * logits + shifts) + floor / classes, and p_1 + curve for the second of two.

    one_logit   the network has one output, the logit of class 1 of two, as under `Bernoulli`
    power       of several classes: by which they are `stretched` in the place of a softmax
    levels      log shares of the classes, which a power leaves where they are; none are even ones
    floor       share of the records of which nothing is said
    curve       of two classes: log odds slope * logit + shift, going up, and what is added to the probability of class
                1 at each of them; linear in between, constant beyond
    """

    classes: int
    slope: float
    shifts: tuple[float, ...]
    one_logit: bool = False
    floor: float = 0.0
    curve: tuple[tuple[float, float], ...] = ()
    power: float = 1.0
    levels: tuple[float, ...] = ()
    name: ClassVar[str] = "calibrated"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shifts", tuple(self.shifts))  # a file has lists
        object.__setattr__(self, "levels", tuple(self.levels))
        object.__setattr__(self, "curve", tuple((place, added) for place, added in self.curve))
        if len(self.shifts) != self.classes or not all(map(math.isfinite, (self.slope, *self.shifts))):
            raise Refusal(f"shifts={self.shifts}: need one finite number for each of {self.classes} classes")
        if self.slope <= 0 or (self.one_logit and self.classes != 2):
            raise Refusal(
                f"slope={self.slope}, classes={self.classes}: need a slope > 0, and two classes for one logit"
            )
        if not 0 <= self.floor < 1:
            raise Refusal(f"floor={self.floor}: must be at least 0 and less than 1")
        if not (math.isfinite(self.power) and self.power > 0) or (self.power != 1 and self.classes == 2):
            raise Refusal(f"power={self.power}: must be a finite number > 0, and 1 for two classes, which have a curve")
        if self.levels and (len(self.levels) != self.classes or not all(map(math.isfinite, self.levels))):
            raise Refusal(f"levels={self.levels}: need none, or one finite number for each of {self.classes} classes")
        places = [place for place, _ in self.curve]
        if self.curve and (self.classes != 2 or len(places) < 2 or sorted(set(places)) != places):
            raise Refusal(f"curve={self.curve}: needs two classes, and two places or more that go up")
        if not all(math.isfinite(value) for pair in self.curve for value in pair):
            raise Refusal(f"curve={self.curve}: must be finite numbers")

    @property
    def outputs(self) -> int:
        return 1 if self.one_logit else self.classes

    @property
    def curvature(self) -> float:
        return max(1.0, self.slope**2)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        logits = self._logits(output)
        y = y.reshape(len(output), 1).long()
        if self.floor == 0 and not self.curve and self.power == 1:
            return -logits.log_softmax(-1).gather(1, y)[:, 0]
        return -self._probabilities(logits).gather(1, y)[:, 0].log()

    def predictive(self, outputs: Tensor, weights: Tensor) -> ClassPredictive:
        return ClassPredictive(self._probabilities(self._logits(outputs)), weights)

    def _probabilities(self, logits: Tensor) -> Tensor:
        levels = logits.new_tensor(self.levels or (0.0,) * self.classes)
        straight = (1 - self.floor) * stretched(logits, levels, self.power) + self.floor / self.classes
        if not self.curve:
            return straight
        one = straight[..., 1]
        bent = within(one, self._added(logits[..., 1] - logits[..., 0])).to(one.dtype)
        return torch.stack([1 - bent, bent], -1)

    def _added(self, odds: Tensor) -> Tensor:
        odds = odds.to(torch.promote_types(odds.dtype, torch.float32))  # places may be closer than half precision tells
        places, heights = (odds.new_tensor(values) for values in zip(*self.curve, strict=True))
        after = torch.bucketize(odds.contiguous(), places).clamp(1, len(places) - 1)
        low, high = places[after - 1], places[after]
        part = ((odds - low) / (high - low)).clamp(0, 1)
        return heights[after - 1] + part * (heights[after] - heights[after - 1])

    def _logits(self, outputs: Tensor) -> Tensor:
        if self.one_logit:
            if outputs.shape[-1] != 1:
                outputs = outputs[..., None]
            outputs = torch.cat([torch.zeros_like(outputs), outputs], -1)
        return self.slope * outputs + outputs.new_tensor(self.shifts)
