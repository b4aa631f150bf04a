"""Do the chains agree? Split R-hat and effective sample size, from draws that are already public.

Both follow Gelman et al., Bayesian Data Analysis (2013), section 11: chains are split in halves; R-hat compares the
variance between halves with that within; the effective size divides the number of draws by the autocorrelation time,
summed over pairs as long as they stay positive and fall (Geyer 1992).
"""

from __future__ import annotations

import torch
from torch import Tensor

from confide.errors import Refusal


def _split(draws: Tensor) -> Tensor:
    """(chains, draws, parameters) -> (2 chains, draws / 2, parameters); an odd draw in the middle is left out."""
    if draws.ndim != 3 or draws.shape[1] < 4:
        raise Refusal(f"draws of shape {tuple(draws.shape)}: need (chains, at least 4 draws, parameters)")
    half = draws.shape[1] // 2
    return torch.cat([draws[:, :half], draws[:, -half:]]).double()


def _variances(halves: Tensor) -> tuple[Tensor, Tensor]:
    """Mean variance within halves, and the pooled estimate that also counts their disagreement."""
    count = halves.shape[1]
    within = halves.var(1).mean(0)
    pooled = within * (count - 1) / count + halves.mean(1).var(0)
    return within, pooled


def split_r_hat(draws: Tensor) -> Tensor:
    """One value per parameter; near 1 when the chains agree, above about 1.01 when they do not yet."""
    within, pooled = _variances(_split(draws))
    return torch.sqrt(pooled / within)


def autocorrelation(draws: Tensor) -> Tensor:
    """Correlation at lags 0, 1, ... of (chains, draws, parameters), averaged over chains: (draws, parameters)."""
    if draws.ndim != 3 or draws.shape[1] < 2:
        raise Refusal(f"draws of shape {tuple(draws.shape)}: need (chains, at least 2 draws, parameters)")
    covariance = _autocovariance(draws.double())
    # A parameter that never moves is as dependent as can be.
    found: Tensor = torch.where(covariance[0] > 0, covariance / covariance[0], torch.ones_like(covariance))
    return found


def _autocovariance(draws: Tensor) -> Tensor:
    """Of (chains, draws, parameters) about each chain's own mean, averaged over chains: (draws, parameters)."""
    count = draws.shape[1]
    spectrum = torch.fft.rfft(draws - draws.mean(1, keepdim=True), n=2 * count, dim=1)
    products = torch.fft.irfft(spectrum.abs().square(), n=2 * count, dim=1)[:, :count]
    found: Tensor = products.mean(0) / count
    return found


def effective_sample_size(draws: Tensor) -> Tensor:
    """How many independent draws carry as much information about each parameter's mean."""
    halves = _split(draws)
    chains, count, _ = halves.shape
    _, pooled = _variances(halves)
    covariance = _autocovariance(halves)
    within = halves.var(1).mean(0)
    correlation = 1 - (within - covariance * count / (count - 1)) / pooled
    correlation[0] = 1.0
    pairs = correlation[: count // 2 * 2].reshape(-1, 2, correlation.shape[-1]).sum(1)
    # Geyer: pair sums of a reversible chain are positive and falling; what is not is noise.
    positive = torch.cumprod((pairs > 0).double(), 0)
    falling = torch.cummin(pairs, 0).values
    time = (2 * (falling * positive).sum(0) - 1).clamp(min=1 / torch.tensor(float(chains * count)).log10())
    return chains * count / time
