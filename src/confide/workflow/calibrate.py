"""The plan of a request: noise from public sizes, all releases of the fit together within its epsilon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from confide import rules
from confide.errors import Refusal
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan, plan
from confide.methods.base import Method
from confide.privacy.calibration import noise_multiplier_for
from confide.privacy.events import Adjacency, Event, Sampling
from confide.workflow.request import Request

MOST_KEPT = 256  # far more than the fits of a comparison or a search ask for
_found: dict[tuple[Any, ...], float] = {}
"""Noise multipliers by what they were asked for."""


def multiplier_for(
    epsilon: float,
    delta: float,
    releases: int,
    rate: float,
    sampling: Sampling,
    adjacency: Adjacency,
    records: int | None = None,
    spent: tuple[Event, ...] = (),
) -> float:
    """The noise multiplier; kept, for folds and methods ask for the same one again."""
    asked = (epsilon, delta, releases, rate, sampling, adjacency, records, spent)
    found = _found.get(asked)
    if found is None:
        found = noise_multiplier_for(epsilon, delta, releases, rate, sampling, adjacency, records=records, spent=spent)
        keep({asked: found})
    return found


def kept() -> dict[tuple[Any, ...], float]:
    """All noise that this process has found, for another one to `keep`: to find it takes half a second each."""
    return dict(_found)


def keep(found: Mapping[tuple[Any, ...], float]) -> None:
    if len(_found) + len(found) > MOST_KEPT:
        _found.clear()
    _found.update(found)


def one_release(request: Request, share: float) -> SampledGaussian:
    """A full-batch release of norm 1 beside the fit, for a share of its epsilon."""
    multiplier = multiplier_for(share * request.epsilon, request.delta, 1, 1.0, "full-batch", request.adjacency)
    return SampledGaussian(multiplier, 1.0, 1.0, 1, "full-batch", secure=request.secure)


def plan_of(request: Request, records: int, method: Method, spent: tuple[Event, ...] = ()) -> Plan:
    """The calibrated plan of one chain; all chains, and what is `spent` beside them, stay within epsilon.

    The request has its clip, by the rule of `network.clip_of` or given; None stands for that of all other methods.
    """
    draft = _draft(_as_the_method_wants(request, records, method), records)
    mechanism, steps = draft.blocks[0]
    event = mechanism.event(steps)
    opening = _opening(request, mechanism, method)
    beside = tuple(one.event(count * request.chains) for one, count in opening)
    multiplier = multiplier_for(
        request.epsilon,
        request.delta,
        event.count * request.chains,
        mechanism.rate,
        mechanism.sampling,
        request.adjacency,
        records if mechanism.sampling in ("fixed-size", "shuffle") else None,
        (*spent, *beside),
    )
    mechanism = replace(mechanism, noise_multiplier=multiplier, secure=request.secure)
    if request.clip_schedule and (opening or not method.follows_clip):
        told = list(request.clip_schedule)
        raise Refusal(f"clip_schedule={told}: {method.name} has one unit for all steps; name another method, as sgld")
    made = replace(
        draft,
        blocks=(*opening, (mechanism, steps)),
        target_epsilon=request.epsilon,
        chains=request.chains,
        spent=spent,
    )
    return made.with_clips(request.clip_schedule) if request.clip_schedule else made


def _opening(request: Request, mechanism: SampledGaussian, method: Method) -> tuple[tuple[SampledGaussian, int], ...]:
    """The block of releases about all records that a method asks for before its batches, if any.

    A number of steps that was given is kept to: the method then takes its opening from among them.
    """
    found = method.opening
    if found is None or request.steps is not None or mechanism.sampling == "full-batch":
        return ()
    answers = found.releases * request.chains
    multiplier = multiplier_for(
        found.share * request.epsilon, request.delta, answers, 1.0, "full-batch", request.adjacency
    )
    whole = replace(mechanism, noise_multiplier=multiplier, rate=1.0, sampling="full-batch", secure=request.secure)
    return ((whole, found.releases),)


def _as_the_method_wants(request: Request, records: int, method: Method) -> Request:
    """A method that wants releases about all records, or batches of its own size, has them, unless something was said
    about batches, steps or sampling."""
    said = (request.batch, request.epochs, request.steps) != (None, None, None) or request.sampling != rules.SAMPLING
    if said:
        return request
    if method.releases is not None:
        return replace(request, sampling="full-batch", steps=method.releases)
    found = method.opening
    if found is None:
        return request
    batch = None if request.counted else rules.default_batch(records, found.batches)
    return replace(request, epochs=found.epochs, batch=batch)


def _draft(request: Request, records: int) -> Plan:
    """The plan before its noise is known."""
    epochs = request.epochs if request.epochs or request.steps else rules.EPOCHS
    batch = request.batch
    if batch is None and request.sampling != "full-batch":
        batch = rules.default_batch(records)
    size = records
    if request.counted and request.sampling != "full-batch":
        # The rate rests on no count: it is that of one record out of so many.
        batch, size = 1, round(1 / rules.COUNTED_RATE)
    draft = plan(
        delta=request.delta,
        records=size,
        batch=batch,
        epochs=epochs,
        steps=request.steps,
        noise_multiplier=1.0,
        clip=rules.CLIP if request.clip is None else request.clip,
        sampling=request.sampling,
        adjacency=request.adjacency,
        clipping=request.clipping,
    )
    mechanism, steps = draft.blocks[0]
    return replace(draft, blocks=((replace(mechanism, records=records), steps),))
