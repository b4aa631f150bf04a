"""Facts that are learnt and paid for: what is found, what it costs, and that one record moves no count by more."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from confide.cli.app import main
from confide.data.cells import GRID, MAGNITUDES, Cells, bin_of, edges_of
from confide.data.columns import Column
from confide.data.draft import facts_text
from confide.data.preprocessing import Encoder
from confide.data.schema import Schema
from confide.data.table import Table
from confide.errors import BudgetExceeded, DataError
from confide.mechanism.noise import NoiseStream
from confide.mechanism.open_histogram import OpenHistogram
from confide.privacy.events import GaussianEvent, PureEvent
from confide.privacy.ledger import Ledger
from confide.workflow import private_facts
from confide.workflow.facts import assumptions_of
from confide.workflow.private_facts import Budget, learn_facts

BUDGET = Budget(1.0, 1e-5)
SECRET = "the only one of his kind"


def people(count: int = 4000) -> Table:
    random = np.random.default_rng(0)

    def texts(values: Any) -> Any:
        return np.array([str(value) for value in values], dtype=object)

    columns = {
        "age": texts(random.integers(18, 90, count)),
        "work": texts(random.choice(["private", "state", "?"], count, p=[0.6, 0.3, 0.1])),
        "visit": texts(np.datetime64("2018-03-01") + random.integers(0, 1500, count)),
        "city": texts(
            np.where(random.random(count) < 0.35, random.integers(0, 3, count), random.integers(3, 600, count))
        ),
        "code": texts(f"{number:08x}" for number in random.permutation(count)),
        "loss": texts(np.where(random.random(count) < 0.5, 0.0, -random.gamma(2, 300, count)).round(2)),
        "ill": texts(random.choice(["yes", "no"], count)),
    }
    columns["city"] = texts(f"town {name}" for name in columns["city"])
    columns["work"][7] = columns["ill"][7] = SECRET
    return Table(columns)


def learnt(declared: Schema | None = None, **more: Any) -> private_facts.LearntFacts:
    return learn_facts(people(), declared or Schema(target="ill"), BUDGET, seed=4, **more)


def test_what_is_found() -> None:
    found = learnt()
    columns = {column.name: column for column in found.schema.columns}
    assert columns["age"].bounds == (10.0, 100.0)
    assert columns["work"].categories == ("private", "state")
    assert columns["work"].missing == "category"
    assert columns["loss"].bounds is not None
    assert columns["loss"].bounds[1] == 0.0
    assert -5000 <= columns["loss"].bounds[0] <= -1000
    assert columns["city"].buckets >= 16
    assert [name for name in columns if name.startswith("visit")] == [
        f"visit {part}" for part in ("time", "year-sin", "year-cos", "week-sin", "week-cos")
    ]
    assert found.schema.ignore == ("code",)
    assert any("code" in note for note in found.notes)
    assert found.schema.classes == ("no", "yes")
    assert found.schema.records == pytest.approx(4000, abs=100)
    assert SECRET not in facts_text(found.schema)
    assert {fact.source for fact in found.schema.public_facts() if fact.fact != "target"} == {"learnt privately"}


def test_the_file_says_what_was_paid_and_every_statement_repeats_it(tmp_path: Path) -> None:
    found = learnt()
    (tmp_path / "facts.toml").write_text(facts_text(found.schema), encoding="utf-8")
    again = Schema.from_toml(tmp_path / "facts.toml")
    assert again == found.schema == Schema.from_dict(found.schema.to_dict())
    (clause,) = assumptions_of(again)
    assert "epsilon 1 at delta 1e-05" in clause
    table = people()
    columns = dict(table.columns)
    labels = columns.pop("ill")
    x, y = Encoder(again).training(Table(columns, target="ill", labels=labels))
    assert np.isfinite(x).all()
    assert abs(x).max() <= 1
    assert (y < 0).sum() == 1  # of the secret class


def test_it_is_charged_before_anything_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()
    ledger.limit(0.5, 1e-5)
    monkeypatch.setattr(private_facts, "_asked", lambda *_: pytest.fail("a record was read"))
    with pytest.raises(BudgetExceeded):
        learn_facts(people(50), Schema(target="ill"), BUDGET, ledger=ledger)
    assert not ledger.events()


def test_the_ledger_holds_both_parts_of_the_price() -> None:
    ledger = Ledger()
    found = learn_facts(people(), Schema(target="ill"), BUDGET, ledger=ledger, name="people")
    kinds = [type(event) for event in ledger.events("people")]
    assert kinds == [GaussianEvent, PureEvent]
    assert found.privacy.epsilon() <= BUDGET.epsilon
    assert ledger.spent(BUDGET.delta, "people") <= BUDGET.epsilon


def test_what_is_paid_for_is_given_where_nothing_stands_out_of_a_named_column(tmp_path: Path) -> None:
    """With a ledger in a file the records are encoded once more, for which every column needs its facts."""

    class Wild:
        def __hash__(self) -> int:
            raise RuntimeError("secret")

    table = people(400)
    names = np.array([f"person {place}" for place in range(400)], dtype=object)
    names[7] = Wild()  # nothing is refused for what one cell is
    table = Table({**table.columns, "who": names})
    for kind in ("numeric", "categorical"):
        declared = Schema(target="ill", columns=[Column("who", kind)])  # type: ignore[arg-type]
        found = learn_facts(table, declared, BUDGET, ledger=tmp_path / f"{kind}.db")
        assert "who" in found.schema.ignore
        assert "who" not in {column.name for column in found.schema.columns}


def test_one_record_is_in_no_more_bins_than_are_paid_for() -> None:
    """Whatever its cells: the counts of the records with it differ from those without by at most `ones`, each by 1."""
    hostile = [
        "",
        "nan",
        "inf",
        "-0.0",
        "1e999",
        "2020-01-01",
        "9999-12-31T23:59:59",
        "x" * 5000,
        "\0",
        "true",
        "0x1",
        "\uff11\uff12",
    ]
    for named, kind in ((False, "numeric"), (True, "numeric"), (True, "categorical")):
        question = private_facts._AskedColumn(Column("a", kind), named)  # type: ignore[arg-type]
        for cell in [*hostile, None, float("nan"), 5e15, 1e300, True, 10**400]:
            values = np.array(["1", "z", cell], dtype=object)
            more = private_facts._counted(values, question)
            fewer = private_facts._counted(values[:2], question)
            moved = [*(more.listed - fewer.listed), *(more.texts - fewer.texts).values()]
            assert set(moved) <= {0, 1}
            assert sum(moved) <= question.ones
            assert len(more.texts - fewer.texts) <= question.is_open


def test_what_a_cell_is_does_not_depend_on_the_others() -> None:
    alone = Cells.of(np.array(["12"], dtype=object))
    assert alone.grid[bin_of(12.0)] == 1
    assert Cells.of(np.array([12.0])).grid[bin_of(12.0)] == 1
    assert Cells.of(np.array(["12", "twelve"], dtype=object)).grid[bin_of(12.0)] == 1


def test_every_number_lies_in_its_bin() -> None:
    for number in (0.0, -0.0, 1e-9, 1.0, -1.0, 2.0000001, 99.0, -12345.6, 5e15, *MAGNITUDES[:-1]):
        place = bin_of(number)
        low, high = edges_of(place)
        assert 0 <= place < GRID
        assert low <= number <= high


def test_bounds_that_are_far_too_wide_are_said_and_kept() -> None:
    declared = Schema(target="ill", columns=[Column("age", bounds=(0, 1e6)), Column("loss", bounds=(-9000, 0))])
    found = learnt(declared)
    columns = {column.name: column for column in found.schema.columns}
    assert columns["age"].bounds == (0, 1e6)
    assert columns["age"].source == "declared"
    assert [note for note in found.notes if "age" in note and "times as wide" in note]
    assert not [note for note in found.notes if "loss" in note]


def test_a_regression_target_and_named_columns_cost_less_noise() -> None:
    named = [Column("age"), Column("work", "categorical")]
    table = people()
    found = learn_facts(table, Schema(target="loss", columns=named), BUDGET, task="regression", seed=1)
    assert found.schema.target_bounds is not None
    assert found.schema.target_bounds[1] == 0.0
    with pytest.raises(DataError, match="target"):
        learn_facts(table, Schema(target="nobody"), BUDGET)


def test_the_command_and_a_fit_with_its_facts_are_one_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, path, ledger = people(1500), tmp_path / "people.csv", tmp_path / "budget.db"
    rows = zip(*(values.tolist() for values in table.columns.values()), strict=True)
    path.write_text("\n".join([",".join(table.names), *(",".join(row) for row in rows)]), encoding="utf-8")
    facts = tmp_path / "facts.toml"
    words = ["--target", "ill", "--ledger", str(ledger)]
    assert main(["facts", str(path), *words, "--epsilon", "1", "--out", str(facts), "--name", "people"]) == 0
    assert "epsilon 1" in capsys.readouterr().out
    words += [
        "--facts",
        str(facts),
        "--epsilon",
        "1",
        "--name",
        "somebody else",
        "--method",
        "sgd",
        "--steps",
        "2",
        "--out",
    ]
    assert main(["fit", str(path), *words, str(tmp_path / "run")]) == 0
    assert "on top of this number" in " ".join(capsys.readouterr().out.split())
    with Ledger(ledger) as kept:
        assert kept.datasets() == ("people",)
        assert kept.spent(1e-5, "people") > 1.2
    # With facts of one's own, under a third name: records that were paid for are known as they were read.
    own = tmp_path / "own.toml"
    columns = "".join(f"[columns.{name}]\nbuckets = 8\n" for name in table.names if name != "ill")
    own.write_text(f'records = 1500\ntarget = "ill"\nclasses = ["no", "yes"]\n{columns}', encoding="utf-8")
    words[words.index("--facts") + 1], words[words.index("--name") + 1] = str(own), "a third"
    assert main(["fit", str(path), *words, str(tmp_path / "other")]) == 0
    with Ledger(ledger) as kept:
        assert kept.datasets() == ("people",)


class Says(float):
    """A number that says that it is another."""

    def __str__(self) -> str:
        return "1.0"


ALIKE = [
    Says(1),
    Says(7),
    Says(1e9),
    True,
    1,
    1.0,
    "1",
    "1.0",
    np.int8(1),
    np.float32(1),
    Decimal(1),
    Fraction(1),
    1 + 0j,
    0,
    0.0,
    -0.0,
    "0",
    "-0",
]
ODD = [None, "", float("nan"), float("inf"), 10**5000, "x" * 300, b"1", (1,), [1], np.datetime64("NaT"), object()]


@pytest.mark.parametrize("categories", [False, True])
def test_one_cell_counts_for_itself_whatever_it_equals(categories: bool) -> None:
    """Python holds 1, 1.0 and True for equal: counted together, the first would say what all the others are."""

    def counts(cells: list[Any]) -> Cells:
        column = np.empty(len(cells), dtype=object)
        column[:] = cells
        return Cells.of(column, categories)

    for other in (*ALIKE, *ODD):
        for rest in (*ALIKE, *ODD):
            few, whole = counts([rest] * 4), counts([other, *[rest] * 4])
            texts = {text: whole.texts[text] - few.texts[text] for text in {*whole.texts, *few.texts}}
            moved = np.abs(whole.listed - few.listed).sum() + sum(map(abs, texts.values()))
            assert moved <= 2, (other, rest)


def test_the_order_of_what_is_shown_tells_nothing_of_the_records() -> None:
    mechanism = OpenHistogram(0.01, 1, 1, 1e-6)
    orders = [
        list(mechanism.release(np.zeros(0), dict(texts), NoiseStream(1))[1])
        for texts in ([("b", 50), ("a", 60)], [("a", 60), ("b", 50)])
    ]
    assert orders == [["a", "b"]] * 2
