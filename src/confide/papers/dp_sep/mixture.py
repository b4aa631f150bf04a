"""The mixture of four Gaussians of Vinaroz and Park (2022): fits, a reference posterior and distances to it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from confide.data.schema import Schema
from confide.expectation.mixture import MixtureOfGaussians
from confide.papers.base import Context
from confide.posteriors.natural import NaturalGaussian
from confide.sources.private_data import PrivateData

COMPONENTS = FEATURES = 4
SCALE, DELTA = 0.5, 1e-5
BATCH_SHARE, STEPS, CLIP = 0.1, 200, 2.0


@dataclass(frozen=True)
class Clusters:
    """Made-up records with the component that each was drawn from."""

    x: Tensor
    labels: Tensor
    means: Tensor

    def module(self, seed: int | None) -> MixtureOfGaussians:
        """The model, started at a draw from its prior; None: at the true means, for the reference alone."""
        generator = torch.Generator().manual_seed(seed or 0)
        module = MixtureOfGaussians(COMPONENTS, FEATURES, scale=SCALE, spread=1.0, generator=generator)
        if seed is None:
            module.means.data.copy_(self.means)
        return module


def made_up(records: int, seed: int = 0) -> Clusters:
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(COMPONENTS, FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, COMPONENTS, (records,), generator=generator)
    noise = torch.randn(records, FEATURES, generator=generator, dtype=torch.float64)
    return Clusters(means[labels] + SCALE * noise, labels, means)


@dataclass(frozen=True)
class Law:
    """Mean (components, features) and covariance (components, features, features) of the component means."""

    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, posterior: NaturalGaussian) -> Law:
        whole = posterior.covariance().reshape(COMPONENTS, FEATURES, COMPONENTS, FEATURES)
        blocks = torch.stack([whole[j, :, j] for j in range(COMPONENTS)])
        return cls(posterior.mean().reshape(COMPONENTS, FEATURES), blocks)

    def ordered_like(self, other: Law) -> Law:
        """The same law with its components in the order that is nearest to the other's: the order has no meaning."""
        orders = [list(order) for order in itertools.permutations(range(COMPONENTS))]
        best = min(orders, key=lambda order: float((self.mean[order] - other.mean).norm()))
        return Law(self.mean[best], self.covariance[best])

    def distances(self, other: Law) -> tuple[float, float]:
        """F-norms of the differences of means and of covariances."""
        own = self.ordered_like(other)
        return float((own.mean - other.mean).norm()), float((own.covariance - other.covariance).norm())


NUTS_DRAWS = 8000


def reference(clusters: Clusters, context: Context) -> tuple[Law, str]:
    """The exact posterior by the No-U-Turn sampler, and a sentence on where it comes from."""
    if context.quick:
        return _by_ep(clusters), "The reference is EP started at the true means; the full run samples it with NUTS."
    try:
        import numpyro  # noqa: F401
    except ImportError:
        note = "numpyro is not installed, so the reference is EP started at the true means; "
        return _by_ep(clusters), note + "pip install 'confide[papers]' for NUTS."
    return _by_nuts(clusters), f"The reference is {NUTS_DRAWS} draws of NUTS, started at the true means."


def _by_ep(clusters: Clusters) -> Law:
    from confide.methods._baselines import expectation_propagation

    zeros = torch.zeros(len(clusters.x))
    return Law.of(expectation_propagation(clusters.module(None), clusters.x, zeros, covariance="full", passes=40))


def _by_nuts(clusters: Clusters, draws: int = NUTS_DRAWS) -> Law:
    import jax
    import numpyro
    from jax import numpy as jnp
    from numpyro import distributions, infer

    x = jnp.asarray(clusters.x.numpy())

    def model() -> None:
        means = numpyro.sample("means", distributions.Normal(0, 1).expand([COMPONENTS, FEATURES]).to_event(2))
        gaps = ((x[:, None, :] - means) ** 2).sum(-1) / (2 * SCALE**2)
        numpyro.factor("records", jax.scipy.special.logsumexp(-gaps, axis=1).sum())

    start = infer.init_to_value(values={"means": jnp.asarray(clusters.means.numpy())})
    chain = infer.MCMC(infer.NUTS(model, init_strategy=start), num_warmup=500, num_samples=draws, progress_bar=False)
    chain.run(jax.random.PRNGKey(0))
    found = torch.as_tensor(jax.device_get(chain.get_samples()["means"]).copy(), dtype=torch.float64)
    mean = found.mean(0)
    gap = found - mean
    return Law(mean, torch.einsum("sjd,sje->jde", gap, gap) / (len(found) - 1))


def ep(clusters: Clusters, seed: int, passes: int) -> Any:
    """EP from the public start. Not private."""
    from confide.methods._baselines import expectation_propagation

    zeros = torch.zeros(len(clusters.x))
    module = clusters.module(seed)
    return expectation_propagation(module, clusters.x, zeros, covariance="full", passes=passes, damping=0.5)


def fitted(method: Any, clusters: Clusters, context: Context, seed: int, epsilon: float | None, clip: float) -> Any:
    """A run from the public start; epsilon None: without noise, and full batches."""
    from confide.mechanism.plan import plan
    from confide.running.fit import fit

    records = len(clusters.x)
    steps = STEPS // 2 if context.quick else STEPS
    if epsilon is None:
        made = plan(delta=DELTA, records=records, steps=steps, sampling="full-batch", private=False, clip=clip)
    else:
        batch = round(BATCH_SHARE * records)
        made = plan(delta=DELTA, records=records, batch=batch, steps=steps, epsilon=epsilon, clip=clip)
    schema = Schema(records=records)
    data = PrivateData(clusters.x, torch.zeros(records), schema=schema, name="mixture", seed=context.noise_seed)
    return fit(method, clusters.module(seed), data, made, seed=seed)


def ring(mean: Tensor, covariance: Tensor, level: float = 0.98) -> Tensor:
    """The ellipse that holds `level` of a Gaussian in two dimensions, as 100 points."""
    angle = torch.linspace(0, 2 * math.pi, 100, dtype=torch.float64)
    circle = torch.stack([angle.cos(), angle.sin()], 1)
    root = torch.linalg.cholesky(covariance)
    points: Tensor = mean + math.sqrt(-2 * math.log(1 - level)) * circle @ root.mT
    return points
