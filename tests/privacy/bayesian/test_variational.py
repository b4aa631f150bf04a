"""Variational inference with "free" privacy: the paper's number, and why it says nothing about what is published."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest

from confide.privacy.accountants.profiles import gaussian_epsilon
from confide.privacy.bayesian import FreeRun, free_variational_inference

RECORDS = 200
DATA = np.random.default_rng(0).normal(0.0, 1.0, (RECORDS, 2))
START = (np.zeros(2), np.full(2, 0.5))


def towards_the_mean(mean: np.ndarray, deviation: np.ndarray, rows: np.ndarray, draw: np.ndarray) -> tuple[Any, Any]:
    """A gradient step on the mean of a Gaussian; the deviation is fixed."""
    return mean + 0.02 / 20 * (DATA[rows] - mean).sum(0), deviation


def run(**options: Any) -> FreeRun:
    settings: dict[str, Any] = {"rate": 0.1, "steps": 30, "delta": 1e-5, "pairs": 12, "seed": 1, **options}
    return free_variational_inference(towards_the_mean, *START, RECORDS, **settings)


def epsilon(found: FreeRun) -> float:
    value = found.estimate.release(acknowledge="a test").bayesian.epsilon
    assert value is not None
    return value


def test_drift_is_what_the_rule_leaves_out() -> None:
    """Left out from the start, a record is missing from every update; the distance grows with each of them."""
    found = run(with_drift=True)
    assert found.drift_epsilon is not None
    assert found.drift_epsilon > 1.2 * epsilon(found)
    # on longer runs the gap widens: the rule adds up steps, the drift adds up inside each of them
    longer = run(with_drift=True, steps=90)
    assert longer.drift_epsilon is not None
    assert longer.drift_epsilon / epsilon(longer) > 2 * found.drift_epsilon / epsilon(found)


def test_every_record_in_every_batch_has_a_closed_form() -> None:
    """rate 1: the law of the draws is known. With x left out, the means differ by (0.02/20) x sum of (1 - a)^s after t
    updates, so all draws together are one Gaussian mechanism. The paper's number is below its epsilon for the worst
    record, although it is meant for all but a share of 1e-5 of them."""
    steps = 60
    found = run(rate=1.0, steps=steps, pairs=60)
    shrink = 1 - 0.02 / 20 * RECORDS
    drift = [0.02 / 20 * sum(shrink**s for s in range(t)) for t in range(steps)]
    norms = np.linalg.norm(DATA - DATA.mean(0), axis=1)
    mu = math.sqrt(sum(d * d for d in drift)) / 0.5 * norms
    typical = gaussian_epsilon(float(np.quantile(mu, 0.9)), 1e-5)
    assert epsilon(found) < 0.7 * typical


def test_marked_as_without_any_guarantee() -> None:
    found = run().estimate.release(acknowledge="a test")
    assert found.rule == "free variational inference"
    assert found.dp.epsilon == math.inf
    assert found.bayesian.kind == "data-dependent"
    assert found.bayesian.note.startswith("no DP guarantee and no Bayesian one")
    assert "drift" in found.bayesian.note
    assert found.attack["dp"].tight == 1.0
    assert found.to_dict()["epsilon"]["pld"] is None


def test_changing_variances_may_have_no_divergence() -> None:
    """A deviation that depends on the record by more than (a - 1) / a leaves no finite order: infinite, not a crash."""

    def erratic(mean: np.ndarray, deviation: np.ndarray, rows: np.ndarray, draw: np.ndarray) -> tuple[Any, Any]:
        return mean, np.full(2, 0.5 + len(rows))

    found = free_variational_inference(erratic, *START, 20, rate=0.2, steps=3, delta=1e-5, seed=0, pairs=5)
    assert epsilon(found) == math.inf


def test_the_run_stays_on_the_trusted_side() -> None:
    found = run(steps=3)
    assert found.draws.shape == (3, 2)
    assert "hidden" in repr(found)
    with pytest.raises(TypeError, match="private records"):
        pickle.dumps(found)


@pytest.mark.parametrize(
    ("options", "message"), [({"rule": "sum"}, "rule='sum'"), ({"pairs": 2}, "pairs=2"), ({"rate": 0.0}, "rate=0.0")]
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**options)
