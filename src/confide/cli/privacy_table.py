"""What a run costs, as a table for people: the sound number first, every number with its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from confide.wording import accountant, delta, epsilon, share_up


def show_privacy(console: Console, values: Mapping[str, Any], what: str = "") -> None:
    """`values` is what `Privacy.to_dict` gives."""
    console.print(f"[bold]epsilon {shown(values, 'pld')}[/bold] at delta {delta(values['delta'])}")
    sampling = values.get("sampling")
    facts = [what, f"{sampling} sampling" if sampling else "", f"{values['adjacency']} adjacency"]
    console.print(escape(", ".join(fact for fact in facts if fact)), style="dim")
    console.print()
    console.print(epsilon_table(values))
    sentence = attacker_sentence(values.get("attacker"))
    if sentence:
        console.print()
        console.print(sentence)


def epsilon_table(values: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("accountant", no_wrap=True)
    table.add_column("epsilon", justify="right", no_wrap=True)
    table.add_column("kind")
    for name in values["epsilon"]:
        style = "bold" if name == "pld" else ""
        table.add_row(accountant(name).heading, shown(values, name), escape(values["kind"][name]), style=style)
    return table


def attacker_sentence(attacker: Mapping[str, Any] | None) -> str:
    """What the strongest attacker can do, in plain words; shares are rounded up."""
    if not attacker or attacker.get("accuracy") is None:
        return ""
    caught = attacker.get("tpr_at_fpr_0.01")
    also = "" if caught is None else f", and finds at most {share_up(caught)} of those present at 1% false alarms"
    return (
        "An attacker who knows every other record tells whether one person is in the data with "
        f"at most {share_up(attacker['accuracy'])} accuracy, where 50% is a coin toss{also}."
    )


def shown(values: Mapping[str, Any], name: str) -> str:
    """An epsilon as it is written everywhere: rounded up, for a claim must not be better than the bound."""
    value = values["epsilon"][name]
    if value is None:
        return "infinite" if values["kind"][name].startswith("infinite") else "-"
    return epsilon(value)
