"""Predictions from an exported model: copy this folder wherever they are wanted. Needs numpy, and for model.onnx
onnxruntime or for model.pt2 torch.

    from predict import Predictor
    model = Predictor("draws.npz")           # or "model.onnx", "model.pt2"
    found = model.predict({"age": 39, "workclass": "Private"})   # raw rows: a dict or a list of them, a frame, a CSV
    found.centre                        # (n, classes) probabilities in the order of model.classes, or (n,) means
    found.epistemic, found.aleatoric    # doubt about the model, noise in the data: nats for classes, else variances

`model(inputs)` takes inputs of shape (n, features) that are encoded already. On the command line

    python predict.py draws.npz rows.csv predictions.csv
"""

from __future__ import annotations

import csv
import datetime
import hashlib
import json
import math
import re
import sys
import tokenize
import zipfile
import zlib
from typing import Any, NamedTuple

import numpy as np

ROWS_AT_ONCE = 4096  # so that the outputs of all draws for one piece fit in memory
MISSING_TOKENS = ("", "?", "NA", "N/A", "NaN", "nan", "null", "NULL")
DAMAGED = (
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    EOFError,
    RuntimeError,
    MemoryError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


class Prediction(NamedTuple):
    """centre: probabilities or means; the two uncertainties add up to the whole."""

    centre: Any
    epistemic: Any
    aleatoric: Any


class Predictor:
    """The average over all draws of a network."""

    def __init__(self, path: str) -> None:
        path = str(path)
        back_ends: dict[str, Any] = {"onnx": _Onnx, "pt2": _Torch}
        self._model: Any = back_ends.get(path.rpartition(".")[2], _Numpy)(path)
        self.about: dict[str, Any] = self._model.about
        if self.about.get("format") != 2:
            raise ValueError(f"path={path!r}: format {self.about.get('format')!r} is not known to this module")

    @property
    def classes(self) -> Any:
        """The labels in the order of the probabilities, where the export knew them."""
        return self.about.get("classes")

    def predict(self, rows: Any) -> Prediction:
        """Predict raw rows: a dict, a list of dicts, a mapping of columns, a data frame, or the path of a CSV file.

        Columns are found by name, in any order, and others are left alone. A model of plain arrays takes an array.
        """
        facts = self.about.get("columns")
        if facts is None:
            block = np.atleast_2d(np.asarray(rows, dtype=np.float64))
            block = block.reshape(len(block), -1)
            encoded, raw = encode_block(block, self.about), {"inputs": block}
        else:
            columns = viewed(columns_of(rows), facts)
            encoded, raw = encode(columns, facts), {fact["name"]: _raw(columns[fact["name"]], fact) for fact in facts}
        if isinstance(self._model, _Onnx):  # whose graph encodes by itself; what has no input was refused just now
            return _joined(
                self._model.part({name: part[rows] for name, part in raw.items()}) for rows in _pieces(encoded)
            )
        return self(encoded)

    def __call__(self, inputs: Any) -> Prediction:
        """Predict encoded inputs of shape (n, features); further axes are flattened. An ONNX graph takes raw rows."""
        if isinstance(self._model, _Onnx):
            raise ValueError("inputs: an ONNX graph encodes by itself; give raw rows to predict")
        inputs = np.asarray(inputs, dtype=np.float32)
        inputs = inputs.reshape(len(inputs), -1)
        if inputs.shape[1] != self.about["features"]:
            raise ValueError(f"inputs of shape {inputs.shape}: need {self.about['features']} features each")
        return _joined(self._model.part(inputs[rows]) for rows in _pieces(inputs))


def _pieces(values: Any) -> list[slice]:
    starts = range(0, max(1, len(values)), ROWS_AT_ONCE)
    return [slice(start, start + ROWS_AT_ONCE) for start in starts]


def _joined(parts: Any) -> Prediction:
    return Prediction(*(np.concatenate(column) for column in zip(*parts, strict=True)))


# -- raw rows ----------------------------------------------------------------------------------------------------------


def columns_of(rows: Any) -> dict[str, list[Any]]:
    """Rows of any kind as columns by name."""
    if isinstance(rows, str) or hasattr(rows, "__fspath__"):
        with open(rows, newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
        return columns_of(lines) if lines else {}
    if hasattr(rows, "columns") and hasattr(rows, "__getitem__"):  # pandas, polars, Arrow
        names = getattr(rows, "column_names", None) or list(rows.columns)
        return {str(name): _listed(rows[name]) for name in names}
    if isinstance(rows, dict):
        several = any(isinstance(value, list | tuple | np.ndarray) for value in rows.values())
        return {name: _listed(value) if several else [value] for name, value in rows.items()}
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _listed(values: Any) -> list[Any]:
    for name in ("to_list", "tolist", "to_pylist"):
        if hasattr(values, name):
            return list(getattr(values, name)())
    return list(values)


def viewed(columns: dict[str, list[Any]], facts: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The columns that the model knows: cells as they are, parts of dates, and buckets of a public hash."""
    absent = dict.fromkeys(
        fact.get("of", fact["name"]) for fact in facts if fact.get("of", fact["name"]) not in columns
    )
    if absent:
        raise ValueError(f"rows: no column {', '.join(map(repr, list(absent)[:5]))}; the model needs it")
    return {fact["name"]: [_view(cell, fact) for cell in columns[fact.get("of", fact["name"])]] for fact in facts}


def _view(cell: Any, fact: dict[str, Any]) -> Any:
    if "buckets" in fact:
        key = None if _is_missing(cell) else key_of(cell)
        return None if key is None else int.from_bytes(_hash(key), "big") % fact["buckets"]
    return _part_of_date(cell, fact["date"], fact["part"]) if "date" in fact else cell


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:8]


def _part_of_date(cell: Any, form: str, part: str) -> float:
    """NaN for what is no date of that form; 12:00+02:00 is 12:00."""
    try:
        if isinstance(cell, datetime.date) and not isinstance(cell, datetime.datetime):
            when = datetime.datetime(cell.year, cell.month, cell.day)
        elif isinstance(cell, str):
            text = cell.strip()
            iso = form == "ISO"
            when = datetime.datetime.fromisoformat(text) if iso else datetime.datetime.strptime(text, form)
        else:
            when = cell
        when = when.replace(tzinfo=None)
    except (ValueError, TypeError, AttributeError):
        return math.nan
    days = (when - datetime.datetime(1970, 1, 1)) / datetime.timedelta(days=1)
    plain = {"time": days, "hour": 24.0 * (days % 1.0), "weekday": float(when.isoweekday())}
    plain |= {"year": float(when.year), "month": float(when.month), "day": float(when.day)}
    if part in plain:
        return plain[part]
    cycle, _, wave = part.partition("-")  # 1970 began on a Thursday, and a year has 365.2425 days on average
    turn = {"year": (days % 365.2425) / 365.2425, "week": ((days + 3.0) % 7.0) / 7.0, "day": days % 1.0}[cycle]
    return (math.sin if wave == "sin" else math.cos)(2 * math.pi * turn)


def encode(columns: dict[str, list[Any]], facts: list[dict[str, Any]]) -> Any:
    """The inputs of every row, float32 in [-1, 1], as they were made for training: by declared facts alone."""
    absent = [fact["name"] for fact in facts if fact["name"] not in columns]
    if absent:
        raise ValueError(f"rows: no column {', '.join(map(repr, absent[:5]))}; the model needs it")
    parts = []
    for fact in facts:
        cells = columns[fact["name"]]
        parts.append(_categories(cells, fact) if fact["kind"] == "categorical" else _numbers(cells, fact))
    return np.concatenate(parts, 1)


def _raw(cells: list[Any], fact: dict[str, Any]) -> Any:
    """A column as an ONNX graph takes it: numbers with NaN for what is missing, or texts as they were declared."""
    if fact["kind"] == "numeric":
        return np.array([_number(cell) for cell in cells], dtype=np.float64)[:, None]
    spelt = {key_of(label): str(label) for label in fact["categories"]}
    texts = [spelt.get(key_of(cell), "" if _is_missing(cell) else str(cell)) for cell in cells]
    return np.array(texts, dtype=object)[:, None]


def encode_block(values: Any, about: dict[str, Any]) -> Any:
    """The same for plain arrays: one pair of bounds for every feature, or for all."""
    if about.get("bounds") is None:
        return values.astype(np.float32)
    pairs = np.asarray(about["bounds"], dtype=np.float64)
    return _scaled(values, pairs[:, 0], pairs[:, 1], about["missing"], "inputs")


def _numbers(cells: list[Any], fact: dict[str, Any]) -> Any:
    numbers = np.array([_number(cell) for cell in cells], dtype=np.float64)[:, None]
    scaled = _scaled(numbers, fact["low"], fact["high"], fact["missing"], f"column {fact['name']!r}")
    if fact["missing"] != "category":
        return scaled
    return np.concatenate([scaled, ~np.isfinite(numbers)], 1).astype(np.float32)


def _scaled(values: Any, low: Any, high: Any, missing: str, where: str) -> Any:
    absent = ~np.isfinite(values)
    if missing == "refuse" and absent.any():
        raise ValueError(f"{where}: some cells hold no number, and the model has no input for that; fill them in")
    middle, half = low / 2 + high / 2, high / 2 - low / 2
    clamped = np.clip(np.where(absent, middle, values), low, high)
    return np.where(absent, 0.0, np.clip((clamped - middle) / half, -1.0, 1.0)).astype(np.float32)


def _number(cell: Any) -> float:
    if isinstance(cell, str):
        word = cell.strip()
        if word.lower() in ("true", "false"):
            return float(word.lower() == "true")
        try:
            return math.nan if "_" in word else float(word)
        except ValueError:
            return math.nan
    try:
        return math.nan if cell is None else float(cell)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _categories(cells: list[Any], fact: dict[str, Any]) -> Any:
    labels = fact["categories"]
    place = {key_of(label): position for position, label in enumerate(labels)}
    found = np.zeros((len(cells), len(labels) + (fact["missing"] == "category")), dtype=np.float32)
    for row, cell in enumerate(cells):
        key = key_of(cell)
        if key in place:
            found[row, place[key]] = 1.0
        elif _is_missing(cell):
            if fact["missing"] == "refuse":
                raise ValueError(
                    f"column {fact['name']!r}: some cells are missing, and the model has no input for that"
                )
            if fact["missing"] == "category":
                found[row, -1] = 1.0
            else:
                found[row] = 1.0 / len(labels)
    return found


def _is_missing(cell: Any) -> bool:
    if isinstance(cell, str):
        return cell.strip() in MISSING_TOKENS
    if isinstance(cell, float | np.floating):
        return not math.isfinite(cell)
    return key_of(cell) is None


_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})\Z")
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?\Z")


def key_of(value: Any) -> Any:
    """What makes 3, "3" and "3.0" one category; None for what is missing by its type."""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, int | np.integer):
        return str(int(value)) if abs(int(value)) < 10**18 else hex(int(value))
    if isinstance(value, float | np.floating):
        return _float_key(float(value))
    if not isinstance(value, str):
        return None if value is None else "\0"
    text = value.strip()
    if text.lower() in ("true", "false"):
        return text.lower()
    if _INTEGER.match(text):
        return str(int(text))
    return (_float_key(float(text)) or text) if _DECIMAL.match(text) else text


def _float_key(number: float) -> Any:
    if math.isnan(number):
        return None
    whole = math.isfinite(number) and number == int(number) and abs(number) < 10**18
    return str(int(number)) if whole else repr(number)


# -- the three kinds of files ------------------------------------------------------------------------------------------


class _Numpy:
    """Draws in an .npz file."""

    def __init__(self, path: str) -> None:
        self.arrays = _arrays_of(path)
        self.about = _about_of(self.arrays.pop("about", None), path)
        try:
            self.weights = self.arrays.pop("weights")
            self.about["features"] = self.arrays["weight_0"].shape[2]
            if "columns_numbers" in self.arrays:
                self.about["features"] = sum(len(self.arrays[f"columns_{kind}"]) for kind in ("numbers", "categories"))
        except (KeyError, IndexError):
            raise ValueError(f"path={path!r}: damaged, weights are missing; export the model again") from None

    def part(self, inputs: Any) -> Any:
        centre, epistemic, aleatoric = self._averaged(inputs)
        scale, shift = self.about.get("scale", 1.0), self.about.get("centre", 0.0)
        if scale != 1.0 or shift != 0.0:
            return Prediction(centre * scale + shift, epistemic * scale**2, aleatoric * scale**2)
        return Prediction(centre, epistemic, aleatoric)

    def _averaged(self, inputs: Any) -> Any:
        one, square, noise = 0.0, 0.0, 0.0
        if "columns_numbers" in self.arrays:
            inputs = self._features(inputs.astype(np.float64))
        for draw, weight in enumerate(self.weights):
            centre, spread = self._outcome(self._outputs(inputs, draw))
            one, square, noise = one + weight * centre, square + weight * centre**2, noise + weight * spread
        if self.about["likelihood"]["name"] in ("categorical", "bernoulli", "probit"):
            return one, np.maximum(_entropy(one) - noise, 0.0), noise
        return one, np.maximum(square - one**2, 0.0), noise

    def _outputs(self, inputs: Any, draw: int) -> Any:
        values = inputs = inputs.astype(self.arrays["weight_0"].dtype)
        for place, layer in enumerate(self.about["layers"]):
            if layer != "linear":
                values = ACTIVATIONS[layer](values)
                continue
            values = values @ self.arrays[f"weight_{place}"][draw].T
            if f"bias_{place}" in self.arrays:
                values = values + self.arrays[f"bias_{place}"][draw]
        if "effects" in self.arrays:
            values = values + inputs @ self.arrays["effects"][draw].T
        return values.astype(np.float64)

    def _features(self, inputs: Any) -> Any:
        """Of an additive model: one, cosines of every number on its quantile scale, categories."""
        numbers, categories, knots, heights, centres, amplitudes = (
            self.arrays[f"columns_{name}"]
            for name in ("numbers", "categories", "knots", "heights", "centres", "amplitudes")
        )
        waves = np.pi * np.arange(1, self.about["waves"] + 1)
        parts = [np.ones((len(inputs), 1))]
        for place, scale in zip(numbers, heights, strict=True):
            u = np.interp((inputs[:, place] + 1) / 2, knots, scale)
            parts.append(np.cos(u[:, None] * waves))
        return (np.concatenate([*parts, inputs[:, categories]], 1) - centres) * amplitudes

    def _outcome(self, outputs: Any) -> tuple[Any, Any]:
        """Of one draw: probabilities and their entropy, or means and noise variances."""
        likelihood = self.about["likelihood"]
        if likelihood["name"] == "gaussian":
            return outputs[:, 0], np.full(len(outputs), likelihood["noise_scale"] ** 2)
        if likelihood["name"] == "heteroscedastic-gaussian":
            return outputs[:, 0], (likelihood["smallest"] + np.logaddexp(0.0, outputs[:, 1])) ** 2
        if likelihood["name"] == "probit":
            first = 0.5 * (1.0 + _erf(outputs * math.sqrt(0.5)))
            probabilities = np.concatenate([1.0 - first, first], 1)
            return probabilities, _entropy(probabilities)
        if likelihood["name"] == "bernoulli":
            outputs = np.concatenate([np.zeros_like(outputs), outputs], 1)
        powers = np.exp(outputs - outputs.max(1, keepdims=True))
        probabilities = powers / powers.sum(1, keepdims=True)
        return probabilities, _entropy(probabilities)


class _Onnx:
    """An ONNX graph from raw columns to predictions in the target's units."""

    def __init__(self, path: str) -> None:
        import onnxruntime

        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        found = self.session.get_modelmeta().custom_metadata_map
        self.about = _about_of(found.get("confide"), path)

    def part(self, columns: dict[str, Any]) -> Any:
        return self.session.run(["centre", "epistemic", "aleatoric"], columns)


class _Torch:
    """A program of torch.export, in the target's units."""

    def __init__(self, path: str) -> None:
        import torch

        extra = {"confide.json": ""}
        program = torch.export.load(path, extra_files=extra)
        self.about = _about_of(extra["confide.json"], path)
        self._torch, self._module = torch, program.module()

    def part(self, inputs: Any) -> Any:
        with self._torch.no_grad():
            return [part.numpy() for part in self._module(self._torch.as_tensor(inputs))]


def _arrays_of(path: str) -> dict[str, Any]:
    """The arrays of an .npz file. Numpy reads their headers as literals, so that a damaged one fails as source does."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise
    except DAMAGED as error:
        raise ValueError(f"path={path!r}: cannot be read ({type(error).__name__}); export the model again") from None


def _about_of(text: Any, path: str) -> dict[str, Any]:
    try:
        about = json.loads(str(text))
    except ValueError:
        about = None
    if not isinstance(about, dict):
        raise ValueError(f"path={path!r}: does not say what it holds; export the model again")
    return about


def _entropy(probabilities: Any) -> Any:
    logarithms = np.log(np.where(probabilities > 0, probabilities, 1.0))
    return -(probabilities * logarithms).sum(1)


def _sigmoid(values: Any) -> Any:
    return np.exp(-np.logaddexp(0.0, -values))


def _gelu(values: Any) -> Any:
    return values * 0.5 * (1.0 + _erf(values / math.sqrt(2.0)))


def _gelu_tanh(values: Any) -> Any:
    return 0.5 * values * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (values + 0.044715 * values**3)))


_erf = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATIONS: dict[str, Any] = {
    "relu": lambda values: np.maximum(values, 0),
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "silu": lambda values: values * _sigmoid(values),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "identity": lambda values: values,
}


def main(words: list[str]) -> int:
    if len(words) != 3:
        sys.stderr.write("usage: python predict.py MODEL rows.csv predictions.csv (or inputs.npy predictions.npz)\n")
        return 2
    model = Predictor(words[0])
    if words[1].endswith(".npy"):
        np.savez(words[2], **model(np.load(words[1], allow_pickle=False))._asdict())
        return 0
    found = model.predict(words[1])
    centre = found.centre if found.centre.ndim == 2 else found.centre[:, None]
    names = [f"p({name})" for name in model.classes or range(centre.shape[1])] if centre.shape[1] > 1 else ["mean"]
    with open(words[2], "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "epistemic", "aleatoric"])
        writer.writerows(np.column_stack([centre, found.epistemic, found.aleatoric]).tolist())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
