"""Encoder: from raw records to float32 inputs in [-1, 1], by public facts alone.

Each record is transformed by itself, with nothing that was computed from other records:

    number      clamped to the declared bounds, then z = (x - middle) / half-width, in [-1, 1]
    category    one input of 0 or 1 for each declared category; a value that is not declared is all zeros
    date, hash  a part of the date, or the bucket of a public hash, is the number or the category (`views`)
    missing     NaN, infinities and the usual marks ("", "?", "NA", ...), by the column's declared policy; text in a
                column of numbers is missing too
    label       its position among the declared classes; one that is not declared is -1, for which the
                boundary answers zero
    target      a regression target is clamped and scaled like a number, and scaled back for predictions; counts and
                times are clamped alone (scaling="plain")

An Encoder is built from a Schema and never from data: the same transformation serves new records later. Records to
predict are refused where a cell has no input. Private records are not (`training`): whether a run exists would tell of
one of them. A record with such a cell has inputs that are not numbers, and the boundary answers zero for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from confide.data.columns import Bounds, Column, Missing
from confide.data.labels import Label, class_positions, positions
from confide.data.pictures import channels_last, features_for, image_shape
from confide.data.schema import Schema, Task
from confide.data.table import Array, DataSet, Table, as_numbers, listed, plain_column, quoted
from confide.data.trees import checked, from_named_arrays, tree_of
from confide.errors import DataError

Layout: TypeAlias = Literal["flat", "image", "features"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
Scaling: TypeAlias = Literal["unit", "plain"]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
_CHUNK = 1 << 22  # numbers converted at once, so that float64 copies of large image sets stay small
NOTHING = "nothing can be learnt, and the fit would cost the same"
_MISSING, _UNKNOWN = -2, -1  # no place in a list: categories are counted from 0


@dataclass(frozen=True)
class Encoder:
    """The public transformation of records.

    layout "image" gives (n, channels, height, width), and "features" what `pictures` makes of these: (n, features).

    A target of numbers is scaled to [-1, 1], or with scaling="plain" left in its units, as counts and times must be.
    """

    schema: Schema
    layout: Layout = "flat"
    scaling: Scaling = "unit"

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise DataError(f"scaling={self.scaling!r}: must be one of {', '.join(SCALINGS)}")
        if self.layout not in LAYOUTS:
            raise DataError(f"layout={self.layout!r}: must be one of {', '.join(LAYOUTS)}")
        schema = self.schema
        for position, column in enumerate(schema.columns):
            if column.kind == "categorical" and not column.categories:
                raise DataError(
                    f"column {quoted(column.name)}: no categories declared; list them, or assume them public"
                )
            if column.kind == "numeric" and schema.bounds_of(position, column) is None:
                raise DataError(f"column {quoted(column.name)}: no bounds declared; give them, or assume them public")
        if not (schema.columns or schema.inputs) and schema.bounds is None:
            raise DataError(
                "bounds: neither columns nor bounds declared; give bounds=(low, high), or assume them public"
            )
        if not schema.columns and schema.missing == "category":
            raise DataError('missing="category": plain arrays have no room for it; use "middle" or "refuse"')
        if self.layout != "flat" and (schema.shape is None or len(schema.shape) not in (2, 3)):
            raise DataError(
                f'layout="{self.layout}": needs shape=(height, width) or with channels, not shape={schema.shape}'
            )

    @property
    def output_shape(self) -> tuple[int, ...] | None:
        """The shape of one encoded record; None for plain arrays of undeclared width."""
        if self.layout == "image" and self.schema.shape is not None:
            return image_shape(self.schema.shape)
        if self.layout == "features" and self.schema.shape is not None:
            return (features_for(image_shape(self.schema.shape)).count,)
        return None if self.schema.features is None else (self.schema.features,)

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """One name per input: "age", "workclass=Private", "workclass is missing"; None for plain arrays."""
        if not self.schema.columns:
            return None
        return tuple(name for column in self.schema.columns for name in _input_names(column))

    def encode(self, records: Table | Array, labels: Any | None = None) -> tuple[Array, Array | None]:
        """Inputs and targets of a table, or of a plain array and its labels; no labels, no targets."""
        table = records if isinstance(records, Table) else Table.from_arrays(records, labels)
        return self.features(table), None if table.labels is None else self.targets(table.labels)

    def training(self, table: Table) -> tuple[Array, Array]:
        """Inputs and targets of private records: no cell is refused, and one that has no input is NaN."""
        if table.labels is None:
            raise DataError(
                "target: the data has no target; name the column that is to be predicted, or save labels beside the "
                "arrays of an npz file, as y_train"
            )
        return self.private_features(table), self._targets(table.labels, private=True)

    def private_features(self, table: Table) -> Any:
        """Inputs of private records that have no target: no cell is refused, and one that has no input is NaN."""
        return self._features(table, private=True)

    def features(self, records: Table | Array) -> Any:
        """The inputs of every record, float32 in [-1, 1]: (n, features), or images; a tree of tensors as it is."""
        return self._features(records if isinstance(records, Table) else Table.from_arrays(records), private=False)

    def _features(self, table: Table, private: bool) -> Any:
        if self.schema.inputs:  # for a network of one's own: bounds and vocabularies are the boundary's to check
            return from_named_arrays(table.inputs)
        if self.schema.columns:
            return self._named(table, private)
        return self._block(table.block if table.block is not None else _stacked(table, self.schema, private), private)

    def _named(self, table: Table, private: bool) -> Array:
        columns = self.schema.columns
        if table.block is not None:
            return self._named(self._name_block(table.block), private)
        absent = [column.raw for column in columns if column.raw not in table.columns]
        if absent:
            raise DataError(
                f"columns: {listed(absent)} not among the {len(table.columns)} of the data; check its header"
            )
        result = np.zeros((table.rows, sum(column.width for column in columns)), dtype=np.float32)
        start = 0
        for position, column in enumerate(columns):
            part = result[:, start : start + column.width]
            start += column.width
            values = column.view(table.columns[column.raw])
            if column.kind == "categorical":
                _fill_categories(part, values, column, private)
            else:
                bounds = self.schema.bounds_of(position, column)
                assert bounds is not None  # checked when the encoder was made
                _fill_numbers(part, values, column, bounds, private)
        return result

    def _name_block(self, block: Array) -> Table:
        """A plain two-dimensional array stands for the declared columns in their order."""
        columns = self.schema.columns
        if block.ndim != 2 or block.shape[1] != len(columns):
            raise DataError(f"x: has shape (n, *{block.shape[1:]}); the schema declares {len(columns)} columns")
        return Table({column.name: block[:, place] for place, column in enumerate(columns)})

    def _block(self, block: Array, private: bool) -> Array:
        flat = block.reshape(len(block), -1) if block.size else np.zeros((len(block), 0))
        low, high = self._block_bounds(flat.shape[1])
        shape = self.output_shape if self.layout == "features" else None
        result = np.empty(flat.shape if shape is None else (len(flat), *shape), dtype=np.float32)
        rows = max(1, _CHUNK // max(1, flat.shape[1]))
        for start in range(0, len(flat), rows):
            values = as_numbers(flat[start : start + rows], "x")
            part = result[start : start + rows] if shape is None else np.empty(values.shape, dtype=np.float32)
            refused = _scale(values, low, high, part, self.schema.missing)
            if refused.any() and not private:
                raise _refusal(f"feature {int(np.argmax(refused.any(axis=0)))}")
            if shape is not None:
                result[start : start + rows] = self._picture_features(part)
        if self.layout == "image" and self.schema.shape is not None:
            return _as_images(result, self.schema.shape)
        return result

    def _picture_features(self, flat: Array) -> Array:
        """Of pixels in [-1, 1]; a picture with a pixel that is no number has features that are none."""
        assert self.schema.shape is not None  # checked when the encoder was made
        pictures = torch.from_numpy(_as_images(flat, self.schema.shape)).add(1).div(2)
        found: Array = features_for(image_shape(self.schema.shape))(pictures).numpy()
        return found

    def _block_bounds(self, width: int) -> tuple[Array, Array]:
        expected = self.schema.features
        if width == 0 or (expected is not None and width != expected):
            raise DataError(f"x: has {width} features per record; the schema declares {expected or 'at least one'}")
        if expected is None:
            pairs = np.array([self.schema.bounds_of(0)] * width)
        else:
            pairs = np.array([self.schema.bounds_of(position) for position in range(width)])
        return pairs[:, 0], pairs[:, 1]

    def targets(self, labels: Any) -> Array:
        """Class positions as int64 (-1 for a label not declared), or scaled regression targets as float32."""
        return self._targets(labels, private=False)

    def _targets(self, labels: Any, private: bool) -> Array:
        values = np.asarray(labels)
        if values.ndim == 2 and (self.schema.targets or self.schema.observed):
            return self._several(values, private)
        values = plain_column(values, self._target_name)
        if values.ndim != 1:
            raise DataError(f"target {quoted(self._target_name)}: must be one-dimensional, one value per record")
        if self.schema.classes is not None:
            return class_positions(values, self.schema.classes)
        low, high = self._target_bounds
        result = np.empty(len(values), dtype=np.float32)
        numbers = as_numbers(values, f"target {quoted(self._target_name)}", private=private)
        if _scale(numbers, low, high, result, "refuse").any() and not private:
            raise DataError(f"target {quoted(self._target_name)}: some records have no finite value; remove them")
        return self._kept(result, numbers)

    def _several(self, values: Array, private: bool) -> Array:
        """Columns of labels or of numbers scaled by their bounds; or times, clamped, beside their marks."""
        numbers = values.astype(np.float64)
        bounds = [pair for _, pair in self.schema.targets] or [self._target_bounds, None]
        if numbers.shape[1] != len(bounds):
            raise DataError(f"target: has {numbers.shape[1]} columns per record; the schema declares {len(bounds)}")
        result = np.full(numbers.shape, np.nan, dtype=np.float32)
        for place, pair in enumerate(bounds):
            column = numbers[:, place]
            if pair is None:  # it holds or does not, and anything else is no label
                result[:, place] = np.where((column == 0) | (column == 1), column, np.nan)
            elif self.scaling == "plain":
                result[:, place] = np.where(np.isfinite(column), np.clip(column, *pair), np.nan)
            else:
                _scale(column, *pair, result[:, place], "refuse")
        if not private and not np.isfinite(result).all():
            raise DataError("target: some records have a value that is no number, or a label that is not 0 or 1")
        return result

    def _kept(self, scaled: Array, numbers: Array) -> Array:
        """The scaled target, or the clamped one in its units."""
        if self.scaling == "unit":
            return scaled
        clamped = np.clip(numbers, *self._target_bounds).astype(np.float32)
        return np.where(np.isfinite(scaled), clamped, np.float32(np.nan))

    def label_of(self, position: int) -> Label:
        """The declared label of a class position."""
        if self.schema.classes is None:
            raise DataError("classes: none declared; a regression has no class labels")
        return self.schema.classes[position]

    @property
    def _target_name(self) -> str:
        return self.schema.target or "y"

    @property
    def _target_bounds(self) -> Bounds:
        if self.schema.target_bounds is None:
            raise DataError(
                f"target {quoted(self._target_name)}: neither classes nor target_bounds declared; "
                "give one of them, or assume them public"
            )
        return self.schema.target_bounds

    @property
    def target_centre(self) -> float:
        """b in y = b + a z, where z is the encoded target."""
        return 0.0 if self.scaling == "plain" else float(middle_and_half(*self._target_bounds)[0])

    @property
    def target_scale(self) -> float:
        """a in y = b + a z. Densities transform as log p(y) = log p(z) - log a."""
        return 1.0 if self.scaling == "plain" else self.target_reach

    @property
    def target_reach(self) -> float:
        """Half the width of the target's declared range."""
        return float(middle_and_half(*self._target_bounds)[1])

    def decode_mean(self, mean: Any) -> Any:
        """A predicted mean (or quantile, or draw) in the target's units; numpy arrays or tensors."""
        return mean * self.target_scale + self.target_centre

    def decode_variance(self, variance: Any) -> Any:
        """A predicted variance in the target's units squared."""
        return variance * self.target_scale**2

    def to_dict(self) -> dict[str, Any]:
        plain = {} if self.scaling == "unit" else {"scaling": self.scaling}
        return {"layout": self.layout, "schema": self.schema.to_dict(), **plain}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Encoder:
        if not isinstance(values, Mapping) or set(values) - {"scaling"} != {"layout", "schema"}:
            raise DataError("encoder: must have the keys layout and schema, and none beside them but scaling")
        return cls(Schema.from_dict(values["schema"]), values["layout"], values.get("scaling", "unit"))


