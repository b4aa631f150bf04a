"""A ledger as one page: budgets by data set, what is left of them, who charged what, and the heads of the chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from confide.errors import UnsupportedEvents
from confide.evaluate.drawing import Plot
from confide.privacy.ledger import Ledger, Limit
from confide.privacy.ledger.position import charged_by
from confide.privacy.ledger.standing import Standing
from confide.report.sheet import Sheet, SheetSection, SheetTable, cells
from confide.report.verdict import Card
from confide.wording import delta as shown_delta
from confide.wording import epsilon, remaining

MOST_ROWS = 200
"""Of the history on a page, the last ones; `ledger show --json` has all."""
MOST_PLOTS = 6  # a page stays readable; every data set is in the table


def render_ledger(ledger: Ledger, place: str, delta: float) -> str:
    """The page as text; epsilons without a ceiling are shown at `delta`."""
    ceiling = ledger.ceiling
    at = delta if ceiling is None else ceiling.delta
    names = ledger.datasets()
    standings = {name: _standing(ledger, name) for name in names}
    rows = ledger.to_rows(at, None if ceiling is None else ceiling.adjacency)
    spent = {name: _spent(ledger, name, at) for name in names}
    return Sheet(
        "Privacy ledger",
        f"What was spent: {place}",
        f"{ledger.head.count:,} entries in an append-only chain.",
        _lead(names, standings, ceiling),
        _cards(names, standings, ceiling, at),
        [
            SheetSection(
                "Budgets by data set",
                _promise(ceiling),
                _plots(rows, names, ceiling),
                [_budget_table(names, spent, standings, at), _people_table(ledger, names)],
            ),
            SheetSection("History", "", (), [_history_table(rows), _ceiling_table(rows)]),
            SheetSection("Heads of the chain", HEADS, (), [_head_table(ledger, names)]),
        ],
        [f"This rests on your word that {one}." for one in _assumed(standings)],
    ).html()


HEADS = (
    "A head stands for an entry and all before it. Kept elsewhere, it shows whether the ledger was cut short or "
    "rewritten: confide ledger verify FILE --head COUNT:HASH."
)


def _standing(ledger: Ledger, name: str) -> Standing | None:
    try:
        return ledger.standing(name)
    except UnsupportedEvents:
        return None


def _spent(ledger: Ledger, name: str, delta: float) -> float | None:
    try:
        return ledger.spent(delta, name)
    except UnsupportedEvents:
        return None


def _assumed(standings: Mapping[str, Standing | None]) -> list[str]:
    found = (one for standing in standings.values() if standing is not None for one in standing.assumptions())
    return list(dict.fromkeys(found))


def _named(name: str) -> str:
    return name or "(unnamed)"


def _promise(ceiling: Limit | None) -> str:
    if ceiling is None:
        return "No ceiling was set, so nothing is refused; the command “confide ledger limit” sets one."
    return (
        f"The ceiling holds for each data set by itself: epsilon {ceiling.epsilon:g} at delta "
        f"{shown_delta(ceiling.delta)}, "
        f"{ceiling.adjacency}. A charge that would pass it is refused before a record is read."
    )


def _lead(names: Sequence[str], standings: Mapping[str, Standing | None], ceiling: Limit | None) -> str:
    if not names:
        return "Nothing has been charged yet."
    count = "One data set has" if len(names) == 1 else f"{len(names)} data sets have"
    if ceiling is None:
        return f"{count} been charged, and there is no ceiling: nothing stops the next charge."
    left = {name: 0.0 if one is None else one.remaining for name, one in standings.items()}
    least = min(left, key=lambda name: left[name])
    over = [name for name, one in standings.items() if one is None or one.over]
    if over:
        listed = ", ".join(f"“{_named(name)}”" for name in over[:4])
        return f"{count} been charged. More than the ceiling allows was charged to {listed}: it proves nothing there."
    within = f"within a ceiling of epsilon {ceiling.epsilon:g}"
    if len(names) == 1:
        return f"{count} been charged, {within}. Of it {remaining(left[least])} is left."
    return f"{count} been charged, each {within}. The least is left of “{_named(least)}”: {remaining(left[least])}."


def _cards(
    names: Sequence[str], standings: Mapping[str, Standing | None], ceiling: Limit | None, delta: float
) -> list[Card]:
    plans = sum(one.plans for one in standings.values() if one is not None)
    found = [
        Card("Data sets", f"{len(names):,}", "Each has a budget of its own."),
        Card("Plans charged", f"{plans:,}", "A plan is fixed before any of it is released, and paid for at once."),
    ]
    if ceiling is None:
        return [*found, Card("Ceiling", "none", "Nothing is refused.", bad=True)]
    about = f"For each data set, at delta {shown_delta(delta)}, {ceiling.adjacency}."
    return [*found, Card("Ceiling ε", f"{ceiling.epsilon:g}", about)]


def _budget_table(
    names: Sequence[str], spent: Mapping[str, float | None], standings: Mapping[str, Standing | None], delta: float
) -> SheetTable:
    rows = []
    for name in names:
        one = standings[name]
        left = taken = "no bound"
        if one is not None:
            left = "no ceiling" if one.limit is None else remaining(one.remaining)
            taken = "" if one.limit is None else f"{epsilon(one.epsilon)}, {one.by}"
        value = spent[name]
        shown = "no bound" if value is None else epsilon(value)
        rows.append(cells(_named(name), "" if one is None else f"{one.plans:,}", shown, taken, left))
    note = (
        f"Spent is what all charges cost together at delta {shown_delta(delta)} if they were fixed in advance. "
        "Taken is what "
        "the filter has taken of the ceiling, which holds also where later plans followed from earlier releases. "
        "What is spent is rounded up, what is left down."
    )
    columns = ("Data set", "Plans", "Epsilon spent", "Taken of the ceiling, by filter", "Left")
    return SheetTable("What is left", note, columns, tuple(rows), (1, 2, 3, 4))


def _people_table(ledger: Ledger, names: Sequence[str]) -> SheetTable:
    rows = [
        cells(_named(name), who or "(not named)", f"{count:,}")
        for name in names
        for who, count in charged_by(ledger, name)
    ]
    return SheetTable("By whom", "", ("Data set", "Who", "Plans"), tuple(rows), (2,))


def _history_table(rows: Sequence[Mapping[str, Any]]) -> SheetTable:
    charges = [row for row in rows if row["kind"] != "limit"]
    shown = charges[-MOST_ROWS:]
    note = f"The last {len(shown)} of {len(charges):,} rows." if len(shown) < len(charges) else ""
    lines = tuple(
        cells(
            str(row["time"])[:16].replace("T", " "),
            _named(str(row["dataset"])),
            str(row["purpose"] or row["kind"]),
            str(row["event"]),
            str(row["who"]),
            "" if row["epsilon"] is None else epsilon(row["epsilon"]),
        )
        for row in reversed(shown)
    )
    columns = ("Time (UTC)", "Data set", "Purpose", "Event", "By", "Epsilon so far")
    return SheetTable("Charges, the latest first", note, columns, lines, (5,))


def _ceiling_table(rows: Sequence[Mapping[str, Any]]) -> SheetTable:
    lines = tuple(
        cells(str(row["time"])[:16].replace("T", " "), str(row["event"]), str(row["who"]))
        for row in rows
        if row["kind"] == "limit"
    )
    return SheetTable("Ceilings", "" if lines else "None was ever set.", ("Time (UTC)", "Ceiling", "By"), lines)


def _head_table(ledger: Ledger, names: Sequence[str]) -> SheetTable:
    rows = [cells("The whole ledger", str(ledger.head))]
    for name in names:
        entries = ledger.entries(name)
        rows.append(cells(f"After the last charge to {_named(name)}", str(entries[-1].head)))
    return SheetTable("Heads", "", ("After", "Head"), tuple(rows), hash=True)


def _plots(rows: Sequence[Mapping[str, Any]], names: Sequence[str], ceiling: Limit | None) -> list[Plot]:
    from confide.evaluate.plots_budget import budget_over_time

    found = []
    for place, name in enumerate(names[:MOST_PLOTS]):
        priced = [row for row in rows if row["dataset"] == name and row["epsilon"] is not None]
        if priced:
            times, values = [str(row["time"])[:16] for row in priced], [row["epsilon"] for row in priced]
            limit = None if ceiling is None else ceiling.epsilon
            title = f"Budget of “{_named(name)}”"
            found.append(budget_over_time(times, values, limit, title=title, identifier=f"budget-{place}"))
    return found
