"""The number of records, learnt privately where nobody declared it: one full-batch Gaussian count.

The fit that follows has a rate and a number of steps that do not depend on the count, so that both releases are fixed
in advance and compose as they stand: they are paid for by one charge, before the first record is counted.
"""

from __future__ import annotations

import math

import torch

from confide.mechanism.clipping import Recordwise
from confide.mechanism.gaussian import SampledGaussian
from confide.sources.ahead import PaidAhead
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


def count_records(source: PaidAhead, mechanism: SampledGaussian) -> int:
    """The number of records as a noisy count shows it, at least the count's standard deviation."""
    query = StatisticQuery(Recordwise(lambda _, y: torch.ones(len(y), 1, dtype=torch.float64)), 1)
    receipt = source.take_up([(mechanism, 1)], PURPOSE)
    seen = source.answer(query, mechanism, receipt).sum.item()
    return max(2, math.ceil(mechanism.noise_std), round(seen))
