"""Pictures through every door: features by default, predictions and files from raw pictures, clear refusals."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import confide
from confide.cli.app import main
from confide.data.pictures import PictureFeatures
from confide.data.schema import Schema
from confide.data.table import Table
from confide.errors import CuratorNote, Refusal
from confide.running.artefacts import load_run
from confide.workflow.facts import settle, with_pixel_range
from confide.workflow.request import Request
from confide.workflow.run import job_of, run_request

SIDE, RECORDS = 10, 240


def _bars(rows: int, seed: int) -> tuple[Any, Any]:
    """Upright and lying bars, in noise."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, rows)
    pictures = random.integers(0, 60, (rows, SIDE, SIDE))
    for place, label in enumerate(labels):
        at = random.integers(2, SIDE - 2)
        if label:
            pictures[place, :, at] += 180
        else:
            pictures[place, at] += 180
    return pictures.astype(np.uint8), labels


def _fitted(**more: Any) -> Any:
    x, y = _bars(RECORDS, 0)
    settings: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-4, "classes": 2, "records": RECORDS, **more}
    return confide.PrivateBayesClassifier(**settings).fit(x, y)


@pytest.fixture(scope="module")
def model() -> Any:
    return _fitted()


def test_pictures_get_features_and_their_method_by_default(model: Any) -> None:
    x, y = _bars(200, 1)
    assert model.run_.method.name == "features"
    assert model.encoder_.layout == "features"
    assert (model.predict(x) == y).mean() > 0.85  # pixels alone tell nothing: bars stand anywhere


def test_all_of_it_is_within_epsilon_and_the_pixel_range_is_that_of_bytes(model: Any) -> None:
    assert model.privacy_.epsilon() <= 8.0
    assert model.schema_.bounds == (0.0, 255.0)
    assert len(model.privacy_.events) >= 3  # the mean feature, the steps, the recalibration


def test_the_range_of_pixels_is_not_read_off_the_records() -> None:
    """One bright pixel would otherwise show in everybody's features."""
    dark = Table.from_arrays(np.zeros((4, SIDE, SIDE), dtype=np.uint8), [0, 1, 0, 1])
    assert with_pixel_range(Schema(), dark).bounds == (0.0, 255.0)
    real = Table.from_arrays(np.zeros((4, SIDE, SIDE)), [0, 1, 0, 1])
    assert with_pixel_range(Schema(), real).bounds is None
    assert settle(Request(dark, delta=1e-2, assume_public=True)).schema.bounds == (0.0, 255.0)
    columns = Table.from_arrays(np.zeros((4, 30), dtype=np.uint8), [0, 1, 0, 1])
    assert with_pixel_range(Schema(), columns).bounds is None


def test_a_module_of_ones_own_sees_pixels_and_a_named_method_the_same_features() -> None:
    x, y = _bars(40, 0)
    facts = Schema(records=40, classes=2)
    request = Request(Table.from_arrays(x, y), facts=facts, delta=1e-3)
    own = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 2))
    seen = settle(Request(Table.from_arrays(x, y), facts=facts, delta=1e-3, module=own))
    assert seen.encoder.layout == "image"
    settled = settle(request)
    assert settled.encoder.layout == "features"
    assert job_of(request.with_method("sgld", None), settled).method.name == "sgld"
    assert job_of(request, settled).method.name == "features"


def test_saved_it_predicts_raw_pictures_in_a_fresh_process(model: Any, tmp_path: Path) -> None:
    x, y = _bars(30, 2)
    out = model.save(tmp_path / "run", test=(x, y))
    assert "features" in (out / "report.html").read_text()
    np.savez(tmp_path / "new.npz", x_test=x)
    command = [sys.executable, "-m", "confide", "predict", str(out), str(tmp_path / "new.npz")]
    subprocess.run([*command, "--out", str(tmp_path / "p.csv")], check=True, capture_output=True)
    with (tmp_path / "p.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = np.array([float(row["probability_1"]) for row in rows])
    np.testing.assert_allclose(found, model.predict_proba(x)[:, 1], atol=1e-5)


def test_a_run_of_a_version_that_made_other_numbers_of_a_picture_is_one_sentence(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = model.save(tmp_path / "run")
    monkeypatch.setattr(PictureFeatures, "count", property(lambda self: 7))
    with pytest.raises(Refusal, match="numbers of a picture, and this version makes 7; fit again"):
        load_run(out)


def test_colours_odd_sizes_and_a_record_of_another_world_go_through() -> None:
    random = np.random.default_rng(0)
    x = random.uniform(0, 1, (60, 7, 13, 3))
    x[3, 2, 2, 1], x[4] = np.nan, 1e30
    table, facts = Table.from_arrays(x, random.integers(0, 3, 60)), Schema(records=60, classes=3, bounds=(0, 1))
    with pytest.warns(CuratorNote, match="1 of 60"):
        found = run_request(Request(table, facts=facts, delta=1e-3, steps=4))
    assert bool(torch.isfinite(found.run.posterior.mean()).all())


def test_a_folder_of_pictures_from_the_command_line(tmp_path: Path) -> None:
    x, y = _bars(60, 3)
    for place, (picture, label) in enumerate(zip(x, y, strict=True)):
        folder = tmp_path / "pictures" / ("train" if place < 40 else "test") / ("upright" if label else "lying")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(folder / f"{place}.png")
    facts = tmp_path / "facts.toml"
    facts.write_text(f'records = 40\nclasses = ["lying", "upright"]\nshape = [{SIDE}, {SIDE}]\n')
    out = tmp_path / "out"
    command = ["fit", str(tmp_path / "pictures"), "--facts", str(facts), "--epsilon", "5", "--delta", "1e-3"]
    assert main([*command, "--out", str(out)]) == 0
    assert (out / "report.html").exists()


def test_the_mean_feature_is_paid_for_before_anything_is_read() -> None:
    """A ceiling that suffices for the steps and not for the mean beside them refuses all of it."""
    ledger = confide.Ledger()
    spent = _fitted(ledger=ledger, name="bars", steps=3).privacy_.events
    assert tuple(ledger.events("bars")) == tuple(spent)
