"""Made-up tables, on which defaults are settled (docs/protocols.md): public facts are declared, the truth is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from confide.data.schema import Column, Schema

Array = Any
TEST = 4000


@dataclass(frozen=True)
class MadeUp:
    """x and y of the private part, then of the public one. Columns of categories hold their numbers."""

    schema: Schema
    x: Array
    y: Array
    x_test: Array
    y_test: Array


def _split(columns: list[Column], x: Array, y: Array, records: int, **target: Any) -> MadeUp:
    schema = Schema(records=records, columns=columns, **target)
    return MadeUp(schema, x[:records], y[:records], x[records:], y[records:])


def _numbers(count: int, low: float = -1.0, high: float = 1.0) -> list[Column]:
    return [Column(f"x{place}", bounds=(low, high)) for place in range(count)]


def _drawn(logits: Array, random: np.random.Generator) -> Array:
    return (random.random(len(logits)) < 1 / (1 + np.exp(-logits))).astype(int)


def waves(random: np.random.Generator, records: int = 5000) -> MadeUp:
    x = random.uniform(-1, 1, (records + TEST, 8))
    logits = 2 * np.sin(3 * x[:, 0]) + 2 * (x[:, 1] > 0.2) - 1 + 1.5 * x[:, 2] + np.cos(6 * x[:, 3]) + x[:, 4] ** 2
    return _split(_numbers(8), x, _drawn(logits, random), records, classes=2)


def mixed(random: np.random.Generator, records: int = 20_000) -> MadeUp:
    total, widths = records + TEST, (4, 5, 6, 8, 10, 12)
    x = random.beta(2, 5, (total, 6))
    logits = -2 + 3 * x[:, 0] + 2 * np.sin(5 * x[:, 1]) + 2 * x[:, 2]
    columns = _numbers(6, 0.0, 1.0)
    for place, width in enumerate(widths):
        shares = random.dirichlet(np.full(width, 0.7))
        chosen = random.choice(width, total, p=shares)
        logits += random.normal(0, 0.7, width)[chosen]
        x = np.column_stack([x, chosen])
        columns.append(Column(f"c{place}", categories=tuple(range(width))))
    return _split(columns, x, _drawn(logits, random), records, classes=2)


def tails(random: np.random.Generator, records: int = 5000) -> MadeUp:
    z = random.normal(size=(records + TEST, 6))
    logits = 2 * z[:, 0] - 1.5 * z[:, 1] + np.abs(z[:, 2])
    return _split(_numbers(6, 0.0, 100.0), np.exp(z), _drawn(logits, random), records, classes=2)


def rare(random: np.random.Generator, records: int = 10_000) -> MadeUp:
    x = random.uniform(-1, 1, (records + TEST, 10))
    return _split(_numbers(10), x, _drawn(-4.5 + 2 * x[:, 0] + 3 * x[:, 1] ** 2, random), records, classes=2)


def alike(random: np.random.Generator, records: int = 5000) -> MadeUp:
    common = random.normal(size=(records + TEST, 1))
    z = np.sqrt(0.8) * common + np.sqrt(0.2) * random.normal(size=(records + TEST, 12))
    logits = 2 * z[:, 0] - z[:, 1] + z[:, 2] ** 2 - 1
    return _split(_numbers(12, -5.0, 5.0), z, _drawn(logits, random), records, classes=2)


def three(random: np.random.Generator, records: int = 5000) -> MadeUp:
    x = random.uniform(-1, 1, (records + TEST, 8))
    scores = np.column_stack([3 * x[:, 0], 3 * np.sin(3 * x[:, 1]), 2 * x[:, 2] ** 2 + x[:, 3]])
    y = (scores + random.gumbel(size=scores.shape)).argmax(1)
    return _split(_numbers(8), x, y, records, classes=3)


def curve(random: np.random.Generator, records: int = 5000) -> MadeUp:
    x = random.uniform(-1, 1, (records + TEST, 8))
    y = 5 * np.sin(3 * x[:, 0]) + 4 * x[:, 1] ** 2 + 3 * np.abs(x[:, 2]) + 2 * x[:, 3] + np.exp(x[:, 4])
    return _split(_numbers(8), x, y + random.normal(size=len(y)), records, target_bounds=(-10, 20))


def crossed(random: np.random.Generator, records: int = 5000) -> MadeUp:
    x = random.uniform(0, 1, (records + TEST, 5))
    y = 6 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 8 * (x[:, 2] - 0.5) ** 2 + 4 * x[:, 3]
    return _split(_numbers(5, 0.0, 1.0), x, y + random.normal(0, 0.5, len(y)), records, target_bounds=(-5, 20))


def sparse(random: np.random.Generator, records: int = 5000) -> MadeUp:
    total = records + TEST
    x = random.exponential(1.0, (total, 500)) * (random.random((total, 500)) < 0.05)
    logits = -0.5 + x[:, :10] @ random.normal(0, 3, 10)
    return _split(_numbers(500, 0.0, 10.0), x, _drawn(logits, random), records, classes=2)


TABLES: dict[str, Callable[[np.random.Generator], MadeUp]] = {
    made.__name__: made for made in (waves, mixed, tails, rare, alike, three, curve, crossed, sparse)
}
