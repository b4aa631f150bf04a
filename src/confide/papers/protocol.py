"""One protocol for every comparison: the same number of trials for every method, on the same held-out part.

A method of a comparison brings candidates, as many as every other. `settle` scores each of them by one function, which
sees a held-out part that is public (or has been paid for) and never the test part, and takes the one with the lowest
score. What was tried, what was taken and how far apart the trials were is printed by the run itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from confide.errors import Refusal
from confide.papers.base import Cell, Context, PaperTable
from confide.papers.sets import Set

Candidate: TypeAlias = Mapping[str, Any]
QUICK_TRIALS = 2  # of a quick run, which shows that choosing works and is no result
HELD_OUT_SHARE = 0.3
ASSUMED_PUBLIC = "images that also train, assumed public"
"""Where the settings of a row come from that were chosen on training images: without the assumption they would cost."""
CHOSEN_ON = "settings chosen on"
AS_PRINTED = "as printed"
"""Of a public part: the trials learn from the other records."""


@dataclass(frozen=True)
class Choice:
    """The candidate that was taken, with the score of every trial in the order of the candidates."""

    settings: Candidate
    scores: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.scores)


@dataclass(frozen=True)
class Protocol:
    """What was tried for a comparison.

    about     the held-out part and why it may be looked at
    score     what was measured on it; lower is better
    choices   by method, or by method and budget
    before    what no trial of this protocol chose, by the same keys: settings from earlier trials, or from a paper
    """

    about: str
    score: str
    choices: Mapping[tuple[str, ...], Choice]
    before: Mapping[tuple[str, ...], str] = field(default_factory=dict)

    def of(self, *key: str) -> dict[str, Any]:
        """The settings that were taken."""
        return dict(self.choices[key].settings)

    @property
    def trials(self) -> int:
        """Of every method."""
        return len(next(iter(self.choices.values())).scores)

    def table(self, columns: Sequence[str] = ("method",)) -> PaperTable:
        """Every choice with its score, and the worst trial beside it."""
        rows: list[tuple[Cell, ...]] = []
        for key, choice in self.choices.items():
            worst = max((score for score in choice.scores if math.isfinite(score)), default=math.inf)
            before = self.before.get(key, "nothing")
            rows.append((*key, len(choice.scores), told(choice.settings), choice.best, worst, before))
        heads = (*columns, "trials", "taken", f"held-out {self.score}", "worst trial", "from earlier trials")
        return PaperTable("Protocol: what was tried", heads, tuple(rows), (self.note,))

    @property
    def note(self) -> str:
        return (
            f"{self.trials} trials for every method, scored by {self.score} on {self.about}. The test part had no part."
        )


def settle(
    candidates: Mapping[tuple[str, ...], Sequence[Candidate]],
    trial: Callable[[tuple[str, ...], Candidate], float],
    *,
    about: str,
    score: str,
    context: Context,
    before: Mapping[tuple[str, ...], str] | None = None,
) -> Protocol:
    """Score every candidate and take each method's best; unequal numbers of candidates are refused before any trial."""
    if context.quick:
        candidates = {key: offered[:QUICK_TRIALS] for key, offered in candidates.items()}
    counts = {len(offered) for offered in candidates.values()}
    if len(counts) != 1 or 0 in counts:
        told_counts = ", ".join(f"{' '.join(key)} {len(offered)}" for key, offered in candidates.items())
        raise Refusal(f"candidates: every method of a comparison gets the same number of trials; got {told_counts}")
    choices: dict[tuple[str, ...], Choice] = {}
    total = sum(len(offered) for offered in candidates.values())
    for key, offered in candidates.items():
        scores = []
        for candidate in offered:
            found = trial(key, candidate)
            scores.append(found if math.isfinite(found) else math.inf)  # a run that fell apart is a trial like others
            context.progress("trials", sum(len(each.scores) for each in choices.values()) + len(scores), total)
        choices[key] = Choice(offered[scores.index(min(scores))], tuple(scores))
    return Protocol(about, score, choices, before or {})


def told(settings: Candidate) -> str:
    """Settings in a cell."""
    return ", ".join(f"{name} {_short(value)}" for name, value in settings.items()) or "as they are"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def ran(plan: Any, seeds: tuple[int, ...]) -> str:
    """What a run did, from its plan and not from memory: for the notes under a table."""
    mechanism = plan.mechanism
    noise = f"noise multiplier {mechanism.noise_multiplier:.4g}" if mechanism.private else "no noise"
    clip = f"clip {mechanism.clip:g}" if math.isfinite(mechanism.clip) else "no clip"
    passes = plan.steps * plan.expected_batch / plan.records
    return (
        f"{plan.records} records, {mechanism.sampling} batches of {plan.expected_batch:g} on average, {plan.steps} "
        f"steps ({passes:.3g} passes), {clip}, {noise}; seeds {', '.join(map(str, seeds))}"
    )


def parted(given: Set, public: int) -> tuple[Set, Set]:
    """A set without its last `public` training records, and those as a set of their own whose test part is theirs.

    The first is what private runs learn from and are measured with. The second holds no record of the test part, so
    that no trial can look at it: its own test part is the last of the public records.
    """
    if not 2 <= public < len(given.x):
        raise Refusal(f"public={public}: must be at least 2 and leave some of the {len(given.x)} training records")
    private = len(given.x) - public
    learnt = private + round((1 - HELD_OUT_SHARE) * public)
    return (
        _of(given, slice(0, private), given.x_test, given.y_test),
        _of(given, slice(private, learnt), given.x[learnt:], given.y[learnt:]),
    )


def _of(given: Set, rows: slice, x_test: Any, y_test: Any) -> Set:
    x, y = given.x[rows], given.y[rows]
    return replace(given, x=x, y=y, x_test=x_test, y_test=y_test, schema=replace(given.schema, records=len(x)))


def with_noise_of(plan: Any, records: int) -> Any:
    """A plan for a trial on so many public records, with as much noise in a mean over the batch as `plan` has.

    The same rate, clip and number of steps; its price means nothing, as its records are public.
    """
    from confide.mechanism.plan import plan as planned

    batch = max(1, round(plan.mechanism.rate * records))
    sizes: dict[str, Any] = {"records": records, "batch": batch, "steps": plan.steps, "delta": plan.delta}
    mechanism = plan.mechanism
    if not mechanism.private:
        return planned(private=False, clip=mechanism.clip, **sizes)
    noise = mechanism.noise_multiplier * batch / mechanism.expected_batch
    return planned(noise_multiplier=noise, clip=mechanism.clip, **sizes)
