"""`fit` and `predict` from a file to a file."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from confide import methods
from confide.cli import fit as fit_command
from confide.privacy.accountants import sound_epsilon
from confide.privacy.events import event_from_dict
from confide.privacy.ledger import Ledger
from confide.rules import default_batch
from confide.running.artefacts import load_run
from tests.cli.conftest import Result, heights, is_refusal, patients

Run = Callable[..., Result]
QUICK = ("--epsilon", 20, "--delta", 1e-3, "--steps", 60, "--batch", 60, "--json")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_classification_from_a_file_to_predictions(run: Run, files: Path) -> None:
    """The whole way. Catches swapped classes, a lost encoder, a posterior that was not saved, a wrong summary."""
    out, budget = files / "run", files / "budget.db"
    words = ("fit", files / "train.csv", "--test", files / "test.csv", "--facts", files / "facts.toml")
    fitted = run(*words, "--method", "sgld", "--ledger", budget, "--out", out, *QUICK)
    assert (fitted.code, fitted.err) == (0, "")
    summary = fitted.json
    assert summary["method"] == "sgld"
    assert summary["out"] == str(out)
    assert summary["seconds"] > 0
    assert {"accuracy", "nll", "ece", "mce"} <= set(summary["metrics"])
    assert summary["metrics"]["accuracy"] > 0.75
    assert summary["test"] == "separate hold-out declared by the user"
    assert summary["assumed_public"] == []
    assert 19.9 < summary["epsilon"]["pld"] <= 20
    assert {path.name for path in out.iterdir()} == {"posterior.safetensors", "run.json", "report.html"}

    record = json.loads((out / "run.json").read_text())
    events = [event_from_dict(event) for event in record["events"]]
    assert sound_epsilon(events, 1e-3) == pytest.approx(summary["epsilon"]["pld"])
    (entry,) = Ledger(budget).entries()
    assert (entry.purpose, entry.dataset, (entry.event,)) == ("fit sgld", "train.csv", tuple(events))

    new = files / "new.csv"  # without the target, and with a column that the model does not know
    table = [line.split(",") for line in (files / "test.csv").read_text().split()]
    new.write_text("\n".join(",".join([*line[:3], "extra"]) for line in table))
    predicted = run("predict", out, new, "--out", files / "p.csv", "--json")
    assert (predicted.code, predicted.err, predicted.json["rows"]) == (0, "", 60)
    found = rows(files / "p.csv")
    assert list(found[0]) == [
        *("probability_no", "probability_yes", "predicted", "epistemic", "aleatoric", "interval_low", "interval_high")
    ]
    for row in found:
        p = {label: float(row[f"probability_{label}"]) for label in ("no", "yes")}
        assert sum(p.values()) == pytest.approx(1, abs=1e-5)
        assert row["predicted"] == max(p, key=lambda label: p[label])
        assert float(row["epistemic"]) >= 0
        assert float(row["interval_low"]) <= float(row["interval_high"])
    right = np.mean([row["predicted"] == line[3] for row, line in zip(found, table[1:], strict=True)])
    assert right == pytest.approx(summary["metrics"]["accuracy"])


def test_regression_is_told_in_the_units_of_the_target(run: Run, tmp_path: Path) -> None:
    """Catches predictions left on the scaled axis, and clamped truth: one test height lies far outside the bounds."""
    (tmp_path / "train.csv").write_text(heights(400, 0))
    (tmp_path / "test.csv").write_text(heights(100, 1) + "0.0,0.0,900\n")
    (tmp_path / "facts.toml").write_text(
        'records = 400\ntarget = "height"\ntarget_bounds = [100, 200]\nbounds = [-1, 1]\n'
    )
    words = ("fit", tmp_path / "train.csv", "--test", tmp_path / "test.csv", "--facts", tmp_path / "facts.toml")
    plan = ("--epsilon", 20, "--delta", 1e-3, "--batch", 100, "--epochs", 100, "--clip", 4)
    model = ("--method", "sgld", "--set", "step_size=1e-4", "--noise-scale", 0.1, "--seed", 3)
    fitted = run(*words, *plan, *model, "--out", tmp_path / "run", "--json").json
    assert {"rmse", "log_likelihood", "coverage_90"} <= set(fitted["metrics"])
    assert 60 < fitted["metrics"]["rmse"] < 90  # 750 / sqrt(101), from the one outlier
    assert 0.8 < fitted["metrics"]["coverage_90"] < 1

    narrow = run("predict", tmp_path / "run", tmp_path / "test.csv", "--out", tmp_path / "n.csv", "--level", 0.5)
    wide = run("predict", tmp_path / "run", tmp_path / "test.csv", "--out", tmp_path / "w.csv")
    assert narrow.code == wide.code == 0
    assert "101 predictions" in wide.out
    found = rows(tmp_path / "w.csv")
    assert list(found[0]) == ["mean", "epistemic", "aleatoric", "interval_low", "interval_high"]
    truth = [float(row["height"]) for row in rows(tmp_path / "test.csv")]
    errors = [float(row["mean"]) - value for row, value in zip(found, truth, strict=True)]
    assert np.median(np.abs(errors)) < 6
    for inner, outer in zip(rows(tmp_path / "n.csv"), found, strict=True):
        assert float(outer["aleatoric"]) == pytest.approx((0.1 * 50) ** 2, rel=1e-4)
        assert float(outer["interval_low"]) < float(inner["interval_low"]) < float(outer["mean"])


def test_predictions_are_overwritten_only_when_asked(run: Run, files: Path) -> None:
    out, table = files / "run", files / "p.csv"
    assert run("fit", "digits", *QUICK, "--delta", 1e-4, "--steps", 3, "--out", out).code == 0
    table.write_text("precious")
    refused = run("predict", out, "digits", "--out", table)
    assert is_refusal(refused)
    assert "--overwrite" in refused.err
    assert table.read_text() == "precious"
    assert run("predict", out, "digits", "--out", table, "--overwrite").code == 0
    assert len(rows(table)) == 360
    assert sorted(path.name for path in files.iterdir()) == ["facts.toml", "p.csv", "run", "test.csv", "train.csv"]


def test_digits_by_default_is_good_and_says_what_it_promises(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of the demo. Catches defaults that stop learning, and an output that leaves out the statement."""
    monkeypatch.setenv("COLUMNS", "80")
    result = run("fit", "digits", "--method", "sgld", "--epsilon", 3, "--delta", 1e-4, "--out", tmp_path / "demo")
    assert result.code == 0
    assert load_run(tmp_path / "demo").metrics["accuracy"] > 0.85
    assert "declared public; not protected" in result.out
    assert "calibration error" in result.out
    assert "differential privacy, add-remove" in result.out
    assert max(len(line) for line in result.out.splitlines() if str(tmp_path) not in line) <= 80


