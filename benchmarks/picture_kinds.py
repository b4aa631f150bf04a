"""Pictures of many kinds, made up: sizes, channels, classes, noise and shares of classes that differ.

Those of `SETTLE` are for settling defaults; those of `JUDGE` are run when a rule stands. docs/protocols.md says when
each was written. `picture_kind(name, records, seed)` gives whole numbers from 0 to 255, but `floats`, and classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.made_up_images import _box, _plane, _soft

Array = NDArray[Any]
Random = np.random.Generator
BLOCK = 1000
"""Pictures that are drawn at once."""


def picture_kind(name: str, records: int, seed: int) -> tuple[Array, Array]:
    """Pictures and classes, drawn from the seed; what tells classes apart is the same for all seeds of a kind."""
    make, random = KINDS[name], np.random.default_rng((seed, len(name)))
    world = np.random.default_rng(sum(map(ord, name)))
    fixed = world.integers(2**31)
    parts = [
        make(random, np.random.default_rng(fixed), min(BLOCK, records - start)) for start in range(0, records, BLOCK)
    ]
    pictures = np.concatenate([part[0] for part in parts])
    labels = np.concatenate([part[1] for part in parts])
    if name in FLOATS:
        return pictures.astype(np.float32), labels
    return (255 * pictures.clip(0, 1)).round().astype(np.uint8), labels


def _draw(random: Random, count: int, low: float, high: float) -> Any:
    return random.uniform(low, high, (count, 1, 1))


def _field(random: Random, count: int, side: tuple[int, int], slope: Any, along: Any = 0.0, angle: Any = 0.0) -> Any:
    """Random textures of deviation 1: power falls with frequency by the slope, stronger along an angle."""
    down, across = np.meshgrid(np.fft.fftfreq(side[0]), np.fft.fftfreq(side[1]), indexing="ij")
    radius = np.sqrt(down**2 + across**2)
    radius[0, 0] = np.inf
    turned = np.arctan2(down, across) - angle
    power = radius ** (-slope) * np.exp(along * np.cos(2 * turned))
    waves = np.fft.fft2(random.normal(size=(count, *side))) * power
    found = np.fft.ifft2(waves).real
    return found / found.std(axis=(1, 2), keepdims=True)


def clothes(random: Random, world: Random, count: int) -> tuple[Array, Array]:
    """Ten outlines in four families, filled with fabrics; within a family they differ by length, collar or heel."""
    side, label = 28, random.integers(0, 10, count)
    u, v = _plane(random, count, side, 0.05, 0.04, 0.08)
    half = np.abs(u)
    kind = label[:, None, None]
    body_half, hem = _draw(random, count, 0.3, 0.45), _draw(random, count, 0.55, 0.85)
    long_sleeve = np.isin(kind, (1, 2, 3)) | ((kind == 4) & (random.random((count, 1, 1)) < 0.5))
    body = _box(half, v, -1, body_half * (1 + 0.15 * v), -0.75, np.where(kind == 3, hem.clip(0.75), hem - 0.1))
    reach = np.where(long_sleeve, _draw(random, count, 0.25, 0.7), _draw(random, count, -0.4, -0.1))
    sleeve = np.maximum(np.maximum(-0.78 - v, v - reach), np.abs(half - body_half - 0.12 - 0.15 * (v + 0.7)) - 0.13)
    collar = np.maximum(half - 0.16, np.abs(v + 0.75) - np.where(kind == 2, 0.16, 0.06))
    top = np.where(kind == 2, np.minimum(body, sleeve), np.maximum(np.minimum(body, sleeve), -collar))
    legs = np.maximum(_box(half, v, _draw(random, count, 0.03, 0.1), 0.38, -0.85, 0.9), -0.4 - v)
    trousers = np.minimum(legs, _box(half, v, -1, 0.38, -0.85, -0.3))
    gown = np.maximum(half - 0.14 - _draw(random, count, 0.1, 0.35) * (v + 0.8) ** 1.0, np.abs(v) - 0.88)
    sole = _box(u, v, -0.85, 0.82, 0.35, 0.55)
    height = np.where(kind == 8, _draw(random, count, -0.9, -0.4), _draw(random, count, -0.2, 0.15))
    shaft = np.maximum(_box(u, v, -0.85, -0.2, height, 0.4), -1)
    vamp = np.maximum(_box(u, v, -0.85, 0.8, 0.0, 0.4), 0.45 * u - v - _draw(random, count, -0.2, 0.0))
    shoe = np.minimum(np.minimum(sole, vamp), shaft)
    bag = np.minimum(
        _box(u, v, -0.75, 0.75, _draw(random, count, -0.3, 0.0), _draw(random, count, 0.5, 0.75)),
        np.maximum(np.abs(np.hypot(u, v + 0.1) - _draw(random, count, 0.35, 0.55)) - 0.07, v),
    )
    shapes = [np.where(kind < 5, top, np.where(kind == 5, trousers, np.where(kind == 6, gown, shoe)))]
    distance = np.where(kind == 9, bag, shapes[0])
    fabric = _field(random, count, (side, side), 1.0 + random.random((count, 1, 1)))
    light = _draw(random, count, 0.25, 0.95) * (1 + _draw(random, count, 0, 0.3) * fabric)
    seam = 1 - 0.5 * _draw(random, count, 0, 1) * np.exp(-((u / 0.06) ** 2)) * np.isin(kind, (3, 4))
    stripe = np.sin(v * _draw(random, count, 10, 25)) * (random.random((count, 1, 1)) < 0.2)
    return _soft(distance, side) * light * seam * (1 + 0.3 * stripe), label


def discs(random: Random, world: Random, count: int) -> tuple[Array, Array]:
    """Eight classes by the colour of a disc of any place; the ground has any colour, 24 x 24."""
    side, label = 24, random.integers(0, 8, count)
    hues = world.uniform(0.05, 0.95, (8, 3))
    u, v = _plane(random, count, side, 0, 0.45, 0.2)
    inside = _soft(np.hypot(u, v) - 0.35, side)[..., None]
    ground = random.uniform(0, 1, (count, 1, 1, 3)) + 0.15 * _field(random, count, (side, side), 1.5)[..., None]
    disc = hues[label][:, None, None] + 0.08 * random.normal(size=(count, 1, 1, 3))
    return ground + (disc - ground) * inside + 0.05 * random.normal(size=(count, side, side, 3)), label


def letters(random: Random, world: Random, count: int) -> tuple[Array, Array]:
    """Twenty-six signs of three strokes each, written with a shaking hand."""
    side, classes = 28, 26
    label = random.integers(0, classes, count)
    ends = world.uniform(-0.7, 0.7, (classes, 3, 2, 2))[label] + 0.09 * random.normal(size=(count, 3, 2, 2))
    u, v = _plane(random, count, side, 0.2, 0.1, 0.15)
    ink = _draw(random, count, 0.05, 0.11)
    nearest = np.full((count, side, side), np.inf)
    for stroke in range(3):
        (ax, ay), (bx, by) = (ends[:, stroke, place].T[:, :, None, None] for place in (0, 1))
        long = (bx - ax) ** 2 + (by - ay) ** 2 + 1e-6
        part = (((u - ax) * (bx - ax) + (v - ay) * (by - ay)) / long).clip(0, 1)
        nearest = np.minimum(nearest, np.hypot(u - ax - part * (bx - ax), v - ay - part * (by - ay)))
    return _soft(nearest - ink, side) + 0.1 * random.normal(size=u.shape), label


def lesions(random: Random, world: Random, count: int) -> tuple[Array, Array]:
    """Grey scans of 64 x 64: one in eleven has a bright spot with a rim somewhere in the tissue."""
    side, label = 64, (random.random(count) < 1 / 11).astype(int)
    u, v = _plane(random, count, side, 0.3, 0.1, 0.1)
    tissue = 0.35 + 0.08 * _field(random, count, (side, side), 1.6)
    organ = _soft(np.hypot(u * 1.1, v * _draw(random, count, 0.8, 1.3)) - 0.8, side)
    x, y = random.uniform(-0.45, 0.45, (2, count, 1, 1))
    radius = np.hypot(u - x, v - y)
    size = _draw(random, count, 0.1, 0.25)
    spot = _soft(radius - size, side) + 0.5 * np.exp(-(((radius - size) / 0.04) ** 2))
    vessel = np.exp(-((np.sin(3 * u + 2 * v + _draw(random, count, 0, 6)) / 0.15) ** 2))
    pictures = organ * (tissue + 0.12 * vessel + 0.22 * spot * label[:, None, None])
    return pictures + 0.06 * random.normal(size=u.shape), label


def lands(random: Random, world: Random, count: int) -> tuple[Array, Array]:
    """Seven grounds from above, 32 x 32 in colours: spectrum, direction and palette differ, and palettes overlap."""
    side, classes = 32, 7
    label = random.integers(0, classes, count)
    slope, along = world.uniform(0.4, 2.2, classes)[label], world.uniform(0, 2, classes)[label]
    palette = world.uniform(0.25, 0.6, (classes, 3))[label] + 0.08 * random.normal(size=(count, 3))
    tint = world.normal(size=(classes, 3))[label] * 0.08
    texture = _field(
        random, count, (side, side), slope[:, None, None], along[:, None, None], _draw(random, count, 0, 3.1)
    )
    second = _field(random, count, (side, side), 1.2)
    pictures = palette[:, None, None] + texture[..., None] * tint[:, None, None] + 0.05 * second[..., None]
    return pictures + 0.04 * random.normal(size=pictures.shape), label


def bands(random: Random, world: Random, count: int) -> tuple[Array, Array]:
    """Four channels of 20 x 20: five covers with a spectrum of their own, in fields with borders."""
    side, classes = 20, 5
    label = random.integers(0, classes, count)
    spectra = world.uniform(0.1, 0.9, (classes, 4))
    u, _ = _plane(random, count, side, 3.1, 0.3, 0.3)
    own = _soft(np.abs(u) - 0.6 - 0.1 * _field(random, count, (side, side), 1.5), side)[..., None]
    other = spectra[random.integers(0, classes, count)][:, None, None]
    mixed = own * spectra[label][:, None, None] + (1 - own) * other
    shade = _draw(random, count, 0.5, 1.2)[..., None]
    return mixed * shade + 0.12 * random.normal(size=mixed.shape), label


def strips(random: Random, world: Random, count: int) -> tuple[Array, Array]:
    """Strips of 16 x 40: twelve patterns of bars that begin anywhere."""
    label = random.integers(0, 12, count)
    bars = world.normal(size=(12, 3))
    across, down = np.meshgrid(np.arange(40) / 40, np.arange(16) / 16)
    at = across + _draw(random, count, -0.1, 0.1) + 0.1 * _draw(random, count, -1, 1) * down
    waves = sum(
        bars[label, place][:, None, None] * np.sin(6.3 * (place + 2) * at + 0.3 * random.normal(size=(count, 1, 1)))
        for place in range(3)
    )
    return 0.5 + 0.2 * waves + 0.15 * random.normal(size=(count, 16, 40)), label


def blurs(random: Random, world: Random, count: int) -> tuple[Array, Array]:
    """Five filled figures under noise that is four times as strong as they are, 28 x 28."""
    side, label = 28, random.integers(0, 5, count)
    u, v = _plane(random, count, side, 0.3, 0.15, 0.2)
    radius, turn = np.hypot(u, v), np.arctan2(v, u)
    sides = np.array([0, 3, 4, 5, 2])[label][:, None, None]
    body = _soft(radius * (1 + 0.35 * np.cos(sides * turn) * (sides > 0)) - 0.5, side)
    return 0.5 + 0.12 * (body - 0.5) + 0.25 * random.normal(size=u.shape), label


def hundred(random: Random, world: Random, count: int) -> tuple[Array, Array]:
    """A hundred classes of four blobs each, 24 x 24, moved and bent a little."""
    side, label = 24, random.integers(0, 100, count)
    places = world.uniform(-0.7, 0.7, (100, 4, 2))[label] + 0.06 * random.normal(size=(count, 4, 2))
    sizes = world.uniform(0.12, 0.3, (100, 4))[label]
    u, v = _plane(random, count, side, 0.1, 0.06, 0.1)
    total = np.zeros_like(u)
    for blob in range(4):
        x, y = places[:, blob].T[:, :, None, None]
        total += np.exp(-((u - x) ** 2 + (v - y) ** 2) / sizes[:, blob, None, None] ** 2)
    return 0.7 * total + 0.08 * random.normal(size=u.shape), label


def turned(random: Random, world: Random, count: int) -> tuple[Array, Array]:
    """Six signs at every angle, 28 x 28; shares of the classes halve from one to the next."""
    side, shares = 28, 0.5 ** np.arange(6)
    label = random.choice(6, count, p=shares / shares.sum())
    u, v = _plane(random, count, side, 3.14, 0.15, 0.2)
    radius, turn = np.hypot(u, v), np.arctan2(v, u)
    hook = np.minimum(_box(u, v, -0.5, -0.25, -0.6, 0.6), _box(u, v, -0.5, 0.5, 0.35, 0.6))
    tee = np.minimum(_box(u, v, -0.12, 0.12, -0.6, 0.6), _box(u, v, -0.5, 0.5, -0.6, -0.35))
    arc = np.maximum(np.abs(radius - 0.5) - 0.13, -turn)
    cup = np.maximum(np.abs(radius - 0.5) - 0.13, np.abs(turn) - 2.3)
    bars = np.minimum(_box(u, v, -0.5, -0.25, -0.6, 0.6), _box(u, v, 0.1, 0.35, -0.6, 0.6))
    bolt = np.minimum(_box(u + v, v, -0.2, 0.2, -0.6, 0.1), _box(u - v, v, -0.2, 0.2, -0.1, 0.6))
    body = _soft(np.stack([hook, tee, arc, cup, bars, bolt])[label, np.arange(count)], side)
    return _draw(random, count, 0.4, 0.9) * body + 0.1 * random.normal(size=u.shape), label


def signs(random: Random, world: Random, count: int) -> tuple[Array, Array]:
    """Nine figures of 32 x 32 in colours that say nothing, on a ground of any colour."""
    side, label = 32, random.integers(0, 9, count)
    u, v = _plane(random, count, side, 0.3, 0.2, 0.25)
    radius, turn = np.hypot(u, v), np.arctan2(v, u)
    sides, ring = np.array([0, 3, 4, 5, 2, 0, 3, 4, 5])[label][:, None, None], (label >= 5)[:, None, None]
    outline = radius * (1 + 0.3 * np.cos(sides * turn) * (sides > 0)) - 0.5
    body = _soft(np.where(ring, np.abs(outline) - 0.12, outline), side)[..., None]
    ground, front = random.uniform(0, 1, (2, count, 1, 1, 3))
    pictures = ground + (front - ground) * body + 0.08 * _field(random, count, (side, side), 1.3)[..., None]
    return pictures + 0.05 * random.normal(size=pictures.shape), label


def floats(random: Random, world: Random, count: int) -> tuple[Array, Array]:
    """Maps of 12 x 12 with whole and negative numbers, three classes: how a field bends."""
    label = random.integers(0, 3, count)
    u, v = _plane(random, count, 12, 1.5, 0.2, 0.2)
    forms = np.stack([u**2 + v**2, u**2 - v**2, u * v * (u + v)])[label, np.arange(count)]
    return 1.5 * forms * random.choice([-1, 1], (count, 1, 1)) + 0.6 * random.normal(size=u.shape), label


# -- kinds to judge by -------------------------------------------------------------------------------------------------


def contours(random: Random, world: Random, count: int) -> tuple[Array, Array]:
    """Ten outlines that are waves around a middle, two and two alike, filled with fabrics, 30 x 26."""
    label = random.integers(0, 10, count)
    family = world.normal(size=(5, 5))
    waves = family[label // 2] + 0.35 * world.normal(size=(10, 5))[label] + 0.2 * random.normal(size=(count, 5))
    down, across = np.meshgrid(np.linspace(-1, 1, 30), np.linspace(-1, 1, 26), indexing="ij")
    u, v = across + 0.08 * _draw(random, count, -1, 1), down + 0.08 * _draw(random, count, -1, 1)
    turn = np.arctan2(v, u)
    edge = 0.55 + 0.09 * sum(
        waves[:, place, None, None] * np.cos((place + 1) * turn + place * place) for place in range(5)
    )
    fabric = _field(random, count, (30, 26), 0.6 + random.random((count, 1, 1)))
    body = _soft(np.hypot(u, v) - edge, 28) * _draw(random, count, 0.3, 0.9) * (1 + 0.2 * fabric)
    return body + 0.03 * random.normal(size=body.shape), label


def clocks(random: Random, world: Random, count: int) -> tuple[Array, Array]:
    """Twelve positions of a hand beside another that says nothing, 20 x 20."""
    side, label = 20, random.integers(0, 12, count)
    u, v = _plane(random, count, side, 0, 0.1, 0.1)
    pictures = 0.15 * (np.abs(np.hypot(u, v) - 0.85) < 0.08) + 0.1
    hands = (label * np.pi / 6 + 0.12 * random.normal(size=count), random.uniform(0, 6.3, count))
    for angle, length, wide in zip(hands, (0.55, 0.75), (0.09, 0.05), strict=True):
        along = u * np.sin(angle)[:, None, None] - v * np.cos(angle)[:, None, None]
        off = np.abs(u * np.cos(angle)[:, None, None] + v * np.sin(angle)[:, None, None])
        pictures = np.maximum(pictures, 0.9 * _soft(np.maximum(np.maximum(-along, along - length), off - wide), side))
    return pictures + 0.1 * random.normal(size=u.shape), label


def flags(random: Random, world: Random, count: int) -> tuple[Array, Array]:
    """Nine flags of 18 x 30 from the same three colours, which fade and shift; shares of the classes are uneven."""
    shares = np.array([4, 3, 3, 2, 2, 1, 1, 1, 1]) / 18
    label = random.choice(9, count, p=shares)
    colours = world.uniform(0.1, 0.9, (3, 3))
    orders = np.array(
        [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0], [0, 1, 0], [1, 2, 1], [2, 0, 2]]
    )
    down, across = np.meshgrid(np.linspace(0, 3, 18), np.linspace(0, 3, 30), indexing="ij")
    at = across + 0.15 * np.sin(2 * down + _draw(random, count, 0, 6)) + _draw(random, count, -0.2, 0.2)
    stripe = at.clip(0, 2.99).astype(int)
    pictures = colours[np.take_along_axis(orders[label][:, None], stripe.reshape(count, 1, -1), 2)]
    pictures = pictures.reshape(count, 18, 30, 3) * _draw(random, count, 0.4, 1.1)[..., None]
    return pictures + 0.2 * random.normal(size=(count, 1, 1, 3)) + 0.12 * random.normal(size=pictures.shape), label


def bones(random: Random, world: Random, count: int) -> tuple[Array, Array]:
    """Shafts of 48 x 48 at any angle; every third is broken across."""
    side, label = 48, (random.random(count) < 1 / 3).astype(int)
    u, v = _plane(random, count, side, 1.2, 0.2, 0.2)
    bent = u + 0.15 * np.sin(2 * v + _draw(random, count, 0, 6))
    shaft = _soft(np.abs(bent) - _draw(random, count, 0.15, 0.25), side)
    crack = np.exp(-(((v - _draw(random, count, -0.4, 0.4) - bent * _draw(random, count, -1, 1)) / 0.04) ** 2))
    ground = 0.2 + 0.06 * _field(random, count, (side, side), 1.8)
    pictures = ground + shaft * (0.45 - 0.3 * crack * label[:, None, None])
    return pictures + 0.05 * random.normal(size=u.shape), label


def knits(random: Random, world: Random, count: int) -> tuple[Array, Array]:
    """Fifteen weaves of 24 x 40 that differ by the angle and step of two waves."""
    label = random.integers(0, 15, count)
    steps, angles = world.uniform(0.6, 1.6, (15, 2)), world.uniform(0, 3.1, (15, 2))
    down, across = np.meshgrid(np.arange(24), np.arange(40), indexing="ij")
    total = 0.0
    for wave in range(2):
        angle = (angles[label, wave] + 0.15 * random.normal(size=count))[:, None, None]
        step = (steps[label, wave] * np.exp(0.1 * random.normal(size=count)))[:, None, None]
        total = total + np.sin(step * (across * np.cos(angle) + down * np.sin(angle)) + _draw(random, count, 0, 6.3))
    return 0.5 + 0.12 * total + 0.15 * random.normal(size=(count, 24, 40)), label


Kind = Callable[[Random, Random, int], tuple[Array, Array]]
SETTLE: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (clothes, discs, letters, lesions, lands, bands, strips, blurs, hundred, turned, signs, floats)
}
FLOATS = ("floats",)
JUDGE: dict[str, Kind] = {kind.__name__: kind for kind in (contours, clocks, flags, bones, knits)}
KINDS = {**SETTLE, **JUDGE}