@dataclass(frozen=True, repr=False, eq=False)
class Prepared:
    """Encoded records for the boundary, and the encoder for new ones. All but the encoder is private.

    notes   what the curator should know of the records; for nobody else
    """

    encoder: Encoder
    x: Array
    y: Array
    x_test: Array | None = None
    y_test: Array | None = None
    notes: tuple[str, ...] = ()


def prepare(
    dataset: DataSet,
    schema: Schema | None = None,
    *,
    assume_public: bool = False,
    task: Task | None = None,
    layout: Layout = "flat",
) -> Prepared:
    """Settle the public facts of a data set and encode both parts.

    Facts come from `schema`, else from the data set's own schema; with assume_public=True those left open are
    read off the training records and marked so.
    """
    facts = schema if schema is not None else dataset.schema
    if assume_public:
        facts = Schema.assume_public(dataset.train, declared=facts, task=task)
    if facts is None or facts.records is None:
        missing = "public facts" if facts is None else "records, the nominal size,"
        raise DataError(f"schema: {missing} not declared; give a file of facts, or assume them public")
    facts = facts.for_table(dataset.train)
    encoder = Encoder(facts, layout)
    x, y = encoder.training(dataset.train)
    x_test, y_test = encoder.encode(dataset.test) if dataset.test is not None else (None, None)
    return Prepared(encoder, x, y, x_test, y_test, curator_notes(dataset.train, facts, x, y))


