"""The privacy statement: events, delta and adjacency in; numbers, their worth and a paragraph out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from confide.privacy.accountants import PLD, Bound, epsilons, sound_epsilon
from confide.privacy.accountants.bound import check_question, known, non_private, slack
from confide.privacy.events import Adjacency, Event, GaussianEvent, NonPrivateEvent, PureEvent, VotesEvent
from confide.privacy.interpretation import Attacker, attacker
from confide.wording import accountant, html_table, share_up, up
from confide.wording import delta as shown_delta
from confide.wording import epsilon as shown_epsilon

SEEDED = "seeded: no privacy claim"
# From this accuracy of the best attack on, the statement says that the protection is nominal.
_MEANINGLESS = 0.95


@dataclass(frozen=True)
class Privacy:
    """What was released, for whom it is private, and how well.

    events       everything that was released
    delta        the delta the statement is made for
    adjacency    "add-remove": data sets that differ by one record more or less; "replace-one": by one record's values
    seeded       the noise came from a fixed seed, as in a test: nothing is claimed
    assumptions  what the user vouches for, such as facts declared public; the statement repeats it
    ledger       what the ledger has proven about everything charged to the same records, as a sentence, if anything
    """

    events: tuple[Event, ...]
    delta: float
    adjacency: Adjacency = "add-remove"
    seeded: bool = False
    assumptions: tuple[str, ...] = ()
    ledger: str = ""

    def __post_init__(self) -> None:
        check_question(self.delta, self.adjacency)
        object.__setattr__(self, "events", known(self.events))
        object.__setattr__(self, "assumptions", tuple(self.assumptions))

    def epsilon(self, delta: float | None = None) -> float:
        """The sound epsilon, at another delta if one is given. Says nothing about a seeded run."""
        return sound_epsilon(self.events, self.delta if delta is None else delta, self.adjacency)

    def bounds(self) -> dict[str, Bound]:
        """Every accountant's answer with what it is worth."""
        return dict(_bounds(self.events, self.delta, self.adjacency))

    def attacker(self) -> Attacker:
        """The best a membership attack can do."""
        return attacker(self.events, self.epsilon(), self.adjacency, delta=self.delta)

    def _repr_html_(self) -> str:
        rows = [
            ("epsilon", "no claim: the noise was seeded" if self.seeded else shown_epsilon(self.epsilon())),
            ("delta", f"{shown_delta(self.delta)}, {self.adjacency}"),
            ("statement", self.statement()),
        ]
        return html_table("Privacy", rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values. An epsilon that does not exist or is infinite is None, and its kind says why."""
        bounds, best = self.bounds(), self.attacker()
        return {
            "delta": self.delta,
            "adjacency": self.adjacency,
            "sampling": self.sampling(),
            "epsilon": {name: _finite(bound.epsilon) for name, bound in bounds.items()},
            "kind": {name: _kind(bound) for name, bound in bounds.items()},
            "attacker": {
                "advantage": best.advantage,
                "accuracy": best.accuracy,
                "naive_accuracy": best.naive_accuracy,
                **{f"tpr_at_fpr_{rate:g}": power for rate, power in best.tpr_at_fpr.items()},
            },
            "seeded": self.seeded,
            "assumptions": list(self.assumptions),
        }

    def sampling(self) -> str | None:
        """The sampling of the Gaussian releases, joined by "+" when there are several kinds."""
        kinds = {event.sampling for event in self.events if isinstance(event, GaussianEvent)}
        return "+".join(sorted(kinds)) or None

    def statement(self) -> str:
        """One paragraph that a lawyer can read and a researcher can check. Numbers are rounded up."""
        epsilon = self.epsilon()
        parts = [_seeded_sentence()] if self.seeded else []
        if math.isinf(epsilon):
            parts.append(_no_protection(self.events, self.delta, self.adjacency))
        else:
            best = self.attacker()
            parts += [self._protection(epsilon), self._attack(best)]
            if best.accuracy >= _MEANINGLESS:
                parts.append("That is no meaningful protection.")
            parts.append(self._basis())
        if self.ledger:
            parts.append(self.ledger)
        if self.assumptions:
            parts.append(f"This rests on the user's word that {'; '.join(self.assumptions)}.")
        return " ".join(parts)

    def _protection(self, epsilon: float) -> str:
        change = "Adding or removing" if self.adjacency == "add-remove" else "Replacing the content of"
        sound = PLD().name
        kind = self.bounds()[sound].kind
        verb = "would change" if self.seeded else "changes"
        return (
            f"{change} any one person's record {verb} the probability of any outcome by at most a factor e^epsilon, "
            f"plus delta, with epsilon = {up(epsilon)} and delta = {shown_delta(self.delta)} (differential "
            f"privacy, {self.adjacency} adjacency; accountant: {accountant(sound).full}, {kind}). One record "
            "stands for one person; whoever has several records is protected less."
        )

    def _attack(self, best: Attacker) -> str:
        what = "whether a given record was used"
        if self.adjacency == "replace-one":
            what = "which of two versions of a given record was used"
        rates = "; ".join(
            f"at {100 * rate:g}% false alarms they recognise at most {share_up(power)} of the records"
            for rate, power in best.tpr_at_fpr.items()
            if rate == 0.01
        )
        return (
            f"Whoever sees everything that was released, and knows all other records, can tell {what} in at most "
            f"{share_up(best.accuracy)} of cases, where guessing blindly gives 50%; {rates}."
        )

    def _basis(self) -> str:
        released = "; ".join(_describe(event) for event in self.events) or "nothing"
        others = "; ".join(
            f"{accountant(name).full} {up(bound.epsilon)} ({bound.kind})"
            for name, bound in self.bounds().items()
            if name != PLD().name and bound.epsilon is not None
        )
        beside = f" Other accountants give epsilon: {others}." if others else ""
        return f"Released: {released}.{beside}"


@lru_cache(maxsize=256)
def _bounds(events: tuple[Event, ...], delta: float, adjacency: Adjacency) -> dict[str, Bound]:
    return epsilons(events, delta, adjacency)


def _seeded_sentence() -> str:
    return (
        f"{SEEDED.capitalize()}. The noise can be reproduced from its seed, so nothing is protected; what follows "
        "would hold for the same run with fresh noise."
    )


def _no_protection(events: tuple[Event, ...], delta: float, adjacency: Adjacency) -> str:
    if non_private(events) is None and slack(events, adjacency) > delta:
        return (
            f"No privacy is claimed at delta = {shown_delta(delta)}: it is below what the releases leave open by "
            f"themselves, {up(slack(events, adjacency))}."
        )
    reasons = [event.reason for event in events if isinstance(event, NonPrivateEvent)]
    why = f" ({'; '.join(reasons)})" if reasons else ""
    return f"No privacy is claimed: epsilon is infinite, since something was released without protection{why}."


def _describe(event: Event) -> str:
    if isinstance(event, GaussianEvent):
        how = {
            "poisson": f", each record sampled with probability {event.rate:.6g}",
            "fixed-size": f", in batches of {event.rate:.6g} of the records",
            "shuffle": ", in shuffled passes over the records",
            "full-batch": "",
        }[event.sampling]
        unit = "pass" if event.sampling == "shuffle" else "sum"
        plural = unit if event.count == 1 else {"pass": "passes", "sum": "sums"}[unit]
        return (
            f"{event.count} {plural} with Gaussian noise of {event.noise_multiplier:.6g} times the clipping norm{how}"
        )
    if isinstance(event, PureEvent):
        times = "" if event.count == 1 else f"{event.count} times "
        pure, beside = ("", f" and delta {up(event.slack)}") if event.slack else ("pure ", "")
        return f"{times}a result with {pure}epsilon {event.epsilon:.6g}{beside} ({event.adjacency})"
    if isinstance(event, VotesEvent):
        return (
            f"{event.count} counts of votes with Gaussian noise of {event.noise:.6g}, which one voter moves by at most "
            f"{event.moved:.6g}, however its record changes"
        )
    return f"without protection: {event.reason}"


def _kind(bound: Bound) -> str:
    if bound.epsilon is not None and math.isinf(bound.epsilon):
        return f"infinite: {bound.note}" if bound.note else "infinite"
    return bound.kind


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
