"""Reference pages that are made from the code when the documentation is built: commands, facts, run.json."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MEANINGS = {
    "adjacency": "what one person changes",
    "assumptions": "what the user vouches for, and what could not be proven; the statement repeats it",
    "attacker": "the best that whoever sees all releases can do: accuracy, and share recognised at stated false alarms",
    "config": "what was typed or requested",
    "created": "when it was written, UTC",
    "delta": "probability with which the budget may fail",
    "encoder": "how raw records become inputs; `confide predict` and exports read it",
    "epsilon": "by every accountant; null where one does not apply. `pld` is the sound one",
    "events": "every release as the ledger holds it: noise, sampling, count",
    "format": "raised when runs of before could be misread",
    "judgement": "baseline, intervals of the metrics, every class; null without test records",
    "kind": "what each epsilon is worth: upper bound, approximation, ...",
    "ledger": "the head of the chain behind this run, and whether a ledger proves it",
    "method": "its name and all of its settings",
    "metrics": "numbers on the test records",
    "plan": "blocks of mechanisms with their steps, and the target epsilon",
    "posterior": "its kind and facts: step sizes, chains, learnt noise",
    "schema": "the public facts, and whose word each of them is",
    "seeded": "whether noise came from a seed; then nothing is claimed",
    "sha256": "of the files beside it",
    "statement": "the privacy statement in words",
    "test": "how many test records, and why they may be looked at",
    "versions": "of confide, Python and what it rests on",
}
"""What every key of run.json means; a key without one makes the build fail."""


def command_page() -> str:
    """Every command with its arguments and options as a table."""
    from confide.cli.app import COMMANDS, command

    return "\n".join(part for name in COMMANDS for part in _of_command(command(name), f"confide {name}"))


def _of_command(command: Any, name: str) -> list[str]:
    inner = getattr(command, "commands", None)
    if inner:
        parts = [f"## {name}\n\n{_words(command.help)}\n"]
        for key, one in inner.items():
            parts += _of_command(one, f"{name} {key}")
        return parts
    rows = ["| option | meaning | default |", "|---|---|---|"]
    for one in command.params:
        if one.name == "help":
            continue
        options = sorted((text for text in one.opts if text.startswith("-")), key=len, reverse=True)
        spelt = f"`{options[0]}" if options else f"`{one.metavar or one.name.upper()}"
        shown = spelt + (f" {one.metavar}`" if options and one.metavar else "`")
        default = "required" if one.required else "" if one.default in (None, False, "") else f"`{one.default}`"
        rows.append(f"| {shown} | {_words(getattr(one, 'help', '') or '')} | {default} |")
    level = "##" if name.count(" ") == 1 else "###"
    return [f"{level} {name}\n\n{_words(command.help)}\n", "\n".join(rows), ""]


def _words(text: str | None) -> str:
    plain = inspect.cleandoc(text or "").split("\f")[0]
    return plain.replace("\n\n", "<br>").replace("\n", " ").replace("|", "\\|")


def facts_page() -> str:
    """The file of facts: its keys by the classes that read them."""
    import docstrings

    from confide.data import roles, schema
    from confide.data.columns import Column, Input

    parts = ["```text\n" + inspect.cleandoc(schema.__doc__ or "") + "\n```\n"]
    for title, cls in (("Keys of the file", schema.Schema), ("[columns.NAME]", Column), ("[inputs.NAME]", Input)):
        parts.append(f"## {title}\n\n{docstrings.as_markdown(cls.__doc__ or '')}\n")
    parts.append("## Several targets, times, weights\n\n```text\n" + inspect.cleandoc(roles.__doc__ or "") + "\n```\n")
    return "\n".join(parts)


def run_page() -> str:
    """run.json: the keys of a small run that is made for this page, with their types."""
    record = _small_run()
    rows = ["| key | type | meaning |", "|---|---|---|"]
    rows += [f"| `{key}` | {_type_of(value)} | {MEANINGS[key]} |" for key, value in sorted(record.items())]
    for key in ("plan", "ledger", "attacker", "posterior"):
        inner = json.dumps(record[key], indent=2)
        rows.append(f"\n**{key}**, as that run has it:\n\n```json\n{inner}\n```") if inner != "null" else None
    return "\n".join(rows)


def _small_run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "confide",
            "fit",
            "digits",
            "--epsilon",
            "3",
            "--steps",
            "20",
            "--delta",
            "1e-4",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "--out", str(out)], check=True, capture_output=True, env=environment)
        found: dict[str, Any] = json.loads((out / "run.json").read_text(encoding="utf-8"))
        return found


def _type_of(value: Any) -> str:
    names = {dict: "table", list: "list", str: "text", bool: "true or false", int: "whole number", float: "number"}
    return names.get(type(value), "null or table")
