"""Private selection: the bound against exact divergences, the law of the number of runs, and what is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import confide
from confide.errors import UnsupportedEvents
from confide.mechanism.gaussian import SampledGaussian
from confide.privacy.accountants import sound_epsilon
from confide.privacy.accountants.rdp import DEFAULT_ORDERS
from confide.privacy.events import Event, GaussianEvent, NonPrivateEvent, PureEvent
from confide.privacy.selection import (
    Repetitions,
    base_divergence,
    select,
    selection_divergence,
    selection_epsilon,
)
from confide.sources.queries import StatisticQuery

GRID = np.linspace(-14, 18, 40_001)
LAWS = [Repetitions(mean, shape) for mean in (2.0, 10.0, 100.0) for shape in (-0.5, 0.0, 1.0, 3.0)]


def normal(x: Any) -> Any:
    return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def best_of(law: Repetitions, mu: float, sign: int) -> Any:
    """The density of the published outcome of N(mu, 1), where the score is the outcome itself, or its negative."""
    from scipy.special import ndtr

    below = ndtr(sign * (GRID - mu))
    slope = law.expected * (law.gamma / (1 - (1 - law.gamma) * below)) ** (1 + law.shape)
    return normal(GRID - mu) * slope


def integral(values: Any) -> float:
    return float(np.trapezoid(values, GRID) if hasattr(np, "trapezoid") else np.trapz(values, GRID))  # type: ignore[attr-defined]


def pairs(law: Repetitions, mu: float) -> list[tuple[Any, Any]]:
    found = []
    for sign in (1, -1):
        with_record, without = best_of(law, mu, sign), best_of(law, 0.0, sign)
        found += [(with_record, without), (without, with_record)]
    return found


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mu", [0.1, 0.5, 1.5])
def test_the_bound_covers_the_exact_divergence(law: Repetitions, mu: float) -> None:
    """One run is a Gaussian of that mu, and the score is the outcome: the exact density of the winner is known."""
    bounds = selection_divergence([base_divergence([GaussianEvent(1 / mu)], "add-remove")], law)
    for order, bound in list(zip(DEFAULT_ORDERS, bounds, strict=True))[2:60:6]:
        for one, other in pairs(law, mu):
            log_ratio = np.log(np.maximum(one, 1e-300)) - np.log(np.maximum(other, 1e-300))
            exact = math.log(integral(one * np.exp((order - 1) * log_ratio))) / (order - 1)
            assert exact <= bound + 1e-6


@pytest.mark.parametrize("law", LAWS)
def test_the_epsilon_covers_the_exact_delta(law: Repetitions) -> None:
    mu, delta = 0.5, 1e-5
    epsilon = selection_epsilon([[GaussianEvent(1 / mu)]], delta, law).epsilon
    assert epsilon is not None
    for one, other in pairs(law, mu):
        assert integral(one) == pytest.approx(1, abs=1e-6)
        assert integral(np.maximum(0, one - math.exp(epsilon) * other)) <= delta


def test_selection_is_not_free() -> None:
    """What one run costs does not cover the best of many: a price of one run would be caught by the exact delta."""
    law, mu, delta = Repetitions(100.0, 1.0), 0.5, 1e-5
    one_run = sound_epsilon([GaussianEvent(1 / mu)], delta)
    exact = max(integral(np.maximum(0, one - math.exp(one_run) * other)) for one, other in pairs(law, mu))
    assert exact > 10 * delta


def test_it_is_cheaper_than_publishing_all_runs() -> None:
    run = GaussianEvent(3.0, "poisson", 0.01, 1000)
    selected = selection_epsilon([[run]], 1e-5, Repetitions(30.0)).epsilon
    everything = sound_epsilon([GaussianEvent(3.0, "poisson", 0.01, 30_000)], 1e-5)
    one = sound_epsilon([run], 1e-5)
    assert selected is not None
    assert one < selected < everything


def test_a_geometric_number_of_runs_by_hand() -> None:
    """zCDP base rho: D(x) = rho x. With g = 1/mean the bound is elementary."""
    rho, mean = 0.02, 20.0
    law = Repetitions(mean, shape=1.0)
    assert law.gamma == pytest.approx(1 / mean, rel=1e-9)
    noise = math.sqrt(1 / (2 * rho))
    found = selection_divergence([base_divergence([GaussianEvent(noise)], "add-remove")], law)
    second = min((1 - 1 / y) * rho * y + math.log(mean) / y for y in DEFAULT_ORDERS)
    expected = [rho * x + 2 * second + math.log(mean) / (x - 1) for x in DEFAULT_ORDERS]
    assert found == pytest.approx(expected, rel=1e-9)


class TestLaw:
    @pytest.mark.parametrize("law", LAWS)
    def test_it_has_the_mean_it_says(self, law: Repetitions) -> None:
        assert law.expected == pytest.approx(law.mean, rel=1e-9)
        chance, total, mean = law_first(law), 0.0, 0.0
        for count in range(1, 60_000):
            total, mean = total + chance, mean + count * chance
            chance *= (1 - law.gamma) * (count + law.shape) / (count + 1)
        assert total == pytest.approx(1, abs=2e-4)
        assert mean == pytest.approx(law.mean, rel=0.01 if law.shape >= 0 else 0.2)  # the tail is long

    def test_draws_follow_it(self) -> None:
        law, random = Repetitions(5.0, 1.0), np.random.default_rng(0)
        draws = np.array([law.draw(uniform) for uniform in random.random(4000)])
        assert draws.min() == 1
        assert draws.mean() == pytest.approx(5.0, abs=4 * draws.std() / math.sqrt(len(draws)))
        assert (draws == 1).mean() == pytest.approx(law_first(law), abs=0.03)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mean": 1.0}, "mean=1.0: must be a finite number > 1"),
            ({"mean": 3.0, "shape": -1.0}, "shape=-1.0: must be"),
        ],
    )
    def test_refusals(self, options: dict[str, float], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Repetitions(**options)


def law_first(law: Repetitions) -> float:
    """Pr[K = 1] from the generating function: f'(0) = E[K] g^(1+a)."""
    return law.expected * law.gamma ** (1 + law.shape)


