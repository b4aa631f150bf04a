"""The audit's own test: plant faults, and see which part of the audit catches which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from confide.auditing.faults import FAULTS
from confide.auditing.game import Audit, audit

# Claims at which each fault shows: few steps of the full batch, many canaries for the halved noise, which changes
# least; a small rate for batches that are not sampled, since sampling is worth most there.
_STRONG = {"epsilon": 2.0, "rate": 1.0, "steps": 4}
SETTINGS: dict[str | None, dict[str, Any]] = {
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
    """Audit the method as it is, then with every fault."""
    rows = []
    for done, fault in enumerate((None, *FAULTS)):
        found: Audit = audit(method, fault=fault, seed=seed, **SETTINGS[fault])
        rows.append(Caught(fault, found.epsilon_claimed, found.epsilon_lower, found.caught_by))
        if progress is not None:
            progress(done + 1, len(FAULTS) + 1)
    return rows
