"""The statement for everyone: what was learnt, how good it is, what protection each person has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from confide import wording
from confide.errors import UnsupportedEvents
from confide.evaluate.judgement import Judgement
from confide.models.likelihoods import Exponential, MultiLabel, Weibull
from confide.privacy.accountants.bound import EXACT, Bound, not_applicable, slack
from confide.privacy.accountants.pld import PLD
from confide.privacy.events import NonPrivateEvent
from confide.privacy.interpretation import Attacker
from confide.privacy.statement import SEEDED, Privacy
from confide.report import judging
from confide.report.evaluation import Evaluation
from confide.wording import accountant, share, share_up
from confide.wording import epsilon as shown_epsilon

if TYPE_CHECKING:
    from confide.running.fit import Run


@dataclass(frozen=True)
class Remark:
    """Something to notice, and what it means."""

    name: str
    meaning: str


@dataclass(frozen=True)
class Card:
    """One big number."""

    label: str
    value: str
    explained: str
    unit: str = ""
    bad: bool = False


@dataclass(frozen=True)
class NamedBound:
    """One accountant's answer."""

    name: str
    bound: Bound

    @property
    def finite(self) -> bool:
        return self.bound.epsilon is not None and math.isfinite(self.bound.epsilon)

    @property
    def kind(self) -> str:
        if self.bound.epsilon is None:
            return "not applicable"
        return self.bound.kind if self.finite else "no protection"

    @property
    def assumes(self) -> str:
        """What a finite number rests on."""
        if not self.finite:
            return ""
        return "Exact for these events." if self.bound.kind == EXACT else accountant(self.name).meaning

    @property
    def note(self) -> str:
        if self.bound.epsilon is None:
            return self.bound.note or self.bound.kind.removeprefix("not applicable: ")
        return self.bound.note


@dataclass(frozen=True)
class RunVerdict:
    """Everything the statement is made of."""

    run: Run
    metrics: Mapping[str, float]
    evaluation: Evaluation | None
    bounds: tuple[NamedBound, ...]
    attacker: Attacker | None
    judgement: Judgement | None = None

    @classmethod
    def of(cls, run: Run, metrics: Mapping[str, float], evaluation: Evaluation | None) -> RunVerdict:
        bounds = tuple(NamedBound(name, bound) for name, bound in bounds_of(run.privacy).items())
        first = bounds[0].finite if bounds else False
        judgement = None if evaluation is None else evaluation.judgement(run.schema.classes)
        return cls(run, metrics, evaluation, bounds, run.privacy.attacker() if first else None, judgement)

    @property
    def delta(self) -> float:
        return float(self.run.privacy.delta)

    @property
    def epsilon(self) -> float | None:
        """The sound number; None where no sound bound is known."""
        first = self.bounds[0].bound if self.bounds else None
        return first.epsilon if first is not None and (first.sound or first.epsilon is None) else None

    @property
    def seeded(self) -> bool:
        return bool(self.run.privacy.seeded)

    @property
    def protected(self) -> bool:
        """True if a finite bound holds; a seeded run has one on paper only."""
        return self.epsilon is not None and math.isfinite(self.epsilon)

    @property
    def claimed(self) -> bool:
        return self.protected and not self.seeded

    @property
    def adjacency(self) -> str:
        return str(self.run.privacy.adjacency)

    @property
    def open_reason(self) -> str | None:
        """Why the run is not private, if it says so itself."""
        for event in self.run.privacy.events:
            if isinstance(event, NonPrivateEvent):
                return event.reason
        return None

    @property
    def method(self) -> str:
        return type(self.run.method).__name__

    @property
    def task(self) -> str:
        count, likelihood = self.run.schema.class_count, self.run.posterior.likelihood
        if isinstance(likelihood, MultiLabel):
            return f"classifier of {likelihood.labels} labels"
        if isinstance(likelihood, Exponential | Weibull):
            return "model of the time until an event"
        return "regression model" if count is None else f"{count}-class classifier"

    @property
    def title(self) -> str:
        target = self.run.schema.target
        return f"Predicting “{target}” with a {self.task}" if target else f"A {self.task}"

    def naive_tpr(self, fpr: float) -> float:
        """Members found at false alarm rate a by (epsilon, delta) alone: min(e^eps a + d, 1 - e^-eps (1 - d - a))."""
        epsilon = self.epsilon if self.epsilon is not None else math.inf
        grown = math.exp(min(epsilon, 700.0))
        return min(1.0, grown * fpr + self.delta, 1 - (1 - self.delta - fpr) / grown)


