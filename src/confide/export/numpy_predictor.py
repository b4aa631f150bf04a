"""Predictions from exported draws. Needs numpy alone: copy this file and draws.npz wherever they are wanted.

    from predict import Predictor
    model = Predictor("draws.npz")
    found = model(inputs)            # inputs of shape (n, features), encoded as in training
    found.centre                     # (n, classes) probabilities, or (n,) means
    found.epistemic, found.aleatoric # doubt about the model and noise in the data: nats for classes, else variances

or `python predict.py draws.npz inputs.npy predictions.npz`.
"""

from __future__ import annotations

import json
import math
import sys
import tokenize
import zipfile
import zlib
from typing import Any, NamedTuple

import numpy as np

ROWS_AT_ONCE = 4096  # so that the outputs of all draws for one piece fit in memory
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
        self.arrays = _arrays_of(path)
        self.about = _about_of(self.arrays.pop("about", None), path)
        if self.about.get("format") != 1:
            raise ValueError(f"path={path!r}: format {self.about.get('format')!r} is not known to this module")
        try:
            self.weights = self.arrays.pop("weights")
            self.features = self.arrays["weight_0"].shape[2]
        except (KeyError, IndexError):
            raise ValueError(f"path={path!r}: damaged, weights are missing; export the model again") from None

    @property
    def classes(self) -> Any:
        """The labels in the order of the probabilities, where the export knew them."""
        return self.about.get("classes")

    def __call__(self, inputs: Any) -> Prediction:
        """Predict inputs of shape (n, features); further axes are flattened."""
        inputs = np.asarray(inputs)
        inputs = inputs.reshape(len(inputs), -1)
        if inputs.shape[1] != self.features:
            raise ValueError(f"inputs of shape {inputs.shape}: need {self.features} features each")
        starts = range(0, max(1, len(inputs)), ROWS_AT_ONCE)
        parts = [self._part(inputs[start : start + ROWS_AT_ONCE]) for start in starts]
        centre, epistemic, aleatoric = (np.concatenate(column) for column in zip(*parts, strict=True))
        scale, shift = self.about.get("scale", 1.0), self.about.get("centre", 0.0)
        if scale != 1.0 or shift != 0.0:
            return Prediction(centre * scale + shift, epistemic * scale**2, aleatoric * scale**2)
        return Prediction(centre, epistemic, aleatoric)

    def _part(self, inputs: Any) -> Prediction:
        one, square, noise = 0.0, 0.0, 0.0
        for draw, weight in enumerate(self.weights):
            centre, spread = self._outcome(self._outputs(inputs, draw))
            one, square, noise = one + weight * centre, square + weight * centre**2, noise + weight * spread
        if self.about["likelihood"]["name"] in ("categorical", "bernoulli"):
            return Prediction(one, np.maximum(_entropy(one) - noise, 0.0), noise)
        return Prediction(one, np.maximum(square - one**2, 0.0), noise)

    def _outputs(self, inputs: Any, draw: int) -> Any:
        values = inputs.astype(self.arrays["weight_0"].dtype)
        for place, layer in enumerate(self.about["layers"]):
            if layer != "linear":
                values = ACTIVATIONS[layer](values)
                continue
            values = values @ self.arrays[f"weight_{place}"][draw].T
            if f"bias_{place}" in self.arrays:
                values = values + self.arrays[f"bias_{place}"][draw]
        return values.astype(np.float64)

    def _outcome(self, outputs: Any) -> tuple[Any, Any]:
        """Of one draw: probabilities and their entropy, or means and noise variances."""
        likelihood = self.about["likelihood"]
        if likelihood["name"] == "gaussian":
            return outputs[:, 0], np.full(len(outputs), likelihood["noise_scale"] ** 2)
        if likelihood["name"] == "heteroscedastic-gaussian":
            return outputs[:, 0], (likelihood["smallest"] + np.logaddexp(0.0, outputs[:, 1])) ** 2
        if likelihood["name"] == "bernoulli":
            outputs = np.concatenate([np.zeros_like(outputs), outputs], 1)
        powers = np.exp(outputs - outputs.max(1, keepdims=True))
        probabilities = powers / powers.sum(1, keepdims=True)
        return probabilities, _entropy(probabilities)


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
        sys.stderr.write("usage: python predict.py draws.npz inputs.npy predictions.npz\n")
        return 2
    found = Predictor(words[0])(np.load(words[1], allow_pickle=False))
    np.savez(words[2], **found._asdict())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
