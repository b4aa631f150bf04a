"""What one check found, and how seldom a right mechanism fails one by chance."""

from __future__ import annotations

from dataclasses import dataclass

LEVEL = 1e-6
"""An audit of a right mechanism fails a check by chance at most this often, all its tests taken together."""
TESTED = 10
"""Checks that go by chance share the level evenly; there are no more than this many in one audit."""


@dataclass(frozen=True)
class Check:
    """What was measured beside what it should be. `measured` and `expected` are for people.

    level   the check fails by chance at most this often if all is well; 0: there is no chance in it
    chance  of a value as far out as this one if all is well; None: there is no chance in it
    """

    name: str
    passed: bool
    measured: str
    expected: str
    level: float = 0.0
    chance: float | None = None


def tested(name: str, chance: float, measured: str, expected: str) -> Check:
    """A test of significance: it fails where chance is no explanation."""
    level = LEVEL / TESTED
    return Check(name, chance > level, measured, expected, level, chance)