def curator_notes(table: Table, schema: Schema, x: Any, y: Array) -> tuple[str, ...]:
    """What somebody who may see the records should know of them before anything is charged.

    Nothing is refused here: that a run exists would tell that it was not. `x` and `y` are what `Encoder.training` gave.
    """
    notes = []
    name = quoted(schema.target or table.target or "y")
    if schema.classes is not None:
        found = set(np.unique(y).tolist()) - {-1}
        if not found:
            notes.append(f"target {name}: no record has a declared class; declared are {listed(schema.classes)}")
        elif len(found) == 1:
            notes.append(f"target {name}: all records have the same class, so there is nothing to learn")
        usable = y >= 0
    else:
        usable = np.asarray(np.isfinite(y.reshape(len(y), -1)).all(axis=1))
        if y.ndim == 1 and usable.any() and len(np.unique(y[usable])) < 2:
            notes.append(f"target {name}: constant, so there is nothing to learn")
    if schema.inputs:
        usable = usable & checked(tree_of(x), schema.inputs)[1].numpy()
    else:
        usable = usable & np.isfinite(x.reshape(len(x), -1)).all(axis=1)
    if len(usable) and not usable.any():
        notes.append(_nothing_usable(name, schema, y))
    elif not usable.all():
        notes.append(
            f"records: {len(usable) - int(usable.sum())} of {len(usable)} have a cell without an input (missing, no "
            "number, or a label that is not declared) and count for nothing; clean them, or declare missing="
        )
    if schema.records is not None and not schema.records / 2 <= table.rows <= schema.records * 2:
        notes.append(f"records={schema.records}: more than a factor of two away from the data; declare its public size")
    return tuple(notes)


