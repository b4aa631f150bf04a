"""What a finished run leaves: a directory, a summary for programs and a page of text for people."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from confide.cli.output import one_line
from confide.cli.privacy_table import epsilon_table
from confide.cli.records import Records
from confide.data import Encoder
from confide.data.schema import LEARNT
from confide.errors import Refusal, Unfinished
from confide.privacy.bayesian import BayesianEstimate
from confide.report import Evaluation
from confide.running.artefacts import POSTERIOR, RECORD, REPORT, save_run
from confide.running.fit import Run
from confide.wording import METRICS, delta, epsilon, measure, remaining, up
from confide.workflow.facts import assumed_facts
from confide.workflow.request import Request


def save(
    run: Run, out: Path, measure: Callable[[], Evaluation | None], config: dict[str, Any], encoder: Encoder
) -> tuple[Evaluation | None, dict[str, Any]]:
    """Measure, write the directory, and return the measurement and the summary.

    The run is paid for by now: if it cannot be measured, it is saved without a measurement.
    """
    try:
        evaluation = measure()
        metrics = {} if evaluation is None else evaluation.metrics()
    except Exception as error:
        _write(run, out, config=config, encoder=encoder)
        raise Unfinished(f"--test: could not be measured on ({error}); the fitted model is in {out}", out) from error
    _write(run, out, metrics=metrics, evaluation=evaluation, config=config, encoder=encoder)
    return evaluation, summary_of(run, out, evaluation, metrics, encoder)


def _write(run: Run, out: Path, **rest: Any) -> None:
    """As `save_run`; where nothing can be written, as on a full disk, the paid run goes to the system's own folder."""
    try:
        save_run(run, out, **rest)
    except (Refusal, OSError) as error:
        refuge = Path(tempfile.mkdtemp(prefix="confide-")) / out.name
        save_run(run, refuge, **rest)
        reason = one_line(str(error))
        raise Unfinished(f"--out={out}: the fitted model is in {refuge} instead ({reason})", refuge) from error


def bayesian_line(found: BayesianEstimate) -> str:
    """The Bayesian epsilon beside the DP one, for people."""
    shown, dp = found.bayesian.epsilon, found.dp.epsilon
    if shown is None or dp is None:
        return f"Bayesian epsilon: none ({found.bayesian.note})"
    return f"For records drawn like the hold-out ones: Bayesian epsilon {up(shown)}, where DP promises {up(dp)} to all."


def config_of(
    records: Records,
    request: Request,
    hidden: tuple[int, ...] | None,
    bayesian: BayesianEstimate | None = None,
    module: str | None = None,
) -> dict[str, Any]:
    """What was typed, and the widths of the network, for the record of the run."""
    return {
        **records.typed(),
        "ledger": None if request.ledger is None else str(request.ledger),
        "name": request.name,
        "hidden": None if hidden is None else list(hidden),
        **({} if module is None else {"module": module}),
        "noise_scale": request.noise_scale,
        "seed": request.seed,
        **({} if bayesian is None else {"bayesian": bayesian.to_dict()}),
    }


def summary_of(
    run: Run, out: Path, evaluation: Evaluation | None, metrics: dict[str, float], encoder: Encoder
) -> dict[str, Any]:
    """What `--json` prints."""
    last, _ = run.plan.blocks[-1]  # the one of most steps
    return {
        "method": run.method.name,
        **run.privacy.to_dict(),
        "metrics": metrics,
        "test": None if evaluation is None else evaluation.source,
        "assumed_public": assumed_facts(run.schema),
        "seeded": run.privacy.seeded,
        "records": run.plan.records,
        "batch": last.expected_batch,
        "steps": run.plan.steps,
        "clip": last.clip,
        "noise_multiplier": last.noise_multiplier,
        "target_noise": _target_noise(run, encoder),
        "seconds": run.seconds,
        "out": str(out),
    }


