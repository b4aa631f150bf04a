"""`confide compare`: every method charged, one table, one report, and refusals before anything is spent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from confide.models.predictive import ClassPredictive, RealPredictive
from confide.privacy.accountants import sound_epsilon
from confide.privacy.ledger import Ledger
from confide.report import PUBLIC, Evaluation
from confide.running.artefacts import load_run
from confide.workflow.memory import peak_memory
from confide.workflow.ranking import Trial, baseline_of, ranked, standard_errors
from tests.cli.conftest import Result, heights, is_refusal

Run = Callable[..., Result]


def given(files: Path, *more: object) -> list[object]:
    base: list[object] = ["compare", files / "train.csv", "--target", "ill", "--facts", files / "facts.toml"]
    return [*base, "--epsilon", 2, "--delta", "1e-4", "--steps", 30, *more]


def test_each_fit_is_charged_and_the_total_is_stated(run: Run, files: Path) -> None:
    """A comparison that stated the epsilon of one fit would claim too little."""
    book, out = files / "book.db", files / "out"
    options = ("--test", files / "test.csv", "--methods", "sgld,sgd", "--ledger", book, "--out", out, "--json")
    found = run(*given(files, *options)).json
    assert [row["method"] for row in found["rows"]] != []
    assert {row["method"] for row in found["rows"]} == {"sgld", "sgd"}
    with Ledger(book) as ledger:
        entries = ledger.entries()
    assert len(entries) == 2
    total = sound_epsilon([entry.event for entry in entries if entry.event is not None], 1e-4)
    assert found["epsilon_total"] == pytest.approx(total)
    assert 2 < found["epsilon_total"] < 4
    best = found["rows"][0]
    assert best["best"]
    assert best["as_good_as_best"]
    assert 0 < best["accuracy_standard_error"] < 0.1
    assert best["accuracy"] >= found["baseline"]["accuracy"]
    assert {"nll", "ece", "seconds", "peak_mb", "storage_mb"} <= set(best)
    assert sorted(path.name for path in out.iterdir()) == ["comparison.json", "report.html", "sgd", "sgld"]
    assert json.loads((out / "comparison.json").read_text())["rows"] == found["rows"]
    page = (out / "report.html").read_text()
    assert "together satisfy epsilon" in page
    assert page.count("<svg") == 2
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_what_a_killed_comparison_has_paid_for_is_found(run: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies beside the folder that it was to become, and no other comparison writes over it."""
    out, book = files / "out", files / "book.db"
    words = given(files, "--test", files / "test.csv", "--methods", "sgd", "--ledger", book, "--out", out)

    def killed(*_: object) -> None:  # nothing is put away or renamed any more
        monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
        monkeypatch.setattr("pathlib.Path.rename", lambda *_: None)
        raise SystemExit(9)

    monkeypatch.setattr("confide.workflow.compare._save", killed)
    with pytest.raises(SystemExit):
        run(*words)
    monkeypatch.undo()
    assert (files / "out.unfinished" / "comparison" / "sgd" / "posterior.safetensors").is_file()
    with Ledger(book) as ledger:
        paid = len(ledger.entries())
    refused = run(*words)
    assert is_refusal(refused)
    assert "out.unfinished holds what a comparison that was killed has paid for" in refused.err
    with Ledger(book) as ledger:
        assert len(ledger.entries()) == paid


