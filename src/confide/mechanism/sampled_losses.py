"""Convex losses of linear models, for draws from their tempered posteriors: logistic, softmax and squared.

Of every loss three things are known before a record is read: that it is convex, by how much one record's may vary over
the ball |theta| <= D (its width, which is what a draw costs), and how curved it can be. Rows x are features with a 1
appended, scaled to a norm of at most R.

    logistic   log(1 + exp(-y <x, theta>)), y = +-1. The product lies within +-R D, and a softplus falls by u from -u to
               u: W = R D.
    softmax    log sum_c exp(<x, theta_c>) - <x, theta_y>, theta all of the rows theta_c. Since |theta_c - theta_y| is
               at most sqrt 2 |theta|, all gaps <x, theta_c - theta_y> lie within +-a, a = sqrt 2 R D, and the loss is
               log(1 + sum of exp of K - 1 gaps): W = g(a) - g(-a) with g(u) = log(1 + (K - 1) e^u), at most
               a + log(K - 1). Its Hessian is (diag p - p p') x x', at most half of x x' for every class.
    squared    (y - <x, theta>)^2 / (2 s^2) with y cut to +-B: W = (B + R D)^2 / (2 s^2), for it is never negative.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

SampledModel: TypeAlias = Literal["logistic", "softmax", "linear"]
SAMPLED_MODELS: tuple[SampledModel, ...] = get_args(SampledModel)
_WORTH_SPARSE = 100_000
"""Numbers from which on sparse products are worth their overhead."""


def loss_width(model: SampledModel, reach: float, classes: int, noise_scale: float, target_bound: float) -> float:
    """W: by how much one record's loss can vary where products of a row and the parameters reach R D."""
    if model == "logistic":
        return reach
    if model == "softmax":
        gap = math.sqrt(2) * reach
        return _soft(gap, classes) - _soft(-gap, classes)
    return (target_bound + reach) ** 2 / (2 * noise_scale**2)


def _soft(gap: float, classes: int) -> float:
    """log(1 + (classes - 1) e^gap), without overflow."""
    shifted = gap + math.log(classes - 1)
    return max(shifted, 0.0) + math.log1p(math.exp(-abs(shifted)))


class LogisticLosses:
    """theta is one vector, the intercept last."""

    def __init__(self, rows: Tensor, y: Tensor) -> None:
        signs = torch.where(y.reshape(-1, 1) > 0, 1.0, -1.0)  # whatever a label is, it does not lengthen a row
        self.rows = rows * signs
        self.size = rows.shape[1]
        self._products = Products(self.rows)

    def curvatures(self) -> tuple[float, float]:
        """Bounds of the trace and of the largest eigenvalue of the Hessian of all losses together."""
        found = torch.linalg.eigvalsh(self.rows.T @ self.rows) / 4
        return found.sum().item(), max(0.0, found[-1].item())

    def total(self, theta: Tensor) -> Tensor:
        """The sum of all losses, for one vector or several (draws, size)."""
        return F.softplus(-self._products.with_each(theta)).sum(-1)

    def tangent(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Height and slope of the sum."""
        margins = -self._products.with_each(theta)
        return F.softplus(margins).sum(), -self._products.weighted(margins.sigmoid())


class SoftmaxLosses:
    """theta is (classes, features + 1) in one vector, every class with its intercept last."""

    def __init__(self, rows: Tensor, y: Tensor, classes: int) -> None:
        self.rows, self.classes = rows, classes
        self.size = classes * rows.shape[1]
        labels = torch.nan_to_num(y.reshape(-1).double(), nan=0.0).clamp(0, classes - 1).long()
        self._chosen = F.one_hot(labels, classes).to(torch.float64)

    def curvatures(self) -> tuple[float, float]:
        found = torch.linalg.eigvalsh(self.rows.T @ self.rows)
        return (1 - 1 / self.classes) * found.sum().item(), max(0.0, found[-1].item()) / 2

    def _scores(self, theta: Tensor) -> Tensor:
        parted = theta.reshape(*theta.shape[:-1], self.classes, -1)
        return self.rows @ parted.mT

    def total(self, theta: Tensor) -> Tensor:
        scores = self._scores(theta)
        return (scores.logsumexp(-1) - (scores * self._chosen).sum(-1)).sum(-1)

    def tangent(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        scores = self._scores(theta)
        height = (scores.logsumexp(-1) - (scores * self._chosen).sum(-1)).sum()
        return height, ((scores.softmax(-1) - self._chosen).mT @ self.rows).reshape(-1)


class SquaredLosses:
    """theta is one vector, the intercept last."""

    def __init__(self, rows: Tensor, y: Tensor, noise_scale: float, target_bound: float) -> None:
        self.rows, self.size, self.precision = rows, rows.shape[1], noise_scale**-2
        self._targets = torch.nan_to_num(y.reshape(-1).double(), nan=0.0).clamp(-target_bound, target_bound)
        self._products = Products(rows)

    def curvatures(self) -> tuple[float, float]:
        found = torch.linalg.eigvalsh(self.rows.T @ self.rows) * self.precision
        return found.sum().item(), max(0.0, found[-1].item())

    def total(self, theta: Tensor) -> Tensor:
        return (self._products.with_each(theta) - self._targets).square().sum(-1) * self.precision / 2

    def tangent(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        gaps = self._products.with_each(theta) - self._targets
        return gaps.square().sum() * self.precision / 2, self._products.weighted(gaps) * self.precision


AnyLosses: TypeAlias = LogisticLosses | SoftmaxLosses | SquaredLosses


class Products:
    """Inner products of every row with parameter vectors; for rows that are mostly zeros, in sparse form."""

    def __init__(self, rows: Tensor) -> None:
        self.dense = rows
        self.sparse: Any = None
        if rows.numel() >= _WORTH_SPARSE and rows.count_nonzero().item() < 0.3 * rows.numel():
            from scipy.sparse import csr_array

            self.sparse = csr_array(rows.numpy())
            self.transposed = csr_array(self.sparse.T)

    def with_each(self, theta: Tensor) -> Tensor:
        """<row, theta>, of shape (rows) or (vectors, rows)."""
        if self.sparse is None:
            return theta @ self.dense.T
        return torch.from_numpy(self.sparse @ theta.numpy().T).T if theta.ndim > 1 else self._one(theta)

    def _one(self, theta: Tensor) -> Tensor:
        return torch.from_numpy(self.sparse @ theta.numpy())

    def weighted(self, weights: Tensor) -> Tensor:
        """The sum of the rows with these weights."""
        if self.sparse is None:
            return weights @ self.dense
        return torch.from_numpy(self.transposed @ weights.numpy())