def test_assumed_facts_are_named_everywhere(run: Run, files: Path) -> None:
    """Catches facts read off the data in silence."""
    words = ("fit", files / "train.csv", "--target", "ill", "--assume-public", "--steps", 2, "--delta", 1e-3)
    shown = run(*words, "--epsilon", 5, "--out", files / "one")
    assert shown.code == 0
    flat = " ".join(shown.out.split())
    assert "Assumed public on your word, read off the data and not protected: records, classes, column age" in flat
    assert "No test set was given" in flat
    record = json.loads((files / "one" / "run.json").read_text())
    assert "read off the data" in record["statement"]
    assert record["metrics"] == {}
    assert "assumed" in (files / "one" / "report.html").read_text()


def test_neither_bounds_nor_assume_public_is_refused(run: Run, files: Path) -> None:
    refused = run("fit", files / "train.csv", "--target", "ill", "--epsilon", 1, "--out", files / "run")
    assert is_refusal(refused)
    assert "--facts FILE.toml" in refused.err
    assert "--assume-public" in refused.err


def test_a_seeded_run_repeats_itself_and_claims_nothing(run: Run, files: Path) -> None:
    """Catches a seed that does not reach the noise, and one that is not stamped."""
    words = ("fit", files / "train.csv", "--facts", files / "facts.toml", "--seed", 7, *QUICK, "--steps", 5)
    first, second = run(*words, "--out", files / "a").json, run(*words, "--out", files / "b").json
    assert first["seeded"] is second["seeded"] is True
    assert (files / "a" / "posterior.safetensors").read_bytes() == (files / "b" / "posterior.safetensors").read_bytes()
    assert "no privacy claim" in (files / "a" / "report.html").read_text().lower()