def stamps(verdict: RunVerdict) -> list[Remark]:
    """The warnings that nobody may overlook."""
    found = []
    if verdict.seeded:
        found.append(
            Remark(
                SEEDED,
                "The noise came from a fixed seed, so whoever knows the seed can subtract it. Such a run is for tests. "
                "The privacy numbers below describe a run with fresh noise, not this one.",
            )
        )
    if verdict.open_reason is not None:
        reason = verdict.open_reason.rstrip(".")
        found.append(
            Remark(
                "not private",
                f"Something was released without protection: {reason}. The people in the data have no guarantee.",
            )
        )
    elif not verdict.protected:
        found.append(Remark("no privacy bound", "No sound bound is known for what was released."))
    return found


def lead(verdict: RunVerdict) -> str:
    """What was learnt, how good it is beside no learning, and what it means for one person, in a few sentences.

    What the posterior itself warns of, such as a chain that did not mix, comes before all of it.
    """
    records = f"about {verdict.run.plan.records:,} private records"
    learnt = f"A {verdict.task} was learnt from {records} by {verdict.method}."
    sentences = [learnt, _quality(verdict), *judging.sentences(verdict.judgement)]
    if not verdict.claimed:
        sentences.append("No privacy is claimed for this run.")
    elif verdict.attacker is not None:
        most = verdict.attacker.accuracy
        sentences.append(
            f"{'Even an' if most < 0.75 else 'An'} attacker who knows every other record, asked whether a given one "
            f"was used, is right at most {share_up(most)} of the time; a coin toss is right 50% of the time."
        )
    warning = verdict.run.posterior.facts.get("warning")
    return " ".join([*([] if warning is None else [str(warning)]), *sentences])


def _quality(verdict: RunVerdict) -> str:
    metrics, inputs = verdict.metrics, _on_inputs(verdict.evaluation)
    if "accuracy" in metrics:
        return f"On {inputs} it was right {share(metrics['accuracy'])} of the time."
    if "rmse" in metrics:
        covered = metrics.get("coverage_90")
        inside = "" if covered is None else f", and {share(covered)} of its 90% intervals held the actual value"
        return f"On {inputs} it was typically off by {wording.number(metrics['rmse'])}{inside}."
    if "label_accuracy" in metrics:
        return f"On {inputs} it was right about {share(metrics['label_accuracy'])} of all labels."
    if "concordance" in metrics:
        return f"On {inputs} it put {share(metrics['concordance'])} of the pairs that can be compared in their order."
    return "Its quality was not measured."


def _on_inputs(evaluation: Evaluation | None) -> str:
    return "test inputs" if evaluation is None else f"{evaluation.inputs:,} test inputs"


def cards(verdict: RunVerdict) -> list[Card]:
    """The two or three numbers that matter: quality, honesty, protection."""
    metrics = verdict.metrics
    found = []
    if "accuracy" in metrics:
        found.append(_accuracy_card(metrics["accuracy"], verdict.evaluation))
    elif "rmse" in metrics:
        explained = f"Root mean squared error on {_on_inputs(verdict.evaluation)}, in units of the target."
        found.append(Card("Typical miss", wording.measure("rmse", metrics["rmse"]), explained))
    if "ece" in metrics:
        explained = "Average gap between how sure it said it was and how often it was right."
        found.append(Card("Confidence is off by", f"{100 * metrics['ece']:.1f}", explained, "points"))
    elif "coverage_90" in metrics:
        explained = (
            "Share of actual values that its intervals held. Near 90% is honest, far below is overconfident, far above "
            "overcautious."
        )
        found.append(Card("Inside the 90% intervals", share(metrics["coverage_90"]), explained))
    return [*found, _privacy_card(verdict)]