def test_the_dearest_candidate_counts_at_every_order() -> None:
    cheap, dear = GaussianEvent(5.0), GaussianEvent(2.0)
    law = Repetitions(5.0)
    both = selection_epsilon([[cheap], [dear]], 1e-5, law).epsilon
    assert both == selection_epsilon([[dear]], 1e-5, law).epsilon


def test_scores_are_part_of_the_cost() -> None:
    law, fit, score = Repetitions(5.0), GaussianEvent(2.0), PureEvent(0.1)
    without, with_score = (selection_epsilon([events], 1e-5, law).epsilon for events in ([fit], [fit, score]))
    assert without is not None
    assert with_score is not None
    assert without < with_score


def test_no_protection_and_no_bound() -> None:
    assert selection_epsilon([[NonPrivateEvent("off")]], 1e-5, Repetitions(3.0)).epsilon == math.inf
    with pytest.raises(UnsupportedEvents, match="replace-one"):
        selection_epsilon([[GaussianEvent(1.0, "poisson", 0.1)]], 1e-5, Repetitions(3.0), "replace-one")
    with pytest.raises(ValueError, match="at least one candidate"):
        selection_epsilon([], 1e-5, Repetitions(3.0))


class TestSelect:
    event = GaussianEvent(2.0)

    def choose(self, run: Any, **options: Any) -> Any:
        return select(
            [0.1, 0.5, 0.9], run, lambda candidate: [self.event], delta=1e-5, repetitions=Repetitions(200.0), **options
        )

    def test_the_best_score_wins_and_nothing_else_shows(self) -> None:
        scores: list[float] = []

        def run(candidate: float) -> tuple[float, str]:
            scores.append(candidate * math.sin(len(scores)))
            return scores[-1], f"fitted {candidate}"

        found = self.choose(run)
        assert found.score == max(scores)
        assert found.result == f"fitted {found.candidate}"
        assert found.privacy.epsilon == selection_epsilon([[self.event]], 1e-5, Repetitions(200.0)).epsilon
        assert set(vars(found)) == {"candidate", "result", "score", "privacy"}

    def test_a_score_that_is_no_number_never_wins_against_one(self) -> None:
        scores = itertools.cycle([math.nan, 1.0, math.inf])
        law = {"repetitions": Repetitions(30.0, 1.0)}
        found = select([1], lambda _: (next(scores), None), lambda _: [self.event], delta=1e-5, **law)
        assert found.score in (1.0, -math.inf)

    def test_runs_that_cost_more_than_stated_are_refused(self) -> None:
        ledger = confide.Ledger()

        def honest(candidate: float) -> tuple[float, None]:
            ledger.charge(self.event, dataset="d")
            return candidate, None

        def greedy(candidate: float) -> tuple[float, None]:
            extra: Event = PureEvent(1.0)
            ledger.charge(extra, dataset="d")
            return honest(candidate)

        self.choose(honest, ledger=ledger, dataset="d")
        with pytest.raises(ValueError, match="cost: a run was charged 1 times PureEvent"):
            self.choose(greedy, ledger=ledger, dataset="d")

    def test_tuning_a_fit_with_a_private_score(self) -> None:
        """From candidates to a winner: every run pays for its fit and for its score, and states both."""
        x = torch.rand(200, 3, generator=torch.Generator().manual_seed(0))
        data = confide.PrivateData(x, x.sum(1), schema=confide.Schema(records=200), ledger=confide.Ledger(), name="d")
        plan = confide.plan(noise_multiplier=3.0, delta=1e-5, records=200, batch=50, steps=8)
        counting = SampledGaussian(20.0, 1.0, 1.0, 200, "full-batch")

        def run(rate: float) -> tuple[float, confide.Run]:
            fitted = confide.fit(confide.methods.SGD(learning_rate=rate), confide.networks.linear(3), data, plan)
            predict = fitted.posterior.predict

            def near(x: Tensor, y: Tensor) -> Tensor:
                return ((predict(x).mean - y).abs() < 0.5).double()[:, None]

            return data.answer(StatisticQuery(near, 1), counting).sum.item(), fitted

        cost = [*plan.events(), counting.event()]
        options = {"delta": 1e-5, "repetitions": Repetitions(4.0), "ledger": data.ledger, "dataset": "d"}
        found = select([0.001, 0.1], run, lambda _: cost, **options)
        assert found.privacy.epsilon == selection_epsilon([cost], 1e-5, Repetitions(4.0)).epsilon
        assert isinstance(found.result, confide.Run)
        with pytest.raises(ValueError, match="cost: a run was charged"):
            select([0.1], run, lambda _: plan.events(), **options)  # the score left out
