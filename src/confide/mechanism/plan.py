"""The plan: everything about a run that is fixed before the first record is read.

    confide.plan(epsilon=1, delta=1e-5, records=60_000, batch=1024, epochs=20)

calibrates the noise so that the sound epsilon of the whole run stays at or below the target. A plan is public: it
depends on declared sizes, never on records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from confide import rules
from confide.errors import Refusal
from confide.mechanism.gaussian import ClippingStyle, SampledGaussian
from confide.privacy.events import Adjacency, Event, Sampling
from confide.wording import delta as shown_delta
from confide.wording import html_table, hyphened


@dataclass(frozen=True)
class Plan:
    """Blocks of (mechanism, steps), run one after the other; nearly always a single block.

    target_epsilon  what the noise was calibrated for; None: the noise was given
    chains          how often the plan may be run within the target
    spent           releases that share the target with all runs
    counted         releases beside each run that share the target, such as a clip's counts; see `beside`
    """

    blocks: tuple[tuple[SampledGaussian, int], ...]
    delta: float
    adjacency: Adjacency = "add-remove"
    target_epsilon: float | None = None
    chains: int = 1
    spent: tuple[Event, ...] = ()
    counted: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        if not self.blocks or any(steps < 1 for _, steps in self.blocks):
            raise Refusal(f"blocks={self.blocks}: a plan needs at least one step in every block")
        if not 0 < self.delta < 1:
            raise Refusal(f"delta={self.delta}: must be in (0, 1); a common choice is below 1 / records")

    @property
    def mechanism(self) -> SampledGaussian:
        """The first block's mechanism; later blocks differ from it in their noise, or in their clip by `with_clips`."""
        return self.blocks[0][0]

    @property
    def steps(self) -> int:
        return sum(steps for _, steps in self.blocks)

    @property
    def records(self) -> int:
        return self.mechanism.records

    @property
    def expected_batch(self) -> float:
        return self.mechanism.expected_batch

    def events(self) -> tuple[Event, ...]:
        """What the whole run costs."""
        return tuple(mechanism.event(steps) for mechanism, steps in self.blocks)

    def secured(self) -> Plan:
        """The same plan with noise on a lattice."""
        return replace(self, blocks=tuple((replace(mechanism, secure=True), steps) for mechanism, steps in self.blocks))

    def beside(self, events: tuple[Event, ...]) -> Plan:
        """The same plan, with as much more noise as its target needs if every run of it releases these events too."""
        if self.target_epsilon is None or not events or set(events) <= set(self.counted):
            return self
        if len(self.blocks) > 1:
            raise Refusal(
                f"blocks={len(self.blocks)}: what is released beside a plan can be brought within its target for one "
                "block of steps; give a plan of one block, or the noise itself by noise_multiplier="
            )
        from confide.privacy.calibration import noise_multiplier_for

        ((mechanism, steps),) = self.blocks
        counted = (*self.counted, *events)
        found = noise_multiplier_for(
            epsilon=self.target_epsilon,
            delta=self.delta,
            steps=mechanism.event(steps).count * self.chains,
            rate=mechanism.rate,
            sampling=mechanism.sampling,
            adjacency=self.adjacency,
            records=mechanism.records,
            spent=(*self.spent, *(replace(event, count=event.count * self.chains) for event in counted)),
        )
        noisier = replace(mechanism, noise_multiplier=max(found, mechanism.noise_multiplier))
        return replace(self, blocks=((noisier, steps),), counted=counted)

    def with_clips(self, clips: Sequence[float]) -> Plan:
        """The same plan with clips that change over time: a public schedule, each for an equal part of the steps.

        Noise goes with the clip, so that every block's event is what it was, and the price with it. For methods that
        ask for gradients; the others are told their unit by the first clip, and refuse.
        """
        if len(self.blocks) > 1:
            raise Refusal(f"blocks={len(self.blocks)}: a schedule of clips is for a plan of one block")
        ((mechanism, steps),) = self.blocks
        if not 1 <= len(clips) <= steps:
            raise Refusal(f"clips={list(clips)}: need at least one and at most one per step, {steps}")
        ends = [round(steps * place / len(clips)) for place in range(len(clips) + 1)]
        lengths = [after - before for before, after in pairwise(ends)]
        blocks = tuple((replace(mechanism, clip=clip), count) for clip, count in zip(clips, lengths, strict=True))
        return replace(self, blocks=blocks)

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object]] = [("records", f"{self.records:,}"), ("steps", f"{self.steps:,}")]
        for mechanism, steps in self.blocks:
            about = f"{steps:,} steps" if len(self.blocks) > 1 else "every step"
            noise = f"{mechanism.noise_multiplier:.4g}" if mechanism.private else "none: not private"
            rows.append((about, f"{mechanism.sampling}, about {mechanism.expected_batch:g} records, clip "
                         f"{mechanism.clip:g}, noise multiplier {noise}"))  # fmt: skip
        target = "the noise was given" if self.target_epsilon is None else f"{self.target_epsilon:g}"
        budget = f"{shown_delta(self.delta)}, {self.adjacency}"
        return html_table("Plan", [*rows, ("target epsilon", target), ("delta", budget)])

    def mechanisms(self) -> Iterator[SampledGaussian]:
        """The mechanism of every step, in order."""
        for mechanism, steps in self.blocks:
            for _ in range(steps):
                yield mechanism


