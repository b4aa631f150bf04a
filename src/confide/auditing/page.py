"""An audit as one HTML page: the claim, what the attack found, the checks, and the faults it would have caught."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING

from confide.auditing.results import LEVEL, Check
from confide.report.render import POLICY, style
from confide.report.trail import versions
from confide.wording import delta

if TYPE_CHECKING:
    from confide.auditing.game import Audit
    from confide.auditing.moves import QueryAudit
    from confide.auditing.self_test import Caught

WIDTH, BAR = 640, 26  # In pixels: what fits beside the text of a report.

ABOUT = {
    "white-box": "The attacker sees every release of the run. Canaries are records whose answer is a known direction; "
    "they go through the same sampling, clipping and noise as any other.",
    "black-box": "The attacker sees the finished posterior only. Canaries are records with labels that follow from "
    "nothing, so a model that finds such a label likely has seen it.",
}


def render_audit(found: Audit, faults: Sequence[Caught] = ()) -> str:
    """The page as text. It stands alone: no network, no script, and every text is escaped."""
    title = f"Audit of {found.method} at epsilon {found.epsilon_claimed:g}"
    parts = [
        _top(title, found.attack, found.caught_by, _now()),
        _section(1, "What was found", _verdict(found)),
        _section(2, "How the attack works", _method(found)),
    ]
    if found.checks:
        parts.append(_section(3, "The mechanism, looked at directly", _checks(found.checks)))
    if faults:
        parts.append(_section(len(parts), "Faults planted on purpose", _faults(faults)))
    return _page(parts)


def _now() -> str:
    return datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0")


def _page(parts: Sequence[str]) -> str:
    software = ", ".join(f"{name} {version}" for name, version in versions().items())
    return "\n".join([*parts, f'<p class="note">{escape(software)}</p>', "</div></body></html>", ""])


def _top(title: str, kind: str, caught_by: Sequence[str], moment: str) -> str:
    stamp = ""
    if caught_by:
        reasons = escape(", ".join(caught_by))
        stamp = f'<div class="stamp" role="note"><strong>The audit failed</strong><span>By: {reasons}.</span></div>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{style()}</style></head>'
        f'<body><div class="page"><header><p class="kicker">Privacy audit, {escape(kind)}</p>'
        f'<h1>{escape(title)}</h1><p class="about">Written on {moment}.</p>{stamp}</header>'
    )


def _section(number: int, title: str, body: str) -> str:
    return f"<section><h2>{number}. {escape(title)}</h2>{body}</section>"


def _verdict(found: Audit) -> str:
    if found.passed:
        lead = (
            f"The attack shows that epsilon is at least {found.epsilon_lower:.3f}. The claim of "
            f"{found.epsilon_claimed:g} survives."
        )
    else:
        lead = (
            f"The claim of epsilon {found.epsilon_claimed:g} does not hold: {', '.join(found.caught_by)} "
            f"speaks against it. The attack shows at least {found.epsilon_lower:.3f}."
        )
    caution = (
        "A lower bound above the claim refutes it. One below proves nothing: the proof is in the accounting, and an "
        f"audit looks for faults in the program. The bound holds with confidence {found.confidence:.0%}."
    )
    return f'<p class="lead">{escape(lead)}</p>{_bars(found)}<p class="caution">{escape(caution)}</p>'


def _bars(found: Audit) -> str:
    """Claim and lower bound on one scale."""
    longest = max(found.epsilon_claimed, found.epsilon_lower, 1e-9)
    rows = (
        ("claimed", found.epsilon_claimed, "var(--accent)"),
        ("shown by the attack", found.epsilon_lower, "var(--accent)" if found.passed else "var(--red-line)"),
    )
    drawn = []
    for place, (name, value, colour) in enumerate(rows):
        top = place * 2 * BAR
        width = max(2.0, (WIDTH - 90) * value / longest)
        drawn.append(
            f'<text x="0" y="{top + 16}" fill="currentColor" font-size="14">{escape(name)}</text>'
            f'<rect x="0" y="{top + 22}" width="{width:.1f}" height="{BAR - 8}" rx="3" fill="{colour}"/>'
            f'<text x="{width + 8:.1f}" y="{top + 36}" fill="currentColor" font-size="14">{value:.3f}</text>'
        )
    label = f"epsilon claimed {found.epsilon_claimed:g}, shown at least {found.epsilon_lower:.3f}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {4 * BAR}" role="img" aria-label="{label}" style="max-width:{WIDTH}px;width:100%">'
        f"{''.join(drawn)}</svg>"
    )


def _method(found: Audit) -> str:
    facts = [
        ("Canaries, each in or out by the toss of a coin", f"{found.canaries}"),
        ("Guesses, for the most and the least suspicious", f"{found.guesses}"),
        ("Right guesses", f"{found.correct} ({found.correct / max(found.guesses, 1):.1%}; blind guessing: 50%)"),
        ("Score", found.score),
        ("Steps, share of the records in a batch", f"{found.steps}, {found.rate:.4g}"),
        ("Noise, in units of one record's bound", f"{found.noise_multiplier:.4g}"),
        ("Delta", delta(found.delta)),
    ]
    paper = "One run (Steinke, Nasr and Jagielski 2023, NeurIPS)."
    return f"<p>{escape(ABOUT[found.attack])} {escape(paper)}</p>{_table((), facts)}"


def _checks(checks: Sequence[Check]) -> str:
    rows = [
        (
            check.name,
            "passed" if check.passed else "FAILED",
            check.measured,
            check.expected,
            f"{check.level:g}" if check.level else "exact",
            "" if check.chance is None else f"{check.chance:.2g}",
        )
        for check in checks
    ]
    text = (
        "Level: how often a check fails by chance if all is well, at most; exact checks never do. Chance: of a value "
        f"as far out as the one measured. All levels of an audit together stay within {LEVEL:g}."
    )
    return f"<p>{escape(text)}</p>{_table(('Check', '', 'Measured', 'Expected', 'Level', 'Chance'), rows)}"


def render_moves(found: QueryAudit) -> str:
    """The page about a module or query of the user's own."""
    title = f"Audit of {found.name}"
    lead = f"{found.verdict[0].upper()}{found.verdict[1:]}."
    left = f" {found.left} of {found.tables} tables were left out for lack of time." if found.left else ""
    text = (
        f"{found.tried} tables got one record more, or another one: huge, equal, opposite, out of range, first or last "
        "in order and others. The sum may move by 1 C, the clip; by 2 C where one record takes another's place. A "
        f"claim that survives is not proven by this.{left}{' ' if found.slow else ''}{found.slow}"
    )
    rows = [
        (move.record, move.error or f"{move.size:.4g} C", f"{move.allowed:g} C", move.table, f"{move.batch}")
        for move in found.largest
    ]
    moves = _table(("Record", "Moves by", "Allowed", "Table", "Batch"), rows)
    parts = [
        _top(title, "one-record moves", found.caught_by, _now()),
        _section(1, "What was found", f'<p class="lead">{escape(lead)}</p><p class="caution">{escape(text)}</p>'),
        _section(2, "Checks", _checks(found.checks)),
        _section(3, "Largest moves by kind of record", moves),
    ]
    return _page(parts)


def _faults(faults: Sequence[Caught]) -> str:
    rows = [
        (
            row.fault or "none",
            f"{row.epsilon_claimed:g}",
            f"{row.epsilon_lower:.3f}",
            ", ".join(row.caught_by) or "nothing",
        )
        for row in faults
    ]
    text = "The same audit of the same method with one thing broken at a time. What catches nothing proves nothing."
    return f"<p>{escape(text)}</p>{_table(('Fault', 'Claimed', 'At least', 'Caught by'), rows)}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    above = f"<thead><tr>{head}</tr></thead>" if titles else ""
    return f'<div class="wide"><table>{above}<tbody>{body}</tbody></table></div>'
