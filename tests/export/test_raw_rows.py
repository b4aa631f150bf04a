"""Raw rows in, probabilities out: dicts, frames and CSV files, by every kind of export, as confide itself predicts."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from confide.data.columns import Column
from confide.data.preprocessing import Encoder
from confide.data.schema import Schema
from confide.data.table import Table
from confide.export.models import export_numpy, export_onnx, export_torch
from confide.export.predictor.main import Predictor
from confide.models.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Probit
from confide.models.networks import mlp
from confide.posteriors.draws import Draws

COLUMNS = (
    Column("age", bounds=(17, 90), missing="middle"),
    Column("work|class", categories=("Private", "State-gov", "NA"), missing="category"),
    Column("gain", bounds=(0, 99999), missing="category"),
    Column("code", categories=(1, 2, 3.5, True), missing="middle"),
    Column("<b>", bounds=(-1e6, 1e6)),
)
SCHEMAS = {
    "classes": Schema(classes=("no", "yes", "maybe"), target="y", columns=COLUMNS),
    "numbers": Schema(target="y", target_bounds=(-50, 150), columns=COLUMNS),
}
ROWS: list[dict[str, Any]] = [
    {"age": 39, "work|class": "Private", "gain": 2174, "code": 1, "<b>": 3.25, "extra": "left alone"},
    {"<b>": -7e6, "code": "2.0", "gain": None, "work|class": " State-gov ", "age": "41"},
    {"age": float("nan"), "work|class": "NA", "gain": "?", "code": "true", "<b>": 0},
    {"age": 1e300, "work|class": None, "gain": -5.0, "code": None, "<b>": "12"},
    {"age": -3, "work|class": "Never-seen", "gain": 99999, "code": "3.5", "<b>": "1e3"},
]
EXPORTS = {
    "numpy": (export_numpy, "draws.npz"),
    "torch": (export_torch, "model.pt2"),
    "onnx": (export_onnx, "model.onnx"),
}
LIKELIHOODS = {
    "categorical": (Categorical(3), 3, "classes"),
    "gaussian": (Gaussian(0.3), 1, "numbers"),
    "heteroscedastic": (HeteroscedasticGaussian(), 2, "numbers"),
    "bernoulli": (Bernoulli(), 1, "two"),
    "probit": (Probit(), 1, "two"),
}


def posterior_of(likelihood: Any, outputs: int, features: int, activation: str = "relu") -> Draws:
    module = mlp(features, outputs, (5, 4), activation)
    size = sum(parameter.numel() for parameter in module.parameters())
    generator = torch.Generator().manual_seed(7)
    return Draws(module, likelihood, 0.7 * torch.randn(7, size, generator=generator), torch.arange(1.0, 8.0) / 28)


def table_of(rows: list[dict[str, Any]]) -> Table:
    names = [column.name for column in COLUMNS]
    return Table({name: np.array([row.get(name) for row in rows], dtype=object) for name in names})


def expected_of(posterior: Draws, encoder: Encoder, rows: list[dict[str, Any]]) -> Any:
    # Numbers spelt as text are numbers in a file that is read; private=True reads them so and refuses nothing.
    inputs = torch.as_tensor(encoder._features(table_of(rows), private=True))
    found = posterior.summary(inputs).double()
    return found if encoder.schema.classes else found.rescaled(encoder.target_scale, encoder.target_centre)


def compared(found: Any, expected: Any) -> None:
    scale = max(1.0, float(expected.centre.abs().max()))
    np.testing.assert_allclose(found.centre, expected.centre.numpy(), atol=1e-5 * scale)
    np.testing.assert_allclose(found.aleatoric, expected.aleatoric.numpy(), atol=1e-4 * scale**2, rtol=1e-4)
    np.testing.assert_allclose(found.epistemic, expected.epistemic.numpy(), atol=1e-4 * scale**2, rtol=1e-3)


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_rows_give_what_confide_gives(likelihood: str, kind: str, tmp_path: Path) -> None:
    if kind == "onnx":
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime")
    law, outputs, name = LIKELIHOODS[likelihood]
    schema = SCHEMAS.get(name) or Schema(classes=("no", "yes"), target="y", columns=COLUMNS)
    encoder = Encoder(schema)
    posterior = posterior_of(law, outputs, schema.features or 0, {"numpy": "gelu", "torch": "tanh"}.get(kind, "gelu"))
    write, file = EXPORTS[kind]
    model = Predictor(str(write(posterior, tmp_path / "out", encoder) / file))
    compared(model.predict(ROWS), expected_of(posterior, encoder, ROWS))
    one = model.predict(ROWS[0])
    assert len(one.centre) == 1
    np.testing.assert_allclose(one.centre, model.predict(ROWS).centre[:1], atol=1e-9)
    if schema.classes:
        assert model.classes == [str(label) for label in schema.classes]


ACTIVATIONS = (nn.ReLU(), nn.Tanh(), nn.Sigmoid(), nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.Identity())


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_every_activation_in_onnx(activation: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    encoder = Encoder(SCHEMAS["classes"])
    network = nn.Sequential(nn.Linear(encoder.schema.features or 0, 5), activation, nn.Linear(5, 3, bias=False))
    size = sum(parameter.numel() for parameter in network.parameters())
    draws = torch.randn(4, size, generator=torch.Generator().manual_seed(1))
    posterior = Draws(network, Categorical(3), draws, torch.full((4,), 0.25))
    model = Predictor(str(export_onnx(posterior, tmp_path / "out", encoder) / "model.onnx"))
    compared(model.predict(ROWS), expected_of(posterior, encoder, ROWS))


def test_onnx_graph_alone_takes_raw_columns(tmp_path: Path) -> None:
    """Without predict.py: the graph's inputs are the columns by name, and what cannot be encoded is NaN, not wrong."""
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    encoder = Encoder(SCHEMAS["classes"])
    posterior = posterior_of(Categorical(3), 3, encoder.schema.features or 0)
    path = export_onnx(posterior, tmp_path / "out", encoder) / "model.onnx"
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_inputs()] == [column.name for column in COLUMNS]
    feed = {
        "age": np.array([[39.0], [39.0]]),
        "work|class": np.array([["Private"], ["Private"]], dtype=object),
        "gain": np.array([[2174.0], [2174.0]]),
        "code": np.array([["1"], ["1"]], dtype=object),
        "<b>": np.array([[3.25], [np.nan]]),  # missing="refuse"
    }
    centre = session.run(["centre"], feed)[0]
    np.testing.assert_allclose(centre[:1], expected_of(posterior, encoder, ROWS[:1]).centre.numpy(), atol=1e-5)
    assert np.isnan(centre[1]).all()


