"""A question after the last step: paid for with the plan, asked once, and kept with the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from confide.mechanism.gaussian import SampledGaussian
from confide.posteriors.base import Posterior
from confide.sources.base import Part
from confide.sources.queries import Query, Release


@dataclass(frozen=True)
class Closing:
    """One release after the last step, which belongs to the run like a step.

    ask    the question, about the finished posterior
    tell   the posterior that the answer makes of it
    """

    mechanism: SampledGaussian
    purpose: str
    ask: Callable[[Posterior], Query]
    tell: Callable[[Posterior, Release], Posterior]

    @property
    def part(self) -> Part:
        return self.mechanism, 1


def closing_to_dict(release: Release) -> dict[str, Any]:
    return {"sum": release.sum.double().tolist(), "noise_std": release.noise_std}


def closing_from_dict(body: dict[str, Any], mechanism: SampledGaussian) -> Release:
    total = torch.tensor(body["sum"], dtype=torch.float64)
    return Release(total, float(body["noise_std"]), mechanism.event(), mechanism.expected_batch)
