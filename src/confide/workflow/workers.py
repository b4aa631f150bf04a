"""Fits that run at the same time, in processes of joblib's that open the records by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from confide.errors import Refusal
from confide.privacy.ledger import Ledger

Opened = TypeVar("Opened")
_open: dict[str, Any] = {}
"""What this process has opened, by the name of the work that it was opened for. One at a time."""


def check_jobs(ledger: Any, jobs: int, reopen: object | None) -> None:
    """Refuse what other processes could not do, before anything is charged."""
    if jobs < 1:
        raise Refusal(f"jobs={jobs}: must be at least 1")
    if jobs > 1 and reopen is None:
        raise Refusal(f"jobs={jobs}: other processes open the records by themselves; give reopen=, or jobs=1")
    if jobs > 1 and isinstance(ledger, Ledger):
        raise Refusal(f"jobs={jobs}: other processes cannot share an open ledger; give its path as ledger=")


def opened_once(work: str, opening: Callable[[], Opened]) -> Opened:
    """What `opening` gives: by the first call of some work in this process, and the same to every later one.

    work    a name that no other work has
    """
    if work not in _open:
        found = opening()
        _open.clear()
        _open[work] = found
        return found
    kept: Opened = _open[work]
    return kept


def forget(work: str) -> None:
    """Let go of what was opened here; another process lets go when it ends, or opens something else."""
    _open.pop(work, None)