@pytest.mark.parametrize("kind", ["parquet", "npz", "csv.gz"])
def test_other_kinds_of_files(run: Run, files: Path, kind: str) -> None:
    train = files / f"train.{kind}"
    facts: tuple[Any, ...] = ("--facts", files / "facts.toml")
    if kind == "parquet":
        from pyarrow import csv as arrow_csv
        from pyarrow import parquet

        parquet.write_table(arrow_csv.read_csv(files / "train.csv"), train)
    elif kind == "npz":
        x = np.random.RandomState(0).uniform(size=(90, 3))
        np.savez(train, x_train=x[:60], y_train=x[:60, 0] > 0.5, x_test=x[60:], y_test=x[60:, 0] > 0.5)
        facts = ("--assume-public",)
    else:
        import gzip

        train.write_bytes(gzip.compress((files / "train.csv").read_bytes()))
    result = run("fit", train, *facts, *QUICK, "--steps", 2, "--batch", 20, "--out", files / "run")
    assert (result.code, result.err) == (0, "")
    assert bool(result.json["metrics"]) == (kind == "npz")


def test_settings_and_layers_reach_the_method(run: Run, files: Path) -> None:
    words = ("fit", files / "train.csv", "--facts", files / "facts.toml", *QUICK, "--steps", 2, "--out", files / "run")
    method = ("--method", "sgd", "--set", "optimiser=adam", "--set", "learning_rate=0.125", "--prior-scale", 3)
    assert run(*words, *method, "--hidden", "5,4").code == 0
    record = json.loads((files / "run" / "run.json").read_text())
    parameters = record["method"]["parameters"]
    assert (parameters["optimiser"], parameters["learning_rate"]) == ("adam", 0.125)
    assert parameters["prior"]["scale"] == 3
    assert load_run(files / "run").posterior.module.recipe.hidden == (5, 4)


