"""The model card: the statement, the numbers and their intervals, and names that stay text."""

from __future__ import annotations

from pathlib import Path

from confide.data.preprocessing import Encoder
from confide.export.card import model_card
from confide.running.artefacts import load_run, save_run
from confide.running.fit import Run
from tests.report.runs import class_evaluation, make_run, reals_schema


def test_card_of_a_classifier(class_run: Run, tmp_path: Path) -> None:
    config = {"train": "/private/place/patients.csv"}
    save_run(class_run, tmp_path / "run", evaluation=class_evaluation(), config=config)
    saved = load_run(tmp_path / "run")
    card = model_card(saved)
    assert saved.privacy.statement() in card
    for word in (
        "| Accuracy |",
        "95 % interval",
        "| Epsilon |",
        "Always naming the most frequent class",
        "Too few draws",
    ):
        assert word in card, word
    assert "`<script>alert('x')</script>\"&`" in card  # as code: Markdown shows it and runs nothing
    assert "<script>" not in card.replace("`<script>alert('x')</script>\"&`", "").replace("no, <script>", "")
    assert "/private/place" not in card


def test_card_without_a_test_set(tmp_path: Path) -> None:
    run = make_run(reals_schema(), seed=3)
    save_run(run, tmp_path / "run", encoder=Encoder(run.schema))
    card = model_card(load_run(tmp_path / "run"))
    assert "Not measured" in card
    assert "no privacy is claimed" in card
