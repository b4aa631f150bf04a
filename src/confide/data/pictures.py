"""Features of pictures: a fixed function of one picture at a time, so that it may be applied to private records.

    pixels      scaled from their declared range to [0, 1]
    size        a picture larger than LARGEST pixels is averaged down, one smaller than SMALLEST is enlarged
    channels    their mean, and for colours the contrasts between them: an orthogonal change of axes
    scattering  all coefficients of the mean, those of orders 0 and 1 of the contrasts (`scattering`)
    scale       each group of channels to mean 0 and variance 1 over its coefficients (Wu and He, ECCV 2018)
    tint        order 0 of the contrasts once more as it is: scaled like that, a picture that is red all over has no red
    length      all of them together to one: brightness of a picture is left out, and every record is as long as any
                other, so that none is clipped more than another

No number here was learnt from a picture.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from confide.data.scattering import SMALLEST_VARIANCE, Scattering
from confide.errors import DataError

LARGEST, SMALLEST = 32, 16
"""Pixels of the longer side of what is scattered: coefficients stand for 4 x 4 of them, so that 16 to 64 places
remain. More would grow the number of weights, and with it the noise, faster than what they tell."""
LEAST_SIDE = 4
"""Pixels of a picture's shorter side; fewer are columns of numbers rather than a picture."""
MOST_CHANNELS = 16
"""Convention: an array with more channels holds something else than a picture."""
GROUPS = 27
"""Of the 81 channels of the mean, three each: wavelets that are neighbours in angle."""
FAINTEST = 1e-4
"""Variance of a contrast that is still normalised to 1. Rounding of whole numbers up to 255 leaves 1e-6 in what is
meant to be grey."""
BEND, TINT = 2.0, 3.0
"""Of a tint c, between -1 and 1: it counts as TINT * sin(BEND * c), near a line where most pictures are. Without the
factor it would be far below what scaled coefficients are, and learnt by large budgets alone; see docs/protocols.md."""
LENGTH = 8.0
"""Of the features of every picture: a prior of scale 1 on weights then makes logits of about that size."""
SCALES, ANGLES = 2, 8  # as in Oyallon and Mallat, CVPR 2015
CHUNK = 32
"""Pictures at once: what they need stays in the processor's cache."""


def is_picture(shape: tuple[int, ...] | None) -> bool:
    """Whether records of this shape are pictures: (height, width), or with channels first or last."""
    if shape is None or len(shape) not in (2, 3):
        return False
    channels, height, width = image_shape(shape)
    return min(height, width) >= LEAST_SIDE and channels <= MOST_CHANNELS


def image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(channels, height, width)."""
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    return (shape[2], shape[0], shape[1]) if channels_last(shape) else (shape[0], shape[1], shape[2])


def channels_last(shape: tuple[int, ...]) -> bool:
    """(h, w, 3) as image files have it, against (3, h, w) as networks want it: pictures have few channels."""
    return shape[2] < shape[0]


@lru_cache(maxsize=8)
def features_for(shape: tuple[int, int, int]) -> PictureFeatures:
    """Filters are made once for every shape."""
    return PictureFeatures(*shape)


class PictureFeatures:
    """Features of pictures of one public shape."""

    def __init__(self, channels: int, height: int, width: int) -> None:
        if not is_picture((channels, height, width)):
            raise DataError(
                f"shape={(channels, height, width)}: pictures have at least {LEAST_SIDE} pixels on a side and at most "
                f"{MOST_CHANNELS} channels"
            )
        self.shape = (channels, height, width)
        longer = max(height, width)
        ratio = min(LARGEST / longer, 1.0) if longer >= SMALLEST else SMALLEST / longer
        self.size = (max(1, round(height * ratio)), max(1, round(width * ratio)))
        self.transform = Scattering(self.size, SCALES, ANGLES)

    @property
    def contrast_channels(self) -> int:
        """Coefficients of orders 0 and 1."""
        return 1 + SCALES * ANGLES

    @property
    def count(self) -> int:
        """Numbers of one picture."""
        places: int = math.prod(self.transform.places)
        return places * (self.transform.channels + (self.shape[0] - 1) * (self.contrast_channels + 1))

    @cached_property
    def contrasts(self) -> Tensor:
        """Rows that no grey picture answers to: an orthonormal basis of what sums to zero over the channels."""
        count = self.shape[0]
        rows = torch.zeros(count - 1, count)
        for place in range(1, count):
            rows[place - 1, :place] = 1 / math.sqrt(place * (place + 1))
            rows[place - 1, place] = -place / math.sqrt(place * (place + 1))
        return rows

    @torch.no_grad()
    def __call__(self, pictures: Tensor) -> Tensor:
        """(rows, count) of pictures (rows, channels, height, width) in [0, 1]."""
        out = torch.empty(len(pictures), self.count)
        for start in range(0, len(pictures), CHUNK):
            part = pictures[start : start + CHUNK].float()
            out[start : start + len(part)] = self._of(part)
        return out

    def _of(self, pictures: Tensor) -> Tensor:
        if self.size != self.shape[1:]:
            larger = self.size[0] > self.shape[1] or self.size[1] > self.shape[2]
            options: dict[str, Any] = {"mode": "bilinear", "align_corners": False} if larger else {"mode": "area"}
            pictures = F.interpolate(pictures, size=self.size, **options)
        mean = self.transform(pictures.mean(1, keepdim=True))
        found = [F.group_norm(mean, GROUPS, eps=SMALLEST_VARIANCE).flatten(1)]
        if self.shape[0] > 1:
            off = torch.einsum("kc,nchw->nkhw", self.contrasts, pictures).flatten(0, 1)[:, None]
            coefficients = self.transform(off, orders=1)
            normed = F.group_norm(coefficients, self.contrast_channels, eps=FAINTEST)
            found.append(normed.reshape(len(pictures), -1))
            found.append((TINT * (BEND * coefficients[:, 0]).sin()).reshape(len(pictures), -1))
        features = torch.cat(found, 1)
        scaled: Tensor = features * (LENGTH / features.norm(dim=1, keepdim=True).clamp(min=1e-6))
        return scaled
