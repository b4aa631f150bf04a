"""Predictions from an exported model: copy this folder wherever they are wanted. Needs numpy, and for model.onnx
onnxruntime or for model.pt2 torch.

    from predict import Predictor
    model = Predictor("draws.npz")           # or "model.onnx", "model.pt2"
    found = model.predict({"age": 39, "workclass": "Private"})   # raw rows: a dict or a list of them, a frame, a CSV
    found.centre                        # (n, classes) probabilities in the order of model.classes, or (n,) means;
                                        # (n, targets) for labels of which any may hold, and for several numbers
    found.epistemic, found.aleatoric    # doubt about the model, noise in the data: nats for classes, else variances

`model(inputs)` takes inputs of shape (n, features) that are encoded already. On the command line

    python predict.py draws.npz rows.csv predictions.csv
"""

from __future__ import annotations

import csv
import sys
from typing import Any, NamedTuple

import numpy as np

from confide.export.predictor.back_ends import NumpyFile, OnnxFile, TorchFile
from confide.export.predictor.pictures import picture_features
from confide.export.predictor.rows import columns_of, encode, encode_block, raw_column, viewed

ROWS_AT_ONCE = 4096  # so that the outputs of all draws for one piece fit in memory


class Prediction(NamedTuple):
    """centre: probabilities or means; the two uncertainties add up to the whole."""

    centre: Any
    epistemic: Any
    aleatoric: Any


class Predictor:
    """The average over all draws of a network."""

    def __init__(self, path: str) -> None:
        path = str(path)
        back_ends: dict[str, Any] = {"onnx": OnnxFile, "pt2": TorchFile}
        self._model: Any = back_ends.get(path.rpartition(".")[2], NumpyFile)(path)
        self.about: dict[str, Any] = self._model.about
        if self.about.get("format") != 2:
            raise ValueError(f"path={path!r}: format {self.about.get('format')!r} is not known to this module")

    @property
    def classes(self) -> Any:
        """The labels in the order of the probabilities, or several targets by name, where the export knew them."""
        return self.about.get("classes") or self.about.get("targets")

    def predict(self, rows: Any) -> Prediction:
        """Predict raw rows: a dict, a list of dicts, a mapping of columns, a data frame, or the path of a CSV file.

        Columns are found by name, in any order, and others are left alone. A model of plain arrays takes an array, and
        one of pictures their pixels as they were declared.
        """
        facts = self.about.get("columns")
        if facts is None:
            block = np.atleast_2d(np.asarray(rows, dtype=np.float64))
            block = block.reshape(len(block), -1)
            encoded, raw = encode_block(block, self.about), {"inputs": block}
            if "picture" in self.about:
                encoded = picture_features(encoded, **self.about["picture"])
                raw = {"inputs": encoded.astype(np.float64)}
        else:
            columns = viewed(columns_of(rows), facts)
            encoded, raw = (
                encode(columns, facts),
                {fact["name"]: raw_column(columns[fact["name"]], fact) for fact in facts},
            )
        if isinstance(self._model, OnnxFile):  # whose graph encodes by itself; what has no input was refused just now
            return _joined(
                self._model.part({name: part[rows] for name, part in raw.items()}) for rows in _pieces(encoded)
            )
        return self(encoded)

    def __call__(self, inputs: Any) -> Prediction:
        """Predict encoded inputs of shape (n, features); further axes are flattened. An ONNX graph takes raw rows."""
        if isinstance(self._model, OnnxFile):
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


def main(words: list[str]) -> int:
    if len(words) != 3:
        sys.stderr.write("usage: python predict.py MODEL rows.csv predictions.csv (or inputs.npy predictions.npz)\n")
        return 2
    model = Predictor(words[0])
    if words[1].endswith(".npy"):
        np.savez(words[2], **model(np.load(words[1], allow_pickle=False))._asdict())
        return 0
    found = model.predict(words[1])
    header, cells = _written(found, model)
    with open(words[2], "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        # A name that a spreadsheet would take for a formula stays text.
        writer.writerow([f"'{name}" if name.lstrip().startswith(("=", "+", "-", "@")) else name for name in header])
        writer.writerows(cells.tolist())
    return 0


def _written(found: Prediction, model: Predictor) -> tuple[list[str], Any]:
    """The header and the cells of a file of predictions."""
    centre = found.centre if found.centre.ndim == 2 else found.centre[:, None]
    names = [str(name) for name in model.classes or range(centre.shape[1])]
    if found.epistemic.ndim == 2:  # several numbers
        header = [f"{name}_{part}" for name in names for part in ("mean", "epistemic", "aleatoric")]
        return header, np.stack(found, 2).reshape(len(centre), -1)
    shown = ["mean"] if found.centre.ndim == 1 else [f"probability_{name}" for name in names]
    return [*shown, "epistemic", "aleatoric"], np.column_stack([centre, found.epistemic, found.aleatoric])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
