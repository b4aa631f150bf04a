"""`confide evaluate`: private unless declared otherwise, paid or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from confide.privacy.accountants import sound_epsilon
from confide.privacy.ledger import Ledger
from tests.cli.conftest import Result, call, heights, is_refusal, patients

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a fitted classifier and regression, and records to measure them on."""
    base = tmp_path_factory.mktemp("evaluate")
    (base / "train.csv").write_text(patients(120, 0))
    (base / "ward.csv").write_text(patients(400, 1))
    (base / "a.csv").write_text(heights(300, 0))
    (base / "b.csv").write_text(heights(300, 1))
    plan = ("--epsilon", 20, "--delta", 1e-3, "--steps", 60, "--seed", 1, "--assume-public", "--json")
    assert call("fit", base / "train.csv", "--target", "ill", *plan, "--out", base / "classes").code == 0
    assert call("fit", base / "a.csv", "--target", "height", *plan, "--out", base / "numbers").code == 0
    return base


def test_records_are_private_until_somebody_says_otherwise(run: Run, fitted: Path) -> None:
    refused = run("evaluate", fitted / "classes", fitted / "ward.csv")
    assert is_refusal(refused)
    assert "--epsilon E" in refused.err
    assert "--public" in refused.err
    both = run("evaluate", fitted / "classes", fitted / "ward.csv", "--public", "--epsilon", 1)
    assert is_refusal(both)


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_paid_metrics_lie_near_the_open_ones(run: Run, fitted: Path, tmp_path: Path, kind: str) -> None:
    """Catches errors left on the scaled axis, a charge that is not made, and one that is not what was asked."""
    data, book = fitted / ("ward.csv" if kind == "classes" else "b.csv"), tmp_path / "book.db"
    open_ones = run("evaluate", fitted / kind, data, "--public", "--json").json
    words = ("--epsilon", 4, "--delta", 1e-4, "--records", 400 if kind == "classes" else 300, "--error-bound", 40)
    paid = run("evaluate", fitted / kind, data, *words, "--ledger", book, "--name", "ward", "--json").json
    assert set(paid["metrics"]) == (
        {"accuracy", "brier", "nll", "ece"} if kind == "classes" else {"rmse", "coverage_90"}
    )
    for name, value in paid["metrics"].items():
        slack = 0.05 if name == "ece" else 0.0
        assert value == pytest.approx(open_ones["metrics"][name], abs=5 * paid["noise"][name] + slack)
    (entry,) = Ledger(book).entries()
    assert entry.dataset == "ward"
    assert entry.event is not None
    assert sound_epsilon([entry.event], 1e-4) == pytest.approx(paid["epsilon"]["pld"])
    assert 3.99 < paid["epsilon"]["pld"] <= 4


def test_a_ceiling_refuses_and_nothing_is_spent(run: Run, fitted: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.db"
    with Ledger(book) as ledger:
        ledger.limit(1.0, 1e-4)
    words = ("evaluate", fitted / "classes", fitted / "ward.csv", "--delta", 1e-4, "--ledger", book)
    assert is_refusal(run(*words, "--epsilon", 2), code=3)
    with Ledger(book) as ledger:
        assert ledger.entries() == ()


def test_people_read_the_noise_and_the_statement(run: Run, fitted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ("evaluate", fitted / "classes", fitted / "ward.csv", "--epsilon", 1, "--delta", 1e-4)
    shown = run(*words, "--metrics", "accuracy", "--secure")
    assert shown.code == 0
    assert "counted privately" in shown.out
    assert "±" in shown.out
    assert "epsilon = 1 and" in " ".join(shown.out.split())
    assert max(map(len, shown.out.splitlines())) <= 80


def test_seeded_noise_claims_nothing(run: Run, fitted: Path) -> None:
    words = (
        "evaluate",
        fitted / "classes",
        fitted / "ward.csv",
        "--epsilon",
        1,
        "--delta",
        1e-4,
        "--seed",
        3,
        "--json",
    )
    first, second = run(*words).json, run(*words).json
    assert first == second
    assert first["seeded"] is True


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--epsilon", 0), "--epsilon"),
        (("--epsilon", 1, "--delta", 0.5, "--records", 400), "--delta"),
        (("--epsilon", 1, "--records", 1), "--records"),
        (("--epsilon", 1, "--metrics", "rmse"), "--metrics=rmse"),
        (("--epsilon", 1, "--metrics", ""), "--metrics="),
        (("--epsilon", 1, "--nll-bound", 0), "--nll-bound"),
        (("--epsilon", 1, "--error-bound", -1), "--error-bound"),
        (("--epsilon", 1, "--ledger", "/nowhere/at/all.db"), "--ledger"),
    ],
)
def test_bad_options(run: Run, fitted: Path, words: tuple[object, ...], match: str) -> None:
    refused = run("evaluate", fitted / "classes", fitted / "ward.csv", *words)
    assert is_refusal(refused)
    assert match in refused.err


def test_the_file_that_was_learnt_from_is_not_public(run: Run, fitted: Path) -> None:
    refused = run("evaluate", fitted / "classes", fitted / "train.csv", "--public")
    assert is_refusal(refused)
    assert "--epsilon E" in refused.err


def test_labels_outside_the_classes(run: Run, fitted: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.csv").write_text(patients(20, 3).replace("yes", "perhaps"))
    book = tmp_path / "book.db"
    assert is_refusal(run("evaluate", fitted / "classes", tmp_path / "odd.csv", "--public"))
    found = run("evaluate", fitted / "classes", tmp_path / "odd.csv", "--epsilon", 1, "--ledger", book)
    assert found.code == 0, "whether private records are measured must not depend on one of them"
    assert book.exists()