def _accuracy_card(accuracy: float, evaluation: Evaluation | None) -> Card:
    if evaluation is None:
        explained = "Share of test inputs for which its best guess was right."
    else:
        from confide.evaluate.metrics import proportion_interval

        low, high = proportion_interval(accuracy, evaluation.inputs)
        explained = (
            f"Share of {evaluation.inputs:,} test inputs for which its best guess was right. As many inputs as these "
            f"pin it down to between {share(low)} and {share(high)} (95% interval)."
        )
    return Card("Right answers", share(accuracy), explained)


def _privacy_card(verdict: RunVerdict) -> Card:
    if not verdict.protected:
        return Card("Privacy loss", "no bound", "The people in the data have no guarantee.", bad=True)
    value, label = shown_epsilon(verdict.epsilon), f"Privacy loss ε, at δ = {wording.delta(verdict.delta)}"
    if verdict.seeded:
        explained = "What a run with fresh noise would cost. This one was seeded and carries no claim."
        return Card(f"Not claimed: {label.lower()}", value, explained, bad=True)
    change = "adding or removing one record" if verdict.adjacency == "add-remove" else "replacing one record"
    explained = (
        f"Proven: {change} shifts the odds of any outcome by a factor of at most e to the power ε, except with "
        "a chance of about δ. Smaller protects more."
    )
    return Card(label, value, explained)


def bounds_of(privacy: Privacy) -> dict[str, Bound]:
    """Every accountant's answer, the sound one first; where none is known, that it does not apply and why."""
    try:
        return privacy.bounds()
    except UnsupportedEvents as error:
        return {PLD().name: not_applicable(str(error))}


def statement_of(privacy: Privacy) -> str:
    """The privacy statement; where no sound bound is known, that and the reason."""
    try:
        return privacy.statement()
    except UnsupportedEvents as error:
        return f"No privacy is claimed, since no sound bound is known: {error}."


def attacker_curve(privacy: Privacy, attacker: Attacker) -> dict[float, float]:
    """Members found at most, by false alarms: a smooth curve through the attacker's own points.

    Any points of the privacy profile give a valid bound, so a coarse grid serves for drawing.
    """
    import numpy as np

    from confide.privacy.interpretation import true_positive_rate

    grid = privacy.epsilon(1e-7 + slack(privacy.events, privacy.adjacency)) * np.linspace(0, 1, 17) ** 2
    deltas = np.asarray(PLD().deltas(privacy.events, grid.tolist(), privacy.adjacency))
    rates = [10 ** (-3 + step / 8) for step in range(25)]
    return {rate: true_positive_rate(grid, deltas, rate) for rate in rates} | dict(attacker.tpr_at_fpr)


def cautions(verdict: RunVerdict) -> list[Remark]:
    """What a careful reader should know before quoting the statement."""
    found = []
    assumed = [fact.fact for fact in verdict.run.schema.public_facts() if fact.source == "assumed public"]
    if assumed and verdict.protected:
        listed = ", ".join(assumed[:6]) + (f" and {len(assumed) - 6} more" if len(assumed) > 6 else "")
        found.append(
            Remark(
                "Read off the data.",
                f"Taken from the private records and assumed to be public: {listed}. The guarantee holds only towards "
                "someone to whom these were known beforehand.",
            )
        )
    epsilon, records = verdict.epsilon, verdict.run.plan.records
    if verdict.protected and epsilon is not None and epsilon > 10:
        found.append(
            Remark(
                "Weak protection.",
                f"An epsilon of {shown_epsilon(epsilon)} is a true bound but a loose one: look at what an attacker can "
                "do before relying on it.",
            )
        )
    if verdict.protected and verdict.delta * records > 1:
        found.append(
            Remark(
                "Large delta.",
                f"Delta = {wording.delta(verdict.delta)} is above 1/{records:,}, which would allow publishing a record "
                "outright now and then. Choose one well below.",
            )
        )
    return found
