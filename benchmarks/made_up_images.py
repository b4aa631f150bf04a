"""Pictures that are made up, to settle defaults of image models on: no data set is read.

garments   silhouettes of ten kinds of clothes with textures, lights and noise; kinds overlap
shapes     ten kinds of outlines and filled figures, of any place, size and turn, in clutter
weaves     six kinds of textures in three channels, of any colour

python -m benchmarks.made_up_images        a sheet of examples, out/made_up_images.png
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
SIDE = 28
FAMILIES = ("garments", "shapes", "weaves")


def made_up_images(family: str, records: int, seed: int, side: int = SIDE) -> tuple[Array, Array]:
    """Pictures of whole numbers from 0 to 255 and their classes, drawn from the seed alone."""
    if family not in FAMILIES:
        raise ValueError(f"family={family!r}: must be one of {', '.join(FAMILIES)}")
    random = np.random.default_rng(seed)
    make = {"garments": _garments, "shapes": _shapes, "weaves": _weaves}[family]
    parts = [make(random, min(2000, records - start), side) for start in range(0, records, 2000)]
    pictures = np.concatenate([part[0] for part in parts])
    return (255 * pictures.clip(0, 1)).astype(np.uint8), np.concatenate([part[1] for part in parts])


def _plane(random: np.random.Generator, count: int, side: int, turn: float, move: float, zoom: float) -> Any:
    """Coordinates in [-1, 1] of every picture, each turned, moved and zoomed a little."""
    axis = (np.arange(side) + 0.5) / side * 2 - 1
    down, across = np.meshgrid(axis, axis, indexing="ij")
    angle = random.uniform(-turn, turn, (count, 1, 1))
    scale = np.exp(random.uniform(-zoom, zoom, (count, 1, 1)))
    away = random.uniform(-move, move, (2, count, 1, 1))
    u = (np.cos(angle) * across + np.sin(angle) * down) * scale + away[0]
    v = (np.cos(angle) * down - np.sin(angle) * across) * scale + away[1]
    return u, v


def _soft(distance: Array, side: int) -> Any:
    """1 inside, where the distance is negative, and 0 outside, over about one pixel."""
    return 1 / (1 + np.exp((distance * side * 1.5).clip(-50, 50)))


def _between(values: Array, low: Any, high: Any) -> Any:
    return np.maximum(low - values, values - high)


def _box(u: Array, v: Array, left: Any, right: Any, top: Any, bottom: Any) -> Any:
    return np.maximum(_between(u, left, right), _between(v, top, bottom))


def _garments(random: np.random.Generator, count: int, side: int) -> tuple[Array, Array]:
    label = random.integers(0, 10, count)
    u, v = _plane(random, count, side, 0.08, 0.06, 0.1)

    def draw(low: float, high: float) -> Array:
        return random.uniform(low, high, (count, 1, 1))

    width, length, sleeve = draw(0.32, 0.48), draw(0.6, 0.8), draw(0.12, 0.2)
    torso = _box(np.abs(u) - 0.06 * v * draw(-1, 1), v, -1, width, -0.75, length)
    slope = (np.abs(u) - width) * draw(0.6, 1.4) - 0.65

    def arms(end: Array) -> Any:
        return np.maximum(
            np.maximum(_between(v - slope, -sleeve, 2.2 * sleeve), _between(v, -0.8, end)), np.abs(u) - 0.92
        )

    short, long = arms(draw(-0.35, -0.1)), arms(draw(0.2, 0.7))
    legs = np.maximum(_box(np.abs(u), v, draw(0.04, 0.1), draw(0.3, 0.42), -0.5, 0.9), -1)
    hips = _box(np.abs(u), v, -1, draw(0.3, 0.4), -0.85, -0.3)
    flare = np.maximum(np.abs(u) - 0.16 - draw(0.12, 0.3) * (v + 0.85), _between(v, -0.85, 0.88))
    sole = _box(u, v, -0.85, 0.8, draw(0.25, 0.4), 0.55)
    upper = np.maximum(-u - 0.85, np.maximum(_between(v, draw(-0.1, 0.2), 0.4), u * 0.9 + v * -0.7 - draw(0.2, 0.5)))
    ankle = _box(u, v, -0.85, draw(-0.35, -0.1), draw(-0.85, -0.55), 0.4)
    straps = np.maximum(_between(np.sin(u * draw(8, 14) + v * 5), 0.2, 2), _box(u, v, -0.7, 0.6, draw(-0.2, 0.2), 0.4))
    bag = _box(u, v, -draw(0.55, 0.85), draw(0.55, 0.85), draw(-0.25, 0.05), draw(0.45, 0.75))
    ring = np.abs(np.sqrt(u**2 + (v + 0.1) ** 2) - draw(0.4, 0.6)) - 0.06
    handle = np.maximum(ring, v)
    kinds = [
        np.minimum(torso, short),  # a shirt with short sleeves
        np.minimum(legs, hips),  # trousers
        np.minimum(torso, long),  # a pullover
        flare,  # a dress
        np.minimum(torso, long),  # a coat: a pullover with an opening
        np.minimum(sole, straps),  # a sandal
        np.where(random.random((count, 1, 1)) < 0.6, np.minimum(torso, long), np.minimum(torso, short)),  # a shirt
        np.minimum(sole, upper),  # a sneaker
        np.minimum(bag, handle),  # a bag
        np.minimum(np.minimum(sole, upper), ankle),  # a boot
    ]
    distance = np.stack(kinds)[label, np.arange(count)]
    body = _soft(distance, side)
    opening = 1 - 0.6 * draw(0, 1) * np.exp(-((u / 0.05) ** 2)) * np.isin(label, (4, 6))[:, None, None]
    buttons = 1 + 0.4 * draw(0, 1) * np.exp(-((u / 0.06) ** 2)) * np.cos(v * 22) * (label == 6)[:, None, None]
    wave = np.sin(u * draw(-16, 16) + v * draw(-16, 16) + draw(0, 6))
    texture = 1 + draw(0, 0.35) * wave * (random.random((count, 1, 1)) < 0.5)
    light = draw(0.3, 0.95) * (1 + 0.25 * draw(-1, 1) * u + 0.25 * draw(-1, 1) * v)
    noise = 0.05 * random.normal(size=body.shape) * body
    return body * light * texture * opening * buttons + noise, label


def _shapes(random: np.random.Generator, count: int, side: int) -> tuple[Array, Array]:
    label = random.integers(0, 10, count)
    u, v = _plane(random, count, side, 0.5, 0.25, 0.25)

    def draw(low: float, high: float) -> Array:
        return random.uniform(low, high, (count, 1, 1))

    size, flat = draw(0.4, 0.6), draw(0.75, 1.3)
    radius = np.sqrt((u * flat) ** 2 + (v / flat) ** 2)
    box = np.maximum(np.abs(u * flat), np.abs(v / flat))
    triangle = np.maximum(np.abs(u) * 1.7 + v, -v) * 0.8
    cross = np.minimum(np.maximum(np.abs(u), 3 * np.abs(v)), np.maximum(np.abs(v), 3 * np.abs(u)))
    star = radius * (1 + 0.4 * np.cos(5 * np.arctan2(v, u)))
    line = draw(0.06, 0.12)
    full = [radius, box, triangle, cross, star]
    kinds = [*(value - size for value in full), *(np.abs(value - size) - line for value in full)]
    body = _soft(np.stack(kinds)[label, np.arange(count)], side)
    clutter = np.zeros_like(body)
    for _ in range(3):
        a, b = _plane(random, count, side, 3.1, 0.8, 0.3)
        clutter = np.maximum(clutter, _soft(np.maximum(np.abs(a) - 0.05, np.abs(b) - 0.3), side))
    ground = draw(0, 0.4) * (1 + 0.5 * draw(-1, 1) * u)
    pictures = ground + (draw(0.5, 0.9) - ground) * body + 0.5 * draw(0, 1) * clutter * (1 - body)
    return pictures + 0.08 * random.normal(size=body.shape), label


def _weaves(random: np.random.Generator, count: int, side: int) -> tuple[Array, Array]:
    label = random.integers(0, 6, count)
    u, v = _plane(random, count, side, 0.2, 0.5, 0.3)
    phase = random.uniform(0, 6.3, (2, count, 1, 1))
    one, two = np.sin(14 * u + phase[0]), np.sin(14 * v + phase[1])
    dots = np.maximum(one, 0) * np.maximum(two, 0) * 2 - 1
    kinds = [one, two, np.sin(10 * (u + v) + phase[0]), one * two, dots, np.sin(14 * np.sqrt(u**2 + v**2) + phase[0])]
    pattern = np.stack(kinds)[label, np.arange(count)][..., None]
    back, front = random.uniform(0, 1, (2, count, 1, 1, 3))
    pictures = back + (front - back) * (pattern + 1) / 2
    return pictures + 0.1 * random.normal(size=pictures.shape), label


def main() -> None:
    from pathlib import Path

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9))
    places = iter(figure.subplots(9, 10).flat)
    for family in FAMILIES:
        pictures, labels = made_up_images(family, 600, seed=1)
        for draw in range(3):
            for kind in range(10):
                axes = next(places)
                axes.set_axis_off()
                if kind in labels:
                    axes.imshow(pictures[labels == kind][draw], cmap="gray", vmin=0, vmax=255)
    Path("out").mkdir(exist_ok=True)
    figure.savefig("out/made_up_images.png", dpi=70)
    print("out/made_up_images.png")


if __name__ == "__main__":
    main()
