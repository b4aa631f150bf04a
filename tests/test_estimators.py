"""The estimators: scikit-learn's rules kept, public facts demanded, every fit charged."""

from __future__ import annotations

import inspect
import pickle
import re
import subprocess
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits, make_blobs, make_regression
from sklearn.ensemble import BaggingClassifier
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

import confide
from confide import rules
from confide.data.preprocessing import Encoder
from confide.data.rows import MISSING, one_each, rows_of_numbers
from confide.data.schema import Column, Input, Schema
from confide.errors import (
    BudgetExceeded,
    BudgetExceededInSearch,
    ColumnsLeftOut,
    CuratorNote,
    MisplacedMethod,
    NothingToLearn,
    PrivacyWarning,
)
from confide.estimators import PrivateBayesClassifier, PrivateBayesRegressor
from confide.methods._additive import EDGES
from confide.models.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from confide.posteriors.draws import Draws
from confide.privacy.accountants import sound_epsilon
from confide.privacy.ledger import Ledger
from confide.running.artefacts import load_run
from confide.sources.private_data import PrivateData
from confide.workflow import calibrate as _calibrate
from confide.workflow import noise as _residuals

# No check fails: a private estimator must refuse facts that were not declared, and the instances below declare
# assume_public. A check that has to fail one day is written down here with its reason.
EXPECTED_FAILURES = {
    "check_all_zero_sample_weights_error": "whether a fit raises must not depend on weights, which are private",
    "check_sample_weight_equivalence_on_dense_data": "batches are drawn by row numbers: other rows, other draws",
}
# Runs only where SCIPY_ARRAY_API is set before scipy is imported.
SKIPPED = {"check_array_api_input"}

BLOBS = {"bounds": (-15, 15), "classes": 3, "records": 120, "delta": 1e-4, "steps": 20, "seed": 1}


