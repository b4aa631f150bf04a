"""Models of columns where confide is not: additive and tabular posteriors as numpy, torch and ONNX, raw rows in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from confide.data.columns import Column
from confide.data.preprocessing import Encoder
from confide.data.schema import Schema
from confide.export.agreement import agreement, made_up_inputs
from confide.export.models import export_numpy, export_onnx, export_torch
from confide.export.predictor.main import Predictor
from confide.models.additive import AdditiveNetwork, additive, blocks_of
from confide.models.calibrated import Calibrated
from confide.models.likelihoods import Bernoulli, Categorical, Gaussian
from confide.models.tabular import tabular
from confide.posteriors.additive import AdditiveGaussian
from confide.posteriors.base import Posterior
from confide.posteriors.draws import Draws
from tests.export.test_raw_rows import COLUMNS, EXPORTS, ROWS, table_of

BENT = ((-3.0, 0.2), (-1.0, -0.1), (0.0, 0.3), (0.5, -0.4), (4.0, -0.9))
LIKELIHOODS: dict[str, Any] = {
    "categorical": Categorical(3),
    "bernoulli": Bernoulli(),
    "gaussian": Gaussian(0.2),
    "calibrated": Calibrated(3, 1.3, (0.2, -0.1, -0.1)),
    "calibrated, one logit": Calibrated(2, 0.8, (0.3, -0.3), one_logit=True),
    "calibrated with a floor": Calibrated(3, 1.3, (0.2, -0.1, -0.1), floor=0.2),
    "calibrated with a power": Calibrated(3, 1.3, (0.2, -0.1, -0.1), floor=0.1, power=1.6, levels=(-0.5, -1.5, -2.0)),
    "calibrated with a power below 1": Calibrated(3, 0.8, (0.2, -0.1, -0.1), power=0.6),
    "calibrated with a floor, one logit": Calibrated(2, 0.8, (0.3, -0.3), one_logit=True, floor=0.1),
    "calibrated with a curve": Calibrated(2, 1.4, (0.2, -0.2), floor=0.1, curve=BENT),
    "calibrated with a curve, one logit": Calibrated(2, 0.8, (0.3, -0.3), one_logit=True, curve=BENT),
}
BLOCKS = blocks_of(Schema(columns=COLUMNS, classes=("a", "b")), 0)


def made_scales_(network: AdditiveNetwork) -> None:
    """Quantile scales, centres and amplitudes as a fit leaves them: of no simple form."""
    generator, features = torch.Generator().manual_seed(3), network.features
    steps = torch.rand(features.heights.shape, generator=generator) ** 4
    features.heights.copy_(steps.cumsum(1) / steps.sum(1, keepdim=True))
    features.centres.copy_(0.3 * torch.rand(features.centres.shape, generator=generator))
    features.centres[0] = 0.0
    features.amplitudes.mul_(0.5 + torch.rand(features.amplitudes.shape, generator=generator))


def posterior_of(kind: str, likelihood: Any, blocks: tuple[int, ...] = BLOCKS) -> Posterior:
    generator, outputs = torch.Generator().manual_seed(1), likelihood.outputs
    if kind == "additive":
        network = additive(blocks, outputs, waves=5)
        made_scales_(network)
        size = network.recipe.features * outputs
        centre = torch.randn(size, generator=generator)
        return AdditiveGaussian(network, likelihood, centre, 0.1 * torch.rand(size, generator=generator))
    module = tabular(blocks, outputs, (4, 3), waves=5, generator=generator)
    made_scales_(module.effects)
    module.scales.copy_(0.5 + torch.rand(module.scales.shape, generator=generator))
    module.unit.fill_(1.7)
    size = sum(parameter.numel() for parameter in module.parameters())
    weights = torch.tensor([0.5, 0.2, 0.3])
    return Draws(module, likelihood, torch.randn(3, size, generator=generator), weights)


def expected_of(posterior: Posterior, x: Tensor) -> Any:
    """Of the draws that are written: for an additive posterior, which predicts in closed form, they stand for it."""
    if not isinstance(posterior, AdditiveGaussian):
        return posterior.summary(x)
    draws, weights = posterior.weighted_draws()
    return Draws(posterior.module, posterior.likelihood, draws, weights.float()).summary(x)


def schema_of(likelihood: Any) -> Schema:
    if isinstance(likelihood, Gaussian):
        return Schema(target="y", target_bounds=(-50, 150), columns=COLUMNS)
    classes = ("no", "yes", "maybe")[: max(2, likelihood.outputs)]
    return Schema(classes=classes, target="y", columns=COLUMNS)


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("kind", ["additive", "tabular"])
def test_raw_rows_give_the_same_numbers(kind: str, likelihood: str, export: str, tmp_path: Path) -> None:
    if export == "onnx":
        pytest.importorskip("onnxruntime")
    posterior, schema = posterior_of(kind, LIKELIHOODS[likelihood]), schema_of(LIKELIHOODS[likelihood])
    encoder = Encoder(schema)
    write, file = EXPORTS[export]
    write(posterior, tmp_path / "out", encoder)
    model = Predictor(str(tmp_path / "out" / file))
    found = model.predict(ROWS)
    x = torch.as_tensor(encoder._features(table_of(ROWS), private=True))
    expected = expected_of(posterior, x)
    if schema.classes is None:
        expected = expected.rescaled(encoder.target_scale, encoder.target_centre)
    for part in ("centre", "epistemic", "aleatoric"):
        found_part, expected_part = getattr(found, part), getattr(expected, part).numpy()
        np.testing.assert_allclose(found_part, expected_part, rtol=2e-3, atol=2e-4, err_msg=part)


@pytest.mark.parametrize("blocks", [(0, 0), (3, 2)])
@pytest.mark.parametrize("export", EXPORTS)
def test_numbers_or_categories_alone(blocks: tuple[int, ...], export: str, tmp_path: Path) -> None:
    if export == "onnx":
        pytest.importorskip("onnxruntime")
    posterior = posterior_of("tabular", Categorical(3), blocks)
    write, file = EXPORTS[export]
    write(posterior, tmp_path / "out")
    x = torch.rand(7, 2 if blocks == (0, 0) else 5, generator=torch.Generator().manual_seed(2))
    x = x if blocks == (0, 0) else (x > 0.5).float()
    found = Predictor(str(tmp_path / "out" / file)).predict(x.numpy())
    np.testing.assert_allclose(found.centre, posterior.summary(x).centre.numpy(), atol=1e-5)


def test_the_mean_of_an_additive_export_is_that_of_its_closed_form(tmp_path: Path) -> None:
    posterior = posterior_of("additive", Gaussian(0.2))
    x = torch.rand(50, 12, generator=torch.Generator().manual_seed(2))[:, : sum(max(1, width) for width in BLOCKS)]
    export_numpy(posterior, tmp_path / "out")
    found, exact = Predictor(str(tmp_path / "out" / "draws.npz"))(x.numpy()), posterior.summary(x)
    np.testing.assert_allclose(found.centre, exact.centre.numpy(), atol=1e-4)
    assert np.abs(found.epistemic / exact.epistemic.numpy() - 1).mean() < 0.3  # 50 pairs: an error of a fifth


def test_the_card_says_how_far_draws_are_from_the_law() -> None:
    """A card said nothing of it, and the numbers of one row differed in the third digit."""
    encoder = Encoder(schema_of(Categorical(3)))
    law, listed = (posterior_of(kind, Categorical(3)) for kind in ("additive", "tabular"))
    assert "The files hold 3 draws" in agreement(listed, encoder)
    assert "averages over the same draws" in agreement(listed, encoder)
    said = agreement(law, encoder)
    assert "The files hold 100 draws" in said
    largest = float(re.search(r"([0-9.e-]+) at most", said).group(1))  # type: ignore[union-attr]
    x = made_up_inputs(sum(max(1, width) for width in BLOCKS), encoder)
    found = (expected_of(law, x).centre - law.summary(x).centre).abs().max()
    assert largest == pytest.approx(float(found), rel=1e-3)
    assert 1e-5 < largest < 0.1


def test_a_missing_number_without_an_input_is_nan_in_a_graph(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    schema = Schema(
        classes=("no", "yes", "maybe"), target="y", columns=(Column("age", bounds=(0, 1), missing="refuse"),)
    )
    export_onnx(posterior_of("additive", Categorical(3), (0,)), tmp_path / "out", Encoder(schema))
    session = runtime.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    (centre,) = session.run(["centre"], {"age": np.array([[0.3], [np.nan]])})
    assert np.isfinite(centre[0]).all()
    assert np.isnan(centre[1]).all()


def test_programs_take_any_number_of_rows(tmp_path: Path) -> None:
    posterior = posterior_of("tabular", Categorical(3), (0, 0, 2))
    export_torch(posterior, tmp_path / "out")
    model = Predictor(str(tmp_path / "out" / "model.pt2"))
    for rows in (1, 3, 5000):
        assert model(np.zeros((rows, 4))).centre.shape == (rows, 3)
