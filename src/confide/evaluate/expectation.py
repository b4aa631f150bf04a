"""Diagnostics of expectation propagation: what clipping and noise do to the natural parameters.

All of these speak of approximations and settings that are public. They need no record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.expectation.natural import GaussianFamily


def clipping_divergence(eta: Tensor, precision: Tensor, clip: float) -> float:
    """KL(q || p) for q = N(precision^-1 eta, precision^-1) and p with eta and precision each scaled to norm <= clip.

    With m = max(1, |Lambda|_F / C), k = max(1, |eta| / C) and b = m / k - 1,

        KL = 1/2 [ d / m + (b^2 / m) eta' Lambda^-1 eta - d + d log m ].

    (Vinaroz and Park 2022, appendix A, with the trace and the logarithm put right: they print d m and log |Sigma|.)
    """
    _check("clip", clip)
    size = len(eta)
    m = max(1.0, float(precision.norm()) / clip)
    k = max(1.0, float(eta.norm()) / clip)
    distance = float(eta @ torch.linalg.solve(precision, eta))
    return 0.5 * (size / m + (m / k - 1) ** 2 / m * distance - size + size * math.log(m))


def joint_clipping_divergence(family: GaussianFamily, theta: Tensor, clip: float) -> float:
    """KL(q || p) for p with all natural parameters scaled to joint norm <= clip: the mean stays, the precision shrinks.

    KL = d/2 [ 1 / m - 1 + log m ] with m = max(1, |theta| / C) and d parameters in all.
    """
    _check("clip", clip)
    m = max(1.0, float(theta.norm()) / clip)
    return 0.5 * family.locations * (1 / m - 1 + math.log(m))


def noise_of_factor(noise_multiplier: float, clip: float, batch: float, damping: float, steps: int) -> float:
    """Standard deviation that noise leaves in each coordinate of theta_f after `steps` of

        theta_f' = theta_f + (a / b) (sum of clipped changes + z C N(0, I)),

    where the records pull theta_f back by a at every step: (z C / b) a sqrt((1 - (1-a)^(2K)) / (1 - (1-a)^2)), which
    tends to (z C / b) sqrt(a / (2 - a)). The posterior's natural parameters carry n times as much.
    """
    for name, value in (("clip", clip), ("batch", batch), ("damping", damping)):
        _check(name, value)
    if not damping < 2:
        raise Refusal(f"damping={damping}: must be below 2, or the factor runs away")
    kept = (1 - damping) ** 2
    return noise_multiplier * clip / batch * damping * math.sqrt((1 - kept**steps) / (1 - kept))


@dataclass(frozen=True)
class PrintedLoop:
    """What the published algorithm does as printed, which damps twice: the factor moves by gamma / n^2 per record.

    progress   share of the way from the first factor to the fixed point that it has gone after all epochs
    noise      standard deviation in each natural parameter of the posterior
    signal     largest norm that the records can have given the posterior's natural parameters by then
    """

    progress: float
    noise: float
    signal: float


def printed_loop(records: int, epochs: int, noise_multiplier: float, clip: float, gamma: float = 1.0) -> PrintedLoop:
    """Steps 8 to 11 of algorithm 3 of Vinaroz and Park (2022): noise_multiplier is in units of 2 gamma C / n.

    gamma = records undoes the second damping: then the update is that of SEP.
    """
    steps, rate = records * epochs, gamma / records**2
    kept = math.exp(2 * steps * math.log1p(-rate)) if rate < 1 else 0.0
    progress = -math.expm1(steps * math.log1p(-rate)) if rate < 1 else 1.0
    noise = 2 * gamma * clip * noise_multiplier / records * math.sqrt((1 - kept) / (rate * (2 - rate)))
    return PrintedLoop(progress, noise, records * clip * progress)


def fisher_trace(family: GaussianFamily, theta: Tensor) -> float:
    """Trace of the Fisher information of q in its packed natural parameters: the variances of w and of -w w' / 2."""
    mean, covariance = family.moments(theta)
    dense = family.dense(covariance)
    variances = torch.diagonal(dense, dim1=-2, dim2=-1)
    trace, square = variances.sum(-1), dense.square().sum((-2, -1))
    lean = ((dense @ mean[..., None])[..., 0] * mean).sum(-1)
    if family.covariance == "full":
        second = (trace.square() + square + 2 * mean.square().sum(-1) * trace + 2 * lean) / 4
    elif family.covariance == "diagonal":
        second = (variances.square() / 2 + mean.square() * variances).sum(-1)
    else:
        second = (square / 2 + lean) / family.dimension
    return float((trace + second).sum())


def one_step_divergence(
    family: GaussianFamily,
    theta: Tensor,
    noise_std: float,
    *,
    least: float,
    draws: int = 1000,
    generator: torch.Generator | None = None,
) -> tuple[float, float]:
    """E KL(q || q with noise on its natural parameters), after projection: by draws, and to second order.

    The second number is noise_std^2 tr(Fisher) / 2. It is right while noise is small against the precision; where the
    two differ, the noise has left the range in which q is changed and not destroyed.
    """
    noise = torch.randn(draws, family.size, generator=generator, dtype=theta.dtype) * noise_std
    moved = family.project(theta + noise, least)
    average = float(family.divergence(theta.expand_as(moved), moved).mean())
    return average, 0.5 * noise_std**2 * fisher_trace(family, theta)


def theorem_4_1(eta: Tensor, precision: Tensor, noise_std: float, least: float, margin: float) -> float | None:
    """The right-hand side of theorem 4.1 of Vinaroz and Park (2022): a heuristic, not a bound.

    It bounds an expectation "with probability", uses E[1/X] outside the range of X, and takes eigenvalues of a product
    for products of eigenvalues. `least` is its rho, `margin` its M. None where it asks for the logarithm of a negative
    number, which happens whenever rho < 2 M at the smallest eigenvalue. Use `one_step_divergence` instead.
    """
    size = len(eta)
    values, vectors = torch.linalg.eigh(precision)
    lowest = float(values[0])
    # E = sum over k of sd * g_k B_k with one normal per entry of the upper triangle: ||sum B_k B_k'|| = d.
    tail = math.sqrt(2 * noise_std**2 * size * math.log(size))
    low = 1 + (least - lowest - 2 * margin) / values
    high = 1 + (least - lowest + 2 * margin) / values
    ratio = (low + high - 1 + (lowest + tail - least) / values) / (low * high)
    if not bool((ratio > 0).all()) or not bool((low > 0).all()):
        return None
    mean = torch.linalg.solve(precision, eta)
    b = (vectors.mT @ eta) / values.sqrt()
    shift = least - lowest + tail
    terms = shift * (1 / values).sum() + noise_std**2 / lowest * ratio.sum() + (b.square() * ratio).sum()
    return float(0.5 * (terms - eta @ mean + mean.square().sum() * shift + ratio.log().sum()))


def _check(name: str, value: float) -> None:
    if not value > 0:
        raise Refusal(f"{name}={value}: must be > 0")
