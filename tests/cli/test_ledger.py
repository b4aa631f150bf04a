"""`ledger show` and `ledger limit`, and what a ceiling does to `fit`."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from confide.privacy.events import GaussianEvent
from confide.privacy.ledger import Ledger
from confide.wording import remaining, up
from tests.cli.conftest import Result, is_refusal, patients
from tests.privacy.ledger.servers import Server, emptied

Run = Callable[..., Result]


def fit_words(files: Path, out: str) -> tuple[object, ...]:
    budget = ("--epsilon", 2, "--delta", 1e-3, "--batch", 30, "--steps", 3, "--ledger", files / "budget.db")
    return ("fit", files / "train.csv", "--facts", files / "facts.toml", *budget, "--out", files / out, "--json")


def test_a_ceiling_refuses_before_anything_is_spent_or_written(run: Run, files: Path) -> None:
    """Exit 3, one sentence, no directory, no charge. Catches a ceiling that is looked at after the fit."""
    assert run("ledger", "limit", files / "budget.db", "--epsilon", 2.5, "--delta", 1e-3).code == 0
    assert run(*fit_words(files, "one")).code == 0
    before = sorted(files.iterdir())
    refused = run(*fit_words(files, "two"))
    assert is_refusal(refused, code=3)
    assert "2.5" in refused.err
    assert sorted(files.iterdir()) == before
    assert len(Ledger(files / "budget.db").entries()) == 1

    assert run("ledger", "limit", files / "budget.db", "--epsilon", 4, "--delta", 1e-3).code == 0
    assert run(*fit_words(files, "two")).code == 0
    assert len(Ledger(files / "budget.db").entries()) == 2


def test_budgets_add_up_by_name_and_by_records(run: Run, files: Path) -> None:
    """The same name shares a budget; so does a copy under another name, and other records have their own."""
    run("ledger", "limit", files / "budget.db", "--epsilon", 2.5, "--delta", 1e-3)
    assert run(*fit_words(files, "one"), "--name", "patients").code == 0
    assert run(*fit_words(files, "two"), "--name", "patients").code == 3
    copied = run(*fit_words(files, "two"), "--name", "others")
    assert copied.code == 3
    assert "'patients'" in copied.err
    (files / "train.csv").write_text(patients(120, seed=5))
    assert run(*fit_words(files, "two"), "--name", "others").code == 0


def test_show_lists_charges_and_what_remains(run: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run("ledger", "limit", files / "budget.db", "--epsilon", 3, "--delta", 1e-3)
    spent = run(*fit_words(files, "one")).json["epsilon"]["pld"]
    values = run("ledger", "show", files / "budget.db", "--json").json
    assert values["limit"] == {"epsilon": 3.0, "delta": 1e-3, "adjacency": "add-remove"}
    assert values["datasets"]["train.csv"]["epsilon"] == pytest.approx(spent, rel=1e-6)
    assert values["datasets"]["train.csv"]["remaining"] == pytest.approx(3 - spent, rel=1e-6)
    assert [row["kind"] for row in values["entries"]] == ["limit", "dataset", "charge"]

    shown = run("ledger", "show", files / "budget.db")
    assert shown.code == 0
    for word in ("time", "purpose", "data set", "event", "so far", "fit sgld", "train.csv", "remains"):
        assert word in shown.out
    assert up(spent) in shown.out
    assert f"{remaining(3 - spent)} remains" in shown.out
    assert max(len(line) for line in shown.out.splitlines() if not line.startswith("Head: ")) <= 80
    assert f"Head: {Ledger(files / 'budget.db').head}" in shown.out.splitlines()


def test_show_without_a_ceiling_prices_at_the_usual_delta(run: Run, files: Path) -> None:
    assert run(*fit_words(files, "one")).code == 0
    usual = run("ledger", "show", files / "budget.db", "--json").json
    other = run("ledger", "show", files / "budget.db", "--delta", 1e-3, "--json").json
    assert (usual["delta"], usual["limit"], other["delta"]) == (1e-5, None, 1e-3)
    assert usual["datasets"]["train.csv"]["remaining"] is None
    assert usual["datasets"]["train.csv"]["epsilon"] > other["datasets"]["train.csv"]["epsilon"]


def test_show_never_makes_a_ledger(run: Run, tmp_path: Path) -> None:
    """A mistyped name must not come back as an empty ledger with a full budget."""
    assert is_refusal(run("ledger", "show", tmp_path / "typo.db"))
    assert not list(tmp_path.iterdir())


def test_a_corrupt_ledger_is_refused_and_left_alone(run: Run, files: Path) -> None:
    (files / "budget.db").write_bytes(b"not a ledger" * 1000)
    for words in (fit_words(files, "one"), ("ledger", "show", files / "budget.db")):
        refused = run(*words)
        assert is_refusal(refused)
        assert "budget.db" in refused.err
    assert (files / "budget.db").read_bytes() == b"not a ledger" * 1000
    assert not (files / "one").exists()


def test_a_tampered_ledger_is_refused(run: Run, files: Path) -> None:
    assert run(*fit_words(files, "one")).code == 0
    with sqlite3.connect(files / "budget.db") as database:
        database.execute("DROP TRIGGER entries_are_never_edited")
        database.execute("UPDATE entries SET body = replace(body, '\"count\":3', '\"count\":1')")
    database.close()
    assert is_refusal(run(*fit_words(files, "two")))
    assert is_refusal(run("ledger", "show", files / "budget.db"))
    assert not (files / "two").exists()


def test_a_locked_ledger_is_refused(run: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("ledger", "limit", files / "budget.db", "--epsilon", 9, "--delta", 1e-3)
    patient = Ledger.__init__
    monkeypatch.setattr(Ledger, "__init__", lambda self, path=None, timeout=0.2: patient(self, path, timeout))
    other = sqlite3.connect(files / "budget.db", isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        refused = run(*fit_words(files, "one"))
    finally:
        other.close()
    assert is_refusal(refused)
    assert "locked" in refused.err
    assert not (files / "one").exists()
    assert not Ledger(files / "budget.db").entries()


def test_a_run_that_is_refused_makes_no_ledger(run: Run, files: Path) -> None:
    words = [word if word != files / "train.csv" else files / "absent.csv" for word in fit_words(files, "one")]
    assert is_refusal(run(*words))
    assert is_refusal(run(*fit_words(files, "one"), "--delta", 0.5))
    assert not (files / "budget.db").exists()


def test_limit_says_what_it_set(run: Run, tmp_path: Path) -> None:
    words = ("ledger", "limit", tmp_path / "b.db", "--epsilon", 3, "--delta", 1e-5)
    assert "epsilon 3 at delta 1e-05" in run(*words).out
    assert run(*words, "--json").json["limit"]["epsilon"] == 3
    assert len(Ledger(tmp_path / "b.db").limits()) == 2
    assert json.loads(run("ledger", "show", tmp_path / "b.db", "--json").out)["datasets"] == {}


def test_a_noted_head_is_verified(run: Run, tmp_path: Path) -> None:
    """Note it, put an older copy back, and it shows: exit 2."""
    path, step = tmp_path / "b.db", GaussianEvent(1.0)
    with Ledger(path) as ledger:
        ledger.charge(step)
    shutil.copy(path, tmp_path / "old.db")
    with Ledger(path, witness=tmp_path / "witness") as ledger:
        ledger.charge(step)
    noted = run("ledger", "head", path).out.strip()
    assert noted == str(Ledger(path).head)
    assert run("ledger", "head", path, "--json").json["count"] == 2
    whole = run("ledger", "verify", path, "--head", noted, "--witness", tmp_path / "witness")
    assert whole.code == 0
    assert "2 entries, all in their place; the noted head and the witness agree." in whole.out
    shutil.copy(tmp_path / "old.db", path)
    assert run("ledger", "verify", path, "--json").json["holds"] is True
    assert is_refusal(run("ledger", "verify", path, "--head", noted))
    assert is_refusal(run("ledger", "verify", path, "--witness", tmp_path / "witness"))
    assert is_refusal(run("ledger", "verify", path, "--witness", tmp_path / "none"))
    assert is_refusal(run("ledger", "verify", path, "--head", "2:zz"))
    assert is_refusal(run("ledger", "head", tmp_path / "typo.db"))


def test_a_ceiling_is_raised_with_its_passphrase_only(run: Run, tmp_path: Path) -> None:
    path, secret = tmp_path / "b.db", tmp_path / "secret"
    secret.write_text("correct horse\n")
    words = ("ledger", "limit", path, "--delta", 1e-5, "--epsilon")
    assert run(*words, 1, "--passphrase-file", secret).code == 0
    assert is_refusal(run(*words, 2))
    assert is_refusal(run(*words, 2, "--passphrase-file", tmp_path / "none"))
    assert run(*words, 2, "--passphrase-file", secret).code == 0
    assert "correct horse" not in path.read_bytes().decode("latin-1")


def test_a_ceiling_has_a_key_of_its_own(run: Run, tmp_path: Path) -> None:
    """Made beside the ledger for its owner alone; taken away, nobody raises the ceiling without it."""
    path, beside = tmp_path / "b.db", tmp_path / "b.db.limit-key"
    words = ("ledger", "limit", path, "--delta", 1e-5, "--epsilon")
    assert "b.db.limit-key only" in run(*words, 1).out.replace("\n", " ")
    assert beside.stat().st_mode & 0o777 == 0o600
    assert run(*words, 2).code == 0
    beside.rename(tmp_path / "away")
    assert is_refusal(run(*words, 3))
    assert run(*words, 1).code == 0  # lower, for everybody
    assert is_refusal(run(*words, 3, "--key", tmp_path / "none"))
    assert is_refusal(run(*words, 3, "--key", tmp_path / "away", "--passphrase-file", tmp_path / "away"))
    assert run(*words, 3, "--key", tmp_path / "away", "--who", "the officer").code == 0
    shown = run("ledger", "show", path, "--json").json
    assert [row["who"] for row in shown["entries"]][-1] == "the officer"
    assert all(row["version"] for row in shown["entries"])


def test_a_renamed_copy_in_another_file_has_no_second_budget(run: Run, files: Path) -> None:
    """Same records in another order, under another name, with another key's file named on the way."""
    assert run("ledger", "key", files / "curator").code == 0
    assert run("ledger", "limit", files / "budget.db", "--epsilon", 2.5, "--delta", 1e-3).code == 0
    with_key = ("--key", files / "curator", "--who", "alice")
    assert run(*fit_words(files, "one"), *with_key).code == 0
    header, *lines = (files / "train.csv").read_text().splitlines()
    (files / "copy.csv").write_text("\n".join([header, *reversed(lines)]) + "\n")
    words = [files / "copy.csv" if word == files / "train.csv" else word for word in fit_words(files, "two")]
    refused = run(*words, *with_key, "--name", "somebody else")
    assert is_refusal(refused, code=3)
    assert "train.csv" in refused.err
    assert is_refusal(run(*words, "--who", "bob"))  # without the key nobody can tell, so nothing is charged
    assert not (files / "budget.db.key").exists()
    assert [entry.who for entry in Ledger(files / "budget.db").entries()] == ["alice"]
    assert "CONFIDE_KEY" not in os.environ
    assert "CONFIDE_WHO" not in os.environ
    without = [word for word in words if word not in ("--ledger", files / "budget.db")]
    assert is_refusal(run(*without, "--who", "bob"))