@pytest.fixture
def quick_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that are not about privacy: calibration takes longer than the small fits themselves."""
    monkeypatch.setattr(_calibrate, "multiplier_for", lambda *_, **__: 0.3)


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, ...]:
    x, y = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(x))
    train, test = order[360:], order[:360]
    return x[train], y[train], x[test], y[test]


def blobs(records: int = 120) -> tuple[np.ndarray, np.ndarray]:
    x, y = make_blobs(records, n_features=3, centers=3, cluster_std=0.8, random_state=0)
    return x, y


# -- scikit-learn's own checks -------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_noise")
@pytest.mark.parametrize(
    "estimator",
    [
        PrivateBayesClassifier("sgd", delta=1e-4, assume_public=True, steps=40, seed=0),
        PrivateBayesRegressor("sgnht", delta=1e-4, assume_public=True, steps=40, seed=0),
    ],
    ids=["classifier", "regressor"],
)
def test_checks_of_scikit_learn(estimator: Any) -> None:
    results = check_estimator(estimator, on_fail=None, on_skip=None, expected_failed_checks=EXPECTED_FAILURES)
    by_status: dict[str, dict[str, str]] = {}
    for result in results:
        by_status.setdefault(result["status"], {})[result["check_name"]] = repr(result["exception"])
    assert by_status.get("failed", {}) == {}
    assert set(by_status.get("skipped", {})) <= SKIPPED
    assert len(by_status["passed"]) > 40


# -- the interface -------------------------------------------------------------------------------------------


def test_interface_as_written(digits: tuple[np.ndarray, ...]) -> None:
    """Nothing but bounds and classes declared: the records are counted privately, within the same budget."""
    x, y, x_test, y_test = digits
    book = Ledger()
    model = confide.PrivateBayesClassifier(method="sgld", epsilon=1.0, delta=1e-5, bounds=(0, 16), classes=range(10))
    model.set_params(ledger=book).fit(x, y)
    assert model.predict_proba(x_test).shape == (360, 10)
    predictive = model.predictive(x_test)
    assert predictive.epistemic.shape == predictive.aleatoric.shape == (360,)
    assert predictive.interval(0.9).shape == (360, 10, 2)
    assert model.score(x_test, y_test) > 0.8
    assert {entry.purpose for entry in book.entries()} == {"count the records, then fit sgld"}
    assert {entry.plan for entry in book.entries()} == {1}  # one charge
    assert sound_epsilon(book.events(), 1e-5) <= 1.0
    assert "epsilon = 1 and delta = 1e-05" in model.privacy_.statement()
    assert model.schema_.source_of("records") == "learnt privately"
    assert model.posterior_.to_arviz()["posterior"]["0.weight"].shape[2:] == (10, 64)


def test_digits_at_epsilon_3(digits: tuple[np.ndarray, ...]) -> None:
    x, y, x_test, y_test = digits
    model = PrivateBayesClassifier(epsilon=3.0, bounds=(0, 16), classes=10, records=1437, seed=0).fit(x, y)
    assert model.score(x_test, y_test) > 0.9
    assert 2.9 < model.privacy_.epsilon() <= 3.0
    assert model.privacy_.statement().startswith("Seeded: no privacy claim")


@pytest.mark.usefixtures("quick_noise")
def test_plan_does_not_depend_on_the_count() -> None:
    """A rate or a number of steps that followed the noisy count would make the composition unproven."""
    events, counts = [], []
    for records in (400, 900):
        options = {**BLOBS, "records": None, "steps": None, "epochs": 1}
        model = PrivateBayesClassifier("sgd", **options).fit(*blobs(records))
        events.append(model.privacy_.events)
        counts.append(model.schema_.records)
    assert events[0] == events[1]
    assert counts[0] == pytest.approx(400, abs=5)
    assert counts[1] == pytest.approx(900, abs=5)


@pytest.mark.usefixtures("quick_noise")
@pytest.mark.parametrize("name", confide.methods.names())
def test_every_method_that_fits(name: str) -> None:
    tasks = getattr(confide.methods.get(name), "tasks", ("classification",))
    options = {key: value for key, value in BLOBS.items() if key != "classes"}
    if "classification" in tasks:
        told = pytest.warns(MisplacedMethod, match="with 3 columns") if name == "features" else nullcontext()
        with told:
            model: Any = PrivateBayesClassifier(name, **BLOBS).fit(*blobs())
        assert np.isfinite(model.predict_proba(blobs()[0])).all()
    elif "regression" in tasks:
        x, y = blobs()
        model = PrivateBayesRegressor(name, target_bounds=(0, 2), **options).fit(x, y.astype(float))
        assert np.isfinite(model.predict(x)).all()
    else:
        with pytest.raises(ValueError, match=f"method='{name}': is not for classification"):
            PrivateBayesClassifier(name, **BLOBS).fit(*blobs())


def test_import_leaves_scikit_learn_out() -> None:
    code = "import confide, sys; assert 'sklearn' not in sys.modules; confide.PrivateBayesRegressor"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'PrivateBayesOracle'"):
        _ = confide.PrivateBayesOracle


# -- what would leak is refused, and a refusal costs nothing -------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": None}, r"classes=None: .* private; list them in classes=, or set assume_public=True"),
        ({"bounds": None}, r"bounds=None: .*StandardScaler.*in silence"),
        ({"records": None, "batch": 10}, r"batch=10: needs the nominal number of records.*counted privately"),
        ({"delta": 0.01}, r"delta=0.01: must be below 1 / records"),
        ({"epsilon": -1.0}, r"epsilon=-1.0: must be"),
        ({"epochs": 2.0}, r"epochs=2.0, steps=20: give one"),
        ({"batch": 500}, r"batch=500: must be between 1 and records=120"),
        ({"steps": 0}, r"steps=0: must be greater than 0"),
        ({"clip": 0.0}, r"clip=0.0: must be"),
        ({"method": "magic"}, r"method='magic': unknown; known: "),
        ({"method": "bpp"}, r"did you mean bbp\?"),
        ({"epsilon": "1"}, r"epsilon='1': must be a finite number"),
        ({"steps": 1.5}, r"steps=1.5: must be a whole number"),
        ({"hidden": 64}, r"hidden=64: must be widths of layers"),
        ({"chains": "2"}, r"chains='2': must be a whole number"),
        ({"callbacks": 3}, r"callbacks=3: must be a list of functions"),
        ({"checkpoint": 4}, r"checkpoint=4: must be the path"),
        ({"prior": "gaussian"}, r"prior='gaussian': must be one of confide.priors"),
        (
            {"method": confide.methods.get("sgd")(), "prior": confide.priors.FlatPrior()},
            r"prior=FlatPrior\(\): give it to",
        ),
        ({"schema": Schema(classes=2)}, r"classes: given as a parameter and in schema="),
        ({"schema": Schema(target_bounds=(0, 1)), "classes": None}, r"target_bounds are for regression"),
        ({"bounds": {"a": (0, 1)}}, r"declared by name, but the data is a plain array"),
        ({"module": nn.Linear(3, 3), "hidden": (4,)}, r"hidden=\(4,\): is for confide's own network"),
        ({"module": nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))}, r"BatchNorm"),
        ({"module": nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)), "records": None}, r"BatchNorm"),
    ],
    ids=lambda value: None if isinstance(value, str) else "+".join(value),
)
@pytest.mark.usefixtures("quick_noise")
def test_refusals_name_the_way_out_and_cost_nothing(changes: dict[str, Any], message: str) -> None:
    book = Ledger()
    model = PrivateBayesClassifier(**{"method": "sgd", **BLOBS, **changes, "ledger": book})
    with pytest.raises((ValueError, TypeError), match=message):
        model.fit(*blobs())
    assert book.entries() == ()


@pytest.mark.parametrize("odd", ["missing", "a label of its own", "one class", "far fewer records"])
@pytest.mark.usefixtures("quick_noise")
def test_with_declared_facts_no_record_decides_whether_there_is_a_run(odd: str) -> None:
    """The curator is told; the run is there."""
    x, y = blobs()
    y = y.astype(float)
    if odd == "missing":
        x[3, 1] = np.nan
    elif odd == "a label of its own":
        y[3] = 1.5
    elif odd == "one class":
        y[:] = 1
    facts = {**BLOBS, "records": 1000} if odd == "far fewer records" else BLOBS
    model = PrivateBayesClassifier("sgd", **facts)
    with pytest.warns(CuratorNote, match=r"records|class"):
        model.fit(x, y)
    assert model.predict(blobs()[0]).shape == (120,)


class _Raises:
    """Has a way of its own of being a number."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no number")

    __float__ = __array__


