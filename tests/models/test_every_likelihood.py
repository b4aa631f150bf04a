"""Every likelihood against laws that others wrote down: densities, distributions, scores, clipped sums, whole fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, distributions

import confide
from confide import methods
from confide.data.schema import Schema
from confide.evaluate.metrics import coverage, crps, evaluate, log_likelihood
from confide.mechanism.clipping import clipped_sum
from confide.mechanism.clipping.proven import is_proven_loss
from confide.mechanism.clipping.reference import reference_clipped_sum
from confide.mechanism.clipping.rounding import SHARE
from confide.models import networks
from confide.models.counts import NegativeBinomial, Poisson
from confide.models.heavy_tails import Laplace, StudentT
from confide.models.likelihoods import LIKELIHOODS
from confide.models.ordinal import Ordinal
from confide.models.several import MultiGaussian, MultiLabel
from confide.models.survival import Exponential, Weibull
from confide.posteriors.files import load_posterior
from confide.privacy.ledger import Ledger
from confide.running.artefacts import load_run

COUNT, FEATURES = 24, 3


@dataclass(frozen=True)
class Case:
    """A likelihood, targets that it knows, ones that it does not, and its log density as torch writes it."""

    likelihood: Any
    targets: Callable[[torch.Generator], Tensor]
    outside: list[Any]
    log_density: Callable[[Tensor, Tensor], Tensor]


def poisson(output: Tensor, y: Tensor) -> Tensor:
    return distributions.Poisson(2 * output[:, 0].exp()).log_prob(y)


def negative_binomial(output: Tensor, y: Tensor) -> Tensor:
    mean, size = 2 * output[:, 0].exp(), 0.05 + torch.nn.functional.softplus(output[:, 1])
    return distributions.NegativeBinomial(size, logits=mean.log() - size.log()).log_prob(y)


def ordinal(output: Tensor, y: Tensor) -> Tensor:
    cuts = Ordinal(4).thresholds(output).sigmoid()
    ends = torch.cat([torch.zeros_like(cuts[:, :1]), cuts, torch.ones_like(cuts[:, :1])], 1)
    return ends.diff(dim=1).log().gather(1, y.long()[:, None]).squeeze(1)


def weibull(output: Tensor, y: Tensor) -> Tensor:
    law = distributions.Weibull(3 * output[:, 0].exp(), Weibull().shape(output[:, 1]))
    return torch.where(y[:, 1] == 1, law.log_prob(y[:, 0]), torch.log(1 - law.cdf(y[:, 0])))


def exponential(output: Tensor, y: Tensor) -> Tensor:
    rate = 1 / (3 * output[:, 0].exp())
    return torch.where(y[:, 1] == 1, distributions.Exponential(rate).log_prob(y[:, 0]), -rate * y[:, 0])


def times(generator: torch.Generator) -> Tensor:
    time = torch.rand(COUNT, generator=generator) * 4 + 0.1
    return torch.stack([time, (torch.rand(COUNT, generator=generator) > 0.4).float()], 1)


def counts(generator: torch.Generator) -> Tensor:
    return torch.poisson(torch.full((COUNT,), 2.0), generator=generator)


def numbers(generator: torch.Generator) -> Tensor:
    return torch.randn(COUNT, generator=generator)


CASES = {
    "poisson": Case(Poisson(2.0), counts, [-1.0, 2.5], poisson),
    "negative-binomial": Case(NegativeBinomial(2.0), counts, [-3.0, 0.1], negative_binomial),
    "ordinal": Case(
        Ordinal(4), lambda g: torch.randint(0, 4, (COUNT,), generator=g).float(), [-1.0, 4.0, 1.5], ordinal
    ),
    "multi-label": Case(
        MultiLabel(2),
        lambda g: torch.randint(0, 2, (COUNT, 2), generator=g).float(),
        [[0.0, 2.0], [0.5, 1.0], [-1.0, 0.0]],
        lambda output, y: distributions.Bernoulli(logits=output).log_prob(y).sum(1),
    ),
    "student-t": Case(
        StudentT(0.3, 5.0), numbers, [], lambda output, y: distributions.StudentT(5.0, output[:, 0], 0.3).log_prob(y)
    ),
    "laplace": Case(Laplace(0.3), numbers, [], lambda output, y: distributions.Laplace(output[:, 0], 0.3).log_prob(y)),
    "exponential": Case(Exponential(3.0), times, [[0.0, 1.0], [-2.0, 0.0], [1.0, 0.5]], exponential),
    "weibull": Case(Weibull(3.0), times, [[0.0, 1.0], [-2.0, 0.0], [1.0, 2.0]], weibull),
    "multi-gaussian": Case(
        MultiGaussian(2, 0.3),
        lambda g: torch.randn(COUNT, 2, generator=g),
        [],
        lambda output, y: distributions.Normal(output, 0.3).log_prob(y).sum(1),
    ),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def outputs(case: Case, *shape: int) -> Tensor:
    return torch.randn(*shape, case.likelihood.outputs, generator=generator(1), dtype=torch.float64)


def test_none_is_left_out() -> None:
    older = {"categorical", "bernoulli", "probit", "gaussian", "heteroscedastic-gaussian", "tokens"}
    older |= {"calibrated"}  # made after a fit: see the tests of recalibration
    assert set(CASES) == set(LIKELIHOODS) - older, "a new likelihood needs a case here"


@pytest.mark.parametrize("name", CASES)
class TestLosses:
    def test_is_the_negative_log_density(self, name: str) -> None:
        case = CASES[name]
        output, y = outputs(case, COUNT), case.targets(generator()).double()
        assert torch.allclose(case.likelihood.loss(output, y), -case.log_density(output, y), atol=1e-9)

    def test_what_is_outside_its_domain_counts_as_zero(self, name: str) -> None:
        case = CASES[name]
        for value in case.outside:
            output = outputs(case, 1).requires_grad_(True)
            loss = case.likelihood.loss(output, torch.tensor([value], dtype=torch.float64))
            (slope,) = torch.autograd.grad(loss.sum(), output)
            assert loss.tolist() == [0.0]
            assert not slope.any(), value

    def test_stays_finite_for_wild_outputs(self, name: str) -> None:
        case = CASES[name]
        y = case.targets(generator())
        for size in (30.0, -30.0, 1000.0):
            output = torch.full((COUNT, case.likelihood.outputs), size, requires_grad=True)
            loss = case.likelihood.loss(output, y)
            (slope,) = torch.autograd.grad(loss.sum(), output)
            assert bool(loss.isfinite().all()), size
            assert bool(slope.isfinite().all()), size

    def test_no_record_is_moved_by_another(self, name: str) -> None:
        case = CASES[name]
        output, y = outputs(case, COUNT), case.targets(generator()).double()
        whole = case.likelihood.loss(output, y)
        alone = torch.cat([case.likelihood.loss(output[i : i + 1], y[i : i + 1]) for i in range(COUNT)])
        assert torch.allclose(whole, alone, atol=1e-12)

    def test_clipped_sums_are_those_of_records_one_by_one(self, name: str) -> None:
        case = CASES[name]
        x, y = torch.randn(COUNT, FEATURES, generator=generator(2)).double(), case.targets(generator()).double()
        if case.outside:
            y[3] = torch.tensor(case.outside[0])
        network = networks.mlp(FEATURES, case.likelihood.outputs, hidden=(4,), generator=generator()).double()
        assert is_proven_loss(case.likelihood.loss, y)
        size = sum(value.numel() for value in network.parameters())
        found = torch.zeros(size, dtype=torch.float64)
        clipped_sum(network, case.likelihood.loss, x, y, clip=0.5, out=found)
        expected = torch.zeros(size, dtype=torch.float64)
        reference_clipped_sum(network, case.likelihood.loss, x, y, clip=0.5, out=expected)
        assert torch.allclose(found, expected, atol=COUNT * 0.5 * SHARE[torch.float64])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", ["sgld", "bbp"])
def test_is_fitted_predicted_saved_and_loaded(name: str, method: str, tmp_path: Any) -> None:
    case = CASES[name]
    x, y = torch.randn(COUNT, FEATURES, generator=generator(2)), case.targets(generator())
    classes = 4 if name == "ordinal" else None
    if case.outside:
        y[0] = torch.tensor(case.outside[0])
    data = confide.PrivateData(x, y, schema=Schema(classes=classes, records=COUNT), ledger=Ledger(), seed=1)
    plan = confide.plan(noise_multiplier=1.0, delta=1e-3, records=COUNT, batch=8, steps=6)
    module = networks.mlp(FEATURES, case.likelihood.outputs, hidden=(4,), generator=generator())
    run = confide.fit(methods.get(method)(), module, data, plan, likelihood=case.likelihood, seed=0)
    run.posterior.save(tmp_path / "p")
    loaded = load_posterior(tmp_path / "p")
    assert loaded.likelihood == case.likelihood
    predictive, again = run.posterior.predict(x[1:]), loaded.predict(x[1:])
    assert type(predictive) is type(again)
    assert torch.equal(predictive.total, again.total)
    scores = evaluate(predictive, y[1:])
    assert scores
    assert all(math.isfinite(value) for value in scores.values()), scores
    summary = run.posterior.summary(x[1:])
    assert torch.allclose(summary.total.double(), predictive.total.double(), rtol=1e-3, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_a_report_measures_it(name: str, tmp_path: Any) -> None:
    """Without noise and with a made-up statement, so that nothing but the page takes time."""
    case = CASES[name]
    x, y = torch.randn(COUNT, FEATURES, generator=generator(2)), case.targets(generator())
    schema = Schema(classes=4 if name == "ordinal" else None, records=COUNT)
    plan = confide.plan(private=False, delta=1e-3, records=COUNT, batch=8, steps=4)
    module = networks.mlp(FEATURES, case.likelihood.outputs, hidden=(4,), generator=generator())
    data = confide.PrivateData(x, y, schema=schema)
    run = confide.fit(methods.get("sgld")(), module, data, plan, likelihood=case.likelihood, seed=0)
    run.save(tmp_path / "run", test=(x, y))
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"On {COUNT} test inputs" in page
    assert load_run(tmp_path / "run").metrics == pytest.approx(evaluate(run.posterior.predict(x), y), nan_ok=True)


def single(case: Case, inputs: int = 7) -> tuple[Any, Tensor]:
    """One draw, so that the mixture is the law itself."""
    output = outputs(case, 1, inputs)
    return case.likelihood.predictive(output, torch.ones(1, dtype=torch.float64)), output[0]


def scipy_law(name: str, output: Tensor) -> Any:
    stats = pytest.importorskip("scipy.stats")
    o = output.numpy()
    if name == "poisson":
        return stats.poisson(2 * math.e ** o[:, 0])
    if name == "negative-binomial":
        mean, size = 2 * math.e ** o[:, 0], 0.05 + torch.nn.functional.softplus(output[:, 1]).numpy()
        return stats.nbinom(size, size / (size + mean))
    if name == "student-t":
        return stats.t(5.0, o[:, 0], 0.3)
    if name == "laplace":
        return stats.laplace(o[:, 0], 0.3)
    if name == "exponential":
        return stats.expon(scale=3 * math.e ** o[:, 0])
    return stats.weibull_min(Weibull().shape(output[:, 1]).numpy(), scale=3 * math.e ** o[:, 0])


LAWS = ["poisson", "negative-binomial", "student-t", "laplace", "exponential", "weibull"]


@pytest.mark.parametrize("name", LAWS)
class TestLaws:
    def test_moments_distribution_and_quantiles_are_scipys(self, name: str) -> None:
        predictive, output = single(CASES[name])
        law = scipy_law(name, output)
        assert torch.allclose(predictive.mean, torch.as_tensor(law.mean()), rtol=1e-9)
        assert torch.allclose(predictive.aleatoric, torch.as_tensor(law.var()), rtol=1e-9)
        for value in (-1.0, 0.0, 0.7, 1.0, 5.0):
            at = torch.full((7,), value, dtype=torch.float64)
            assert torch.allclose(predictive.cumulative(at), torch.as_tensor(law.cdf(value)), atol=1e-9), value
        for level in (0.05, 0.5, 0.95):
            assert torch.allclose(predictive.quantile(level), torch.as_tensor(law.ppf(level)), rtol=1e-6), level

    def test_a_mixture_is_the_mean_of_its_laws(self, name: str) -> None:
        case = CASES[name]
        output = outputs(case, 3, 7)
        weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
        predictive = case.likelihood.predictive(output, weights)
        at = torch.full((7,), 2.0, dtype=torch.float64)
        expected = sum(w * torch.as_tensor(scipy_law(name, o).cdf(2.0)) for w, o in zip(weights, output, strict=True))
        assert torch.allclose(predictive.cumulative(at), torch.as_tensor(expected), atol=1e-9)
        low, high = predictive.interval(0.9).unbind(-1)
        slack = 1e-6
        assert bool((predictive.cumulative(high) >= 0.95 - slack).all())
        assert bool((low <= high).all())

    def test_intervals_hold_as_often_as_they_say(self, name: str) -> None:
        np = pytest.importorskip("numpy")
        case = CASES[name]
        output = torch.zeros(1, 4000, case.likelihood.outputs, dtype=torch.float64)
        predictive = case.likelihood.predictive(output, torch.ones(1, dtype=torch.float64))
        y = torch.as_tensor(scipy_law(name, output[0]).rvs(random_state=np.random.default_rng(1))).double()
        share = coverage(predictive, y, 0.9)
        discrete = name in ("poisson", "negative-binomial")
        assert 0.88 < share < (0.99 if discrete else 0.92)


@pytest.mark.parametrize("name", LAWS[:4])  # times are scored by their log-likelihood
def test_the_ranked_probability_score_is_the_mean_distance(name: str) -> None:
    """CRPS = E|X - y| - E|X - X'| / 2, of many draws of scipy's law."""
    np = pytest.importorskip("numpy")
    predictive, output = single(CASES[name])
    law = scipy_law(name, output)
    random = np.random.default_rng(0)
    one, other = (law.rvs(size=(200_000, 7), random_state=random) for _ in range(2))
    y = np.array([0.0, 1.0, 2.0, 3.0, 1.0, 0.0, 6.0])
    expected = abs(one - y).mean(0) - abs(one - other).mean(0) / 2
    assert crps(predictive, torch.as_tensor(y)) == pytest.approx(expected.mean(), rel=0.01)


class TestScores:
    def test_of_laplace_in_closed_form(self) -> None:
        predictive = Laplace(1.0).predictive(torch.zeros(1, 4, 1).double(), torch.ones(1).double())
        y = torch.tensor([0.0, 0.5, -2.0, 30.0]).double()
        expected = (y.abs() + torch.exp(-y.abs()) - 0.75).mean()
        assert crps(predictive, y) == pytest.approx(float(expected), rel=1e-6)

    def test_the_log_score_is_best_at_the_truth(self) -> None:
        y = torch.poisson(torch.full((4000,), 2.0), generator=generator()).double()
        at = [
            log_likelihood(
                Poisson().predictive(torch.full((1, 4000, 1), math.log(rate)).double(), torch.ones(1).double()), y
            )
            for rate in (1.5, 2.0, 2.5)
        ]
        assert at[1] > max(at[0], at[2])

    def test_of_an_order_count_near_misses_less(self) -> None:
        said = torch.tensor([[[0.8, 0.1, 0.1]]]).double()
        one = torch.ones(1).double()
        from confide.models.ordinal import OrderedPredictive
        from confide.models.predictive import ClassPredictive

        near, far = (evaluate(OrderedPredictive(said, one), torch.tensor([label])) for label in (1, 2))
        assert near["ranked_probability"] == pytest.approx(0.64 + 0.01)
        assert far["ranked_probability"] == pytest.approx(0.64 + 0.81)
        assert (near["class_distance"], far["class_distance"]) == (1.0, 2.0)
        assert "ranked_probability" not in evaluate(ClassPredictive(said, one), torch.tensor([1]))

    def test_of_labels(self) -> None:
        logits = torch.tensor([[[2.0, -2.0], [0.5, 3.0]]]).double()
        predictive = MultiLabel(2).predictive(logits, torch.ones(1).double())
        y = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        found = evaluate(predictive, y)
        p = logits[0].sigmoid()
        assert found["label_accuracy"] == 0.75
        assert found["exact_match"] == 0.5
        assert found["brier"] == pytest.approx(float((p - y).square().mean()))
        assert found["nll"] == pytest.approx(float(torch.nn.functional.binary_cross_entropy(p, y.double())))

    def test_concordance_is_that_of_pairs(self) -> None:
        from confide.evaluate.laws import concordance

        time, seen = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
        # known orders: 1 before 2, 3, 4; 3 before 4. Of these (1, 4) and (3, 4) are predicted the wrong way round.
        assert concordance(torch.tensor([2.0, 3.0, 2.5, 1.0]), time, seen) == 0.5
        assert concordance(torch.tensor([1.0, 1.0, 1.0, 1.0]), time, seen) == 0.5
        assert math.isnan(concordance(time, time, torch.zeros(4)))

    def test_several_numbers_are_scored_together(self) -> None:
        predictive = MultiGaussian(2, 0.5).predictive(torch.zeros(1, 3, 2).double(), torch.ones(1).double())
        y = torch.tensor([[0.0, 1.0], [0.5, 0.0], [0.1, 0.2]]).double()
        found = evaluate(predictive, y)
        expected = distributions.Normal(torch.tensor(0.0).double(), 0.5).log_prob(y).sum(1).mean()
        assert found["log_likelihood"] == pytest.approx(float(expected))
        assert found["rmse"] == pytest.approx(float(y.square().mean().sqrt()))

    @pytest.mark.parametrize("name", ["multi-label", "multi-gaussian", "weibull"])
    def test_targets_of_another_shape_are_refused(self, name: str) -> None:
        predictive, _ = single(CASES[name])
        with pytest.raises(confide.errors.Refusal, match="y of shape"):
            evaluate(predictive, torch.zeros(7))


def test_equal_outputs_say_equal_classes() -> None:
    assert torch.allclose(Ordinal(5).predictive(torch.zeros(1, 1, 4), torch.ones(1)).probabilities, torch.tensor(0.2))


def test_a_negative_binomial_law_that_does_not_spread_is_poissons() -> None:
    raw = torch.tensor([[[0.3, 1e9]]]).double()
    one = torch.ones(1).double()
    at = torch.tensor([2.0]).double()
    spread, plain = (law.predictive(raw[..., : law.outputs], one) for law in (NegativeBinomial(), Poisson()))
    assert torch.allclose(spread.log_density(at), plain.log_density(at), atol=1e-6)
    assert torch.allclose(spread.cumulative(at), plain.cumulative(at), atol=1e-6)
