"""Drafts of facts: names alone, or what the data shows on the user's word, and marked so."""

from __future__ import annotations

import gzip
import tomllib
from pathlib import Path

import pytest

from confide.cli.app import main
from confide.data import load_table
from confide.data.draft import draft_text, facts_text, header_of
from confide.data.schema import Column, Schema

HEADER = "patient_id,age,work class,visit_date,ill"
SECRET = "zz-secret-cell"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "train.csv"
    rows = [f"{number},{20 + number},{SECRET if number == 3 else 'Private'},2020-01-01,no" for number in range(20)]
    rows += [f"{number},{20 + number},?,2020-01-01,yes" for number in range(20, 40)]
    path.write_text("\n".join([HEADER, *rows]) + "\n", encoding="utf-8")
    return path


def test_a_draft_is_the_same_whatever_the_records(table: Path, tmp_path: Path) -> None:
    words = ["--target", "ill", "--numeric", "age", "--records", "40"]
    assert main(["facts", str(table), *words, "--out", str(tmp_path / "a.toml")]) == 0
    table.write_text(HEADER + "\nx,y\n\xff\n", encoding="latin-1")  # any other records, even broken ones
    assert main(["facts", str(table), *words, "--out", str(tmp_path / "b.toml")]) == 0
    first = (tmp_path / "a.toml").read_text(encoding="utf-8")
    assert first == (tmp_path / "b.toml").read_text(encoding="utf-8")
    assert SECRET not in first
    found = tomllib.loads(first)
    assert found["ignore"] == ["patient_id", "visit_date"]
    assert list(found["columns"]) == ["age", "work class"]
    assert found["records"] == 40


def test_a_filled_in_draft_is_a_file_of_facts(tmp_path: Path) -> None:
    text = draft_text(["id", "age", "ward", "ill"], "ill", numeric=["age"], categorical=["ward"])
    text = text.replace('# classes = ["no", "yes"]', 'classes = ["no", "yes"]')
    text = text.replace("# bounds = [low, high]", "bounds = [0, 100]").replace("# categories", "categories")
    (tmp_path / "facts.toml").write_text(text, encoding="utf-8")
    schema = Schema.from_toml(tmp_path / "facts.toml")
    assert schema.ignore == ("id",)
    assert [column.kind for column in schema.columns] == ["numeric", "categorical"]


def test_assumed_facts_stay_marked(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "facts.toml"
    assert (
        main(["facts", str(table), "--target", "ill", "--ignore", "patient_id", "--assume-public", "--out", str(out)])
        == 0
    )
    schema = Schema.from_toml(out)
    expected = Schema.assume_public(load_table(table, "ill"), declared=Schema(target="ill", ignore=["patient_id"]))
    assert schema == expected
    assert {fact.source for fact in schema.public_facts() if fact.fact != "target"} == {"assumed public"}


def test_a_file_cannot_claim_that_a_fact_was_paid_for(tmp_path: Path) -> None:
    for text in (
        'records = 9\n[sources]\nrecords = "learnt privately"\n',
        '[columns.a]\nbounds = [0, 1]\nsource = "learnt privately"\n',
    ):
        (tmp_path / "facts.toml").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match="learnt privately"):
            Schema.from_toml(tmp_path / "facts.toml")


def test_hostile_names_and_values_come_back(tmp_path: Path) -> None:
    names = ('a"b', "c\\d", "e\nf", "[g]", "\x7f", "ü.ö", "#h")
    columns = [Column(name, categories=(name, "x\ty", True, 3, 2.5)) for name in names]
    schema = Schema(
        records=9, classes=('"', "\\"), target="t\u2028", columns=[*columns, Column("n", bounds=(-1e-300, 1e300))]
    )
    (tmp_path / "facts.toml").write_text(facts_text(schema), encoding="utf-8")
    assert Schema.from_toml(tmp_path / "facts.toml") == schema
    tomllib.loads(draft_text([*names, "t"], "t", ignore=names[:2]))


@pytest.mark.parametrize("first", ["1,2,3", "a,,b", "a,a,b", "", "a,2.5,b"])
def test_a_file_without_a_header_is_refused_and_not_quoted(first: str, tmp_path: Path) -> None:
    path = tmp_path / "train.csv.gz"
    path.write_bytes(gzip.compress(f"{first}\n4,5,6\n".encode()))
    with pytest.raises(ValueError, match=r"its first line|without a name|the same name") as caught:
        header_of(path)
    assert "2.5" not in str(caught.value)


def test_refusals(table: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "facts.toml")
    for words in (["--target", "absent"], ["--target", "ill", "--numeric", "nothing"]):
        assert main(["facts", str(table), *words, "--out", out]) == 2
    assert main(["facts", str(table), "--target", "ill", "--out", str(tmp_path / "facts.txt")]) == 2
    assert main(["facts", str(tmp_path / "absent.csv"), "--target", "ill", "--out", out]) == 2
    assert not Path(out).exists()


def test_letters_of_any_script_can_be_read_back(tmp_path: Path) -> None:
    """Seen: a name beyond 16 bits was written as two halves, which no reader of TOML takes."""
    names = ["Größe (cm)", "🩺 puls", "名前", 'quo"te', "line\nend", "\x7f", "visit date"]
    text = draft_text([*names, "y"], "y", records=10)
    assert tomllib.loads(text)["ignore"] == ["visit date"]
    assert '[columns."visit date"]' in text
    schema = Schema(records=10, target="y", classes=2, columns=[Column(name, bounds=(0, 1)) for name in names])
    (tmp_path / "facts.toml").write_text(facts_text(schema), encoding="utf-8")
    assert Schema.from_toml(tmp_path / "facts.toml") == schema


def test_the_index_of_a_frame_is_left_out(tmp_path: Path) -> None:
    """Frames write it first, without a name."""
    (tmp_path / "train.csv").write_text(",a,y\n0,1.5,no\n1,2.5,yes\n")
    names = header_of(tmp_path / "train.csv")
    assert names == ["unnamed", "a", "y"]
    assert tomllib.loads(draft_text(names, "y"))["ignore"] == ["unnamed"]
