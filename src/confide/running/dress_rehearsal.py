"""The way after the last step, gone once before anything is charged: posterior, predict, save, load, report.

A posterior is paid for and cannot be had again without paying again. So the method first makes one of made-up releases,
noise alone, as of empty batches; it predicts made-up records, is saved, and is loaded by the same words that another
process would use: what is confide's own from the file alone, what is one's own given anew. Whatever fails here would
have failed after the charge.
"""

from __future__ import annotations

import copy
import itertools
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from confide.data.trees import size_of
from confide.errors import Refusal
from confide.mechanism.clipping import Recordwise
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.methods.base import Method, Problem
from confide.models.flat import copied, put_back_
from confide.models.likelihoods import Likelihood, is_own
from confide.models.predictive import KINDS_OF_PREDICTIVE, Predictive
from confide.models.programs import Program
from confide.posteriors.base import Posterior
from confide.posteriors.description import one_sentence
from confide.posteriors.files import KINDS, POSTERIOR, load_posterior
from confide.report.words import settings, shown
from confide.sources.base import Source
from confide.sources.queries import Query, Release, StatisticQuery
from confide.wording import json_text

FEW_STEPS = 2
"""Of a rehearsed run: one that a sampler throws away and one that it keeps. A method that cannot do with so few goes
through all of its steps."""

Found = TypeVar("Found")


@dataclass(frozen=True)
class Cast:
    """What the user gave: a posterior of it must be had again from a file, with these and nothing else."""

    method: Method
    module: nn.Module
    likelihood: Likelihood


def dress_rehearsal(cast: Cast, problem_for: Callable[[Plan], Problem], data: Source, plan: Plan) -> None:
    """Refuse what could not be used after it was paid for. Nobody's random stream moves, and nothing is written.

    problem_for   makes the public side of a run under another plan
    """
    with torch.random.fork_rng(devices=[]):
        posterior = _posterior(cast.method, problem_for, plan)
        if isinstance(getattr(posterior, "module", None), nn.Module):
            put_back_(posterior.module, cast.module)

        def used(x: Any, y: Any) -> Tensor:
            _used(posterior, cast, x)
            return torch.zeros(size_of(x), 1, dtype=torch.float64)

        data.rehearse(StatisticQuery(Recordwise(used), 1))


def _posterior(method: Method, problem_for: Callable[[Plan], Problem], plan: Plan) -> Posterior:
    short = replace(plan, blocks=((plan.mechanism, min(FEW_STEPS, plan.steps)),))
    try:
        return _run(method, problem_for(short))
    except Exception as error:
        if plan.steps <= FEW_STEPS:
            _refuse("method", method.name, "make a posterior of releases that are noise alone", error)
    try:
        return _run(method, problem_for(plan))
    except Exception as error:
        _refuse("method", method.name, "make a posterior of releases that are noise alone", error)


def _run(method: Method, problem: Problem) -> Posterior:
    state = method.init(problem)
    noise = torch.Generator().manual_seed(0)
    for mechanism in itertools.islice(problem.plan.mechanisms(), problem.plan.steps):
        state = method.tell(problem, state, _noise_alone(method.ask(problem, state), mechanism, noise))
    return method.posterior(problem, state)


def _noise_alone(query: Query, mechanism: SampledGaussian, generator: torch.Generator) -> Release:
    """What an empty batch gives."""
    std = mechanism.noise_std if math.isfinite(mechanism.noise_std) else 0.0
    total = torch.randn(query.size, generator=generator, dtype=query.dtype).mul_(std)
    return Release(total, mechanism.noise_std, mechanism.event(), mechanism.expected_batch)


def _used(posterior: Posterior, cast: Cast, x: Any) -> None:
    """Everything that is done with a finished posterior, on made-up records."""
    own = f"{type(cast.module).__name__} with {cast.likelihood.name}"
    # A posterior of a method of one's own may be made for files alone, and a program for its parameters alone.
    silent = isinstance(cast.module, Program) and cast.module.predict is None
    predicts = isinstance(posterior, Posterior) and not silent

    def said() -> list[Tensor]:
        return _tried("module, likelihood", own, "predict", lambda: _said(posterior, x)) if predicts else []

    before = said()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / POSTERIOR
        _tried("method", cast.method.name, "save its posterior", lambda: posterior.save(path))
        loaded = _tried("module, likelihood", own, "be loaded again", lambda: _loaded(path, posterior, cast))
        later = "predict after it was loaded"
        found = _tried("module, likelihood", own, later, lambda: _said(loaded, x)) if predicts else []
    if not _same(before, found) and _same(before, said()):
        raise Refusal(
            f"module, likelihood: {own} predicts something else after it was saved and loaded, so it keeps something "
            "outside of its parameters and buffers; register that as a buffer, and nothing was charged"
        )
    _tried("method", cast.method.name, "be written down in run.json and the report", lambda: _written(posterior, cast))


def _loaded(path: Path, posterior: Posterior, cast: Cast) -> Posterior:
    """As another process would: by name and recipe, and where those do not suffice, with what was given, given anew."""
    likelihood = None if is_own(posterior.likelihood) else copy.deepcopy(cast.likelihood)
    kind = None if type(posterior) in KINDS else type(posterior)
    try:
        return load_posterior(path, likelihood=likelihood, kind=kind)
    except Refusal as error:
        if "module=None" not in str(error):
            raise
        return load_posterior(path, copied(cast.module), likelihood=likelihood, kind=kind)


def _said(posterior: Posterior, x: Any) -> list[Tensor]:
    """What a posterior answers to the inputs, as numbers."""
    predictive: Any = posterior.predict(x)
    if not isinstance(predictive, KINDS_OF_PREDICTIVE):
        kinds = ", ".join(kind.__name__ for kind in KINDS_OF_PREDICTIVE)
        raise Refusal(f"predictive() of the likelihood gave {type(predictive).__name__}, and one of {kinds} is needed")
    found: Predictive = predictive
    summary = posterior.summary(x)
    parts = [found.epistemic, found.aleatoric, summary.centre, summary.total]
    if any(len(part) != len(summary.centre) for part in parts):
        raise Refusal("predictive() of the likelihood does not have one entry for every input")
    return parts


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-6, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


def _written(posterior: Posterior, cast: Cast) -> None:
    parts = {"method": settings(cast.method), "facts": dict(posterior.facts)}
    json_text(parts, pretty=True, infinity_as_text=True)
    for part in parts.values():
        for value in part.values():
            shown(value)


def _tried(argument: str, value: str, what: str, step: Callable[[], Found]) -> Found:
    try:
        return step()
    except Exception as error:
        _refuse(argument, value, what, error)


def _refuse(argument: str, value: str, what: str, error: Exception) -> NoReturn:
    raise Refusal(
        f"{argument}: {value} could not {what} ({type(error).__name__}: {one_sentence(error)}); nothing was charged: "
        "mend it, or use one of confide's own"
    ) from error