def test_a_key_is_made_once(run: Run, tmp_path: Path) -> None:
    assert run("ledger", "key", tmp_path / "key").code == 0
    assert is_refusal(run("ledger", "key", tmp_path / "key"))
    with Ledger(tmp_path / "b.db", witness=tmp_path / "w", key=(tmp_path / "key").read_bytes()) as ledger:
        ledger.charge(GaussianEvent(1.0))
    words = ("ledger", "verify", tmp_path / "b.db", "--witness", tmp_path / "w", "--key")
    assert run(*words, tmp_path / "key").code == 0
    assert run("ledger", "key", tmp_path / "other").code == 0
    assert is_refusal(run(*words, tmp_path / "other"))


def test_a_run_keeps_the_head_that_shows_a_ledger_rolled_back(run: Run, files: Path) -> None:
    run("ledger", "limit", files / "budget.db", "--epsilon", 9, "--delta", 1e-3)
    shutil.copy(files / "budget.db", files / "older.db")
    assert run(*fit_words(files, "one")).code == 0
    noted = json.loads((files / "one" / "run.json").read_text())["ledger"]["head"]
    assert noted["count"] == Ledger(files / "budget.db").head.count
    assert run("ledger", "verify", files / "budget.db", "--head", files / "one").code == 0
    assert run("ledger", "verify", files / "budget.db", "--head", files / "one" / "run.json").code == 0
    shutil.copy(files / "older.db", files / "budget.db")
    assert is_refusal(run("ledger", "verify", files / "budget.db", "--head", files / "one"))