def _target_noise(run: Run, encoder: Encoder) -> dict[str, Any] | None:
    """Regression: the standard deviation of the target around the model in its units, and what learning it cost."""
    if run.schema.classes is not None:
        return None
    facts = run.posterior.facts
    scale = run.posterior.noise_scale
    return {
        "standard_deviation": None if scale is None else float(scale) * encoder.target_scale,
        "from": facts.get("noise_scale_from", "the method" if "noise_scale" in facts else "given"),
        "epsilon": facts.get("noise_scale_epsilon"),
    }


def show(console: Console, run: Run, summary: dict[str, Any], evaluation: Evaluation | None) -> None:
    plan, warning = run.plan, run.posterior.facts.get("warning")
    if warning is not None:  # such as a chain that did not mix: before anything else
        console.print(f"[bold]{escape(str(warning))}[/bold]")
    ended = run.posterior.facts.get("adapted_clip")
    adapted = "" if ended is None else f" at first and {ended:.4g} at last"
    known = "counted" if run.schema.source_of("records") == LEARNT else "declared"
    parts = (
        f"{steps} steps of about {one.expected_batch:.0f} out of {plan.records} {known} "
        f"records, clip {one.clip:g}{adapted}, noise multiplier {one.noise_multiplier:.4g}"
        for one, steps in plan.blocks
    )
    chains = f", in each of {plan.chains} chains" if plan.chains > 1 else ""
    about = f"{run.method.name}: {', then '.join(parts)}{chains}; {run.seconds:.1f} s"
    console.print(about)
    if run.schema.source_of("classes") == LEARNT:
        shown = next(fact.value for fact in run.schema.public_facts() if fact.fact == "classes")
        console.print(f"classes {shown}: learnt privately from the labels, within the total below")
    noise = summary["target_noise"]
    if noise is not None and noise["epsilon"] is not None:
        console.print(
            f"noise of the target {noise['standard_deviation']:.4g}, learnt privately from one histogram of residuals: "
            f"alone epsilon {noise['epsilon']:g}, within the total below"
        )
    console.print()
    if evaluation is None:
        console.print("No test set was given, so nothing was measured: what is private is not measured in the open.")
    else:
        console.print(f"Measured on {evaluation.inputs} test records ({evaluation.source}; not protected):")
        console.print(metric_table(summary["metrics"]))
    console.print()
    console.print(epsilon_table(summary))
    console.print()
    console.print(escape(run.privacy.statement()))
    if run.ledger is None:
        console.print()
        console.print("No --ledger: nothing adds this run up with others on the same records.")
    else:
        _show_position(console, run.ledger)
    _show_cautions(console, summary)
    console.print()
    console.print(f"Written to {escape(one_line(summary['out']))}: {POSTERIOR}, {RECORD}, {REPORT}")


def _show_position(console: Console, noted: Mapping[str, Any]) -> None:
    """Under which name the records were charged, which is the one they are known by, and where their budget stands."""
    position = noted.get("position")
    if position is None:
        return
    before, total = (
        "no sound bound" if one is None else epsilon(one) for one in (position["before"], position["total"])
    )
    left = "" if position["limit"] is None else f"; {remaining(position['left'])} of {position['limit']:g} remains"
    console.print()
    name = escape(one_line(noted["dataset"])) or "(unnamed)"
    spent = f"epsilon {before} before this run, {total} with it{left}"
    console.print(f"Charged to {name}, at delta {delta(position['delta'])}: {spent}.")


def metric_table(metrics: dict[str, float]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, value in metrics.items():
        if name in METRICS:
            table.add_row(METRICS[name].heading, measure(name, value))
    return table


def _show_cautions(console: Console, summary: dict[str, Any]) -> None:
    if summary["assumed_public"]:
        facts = ", ".join(summary["assumed_public"][:8])
        more = len(summary["assumed_public"]) - 8
        console.print()
        console.print(
            f"[bold]Assumed public[/bold] on your word, read off the data and not protected: "
            f"{escape(one_line(facts))}{f' and {more} more' if more > 0 else ''}."
        )
    if summary["seeded"]:
        console.print()
        console.print("[bold]Seeded: no privacy claim.[/bold] The noise can be computed by anyone who knows the seed.")
