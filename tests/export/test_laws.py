"""Exports of every likelihood of one's own tables, and of pictures: the numbers that confide itself gives."""

from __future__ import annotations

import ast
import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from confide.data.columns import Column
from confide.data.preprocessing import Encoder
from confide.data.schema import Schema
from confide.data.table import Table
from confide.export import onnx_laws
from confide.export.assembly import predictor_source
from confide.export.models import export_numpy, export_onnx, export_torch
from confide.export.predictor import outcomes
from confide.export.predictor.main import Predictor
from confide.export.stacked_draws import LIKELIHOODS
from confide.models.likelihoods import (
    Exponential,
    Laplace,
    Likelihood,
    MultiGaussian,
    MultiLabel,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
    Weibull,
)  # fmt: skip
from confide.models.networks import mlp
from confide.models.predictive import VectorPredictive
from confide.posteriors.draws import Draws
from confide.workflow.measure import numbers_in_units

COLUMNS = (
    Column("größe (cm)", bounds=(0, 200)),
    Column(" ", categories=("ja", "nein"), missing="category"),
    Column("2", bounds=(-1, 1)),
)
ROWS = [{"größe (cm)": 181.5, " ": "ja", "2": -0.3}, {"größe (cm)": -4, " ": "", "2": "1"}]
EXPORTS = {
    "numpy": (export_numpy, "draws.npz"),
    "torch": (export_torch, "model.pt2"),
    "onnx": (export_onnx, "model.onnx"),
}
LAWS: dict[str, tuple[Likelihood, dict[str, Any]]] = {
    "ordinal": (Ordinal(4), {"target": "y", "classes": ("1", "2", "3", "4")}),
    "ordinal of two": (Ordinal(2), {"target": "y", "classes": ("1", "2")}),
    "poisson": (Poisson(3.0), {"target": "y", "target_bounds": (0, 40)}),
    "negative-binomial": (NegativeBinomial(2.0), {"target": "y", "target_bounds": (0, 40)}),
    "exponential": (Exponential(5.0), {"target": "y", "target_bounds": (0, 40), "observed": "seen"}),
    "weibull": (Weibull(5.0), {"target": "y", "target_bounds": (0, 40), "observed": "seen"}),
    "laplace": (Laplace(0.2), {"target": "y", "target_bounds": (-10, 90)}),
    "student-t": (StudentT(0.2, 5.0), {"target": "y", "target_bounds": (-10, 90)}),
    "multi-label": (MultiLabel(3), {"targets": ("a", "b", "c")}),
    "multi-gaussian": (MultiGaussian(2, 0.3), {"targets": {"a": (0, 10), "b": (-5, 1e4)}}),
}
PLAIN = ("poisson", "negative-binomial", "exponential", "weibull", "multi-label")


def model_of(name: str) -> tuple[Draws, Encoder]:
    likelihood, facts = LAWS[name]
    schema = Schema(columns=COLUMNS, **facts)
    module = mlp(schema.features or 0, likelihood.outputs, (4,), "tanh")
    size = sum(parameter.numel() for parameter in module.parameters())
    draws = 0.6 * torch.randn(5, size, generator=torch.Generator().manual_seed(3))
    posterior = Draws(module, likelihood, draws, torch.arange(1.0, 6.0) / 15)
    return posterior, Encoder(schema, scaling="plain" if name in PLAIN else "unit")


def expected_of(posterior: Draws, encoder: Encoder) -> tuple[Any, Any, Any]:
    table = Table({column.name: np.array([row[column.name] for row in ROWS], dtype=object) for column in COLUMNS})
    found = posterior.predict(torch.as_tensor(encoder._features(table, private=True)))
    if isinstance(found, VectorPredictive):
        units = numbers_in_units(found, encoder)
        parts = [units.of(place) for place in range(units.targets)]
        return tuple(
            torch.stack([getattr(part, name) for part in parts], 1).numpy()
            for name in ("mean", "epistemic", "aleatoric")
        )  # type: ignore[return-value]
    said = posterior.summary(torch.as_tensor(encoder._features(table, private=True))).double()
    if encoder.schema.target_bounds is not None:
        said = said.rescaled(encoder.target_scale, encoder.target_centre)
    return said.centre.numpy(), said.epistemic.numpy(), said.aleatoric.numpy()


def compare(found: Any, expected: tuple[Any, Any, Any]) -> None:
    for name, part, wanted in zip(("centre", "epistemic", "aleatoric"), found, expected, strict=True):
        np.testing.assert_allclose(part, wanted, rtol=2e-4, atol=1e-5, err_msg=name)


