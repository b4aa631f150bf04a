"""The data sets of the papers, encoded by their public facts; and stand-ins for those who have no files.

A stand-in (scikit-learn's embedded digits for MNIST, made-up tables for the others) serves `--quick` only, so that
every paper can be tried without a download. Its rows are labelled: they are not the paper's experiment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide.data import DataSet, catalogue, prepare
from confide.data.columns import Column
from confide.data.embedded import load as load_embedded
from confide.data.preprocessing import Layout
from confide.data.schema import Schema
from confide.data.table import Table
from confide.errors import DataError
from confide.papers.base import Context
from confide.sources.private_data import PrivateData

MADE_UP_RECORDS, MADE_UP_TEST = 2000, 500


@dataclass(frozen=True)
class Set:
    """Encoded records with their public test part.

    scale, centre   a regression target in its own units is centre + scale * y; 1 and 0 for classes
    stand_in        what these records are if they are not the paper's; "" if they are
    """

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    schema: Schema
    scale: float = 1.0
    centre: float = 0.0
    stand_in: str = ""

    @property
    def records(self) -> int:
        """The declared, public number of training records."""
        assert self.schema.records is not None  # `prepare` refuses a schema without it
        return self.schema.records

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"Stand-in: {self.stand_in}.",) if self.stand_in else ()

    def private(self, context: Context, **more: Any) -> PrivateData:
        """The training records behind the boundary."""
        return PrivateData(self.x, self.y, schema=self.schema, name=self.name, seed=context.noise_seed, **more)


def load(name: str, context: Context, *, split: int = 0, layout: Layout = "flat") -> Set:
    """A data set of the catalogue with its official test part or a public split, or its stand-in."""
    if context.data is not None:
        found = catalogue.load(name, context.data)
        return _encoded(name, found if found.test is not None else found.split(split), layout)
    if not context.quick:
        raise DataError("data: missing; the full run reads the papers' data sets from a directory, --data DIR")
    if name == "mnist":
        return _encoded(name, load_embedded("digits"), layout, "scikit-learn's 8 x 8 digits in place of MNIST")
    made_up = _made_up_classes(split) if name == "adult" else _made_up_regression(split)
    return _encoded(name, made_up, layout, f"made-up records in place of {name}")


def _encoded(name: str, found: DataSet, layout: Layout, stand_in: str = "") -> Set:
    prepared = prepare(found, layout=layout)
    if prepared.x_test is None or prepared.y_test is None or prepared.y is None:
        raise DataError(f"data set {name!r}: has no labelled test part")
    encoder = prepared.encoder
    regression = encoder.schema.classes is None
    parts = (prepared.x, prepared.y, prepared.x_test, prepared.y_test)
    x, y, x_test, y_test = (torch.as_tensor(np.ascontiguousarray(part)) for part in parts)
    scale, centre = (encoder.target_scale, encoder.target_centre) if regression else (1.0, 0.0)
    return Set(name, x, y, x_test, y_test, encoder.schema, scale, centre, stand_in)


def _made_up_classes(seed: int) -> DataSet:
    """Two classes, told apart by a linear score of eight features, with overlap."""
    generator = np.random.default_rng(seed)
    x = generator.uniform(-1, 1, (MADE_UP_RECORDS + MADE_UP_TEST, 8))
    score = x @ np.linspace(3, -2, 8) - 0.5
    y = np.where(generator.uniform(size=len(x)) < 1 / (1 + np.exp(-2 * score)), "yes", "no").astype(object)
    schema = Schema(MADE_UP_RECORDS, ("no", "yes"), "answer", columns=_columns(8))
    return _split_table(x, y, "answer", schema)


def _made_up_regression(seed: int) -> DataSet:
    """A smooth function of six features with noise, target in [0, 10]."""
    generator = np.random.default_rng(seed)
    x = generator.uniform(-1, 1, (MADE_UP_RECORDS + MADE_UP_TEST, 6))
    signal = 5 + 2 * np.sin(2 * x[:, 0]) + x[:, 1] - 0.8 * x[:, 2] * x[:, 3]
    y = np.clip(signal + 0.3 * generator.standard_normal(len(x)), 0, 10)
    schema = Schema(MADE_UP_RECORDS, None, "value", target_bounds=(0, 10), columns=_columns(6))
    return _split_table(x, y, "value", schema)


def made_up_like(given: Set, records: int, seed: int) -> Set:
    """A made-up regression set as wide as this one, for trials that cost nothing: smooth, with noise, in [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    features = given.x.shape[1]
    x = 2 * torch.rand(records + MADE_UP_TEST, features, generator=generator, dtype=torch.float64) - 1
    lines = torch.randn(features, 3, generator=generator, dtype=torch.float64) / features**0.5
    bends = x @ lines
    signal = torch.sin(2 * bends[:, 0]) + bends[:, 1] - bends[:, 1] * bends[:, 2]
    noise = 0.3 * signal.std() * torch.randn(len(x), generator=generator, dtype=torch.float64)
    y = ((signal + noise) / 3).clamp(-1, 1).to(given.y.dtype).reshape(-1, *given.y.shape[1:])
    x = x.to(given.x.dtype)
    schema = replace(given.schema, records=records)
    return replace(
        given,
        x=x[:records],
        y=y[:records],
        x_test=x[records:],
        y_test=y[records:],
        schema=schema,
        scale=1.0,
        centre=0.0,
    )


def made_up_classes(widths: Sequence[int], count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Records with columns of these widths, as a set has them encoded, and two classes, for trials that cost nothing.

    A column of several features is one category of so many, some of them rare; a number is spread over its bounds. The
    classes overlap, and are told apart by a linear score.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for width in widths:
        if width == 1:
            parts.append(2 * torch.rand(count, 1, generator=generator) - 1)
            continue
        shares = torch.rand(width, generator=generator).square() + 0.01
        drawn = torch.multinomial(shares, count, replacement=True, generator=generator)
        parts.append(torch.nn.functional.one_hot(drawn, width).float())
    x = torch.cat(parts, 1)
    score = x @ torch.randn(x.shape[1], generator=generator)
    chance = torch.sigmoid(2 * (score - score.mean()) / score.std())
    return x, (torch.rand(count, generator=generator) < chance).long()


def _columns(count: int) -> tuple[Column, ...]:
    return tuple(Column(f"x{place}", bounds=(-1, 1)) for place in range(count))


def _split_table(x: Any, y: Any, target: str, schema: Schema) -> DataSet:
    columns = {f"x{place}": x[:, place] for place in range(x.shape[1])}
    whole = Table(columns, target=target, labels=y)
    train, test = np.arange(MADE_UP_RECORDS), np.arange(MADE_UP_RECORDS, len(x))
    return DataSet("made-up", whole.take(train), whole.take(test), schema)
