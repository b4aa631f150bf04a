"""What a ledger can say about everything that was charged to one data set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from confide.privacy.events import Event
from confide.privacy.filters import FIXED, Verdict
from confide.privacy.ledger.entries import Limit, summary
from confide.wording import remaining, up


@dataclass(frozen=True)
class Standing:
    """What is proven about all plans of a data set together.

    limit           the ceiling in force, None if there is none
    by, epsilon     the filter that holds the plans against it, and how much of its epsilon they take
    before_ceiling  plans that were charged before the ceiling was set or changed for the last time
    """

    dataset: str
    plans: int
    limit: Limit | None
    by: str
    epsilon: float
    before_ceiling: int

    @property
    def remaining(self) -> float:
        """The ceiling's epsilon less what the filter has taken of it, at least 0; infinity without a ceiling."""
        return math.inf if self.limit is None else max(0.0, self.limit.epsilon - self.epsilon)

    @property
    def over(self) -> bool:
        """More was charged than the ceiling allows: it was lowered, or set too late."""
        return self.limit is not None and self.epsilon > self.limit.epsilon

    def sentence(self) -> str:
        """For a statement and for `confide ledger show`; empty where a run's own statement says it all."""
        plans = f"{self.plans} plan{'' if self.plans == 1 else 's'}"
        if self.limit is None:
            if self.plans < 2:
                return ""
            return (
                f"The ledger has no ceiling: what the {plans} charged to the same records cost together is proven only "
                "if all of them were fixed before any was released."
            )
        ceiling = f"epsilon = {self.limit.epsilon:g} and delta = {self.limit.delta:g} ({self.limit.adjacency})"
        if self.over:
            return f"The ledger holds more than its ceiling of {ceiling} allows, so the ceiling proves nothing here."
        how = "as one plan, fixed in advance, by privacy loss distributions"
        if self.by != FIXED:
            how = f"by the {self.by} filter, which is proven also where a plan was chosen by what earlier ones released"
        return f"Everything the ledger has charged to the same records ({plans}) stays within {ceiling}, {how}."

    def assumptions(self) -> tuple[str, ...]:
        """What that rests on and nobody can check."""
        if self.limit is None or self.over or not self.before_ceiling:
            return ()
        return (
            f"the ledger's ceiling, set or changed after {self.before_ceiling} of the plans, was not chosen by what "
            "they released",
        )


def refusal(events: Sequence[Event], dataset: str, limit: Limit, verdict: Verdict, composed: float, left: float) -> str:
    """Why a charge was refused, and by which filter; `composed`: as one plan, `left`: what remains of the ceiling."""
    by = ""
    if verdict.by != FIXED:
        by = (
            f" by the {verdict.by} filter, since a plan charged later may depend on what was released before "
            f"(epsilon={up(composed)} if all had been fixed in advance and charged together)"
        )
    return (
        f"charging {' and '.join(map(summary, events))} would bring data set {dataset!r} to "
        f"epsilon={up(verdict.epsilon)}{by}, above {limit.words()}, of which {remaining(left)} "
        "remains; charge fewer or noisier steps, or raise the ceiling with limit()"
    )
