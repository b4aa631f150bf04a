"""The audit trail: every fact that the numbers rest on."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confide import wording
from confide.models.networks import recipe_of
from confide.posteriors.base import Posterior
from confide.privacy.events import Event, GaussianEvent, PureEvent, VotesEvent
from confide.report import words
from confide.report.evaluation import PUBLIC, Evaluation
from confide.wording import epsilon, remaining

if TYPE_CHECKING:
    from confide.running.fit import Run


@dataclass(frozen=True)
class TrailPart:
    """A titled table of names and values."""

    title: str
    rows: Sequence[tuple[str, str]]
    remark: str = ""
    hash: bool = False


PACKAGES = ("confide", "torch", "numpy", "scipy", "dp-accounting")


def event_rows(events: Iterable[Event]) -> list[dict[str, str]]:
    """Every event in the order it was charged."""
    return [{"kind": _kind(event), "count": f"{event.count:,}", "details": _details(event)} for event in events]


def _kind(event: Event) -> str:
    if isinstance(event, GaussianEvent):
        return "Gaussian, passes" if event.sampling == "shuffle" else "Gaussian"
    if isinstance(event, VotesEvent):
        return "Votes"
    return "Pure" if isinstance(event, PureEvent) else "Not private"


def _details(event: Event) -> str:
    if isinstance(event, GaussianEvent):
        parts = [f"noise multiplier {event.noise_multiplier:.6g}", f"{event.sampling} sampling"]
        if event.sampling != "full-batch":
            parts.append(f"rate {event.rate:.6g}")
        if event.records is not None:
            parts.append(f"{event.records:,} records")
        return ", ".join(parts)
    if isinstance(event, PureEvent):
        slack = f", delta {event.slack:.3g} each" if event.slack else ""
        return f"epsilon {event.epsilon:.6g} each{slack}, {event.adjacency}"
    if isinstance(event, VotesEvent):
        return f"noise {event.noise:.6g} on counts that one voter moves by at most {event.moved:.6g}"
    return event.reason


def fact_rows(schema: Any) -> list[dict[str, str]]:
    """The public facts with whose word they are."""
    return [{"name": fact, "value": value, "source": source} for fact, value, source in schema.public_facts()]


def assumptions(run: Run, evaluation: Evaluation | None, protected: bool = True) -> list[str]:
    """What the guarantee rests on, in plain sentences; without a guarantee, only what was vouched for."""
    found = [*run.privacy.assumptions]
    if protected:
        found += _terms(run)
    else:
        found.append("No assumption makes this run private.")
    if evaluation is not None:
        separate = "shares no person with the records that were learnt from, and is not protected by any guarantee here"
        found.append(f"The test set {'is public' if evaluation.source == PUBLIC else separate}.")
    return found


def _terms(run: Run) -> list[str]:
    mechanism = run.plan.mechanism
    change = "added or removed" if run.privacy.adjacency == "add-remove" else "replaced by another"
    samplings = dict.fromkeys(one.sampling for one, _ in run.plan.blocks)
    found = [
        f"Protected is one record: data sets count as neighbours when one record is {change}. A person with several "
        "records is protected less.",
        "The guarantee holds even if every noisy sum of every step is published, not just the result.",
        f"Sampling is as stated: {', then '.join(words.SAMPLING[name] for name in samplings)}. "
        "Which records were drawn stays secret.",
        f"Each record's answer is clipped to norm {wording.number(mechanism.clip)} before it is summed, "
        f"in the {mechanism.clipping} style.",
        f"The number of records, {run.plan.records:,}, is public; sums are divided by public sizes only.",
    ]
    if "noise_scale_epsilon" in run.posterior.facts:
        found.append(
            "Beside the steps, one histogram of residuals was released, in which every record counts once; the noise "
            "of the target is read off it, and both together make up the epsilon."
        )
    if "recalibration_epsilon" in run.posterior.facts:
        found.append(
            "Beside the steps, one sum over all records was released that shows how far class probabilities are from "
            "right; a slope, shifts, a floor and a curve are read off it, and both together make up the epsilon."
        )
    if run.privacy.seeded:
        found.append("The noise came from a fixed seed: the guarantee would hold for fresh noise only.")
    else:
        found.append(
            "Noise and sampling come from a cryptographic generator keyed by the operating system; its key is not kept."
        )
    if any(fact.source == "assumed public" for fact in run.schema.public_facts()):
        found.append("The facts marked “assumed public” were known to everyone before; they are not protected.")
    return found


def trail_parts(
    run: Run, config: Mapping[str, Any] | None = None, hashes: Mapping[str, str] | None = None
) -> list[TrailPart]:
    """How the run was made, part by part."""
    method, posterior = run.method, run.posterior
    about = words.first_sentence(type(method).__doc__)
    made = [("Name", method.name), *_rows(words.settings(method))]
    learnt = [("Kind", words.label(posterior.kind)), *_rows(posterior.facts), *_model_rows(posterior)]
    return [
        TrailPart("Plan", _plan_rows(run)),
        TrailPart(f"Method: {type(method).__name__}", made, about),
        TrailPart("Posterior", learnt),
        _ledger_part(run),
        TrailPart("Versions", list(versions().items())),
        TrailPart("Configuration", _rows(config or {})),
        TrailPart("Files (SHA-256)", list((hashes or {}).items()), hash=True),
    ]


def _ledger_part(run: Run) -> TrailPart:
    """Where the ledger stood behind this run, so that one that was rolled back is noticed."""
    if run.ledger is None:
        return TrailPart(
            "Ledger", [("Ledger", "none was kept, so nothing adds this run up with others on the same records")]
        )
    head = f"{run.ledger['count']}:{run.ledger['hash']}"
    rows = [("Data set", str(run.ledger["dataset"])), *_position_rows(run.ledger.get("position"))]
    rows += [("Head", head), ("Identity", str(run.ledger["identity"]))]
    if run.ledger["signature"]:
        rows.append(("Signature", str(run.ledger["signature"])))
    return TrailPart(
        "Ledger", rows, "`confide ledger verify FILE --head HEAD` tells whether a ledger still holds this run."
    )


def _position_rows(position: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Spent before, this run, together, what is left, and by whom; what is spent rounded up, what is left down."""
    if position is None:
        return [("Position", "none: a seeded run is booked as not private")]
    at = f"at delta {wording.delta(position['delta'])}, {position['adjacency']}"
    rows = [
        (f"Spent before ({at})", _bound(position["before"])),
        ("This run", _bound(position["run"])),
        ("Together", _bound(position["total"])),
    ]
    if position["limit"] is None:
        rows.append(("Left", "no ceiling was set"))
    else:
        rows.append(("Left", f"{remaining(position['left'])} of a ceiling of {position['limit']:g}"))
    people = ", ".join(f"{who or '(not named)'} ({count})" for who, count in position["by_whom"])
    return [*rows, ("Charged by", position["who"] or "(not named)"), ("Plans so far, by whom", people)]


