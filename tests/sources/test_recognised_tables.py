"""A table as it was read is recognised under every name: other facts, another order, another file, a column more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import confide
from confide.data.cell_words import number_words
from confide.data.fingerprint import _ABOUT, KEPT, Sketch, _encryption_key, _padded, register_sketch
from confide.data.table import Table
from confide.privacy.ledger import Ledger

KEY = b"k" * 32
ROWS = 400


def people(seed: int = 0, rows: int = ROWS) -> Table:
    rng = np.random.default_rng(seed)
    jobs = rng.choice(np.array(["clerk", "nurse", "smith", "?"], dtype=object), rows)
    columns = {"age": rng.integers(18, 80, rows).astype(float), "job": jobs, "hours": rng.normal(40, 8, rows).round(2)}
    return Table(columns=columns, target="again", labels=rng.choice(np.array(["yes", "no"], dtype=object), rows))


def encoded(table: Table, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """As other facts would have it: every scale is another set of numbers."""
    return table.columns["age"][:, None] / scale, (table.labels == "yes").astype(int)


def as_text(table: Table) -> Table:
    """All cells as a file of text has them, missing ones as nothing at all."""
    columns = {name: np.array([str(cell) for cell in cells], dtype=object) for name, cells in table.columns.items()}
    columns["job"] = np.array([None if cell == "?" else f" {cell}" for cell in columns["job"]], dtype=object)
    return dataclasses.replace(table, columns=columns)


def other_order(table: Table) -> Table:
    table = table.take(np.random.default_rng(7).permutation(ROWS))
    return dataclasses.replace(table, columns=dict(list(table.columns.items())[::-1]))


def numbered(table: Table) -> Table:
    return dataclasses.replace(table, columns={"row": np.arange(float(ROWS)), **table.columns})


def renamed(table: Table) -> Table:
    return dataclasses.replace(table, columns={f"c{name}": cells for name, cells in table.columns.items()}, target="t")


def other_target(table: Table) -> Table:
    columns = {name: cells for name, cells in table.columns.items() if name != "age"}
    assert table.labels is not None
    return Table(columns={**columns, "again": table.labels}, target="age", labels=table.columns["age"])


COPIES: dict[str, Callable[[Table], Table]] = {
    "the same": lambda table: table,
    "another order of rows and columns": other_order,
    "half of the rows": lambda table: table.take(range(ROWS // 2)),
    "all as text": as_text,
    "a row number more": lambda table: numbered(other_order(table)),
    "other names of columns": renamed,
    "another target": other_target,
}


@pytest.mark.parametrize("copy", list(COPIES))
def test_a_copy_that_was_encoded_otherwise_is_known(copy: str) -> None:
    ledger, table = Ledger(), people()
    copied = COPIES[copy](table)
    mine = Sketch.of(*encoded(table, 80.0), KEY, table)
    assert register_sketch(ledger, mine, KEY, "patients") == "patients"
    again = Sketch.of(*encoded(people(3), 99.0), KEY, copied)  # of the encoded rows none is the same
    assert register_sketch(ledger, again, KEY, "visitors") == "patients"


def test_without_what_was_read_the_copy_would_be_missed() -> None:
    """The fault that this closes: other facts made the same file another data set."""
    ledger, table = Ledger(), people()
    assert register_sketch(ledger, Sketch.of(*encoded(table, 80.0), KEY), KEY, "patients") == "patients"
    assert register_sketch(ledger, Sketch.of(*encoded(table, 99.0), KEY), KEY, "visitors") == "visitors"


def test_other_people_keep_their_own_name() -> None:
    ledger = Ledger()
    for seed, name in ((0, "patients"), (1, "visitors")):
        table = people(seed)
        assert register_sketch(ledger, Sketch.of(*encoded(table, 80.0 + seed), KEY, numbered(table)), KEY, name) == name


def test_a_way_to_be_recognised_by_is_learnt_once() -> None:
    """Known by arrays first, then by the table they come from, then by the table alone."""
    ledger, table = Ledger(), people()
    for sketch in (
        Sketch.of(*encoded(table, 80.0), KEY),
        Sketch.of(*encoded(table, 80.0), KEY, table),
        Sketch.of(*encoded(table, 99.0), KEY, table),
        Sketch.of(*encoded(table, 70.0), KEY, table),
    ):
        assert register_sketch(ledger, sketch, KEY, "patients") == "patients"
    assert [row["kind"] for row in ledger.to_rows()] == ["dataset"] * 2


def test_sketches_are_of_one_size_and_those_of_an_earlier_version_open() -> None:
    small, large = (Sketch.of(*encoded(table, 80.0), KEY, table) for table in (people(rows=5), people(rows=3000)))
    assert len(small.sealed(KEY)) == len(large.sealed(KEY))
    opened = Sketch.unsealed(large.sealed(KEY), KEY)
    assert np.array_equal(opened.read, large.read)
    assert np.array_equal(opened.columns, large.columns)
    earlier = b"n" * 12 + AESGCM(_encryption_key(KEY)).encrypt(
        b"n" * 12, _padded(small.encoded, KEPT).tobytes(), _ABOUT
    )
    assert np.array_equal(Sketch.unsealed(earlier, KEY).encoded, small.encoded)
    assert len(Sketch.unsealed(earlier, KEY).read) == 0


def test_one_value_is_one_word() -> None:
    assert len(set(number_words(np.array([7, 7.0], dtype=np.float64)).tolist())) == 1
    assert number_words(np.array([-0.0]))[0] == number_words(np.array([0]))[0]


def test_an_estimator_with_other_bounds_meets_the_same_ceiling(tmp_path: Path) -> None:
    """Through the whole workflow: a second pair of bounds is no second budget."""
    rng = np.random.default_rng(0)
    x, y = rng.uniform(0, 1, (300, 3)), rng.integers(0, 2, 300)
    with Ledger(tmp_path / "budget.db", key=KEY) as ledger:
        ledger.limit(1.2, 1e-4)
        words: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-4, "steps": 3, "batch": 30, "records": 300}
        words |= {"classes": (0, 1), "ledger": ledger}
        confide.PrivateBayesClassifier(bounds=(0, 1), name="a", **words).fit(x, y)
        again = confide.PrivateBayesClassifier(bounds=(-1, 2), name="b", **words)
        with pytest.raises(confide.BudgetExceeded, match="'a'"):
            again.fit(x[::-1], y[::-1])