def test_a_run_without_a_ledger_says_so(run: Run, files: Path) -> None:
    words = [word for word in fit_words(files, "one") if word not in ("--ledger", files / "budget.db", "--json")]
    said = run(*words)
    assert said.code == 0
    assert "No --ledger: nothing adds this run up with others on the same records." in said.out
    assert "none was kept, so nothing adds this run up" in (files / "one" / "report.html").read_text()
    with_one = run(*fit_words(files, "two")[:-1])
    assert "No --ledger" not in with_one.out
    assert is_refusal(run("ledger", "verify", files / "budget.db", "--head", files / "one"))


def test_fit_charges_a_server(run: Run, files: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    place = emptied(server.address)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(files / "settings"))
    words = [place if word == files / "budget.db" else word for word in fit_words(files, "one")]
    assert run("ledger", "limit", place, "--epsilon", 2.5, "--delta", 1e-3).code == 0
    assert run(*words).code == 0
    again = [files / "two" if word == files / "one" else word for word in words]
    assert run(*again, "--name", "a copy").code == 3
    shown = run("ledger", "show", place, "--json").json
    assert list(shown["datasets"]) == ["train.csv"]
    assert [row["kind"] for row in shown["entries"]] == ["limit", "dataset", "charge"]
    assert run("ledger", "verify", place, "--head", files / "one").code == 0
