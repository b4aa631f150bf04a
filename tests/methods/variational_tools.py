"""A linear-Gaussian model whose mean-field optimum is known, and helpers that all variational methods need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import confide
from confide.data.schema import Schema
from confide.methods.base import Problem
from confide.models.likelihoods import Gaussian
from confide.running.fit import make_problem
from confide.sources.private_data import PrivateData
from confide.sources.queries import Release

NOISE, PRIOR = 0.5, 0.8


@dataclass(frozen=True)
class Linear:
    """Correlated features, so that the mean-field optimum is not the posterior: mean alike, deviations smaller."""

    x: Tensor
    y: Tensor

    @property
    def records(self) -> int:
        return len(self.x)

    @property
    def precision(self) -> Tensor:
        return self.x.T @ self.x / NOISE**2 + torch.eye(self.x.shape[1], dtype=torch.float64) / PRIOR**2

    @property
    def mean(self) -> Tensor:
        return torch.linalg.solve(self.precision, self.x.T @ self.y / NOISE**2)

    @property
    def mean_field_deviation(self) -> Tensor:
        return self.precision.diag().rsqrt()

    def fit(self, method: Any, steps: int, seed: int = 1, **options: Any) -> confide.Run:
        module = nn.Linear(self.x.shape[1], 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(module.weight)
        data = PrivateData(self.x, self.y, schema=Schema(records=self.records), seed=seed)
        settings = {"delta": 1e-5, "records": self.records, "steps": steps, "sampling": "full-batch", "clip": 1e3}
        settings |= options if "noise_multiplier" in options else {"private": False, **options}
        return confide.fit(method, module, data, confide.plan(**settings), likelihood=Gaussian(NOISE), seed=seed)


def linear_model(records: int = 12, features: int = 3, correlated: bool = True) -> Linear:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(records, features, generator=generator, dtype=torch.float64)
    x = torch.linalg.qr(x).Q * records**0.5
    if correlated:
        x = x @ (torch.eye(features, dtype=torch.float64) + 0.5)
    truth = torch.randn(features, generator=generator, dtype=torch.float64)
    return Linear(x, x @ truth + NOISE * torch.randn(records, generator=generator, dtype=torch.float64))


def problem_of(method: Any, module: nn.Module, classes: int | None = 3, **options: Any) -> Problem:
    """The public side of a fit."""
    settings = {"delta": 1e-5, "records": 40, "batch": 10, "steps": 20, "noise_multiplier": 1.0, **options}
    return make_problem(method, module, Schema(classes=classes, records=40), confide.plan(**settings), seed=2)


def silence(problem: Problem, noise: Tensor | None = None) -> Release:
    """The release of a batch without records."""
    mechanism = problem.plan.mechanism
    total = torch.zeros_like(problem.position) if noise is None else noise
    return Release(total, mechanism.noise_std, mechanism.event(), mechanism.expected_batch)
