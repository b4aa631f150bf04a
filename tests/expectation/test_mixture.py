"""The mixture of Gaussians: its factors against sampling, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from confide.expectation.mixture import MixtureOfGaussians, MixtureSites, log_joint
from confide.expectation.natural import COVARIANCES, Covariance


def two_clusters() -> MixtureOfGaussians:
    covariances = torch.tensor([[[0.5, 0.2], [0.2, 0.4]], [[0.3, 0.0], [0.0, 0.6]]], dtype=torch.float64)
    return MixtureOfGaussians(2, 2, scale=covariances, weights=torch.tensor([0.3, 0.7]), spread=1.5)


def tilted_moments(module: MixtureOfGaussians, cavity_mean: Tensor, cavity: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Means and covariances of the component means under cavity * p(x | means), by weighted draws."""
    noise = torch.randn(400_000, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = cavity_mean + (torch.linalg.cholesky(cavity) @ noise[..., None])[..., 0]
    scores = log_joint(x[None], draws.reshape(-1, 2), module.covariances.repeat(len(draws), 1, 1), torch.ones(1))
    weights = (scores.reshape(-1, 2) + module.weights.log()).logsumexp(1).softmax(0)
    mean = torch.einsum("s,sjd->jd", weights, draws)
    gap = draws - mean
    return mean, torch.einsum("s,sjd,sje->jde", weights, gap, gap)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_factors_match_the_tilted_moments(covariance: Covariance) -> None:
    module = two_clusters()
    sites = MixtureSites.of(module, covariance)
    mean = torch.tensor([[0.5, -0.3], [-0.6, 0.8]], dtype=torch.float64)
    spread = torch.tensor([[[0.8, 0.3], [0.3, 0.5]], [[0.6, -0.1], [-0.1, 0.9]]], dtype=torch.float64)
    cavity = sites.family.from_moments(mean, sites.family.restricted(spread))
    dense = sites.family.dense(sites.family.moments(cavity)[1])
    x = torch.tensor([0.4, 0.1], dtype=torch.float64)
    found_mean, found = sites.family.moments(cavity + sites.factors(cavity, x[None], torch.zeros(1))[0])
    exact_mean, exact = tilted_moments(module, mean, dense, x)
    assert torch.allclose(found_mean, exact_mean, atol=0.01)
    assert torch.allclose(found, sites.family.restricted(exact), atol=0.015)


def test_dropping_the_spread_between_hypotheses_is_caught() -> None:
    """Without r (1 - r) d d' a record between two components would make both means more certain than they are."""
    module = two_clusters()
    sites = MixtureSites.of(module)
    far = torch.tensor([[3.0, 0.0]], dtype=torch.float64)
    cavity = sites.family.from_moments(torch.zeros(2, 2).double(), torch.eye(2).double().expand(2, 2, 2))
    _, precision = sites.family.unpack(sites.factors(cavity, far, torch.zeros(1))[0])
    assert float(torch.linalg.eigvalsh(precision).min()) < 0


def test_factors_of_many_records_are_those_of_each() -> None:
    module = two_clusters()
    sites = MixtureSites.of(module)
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = sites.factors(sites.prior, x, torch.zeros(5))
    apart = torch.cat([sites.factors(sites.prior, row[None], torch.zeros(1)) for row in x])
    assert torch.allclose(together, apart)
    own = sites.factors(sites.prior.expand(5, -1), x, torch.zeros(5))
    assert torch.allclose(together, own)


def test_forward_gives_responsibilities() -> None:
    module = two_clusters()
    shares = module(module.means.detach()).softmax(-1)
    assert torch.allclose(shares.sum(-1), torch.ones(2).double())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"components": 0}, r"components=0"),
        ({"spread": -1.0}, r"spread=-1.0: must be a finite number > 0"),
        ({"weights": torch.tensor([1.0, -1.0])}, r"weights=.*one number > 0"),
        ({"scale": torch.zeros(2, 2, 2)}, r"scale: covariances must be finite and positive definite"),
        ({"scale": torch.ones(3)}, r"scale=\(3,\)"),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    settings = {"components": 2, "features": 2, **options}
    with pytest.raises(ValueError, match=message):
        MixtureOfGaussians(**settings)  # type: ignore[arg-type]
