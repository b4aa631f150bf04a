"""Evaluation: predictions beside the truth, and whose word it is that the truth may be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from confide.errors import Refusal
from confide.evaluate.judgement import Judgement
from confide.evaluate.metrics import refuse_private
from confide.models.predictive import ClassPredictive, LabelPredictive, Predictive, VectorPredictive
from confide.models.survival import SurvivalPredictive

PUBLIC = "declared public"
SEPARATE = "separate hold-out declared by the user"
SOURCES = (PUBLIC, SEPARATE)


@dataclass(frozen=True)
class Evaluation:
    """predictive  what the posterior says about the test inputs
    y           their actual labels or values, in the same units
    source      why they may be looked at: `PUBLIC`, or `SEPARATE` from the records that were learnt from. A metric
                is computed without noise, so the guarantee does not cover the people in a separate hold-out
    """

    predictive: Predictive
    y: Tensor
    source: str

    def __post_init__(self) -> None:
        refuse_private("y", self.y)
        if self.source not in SOURCES:
            raise Refusal(f"source={self.source!r}: must be {' or '.join(map(repr, SOURCES))}")
        several = isinstance(self.predictive, LabelPredictive | VectorPredictive | SurvivalPredictive)
        if (len(self.y) if several else self.y.numel()) != self.inputs:
            raise Refusal(f"y of shape {tuple(self.y.shape)}: need one entry for each of {self.inputs} predictions")

    @property
    def inputs(self) -> int:
        """How many test inputs there are."""
        if isinstance(self.predictive, ClassPredictive | LabelPredictive):
            return self.predictive.draws.shape[1]
        return self.predictive.means.shape[1]

    def metrics(self) -> dict[str, float]:
        """All metrics by name."""
        from confide.evaluate.metrics import evaluate

        return evaluate(self.predictive, self.y)

    def intervals(self) -> dict[str, tuple[float, float]]:
        """What so few inputs can say of them: 95 % intervals by name."""
        from confide.evaluate.intervals import intervals

        return intervals(self.predictive, self.y)

    def judgement(self, labels: tuple[Any, ...] | None = None) -> Judgement | None:
        """Beside a model that learns nothing, and class by class."""
        from confide.evaluate.judgement import judge

        return judge(self.predictive, self.y, labels)