def written(name: str, kind: str, folder: Path) -> tuple[Predictor, tuple[Any, Any, Any]]:
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
    posterior, encoder = model_of(name)
    write, file = EXPORTS[kind]
    return Predictor(str(write(posterior, folder / "out", encoder) / file)), expected_of(posterior, encoder)


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.parametrize("name", LAWS)
def test_every_law_gives_what_confide_gives(name: str, kind: str, tmp_path: Path) -> None:
    model, expected = written(name, kind, tmp_path)
    compare(model.predict(ROWS), expected)


def test_every_likelihood_is_among_those_compared() -> None:
    compared = {law.name for law, _ in LAWS.values()}
    others = {"categorical", "bernoulli", "calibrated", "probit", "gaussian", "heteroscedastic-gaussian"}
    assert compared | others == set(LIKELIHOODS)


def test_a_law_that_forgets_its_spread_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: a shape whose zero is no exponential law in numpy, and a gamma function that is slightly off."""
    monkeypatch.setattr(outcomes, "AT_ZERO", 0.0)
    model, expected = written("weibull", "numpy", tmp_path / "a")
    with pytest.raises(AssertionError):
        compare(model.predict(ROWS), expected)
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(
        onnx_laws, "_LANCZOS", (onnx_laws._LANCZOS[0], 1.01 * onnx_laws._LANCZOS[1], *onnx_laws._LANCZOS[2:])
    )
    model, expected = written("weibull", "onnx", tmp_path / "b")
    with pytest.raises(AssertionError):
        compare(model.predict(ROWS), expected)


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.parametrize("shape", [(9, 12), (8, 8, 3)])
def test_pictures_are_predicted_from_their_pixels(shape: tuple[int, ...], kind: str, tmp_path: Path) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
    encoder = Encoder(Schema(shape=shape, bounds=(0, 255), classes=("cat", "dog")), layout="features")
    assert encoder.output_shape is not None
    module = mlp(encoder.output_shape[0], 1, ())
    from confide.models.likelihoods import Bernoulli

    draws = torch.randn(3, encoder.output_shape[0] + 1, generator=torch.Generator().manual_seed(1)) / 20
    posterior = Draws(module, Bernoulli(), draws, torch.full((3,), 1 / 3))
    pixels = np.random.default_rng(0).integers(0, 256, (4, *shape))
    write, file = EXPORTS[kind]
    model = Predictor(str(write(posterior, tmp_path / "out", encoder) / file))
    said = posterior.summary(torch.as_tensor(encoder.features(pixels))).double()
    compare(model.predict(pixels), (said.centre.numpy(), said.epistemic.numpy(), said.aleatoric.numpy()))


@pytest.mark.parametrize("name", ["multi-gaussian", "multi-label", "weibull"])
def test_shipped_file_writes_a_table_of_predictions(name: str, tmp_path: Path) -> None:
    """In a process where torch, scikit-learn and confide cannot be imported."""
    posterior, encoder = model_of(name)
    folder = export_numpy(posterior, tmp_path / "out", encoder)
    with (tmp_path / "rows.csv").open("w", newline="", encoding="utf-8-sig") as file:  # with the mark of spreadsheets
        writer = csv.DictWriter(file, [column.name for column in COLUMNS])
        writer.writeheader()
        writer.writerows(ROWS)
    code = (
        "import sys\n"
        "for name in ('torch', 'sklearn', 'confide', 'scipy'): sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(folder)!r})\n"
        "import predict\n"
        "sys.exit(predict.main(sys.argv[1:]))"
    )
    words = [str(folder / "draws.npz"), str(tmp_path / "rows.csv"), str(tmp_path / "p.csv")]
    subprocess.run([sys.executable, "-c", code, *words], check=True)
    header, *lines = list(csv.reader((tmp_path / "p.csv").read_text().splitlines()))
    names = {
        "multi-gaussian": [f"{of}_{part}" for of in "ab" for part in ("mean", "epistemic", "aleatoric")],
        "multi-label": ["probability_a", "probability_b", "probability_c", "epistemic", "aleatoric"],
        "weibull": ["mean", "epistemic", "aleatoric"],
    }
    assert header == names[name]
    expected = np.column_stack(expected_of(posterior, encoder))
    if name == "multi-gaussian":
        expected = expected[:, [0, 2, 4, 1, 3, 5]]  # all about one number, then all about the next
    np.testing.assert_allclose(np.array(lines, dtype=float), expected, rtol=2e-4, atol=1e-5)


def test_one_file_without_a_word_of_confide() -> None:
    tree = ast.parse(predictor_source())
    imported = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)}
    assert not [line for line in imported if "confide" in line]
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    assert len(defined) == len(set(defined)), "two parts use one name"