def plan(
    *,
    delta: float,
    records: int,
    batch: int | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    clip: float = rules.CLIP,
    sampling: Sampling = rules.SAMPLING,
    adjacency: Adjacency = rules.ADJACENCY,
    clipping: ClippingStyle = "flat",
    chains: int = 1,
    private: bool = True,
    spent: Iterable[Event] = (),
) -> Plan:
    """Calibrate a run. Give `epsilon` (the noise follows) or `noise_multiplier` (the epsilon follows).

    records    public nominal number of records; batch: expected records per step (all of them for full-batch)
    epochs     passes over the data; or `steps` directly
    clip       largest norm of one record's answer
    chains     how often the plan will be run; epsilon covers all of them together
    private    False: no noise, marked as not private everywhere
    spent      releases beside this run that share its epsilon, such as a private count
    """
    if chains < 1:
        raise Refusal(f"chains={chains}: must be at least 1")
    sampling, adjacency, clipping = hyphened(sampling), hyphened(adjacency), hyphened(clipping)
    rate = _rate(records, batch, sampling)
    count = _steps(epochs, steps, rate)
    if not private:
        mechanism = SampledGaussian(0.0, clip, rate, records, sampling, clipping, private=False)
        return Plan(((mechanism, count),), delta, adjacency)
    if (epsilon is None) == (noise_multiplier is None):
        raise Refusal(
            f"epsilon={epsilon}, noise_multiplier={noise_multiplier}: give exactly one of the two "
            "(or private=False for a run without protection)"
        )
    draft = SampledGaussian(noise_multiplier or 1.0, clip, rate, records, sampling, clipping)
    if epsilon is None:
        return Plan(((draft, count),), delta, adjacency)
    from confide.privacy.calibration import noise_multiplier_for

    before = tuple(spent)
    passes_or_steps = draft.event(count).count
    found = noise_multiplier_for(
        epsilon=epsilon,
        delta=delta,
        steps=passes_or_steps * chains,
        rate=rate,
        sampling=sampling,
        adjacency=adjacency,
        records=records,
        spent=before,
    )
    calibrated = replace(draft, noise_multiplier=found)
    return Plan(((calibrated, count),), delta, adjacency, epsilon, chains, before)


def _rate(records: int, batch: int | None, sampling: Sampling) -> float:
    if records < 2:
        raise Refusal(f"records={records}: need at least 2")
    if sampling == "full-batch":
        if batch not in (None, records):
            raise Refusal(f"batch={batch}: full-batch sampling uses all {records} records; leave batch out")
        return 1.0
    if batch is None or not 1 <= batch <= records:
        raise Refusal(f"batch={batch}: must be between 1 and records={records}")
    return batch / records


def _steps(epochs: float | None, steps: int | None, rate: float) -> int:
    if (epochs is None) == (steps is None):
        raise Refusal(f"epochs={epochs}, steps={steps}: give exactly one of the two")
    count = steps if steps is not None else max(1, round((epochs or 0) / rate)) if (epochs or 0) > 0 else 0
    if count < 1:
        raise Refusal(f"epochs={epochs}, steps={steps}: must be greater than 0")
    return count
