"""Classes of pictures that nobody declared are counted privately, within the one charge of the fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import confide
from confide.data.table import Table
from confide.errors import CuratorNote, DataError, Refusal
from confide.privacy.ledger import Ledger
from confide.workflow.classes import _one_hot, standing_out
from confide.workflow.compare import compare
from confide.workflow.request import LABELS, Request
from confide.workflow.run import Outcome, run_request
from tests.cli.conftest import call

ROWS, SIDE = 900, 8


def pictures(labels: Any, seed: int = 0) -> Table:
    """A bright row for every label, in noise."""
    random = np.random.default_rng(seed)
    found = random.integers(0, 50, (len(labels), SIDE, SIDE)).astype(np.uint8)
    found[np.arange(len(labels)), np.clip(labels, 0, SIDE - 1)] = 220
    return Table.from_arrays(found, np.asarray(labels))


def labels(low: int = 0, high: int = 3) -> Any:
    return np.random.default_rng(1).integers(low, high, ROWS)


def fitted(table: Table, epsilon: float = 8.0, **more: Any) -> Outcome:
    return run_request(Request(table, epsilon=epsilon, delta=1e-4, seed=more.pop("seed", 3), **more))


def test_pictures_with_labels_of_whole_numbers_need_no_facts() -> None:
    found = fitted(pictures(labels()))
    schema = found.encoder.schema
    assert schema.classes == (0, 1, 2)
    assert schema.source_of("classes") == schema.source_of("records") == "learnt privately"
    assert not any("read off" in clause for clause in found.run.privacy.assumptions)
    table = pictures(labels()[:200], seed=5)
    x = torch.as_tensor(found.encoder.features(table))
    said = found.run.posterior.predict(x).probabilities.argmax(-1)
    assert (said.numpy() == labels()[:200]).mean() > 0.8


def test_counts_and_fit_are_one_charge_within_epsilon(tmp_path: Path) -> None:
    book = tmp_path / "book.db"
    with Ledger(book) as ledger:
        ledger.limit(3.0, 1e-4)  # what two charges would not keep to
    found = fitted(pictures(labels()), 3.0, ledger=book, name="d", seed=None)
    assert 2.9 < found.run.privacy.epsilon() <= 3.0
    with Ledger(book) as ledger:
        entries = [entry for entry in ledger.entries() if entry.event is not None]
        assert len({entry.plan for entry in entries}) == 1
        assert sum(event.count for event in ledger.events("d")) == sum(e.count for e in found.run.privacy.events)
    assert "count the records and count the labels" in entries[0].purpose


def test_one_record_more_makes_no_class() -> None:
    """What the labels alone would show: were they listed, one record would be seen in the model's shape."""
    alone = labels()
    alone[0] = 77
    with pytest.warns(CuratorNote, match="1 of 900 records have a label outside those that stood out"):
        assert fitted(pictures(alone)).encoder.schema.classes == (0, 1, 2)


def test_labels_may_begin_anywhere_and_what_is_outside_counts_for_nothing() -> None:
    odd = labels(4, 7)
    odd[:3] = (-5, 300, 2**40)
    with pytest.warns(CuratorNote, match="3 of 900 have a cell without an input"):
        found = fitted(pictures(odd))
    assert found.encoder.schema.classes == (4, 5, 6)
    assert found.encoder.label_of(0) == 4
    kept = found.encoder.targets(odd)
    assert kept[:3].tolist() == [-1, -1, -1]
    assert (kept[3:] == odd[3:] - 4).all()


def test_a_record_answers_at_most_one() -> None:
    rows = _one_hot(torch.tensor([0, 255, -1, 256, 2**40]))
    assert rows.shape == (5, LABELS)
    assert rows.norm(dim=1).tolist() == [1, 1, 0, 0, 0]


