"""Likelihoods by name, through the estimators and the command line."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import confide
from confide.cli import fit_options
from confide.data.preprocessing import Encoder
from confide.data.schema import Schema
from confide.data.table import Table
from confide.errors import Refusal
from confide.models.counts import NegativeBinomial, Poisson
from confide.running.artefacts import load_run
from confide.workflow.named_likelihood import TASKS, in_own_units, made

RECORDS = 300


def counts(spread: float = 0.0) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (RECORDS, 2))
    mean = np.exp(1 + 1.5 * x[:, 0])
    return x, random.poisson(mean * (random.gamma(1 / spread, spread, RECORDS) if spread else 1.0)).astype(float)


def test_the_help_names_them_all() -> None:
    assert set(fit_options.NAMED) == set(TASKS)


@pytest.mark.parametrize("name", ["poisson", "negative_binomial"])
def test_counts_are_learnt_in_their_units(name: str, tmp_path: Path) -> None:
    x, y = counts(0.3)
    model = confide.PrivateBayesRegressor(
        likelihood=name, bounds=(-1, 1), target_bounds=(0, 60), records=RECORDS, epsilon=50, delta=1e-4, hidden=(),
        steps=300, batch=100, clip=5.0, seed=0,
    )  # fmt: skip
    model.fit(x, y)
    assert isinstance(model.posterior_.likelihood, Poisson | NegativeBinomial)
    low, high = model.predict(np.array([[-0.8, 0.0], [0.8, 0.0]]))
    assert low < 2.5 < high < 30, "e^(1 + 1.5 x) is 0.8 and 9.0"
    interval = model.predictive(x[:5]).interval(0.9)
    assert bool((interval == interval.round()).all()), "ends are counts"
    model.save(tmp_path / "run")
    saved = load_run(tmp_path / "run")
    assert saved.encoder is not None
    encoder = Encoder.from_dict(saved.encoder)
    assert (encoder.target_scale, encoder.target_centre) == (1.0, 0.0)


@pytest.mark.parametrize("name", ["laplace", "student-t"])
def test_numbers_with_outliers(name: str) -> None:
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (RECORDS, 1))
    y = 10 * x[:, 0] + random.standard_t(2, RECORDS)
    model = confide.PrivateBayesRegressor(
        likelihood=name, noise_scale=0.1, bounds=(-1, 1), target_bounds=(-20, 20), records=RECORDS, epsilon=50,
        delta=1e-4, hidden=(), steps=200, batch=100, seed=0,
    )  # fmt: skip
    low, high = model.fit(x, y).predict(np.array([[-0.8], [0.8]]))
    assert low < -3
    assert high > 3


def test_an_order_of_classes() -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (RECORDS, 1))
    model = confide.PrivateBayesClassifier(
        likelihood="ordinal", bounds=(-1, 1), classes=4, records=RECORDS, epsilon=50, delta=1e-4, hidden=(), steps=200,
        batch=100, seed=0,
    )  # fmt: skip
    model.fit(x, np.digitize(x[:, 0], [-0.5, 0.0, 0.5]))
    low, high = model.predict(np.array([[-0.95], [0.95]]))
    assert low < high


@pytest.mark.parametrize(
    ("name", "task"), [("poisson", "classification"), ("ordinal", "regression"), ("tweedie", None)]
)
def test_a_name_that_does_not_fit_is_refused(name: str, task: Any) -> None:
    with pytest.raises(Refusal, match=r"likelihood="):
        confide.Request(Table(), task=task, likelihood=name).check()


def test_names_are_taken_with_hyphens_or_underscores() -> None:
    sizes: Any = {"delta": 1e-4, "records": 100, "steps": 2, "noise_multiplier": 1.0}
    one: Any = confide.plan(sampling="full_batch", adjacency="replace_one", clipping="per_layer", **sizes)
    assert one == confide.plan(sampling="full-batch", adjacency="replace-one", clipping="per-layer", **sizes)
    given: Any = {"sampling": "fixed_size", "adjacency": "add_remove", "method": "mc_dropout"}
    request = confide.Request(Table(), **given)
    assert (request.sampling, request.adjacency) == ("fixed-size", "add-remove")
    assert confide.methods.get("mc_dropout") is confide.methods.get("mc-dropout")


def test_what_is_made_follows_the_facts() -> None:
    assert made("poisson", Schema(target_bounds=(0, 16)), None) == Poisson(4.0)
    assert made(None, Schema(), None) is None
    assert in_own_units("Negative_Binomial")
    assert not in_own_units("laplace")


def test_targets_in_their_units_are_clamped_alone() -> None:
    encoder = Encoder(Schema(bounds=(0, 1), target_bounds=(0, 9)), scaling="plain")
    assert encoder.targets([0, 4, 30]).tolist() == [0.0, 4.0, 9.0]
    private = encoder.training(Table.from_arrays(np.zeros((2, 1)), np.array([np.nan, 3.0])))[1]
    assert np.isnan(private[0])
    assert private[1] == 3.0
    assert Encoder.from_dict(encoder.to_dict()) == encoder


def test_the_command_line_learns_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from confide.cli.app import main

    x, y = counts()
    with (tmp_path / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "visits"], *np.column_stack([x, y]).tolist()])
    (tmp_path / "facts.toml").write_text(
        f"records = {RECORDS}\ntarget = 'visits'\ntarget_bounds = [0, 60]\nbounds = [-1, 1]\n"
    )
    arguments = [
        "fit",
        "train.csv",
        "--facts",
        "facts.toml",
        "--test",
        "test.csv",
        "--epsilon",
        "20",
        "--delta",
        "1e-4",
    ]
    (tmp_path / "test.csv").write_text((tmp_path / "train.csv").read_text())
    import os

    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        assert main([*arguments, "--likelihood", "poisson", "--steps", "50", "--out", "run", "--delta", "1e-4"]) == 0
        assert main(["predict", "run", "test.csv", "--out", "p.csv"]) == 0
    finally:
        os.chdir(before)
    assert (tmp_path / "p.csv").read_text().startswith("mean,")
