"""Fits that run at the same time, in processes of joblib's that open the records by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from confide.errors import Refusal
from confide.privacy.ledger import Ledger


def check_jobs(ledger: Any, jobs: int, reopen: object | None) -> None:
    """Refuse what other processes could not do, before anything is charged."""
    if jobs < 1:
        raise Refusal(f"jobs={jobs}: must be at least 1")
    if jobs > 1 and reopen is None:
        raise Refusal(f"jobs={jobs}: other processes open the records by themselves; give reopen=, or jobs=1")
    if jobs > 1 and isinstance(ledger, Ledger):
        raise Refusal(f"jobs={jobs}: other processes cannot share an open ledger; give its path as ledger=")


def in_processes(calls: Iterable[Any], jobs: int) -> Iterator[Any]:
    """What `joblib.delayed` calls give, as they end."""
    import joblib

    return iter(joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")(calls))