def _bound(value: float | None) -> str:
    return "no sound bound is known" if value is None else f"epsilon {epsilon(value)}"


def _rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(words.label(key), words.shown(value)) for key, value in values.items()]


def _plan_rows(run: Run) -> list[tuple[str, str]]:
    plan = run.plan
    rows = [
        ("Records (public, nominal)", f"{plan.records:,}"),
        ("Steps", f"{plan.steps:,}"),
        ("Delta", wording.delta(plan.delta)),
        ("Neighbours", plan.adjacency),
        ("Target epsilon", wording.number(plan.target_epsilon)),
    ]
    for place, (mechanism, steps) in enumerate(plan.blocks, start=1):
        block = f" (block {place} of {len(plan.blocks)}, {steps:,} steps)" if len(plan.blocks) > 1 else ""
        noise = f"{mechanism.noise_multiplier:.6g}" if mechanism.private else "none: not private"
        rows += [
            (f"Sampling{block}", f"{mechanism.sampling}, rate {mechanism.rate:.6g}"),
            (f"Expected batch{block}", wording.number(mechanism.expected_batch)),
            (f"Clip{block}", f"{wording.number(mechanism.clip)}, {mechanism.clipping}"),
            (f"Noise multiplier{block}", noise),
        ]
    alone = run.posterior.facts.get("noise_scale_epsilon")
    if alone is not None:
        rows.append(("Noise of the target", f"one histogram of residuals, alone epsilon {wording.number(alone)}"))
    alone = run.posterior.facts.get("recalibration_epsilon")
    if alone is not None:
        rows.append(("Recalibration", f"one sum over all records, alone epsilon {wording.number(alone)}"))
    return rows


def _model_rows(posterior: Posterior) -> list[tuple[str, str]]:
    recipe = recipe_of(posterior.module)
    network = type(posterior.module).__name__ if recipe is None else words.shown(recipe)
    return [("Likelihood", words.shown(posterior.likelihood)), ("Network", network)]


def versions() -> dict[str, str]:
    """The software that ran."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return {**found, "python": platform.python_version(), "platform": platform.platform(terse=True)}
