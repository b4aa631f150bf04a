"""The ledger as a table, and what a notebook shows of it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from confide.errors import UnsupportedEvents
from confide.privacy.events import Adjacency
from confide.privacy.ledger.budget import Multiset
from confide.privacy.ledger.entries import Entry, row, row_key
from confide.privacy.ledger.pricing import Pricing
from confide.privacy.ledger.state import State
from confide.wording import delta as shown_delta
from confide.wording import epsilon as shown_epsilon
from confide.wording import html_table, remaining

if TYPE_CHECKING:
    from confide.privacy.ledger.ledger import Ledger

# So many of the last rows say what was spent by then: each of them is a composition of its own.
_PRICED_ROWS = 100
# At which a ledger without a ceiling is priced: what commands take where none is given.
_USUAL_DELTA = 1e-5


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


def notebook_table(ledger: Ledger) -> str:
    """What was spent of every data set and what is left, at the ceiling's delta."""
    ceiling = ledger.ceiling
    delta = _USUAL_DELTA if ceiling is None else ceiling.delta
    rows = []
    for name in ledger.datasets():
        try:
            spent = shown_epsilon(ledger.spent(delta, name, None if ceiling is None else ceiling.adjacency))
            left = "-" if ceiling is None else remaining(ledger.remaining(name))
        except UnsupportedEvents:
            spent, left = "no sound bound", "0"
        rows.append((name or "(unnamed)", ledger.standing(name).plans, spent, left))
    heads = ("data set", "plans charged", f"epsilon spent, at delta {shown_delta(delta)}", "remains")
    return html_table(f"{ledger!r}: {'no ceiling' if ceiling is None else ceiling.words()}", rows, heads)
