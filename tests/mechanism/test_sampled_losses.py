"""Losses of linear models under posterior draws: how far one record reaches, and the law of a draw."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from confide.data.schema import Schema
from confide.mechanism.noise import NoiseStream
from confide.mechanism.posterior_sampling import PosteriorSampling, _LogTarget
from confide.mechanism.sampled_losses import SAMPLED_MODELS, SampledModel
from confide.running.posterior_sample import hybrid, one_posterior_sample
from confide.sources.private_data import PrivateData

MODELS: dict[str, dict[str, Any]] = {
    "logistic": {},
    "softmax": {"classes": 4},
    "linear": {"noise_scale": 0.7, "target_bound": 1.0},
}


def mechanism(model: str, **more: Any) -> PosteriorSampling:
    return PosteriorSampling(**{"epsilon": 2.0, "radius": 3.0, "model": model, **MODELS[model], **more})


def losses_over_the_ball(model: str, count: int = 20_000) -> Tensor:
    """Of one record at the edge of what is allowed, at parameters at the edge of the ball, the worst included."""
    chosen, generator = mechanism(model), torch.Generator().manual_seed(0)
    row = torch.tensor([[1e9, 1e9, -1e9]])
    target = _LogTarget(chosen, row, torch.tensor([1.0]))
    theta = torch.randn(count, target.size, generator=generator, dtype=torch.float64)
    ends = torch.cat([theta, _steepest(target), -_steepest(target)])
    ends = chosen.radius * ends / ends.norm(dim=1, keepdim=True)
    return target.losses.total(ends)


def _steepest(target: Any) -> Tensor:
    """Directions of the loss's slope at a few places: where it varies most."""
    places = torch.cat([torch.zeros(1, target.size), torch.eye(target.size), -torch.eye(target.size)]).double()
    return torch.stack([target.losses.tangent(place)[1] for place in places])


@pytest.mark.parametrize("model", SAMPLED_MODELS)
def test_no_record_varies_by_more_than_its_width(model: SampledModel) -> None:
    found = losses_over_the_ball(model)
    spread = float(found.max() - found.min())
    assert spread <= mechanism(model).width * (1 + 1e-12)
    assert spread > 0.55 * mechanism(model).width, "and the bound is not far from what a record can do"


def test_the_width_of_two_classes_would_not_do_for_four() -> None:
    """Planted: R D, as for logistic regression."""
    found = losses_over_the_ball("softmax")
    assert float(found.max() - found.min()) > 3.0 * 1.0


