"""A clip that follows a quantile of the records' norms, paid for (Andrew et al., NeurIPS 2021).

    source = AdaptiveClip(data, quantile=0.5)
    run = confide.fit(method, module, source, plan)        # plan.clip is where the clip starts

Beside every release of the plan a second one counts how many records of a batch of its own lie under the present clip
C: record i answers b_i - 1/2 with b_i = 1 if |v_i| <= C, else 0, so its norm is 1/2 whatever it holds. With the noisy
share b of the expected batch the clip moves geometrically,

    C' = C exp(-rate (b - quantile)),

so C is a function of releases, and post-processing. What is asked of the boundary keeps the plan's own clip C_0: the
query is scaled by C_0 / C before it is clipped, and the release by C / C_0 after noise was added,

    (C / C_0) ( sum clip_{C_0}(v_i C_0 / C) + z C_0 N ) = sum clip_C(v_i) + z C N,

so the events of the plan are what they were, whatever the clip becomes. The counts are further events, charged with the
plan and part of the run's statement. Their noise multiplier is a tenth of the expected batch unless given, as in the
paper (a standard deviation of b / 20 counts): cheap for large batches, dear for small ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from confide.data.trees import in_type
from confide.errors import Refusal
from confide.mechanism.clipping import Recordwise, clipped_sum, isolated_rows
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.privacy.events import Event
from confide.sources.base import Part, Receipt, Source, Stretch, Wrapper
from confide.sources.queries import GradientQuery, Loss, Query, Release, StatisticQuery

ADAPTED_CLIP = "adapted_clip"
"""Where the clip ended, among the facts of a posterior."""
WIDEST = 1e6
"""The clip stays within this factor of its start, so that noise alone cannot carry it off."""


class AdaptiveClip(Wrapper):
    """A source that answers with the clip that fits, and counts to find it.

    source         where the records are
    quantile       share of the records that the clip should leave alone
    learning_rate  how fast the clip follows
    count_noise    noise multiplier of the counts, in units of one record's 1/2; None: a tenth of the expected batch
    """

    def __init__(
        self, source: Source, *, quantile: float = 0.5, learning_rate: float = 0.2, count_noise: float | None = None
    ) -> None:
        if not 0 < quantile < 1:
            raise Refusal(f"quantile={quantile}: must be in (0, 1)")
        if not (math.isfinite(learning_rate) and learning_rate > 0):
            raise Refusal(f"learning_rate={learning_rate}: must be a finite number > 0")
        super().__init__(source)
        self.quantile, self.learning_rate, self.count_noise = quantile, learning_rate, count_noise
        self._factor = 1.0

    @property
    def factor(self) -> float:
        """The present clip over the plan's; a function of releases, so it may be shown."""
        return self._factor

    def counting(self, mechanism: SampledGaussian) -> SampledGaussian:
        """The mechanism of the counts that go with a release."""
        noise = mechanism.expected_batch / 10 if self.count_noise is None else self.count_noise
        return replace(mechanism, noise_multiplier=noise if mechanism.private else 0.0, clip=0.5, clipping="flat")

    def within(self, plan: Plan) -> Plan:
        """The plan with noise such that releases and counts together keep its target."""
        plan = super().within(plan)
        counts = self._source.price([(self.counting(mechanism), steps) for mechanism, steps in plan.blocks])
        return plan.beside(counts)

    def price(self, parts: Sequence[Part]) -> tuple[Event, ...]:
        return super().price(self._with_counts(parts))

    def rehearse(self, query: Query) -> None:
        super().rehearse(query)
        super().rehearse(under(query, 1.0))

    def charge(self, parts: Sequence[Part], purpose: str = "", stretch: Stretch | None = None) -> Receipt:
        """Pay for the releases and for the counts that go with them, before a record is read."""
        if stretch is not None:
            beside = self._with_counts(stretch.beside)
            stretch = replace(stretch, parts=self._with_counts(stretch.parts), beside=beside)
        return super().charge(self._with_counts(parts), f"{purpose}, with counts for the clip", stretch)

    def answer(
        self, query: Query, mechanism: SampledGaussian, receipt: Receipt | None = None, purpose: str = ""
    ) -> Release:
        clip = mechanism.clip * self._factor
        counted = super().answer(under(query, clip), self.counting(mechanism), receipt, purpose)
        share = counted.sum.item() / counted.expected_batch + 0.5
        release = super().answer(scaled(query, 1 / self._factor), mechanism, receipt, purpose)
        answer = replace(release, sum=release.sum.mul_(self._factor), noise_std=release.noise_std * self._factor)
        moved = self._factor * math.exp(-self.learning_rate * (min(max(share, 0.0), 1.0) - self.quantile))
        self._factor = min(max(moved, 1 / WIDEST), WIDEST)
        return answer

    def check_resumable(self) -> None:
        raise Refusal("checkpoint: a source that adapts itself has a state of its own, which is not kept")

    def _with_counts(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        return (*parts, *((self.counting(mechanism), steps) for mechanism, steps in parts))


def scaled(query: Query, factor: float) -> Query:
    """The same query with every record's answer multiplied by a public number."""
    if isinstance(query, GradientQuery):
        return GradientQuery(query.module, _scaled_loss(query.loss, factor))
    function = query.function

    def multiplied(x: Any, y: Tensor) -> Tensor:
        return function(x, y) * factor

    whole = Recordwise(multiplied, function.module) if isinstance(function, Recordwise) else multiplied
    return StatisticQuery(whole, query.size, query.dtype)


def _scaled_loss(loss: Loss, factor: float) -> Loss:
    return lambda output, y: loss(output, y) * factor


def under(query: Query, clip: float) -> StatisticQuery:
    """For each record +1/2 if its answer is no longer than `clip`, else -1/2."""

    def function(x: Any, y: Tensor) -> Tensor:
        return torch.where(norms_of(query, x, y) <= clip, 0.5, -0.5)[:, None].double()

    return StatisticQuery(Recordwise(function), 1)


def norms_of(query: Query, x: Any, y: Tensor) -> Tensor:
    """How long each record's answer is before clipping. Private: only `under` reads it, inside the boundary."""
    if isinstance(query, StatisticQuery):
        rows = isolated_rows(query.function, x, y, query.size)
        norms: Tensor = torch.linalg.vector_norm(rows.double(), dim=1)
        return norms
    unused = torch.zeros(query.size, dtype=query.dtype)
    with torch.enable_grad():
        given, targets = in_type((x, y), query.dtype)
        return clipped_sum(query.module, query.loss, given, targets, clip=1.0, out=unused)
