"""Linear regression with known noise and a Gaussian prior: the posterior is Gaussian and known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import confide
from confide.data.schema import Schema
from confide.models.likelihoods import Gaussian
from confide.sources.private_data import PrivateData

NOISE, PRIOR, RECORDS, FEATURES = 0.5, 1.0, 100, 8


@dataclass(frozen=True)
class Conjugate:
    """Records and their exact posterior."""

    x: Tensor
    y: Tensor

    @property
    def precision(self) -> Tensor:
        return self.x.T @ self.x / NOISE**2 + torch.eye(FEATURES, dtype=torch.float64) / PRIOR**2

    @property
    def mean(self) -> Tensor:
        return torch.linalg.solve(self.precision, self.x.T @ self.y / NOISE**2)

    def chain(self, method: Any, steps: int, noise_multiplier: float) -> confide.Run:
        module = nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)
        data = PrivateData(self.x, self.y, schema=Schema(records=RECORDS), seed=11)
        plan = confide.plan(
            delta=1e-5,
            records=RECORDS,
            steps=steps,
            sampling="full-batch",
            noise_multiplier=noise_multiplier,
            clip=1e3,
        )
        return confide.fit(method, module, data, plan, likelihood=Gaussian(NOISE), seed=4)


def conjugate_model() -> Conjugate:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(RECORDS, FEATURES, generator=generator, dtype=torch.float64)
    x = torch.linalg.qr(x).Q * RECORDS**0.5  # equal curvature in all directions: the chain mixes as fast as it can
    truth = torch.randn(FEATURES, generator=generator, dtype=torch.float64)
    return Conjugate(x, x @ truth + NOISE * torch.randn(RECORDS, generator=generator, dtype=torch.float64))


def deviations(conjugate: Conjugate, run: confide.Run) -> tuple[float, float]:
    """How far the mean is off, in posterior standard deviations, and the ratio of variances, over all directions."""
    root = torch.linalg.cholesky(conjugate.precision)
    posterior = run.posterior
    whitened = root.T @ (posterior.mean() - conjugate.mean)
    ratio = torch.trace(root.T @ posterior.covariance() @ root) / FEATURES  # type: ignore[attr-defined]
    return whitened.abs().max().item(), ratio.item()
