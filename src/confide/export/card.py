"""MODEL_CARD.md: what a model is, what its privacy is worth and how good it was, for whoever is handed the files.

It is made of the record of the run alone: the statement, the public facts and the metrics on declared test records.
What was typed to make the run, such as the names of files, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from confide.report.judging import between
from confide.wording import METRICS, delta, epsilon, measure, share, share_up
from confide.wording import number as plain_number

if TYPE_CHECKING:
    from confide.running.artefacts import SavedRun


def model_card(saved: SavedRun, title: str = "", files: str = "") -> str:
    """The text in Markdown; names from outside are quoted as code, so that they stay text.

    files   what stands in them and how far it may be from confide's own predictions (`agreement`)
    """
    record, schema = saved.record, saved.schema
    target = _code(schema.target or "the target")
    kind = "a regression model" if schema.classes is None else f"a {schema.class_count}-class classifier"
    parts = [
        f"# {title or 'Model card'}",
        f"{kind.capitalize()} of {target}, learnt from about {record['plan']['records']:,} private records by "
        f"`{record['method']['name']}` under differential privacy.",
        "## Privacy",
        str(saved.privacy.statement()),
        _table(("What", "Value"), _privacy_rows(record)),
        "## Quality",
        _quality(record),
        "## Inputs",
        "Raw rows by these public facts; values outside the bounds are clamped, categories that are not listed count "
        "as none of them.",
        _table(
            ("Fact", "Value", "Whose word"), [(_code(f.fact), _code(f.value), f.source) for f in schema.public_facts()]
        ),
        "## Limits",
        "- Protected is one record; a person with several records is protected less.\n"
        "- The files hold the released posterior and declared facts, and nothing else that was computed from records.\n"
        f"- {files or 'Predictions are averages over posterior draws.'} Epistemic uncertainty is the disagreement of "
        "the draws, aleatoric what each of them expects.",
    ]
    warning = record["posterior"]["facts"].get("warning")
    if warning:
        parts.insert(2, f"**{warning}**")
    if record["seeded"]:
        parts.insert(2, "**The noise was seeded: no privacy is claimed for this model.**")
    return "\n\n".join(parts) + "\n"


def _privacy_rows(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    attacker = record["attacker"]
    sound = record["epsilon"].get("pld")
    shown = "no bound" if sound is None else epsilon(float(sound))
    rows = [
        ("Epsilon", shown),
        ("Delta", delta(float(record["delta"]))),
        ("Neighbours", str(record["adjacency"])),
    ]
    if attacker is not None:
        rows.append(("An attacker is right at most", share_up(float(attacker["accuracy"]))))
    return rows


def _quality(record: Mapping[str, Any]) -> str:
    if not record["metrics"]:
        return "Not measured: no test records were declared."
    judgement = record.get("judgement") or {}
    ends = judgement.get("intervals_95", {})
    rows = []
    for name, value in record["metrics"].items():
        number = measure(name, float("nan") if value is None else float(value))
        pair = ends.get(name)
        spread = "" if pair is None else between(name, (float(pair[0]), float(pair[1])))
        rows.append((METRICS[name].heading if name in METRICS else name, number, spread))
    test = record["test"]
    said = (
        f"Measured on {test['inputs']:,} records, {test['source']}; the guarantee does not cover them." if test else ""
    )
    return "\n\n".join(
        part for part in (said, _beside(judgement), _table(("Measure", "Value", "95 % interval"), rows)) if part
    )


def _beside(judgement: Mapping[str, Any]) -> str:
    base = judgement.get("baseline")
    if base is None:
        return ""
    if judgement["task"] == "regression":
        return f"Always naming the mean of the test records is off by {plain_number(float(base['value']))}."
    only = judgement.get("only")
    often = _code(judgement["majority"])
    said = f"Always naming the most frequent class, {often}, is right {share(base['value'])} of the time."
    return said if only is None else f"{said} **The model names one class only, {_code(only)}.**"


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _code(text: Any) -> str:
    """As code, on one line, with a fence that it cannot close."""
    plain = " ".join(str(text).split())
    longest = max((len(run) for run in "".join(c if c == "`" else " " for c in plain).split()), default=0)
    fence = "`" * (longest + 1)
    inner = f" {plain} " if plain.startswith("`") or plain.endswith("`") else plain
    return f"{fence}{inner}{fence}" if plain else ""
