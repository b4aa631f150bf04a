"""The product and Hoelder rules: the published numbers, the counter-example, and what the result says of itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial.distance import pdist
from scipy.special import ndtr

from confide.privacy.bayesian import BayesianEstimate, Confidential, Distances, hoelder, product
from confide.privacy.events import GaussianEvent

GOLDEN: dict[str, dict[str, Any]] = {
    entry["id"]: entry
    for entry in json.loads((Path(__file__).parents[2] / "reference" / "golden.json").read_text())["entries"]
}
DELTA = 1e-5
OUTLIER = [Distances(GaussianEvent(20.0, count=1000), np.array([0.0, 1.0]), np.array([0.99, 0.01]))]
TWO_CLASSES = [
    Distances(GaussianEvent(1.3, "poisson", 256 / 60_000, 3516), np.array([0.3, 1.0]), np.array([0.95, 0.05]))
]


def shown(estimate: Confidential) -> BayesianEstimate:
    return estimate.release(acknowledge="a test")


def epsilon(estimate: Confidential) -> float:
    found = shown(estimate).bayesian.epsilon
    assert found is not None
    return found


def assert_golden(name: str, value: float) -> None:
    entry = GOLDEN[name]
    assert value == pytest.approx(entry["value"], rel=entry["rtol"])


class TestCounterExample:
    """d = 1 for one record in a hundred, else 0; noise 20, every record in each of 1000 steps."""

    mu = math.sqrt(1000) / 20

    def test_the_product_rule_claims_too_little(self) -> None:
        claimed = epsilon(product(OUTLIER, DELTA, mean="exact"))
        assert_golden("004.thm1.counterexample.eps_claimed", claimed)
        # the loss of an outlier is N(mu^2 / 2, mu^2), that of the others 0
        true_probability = 0.01 * ndtr((self.mu**2 / 2 - claimed) / self.mu)
        assert_golden("004.thm1.counterexample.true_prob", true_probability)
        assert true_probability > 500 * DELTA

    def test_hoelder_covers_the_truth(self) -> None:
        from scipy.special import ndtri

        exact = self.mu**2 / 2 - self.mu * ndtri(DELTA / 0.01)
        assert_golden("004.thm1.counterexample.eps_true_def5", exact)
        found = epsilon(hoelder(OUTLIER, DELTA, mean="exact"))
        assert found == pytest.approx(7.129, abs=5e-4)
        assert exact < found < shown(hoelder(OUTLIER, DELTA, mean="exact")).dp.epsilon  # type: ignore[operator]

    def test_whole_orders_would_do_worse(self) -> None:
        """Catches fractional orders being lost where nothing is sampled."""
        whole = epsilon(hoelder(OUTLIER, DELTA, mean="exact", orders=range(1, 65)))
        assert whole == pytest.approx(7.2305, abs=5e-4)


def test_worked_example() -> None:
    assert epsilon(product(TWO_CLASSES, DELTA, mean="exact")) == pytest.approx(0.7381, abs=1e-4)
    assert epsilon(hoelder(TWO_CLASSES, DELTA, mean="exact")) == pytest.approx(1.006, abs=5e-4)
    assert shown(product(TWO_CLASSES, DELTA, mean="exact")).dp.epsilon == pytest.approx(0.8646, abs=2e-4)


class TestWeibullGradients:
    """The authors' notebook: 50 gradients of 1000 Weibull(0.5) entries, 100 steps, q = 1e-3, noise 2 C, order 16."""

    def steps(self, quantile: float, clip: bool, disjoint: bool = False, seed: int = 0) -> list[Distances]:
        random = np.random.default_rng(seed)
        event = GaussianEvent(1.0, "poisson", 1e-3)
        found = []
        for _ in range(100):
            gradients = random.weibull(0.5, (50, 1000))
            norms = np.linalg.norm(gradients, axis=1)
            bound = np.quantile(norms, quantile)
            if clip:
                gradients /= np.maximum(1, norms / bound)[:, None]
            pairs = np.linalg.norm(gradients[:25] - gradients[25:], axis=1) if disjoint else pdist(gradients)
            found.append(Distances(event, pairs / (2 * bound)))  # a pair is at most 2 C apart
        return found

    def at_16(self, rule: Any, steps: list[Distances], **options: Any) -> float:
        return epsilon(rule(steps, DELTA, orders=[16.0], **{"failure": 1.1e-16, **options}))

    def test_clipped_at_the_median(self) -> None:
        steps = self.steps(0.5, clip=True)
        assert self.at_16(product, steps) == pytest.approx(0.71997, abs=2e-5)
        assert self.at_16(hoelder, steps) == pytest.approx(0.71997, abs=2e-5)
        # with a bound on the mean that holds, order 16 gives what it gives for DP
        at_bound = [Distances(GaussianEvent(1.0, "poisson", 1e-3, 100), np.ones(1), np.ones(1))]
        assert self.at_16(product, at_bound, mean="exact") == pytest.approx(116.78, abs=0.01)
        assert epsilon(product(at_bound, DELTA, mean="exact", orders=[13.0])) == pytest.approx(0.913, abs=5e-4)
        honest = self.at_16(hoelder, self.steps(0.5, clip=True, disjoint=True), mean="bernstein", failure=1e-9)
        assert honest == pytest.approx(116.8, abs=0.1)

    def test_the_dp_number_is_below_all_of_them(self) -> None:
        found = shown(product(self.steps(0.5, clip=True), DELTA))
        assert found.dp.epsilon == pytest.approx(GOLDEN["004.synthetic.dp_pld"]["value"], rel=0.002)
        assert found.bayesian.epsilon is not None
        assert found.dp.epsilon is not None
        assert found.bayesian.epsilon > 5 * found.dp.epsilon

    @pytest.mark.parametrize(("quantile", "product_value", "hoelder_value"), [(0.05, 177.6, 205.6), (0.5, 31.99, 38.8)])
    def test_unclipped(self, quantile: float, product_value: float, hoelder_value: float) -> None:
        """Heavy tails: one run differs from the next by tens of per cent, so only the size is compared."""
        steps = self.steps(quantile, clip=False)
        by_product, by_hoelder = self.at_16(product, steps), self.at_16(hoelder, steps)
        assert by_product == pytest.approx(product_value, rel=0.5)
        assert by_hoelder == pytest.approx(hoelder_value, rel=0.5)
        assert by_hoelder - by_product == pytest.approx(hoelder_value - product_value, rel=0.3)


