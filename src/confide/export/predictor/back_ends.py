"""The three kinds of files that a model is exported to, behind one call each: `part(inputs)`."""

from __future__ import annotations

import json
import tokenize
import zipfile
import zlib
from typing import Any

import numpy as np

from confide.export.predictor.outcomes import ACTIVATIONS, averaged

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


class NumpyFile:
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
        if "columns_numbers" in self.arrays:
            inputs = self._features(inputs.astype(np.float64))
        draws = ((weight, self._outputs(inputs, draw)) for draw, weight in enumerate(self.weights))
        return averaged(draws, self.about)

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


class OnnxFile:
    """An ONNX graph from raw columns to predictions in the target's units."""

    def __init__(self, path: str) -> None:
        import onnxruntime

        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        found = self.session.get_modelmeta().custom_metadata_map
        self.about = _about_of(found.get("confide"), path)

    def part(self, columns: dict[str, Any]) -> Any:
        return self.session.run(["centre", "epistemic", "aleatoric"], columns)


class TorchFile:
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