ODD_ROWS = {
    "short": [1.0],
    "long": [1.0, 2.0, 3.0],
    "empty": [],
    "nested": [[1.0], 2.0],
    "nothing": None,
    "a number": 3.0,
    "a text": "12",
    "a mapping": {"a": 1.0},
    "an object": [object(), 1.0],
    "a huge number": [10**400, 1.0],
    "complex": [1j, 1.0],
    "bytes": [b"1", 1.0],
    "an array in a cell": [np.arange(3), 1.0],
    "what raises": [_Raises(), 1.0],
}


@pytest.mark.filterwarnings("ignore::confide.errors.CuratorNote")
@pytest.mark.parametrize("place", [0, 7])
def test_a_row_of_another_shape_counts_for_nothing_and_changes_no_other(place: int) -> None:
    rows: list[Any] = [[i % 3 / 3, i % 5 / 5] for i in range(40)]
    labels: list[Any] = [i % 2 for i in range(40)]
    for odd in ODD_ROWS.values():
        given: list[Any] = [*rows]
        given[place] = odd
        found = rows_of_numbers(given, (2,))
        assert np.isnan(found[place]).any()
        np.testing.assert_array_equal(np.delete(found, place, 0), np.delete(np.asarray(rows), place, 0))
    facts: dict[str, Any] = {"bounds": [(0, 1), (0, 1)], "records": 40, "classes": [0, 1], "seed": 0}
    labels[place] = [1, 2]
    for weight in ([1.0], 2j, None, 10**400):
        weights: list[Any] = [1.0] * 40
        weights[place] = weight
        PrivateBayesClassifier("noise-aware", **facts).fit(given, labels, sample_weight=weights)
        PrivateData(given, labels, schema=Schema(records=40, classes=2, shape=2), weights=weights)


def test_lists_are_read_by_what_is_declared_and_never_by_most_of_them() -> None:
    """Where two shapes tied, one record decided for all; and one fraction made numbers of everybody's ids."""
    facts: dict[str, Any] = {"bounds": (0, 1), "records": 40, "classes": [0, 1]}
    for rows in ([[0.1, 0.2]] * 40, [[0.1, 0.2]] * 39 + [[0.1]], [[0.1, 0.2], [0.1]] * 20):
        with pytest.raises(ValueError, match="X: is a list, and how many numbers a record has"):
            PrivateBayesClassifier("sgd", **facts).fit(rows, [0, 1] * 20)
        with pytest.raises(ValueError, match="x: is a list"):
            PrivateData(rows, [0, 1] * 20, schema=Schema(records=40, classes=2))
    for odd in ([1, 2, 3], [1.5, 2, 3], ["a", 2, 3], [1, 2], [10**30, 0, 0]):
        found = rows_of_numbers([odd, [4, 5, 6]], (3,), ids=True)
        assert found.dtype == np.int64
        assert found[1].tolist() == [4, 5, 6]
        assert (found[0] == MISSING).any() == (odd != [1, 2, 3])
    with pytest.raises(ValueError, match="is a list"):
        PrivateData({"ids": [[1, 2]]}, [0], schema=Schema(records=9, classes=2, inputs={"ids": Input(vocabulary=9)}))