def test_a_method_in_a_new_file_is_offered_with_no_other_edit(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a list of methods kept anywhere but in the folder."""
    (tmp_path / "newcomer.py").write_text(
        '"""A newcomer that does nothing."""\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n'
        "from confide.methods.base import Method\n"
        "@dataclass(frozen=True)\nclass Newcomer(Method):\n    speed: float = 1.0\n"
        "    name: ClassVar[str] = 'newcomer'\n"
        "    init = ask = tell = posterior = None\n"
    )
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    methods.all_methods.cache_clear()
    try:
        app = typer.Typer(rich_markup_mode=None)
        fit_command.register(app)
        app.command("other")(lambda: None)
        shown = CliRunner().invoke(app, ["fit", "--help"]).stdout
        refused = run("fit", "digits", "--method", "nonsense", "--epsilon", 1, "--out", tmp_path / "x")
    finally:
        monkeypatch.undo()  # the path first: names() below would find and keep the newcomer for later tests
        methods.all_methods.cache_clear()
        sys.modules.pop("confide.methods.newcomer", None)
    assert "A newcomer that does nothing (speed)" in shown
    assert is_refusal(refused)
    assert "newcomer" in refused.err
    assert all(name in refused.err and f" {name} " in shown for name in methods.names())


@pytest.mark.parametrize("records", [2, 3, 10, 100, 511, 512, 5_000, 20_000, 60_000, 10**6, 10**9])
def test_the_rule_for_batches_is_possible_for_every_size(records: int) -> None:
    """Catches a rule that asks for more records than there are, or for none."""
    assert 1 <= default_batch(records) <= max(1, records // 4)


def test_a_test_file_that_is_the_training_file_is_refused(run: Run, files: Path) -> None:
    """Metrics on the training records would publish them."""
    words = ("fit", files / "train.csv", "--facts", files / "facts.toml", "--epsilon", 1, "--out", files / "run")
    link = files / "link.csv"
    link.symlink_to(files / "train.csv")
    for path in (files / "train.csv", link):
        assert is_refusal(run(*words, "--test", path))
    assert not (files / "run").exists()


def test_a_run_that_diverges_says_so(run: Run, files: Path) -> None:
    """Catches a directory full of NaN that looks like a result."""
    words = ("fit", files / "train.csv", "--facts", files / "facts.toml", *QUICK, "--out", files / "run")
    result = run(*words, "--method", "sgd", "--set", "learning_rate=1e30", "--steps", 20)
    assert is_refusal(result)
    assert "stays charged" in result.err
    assert not (files / "run").exists()


def test_unseen_classes_in_the_test_file_are_refused_before_the_charge(run: Run, files: Path) -> None:
    (files / "test.csv").write_text(patients(20, 3).replace("yes", "perhaps"))
    words = ("fit", files / "train.csv", "--facts", files / "facts.toml", "--test", files / "test.csv")
    result = run(*words, *QUICK, "--ledger", files / "b.db", "--out", files / "run")
    assert is_refusal(result)
    assert "--test" in result.err
    assert not (files / "b.db").exists()


# -- the noise of a regression target ------------------------------------------------------------------------


def tall(tmp_path: Path, noise: float) -> tuple[object, ...]:
    """Files of heights whose noise is this part of half the declared range, and the options that name them."""
    random = np.random.RandomState(4)
    for name, count in (("train", 6000), ("test", 2000)):
        a, b = random.uniform(-1, 1, (2, count))
        y = 150 + 30 * a - 10 * b + noise * 100 * random.standard_normal(count)
        text = "\n".join(f"{one:.4f},{two:.4f},{three:.4f}" for one, two, three in zip(a, b, y, strict=True))
        (tmp_path / f"{name}.csv").write_text(f"a,b,height\n{text}\n")
    (tmp_path / "facts.toml").write_text(
        'records = 6000\ntarget = "height"\ntarget_bounds = [50, 250]\nbounds = [-1, 1]\n'
    )
    files = ("--test", tmp_path / "test.csv", "--facts", tmp_path / "facts.toml")
    return ("fit", tmp_path / "train.csv", *files, "--hidden", "", "--epsilon", 1, "--delta", "1e-5", "--steps", 300)


@pytest.mark.parametrize(("method", "noise"), [("sgld", 0.03), ("sgd", 0.3)])
def test_the_noise_of_the_target_is_learnt_and_paid_for(run: Run, tmp_path: Path, method: str, noise: float) -> None:
    """With a noise scale of 0.2, coverage would be near 1 or near 0.7; unpaid, the epsilons would not add up."""
    book, out = tmp_path / "book.db", tmp_path / "run"
    found = run(*tall(tmp_path, noise), "--method", method, "--ledger", book, "--out", out, "--json").json
    assert 0.86 < found["metrics"]["coverage_90"] < 0.94
    assert found["target_noise"]["standard_deviation"] == pytest.approx(100 * noise, rel=0.25)
    assert found["target_noise"]["epsilon"] == pytest.approx(0.2)
    entries = Ledger(book).entries()
    assert [entry.purpose for entry in entries] == [f"fit {method} and noise of the target"] * 2
    events = [event_from_dict(event) for event in json.loads((out / "run.json").read_text())["events"]]
    assert [entry.event for entry in entries] == events
    assert 0.99 < sound_epsilon(events, 1e-5) <= 1
    assert "one histogram of residuals, alone epsilon 0.2" in (out / "report.html").read_text()
    reloaded = load_run(out).posterior.likelihood.noise_scale  # type: ignore[attr-defined]
    assert 100 * reloaded == pytest.approx(found["target_noise"]["standard_deviation"])


def test_people_are_told_what_learning_the_noise_costs(run: Run, tmp_path: Path) -> None:
    shown = run(*tall(tmp_path, 0.1), "--steps", 20, "--out", tmp_path / "run")
    assert shown.code == 0
    assert "learnt privately from one histogram of residuals: alone epsilon 0.2" in " ".join(shown.out.split())


@pytest.mark.parametrize("method", ["sgd", "sep"])
def test_a_noise_that_was_typed_is_kept_and_costs_nothing(run: Run, tmp_path: Path, method: str) -> None:
    words = ("--method", method, "--noise-scale", 0.07, "--steps", 20, "--out", tmp_path / "run")
    found = run(*tall(tmp_path, 0.1), *words, "--json").json
    assert found["target_noise"]["standard_deviation"] == pytest.approx(7, rel=1e-3)
    assert found["target_noise"]["epsilon"] is None
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert len(record["events"]) == 1


@pytest.mark.parametrize(
    "words",
    [
        ("--sampling", "full-batch"),
        ("--adjacency", "replace-one"),
        ("--sampling", "shuffle", "--adjacency", "replace-one"),
    ],
)
def test_learning_the_noise_composes_with_every_sampling(run: Run, tmp_path: Path, words: tuple[object, ...]) -> None:
    found = run(
        *tall(tmp_path, 0.1), *words, "--method", "sgd", "--steps", 40, "--out", tmp_path / "run", "--json"
    ).json
    assert 0.98 < found["epsilon"]["pld"] <= 1
    assert found["target_noise"]["epsilon"] == pytest.approx(0.2)


def test_a_budget_for_the_fit_alone_is_refused_whole(run: Run, tmp_path: Path) -> None:
    """Charged one after the other, the histogram would stay charged for nothing."""
    book = tmp_path / "book.db"
    with Ledger(book) as ledger:
        ledger.limit(0.9, 1e-5)
    assert is_refusal(run(*tall(tmp_path, 0.1), "--ledger", book, "--out", tmp_path / "run"), code=3)
    with Ledger(book) as ledger:
        assert ledger.entries() == ()


# -- noise on a lattice --------------------------------------------------------------------------------------


def test_secure_noise_reaches_the_run_and_the_histogram(run: Run, tmp_path: Path, files: Path) -> None:
    """Catches an option that is parsed and forgotten: the mechanism as run is in the record."""
    words = ("fit", files / "train.csv", "--facts", files / "facts.toml", *QUICK, "--steps", 5)
    plain, secure = files / "plain", files / "secure"
    a = run(*words, "--method", "sgd", "--out", plain).json
    b = run(*words, "--method", "sgd", "--secure", "--out", secure).json
    blocks = [json.loads((out / "run.json").read_text())["plan"]["blocks"] for out in (plain, secure)]
    assert [block[0]["secure"] for block in blocks] == [False, True]
    assert a["epsilon"]["pld"] == b["epsilon"]["pld"]
    fitted = run(*tall(tmp_path, 0.1), "--method", "sgd", "--secure", "--steps", 10, "--out", tmp_path / "r", "--json")
    assert fitted.json["target_noise"]["epsilon"] == pytest.approx(0.2)


# -- what is paid for is not lost ----------------------------------------------------------------------------


def failing(*_: Any, **__: Any) -> Any:
    raise RuntimeError("out of ink")


def test_a_report_that_fails_leaves_the_model(run: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confide.running.artefacts.render", failing)
    words = ("fit", files / "train.csv", "--facts", files / "facts.toml", *QUICK, "--steps", 5)
    result = run(*words, "--out", files / "run")
    assert is_refusal(result, code=1)
    assert "out of ink" in result.err
    assert str(files / "run") in result.err
    assert run("predict", files / "run", files / "test.csv", "--out", files / "p.csv").code == 0


def test_a_measurement_that_fails_leaves_the_model(run: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confide.report.evaluation.Evaluation.metrics", failing)
    words = ("fit", files / "train.csv", "--facts", files / "facts.toml", "--test", files / "test.csv", *QUICK)
    result = run(*words, "--steps", 5, "--out", files / "run")
    assert is_refusal(result, code=1)
    assert "--test: could not be measured on (out of ink)" in result.err
    assert (files / "run" / "report.html").exists()
    assert load_run(files / "run").metrics == {}


def test_a_disk_that_fills_up_during_the_run_loses_nothing(
    run: Run, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place took files before the charge; what was paid for goes where there is room."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    def full(tensors: Any, path: str, **rest: Any) -> None:
        if str(files / ".run.") in path:
            raise SafetensorError("No space left on device")
        save_file(tensors, path, **rest)

    monkeypatch.setattr("safetensors.torch.save_file", full)
    monkeypatch.setattr("tempfile.tempdir", str(files))
    words = ("fit", files / "train.csv", "--facts", files / "facts.toml", *QUICK, "--steps", 5)
    result = run(*words, "--out", files / "run")
    assert is_refusal(result, code=1)
    assert "No space left on device" in result.err
    (kept,) = files.glob("confide-*/run")
    assert str(kept) in result.err
    assert run("predict", kept, files / "test.csv", "--out", files / "p.csv").code == 0
    assert not (files / "run").exists()


def test_a_place_that_takes_no_files_is_refused_before_the_charge(
    run: Run, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions say nothing about a full or a read-only disk; only a file that is written does."""

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("confide.cli.paths.tempfile.NamedTemporaryFile", full)
    words = ("fit", files / "train.csv", "--facts", files / "facts.toml", *QUICK, "--ledger", files / "b.db")
    result = run(*words, "--out", files / "run")
    assert is_refusal(result)
    assert "--out" in result.err
    assert not (files / "b.db").exists()


def test_labels_that_a_spreadsheet_would_run_stay_text(tmp_path: Path) -> None:
    from confide.cli.predict import _write

    _write(tmp_path / "p.csv", ["predicted", "=1+1"], iter([["=HYPERLINK(1)", -0.5], [" @x", 1], ["-", 2], ["no", 3]]))
    with (tmp_path / "p.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["predicted", "'=1+1"]
    assert [row[0] for row in rows[1:]] == ["'=HYPERLINK(1)", "' @x", "'-", "no"]
    assert rows[1][1] == "-0.5", "a number is no formula"