def test_folders_of_comparisons_that_are_gone_are_swept_away(
    run: Run, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = files / "temporary"
    monkeypatch.setattr("tempfile.tempdir", str(place))
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    for number in (gone.stdout.strip(), os.getpid()):
        (place / f".confide-compare-{number}-x").mkdir(parents=True)
    assert run(*given(files, "--test", files / "test.csv", "--methods", "sgd")).code == 0
    assert [path.name for path in place.iterdir()] == [f".confide-compare-{os.getpid()}-x"]


@pytest.mark.slow
def test_repeats_add_the_scatter_of_the_noise(run: Run, files: Path) -> None:
    options = ("--test", files / "test.csv", "--methods", "sgd", "--repeats", 3)
    found = run(*given(files, *options, "--json")).json
    assert found["fits"] == found["rows"][0]["fits"] == 3
    assert found["out"] is None
    text = run(*given(files, *options))
    assert text.code == 0
    assert "the 3 fits of this table together cost epsilon" in " ".join(text.out.split())


@pytest.mark.slow
def test_regression_on_all_methods_that_fit(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(heights(150, 0))
    (tmp_path / "b.csv").write_text(heights(80, 1))
    words = ("compare", tmp_path / "a.csv", "--target", "height", "--test", tmp_path / "b.csv", "--assume-public")
    plan = ("--epsilon", 3, "--delta", "1e-4", "--steps", 20, "--hidden", "", "--methods", "sgd,sgnht")
    found = run(*words, *plan, "--json").json
    assert found["task"] == "regression"
    assert {"rmse", "rmse_standard_error", "coverage_90"} <= set(found["rows"][0])
    assert found["noise_scale"] == "learnt"
    assert found["noise_scale_epsilon"] == pytest.approx(0.6)
    fixed = run(*words, *plan, "--noise-scale", 0.1, "--json").json
    assert (fixed["noise_scale"], fixed["noise_scale_epsilon"]) == (0.1, None)


def test_the_embedded_regression(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file, no download; methods that need a histogram and one that does not, each within its own epsilon."""
    monkeypatch.setenv("COLUMNS", "80")
    book = tmp_path / "book.db"
    words = ("compare", "diabetes", "--epsilon", 3, "--delta", "1e-4", "--steps", 60, "--methods", "sgd,sep")
    result = run(*words, "--ledger", book, "--out", tmp_path / "out")
    assert result.code == 0
    assert max(len(line) for line in result.out.splitlines() if str(tmp_path) not in line) <= 80
    assert "…" not in result.out
    for method, releases in (("sgd", 2), ("sep", 1)):
        privacy = load_run(tmp_path / "out" / method).privacy
        assert len(privacy.events) == releases
        assert privacy.epsilon() <= 3
    rows = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert rows["baseline"]["rmse"] > min(row["rmse"] for row in rows["rows"])
    with Ledger(book) as ledger:
        assert rows["epsilon_total"] == pytest.approx(ledger.spent(1e-4, "diabetes"))


def test_a_budget_without_room_for_the_histograms_is_refused_first(run: Run, tmp_path: Path) -> None:
    """The fits alone would fit in; found out halfway, the first of them would have been spent."""
    words = ("compare", "diabetes", "--epsilon", 3, "--delta", "1e-4", "--steps", 30, "--methods", "sgd,sgld")
    first = run(*words, "--ledger", tmp_path / "one.db", "--json").json
    with Ledger(tmp_path / "one.db") as ledger:
        steps = [event for event in ledger.events("diabetes") if getattr(event, "sampling", "") == "poisson"]
    ceiling = (sound_epsilon(steps, 1e-4) + first["epsilon_total"]) / 2
    with Ledger(tmp_path / "two.db") as ledger:
        ledger.limit(ceiling, 1e-4)
    assert is_refusal(run(*words, "--ledger", tmp_path / "two.db"), code=3)
    with Ledger(tmp_path / "two.db") as ledger:
        assert ledger.entries() == ()


def test_a_report_that_fails_leaves_the_models(run: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> str:
        raise RuntimeError("out of ink")

    monkeypatch.setattr("confide.report.comparison.render_comparison", failing)
    result = run(*given(files, "--test", files / "test.csv", "--methods", "sgd", "--out", files / "out"))
    assert is_refusal(result, code=1)
    assert "out of ink" in result.err
    assert sorted(path.name for path in (files / "out").iterdir()) == ["comparison.json", "sgd"]
    assert load_run(files / "out" / "sgd").metrics != {}


def test_refusals_come_before_the_first_charge(run: Run, files: Path) -> None:
    book = files / "book.db"
    with Ledger(book) as ledger:
        ledger.limit(2.5, 1e-4)  # enough for one fit, not for two
    test = ("--test", files / "test.csv", "--ledger", book)
    assert is_refusal(run(*given(files, *test, "--methods", "sgld,sgd", "--name", "p")), code=3)
    assert is_refusal(run(*given(files, "--ledger", book, "--methods", "sgd")))  # no test records
    assert is_refusal(run(*given(files, *test, "--methods", "oracle")))
    assert is_refusal(run(*given(files, *test, "--methods", "em")))
    assert is_refusal(run(*given(files, *test, "--methods", ",")))
    assert is_refusal(run(*given(files, *test, "--repeats", 0)))
    with Ledger(book) as ledger:
        assert ledger.entries() == ()


# -- how sure a difference is --------------------------------------------------------------------------------


def trial(method: str, losses: torch.Tensor) -> Trial:
    accuracy = 1 - float(losses.mean())
    return Trial(method, {"accuracy": accuracy}, {"accuracy": 0.01}, losses, 1.0, None, 0.1)


def test_paired_differences_tell_methods_apart() -> None:
    """Unpaired errors would call the second as good: it is wrong wherever the first is, and on 30 records more."""
    first = torch.zeros(1000, dtype=torch.float64)
    first[:200] = 1
    second = first.clone()
    second[200:230] = 1
    third = first.clone()
    third[200:203], third[:3] = 1, 0
    rows = ranked([trial("b", second), trial("a", first), trial("c", third)], "accuracy")
    assert [row.method for row in rows][-1] == "b"
    marks = {row.method: row.as_good for row in rows}
    assert marks == {"a": True, "b": False, "c": True}
    assert sum(row.best for row in rows) == 1


def test_standard_errors_are_those_of_the_textbook() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (400,), generator=generator)
    p = torch.rand(1, 400, generator=generator)
    classes = Evaluation(ClassPredictive(torch.stack([1 - p, p], -1), torch.ones(1)), y, PUBLIC)
    accuracy = classes.metrics()["accuracy"]
    assert standard_errors(classes)["accuracy"] == pytest.approx((accuracy * (1 - accuracy) / 400) ** 0.5)
    assert baseline_of(classes) == pytest.approx(max(y.double().mean(), 1 - y.double().mean()))
    # The root mean squared error by simulation: many test sets of the same size.
    noise = 2 * torch.randn(3000, 400, generator=generator, dtype=torch.float64)
    scatter = noise.square().mean(1).sqrt().std()
    zeros = RealPredictive(torch.zeros(1, 400), torch.ones(1, 400), torch.ones(1))
    found = standard_errors(Evaluation(zeros, noise[0], PUBLIC))
    assert found["rmse"] == pytest.approx(float(scatter), rel=0.15)


def test_peak_memory_sees_what_was_there_for_a_moment() -> None:
    with peak_memory() as peak:
        torch.zeros(30 << 20).add_(1)
    assert peak.mb is None or peak.mb > 100


def test_peak_memory_is_not_hidden_by_what_was_freed_before() -> None:
    """A second fit of the same size must not seem to need nothing."""
    held = []
    for _ in range(2):
        with peak_memory() as peak:
            blocks = [torch.zeros(1 << 14).add_(1) for _ in range(800)]  # small ones stay with the allocator
            assert len(blocks) == 800
            del blocks
        held.append(peak.mb)
    assert held[1] is None or held[1] > 40
