"""The ledger, read back from its file and held against the releases that were made.

A run is made with noise from the operating system, as every run that is charged; then some answers are asked for
one by one. Every release is counted here, outside the boundary. The ledger and the run's own statement must each hold
as many.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from confide.auditing.noise_checks import MakeData
from confide.auditing.problems import AuditProblem
from confide.auditing.results import Check
from confide.mechanism.plan import Plan
from confide.privacy.events import Event
from confide.privacy.ledger import Ledger
from confide.running.fit import fit
from confide.sources.queries import StatisticQuery

NAME, LOOSE = "audit", 5  # Answers asked one by one beside the run: few, but not the number of its steps.


def check_ledger(method: Any, problem: AuditProblem, plan: Plan, make_data: MakeData) -> Check:
    """As many releases in the ledger and in the statement as were made."""
    expected = f"{plan.steps} of the run and {LOOSE} asked for one by one"
    with tempfile.TemporaryDirectory(prefix="confide-audit-") as directory:
        path = str(Path(directory) / "budget.db")
        ledger = Ledger(path)
        data = make_data(problem.x, problem.y, schema=problem.schema(plan.records), ledger=ledger, name=NAME)
        made: list[int] = []
        try:
            run = fit(method, problem.module, data, plan, progress=lambda done, _: made.append(done))
            query = StatisticQuery(lambda x, y: torch.zeros(len(x), 1, dtype=torch.float64), 1)
            for _ in range(LOOSE):
                data.answer(query, plan.mechanism)
        except (ValueError, RuntimeError) as error:
            return Check("ledger", False, f"the run was refused after {len(made)} releases: {error}", expected)
        finally:
            ledger.close()
        again = Ledger(path)
        booked = counted(again.events(NAME))
        again.close()
    return reconcile(len(made), booked, counted(run.privacy.events), plan, expected)


def reconcile(made: int, booked: Counter[Event], stated: Counter[Event], plan: Plan, expected: str) -> Check:
    """What was made beside what was written down, each in units of the mechanism's event."""
    due, of_run = counted([plan.mechanism.event(made + LOOSE)]), counted([plan.mechanism.event(made)])
    in_ledger, in_statement = (sum(min(given[unit], due[unit]) for unit in due) for given in (booked, stated))
    passed = made == plan.steps and not due - booked and not of_run - stated
    text = f"{made} and {LOOSE} made, {in_ledger} in the ledger, {in_statement} in the statement"
    return Check("ledger", passed, text, expected)


def counted(events: Iterable[Event]) -> Counter[Event]:
    """How many of each event, whatever way they were written down."""
    found: Counter[Event] = Counter()
    for event in events:
        found[replace(event, count=1)] += event.count
    return found