def test_many_small_classes_stand_out_together_and_noise_alone_does_not() -> None:
    noise = torch.randn(2000, LABELS, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    assert sum(len(standing_out(one)) > 0 for one in noise) <= 8  # two chances of DOUBT each: 4 expected
    small = torch.zeros(LABELS, dtype=torch.float64)
    small[3:13] = 2.5  # none of them by itself: 4.5 would be needed
    found = [standing_out(small + one) for one in noise[:200]]
    assert sum(len(one) > 0 for one in found) >= 190
    ends = [max(abs(one[0] - 3), abs(one[-1] - 12)) for one in found if one]
    assert sum(ends) / len(ends) < 1.5


def test_a_rare_class_beside_large_ones_is_taken_in() -> None:
    counts = torch.zeros(LABELS, dtype=torch.float64)
    counts[:4] = torch.tensor([100.0, 60.0, 2.5, 3.0])
    assert standing_out(counts) == range(4)
    assert standing_out(torch.zeros(LABELS)) == range(0)


def test_where_nothing_stands_out_the_run_ends_with_a_sentence_and_stays_charged(tmp_path: Path) -> None:
    book = tmp_path / "book.db"
    with pytest.raises(Refusal, match=r"none of the labels stood out .* declared classes or a larger epsilon"):
        fitted(pictures(labels()[:60]), 0.5, ledger=book, name="d", seed=None)
    with Ledger(book) as ledger:
        assert ledger.events("d")


@pytest.mark.parametrize(
    "change",
    [{"labels": "float"}, {"method": "sgld"}, {"chains": 2}, {"module": True}],
    ids=lambda one: next(iter(one)),
)
def test_anything_else_needs_declared_classes(change: dict[str, Any], tmp_path: Path) -> None:
    """Texts and numbers with fractions name no classes by their type, and other methods' prices may follow them."""
    table, more = pictures(labels()), dict(change)
    if more.pop("labels", None):
        table = Table.from_arrays(table.block, labels().astype(float))
    if more.pop("module", None):
        more["module"] = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(SIDE * SIDE, 3))
    book = tmp_path / "book.db"
    with pytest.raises(DataError, match="classes"):
        fitted(table, ledger=book, name="d", seed=None, **more)
    assert not book.exists()


@pytest.mark.parametrize("kind", [list, pd.Series])
def test_labels_whose_type_one_record_decides_are_refused(kind: Any) -> None:
    """A missing label makes fractions or objects of them: whether a run exists would tell of that record."""
    table, settings = pictures(labels()), {"epsilon": 8.0, "delta": 1e-4, "seed": 3}
    assert not Table.from_arrays(table.block, kind(labels().tolist())).whole_labels
    with pytest.raises(DataError, match="classes=None"):
        confide.PrivateBayesClassifier(**settings).fit(table.block, kind(labels().tolist()))


def test_an_array_or_a_tensor_of_whole_numbers_has_a_type_of_its_own() -> None:
    for values in (labels(), torch.as_tensor(labels())):
        model = confide.PrivateBayesClassifier(epsilon=8.0, delta=1e-4, seed=3).fit(pictures(labels()).block, values)
        assert model.classes_.tolist() == [0, 1, 2]


def test_regression_of_pictures_is_as_before() -> None:
    with pytest.raises(DataError, match="target_bounds"):
        fitted(pictures(labels()), task="regression")


def test_declared_records_are_kept_and_comparisons_want_declared_classes() -> None:
    facts = confide.Schema(records=ROWS)
    assert fitted(pictures(labels()), facts=facts).run.plan.records == ROWS
    with pytest.raises(DataError, match="classes: not declared; every fit of a comparison"):
        compare(Request(pictures(labels()), facts=facts), pictures(labels()), test_source="separate")


def test_a_checkpoint_would_count_twice(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="checkpoint: needs the nominal number of records and the classes"):
        fitted(pictures(labels()), facts=confide.Schema(records=ROWS), checkpoint=tmp_path / "kept")


def test_the_command_needs_a_file_and_an_epsilon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table, held_out = pictures(labels()), pictures(labels()[:300], seed=9)
    arrays = {"x_train": table.block, "y_train": labels(), "x_test": held_out.block, "y_test": labels()[:300]}
    np.savez(tmp_path / "signs.npz", **arrays)
    for place in ("out/signs", "out/signs-2"):
        result = call("fit", "signs.npz", "--epsilon", 8, "--delta", 1e-4)
        assert result.code == 0, result.err
        kept = json.loads((tmp_path / place / "run.json").read_text())
        classes = kept["schema"]["classes"]  # the noise is fresh: at either end one fit in forty has an empty one more
        assert {0, 1, 2} <= set(classes) <= {-1, 0, 1, 2, 3}
        told = ", ".join(map(str, classes))
        assert f"classes {told}: learnt privately from the labels" in " ".join(result.out.split())
        assert kept["metrics"]["accuracy"] > 0.8


def test_a_file_whose_types_do_not_say_it_is_refused_before_anything(tmp_path: Path) -> None:
    table = pictures(labels())
    for name, x, y in (
        ("floats", table.block / 255.0, labels()),
        ("words", table.block, labels().astype(str)),
        ("columns", table.block.reshape(ROWS, -1), labels()),
    ):
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
        result = call("fit", tmp_path / f"{name}.npz", "--epsilon", 8, "--out", tmp_path / "run")
        assert result.code != 0
        assert "only pictures of bytes (uint8) with whole numbers as labels need none" in " ".join(result.err.split())