@pytest.mark.parametrize("model", SAMPLED_MODELS)
def test_slopes_and_curvatures(model: SampledModel) -> None:
    """Slopes are those of autograd, tangents lie below, and no Hessian is above its bounds."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(12, 2, generator=generator), torch.arange(12) % (4 if model == "softmax" else 2)
    target = _LogTarget(mechanism(model, feature_bound=2.0), x, y.float())
    trace, largest = target.losses.curvatures()
    for _ in range(5):
        place = torch.randn(target.size, generator=generator, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(target.losses.total(place), place)
        height, found = target.losses.tangent(place.detach())
        assert torch.allclose(found, slope)
        other = torch.randn(7, target.size, generator=generator, dtype=torch.float64)
        assert bool((target.losses.total(other) >= height + (other - place.detach()) @ found - 1e-9).all())
        hessian = torch.autograd.functional.hessian(target.losses.total, place.detach())
        values = torch.linalg.eigvalsh(hessian)
        assert values.max() <= largest * (1 + 1e-9)
        assert values.sum() <= trace * (1 + 1e-9)


def chain(chosen: PosteriorSampling, x: Tensor, y: Tensor, draws: int, every: int) -> Tensor:
    target, stream = _LogTarget(chosen, x, y), NoiseStream(5)
    theta, found = target.sample(stream), []
    for count in range(draws * every):
        theta = target.advance(theta, stream)
        if count % every == every - 1:
            found.append(theta)
    return torch.stack(found)


def test_a_linear_draw_has_the_law_of_the_tempered_posterior() -> None:
    """Far from the edge of the ball it is Gaussian, with known mean and covariance."""
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(40, 1, generator=generator) * 2 - 1
    y = 0.6 * x[:, 0] - 0.2 + 0.1 * torch.randn(40, generator=generator)
    chosen = PosteriorSampling(4.0, 6.0, 2.0, prior_scale=1.0, model="linear", noise_scale=0.5)
    rows = torch.cat([x, torch.ones(40, 1)], 1).double()
    precision = chosen.temper / 0.25 * rows.T @ rows + torch.eye(2)
    covariance = torch.linalg.inv(precision)
    mean = covariance @ (chosen.temper / 0.25 * rows.T @ y.double())
    found = chain(chosen, x, y, 400, 3)
    spread = covariance.diagonal().sqrt()
    assert bool(((found.mean(0) - mean).abs() < 0.25 * spread).all())
    assert torch.allclose(found.std(0), spread, rtol=0.15)
    untempered = torch.linalg.inv(rows.T @ rows / 0.25 + torch.eye(2)).diagonal().sqrt()
    assert bool((untempered < 0.6 * spread).all()), "a draw that forgot its temper would be seen"


def test_a_softmax_draw_has_the_law_of_the_tempered_posterior() -> None:
    """Against many weighted points of the prior on the ball."""
    generator = torch.Generator().manual_seed(3)
    y = torch.tensor([0, 0, 0, 0, 1, 1, 2] * 6)
    x = torch.zeros(len(y), 1)
    chosen = PosteriorSampling(20.0, 3.0, 1.0, prior_scale=1.0, model="softmax", classes=3, tolerance=1e-12)
    target = _LogTarget(chosen, x, y)
    points = torch.randn(200_000, 6, generator=generator, dtype=torch.float64)
    points = points[points.norm(dim=1) <= 3.0]
    weights = torch.cat([-target.energy(part) for part in points.split(20_000)]).softmax(0)
    gaps = points[:, 1] - points[:, 5]  # intercepts of the first and the last class
    mean = float((weights * gaps).sum())
    spread = math.sqrt(float((weights * (gaps - mean).square()).sum()))
    found = chain(chosen, x, y, 300, 3)
    measured = found[:, 1] - found[:, 5]
    assert abs(float(measured.mean()) - mean) < 0.25 * spread
    assert float(measured.std()) == pytest.approx(spread, rel=0.2)
    assert abs(mean) > spread, "the records have a say"


def blobs(count: int = 150) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    y = torch.randint(0, 3, (count,), generator=generator)
    centres = torch.tensor([[0.6, 0.0], [-0.3, 0.5], [-0.3, -0.5]])
    return centres[y] + 0.15 * torch.randn(count, 2, generator=generator), y


def test_three_classes_from_the_boundary_to_predictions() -> None:
    """Weights and intercepts stand where the network has them: mixed up, predictions would be at chance."""
    x, y = blobs()
    data = PrivateData(x, y, schema=Schema(150, 3), seed=1)
    chosen = PosteriorSampling(8.0, 6.0, 1.2, model="softmax", classes=3, tolerance=1e-7)
    sampled = one_posterior_sample(data, 2, chosen, delta=1e-2)
    found: Any = sampled.posterior.predict(x)
    assert float((found.labels == y).double().mean()) > 0.9
    assert sum(event.count for event in data.ledger.events("")) == 1


def test_numbers_and_a_hybrid() -> None:
    import confide
    from confide.methods.sgld import SGLD

    x, _ = blobs()
    y = 0.8 * x[:, 0] - 0.1
    schema = Schema(records=150, target_bounds=(-1, 1), target="y")
    chosen = PosteriorSampling(3.0, 2.0, 1.5, model="linear", noise_scale=1.0, tolerance=1e-9)
    plan = confide.plan(delta=1e-4, records=150, batch=100, steps=10, epsilon=5.0, spent=(chosen.event(),))
    data = PrivateData(x, y, schema=schema, seed=1)
    run = hybrid(data, 2, chosen, SGLD(), plan, seed=1)
    assert run.privacy.epsilon() <= 5.0
    assert run.posterior.predict(x).mean.shape == (150,)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("schema", "model", "complaint"),
    [
        (Schema(150, 3), {"model": "softmax", "classes": 4}, "needs a schema with 4 classes"),
        (Schema(150, 3), {"model": "linear"}, "needs numbers as targets"),
    ],
)
def test_another_kind_of_target_is_refused_before_the_charge(schema: Schema, model: Any, complaint: str) -> None:
    x, y = blobs()
    data = PrivateData(x, y, schema=schema, seed=1)
    with pytest.raises(ValueError, match=complaint):
        data.draw(PosteriorSampling(1.0, **model))
    assert not data.ledger.entries()


@pytest.mark.parametrize(
    "options", [{"model": "cubic"}, {"classes": 3}, {"model": "softmax", "classes": 1}, {"noise_scale": 0.0}]
)
def test_bad_settings(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{list(options)[-1]}="):
        PosteriorSampling(1.0, **options)


def test_hostile_targets_do_not_widen_a_loss() -> None:
    """A target of 1e30 in place of one in [-1, 1] would make a record as dear as all others together."""
    target = _LogTarget(mechanism("linear"), torch.ones(4, 1), torch.tensor([1e30, -math.inf, math.nan, 0.5]))
    theta = torch.zeros(target.size, dtype=torch.float64)
    assert float(target.losses.total(theta)) <= 4 * mechanism("linear").width
    labels = _LogTarget(mechanism("softmax"), torch.ones(4, 1), torch.tensor([9.0, -3.0, math.nan, 1.0]))
    assert torch.isfinite(labels.losses.total(torch.zeros(labels.size, dtype=torch.float64)))
