"""The averaged estimator: the worked example, its coverage, what noise costs, and that nothing leaves unasked."""

from __future__ import annotations

import copy
import json
import math
import pickle
import secrets
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from confide.errors import UnsupportedEvents
from confide.privacy.accountants.bound import UPPER_BOUND, Bound
from confide.privacy.accountants.pld import PLD
from confide.privacy.accountants.profiles import gaussian_delta
from confide.privacy.bayesian import (
    BayesianEstimate,
    Confidential,
    Sequences,
    average,
    averaged,
    chernoff_mean_bound,
    constant_sequences,
    discrete_laplace,
    level_kinds,
)
from confide.privacy.bayesian.average import Curve
from confide.privacy.events import GaussianEvent, PureEvent
from confide.privacy.ledger import Ledger

DELTA = 1e-5
MNIST = GaussianEvent(1.3, "poisson", 256 / 60_000, 3516)


def two_classes(records: int = 10_000) -> Sequences:
    """One record in twenty at the clipping bound at every step, the others at 0.3 of it."""
    distances = np.full(records, 0.3)
    distances[: records // 20] = 1.0
    return constant_sequences(distances, [MNIST])


def epsilon(estimate: Confidential) -> float:
    found = estimate.release(acknowledge="a test").bayesian.epsilon
    assert found is not None
    return found


@pytest.fixture(scope="module")
def worked() -> Confidential:
    return averaged(two_classes(), DELTA, failure=1e-6)


class TestWorkedExample:
    def test_known_distribution(self) -> None:
        known = constant_sequences(np.array([0.3, 1.0]), [MNIST], weights=np.array([0.95, 0.05]))
        assert epsilon(averaged(known, DELTA)) == pytest.approx(0.6662, abs=5e-4)

    def test_sample(self, worked: Confidential) -> None:
        found = worked.release(acknowledge="a test")
        assert found.bayesian.epsilon == pytest.approx(0.6928, abs=5e-4)
        assert found.dp.epsilon == pytest.approx(0.8646, abs=2e-4)
        assert "10000 records" in found.bayesian.note

    def test_attacks(self, worked: Confidential) -> None:
        """The mean over records of the best attack is far below that on the worst record."""
        found = worked.release(acknowledge="a test")
        single = PLD().delta([GaussianEvent(1.3 / 0.3, "poisson", MNIST.rate, MNIST.count)], 0.0)
        mean = (1 + 0.05 * PLD().delta([MNIST], 0.0) + 0.95 * single) / 2
        tight = found.attack["bayesian"].tight
        assert tight is not None
        assert mean < tight < mean + 0.001
        assert found.attack["dp"].tight == pytest.approx(0.5451, abs=1e-4)
        assert found.attack["dp"].naive == pytest.approx(0.7036, abs=1e-4)
        assert found.attack["bayesian"].naive == pytest.approx(1 / (1 + math.exp(-0.6929)), abs=1e-4)

    def test_few_records_show_little(self) -> None:
        """With 40 records the bound on the mean is no lower than the largest value: DP is the answer."""
        few = averaged(two_classes(40), DELTA)
        assert epsilon(few) == few.dp.epsilon

    def test_everybody_at_the_bound_is_dp(self) -> None:
        found = averaged(constant_sequences(np.ones(1000), [MNIST]), DELTA)
        assert epsilon(found) == found.dp.epsilon


def test_the_counter_example_is_covered() -> None:
    """d = 1 for one record in a hundred: the averaged delta is 0.01 delta_mu, in closed form."""
    event = GaussianEvent(20.0, count=1000)
    known = constant_sequences(np.array([0.0, 1.0]), [event], weights=np.array([0.99, 0.01]))
    found = epsilon(averaged(known, DELTA))
    reached = 0.01 * gaussian_delta(math.sqrt(1000) / 20, np.array([found]))[0]
    assert 0.995 * DELTA < reached <= DELTA
    assert found > 5.5  # where the product rule claims 0.92


class TestCoverage:
    """A population of two classes; samples of 400 records; the bound at fixed epsilons, stated failure 0.1."""

    records, failure = 400, 0.1

    def curve(self, outliers: int) -> Curve:
        repeats = np.array([self.records - outliers, outliers])
        keep = repeats > 0
        counts = np.array([[0, 1000, 0, 0], [0, 0, 0, 1000]])[keep]
        event = GaussianEvent(20.0)
        sequences = Sequences(level_kinds(event, 3), counts, repeats=repeats[keep])
        return Curve(sequences, 1e-3, Bound(5.0, UPPER_BOUND))

    def test_the_bound_holds_as_often_as_stated(self) -> None:
        """The plain mean, as a broken bound, is too small half of the time."""
        random = np.random.default_rng(0)
        share = 0.02
        whole = self.curve(1)
        values, largest = whole.table
        truth = (1 - share) * values[0] + share * values[1]
        column = 60
        missed, broken = 0, 0
        for outliers in random.binomial(self.records, share, 2000):
            curve = self.curve(int(outliers))
            rows = values if outliers else values[:1]
            missed += curve.bound(rows, largest, self.failure)[column] < truth[column]
            broken += (curve._shares @ rows)[column] < truth[column]
        assert missed <= self.failure * 2000
        assert broken > 0.4 * 2000

    def test_epsilon_is_the_last_crossing(self) -> None:
        """At the epsilon found and at every grid point above, bound + failure <= delta; just below it is not."""
        sequences = two_classes(2000).grouped()
        dp = PLD().epsilon(sequences.events, DELTA)
        curve = Curve(sequences, DELTA, dp)
        found = curve.epsilon(1e-6)
        values, largest = curve._profiles(np.linspace(found, dp.epsilon, 9), DELTA)  # type: ignore[arg-type]
        assert np.all(curve.bound(values, largest, 1e-6) + 1e-6 <= DELTA)
        values, largest = curve._profiles(np.array([found - 0.002]), DELTA)
        assert np.all(curve.bound(values, largest, 1e-6) + 1e-6 > DELTA)

    def test_what_looks_may_have_missed_is_paid_for(self) -> None:
        plain = two_classes()
        covered = Sequences(plain.kinds, plain.counts, missed=0.01)
        assert epsilon(averaged(covered, DELTA)) > epsilon(averaged(plain, DELTA)) + 0.005


class TestNothingLeavesUnasked:
    def test_hidden(self, worked: Confidential) -> None:
        for text in (repr(worked), str(worked), f"{worked}"):
            assert "0.69" not in text
            assert "hidden" in text
        leaks: list[Any] = [pickle.dumps, copy.copy, copy.deepcopy, float, list]
        for leak in leaks:
            with pytest.raises(TypeError, match="private records"):
                leak(worked)
        with pytest.raises(TypeError):
            json.dumps(worked)
        assert not any(isinstance(value, BayesianEstimate) for value in vars(type(worked)).values())

    def test_the_dp_number_needs_no_permission(self, worked: Confidential) -> None:
        assert worked.dp.epsilon == pytest.approx(0.8646, abs=2e-4)

    @pytest.mark.parametrize("acknowledge", ["", "  ", True, None])
    def test_release_wants_a_reason(self, worked: Confidential, acknowledge: Any) -> None:
        with pytest.raises(ValueError, match="acknowledge="):
            worked.release(acknowledge=acknowledge)

    def test_what_is_released_says_so_and_holds_both(self, worked: Confidential) -> None:
        written = worked.release(acknowledge="the hold-out is public").to_dict()
        assert json.loads(json.dumps(written)) == written
        assert set(written["epsilon"]) == {"pld", "bayesian"}
        assert written["kind"] == {"pld": "upper bound", "bayesian": "data-dependent"}
        assert written["disclosure"].endswith("the hold-out is public")
        assert set(written["attacker"]) == {"dp", "bayesian"}

    def test_a_bayesian_number_cannot_pose_as_a_guarantee(self) -> None:
        with pytest.raises(ValueError, match="data-dependent"):
            BayesianEstimate("averaged", Bound(0.1, UPPER_BOUND), Bound(1.0, UPPER_BOUND), DELTA, {})


class TestPaidRelease:
    def test_charged_first_and_larger(self, worked: Confidential) -> None:
        ledger = Ledger()
        found = worked.noisy(1.0, lambda event: ledger.charge(event, "Bayesian estimate", "hold-out"))
        assert [entry.event for entry in ledger.entries()] == [PureEvent(1.0, "replace-one")]
        assert ledger.spent(1e-5, "hold-out", "replace-one") == pytest.approx(1.0, rel=1e-4)
        with pytest.raises(UnsupportedEvents):  # the number of records was used as it is
            ledger.spent(1e-5, "hold-out", "add-remove")
        assert found.bayesian.epsilon is not None
        assert epsilon(worked) < found.bayesian.epsilon <= worked.dp.epsilon  # type: ignore[operator]
        assert "paid" in found.disclosure

    def test_no_charge_no_release(self, worked: Confidential) -> None:
        def refuse(event: PureEvent) -> None:
            raise PermissionError("budget used up")

        with pytest.raises(PermissionError):
            worked.noisy(1.0, refuse)

    def test_little_budget_says_nothing(self, worked: Confidential) -> None:
        assert worked.noisy(1e-4, lambda event: None).bayesian.epsilon == worked.dp.epsilon

    def test_other_rules_have_no_such_release(self) -> None:
        known = averaged(constant_sequences(np.ones(1), [MNIST], weights=np.ones(1)), DELTA)
        with pytest.raises(ValueError, match="no noise covers"):
            known.noisy(1.0, lambda event: None)

    def test_discrete_laplace(self) -> None:
        draws = np.array([discrete_laplace(Fraction(10, 2)) for _ in range(20_000)])
        shrink = math.exp(-1 / 5)
        assert draws.mean() == pytest.approx(0.0, abs=0.25)
        assert draws.var() == pytest.approx(2 * shrink / (1 - shrink) ** 2, rel=0.06)
        assert np.mean(draws == 0) == pytest.approx((1 - shrink) / (1 + shrink), abs=0.01)

    def test_discrete_laplace_reaches_every_integer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The logarithm of a number in [0, 1) ends at 37 scales and leaves gaps before that: no pure law."""
        coins = iter([True, *[True] * 60, False])
        monkeypatch.setattr(average, "_happens", lambda above, below: next(coins))
        monkeypatch.setattr(secrets, "randbelow", lambda below: below - 1)
        assert discrete_laplace(Fraction(7, 2)) == -((6 + 7 * 60) // 2)

    def test_chernoff_bound(self) -> None:
        assert chernoff_mean_bound(0.0, 100, 0.05) == pytest.approx(1 - 0.05 ** (1 / 100), rel=1e-9)
        assert chernoff_mean_bound(1.0, 100, 0.05) == 1.0
        assert 0.3 < chernoff_mean_bound(0.3, 1000, 1e-3) < 0.36


@pytest.mark.parametrize(("delta", "failure"), [(0.0, 1e-6), (1e-5, 0.0), (1e-5, 1e-5)])
def test_delta_and_failure_are_checked(delta: float, failure: float) -> None:
    with pytest.raises(ValueError, match="must be in"):
        averaged(two_classes(100), delta, failure=failure)
