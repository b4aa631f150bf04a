"""The ledger as a table."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from confide.errors import UnsupportedEvents
from confide.privacy.events import Adjacency
from confide.privacy.ledger.budget import Multiset
from confide.privacy.ledger.entries import Entry, row, row_key
from confide.privacy.ledger.pricing import Pricing
from confide.privacy.ledger.state import State

# So many of the last rows say what was spent by then: each of them is a composition of its own.
_PRICED_ROWS = 100


def table(entries: Iterable[Entry], pricing: Pricing, question: tuple[float, Adjacency] | None) -> list[dict[str, Any]]:
    """Rows of equal charges that follow one another, with what the data set had spent by then."""
    groups = [list(group) for _, group in groupby((one for one in entries if one.sum is None), key=row_key)]
    state, rows = State(), []
    for place, group in enumerate(groups):
        for entry in group:
            state.take(entry)
        spent = None
        if question is not None and group[0].event is not None and place >= len(groups) - _PRICED_ROWS:
            spent = _spent(state, group[0].dataset, pricing, question)
        rows.append(row(group) | {"epsilon": spent})
    return rows


def _spent(state: State, dataset: str, pricing: Pricing, question: tuple[float, Adjacency]) -> float | None:
    delta, adjacency = question
    try:
        worlds: list[Multiset] = state.account(dataset).worlds(adjacency)
        return pricing.epsilon(worlds, delta, adjacency)
    except UnsupportedEvents:
        return None
