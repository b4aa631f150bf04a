"""The audit's own test: plant faults, and see which part of the audit catches which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from confide.auditing.faults import FAULTS
from confide.auditing.game import Audit, audit, first_query
from confide.auditing.problems import problem_for
from confide.mechanism.clipping.anatomy import anatomy_of
from confide.mechanism.plan import plan as make_plan
from confide.sources.queries import GradientQuery

# Claims at which each fault shows: few steps of the full batch, many canaries for the halved noise, which changes
# least; a small rate for batches that are not sampled, since sampling is worth most there.
_STRONG = {"epsilon": 2.0, "rate": 1.0, "steps": 4}
# What the checks see needs few canaries, but batches that are drawn and steps enough.
_USUAL = {"epsilon": 2.0, "rate": 1 / 4, "steps": 16, "canaries": 200}
SETTINGS: dict[str | None, dict[str, Any]] = {
    **dict.fromkeys(FAULTS, _USUAL),
    None: {**_STRONG, "canaries": 4000},
    "noise halved": {**_STRONG, "canaries": 24000},
    "no clip": {**_STRONG, "canaries": 2000},
    "clip per layer": {**_STRONG, "canaries": 4000},
    "same noise": {**_STRONG, "canaries": 2000},
    "no sampling": {"epsilon": 1.0, "rate": 1 / 16, "steps": 32, "canaries": 4000},
}


@dataclass(frozen=True)
class Caught:
    """A planted fault (None: right code), the claim, the bound, and what spoke against the claim."""

    fault: str | None
    epsilon_claimed: float
    epsilon_lower: float
    caught_by: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def self_test(method: Any, seed: int | None = None, progress: Callable[[int, int], None] | None = None) -> list[Caught]:
    """Audit the method as it is, then with every fault that it can have."""
    rows, faults = [], (None, *faults_of(method))
    for done, fault in enumerate(faults):
        found: Audit = audit(method, fault=fault, seed=seed, **SETTINGS[fault])
        rows.append(Caught(fault, found.epsilon_claimed, found.epsilon_lower, found.caught_by))
        if progress is not None:
            progress(done + 1, len(faults))
    return rows


def faults_of(method: Any) -> tuple[str, ...]:
    """A method that asks for statistics, or for one layer, has no layers to clip apart."""
    problem = problem_for(method)
    plan = make_plan(noise_multiplier=1.0, delta=1e-5, records=len(problem.x), sampling="full-batch", steps=2)
    query = first_query(method, problem, plan)
    layered = isinstance(query, GradientQuery) and anatomy_of(query.module).groups > 1
    return tuple(fault for fault in FAULTS if layered or fault != "clip per layer")
