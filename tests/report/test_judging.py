"""What the report says of quality: beside no learning, class by class, and of chains that did not settle."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import confide
from confide.models.predictive import ClassPredictive
from confide.posteriors.draws import Draws
from confide.report import SEPARATE, Evaluation, render
from confide.running.fit import Run
from tests.report.page_tools import Page
from tests.report.runs import HOSTILE, class_evaluation, real_evaluation


def constant(inputs: int = 60) -> Evaluation:
    """Always the first class, of which three in four are."""
    draws = torch.tensor([0.7, 0.3]).expand(4, inputs, 2)
    y = (torch.arange(inputs) % 4 == 0).long()
    return Evaluation(ClassPredictive(draws, torch.full((4,), 0.25)), y, SEPARATE)


def lead_of(page: str) -> str:
    return page.split('<p class="lead">')[1].split("</p>")[0]


def test_one_class_only_is_said_in_the_first_paragraph(class_run: Run) -> None:
    lead = lead_of(render(class_run, evaluation=constant()))
    assert "Always naming the most frequent class, “no”, is right 75.0% of the time" in lead
    assert "cannot tell the two apart: no learning shows" in lead
    assert "It names one class only, “no”, whatever it sees." in lead
    assert "one class only" not in lead_of(render(class_run, evaluation=class_evaluation()))


def test_classes_are_judged_one_by_one_and_their_names_stay_text(class_run: Run) -> None:
    page = Page(render(class_run, evaluation=class_evaluation()))
    assert page.problems == []
    titles = [text for _, text in page.headings]
    assert {"Class by class", "Calibration, class by class", "What was taken for what"} <= set(titles)
    assert f"named {HOSTILE}" in page.text
    for word in ("Baseline", "Area under the ROC curve", "Average precision", "Recall", "Could be chance"):
        assert word in page.text


def test_a_name_with_a_bar_in_it_is_one_cell(class_run: Run) -> None:
    schema = replace(class_run.schema, classes=("a|b", "c"))
    assert "a|b" in Page(render(replace(class_run, schema=schema), evaluation=class_evaluation())).text


def test_regression_stands_beside_the_mean(real_run: Run) -> None:
    page = render(real_run, evaluation=real_evaluation())
    assert "Always naming the mean of the test inputs is off by" in lead_of(page)
    assert "Class by class" not in page


@pytest.mark.parametrize("settled", [True, False])
def test_a_chain_that_did_not_settle_is_said_first(class_run: Run, settled: bool) -> None:
    from confide.evaluate.mixing import with_mixing

    old = class_run.posterior
    assert isinstance(old, Draws)
    noise = torch.randn(60, old.draws.shape[1], generator=torch.Generator().manual_seed(0))
    draws = noise if settled else noise.cumsum(0)
    facts = {"burn_in_steps": 10, "temperature": 1.5}
    posterior = with_mixing(Draws(old.module, old.likelihood, draws, torch.full((60,), 1 / 60), facts))
    page = render(replace(class_run, posterior=posterior))
    assert lead_of(page).startswith("The chain did not mix") is not settled
    text = Page(page).text
    for word in ("Did the chain settle?", "Effective draws", "Split R-hat", "Temperature"):
        assert word in text
    assert ("It did not converge" in text) is not settled


def test_run_and_model_measure_as_the_command_line_does(tmp_path: Path, class_run: Run) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(50, 3, generator=generator)
    class_run.save(tmp_path / "run", test=(x, (x[:, 0] > 0.5).long()))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["test"] == {"inputs": 50, "source": SEPARATE}
    assert record["judgement"]["task"] == "classification"
    assert len(record["judgement"]["classes"]) == 2
    assert record["judgement"]["intervals_95"]["accuracy"][0] < record["metrics"]["accuracy"]
    # float64 inputs of numpy as well as tensors of the network's own type
    class_run.save(tmp_path / "again", test=(x.double().numpy(), (x[:, 0] > 0.5).numpy().astype(int)), public=True)
    again = json.loads((tmp_path / "again" / "run.json").read_text())
    assert again["metrics"] == record["metrics"]
    assert again["test"]["source"] == "declared public"


def test_a_model_measures_in_the_units_of_its_target(tmp_path: Path) -> None:
    random = np.random.RandomState(0)
    X = random.uniform(-1, 1, (200, 2))
    y = 50 + 40 * X[:, 0] + random.normal(0, 5, 200)
    model = confide.PrivateBayesRegressor(
        "noise-aware", epsilon=50, delta=1e-3, bounds=(-1, 1), target_bounds=(0, 100), records=200, seed=0
    ).fit(X, y)
    model.save(tmp_path / "model", test=(X[:50], y[:50]))
    record = json.loads((tmp_path / "model" / "run.json").read_text())
    mean = model.predict(X[:50])
    assert record["metrics"]["rmse"] == pytest.approx(float(np.sqrt(np.mean((mean - y[:50]) ** 2))), rel=1e-5)
    assert record["judgement"]["baseline"]["value"] == pytest.approx(float(np.std(y[:50])), rel=1e-6)
    with pytest.raises(ValueError, match="must be a pair"):
        model.save(tmp_path / "other", test=X)
    assert not (tmp_path / "other").exists()


def test_private_records_are_refused_as_test_records(class_run: Run, tmp_path: Path) -> None:
    private = confide.PrivateData(torch.rand(4, 3), torch.zeros(4).long(), schema=class_run.schema)
    with pytest.raises(TypeError, match="PrivateData"):
        class_run.save(tmp_path / "run", test=private)
    assert not (tmp_path / "run").exists()