def _nothing_usable(name: str, schema: Schema, y: Array) -> str:
    """Which facts do not fit: the target's, or those of the inputs."""
    if schema.classes is None and not np.isfinite(y.reshape(len(y), -1)).all(axis=1).any():
        return f"{NOTHING}: target {name} has no number in any record; if these are labels, declare classes"
    return (
        f"{NOTHING}: every record has a cell without an input (missing, no number, or a label that is not declared); "
        "clean them, or declare missing="
    )


def middle_and_half(low: Any, high: Any) -> tuple[Any, Any]:
    """Halved before they are added, so that bounds near the largest float do not overflow."""
    return low / 2 + high / 2, high / 2 - low / 2


def _scale(values: Array, low: Any, high: Any, out: Array, missing: Missing) -> Array:
    """Write scaled values to `out`, the middle for non-finite ones; NaN for refused ones, which are returned."""
    absent = ~np.isfinite(values)
    middle, half = middle_and_half(low, high)
    clamped = np.clip(np.where(absent, middle, values), low, high)
    # Clipped once more: for bounds a few rounding errors apart the quotient can leave [-1, 1] slightly.
    scaled = np.where(absent, 0.0, np.clip((clamped - middle) / half, -1.0, 1.0))
    refused = absent if missing == "refuse" else np.zeros_like(absent)
    out[...] = np.where(refused, np.nan, scaled).astype(np.float32)
    return refused