class TestOrders:
    def test_the_search_finds_the_best_of_all(self) -> None:
        """Every order on its own, against the search that tries few of them."""
        steps = TWO_CLASSES
        every = min(epsilon(product(steps, DELTA, mean="exact", orders=[order])) for order in range(1, 40))
        assert epsilon(product(steps, DELTA, mean="exact")) == every

    def test_low_signal_needs_orders_beyond_256(self) -> None:
        """mu = 0.01: the best order is sqrt(2 log(1 / delta)) / mu = 480, and 256 costs a fifth more."""
        weak = [Distances(GaussianEvent(1000.0, count=100), np.array([1.0]), np.array([1.0]))]
        best = 0.01 * math.sqrt(2 * math.log(1e5)) + 0.01**2 / 2
        assert epsilon(product(weak, DELTA, mean="exact")) == pytest.approx(best, rel=1e-3)
        assert epsilon(product(weak, DELTA, mean="exact", orders=range(1, 257))) > 1.19 * best

    def test_delta_pays_for_every_step_and_order(self) -> None:
        """failure * steps * orders is taken off delta; forgetting the orders would give the smaller number."""
        values = np.linspace(0.1, 0.3, 20)
        steps = [Distances(GaussianEvent(1.0, "poisson", 0.01), values)] * 10
        orders = [float(order) for order in range(1, 11)]
        found = epsilon(product(steps, DELTA, failure=5e-8, orders=orders))
        few = min(epsilon(product(steps, DELTA, failure=5e-8, orders=[order])) for order in orders)
        beta_all, beta_one = DELTA - 5e-8 * 10 * 10, DELTA - 5e-8 * 10
        best = max(orders)
        assert found - few == pytest.approx(math.log(beta_one / beta_all) / best, rel=1e-6)
        with pytest.raises(ValueError, match="more than delta"):
            product(steps, DELTA, failure=1e-6, orders=orders)


class TestWhatItSays:
    def test_kind_and_both_numbers(self) -> None:
        found = shown(product(TWO_CLASSES, DELTA, mean="exact"))
        assert found.bayesian.kind == "data-dependent"
        assert not found.bayesian.sound
        assert found.dp.sound
        assert "not a DP guarantee" in found.bayesian.note
        assert "assumes" in found.bayesian.note
        assert "too small" in found.bayesian.note
        assert "too small" not in shown(hoelder(TWO_CLASSES, DELTA, mean="exact")).bayesian.note

    def test_attacks_side_by_side(self) -> None:
        found = shown(product(TWO_CLASSES, DELTA, mean="exact"))
        assert found.attack["dp"].naive == pytest.approx(1 / (1 + math.exp(-0.8646)), abs=1e-4)
        assert found.attack["dp"].tight == pytest.approx(0.5451, abs=1e-4)
        assert found.attack["bayesian"].naive == pytest.approx(1 / (1 + math.exp(-0.7381)), abs=1e-4)
        assert found.attack["bayesian"].tight is None

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mean": "median"}, "mean='median'"),
            ({"mean": "exact"}, "needs weights"),
            ({"failure": 0.0}, "failure=0.0"),
            ({"orders": [0.0]}, "orders="),
            ({"delta": 0.0}, "delta=0.0"),
        ],
    )
    def test_refusals(self, options: dict[str, Any], message: str) -> None:
        steps = [Distances(GaussianEvent(1.0), np.linspace(0, 1, 5))]
        with pytest.raises(ValueError, match=message):
            product(steps, **{"delta": DELTA, **options})

    def test_too_few_records_are_refused(self) -> None:
        with pytest.raises(ValueError, match="at least 3"):
            product([Distances(GaussianEvent(1.0), np.ones(2))], DELTA)
        with pytest.raises(ValueError, match="no step"):
            product([], DELTA)
