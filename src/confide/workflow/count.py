"""The number of records, learnt privately where nobody declared it: one full-batch Gaussian count.

The fit that follows has a rate and a number of steps that do not depend on the count, so that both releases are fixed
in advance and compose as they stand.
"""

from __future__ import annotations

import math

import torch

from confide.mechanism.clipping import Recordwise
from confide.mechanism.gaussian import SampledGaussian
from confide.sources.private_data import PrivateData
from confide.sources.queries import StatisticQuery
from confide.workflow.calibrate import one_release
from confide.workflow.request import Request

PURPOSE = "count the records"
SHARE = 0.1
"""Part of epsilon that the count may cost. It composes with the fit, so that the fit loses far less."""


def mechanism_of(request: Request) -> SampledGaussian | None:
    """The mechanism of the count, in which each record answers 1; None where the number is known."""
    if not request.counted:
        return None
    return one_release(request, SHARE)


def count_records(data: PrivateData, mechanism: SampledGaussian) -> int:
    """The number of records as a noisy count shows it, at least the count's standard deviation."""
    query = StatisticQuery(Recordwise(lambda x, _: torch.ones(len(x), 1, dtype=torch.float64)), 1)
    seen = data.answer(query, mechanism, purpose=PURPOSE).sum.item()
    return max(2, math.ceil(mechanism.noise_std), round(seen))
