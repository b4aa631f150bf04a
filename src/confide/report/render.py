"""A run as one HTML page: a statement for everyone, the evidence for judges, the audit trail for auditors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from confide import wording
from confide.evaluate.mixing import mixing_of
from confide.report import judging
from confide.report.evaluation import PUBLIC, Evaluation
from confide.report.trail import assumptions, event_rows, fact_rows, trail_parts, versions
from confide.report.verdict import RunVerdict, attacker_curve, cards, cautions, lead, stamps, statement_of
from confide.wording import accountant, epsilon, share, share_up

if TYPE_CHECKING:
    from confide.running.fit import Run


POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""What a browser may do for a page: draw it. No script runs and nothing is fetched, whatever a text in it says."""


def render(
    run: Run,
    metrics: Mapping[str, float] | None = None,
    evaluation: Evaluation | None = None,
    *,
    title: str | None = None,
    config: Mapping[str, Any] | None = None,
    hashes: Mapping[str, str] | None = None,
    created: datetime | None = None,
) -> str:
    """The page as text. It stands alone: no network, no script, and every text from outside is escaped.

    metrics     the numbers of the evaluation; computed from `evaluation` if left out
    evaluation  predictions and truth of a test set; draws the plots and says where the test set is from
    title       of the page; by default the method and what it predicts
    config      settings to print in the audit trail
    hashes      file names and their SHA-256, to print in the audit trail
    created     time stamp; now if left out
    """
    if metrics is None and evaluation is not None:
        metrics = evaluation.metrics()
    verdict = RunVerdict.of(run, dict(metrics or {}), evaluation)
    moment = (created or datetime.now(UTC)).astimezone(UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0")
    version = versions()["confide"]
    page: str = template("template.html").render(
        style=style(),
        policy=POLICY,
        title=title or verdict.title,
        subtitle=f"Learnt by {verdict.method} from about {run.plan.records:,} private records. Written on {moment}.",
        stamps=stamps(verdict),
        lead=lead(verdict),
        cards=cards(verdict),
        statement=_paragraphs(statement_of(run.privacy)),
        cautions=cautions(verdict),
        tested=_tested(evaluation, bool(metrics)),
        metrics=_metric_rows(verdict),
        class_tables=judging.tables(verdict.judgement),
        chain_table=judging.chain_table(mixing_of(run.posterior)),
        quality_plots=figures(_quality_plots(evaluation)),
        effect_plots=figures(_effect_plots(run)),
        cost=_cost(verdict),
        epsilons=_epsilon_rows(verdict),
        privacy_plots=figures(_privacy_plots(verdict)),
        threat=_threat(verdict),
        attacker=_attacker_rows(verdict),
        events=event_rows(run.privacy.events),
        assumptions=assumptions(run, evaluation, verdict.protected),
        public_facts=fact_rows(run.schema),
        parts=trail_parts(run, config, hashes),
        version=version,
        created=moment,
    )
    return page


@cache
def template(name: str) -> Any:
    """A page of this folder; every text that enters it is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_resource(name))


@cache
def style() -> Any:
    """The style sheet that all pages share."""
    from markupsafe import Markup

    return Markup(_resource("style.css"))


def _resource(name: str) -> str:
    from importlib.resources import files

    return files("confide.report").joinpath(name).read_text(encoding="utf-8")


def _paragraphs(text: str) -> list[str]:
    return [part.strip() for part in str(text).split("\n\n") if part.strip()]


def _tested(evaluation: Evaluation | None, measured: bool) -> str:
    if evaluation is None:
        if measured:
            return "Measured on a test set of the user's choice; where it comes from was not stated."
        return "No test set was declared, so nothing was measured: this page says nothing about quality."
    count = f"Measured on {evaluation.inputs:,} test inputs"
    if evaluation.source == PUBLIC:
        return f"{count} that were {PUBLIC}. Measuring reads no private record and costs no privacy."
    return (
        f"{count} from a {evaluation.source}. They took no part in learning, and were read without noise: the "
        "guarantee covers the records that were learnt from, not the people in this test set. The figures below "
        "show groups of them, some of which are small."
    )


def _metric_rows(verdict: RunVerdict) -> list[dict[str, str]]:
    evaluation = verdict.evaluation
    intervals = {} if evaluation is None else evaluation.intervals()
    return [*judging.baseline_row(verdict.judgement), *judging.metric_rows(verdict.metrics, intervals)]


def _quality_plots(evaluation: Evaluation | None) -> list[Any]:
    if evaluation is None:
        return []
    from confide.evaluate import plots
    from confide.models.predictive import ClassPredictive, RealPredictive

    predictive, y = evaluation.predictive, evaluation.y
    if isinstance(predictive, ClassPredictive):
        return [
            plots.reliability_diagram(predictive.probabilities, y),
            plots.confidence_histogram(predictive.probabilities, y),
            plots.uncertainty_of_classes(predictive, y),
        ]
    if not isinstance(predictive, RealPredictive) or y.numel() != evaluation.inputs:
        return []  # several targets, and times of which some are known from below alone: the table says what there is
    return [
        plots.predicted_against_actual(predictive, y, individuals=evaluation.source == PUBLIC),
        plots.coverage_curve(predictive, y),
        plots.uncertainty_of_reals(predictive, y),
    ]


def _effect_plots(run: Run) -> list[Any]:
    """What every column adds, where the model is a sum over columns."""
    from confide.posteriors.additive import AdditiveGaussian

    if not isinstance(run.posterior, AdditiveGaussian):
        return []
    from confide.evaluate.plots_effects import effect_plots

    return list(effect_plots(run.posterior, run.schema))


def _privacy_plots(verdict: RunVerdict) -> list[Any]:
    from confide.evaluate import plots

    found = []
    if sum(bound.finite for bound in verdict.bounds) > 1:
        found.append(plots.epsilon_bars({b.name: b.bound for b in verdict.bounds}, verdict.delta))
    if verdict.attacker is not None and verdict.attacker.tpr_at_fpr:
        tight = attacker_curve(verdict.run.privacy, verdict.attacker)
        found.append(plots.attacker_curve(tight, {fpr: verdict.naive_tpr(fpr) for fpr in tight}))
    return found


def figures(plots: Sequence[Any]) -> list[dict[str, Any]]:
    from markupsafe import Markup

    # The drawings escape their own labels; they are the only text that enters the page as markup.
    return [{"title": plot.title, "svg": Markup(plot.svg), "caption": plot.reading} for plot in plots]


def _cost(verdict: RunVerdict) -> str:
    if not verdict.protected:
        return "Epsilon would bound how much one record can change what is published. Here nothing bounds it."
    return (
        f"Epsilon bounds how much one record can change what is published, at delta = {wording.delta(verdict.delta)}: "
        "smaller protects more. Several ways of computing it are in use. The first line is the one to quote: it is "
        "proven for the way this run sampled its records. An approximation may be smaller than the truth."
    )


def _epsilon_rows(verdict: RunVerdict) -> list[dict[str, Any]]:
    return [
        {
            "name": accountant(entry.name).heading,
            "value": epsilon(entry.bound.epsilon),
            "kind": entry.kind,
            "assumes": entry.assumes,
            "note": entry.note,
            "first": place == 0 and entry.finite and entry.bound.sound,
        }
        for place, entry in enumerate(verdict.bounds)
    ]


def _threat(verdict: RunVerdict) -> str:
    if not verdict.protected:
        return "Nothing limits an attacker: what was published may reveal any record."
    if verdict.attacker is None:
        return "No bound on an attacker is available for these events."
    return (
        "The strongest attacker knows the method, every noisy sum and every other record, and must decide whether "
        "one given record was used. The tight bound uses the whole mechanism; the looser one knows epsilon and "
        "delta alone."
    )


def _attacker_rows(verdict: RunVerdict) -> list[dict[str, str]]:
    attacker = verdict.attacker
    if attacker is None or not verdict.protected:
        return []
    naive = attacker.naive_accuracy
    rows = [
        ("Right guesses, when both answers are equally likely", attacker.accuracy, naive, 0.5),
        ("Advantage over guessing", attacker.advantage, 2 * naive - 1, 0.0),
    ]
    rows += [
        (f"Members found at {100 * fpr:.3g}% false alarms", tpr, verdict.naive_tpr(fpr), fpr)
        for fpr, tpr in sorted(attacker.tpr_at_fpr.items())
    ]
    return [
        {"name": name, "tight": share_up(tight, 2), "naive": share_up(loose, 2), "guess": share(guess, 2)}
        for name, tight, loose, guess in rows
    ]
