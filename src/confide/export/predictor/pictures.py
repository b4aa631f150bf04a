"""Features of pictures by numpy alone: the wavelet scattering of their mean and of the contrasts of their channels."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

LARGEST, SMALLEST = 32, 16  # pixels of the longer side of what is scattered
GROUPS = 27  # channels of the mean that are normalised together
FAINTEST, SMALLEST_VARIANCE = 1e-4, 1e-10  # of a contrast, and of a group of the mean
BEND, TINT = 2.0, 3.0  # of the contrasts as they are
LENGTH = 8.0  # of the features of every picture
SCALES, ANGLES = 2, 8  # as where the features were made for training
BANDWIDTH, FREQUENCY = 0.8, 3 * math.pi / 4  # of a wavelet at scale 1
ALIASES = 2  # periods of a spectrum to either side that are added up
PICTURES_AT_ONCE = 64  # whose coefficients fit in memory


def picture_features(flat: Any, shape: list[int], last: bool) -> Any:
    """(n, features) of pixels in [-1, 1]; shape: of one picture as declared, last: whether its channels come last."""
    pictures = flat.reshape(-1, *shape)
    if len(shape) == 2:
        pictures = pictures[:, None]
    elif last:
        pictures = np.moveaxis(pictures, -1, 1)
    starts = range(0, len(pictures), PICTURES_AT_ONCE)
    parts = [_features((pictures[start : start + PICTURES_AT_ONCE] + 1.0) / 2.0) for start in starts]
    return np.concatenate(parts or [np.zeros((0, 0))]).astype(np.float32)


def _features(pictures: Any) -> Any:
    channels, height, width = pictures.shape[1:]
    longer = max(height, width)
    ratio = min(LARGEST / longer, 1.0) if longer >= SMALLEST else SMALLEST / longer
    size = tuple(max(1, round(length * ratio)) for length in (height, width))
    if size != (height, width):
        larger = size[0] > height or size[1] > width
        down, across = (_resized(a, b, larger) for a, b in zip((height, width), size, strict=True))
        pictures = down @ pictures @ across.T
    found = [_normed(_scattered(pictures.mean(1), 2), GROUPS, SMALLEST_VARIANCE)]
    tints = []
    for place in range(1, channels):
        row = np.zeros(channels)
        row[:place], row[place] = 1.0, -place
        contrast = np.einsum("c,nchw->nhw", row / math.sqrt(place * (place + 1)), pictures)
        maps = _scattered(contrast, 1)
        found.append(_normed(maps, maps.shape[1], FAINTEST))
        tints.append(TINT * np.sin(BEND * maps[:, 0]).reshape(len(maps), -1))
    together = np.concatenate([*found, *tints], 1)
    return together * (LENGTH / np.maximum(np.linalg.norm(together, axis=1, keepdims=True), 1e-6))


def _resized(before: int, after: int, larger: bool) -> Any:
    """Rows that make one axis longer by straight lines, or shorter by means."""
    rows = np.zeros((after, before))
    for place in range(after):
        if larger:
            where = min(max((place + 0.5) * before / after - 0.5, 0.0), before - 1.0)
            low = int(where)
            rows[place, low] += 1 - (where - low)
            rows[place, min(low + 1, before - 1)] += where - low
        else:
            start, stop = place * before // after, -(-(place + 1) * before // after)
            rows[place, start:stop] = 1.0 / (stop - start)
    return rows


def _normed(maps: Any, groups: int, least: float) -> Any:
    grouped = maps.reshape(len(maps), groups, -1)
    centred = grouped - grouped.mean(2, keepdims=True)
    return (centred / np.sqrt((centred**2).mean(2, keepdims=True) + least)).reshape(len(maps), -1)


def _scattered(maps: Any, orders: int) -> Any:
    """Coefficients (n, channels, places, places) up to an order."""
    rows, columns, filters, averages = _transform(*maps.shape[1:])
    padded = maps[:, rows][:, :, columns]
    found = [_mean(padded[:, None], averages[0])]
    second = []
    spectrum = np.fft.fft2(padded)[:, None]
    for scale in range(SCALES):
        first = _moduli(spectrum, filters[0][scale], scale)
        found.append(_mean(first, averages[scale]))
        for later in range(scale + 1, SCALES if orders > 1 else 0):
            again = _moduli(np.fft.fft2(first), filters[scale][later], later - scale)
            second.append(_mean(again, averages[later]))
    return np.concatenate([*found, *second], 1)


def _mean(maps: Any, axes: tuple[Any, Any]) -> Any:
    return axes[0] @ maps @ axes[1].T


def _moduli(spectra: Any, filters: Any, down: int) -> Any:
    """|map * psi| of every map at all angles, on a grid coarser by 2^down: aliases of the spectrum are averaged."""
    n, maps, height, width = spectra.shape
    product = spectra[:, :, None] * filters
    step = 2**down
    folded = product.reshape(n, maps, ANGLES, step, height // step, step, width // step).mean((3, 5))
    return np.abs(np.fft.ifft2(folded)).reshape(n, maps * ANGLES, height // step, width // step)


@lru_cache(maxsize=4)
def _transform(height: int, width: int) -> tuple[Any, Any, Any, Any]:
    """Mirrored pixels of both axes, the filters of every grid, and the averages of every level."""
    margin = 2**SCALES
    places = [-(-length // margin) for length in (height, width)]
    grid = [margin * count + 2 * margin for count in places]
    mirrored = [_mirrored(length, wide, margin) for length, wide in zip((height, width), grid, strict=True)]
    gain = _gain(grid)
    filters: list[dict[int, Any]] = []
    averages = []
    for level in range(SCALES):
        sides = [length >> level for length in grid]
        filters.append({scale: gain * _wavelets(sides, scale - level) for scale in range(level, SCALES)})
        averages.append(tuple(_average(side, level, count) for side, count in zip(sides, places, strict=True)))
    return *mirrored, filters, averages


def _mirrored(length: int, wide: int, margin: int) -> Any:
    period = max(1, 2 * (length - 1))
    folded = (np.arange(wide) - margin) % period
    return np.where(folded < length, folded, period - folded)


def _average(side: int, level: int, places: int) -> Any:
    kernel = np.fft.ifft(_low_pass(side, SCALES - 1 - level)).real
    centres = (2**SCALES + 2**SCALES * np.arange(places)) >> level
    return kernel[(np.arange(side)[None] - centres[:, None]) % side]


def _periodic(side: int) -> Any:
    """Frequencies of an axis and of its periods: (periods, side)."""
    return 2 * np.pi * (np.fft.fftfreq(side) + np.arange(-ALIASES, ALIASES + 1)[:, None])


def _low_pass(side: int, scale: int) -> Any:
    response = np.exp(-0.5 * (BANDWIDTH * 2.0**scale * _periodic(side)) ** 2).sum(0)
    return response / response[0]


def _wavelets(sides: list[int], scale: int) -> Any:
    rows = _periodic(sides[0])[:, None, :, None]
    columns = _periodic(sides[1])[None, :, None, :]
    waves = []
    for place in range(ANGLES):
        cosine, sine = math.cos(math.pi * place / ANGLES), math.sin(math.pi * place / ANGLES)
        along, across = columns * cosine + rows * sine, (rows * cosine - columns * sine) * max(1.0, ANGLES / 4)
        wave, centre = (_envelope(along - shift, across, scale) for shift in (FREQUENCY / 2**scale, 0.0))
        waves.append(wave - wave[0, 0] / centre[0, 0] * centre)
    return np.stack(waves)


def _envelope(along: Any, across: Any, scale: int) -> Any:
    return np.exp(-0.5 * (BANDWIDTH * 2.0**scale) ** 2 * (along**2 + across**2)).sum((0, 1))


def _gain(grid: list[int]) -> float:
    """The largest factor of the wavelets that lengthens no picture."""
    low = np.outer(*(_low_pass(side, SCALES - 1) for side in grid)) ** 2
    power = sum((_wavelets(grid, scale) ** 2).sum(0) for scale in range(SCALES))
    mirrored = np.roll(power[::-1, ::-1], (1, 1), (0, 1))
    room = np.maximum(1 - low, 0.0) / np.maximum((power + mirrored) / 2, 1e-12)
    room[0, 0] = math.inf  # where the wavelets vanish
    return math.sqrt(float(room.min()))
