"""The public rule of "auto": which method a request gets, whoever asks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from confide import rules
from confide.data.schema import Column, Schema
from confide.data.table import Table
from confide.errors import Refusal
from confide.estimators import PrivateBayesClassifier
from confide.methods import SGD
from confide.models.networks import linear
from confide.models.priors import GaussianPrior
from confide.workflow.choice import chosen, method_of
from confide.workflow.facts import settle
from confide.workflow.request import Request
from confide.workflow.run import job_of


def schema(columns: int = 3, records: int | None = 1000, **target: Any) -> Schema:
    named = tuple(Column(f"x{place}", bounds=(-1, 1)) for place in range(columns))
    return Schema(records=records, columns=named, **(target or {"classes": 2}))


def taken(facts: Schema, features: int | None = None, **asked: Any) -> str:
    request = Request(Table(), facts=facts, **asked)
    return chosen(request, facts, len(facts.columns) if features is None else features)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({}, "additive"),
        ({"epsilon": 100.0}, "tabular"),
        ({"hidden": ()}, "noise-aware"),
        ({"hidden": (8,)}, "sgld"),
        ({"module": linear(3)}, "sgld"),
        ({"chains": 2}, "sgld"),
        ({"prior": GaussianPrior(2.0)}, "sgld"),
        ({"likelihood": "ordinal"}, "sgld"),
        ({"steps": 10}, "sgld"),
        ({"clip": 1.0}, "sgld"),
        ({"sampling": "full-batch"}, "sgld"),
        ({"method": "bbp"}, "bbp"),
    ],
)
def test_what_is_asked_decides(asked: dict[str, Any], name: str) -> None:
    assert taken(schema(), **asked) == name


def test_records_and_budget_pay_for_a_network() -> None:
    weights = rules.weight_count((3, *rules.WIDE_LAYER, 2))
    enough = int(rules.RECORDS_PER_WEIGHT * weights)
    assert taken(schema(records=enough), epsilon=1.0) == "tabular"
    assert taken(schema(records=enough - 1), epsilon=1.0) == "additive"
    assert taken(schema(records=enough // 2 + 1), epsilon=2.0) == "tabular"
    enough = int(rules.NUMBERS_PER_WEIGHT * rules.weight_count((3, *rules.WIDE_LAYER, 1)))
    assert taken(schema(records=enough, target_bounds=(0, 1)), epsilon=1.0) == "tabular"
    assert taken(schema(records=enough - 1, target_bounds=(0, 1)), epsilon=1.0) == "additive"


def test_a_number_of_records_that_is_private_decides_nothing() -> None:
    """The price is paid before the count: the same method, whatever a count would say."""
    assert taken(schema(records=None), epsilon=100.0) == "additive"


def test_many_columns() -> None:
    assert taken(schema(500)) == "additive"
    assert taken(schema(500, target_bounds=(0, 1))) == "additive"
    assert taken(schema(601)) == "sgld"
    assert taken(schema(41, classes=3)) == "features"
    assert taken(schema(40, classes=3)) == "additive"
    enough = int(rules.NUMBERS_PER_EFFECT * 41 * 3)
    assert taken(schema(41, classes=3, records=enough), epsilon=1.0) == "additive"
    assert taken(schema(41, classes=3, records=enough - 1), epsilon=1.0) == "features"
    assert taken(schema(601, classes=3, records=10**6), epsilon=1.0) == "features"
    assert taken(schema(41, classes=3, records=None), epsilon=100.0) == "features"
    assert taken(schema(128), hidden=()) == "sgld", "its curvature would have 33 thousand entries"


def test_a_category_is_one_column_and_several_features() -> None:
    facts = Schema(records=1000, columns=(Column("a", categories=tuple(range(60))),), classes=3)
    assert taken(facts, features=60) == "additive"


def test_settings_and_priors_reach_the_method() -> None:
    request = Request(Table(), facts=schema(), prior=GaussianPrior(2.0))
    request.check()
    assert method_of(request, schema(), 3).prior == GaussianPrior(2.0)  # type: ignore[attr-defined]
    given = SGD(learning_rate=0.5)
    assert method_of(Request(Table(), facts=schema(), method=given), schema(), 3) is given
    with pytest.raises(Refusal, match="additive has no prior"):
        Request(Table(), facts=schema(), method="additive", prior=GaussianPrior()).check()


def test_the_estimator_and_a_request_agree() -> None:
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (60, 2))
    y = (x[:, 0] > 0).astype(int)
    facts = {"bounds": (-1, 1), "classes": 2, "records": 60}
    model = PrivateBayesClassifier(epsilon=2.0, delta=1e-3, seed=0, **facts).fit(x, y)
    request = Request(Table.from_arrays(x, y), epsilon=2.0, delta=1e-3, facts=Schema(**facts))
    assert model.run_.method == job_of(request, settle(request)).method
    assert model.run_.method.name == "additive"
    assert model.privacy_.epsilon() <= 2.0
