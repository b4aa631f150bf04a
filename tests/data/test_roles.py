"""Several targets, marks of times, and weights of records: from the facts to what the boundary holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from confide.data.preprocessing import Encoder
from confide.data.roles import arranged, check_class_weight, weights_of
from confide.data.schema import Schema
from confide.data.table import Table
from confide.errors import DataError
from confide.models.several import MultiGaussian, MultiLabel
from confide.models.survival import Exponential, Weibull
from confide.workflow.named_likelihood import made

BOUNDS = "[columns.x]\nbounds = [0, 1]\n"


def facts(tmp_path: Path, text: str) -> Schema:
    path = tmp_path / "facts.toml"
    path.write_text(f"records = 100\n{text}\n{BOUNDS}", encoding="utf-8")
    return Schema.from_toml(path)


def table(**columns: list[object]) -> Table:
    arrays = {name: np.array(values, dtype=object) for name, values in columns.items()}
    labels = arrays.pop("days", None)
    return Table({"x": np.zeros(len(next(iter(columns.values())))), **arrays}, labels=labels)


def test_labels_are_zero_or_one_and_anything_else_counts_for_nothing(tmp_path: Path) -> None:
    schema = facts(tmp_path, 'targets = ["a", "b"]')
    found = arranged(table(a=[0, 1, "1", None, 2], b=[1, 1, 0, 1, 0]), schema)
    _, y = Encoder(schema, scaling="plain").training(found)
    assert y[:3].tolist() == [[0, 1], [1, 1], [1, 0]]
    assert np.isnan(y[3:]).any(axis=1).all()
    assert made(None, schema, None) == MultiLabel(2)


def test_numbers_are_scaled_by_their_own_bounds(tmp_path: Path) -> None:
    schema = facts(tmp_path, "[targets.a]\nbounds = [0, 10]\n[targets.b]\nbounds = [100, 200]")
    _, y = Encoder(schema).training(arranged(table(a=[0, 5, 99], b=[150, 200, "x"]), schema))
    assert y[:2].tolist() == [[-1, 0], [0, 1]]
    assert y[2, 0] == 1
    assert np.isnan(y[2, 1])
    assert made("multi_gaussian", schema, 0.3) == MultiGaussian(2, 0.3)


def test_times_are_clamped_beside_their_marks(tmp_path: Path) -> None:
    schema = facts(tmp_path, 'target = "days"\nobserved = "died"\ntarget_bounds = [0, 30]')
    _, y = Encoder(schema, scaling="plain").training(arranged(table(days=[3, 99, 5], died=[1, 0, "no"]), schema))
    assert y[:2].tolist() == [[3, 1], [30, 0]]
    assert np.isnan(y[2, 1])
    assert made(None, schema, None) == Weibull(10.0)
    assert made("exponential", schema, None) == Exponential(10.0)


def test_weights_are_shares_of_the_largest_and_of_the_class(tmp_path: Path) -> None:
    schema = facts(tmp_path, 'target = "days"\nclasses = ["no", "yes"]\nweight = "w"\nlargest_weight = 4')
    found = arranged(table(days=["no", "yes", "yes", "other"], w=[4, 2, 9, "?"]), schema)
    assert weights_of(found, schema, None).tolist()[:3] == [1, 0.5, 1]  # type: ignore[union-attr]
    by_class = weights_of(found, schema, {"yes": 2.0})
    assert by_class is not None
    assert by_class.tolist()[:3] == [0.5, 0.5, 1]
    assert np.isnan(by_class[3])


def test_facts_survive_the_way_through_json(tmp_path: Path) -> None:
    for text in ('targets = ["a"]', "[targets.a]\nbounds = [0, 1]", 'target = "t"\nobserved = "d"', 'weight = "w"'):
        schema = facts(tmp_path, text)
        assert Schema.from_dict(schema.to_dict()) == schema
    assert "targets" not in Schema(classes=2).to_dict()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('targets = ["a"]\nclasses = 2', "instead of target"),
        ('targets = "a"', "must be a list"),
        ('targets = ["x"]', "two roles"),
        ('weight = "w"\nlargest_weight = 0', "finite number > 0"),
        ('target = "t"\nobserved = "t"', "two roles"),
        ('classes = 2\nobserved = "d"', "leave targets and classes out"),
    ],
)
def test_facts_that_do_not_belong_together_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        facts(tmp_path, text)


def test_a_target_that_is_not_there_is_refused_unless_it_is_to_be_predicted(tmp_path: Path) -> None:
    schema = facts(tmp_path, 'targets = ["a", "b"]')
    with pytest.raises(DataError, match="'b' not among"):
        arranged(table(a=[1]), schema)
    assert arranged(table(a=[1]), schema, required=False).labels is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("balanced", "private"),
        ({}, "must map"),
        ({"no": -1}, ">= 0"),
        ({"no": 0}, "at least one"),
        ({"x": 1}, "not among"),
    ],
)
def test_weights_of_classes_that_would_read_records_or_are_none(given: object, said: str) -> None:
    with pytest.raises(DataError, match=said):
        check_class_weight(given, ("no", "yes"))


def test_a_copy_with_other_roles_is_recognised() -> None:
    """Weights and targets are columns of the table as it was read: leaving them out of the features hides nothing."""
    from confide.data.fingerprint import Sketch

    generator = np.random.default_rng(1)
    columns = {name: generator.normal(size=300) for name in "abcdw"}
    key, x = bytes(range(32)), generator.normal(size=(300, 2))
    plain = Sketch.of(x, np.zeros(300), key, Table(columns, labels=np.zeros(300)))
    rest = {name: columns[name] for name in "cd"}
    several = Table(rest, labels=np.stack([columns["a"], columns["b"]], 1), weights=columns["w"])
    assert plain.is_of_the_same(Sketch.of(x + 1, np.zeros(300), key, several))
    assert not plain.is_of_the_same(
        Sketch.of(
            x + 1,
            np.zeros(300),
            key,
            replace(several, columns={n: v + 1 for n, v in rest.items()}, labels=None, weights=None),
        )
    )