def _fill_numbers(part: Array, values: Array, column: Column, bounds: Bounds, private: bool) -> None:
    numbers = as_numbers(values, f"column {quoted(column.name)}", private=private)
    if _scale(numbers, *bounds, part[:, 0], column.missing).any() and not private:
        raise _refusal(f"column {quoted(column.name)}")
    if column.missing == "category":
        part[:, 1] = ~np.isfinite(numbers)


def _fill_categories(part: Array, values: Array, column: Column, private: bool) -> None:
    place = positions(plain_column(values, column.name), column.categories, _UNKNOWN, _MISSING)
    absent = place == _MISSING
    if column.missing == "refuse" and absent.any() and not private:
        raise _refusal(f"column {quoted(column.name)}")
    known = np.flatnonzero(place >= 0)
    part[known, place[known]] = 1.0
    if column.missing == "category":
        part[:, -1] = absent
    else:
        part[absent] = np.nan if column.missing == "refuse" else 1.0 / len(column.categories)


def _refusal(where: str) -> DataError:
    return DataError(
        f'{where}: has missing or non-finite values and missing="refuse"; '
        'remove those records, or declare missing="middle" or "category"'
    )


def _stacked(table: Table, schema: Schema, private: bool) -> Array:
    """Named columns for a schema that declares only shared bounds: features in the order of the file."""
    names = [name for name in table.names if name != schema.target and name not in schema.ignore]
    if not names:
        raise DataError("columns: the data has no feature columns")
    numbers = [as_numbers(table.columns[name], f"column {quoted(name)}", private=private) for name in names]
    return np.stack(numbers, axis=1)


def _input_names(column: Column) -> list[str]:
    if column.kind == "numeric":
        names = [column.name]
    else:
        names = [f"{column.name}={category}" for category in column.categories]
    return [*names, f"{column.name} is missing"] if column.missing == "category" else names


def _as_images(flat: Array, shape: tuple[int, ...]) -> Array:
    if len(shape) == 3 and channels_last(shape):
        return np.ascontiguousarray(np.moveaxis(flat.reshape(-1, *shape), -1, 1))
    return flat.reshape(-1, *image_shape(shape))