@pytest.mark.parametrize("kind", EXPORTS)
def test_plain_arrays(kind: str, tmp_path: Path) -> None:
    if kind == "onnx":
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime")
    encoder = Encoder(Schema(classes=3, bounds=[(0, 16), (-1, 1), (5, 6)], shape=3, missing="middle"))
    posterior = posterior_of(Categorical(3), 3, 3)
    write, file = EXPORTS[kind]
    model = Predictor(str(write(posterior, tmp_path / "out", encoder) / file))
    x = np.array([[3.0, 0.5, 5.5], [99.0, np.nan, -1.0]])
    compared(model.predict(x), posterior.summary(torch.as_tensor(encoder.features(x))).double())


def test_frames_and_files_in_any_order(tmp_path: Path) -> None:
    encoder = Encoder(SCHEMAS["classes"])
    posterior = posterior_of(Categorical(3), 3, encoder.schema.features or 0)
    folder = export_numpy(posterior, tmp_path / "out", encoder)
    model = Predictor(str(folder / "draws.npz"))
    expected = model.predict(ROWS[:2]).centre
    names = ["<b>", "extra", "gain", "age", "code", "work|class"]
    columns = {name: [row.get(name) for row in ROWS[:2]] for name in names}
    np.testing.assert_allclose(model.predict(columns).centre, expected)
    pandas = pytest.importorskip("pandas")
    np.testing.assert_allclose(model.predict(pandas.DataFrame(columns)).centre, expected)
    polars = pytest.importorskip("polars")
    texts = {name: [None if cell is None else str(cell) for cell in cells] for name, cells in columns.items()}
    np.testing.assert_allclose(model.predict(polars.DataFrame(texts)).centre, expected)
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows({name: row.get(name) for name in names} for row in ROWS[:2])
    code = (
        "import sys\n"
        "for name in ('torch', 'sklearn', 'confide', 'scipy', 'pandas'): sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(folder)!r})\n"
        "import predict\n"
        "sys.exit(predict.main(sys.argv[1:]))"
    )
    words = [str(folder / "draws.npz"), str(tmp_path / "rows.csv"), str(tmp_path / "p.csv")]
    subprocess.run([sys.executable, "-c", code, *words], check=True)
    with (tmp_path / "p.csv").open() as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == ["probability_no", "probability_yes", "probability_maybe", "epistemic", "aleatoric"]
    np.testing.assert_allclose([float(row["probability_no"]) for row in found], expected[:, 0], atol=1e-9)


def test_what_has_no_input_is_refused(tmp_path: Path) -> None:
    encoder = Encoder(SCHEMAS["classes"])
    posterior = posterior_of(Categorical(3), 3, encoder.schema.features or 0)
    model = Predictor(str(export_numpy(posterior, tmp_path / "out", encoder) / "draws.npz"))
    with pytest.raises(ValueError, match="column '<b>': some cells hold no number"):
        model.predict({**ROWS[0], "<b>": "many"})
    with pytest.raises(ValueError, match="no column 'age'"):
        model.predict({name: cell for name, cell in ROWS[0].items() if name != "age"})


def test_an_encoder_that_forgets_to_clamp_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: rows outside the bounds are among those compared."""
    from confide.export.predictor import rows

    encoder = Encoder(SCHEMAS["classes"])
    posterior = posterior_of(Categorical(3), 3, encoder.schema.features or 0)
    model = Predictor(str(export_numpy(posterior, tmp_path / "out", encoder) / "draws.npz"))

    def unclamped(values: Any, low: Any, high: Any, missing: str, where: str) -> Any:
        return ((np.nan_to_num(values) - (low + high) / 2) / ((high - low) / 2)).astype(np.float32)

    monkeypatch.setattr(rows, "_scaled", unclamped)
    with pytest.raises(AssertionError):
        compared(model.predict(ROWS[1:2]), expected_of(posterior, encoder, ROWS[1:2]))
