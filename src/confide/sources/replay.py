"""Record what crossed the boundary, and run again from the recording alone.

A method is post-processing of its releases. `Recorder` keeps them; `Replay` answers from them with the data absent. If
the second run gives a bit-identical posterior, nothing but the releases reached the method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from confide.data.schema import Schema
from confide.data.trees import Tree
from confide.errors import Refusal
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.mechanism.posterior_sampling import PosteriorSampling
from confide.privacy.events import Event
from confide.sources.base import Part, Receipt, Source, Stretch, Wrapper, leased, priced
from confide.sources.crew import ALONE
from confide.sources.queries import Query, Release


class Recorder(Wrapper):
    """Passes queries on to a source and keeps a copy of every release and of every draw."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.releases: list[Release] = []
        self.draws: list[Tensor] = []

    def answer(
        self, query: Query, mechanism: SampledGaussian, receipt: Receipt | None = None, purpose: str = ""
    ) -> Release:
        release = super().answer(query, mechanism, receipt, purpose)
        self.releases.append(replace(release, sum=release.sum.clone()))
        return release

    def draw(self, mechanism: PosteriorSampling, purpose: str = "") -> Tensor:
        drawn = super().draw(mechanism, purpose)
        self.draws.append(drawn.clone())
        return drawn


class Replay:
    """Answers from recorded releases and draws, in order; holds no data and charges nothing."""

    name = ""
    ledger = None
    crew = ALONE
    assumptions: tuple[str, ...] = ()

    def __init__(
        self,
        releases: Sequence[Release],
        schema: Schema,
        seeded: bool = False,
        draws: Sequence[Tensor] = (),
        form: tuple[Tree, Tensor] | None = None,
    ) -> None:
        self._releases, self._draws, self._form = iter(releases), iter(draws), form
        self.schema = schema
        self.seeded = seeded

    def within(self, plan: Plan) -> Plan:
        return plan

    def price(self, parts: Sequence[Part]) -> tuple[Event, ...]:
        """What the recorded run cost."""
        return priced(parts)

    def form(self) -> tuple[Tree, Tensor] | None:
        """That of the recorded run, if it was given (`Recorder.form()`): steps of a program follow from it."""
        return self._form

    def rehearse(self, query: Query) -> None:
        """There are no records whose shape could be tried."""

    def charge(self, parts: Sequence[Part], purpose: str = "", stretch: Stretch | None = None) -> Receipt:
        """Nothing is read, so nothing is charged."""
        return Receipt(priced(parts), leased(parts if stretch is None else stretch.parts))

    def answer(
        self, query: Query, mechanism: SampledGaussian, receipt: Receipt | None = None, purpose: str = ""
    ) -> Release:
        release = next(self._releases, None)
        if release is None:
            raise Refusal("releases: the recording is shorter than the run; record the whole run first")
        return replace(release, sum=release.sum.clone())

    def draw(self, mechanism: PosteriorSampling, purpose: str = "") -> Tensor:
        drawn = next(self._draws, None)
        if drawn is None:
            raise Refusal("draws: the recording holds no further draw; record the whole run first")
        return drawn.clone()

    def check_resumable(self) -> None:
        """A recording can be read from any step on."""
