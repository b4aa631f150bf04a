"""Record what crossed the boundary, and run again from the recording alone.

A method is post-processing of its releases. `Recorder` keeps them; `Replay` answers from them with the data absent. If
the second run gives a bit-identical posterior, nothing but the releases reached the method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from confide.data.schema import Schema
from confide.errors import Refusal
from confide.mechanism.gaussian import SampledGaussian
from confide.sources.queries import Query, Release


class Recorder:
    """Passes queries on to a source and keeps a copy of every release."""

    def __init__(self, source: object) -> None:
        self._source = source
        self.schema: Schema = source.schema  # type: ignore[attr-defined]
        self.seeded: bool = source.seeded  # type: ignore[attr-defined]
        self.releases: list[Release] = []

    def rehearse(self, query: Query) -> None:
        self._source.rehearse(query)  # type: ignore[attr-defined]

    def charge(self, mechanism: SampledGaussian, steps: int, purpose: str = "") -> None:
        self._source.charge(mechanism, steps, purpose)  # type: ignore[attr-defined]

    def charge_all(self, parts: Sequence[tuple[SampledGaussian, int]], purpose: str = "") -> None:
        self._source.charge_all(parts, purpose)  # type: ignore[attr-defined]

    def answer(self, query: Query, mechanism: SampledGaussian, purpose: str = "") -> Release:
        release: Release = self._source.answer(query, mechanism, purpose)  # type: ignore[attr-defined]
        self.releases.append(replace(release, sum=release.sum.clone()))
        return release


class Replay:
    """Answers from recorded releases, in order; holds no data and charges nothing."""

    def __init__(self, releases: list[Release], schema: Schema, seeded: bool = False) -> None:
        self._left = iter(releases)
        self.schema = schema
        self.seeded = seeded

    def rehearse(self, query: Query) -> None:
        """There are no records whose shape could be tried."""

    def charge(self, mechanism: SampledGaussian, steps: int, purpose: str = "") -> None:
        """Nothing is read, so nothing is charged."""

    def charge_all(self, parts: Sequence[tuple[SampledGaussian, int]], purpose: str = "") -> None:
        """Nothing is read, so nothing is charged."""

    def answer(self, query: Query, mechanism: SampledGaussian, purpose: str = "") -> Release:
        release = next(self._left, None)
        if release is None:
            raise Refusal("releases: the recording is shorter than the run; record the whole run first")
        return replace(release, sum=release.sum.clone())
