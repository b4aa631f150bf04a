"""Loaders: CSV, Parquet, npz, folders of pictures, frames, pairs and embedded names become a raw `Table` or `DataSet`.

Nothing here executes what it reads: npz files are read with pickling off, and compressed CSV is decompressed
as a stream, never unpacked to disk, and up to a limit (`decoding`). Messages name what was declared, and columns
of a file by their place: a file without a header has its first record there.

CSV is comma-separated UTF-8 with a header. A column in which every cell that is not missing is a number holds
numbers; "", "?", "NA", "N/A", "NaN", "nan", "null" and "NULL" are missing. Text columns keep their cells as
they are and the encoder decides, so that a declared category may be called "NA". A schema, when given, makes
its categorical columns and its textual classes read as text, so that the code "01" does not turn into the
number 1.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from confide.data import embedded
from confide.data.decoding import NPZ_NAMES, NPZ_WHOLE, read_csv, read_npz, read_parquet
from confide.data.picture_folder import has_test, read_folder
from confide.data.schema import Schema
from confide.data.table import Array, DataSet, Table, as_text, attempt, placed, plain_column, quoted
from confide.errors import DataError

Part: TypeAlias = Literal["train", "test"]
PARTS: tuple[Part, ...] = get_args(Part)
_KINDS = ".csv, .csv.gz, .parquet, .npz or a folder of pictures"
UNNAMED = "unnamed"
_TEXTS = ("string", "large_string", "string_view", "binary", "large_binary")


def load_dataset(
    source: str | Path,
    target: str | None = None,
    *,
    test: str | Path | None = None,
    schema: Schema | None = None,
) -> DataSet:
    """Training records and, where there is one, a separate test part.

    The test part is a second file, or comes with an npz or an embedded data set. `schema` is the declared
    one, or the one that comes with an embedded data set.
    """
    target = target if target is not None else (schema.target if schema else None)
    held_out = None
    if _is_embedded(source):
        known = embedded.load(str(source))
        train, held_out, schema = known.train, known.test, schema or known.schema
    elif Path(source).is_dir():
        train = load_table(source, target, schema=schema)
        held_out = load_table(source, target, part="test", schema=schema) if has_test(Path(source)) else None
    elif _suffix(path := _existing(source)) == ".npz":
        arrays = read_npz(path)
        train = _npz_table(arrays, "train", target, path)
        held_out = _npz_table(arrays, "test", target, path) if _has_test(arrays) else None
    else:
        train = load_table(source, target, schema=schema)
    if test is not None:
        held_out = load_table(test, target or train.target, part="test", schema=schema)
    return DataSet(Path(source).name, train, held_out, schema)


def load_table(
    source: str | Path,
    target: str | None = None,
    *,
    part: Part = "train",
    schema: Schema | None = None,
    target_required: bool = True,
) -> Table:
    """Read one table. `part` chooses within an npz or an embedded data set; CSV and Parquet have one part.

    target_required=False is for new records to predict: the target column may be absent.
    """
    if part not in PARTS:
        raise DataError(f"part={part!r}: must be one of {', '.join(PARTS)}")
    target = target if target is not None else (schema.target if schema else None)
    if _is_embedded(source):
        known = embedded.load(str(source))
        return known.train if part == "train" or known.test is None else known.test
    if Path(source).is_dir():
        shape, private = schema.shape if schema else None, part == "train" and target_required
        return read_folder(Path(source), shape, part, target=target, private=private)
    path = _existing(source)
    suffix = _suffix(path)
    if suffix == ".npz":
        return _npz_table(read_npz(path), part, target, path)
    if suffix == ".parquet":
        arrow = read_parquet(path)
    elif suffix in (".csv", ".csv.gz"):
        arrow = read_csv(path, _text_columns(schema, target))
    else:
        raise DataError(
            f"source={quoted(source)}: unknown kind of file; must be {_KINDS}, or {' or '.join(embedded.NAMES)}"
        )
    return _arrow_table(arrow, target, target_required, f"source={quoted(source)}", declared=schema is not None)


def load_parts(sources: Sequence[str | Path], target: str | None = None, *, schema: Schema | None = None) -> Table:
    """One table in several Parquet files, whose columns have types of their own: no cell of one changes another."""
    import pyarrow as pa

    target = target if target is not None else (schema.target if schema else None)
    tables: list[Any] = []
    seen: dict[str, str | Path] = {}
    for source in sources:
        path, where = _existing(source), f"source={quoted(source)}"
        if _suffix(path) != ".parquet":
            raise DataError(f"{where}: is no part of a table; several files at once must be .parquet")
        digest = attempt(lambda path=path: _digest(path), f"{where}: cannot be read", OSError)  # type: ignore[misc]
        if digest in seen:
            raise DataError(f"{where}: is a copy of {quoted(seen[digest])}, and its records would count twice")
        seen[digest] = source
        tables.append(read_parquet(path))
        if not tables[-1].schema.equals(tables[0].schema):
            raise DataError(f"{where}: has other columns or types than {quoted(sources[0])}; write the files alike")
    arrow = pa.concat_tables(tables).unify_dictionaries()
    found = _arrow_table(arrow, target, True, f"source={quoted(sources[0])}")
    _check_apart(found, sources, [table.num_rows for table in tables])
    return found


def _check_apart(table: Table, sources: Sequence[str | Path], lengths: Sequence[int]) -> None:
    """Refuse files that share records. Codes stay here, and every rank that reads the files comes to the same end."""
    from confide.data.fingerprint import table_codes
    from confide.data.overlap import kept_for, sampled, shared_rows, sharing_pair

    kept, codes = kept_for(len(sources)), table_codes(table, bytes(32))
    samples = [sampled(part, kept) for part in np.split(codes, np.cumsum(lengths)[:-1])]
    pair = sharing_pair(samples, kept)
    if pair is not None:
        raise DataError(shared_rows(str(sources[pair[1]]), str(sources[pair[0]]), "source"))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def from_frame(frame: Any, target: str | None = None, *, target_required: bool = True) -> Table:
    """A pandas, polars or Arrow data frame as a Table. A pandas index is not a feature and is left out."""
    import pyarrow as pa

    def convert() -> Any:
        if not hasattr(frame, "iloc"):
            return pa.table(frame)
        try:
            found = pa.Table.from_pandas(frame, preserve_index=False)
            if any(_is_odd(kind) for kind in found.schema.types):
                raise TypeError
            return found
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            # One odd cell in a column of objects: every cell becomes text by itself, so that no other record changes.
            objects = {name: frame[name].map(as_text) for name in frame.columns if frame[name].dtype == object}
            return pa.Table.from_pandas(frame.assign(**objects), preserve_index=False)

    complaint = "frame: cannot be read as a data frame with one kind of value per column"
    arrow = attempt(convert, complaint, pa.ArrowException, TypeError, ValueError, AttributeError, OverflowError)
    return _arrow_table(arrow, target, target_required, "frame")


def _is_odd(kind: Any) -> bool:
    """What Arrow makes of a column of objects with one cell of bytes, or with one list among missing cells."""
    from pyarrow import types

    return bool(
        types.is_binary(kind) or types.is_large_binary(kind) or types.is_nested(kind) or types.is_duration(kind)
    )


def refuse_loaders(x: Any) -> None:
    """One sentence for what serves batches: the boundary draws its own, or the accounting would not hold."""
    if type(x).__name__ == "LazyFrame":
        raise DataError("x: is a frame that has not been read; give x.collect()")
    kinds = {one.__module__.split(".")[0] + "." + one.__name__ for one in type(x).__mro__}
    if "torch.DataLoader" in kinds:
        raise DataError(
            "x: is a DataLoader, whose batches no accountant knows; give the records themselves, as arrays or as "
            "confide.data.from_pairs(loader.dataset), and confide draws the batches"
        )
    if "torch.Dataset" in kinds:
        raise DataError(
            "x: is a torch Dataset; give its arrays, or read it once with table = confide.data.from_pairs(dataset): "
            "table.block are the features and table.labels the labels"
        )


def from_pairs(dataset: Any) -> Table:
    """A map-style dataset of pairs (x, y), such as torch.utils.data.Dataset, as a Table."""

    def collect() -> tuple[Array, Array]:
        pairs = [dataset[position] for position in range(len(dataset))]
        return np.stack([np.asarray(x) for x, _ in pairs]), np.asarray([np.asarray(y) for _, y in pairs])

    complaint = "dataset: must have a length and give pairs (x, y) in which every x has the same shape"
    x, y = attempt(collect, complaint, TypeError, ValueError, AttributeError, IndexError, KeyError)
    return Table.from_arrays(x.reshape(len(x), -1) if x.ndim == 1 else x, y)


def _is_embedded(source: str | Path) -> bool:
    return str(source) in embedded.NAMES


def _suffix(path: Path) -> str:
    name = path.name.lower()
    return next((end for end in (".csv.gz", ".csv", ".parquet", ".npz") if name.endswith(end)), path.suffix.lower())


def _existing(source: str | Path) -> Path:
    where = f"source={quoted(source)}"
    path = Path(source)
    if not attempt(path.exists, f"{where}: not a usable path", OSError, ValueError):
        raise DataError(f"{where}: no such file; give {_KINDS}, or {' or '.join(embedded.NAMES)}")
    if attempt(lambda: path.stat().st_size, f"{where}: cannot be read", OSError) == 0:
        raise DataError(f"{where}: the file is empty")
    return path


def _text_columns(schema: Schema | None, target: str | None) -> list[str]:
    if schema is None:
        return []
    names = [column.raw for column in schema.columns if column.is_text]
    if target is not None and schema.classes and any(isinstance(label, str) for label in schema.classes):
        names.append(target)
    return names


def _npz_table(arrays: dict[str, Array], part: Part, target: str | None, path: Path) -> Table:
    found = _npz_names(arrays, part)
    if found is None:
        raise DataError(
            f"source={quoted(path)}: holds no array x_{part}; save x_train, y_train, x_test, y_test, or "
            "images and labels"
        )
    x, y = arrays[found[0]], arrays.get(found[1])
    if x.ndim == 0 or len(x) == 0:
        raise DataError(f"source={quoted(path)}: {found[0]} holds no records")
    return Table.from_arrays(x, y, target=target or "y")


def _has_test(arrays: dict[str, Array]) -> bool:
    return any(inputs in arrays for inputs, _ in NPZ_NAMES["test"])


def _npz_names(arrays: dict[str, Array], part: Part) -> tuple[str, str] | None:
    """Of inputs and labels of a part; a file without parts is both."""
    return next((pair for pair in (*NPZ_NAMES[part], *NPZ_WHOLE) if pair[0] in arrays), None)


def _arrow_table(arrow: Any, target: str | None, target_required: bool, where: str, declared: bool = False) -> Table:
    names = attempt(lambda: list(arrow.column_names), f"{where}: column names are not UTF-8 text", UnicodeError)
    names = checked_names(names, where)
    if arrow.num_rows == 0:
        raise DataError(f"{where}: has a header but no records")
    if target is not None and target not in names:
        if target_required:
            raise DataError(
                f"target={quoted(target)}: no such column; {where} has {len(names)}; is its first line a header?"
            )
        target = None
    columns = {
        name: _arrow_column(arrow.column(place), f"{where}: column {place + 1}", declared)
        for place, name in enumerate(names)
    }
    labels = columns.pop(target) if target is not None else None
    if not columns:
        raise DataError(f"{where}: has no feature columns besides the target")
    return Table(columns, target=target, labels=labels)


def checked_names(names: list[str], where: str) -> list[str]:
    """The names of a header, where a first column without one, as frames write their index, is called "unnamed".

    None of them is shown: in a file without a header they are the cells of the first record.
    """
    if len(names) > 1 and not names[0].strip() and UNNAMED not in names:
        names = [UNNAMED, *names[1:]]
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    if len(places) < len(names):
        same = next(found for found in places.values() if len(found) > 1)
        raise DataError(f"{where}: {placed(same)} have the same name; give each column its own, in a header")
    blank = [place for place, name in enumerate(names) if not name.strip()]
    if blank:
        raise DataError(f"{where}: {placed(blank)} without a name; name each in the header, or remove it")
    if _like_a_record(names):
        raise DataError(f"{where}: the first line holds numbers where a header has names; add a line with names")
    return names


def _like_a_record(names: list[str]) -> bool:
    """Numbers, but for columns that are counted or years: whole ones that rise by one."""
    numbers = [name.strip() for name in names if _is_number(name)]
    if not all(number.isdigit() and len(number) < 10 for number in numbers):
        return True
    return any(int(after) != int(before) + 1 for before, after in itertools.pairwise(numbers))


def _is_number(text: str) -> bool:
    try:
        return float(text) == float(text) and "_" not in text
    except ValueError:
        return False


def _arrow_column(values: Any, where: str, declared: bool = False) -> Array:
    """One Arrow column in one of the three kinds of a Table: float64, bool or object."""
    import pyarrow as pa
    from pyarrow import types

    kind = values.type
    if types.is_dictionary(kind):
        if types.is_string_view(kind.value_type):  # as polars writes categories; Arrow knows no way from them to texts
            values = values.cast(pa.dictionary(kind.index_type, pa.large_string()))
            kind = values.type
        values, kind = values.cast(kind.value_type), kind.value_type
    if types.is_null(kind):
        return np.full(len(values), np.nan)
    if types.is_boolean(kind):
        return np.array(values.to_pylist(), dtype=object if values.null_count else bool)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        complaint = f"{where}: holds numbers that do not fit into 64 bits"
        numbers = attempt(lambda: values.cast(pa.float64(), safe=False), complaint, pa.ArrowException)
        return plain_column(np.array(numbers.to_numpy(), dtype=np.float64), where)
    if types.is_temporal(kind):
        complaint = f"{where}: holds dates that cannot be read; write them as text"
        values = attempt(lambda: values.cast(pa.string()), complaint, pa.ArrowException)
    elif not any(getattr(types, f"is_{text}")(kind) for text in _TEXTS):
        raise DataError(f"{where}: holds nested values; one cell must hold one number or text")
    result = np.empty(len(values), dtype=object)
    result[:] = _texts(values, where, declared)
    return result


def _texts(values: Any, where: str, declared: bool) -> list[str | None]:
    """The cells of a column of texts. Where facts are declared, bytes that are no text make their own cell strange."""
    import pyarrow as pa
    from pyarrow import types

    try:
        known = types.is_binary(values.type) or types.is_large_binary(values.type)
        found: list[str | None] = (values.cast(pa.large_string()) if known else values).to_pylist()
        return found
    except (pa.ArrowException, UnicodeDecodeError):
        if not declared:
            raise DataError(f"{where}: is not UTF-8 text; save the file as UTF-8") from None
    cells = values.cast(pa.large_binary()).to_pylist()
    return [None if cell is None else cell.decode("utf-8", "replace") for cell in cells]
