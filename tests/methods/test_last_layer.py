"""A Bayesian last layer: the exact posterior of a linear model, the moments that it asks for, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import confide
from confide.data.schema import Schema
from confide.errors import Refusal
from confide.mechanism.clipping import clipped_sum
from confide.methods._last_layer import feature_query, head_of, moments_of
from confide.methods.last_layer import LastLayer
from confide.models.networks import LastLayerNetwork, last_layer
from confide.running.fit import make_problem
from confide.sources.private_data import PrivateData
from confide.sources.queries import Release

RECORDS, CLASSES = 2000, 3


class Backbone(nn.Module):
    """Features that a library would give: an object with a pooled output."""

    class Output:
        def __init__(self, found: Tensor) -> None:
            self.pooler_output = found

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Backbone.Output:
        return self.Output(torch.tanh(self.drop(self.layer(x))))


@pytest.fixture
def backbone() -> Backbone:
    torch.manual_seed(0)
    return Backbone()


def records(seed: int = 0, count: int = RECORDS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return x, (x[:, :CLASSES] + 0.3 * torch.randn(count, CLASSES, generator=generator)).argmax(1)


def plan(**options: Any) -> confide.Plan:
    settings = {"delta": 1e-5, "records": RECORDS, "sampling": "full-batch", "steps": 12}
    return confide.plan(**{**settings, **options})


def fitted(module: nn.Module, **options: Any) -> Any:
    x, y = records()
    data = PrivateData(x, y, schema=Schema(classes=CLASSES, records=RECORDS), seed=3)
    return confide.fit(LastLayer(), module, data, plan(**options), seed=1)


def accuracy(run: Any) -> float:
    x, y = records(1)
    return float((run.posterior.predict(x).probabilities.argmax(1) == y).double().mean())


class TestFit:
    def test_classes_are_learnt_in_a_dozen_releases(self, backbone: Backbone) -> None:
        run = fitted(last_layer(backbone, CLASSES, 8), epsilon=1.0)
        assert accuracy(run) > 0.8
        assert run.posterior.facts["releases_of_features"] == 1

    def test_without_noise_it_comes_close_to_the_best_of_all_layers(self, backbone: Backbone) -> None:
        module = last_layer(backbone, CLASSES, 8).eval()
        found = accuracy(fitted(module, private=False))
        x, y = records()
        optimiser = torch.optim.LBFGS(module.head.parameters(), max_iter=200)

        def closure() -> Tensor:
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(module(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimiser.step(closure)  # type: ignore[no-untyped-call]
        new, labels = records(1)
        best = float((module(new).argmax(1) == labels).double().mean())
        assert found > best - 0.02

    def test_only_the_head_is_drawn_and_kept(self, backbone: Backbone) -> None:
        run = fitted(last_layer(backbone, CLASSES, 8), epsilon=1.0)
        assert run.posterior.draws.shape == (100, CLASSES * 9)

    def test_hidden_layers_of_a_sequence_stay_where_they_start(self) -> None:
        module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, CLASSES))
        run = fitted(module, epsilon=3.0)
        draws = run.posterior.draws
        assert torch.equal(
            draws[:, :28], torch.cat([value.reshape(-1) for value in module[0].parameters()]).expand(100, -1)
        )
        assert bool((draws[:, 28:].std(0) > 0).all())
        assert accuracy(run) > 0.5

    def test_a_linear_truth_has_its_exact_posterior(self) -> None:
        """Without noise, and with a prior that was given, the draws are those of Bayesian linear regression."""
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(RECORDS, 3, generator=generator, dtype=torch.float64) * 2 - 1
        y = x @ torch.tensor([0.5, -0.3, 0.2], dtype=torch.float64) + 0.2 * torch.randn(RECORDS, generator=generator)
        data = PrivateData(x, y, schema=Schema(records=RECORDS), seed=3)
        method = LastLayer(confide.priors.GaussianPrior(1.0))
        likelihood = confide.likelihoods.Gaussian(0.2)
        module = confide.networks.linear(3).double()
        run: Any = confide.fit(method, module, data, plan(private=False, steps=30), likelihood=likelihood, seed=1)
        inputs = torch.cat([x, torch.ones(RECORDS, 1, dtype=torch.float64)], 1)
        covariance = torch.linalg.inv(inputs.mT @ inputs / 0.04 + torch.eye(4, dtype=torch.float64))
        mean = covariance @ inputs.mT @ y / 0.04
        assert torch.allclose(run.posterior.mean(), mean, atol=0.005)
        widths = run.posterior.covariance().diagonal().sqrt() / covariance.diagonal().sqrt()
        assert bool(((widths > 0.75) & (widths < 1.3)).all())  # of 100 draws


def rate_of_a_coin(share: float) -> float:
    """What is said of class 1 where nothing but its share of the records is to be learnt, without noise."""
    generator = torch.Generator().manual_seed(2)
    x = 0.01 * torch.randn(RECORDS, 2, generator=generator)
    y = (torch.arange(RECORDS) < share * RECORDS).long()
    data = PrivateData(x, y, schema=Schema(classes=2, records=RECORDS), seed=3)
    run: Any = confide.fit(LastLayer(), confide.networks.linear(2), data, plan(private=False, steps=40), seed=1)
    return float(run.posterior.predict(x[:1]).probabilities[0, 1])


class TestClippedResiduals:
    """They are cut most where a class came that was not expected, which must not make the others sure."""

    @pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
    def test_a_rate_is_learnt_as_it_is(self, share: float) -> None:
        assert abs(rate_of_a_coin(share) - share) < 0.02

    def test_scores_as_they_come_are_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "confide.methods.last_layer.expected_scores", lambda problem, known, mean: torch.zeros_like(mean)
        )
        assert rate_of_a_coin(0.7) > 0.75


class TestQueries:
    def test_the_gradient_of_the_features_is_their_second_moment(self, backbone: Backbone) -> None:
        module = last_layer(backbone, CLASSES, 8)
        x, y = records(count=50)
        problem = make_problem(LastLayer(), module, Schema(classes=CLASSES, records=50), plan(records=50, epsilon=1.0))
        query = feature_query(problem)
        total = torch.zeros(query.size)
        clipped_sum(query.module, query.loss, x, y, clip=10.0, out=total)
        release = Release(total, 0.0, problem.plan.mechanism.event(), 50.0)
        found, _ = moments_of(head_of(problem), problem, release)
        features = torch.cat([module.eval().features(x), torch.ones(50, 1)], 1).double()
        assert torch.allclose(found, features.mT @ features, rtol=1e-4, atol=1e-3)

    def test_no_answer_of_moments_is_clipped(self, backbone: Backbone) -> None:
        """The unit is such that every record fills the clip and none is above it."""
        module = last_layer(backbone, CLASSES, 8)
        x, y = records(count=50)
        problem = make_problem(LastLayer(), module, Schema(classes=CLASSES, records=50), plan(records=50, epsilon=1.0))
        query = feature_query(problem)
        norms = clipped_sum(query.module, query.loss, x, y, clip=1.0, out=torch.zeros(query.size))
        assert torch.allclose(norms, torch.full_like(norms, problem.plan.mechanism.clip), rtol=1e-4)


class TestNetwork:
    def test_dropout_of_the_backbone_stays_off(self, backbone: Backbone) -> None:
        module = last_layer(backbone, CLASSES, 8).train()
        x, _ = records(count=4)
        assert torch.equal(module.features(x), module.features(x))

    def test_the_backbone_itself_stays_as_it_was(self, backbone: Backbone) -> None:
        last_layer(backbone, CLASSES, 8)
        assert backbone.training
        assert all(value.requires_grad for value in backbone.parameters())

    def test_the_width_is_found_or_asked_for(self, backbone: Backbone) -> None:
        assert last_layer(backbone, CLASSES).head.in_features == 8
        with pytest.raises(Refusal, match="features=None"):
            last_layer(nn.ReLU(), CLASSES)

    @pytest.mark.parametrize("shape", [(4, 8), (4, 5, 8), (4, 8, 3, 3)])
    def test_features_are_one_vector_per_record(self, shape: tuple[int, ...]) -> None:
        module = LastLayerNetwork(nn.Identity(), 8, 2)
        assert module(torch.randn(shape)).shape == (4, 2)


class TestRefusals:
    def test_a_network_without_a_last_layer_of_its_own(self) -> None:
        with pytest.raises(Refusal, match=r"one nn\.Linear is all that is trainable"):
            fitted(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, CLASSES), nn.Tanh()), epsilon=1.0)

    def test_one_step(self, backbone: Backbone) -> None:
        with pytest.raises(Refusal, match="steps=1"):
            fitted(last_layer(backbone, CLASSES, 8), epsilon=1.0, steps=1)

    def test_a_likelihood_without_a_curvature_that_is_known(self, backbone: Backbone) -> None:
        x, _ = records()
        data = PrivateData(x, x[:, 0].abs().round(), schema=Schema(records=RECORDS), seed=3)
        module = last_layer(backbone, 1, 8)
        with pytest.raises(Refusal, match="likelihood='poisson'"):
            confide.fit(LastLayer(), module, data, plan(epsilon=1.0), likelihood=confide.likelihoods.Poisson())
