"""A Gamma hyper-prior on the precision of a network's weights, learnt from the approximation alone.

Weights have the prior N(0, 1 / (lambda P)), P the prior precision that was asked for, and lambda ~ Gamma(6, 6), of mean
1, as in probabilistic backpropagation. The prior is no function of any record, so that lambda is read off q(w) = N(m,
v), which is released: post-processing, without a share of the clip or of the budget. For q(w) q(lambda) it is

    q(lambda) = Gamma(6 + d / 2, 6 + sum_i P_i (m_i^2 + v_i) / 2),

over the d weights. Where q is as wide as its prior at a mean of zero, every lambda is a fixed point but for the pull of
the hyper-prior: little would stop a drift, and the noise of a private run in m^2 drives it down. Hence E[lambda] is
kept within public bounds, and moves half of the way in logarithms at a time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from confide.expectation.sites import NetworkSites

HYPER_SHAPE = HYPER_RATE = 6.0
"""Of the Gamma prior over lambda, as in probabilistic backpropagation: as much as twelve weights say."""
WIDEST = 10.0
"""lambda stays between 1 / 10 and 10: three times as narrow or as wide a prior as was asked for. Beyond that the
scale that was declared is wrong, and noise may not decide it."""


def learnt_precision(sites: NetworkSites, theta: Tensor, present: float) -> float:
    """The next lambda, from q and the present lambda, which `sites.prior` has in it."""
    weights = sites.weights
    mean, variance = sites.moments(theta)
    asked = sites.prior[weights : 2 * weights] / present
    rate = HYPER_RATE + 0.5 * float((asked * (mean.square() + variance)).sum())
    expected = (HYPER_SHAPE + weights / 2) / rate
    if not math.isfinite(expected) or expected <= 0:  # means beyond what squares can hold: as wide as it may be
        expected = 1 / WIDEST
    return min(max(math.sqrt(present * expected), 1 / WIDEST), WIDEST)


def with_precision(sites: NetworkSites, theta: Tensor, factor: float, floor: float) -> Tensor:
    """`theta` once the prior precision is multiplied by `factor`: all other factors of q stay what they are.

    A precision that falls below `floor` prior precisions is raised to it about its mean, as in a step.
    """
    weights = sites.weights
    prior = sites.prior[weights : 2 * weights]
    precision = theta[weights : 2 * weights] + (factor - 1) * prior
    least = floor * factor * prior
    raised = torch.maximum(precision, least)
    return torch.cat([theta[:weights] / precision * raised, raised, theta[2 * weights :]])