def test_what_no_row_fits_is_a_note_and_no_refusal() -> None:
    with pytest.warns(NothingToLearn, match="X: not one row is 2 numbers"):
        assert np.isnan(rows_of_numbers([["a", "b"], [1]], (2,))).all()
    assert one_each([[0], [1], 1, [2, 3]]).tolist() == [0, 1, 1, None]
    model = PrivateBayesRegressor("sgd", bounds=(0, 1), target_bounds=(0, 9), records=40, steps=2, seed=0)
    x = np.random.default_rng(0).random((40, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NothingToLearn)  # as whoever may see the records can ask for
        with pytest.raises(NothingToLearn, match=r"cost the same: target 'y' has no number in any record"):
            model.fit(x, ["cheap"] * 40)


def test_regressor_demands_target_bounds() -> None:
    with pytest.raises(ValueError, match=r"target_bounds=None: .* give target_bounds=\(low, high\)"):
        PrivateBayesRegressor(bounds=(0, 1), records=100).fit(np.zeros((100, 2)), np.arange(100.0))
    with pytest.raises(TypeError, match="ledger=7: must be a Ledger or the path"):
        PrivateBayesClassifier("sgd", **BLOBS, ledger=7).fit(*blobs())


@pytest.mark.usefixtures("quick_noise")
def test_assumed_facts_are_said() -> None:
    model = PrivateBayesClassifier("sgd", assume_public=True, delta=1e-4, steps=5).fit(*blobs())
    assert "the facts read off the data (records, classes, bounds) are public" in model.privacy_.statement()
    assert model.schema_.records == 120


# -- budget --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_noise")
def test_cross_validation_charges_every_fold(tmp_path: Path) -> None:
    """A ledger that was copied with the clones would have stayed empty."""
    x, y = blobs()
    for ledger in (Ledger(), str(tmp_path / "budget.db")):
        model = PrivateBayesClassifier("sgd", **BLOBS, ledger=ledger, name="blobs")
        assert clone(model).ledger is ledger
        with pytest.warns(PrivacyWarning, match="every fold is charged"):
            scores = cross_val_score(model, x, y, cv=3, error_score="raise")
        book = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        assert len(scores) == len(book.entries("blobs")) == 3
        book.close()


def test_limit_refuses_the_fold_that_would_exceed_it() -> None:
    x, y = blobs()
    book = Ledger()
    book.limit(1.2, 1e-4)
    model = PrivateBayesClassifier("sgd", **{**BLOBS, "seed": None}, epsilon=1.0, ledger=book)
    with pytest.raises(BudgetExceeded), pytest.warns(PrivacyWarning):
        cross_val_score(model, x, y, cv=3, error_score="raise")
    assert len(book.entries()) == 1
    with pytest.raises(BudgetExceededInSearch, match="NaN"), pytest.warns(PrivacyWarning):
        cross_val_score(model, x, y, cv=3)  # by default scikit-learn makes a score of NaN of any Exception


@pytest.mark.usefixtures("quick_noise")
def test_who_reads_the_records_beside_the_estimator_is_warned_of() -> None:
    x, y = blobs()
    with pytest.warns(PrivacyWarning, match="StandardScaler before the estimator learns from the records"):
        make_pipeline(StandardScaler(), PrivateBayesClassifier("sgd", **BLOBS)).fit(x, y)
    search = GridSearchCV(PrivateBayesClassifier("sgd", **BLOBS), {"clip": [1.0, 2.0]}, cv=2)
    with pytest.warns(PrivacyWarning, match="PrivateSearchCV"):
        search.fit(x, y)


@pytest.mark.usefixtures("quick_noise")
def test_truth_values_with_gaps_are_labels() -> None:
    """pandas writes them as numbers, of which none was the class False or True: a fit was paid for nothing."""
    x, y = blobs()
    truth = pd.Series(y > 0, dtype="boolean").where(x[:, 0] > x[:, 0].min())
    model = PrivateBayesClassifier("sgd", **{**BLOBS, "classes": [False, True]})
    with pytest.warns(CuratorNote, match="records: 1 of"):
        model.fit(torch.tensor(x, requires_grad=True), truth)
    assert set(model.predict(torch.tensor(x, requires_grad=True)).tolist()) <= {False, True}


@pytest.mark.usefixtures("quick_noise")
@pytest.mark.parametrize(
    "outer", [partial(CalibratedClassifierCV, cv=2), partial(BaggingClassifier, n_estimators=1), OneVsRestClassifier]
)
def test_estimators_of_estimators_are_warned_of(outer: Any) -> None:
    """Calibration fits a curve to private labels, bagging draws a record several times, and none of it is paid for."""
    x, y = blobs()
    whole = outer(PrivateBayesClassifier("sgd", **BLOBS))
    with pytest.warns(PrivacyWarning, match=f"{type(whole).__name__}: fits more than this estimator"):
        whole.fit(x, y)


# -- scikit-learn's machinery --------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_noise")
def test_pipeline_parameters_and_pickle() -> None:
    x, y = blobs()
    pipeline = make_pipeline(FunctionTransformer(np.tanh), PrivateBayesClassifier("sgd", **BLOBS))
    pipeline.set_params(privatebayesclassifier__bounds=(-1, 1)).fit(x, y)
    model = pipeline[-1]
    assert model.get_params()["bounds"] == (-1, 1)
    assert not hasattr(clone(model), "posterior_")
    again = pickle.loads(pickle.dumps(pipeline))
    np.testing.assert_array_equal(again.predict_proba(x), pipeline.predict_proba(x))


def test_saved_run_predicts_the_same_and_states_the_count(tmp_path: Path) -> None:
    x, y = blobs(400)
    model = PrivateBayesClassifier("sgd", **{**BLOBS, "records": None}).fit(x, y)
    saved = load_run(model.save(tmp_path / "run"))
    inputs = torch.as_tensor(Encoder.from_dict(saved.encoder).features(x))
    np.testing.assert_allclose(saved.posterior.predict(inputs).probabilities, model.predict_proba(x), rtol=1e-5)
    assert saved.privacy.events == model.privacy_.events
    assert len(saved.privacy.events) == 2


@pytest.mark.usefixtures("quick_noise")
def test_classes_are_sorted_and_kept_when_absent() -> None:
    """Metrics take the columns to be in the order of the sorted labels; unsorted ones would score the wrong class."""
    x, y = blobs(240)
    names = np.array(["beta", "gamma", "alpha"])[y]
    options = {**BLOBS, "records": 240, "steps": 150, "classes": ["gamma", "beta", "alpha", "delta"]}
    model = PrivateBayesClassifier("sgd", **options).fit(x, names)
    assert list(model.classes_) == ["alpha", "beta", "delta", "gamma"]
    columns = sorted(options["classes"])  # type: ignore[call-overload]  # the order that metrics assume; chance is log 4
    assert log_loss(names, model.predict_proba(x), labels=columns) < 0.5 < np.log(4)
    assert model.score(x, names) > 0.9


# -- data frames ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_noise")
def test_frames_give_what_arrays_give() -> None:
    x, y = blobs()
    expected = PrivateBayesClassifier("sgd", **BLOBS).fit(x, y).predict_proba(x)
    by_name = {**BLOBS, "bounds": dict.fromkeys("abc", (-15, 15))}
    for frame, labels in (
        (pd.DataFrame(x, columns=list("abc")), pd.Series(y)),
        (pl.DataFrame(x, schema=list("abc")), pl.Series(y)),
    ):
        model = PrivateBayesClassifier("sgd", **by_name).fit(frame, labels)
        assert list(model.feature_names_in_) == ["a", "b", "c"]
        np.testing.assert_allclose(model.predict_proba(frame), expected, rtol=1e-5)
        np.testing.assert_allclose(model.predict_proba(frame[["b", "a", "c"]]), expected, rtol=1e-5)
    partly = PrivateBayesClassifier("sgd", **{**BLOBS, "bounds": dict.fromkeys("ab", (-15, 15))})
    with pytest.warns(ColumnsLeftOut, match=r"X: 'c' not declared, and left out"):
        partly.fit(pd.DataFrame(x, columns=list("abc")), y)


@pytest.mark.usefixtures("quick_noise")
def test_categories_by_schema() -> None:
    x, y = blobs()
    frame = pd.DataFrame({"a": x[:, 0], "kind": np.array(["red", "green", "blue"])[y]})
    columns = [Column("a", bounds=(-15, 15)), Column("kind", categories=("red", "green", "blue"))]
    schema = Schema(records=120, classes=3, columns=columns)
    model = PrivateBayesClassifier("sgd", schema=schema, delta=1e-4, steps=60, seed=1).fit(frame, y)
    assert model.score(frame, y) > 0.9
    assert model.posterior_.mean().numel() == (1 + 3 + 1) * 3


# -- models --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_noise")
def test_own_module_sees_images() -> None:
    x, y = load_digits(return_X_y=True)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    model = PrivateBayesClassifier(
        "sgd", module=network, bounds=(0, 16), classes=10, records=300, delta=1e-4, steps=3, likelihood=Categorical(10)
    )
    model.fit(x[:300].reshape(-1, 8, 8), y[:300])
    assert model.predict(x[300:305].reshape(-1, 8, 8)).shape == (5,)
    with pytest.raises(TypeError, match="module=3: must be a torch Module"):
        PrivateBayesClassifier("sgd", **BLOBS, module=3).fit(*blobs())


def test_auto_reads_public_sizes_alone() -> None:
    assert rules.default_hidden(1437, 64, 10, epsilon=3.0, regression=False) == ()
    assert rules.default_hidden(60_000, 784, 10, epsilon=10.0, regression=False) == (64,)
    assert rules.default_hidden(1000, 2, 1, epsilon=8.0, regression=True) == ()
    assert rules.default_hidden(3000, 2, 1, epsilon=1.0, regression=True) == (64,)
    assert rules.default_hidden(60_000, 784, 10, epsilon=3.0, regression=False) == ()
    # The bound itself: 10 * ((2 + 1) * 64 + (64 + 1) * 2) = 3220.
    assert rules.default_hidden(3220, 2, 2, epsilon=1.0, regression=False) == (64,)
    assert rules.default_hidden(3219, 2, 2, epsilon=1.0, regression=False) == ()


@pytest.mark.usefixtures("quick_noise")
def test_regressor_predicts_in_the_units_of_the_target() -> None:
    x, y = make_regression(400, 3, noise=5.0, random_state=0)
    y = 1000 + y
    options = {"bounds": (-4, 4), "target_bounds": (700, 1300), "records": 400, "delta": 1e-4, "steps": 100, "seed": 2}
    model = PrivateBayesRegressor("sgnht", **options).fit(x, y)
    mean, deviation = model.predict(x, return_std=True)
    predictive = model.predictive(x)
    assert model.score(x, y) > 0.7
    np.testing.assert_allclose(mean, predictive.mean.numpy())
    np.testing.assert_allclose(deviation**2, predictive.total.numpy(), rtol=1e-6)
    low, high = predictive.interval(0.9).numpy().T
    assert (low < mean).all()
    assert (mean < high).all()
    assert 1 < deviation.mean() < 300
    learnt = PrivateBayesRegressor("sgd", likelihood=HeteroscedasticGaussian(), **options).fit(x, y)
    assert learnt.posterior_.mean().numel() == (3 + 1) * 2


# -- ArviZ ---------------------------------------------------------------------------------------------------


def test_to_arviz_keeps_chains_and_weights() -> None:
    draws = torch.arange(8.0).reshape(4, 2)
    module = nn.Linear(1, 1)
    even = Draws(module, Categorical(2), draws, torch.full((4,), 0.25), {"chains": 2, "largest_r_hat": 1.0})
    tree = even.to_arviz()["posterior"]
    assert tree["weight"].shape == (2, 2, 1, 1)
    np.testing.assert_array_equal(tree["bias"].to_numpy()[..., 0], [[1, 3], [5, 7]])
    assert tree.attrs["largest_r_hat"] == 1.0
    uneven = Draws(module, Categorical(2), draws, torch.tensor([0.0, 0.25, 0.0, 0.75]))
    np.testing.assert_array_equal(uneven.to_arviz()["posterior"]["bias"].to_numpy()[0, :, 0], [3, 7, 7, 7])


def test_to_arviz_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arviz_base", None)
    one = Draws(nn.Linear(1, 1), Categorical(2), torch.zeros(2, 2), torch.full((2,), 0.5))
    with pytest.raises(ImportError, match=r"arviz_base: not installed; pip install 'confide\[arviz\]'"):
        one.to_arviz()


# -- the noise of a regression target ------------------------------------------------------------------------


def line(records: int, noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(seed)
    x = random.uniform(-1, 1, (records, 2))
    return x, x[:, 0] - 0.5 * x[:, 1] + noise * random.standard_normal(records)


@pytest.mark.parametrize("noise", [0.05, 0.4])
@pytest.mark.parametrize("method", ["sgld", "sgd"])
def test_intervals_hold_what_they_say_whatever_the_noise(method: str, noise: float) -> None:
    """With the noise scale of the rule, 0.2 of half the range, coverage would be near 1 or near 0.5."""
    x, y = line(8000, noise, 0)
    x_test, y_test = line(2000, noise, 1)
    facts = {"bounds": (-1, 1), "target_bounds": (-3, 3), "records": 8000, "steps": 300, "clip": 4.0}
    inside = []
    for seed in range(3):  # one alone is below 0.86 in one of sixty seeds
        model = PrivateBayesRegressor(method, epsilon=1.0, hidden=(), seed=seed, **facts).fit(x, y)
        low, high = model.predictive(x_test).interval(0.9).unbind(-1)
        inside.append((torch.tensor(y_test) >= low) & (torch.tensor(y_test) <= high))
    assert 0.86 < float(torch.stack(inside).double().mean()) < 0.94


@pytest.mark.parametrize("method", ["sgld", "sgd"])
def test_the_noise_of_the_target_is_within_the_budget(method: str) -> None:
    x, y = line(400, 0.1, 0)
    book = Ledger()
    facts = {"bounds": (-1, 1), "target_bounds": (-3, 3), "records": 400, "ledger": book, "steps": 10}
    model = PrivateBayesRegressor(method, epsilon=1.0, hidden=(), **facts).fit(x, y)
    assert [entry.purpose for entry in book.entries()] == [f"fit {method} and noise of the target"] * 2
    assert sound_epsilon(book.events(), 1e-5) <= 1.0
    assert sound_epsilon(model.privacy_.events, 1e-5) == pytest.approx(sound_epsilon(book.events(), 1e-5))


def test_a_budget_for_the_fit_alone_is_not_touched() -> None:
    """Charged one after the other, the histogram would be paid for and the fit refused."""
    x, y = line(400, 0.1, 0)
    book = Ledger()
    book.limit(0.9, 1e-5)
    facts = {"bounds": (-1, 1), "target_bounds": (-3, 3), "records": 400, "ledger": book, "steps": 10}
    with pytest.raises(BudgetExceeded):
        PrivateBayesRegressor("sgd", epsilon=1.0, hidden=(), **facts).fit(x, y)
    assert book.entries() == ()


@pytest.mark.usefixtures("quick_noise")
def test_a_given_likelihood_is_left_alone() -> None:
    x, y = line(200, 0.1, 0)
    given = Gaussian(0.07)
    facts = {"bounds": (-1, 1), "target_bounds": (-3, 3), "records": 200, "delta": 1e-4, "steps": 10, "seed": 0}
    model = PrivateBayesRegressor("sgd", likelihood=given, **facts).fit(x, y)
    assert model.posterior_.likelihood == given
    assert len(model.privacy_.events) == 1


def test_noise_scale_from_exact_counts() -> None:
    """Residuals of a known Gaussian: an edge off by one would be 41 % away."""
    z = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).abs()
    for scale in (0.01, 0.1, 0.5):
        edges = torch.tensor(EDGES, dtype=torch.float64)
        counts = torch.bincount(torch.bucketize(scale * z, edges), minlength=len(edges) + 1).double()
        assert _residuals.scale_of(counts, 10.0, len(z)) == pytest.approx(scale, rel=0.05)
    assert _residuals.scale_of(torch.tensor([1000.0] + [0.0] * 21), 1.0, 1000) < 0.01
    assert _residuals.scale_of(torch.tensor([0.0] * 21 + [1000.0]), 1.0, 1000) == _residuals.LARGEST


def test_a_noisy_histogram_says_little() -> None:
    """A thousand records at epsilon 0.1: a count of tails was out by a factor of ten."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        counts = 1000 / 22 + 300 * torch.randn(22, generator=generator, dtype=torch.float64)
        assert 0.02 < _residuals.scale_of(counts, 300.0, 1000) <= _residuals.LARGEST


@pytest.mark.parametrize("kind", [PrivateBayesClassifier, PrivateBayesRegressor])
def test_every_parameter_is_documented_once_in_the_numpydoc_manner(kind: Any) -> None:
    documented = inspect.getdoc(kind) or ""
    parameters, attributes = documented.split("Parameters\n----------\n")[1].split("Attributes\n----------\n")
    named = re.findall(r"(?m)^(\w+) : \S.*\n    \S", parameters)
    assert sorted(named) == sorted(kind().get_params())
    assert {"posterior_", "privacy_", "run_", "schema_"} <= set(re.findall(r"(?m)^(\w+_) : \S", attributes))
    positional = [name for name, one in inspect.signature(kind).parameters.items() if one.kind is not one.KEYWORD_ONLY]
    assert positional == ["method"]


class TestColumnsByNameAndWeights:
    def frames(self) -> tuple[Any, Any]:
        import pandas as pd

        generator = np.random.default_rng(0)
        frame = pd.DataFrame({"a": generator.uniform(-1, 1, 300), "b": generator.uniform(0, 5, 300)})
        return frame, (frame.a > 0).astype(int)

    def model(self, **more: Any) -> PrivateBayesClassifier:
        given = {"bounds": {"a": (-1, 1), "b": (0, 5)}, "classes": 2, "records": 300, "steps": 20, "batch": 60}
        return PrivateBayesClassifier(epsilon=50.0, hidden=(), seed=3, **{**given, **more})

    def test_frames_with_other_columns_in_another_order_are_read_by_name(self) -> None:
        import polars as pl

        frame, y = self.frames()
        model = self.model().fit(frame, y)
        other = frame.assign(z=1.0)[["z", "b", "a"]]
        expected = model.predict_proba(frame)
        np.testing.assert_array_equal(model.predict_proba(other), expected)
        np.testing.assert_array_equal(model.predict_proba(pl.from_pandas(other)), expected)
        np.testing.assert_allclose(model.predict_log_proba(other), np.log(expected))
        with pytest.raises(ValueError, match="now missing"):
            model.predict(frame[["a"]])

    def test_weights_move_the_fit_and_their_bound_is_public(self) -> None:
        """Records of weight zero teach nothing: with only one class weighed, it is all that is predicted."""
        frame, y = self.frames()
        only = self.model(largest_weight=3.0).fit(frame, y, sample_weight=3.0 * (y == 1))
        assert only.predict(frame).mean() > 0.95
        dear = self.model(class_weight={0: 0.0, 1: 2.0}).fit(frame, y)
        assert dear.predict(frame).mean() > 0.95
        assert 0.3 < self.model().fit(frame, y).predict(frame).mean() < 0.7

    def test_weights_that_cannot_be_had_are_refused_before_a_charge(self) -> None:
        frame, y = self.frames()
        with pytest.raises(ValueError, match="how often classes occur is private"):
            self.model(class_weight="balanced").fit(frame, y)
        with pytest.raises(ValueError, match="inconsistent numbers"):
            self.model().fit(frame, y, sample_weight=[1.0])

    def test_loaders_of_batches_get_one_sentence(self) -> None:
        from torch.utils.data import DataLoader, TensorDataset

        pairs = TensorDataset(torch.zeros(4, 2), torch.zeros(4))
        for given, said in ((pairs, "from_pairs"), (DataLoader(pairs), "draws the batches")):
            with pytest.raises(ValueError, match=said):
                self.model().fit(given, None)
            with pytest.raises(ValueError, match=said):
                PrivateData(given, None, schema=Schema(classes=2, records=4))


class TestForeignTables:
    """Frames and arrays as users have them; what is refused quotes no cell."""

    def test_columns_beside_the_declared_ones_are_left_alone(self) -> None:
        import pandas as pd

        generator = np.random.default_rng(0)
        frame = pd.DataFrame({"Größe": generator.uniform(0, 1, 60), "zusatz": ["?"] * 60, "b c": ["x", None] * 30})
        y = (frame["Größe"] > 0.5).astype(int)
        columns = [Column("Größe", bounds=(0, 1)), Column("b c", categories=("x", "y"), missing="category")]
        facts = Schema(records=60, classes=2, columns=columns)
        model = PrivateBayesClassifier("sgld", epsilon=3, steps=4, schema=facts, seed=0, hidden=())
        with pytest.warns(ColumnsLeftOut, match="'zusatz' not declared"):
            model.fit(frame, y)
        assert list(model.feature_names_in_) == ["Größe", "b c"]
        found = model.predict_proba(frame[["b c", "Größe"]].assign(other=1))
        np.testing.assert_allclose(found, model.predict_proba(frame))

    @pytest.mark.parametrize("assume_public", [True, False])
    @pytest.mark.parametrize(
        "X",
        [
            np.array([[0.25, "Müller"]] * 9, dtype=object),
            np.full(9, 0.731),
            [0.731] * 9,
            [{"a": 0.731}] * 9,
            [[0.731, "Müller"]] * 9,
            pd.DataFrame([[0.731, "Müller"]] * 9),
            pd.DataFrame([[0.731, 0.731]] * 9, columns=["a", "a"]),
            np.float64(0.731),
        ],
        ids=lambda X: type(X).__name__,
    )
    def test_a_refusal_quotes_no_cell(self, X: Any, assume_public: bool) -> None:
        """scikit-learn prints the array, or the text that is no number."""
        model = PrivateBayesClassifier(bounds=(0, 1), classes=2, records=9, assume_public=assume_public)
        # An array of cells has a shape, so that it is read, and whoever may see the records is told; here as an error.
        with pytest.raises((ValueError, NothingToLearn), match=r"^X: ") as caught:
            model.fit(X, [0, 1, 0] * 3)
        assert "731" not in str(caught.value)
        assert "Müller" not in str(caught.value)

    @pytest.mark.parametrize("kind", ["polars", "enum", "arrow", "nullable", "category"])
    @pytest.mark.usefixtures("quick_noise")
    def test_kinds_of_frames_give_what_a_plain_one_gives(self, kind: str) -> None:
        import pyarrow as pa

        frame = pd.DataFrame({"a": np.linspace(0, 1, 40), "b": ["x", "y"] * 20, "more": 1.0})
        others = {
            "polars": lambda: pl.from_pandas(frame).with_columns(pl.col("b").cast(pl.Categorical)),
            "enum": lambda: pl.from_pandas(frame).with_columns(pl.col("b").cast(pl.Enum(["y", "x"]))),
            "arrow": lambda: pa.table({**frame, "b": pa.array(frame["b"]).dictionary_encode()}),
            "nullable": lambda: frame.convert_dtypes(dtype_backend="pyarrow"),
            "category": lambda: frame.astype({"b": "category"}),
        }
        columns = [Column("a", bounds=(0, 1)), Column("b", categories=("x", "y"))]
        facts = Schema(records=40, classes=2, columns=columns)
        found = []
        for given in (frame, others[kind]()):
            model = PrivateBayesClassifier("sgd", epsilon=3, steps=4, schema=facts, seed=0)
            with pytest.warns(ColumnsLeftOut, match="'more'"):
                model.fit(given, frame["a"] > 0.5)  # truth values, where the classes are 0 and 1
            found.append(model.predict_proba(given))
        np.testing.assert_array_equal(found[0], found[1])
        assert abs(found[0][:, 1] - 0.5).max() > 0.001  # the records counted for something

    def test_a_frame_that_has_not_been_read_gets_one_sentence(self) -> None:
        model = PrivateBayesClassifier(bounds=(0, 1), classes=2, records=9)
        with pytest.raises(ValueError, match=r"give x.collect\(\)"):
            model.fit(pl.LazyFrame({"a": [0.5] * 9}), [0, 1, 0] * 3)

    def test_set_output_of_a_pipeline_brings_names(self) -> None:
        import pandas as pd
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import FunctionTransformer

        frame = pd.DataFrame({"a": np.linspace(0, 1, 40), "b": np.linspace(1, 0, 40)})
        model = PrivateBayesClassifier("sgld", epsilon=3, steps=4, bounds=(0, 1), classes=2, records=40, seed=0)
        steps = make_pipeline(FunctionTransformer(np.sqrt), model).set_output(transform="pandas")
        steps.fit(frame, (frame["a"] > 0.5).astype(int))
        assert list(steps[-1].feature_names_in_) == ["a", "b"]


def test_an_interrupted_fit_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same estimator, fitted again: it does not begin anew, and states what the ledger was charged for both."""
    x, y = make_blobs(120, 3, centers=3, random_state=0)
    ledger = Ledger(tmp_path / "b.db")
    facts = {**BLOBS, "seed": None, "steps": 20, "ledger": ledger, "name": "blobs", "checkpoint": tmp_path / "kept"}
    answered, answer = [], PrivateData.answer

    def counted(self: Any, *arguments: Any) -> Any:
        release = answer(self, *arguments)
        answered.append(release)
        if len(answered) == 15:
            raise KeyboardInterrupt
        return release

    monkeypatch.setattr(PrivateData, "answer", counted)
    with pytest.raises(KeyboardInterrupt):
        PrivateBayesClassifier("sgld", epsilon=5.0, **facts).fit(x, y)
    paid = sum(event.count for event in ledger.events("blobs"))
    again = PrivateBayesClassifier("sgld", epsilon=5.0, **facts).fit(x, y)
    assert 20 <= len(answered) < 15 + 20  # it went on
    booked = sum(event.count for event in ledger.events("blobs"))
    assert booked >= max(paid, len(answered))
    stated = sound_epsilon(again.privacy_.events, again.privacy_.delta)
    assert stated == pytest.approx(ledger.spent(again.privacy_.delta, "blobs"), rel=1e-6)
    ledger.close()
