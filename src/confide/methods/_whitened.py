"""How a sampler moves on a program: in units of what one record says, at a pace that follows from the plan alone.

At a position u let F be the information of one record about u by the program itself (`models.program_sharpness`:
made-up inputs, no record), P the curvature of the prior, and A = F + P / n. With A^-1 = R R^T a move is u' = u + R d,
and what is asked of a record is the gradient in d at d = 0, R^T grad l, whose curvature is about one in every
direction. So one step size suits all parameters, and a clip cuts all of them alike: the plan's clip is the bound, and
the loss is scaled so that it is as wide as noise allows. R is looked for anew on the way, and stays when draws begin.

*Clipping.* Scores are nought on average at the truth; clipped ones are not where their law is skewed, and n records
make many deviations of a small shift. What a clip takes on average by the program's own law is put back (Fisher
consistency: Hampel et al., Robust Statistics, 1986).

*Pace.* With steps of a / n on the sum, batches of b out of n and K steps that count, a chain on a Gaussian posterior is

    h(a) = ( max(1, a p) + a (n - b) / (2 b) ) / (1 - a / 2),       p = n z^2 C^2 / (2 b^2),

times too wide in variance (privacy noise beyond the sampler's own, batches, steps of finite size). It is worth K a / 2
draws, whose scatter is too narrow by a factor of 1 - 2 / (K a), and whose mean is off by as much. Intervals hold what
they should where the two make up for each other, h (1 - 4 / (K a)) = 1: the pace is the a that solves this. It goes to
zero for long chains.

*Few draws.* At temperature 1 a p <= 1, so that a chain is worth K b^2 / (n z^2 C^2) draws at most, which is some
n epsilon^2 / (25 C^2) whatever its length: noise allows no more. The same releases, averaged, know the peak far better
than that. So where a private chain is worth few draws, what it was told after burn-in is remembered, and draws are
those of the belief that it gives. Every record then answers with its score s along R and with s s^T (`share`), clipped
together by a factor c. Scores with what the clip took put back have the slope A = E[c s s^T] in the parameters, which
is just what is released; their mean over K steps is n A (u - peak) with known noise, and the peak is the truth with a
covariance of A^-1 / n at most. A is shrunk towards what the program says of made-up inputs, as far as the two agree.

Positions are released already, so all of this is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from confide.devices import HOST
from confide.methods._trace import LocalPrior
from confide.methods.base import Problem
from confide.models.priors import Prior
from confide.models.program_inputs import used_numbers
from confide.models.program_sharpness import information, taken_by_clips
from confide.models.programs import Program, ProgramLikelihood
from confide.sources.queries import GradientQuery, Loss, Release

MOST_PARAMETERS = 256
"""A matrix of their information is made and inverted."""
FASTEST = 0.3
"""Of the pace: chains of few steps would be faster than where the posterior is a Gaussian at all."""
LEAST_CLIP = 2.0
"""In roots of the number of parameters, which a record's gradient has on average: a narrower one takes too much."""
UNCUT = 50.0
"""In the same: a clip beyond takes next to nothing, and what that is need not be looked for."""
LOOKS = 8
"""How often R is looked for before draws begin."""
FARTHEST_MOVE = 2.0
"""Of a step, in deviations of the prior: where a record seems to say next to nothing, axes are long."""
ENOUGH = 100.0
"""Independent draws: with fewer than these a private chain gives its belief, whose draws cost nothing."""
MOST_TOLD = 40
"""Parameters of such a belief: products of scores are half the square of their number, and noise is in all of them."""
PRODUCTS = 0.5
"""Length of a record's share * s s^T, over that of s, where s is as long as on average."""
SPARE = 0.1
"""Of a belief: a clip may be so wide that noise adds this to the variance that records leave. Laws other than the
program's have their mass further out, and what a clip takes of those nobody puts back."""
WIDER = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Of the least clip: those among which the one is chosen that adds least to a belief's width."""
DOUBT = 0.25
"""Of what a clip takes by the program's law at made-up inputs, is what other inputs may change in it."""
TRUST = 0.1
"""Of the information that the program expects of a record, at least, is what inputs may change in it."""


OF_THE_PRIOR = 100
"""Draws that tell how wide it is."""
_LEAST: WeakKeyDictionary[Program, Tensor] = WeakKeyDictionary()
_USED: WeakKeyDictionary[Program, Tensor] = WeakKeyDictionary()


@dataclass(frozen=True)
class Scaled:
    """A loss times a factor: gradients of another length under the same clip, which is another clip for the loss."""

    loss: Loss
    factor: float

    def __call__(self, output: Any, y: Tensor) -> Tensor:
        return self.loss(output, y) * self.factor


@dataclass(frozen=True)
class Pace:
    """rate: a, the step on the mean gradient; clip: of the loss, along R; factor: what the loss is multiplied by.

    counted, worth   steps after burn-in, and the independent draws that they give
    share   of products of scores in a record's answer; zero where the chain gives its own draws
    """

    rate: float
    clip: float
    factor: float
    counted: int
    worth: float
    share: float

    def with_clip(self, clip: float | None) -> Pace:
        return self if clip is None else replace(self, clip=clip, factor=self.factor * self.clip / clip)

    def at(self, step: int, burn_in: int, haste: float = 1.0) -> float:
        """The rate of a step: while nothing counts yet, chains may be as hot as they are fast."""
        return FASTEST * haste if 2 * step < burn_in or haste > 1 else self.rate


def pace_of(problem: Problem, counted: int) -> Pace:
    """counted: steps after burn-in."""
    plan, size = problem.plan, problem.position.numel()
    records, batch, mechanism = plan.records, plan.expected_batch, plan.mechanism
    least = LEAST_CLIP * math.sqrt(size)
    noise = mechanism.noise_std / mechanism.clip if mechanism.noise_std > 0 else 0.0

    def pace(least: float, share: float) -> Pace:
        heat = records * (noise * least) ** 2 / (2 * batch**2)
        rate = _rate(heat, max(0.0, records / batch - 1) / 2, counted)
        spare = SPARE * counted / records if share else 2 / (rate * records)
        clip = max(least, batch * math.sqrt(spare) / noise)
        return Pace(rate, clip, mechanism.clip / clip, counted, counted * rate / 2, share)

    if noise == 0:
        rate = _rate(0.0, max(0.0, records / batch - 1) / 2, counted)
        return Pace(rate, mechanism.clip, 1.0, counted, counted * rate / 2, 0.0)
    alone = pace(least, 0.0)
    if alone.worth >= ENOUGH or size > MOST_TOLD:
        return alone
    return pace(least * math.sqrt(1 + (LEAST_CLIP * PRODUCTS) ** 2), PRODUCTS / math.sqrt(size))


def _rate(heat: float, batches: float, counted: int) -> float:
    def spare(rate: float) -> float:
        wide = (max(1.0, rate * heat) + rate * batches) / (1 - rate / 2)
        return wide * (1 - 4 / (counted * rate)) - 1

    if spare(FASTEST) <= 0:
        return FASTEST
    low, high = 0.0, FASTEST
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if spare(middle) > 0 else (middle, high)
    return high


def looks(burn_in: int) -> frozenset[int]:
    """Steps after which R is looked for again: the last one well before draws begin."""
    return frozenset(burn_in * look // (LOOKS + 1) for look in range(1, LOOKS + 1)) - {0}


@dataclass(frozen=True)
class Local:
    """At a vector, lower roots of what a record tells of it, with its share of the prior, and the prior's curvature.

    expected   by the program at made-up inputs;  root: after what records have told of themselves
    """

    expected: Tensor
    root: Tensor
    prior: Tensor

    @classmethod
    def at(cls, problem: Problem, own: Prior, position: Tensor, met: Tensor | None) -> Local | None:
        """None where the program does not say what a record tells, and for networks, whose steps do not follow from it.

        met   root of what records tell beyond what made-up inputs have led to expect: N N^T in the axes of L
        """
        program, likelihood = problem.module, problem.likelihood
        if not isinstance(program, Program) or not isinstance(likelihood, ProgramLikelihood) or likelihood.form is None:
            return None
        if position.numel() > MOST_PARAMETERS or position.device != HOST:
            return None
        prior = problem.prior(own)
        try:
            found = information(program, position.detach(), *likelihood.form)
            if found is None:
                return None
            bend = LocalPrior.at(prior.energy, position.detach().double()).precision
            bend = bend + torch.diag((least_precision(program) - bend.diagonal()).clamp(min=0))
            root = torch.linalg.cholesky(found + bend / problem.records)
        except Exception:  # whatever the program does not like here: its own errors come up in the rehearsal
            return None
        return cls(root, root if met is None else root @ met, bend)

    def own_axes(self) -> Tensor:
        """Along which the program itself expects a record, with its share of the prior, to tell one."""
        found: Tensor = torch.linalg.inv(self.expected).mT
        return found

    def told_along(self, axes: Tensor, records: int) -> Tensor:
        """What a record is expected to tell along these axes, without the prior."""
        along = axes.mT @ self.root
        found: Tensor = along @ along.mT - axes.mT @ self.prior @ axes / records
        return found


def least_precision(program: Program) -> Tensor:
    """Of the prior about every number, by draws of it: far out, where a prior falls off like a line, it has none of its
    own, and noise would carry numbers of which records say nothing ever further away."""
    found = _LEAST.get(program)
    if found is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            draws = torch.stack([program.prior_draw() for _ in range(OF_THE_PRIOR)]).double()
        found = _LEAST[program] = torch.nan_to_num(1 / draws.var(0), nan=0.0, posinf=0.0)
    return found


def told_of(problem: Problem, axes: Tensor) -> Tensor | None:
    """Projector onto what records can tell along R at all; None where that is everything.

    A score is R^T s, where s is nought for numbers that are in priors of others alone: all else along R is noise.
    """
    program, likelihood = problem.module, problem.likelihood
    assert isinstance(program, Program)
    assert isinstance(likelihood, ProgramLikelihood)
    used = _USED.get(program)
    if used is None:
        assert likelihood.form is not None
        used = _USED[program] = used_numbers(program, *likelihood.form[:2])
    if bool(used.all()):
        return None
    across, _ = torch.linalg.qr(axes.to(HOST, torch.float64)[used].mT)
    found: Tensor = across @ across.mT
    return found


def axes_of(here: Local, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """R, and how far a step may go."""
    axes, reach = torch.linalg.inv(here.root).mT, FARTHEST_MOVE / here.prior.diagonal().sqrt()
    good = bool(torch.isfinite(axes).all() and torch.isfinite(reach).all())
    return (axes.to(dtype), reach.to(dtype)) if good else None


def query_of(problem: Problem, axes: Tensor, pace: Pace) -> GradientQuery:
    """The gradient in d at d = 0, with products of scores where they are wanted."""
    asked = problem.whitened(pace.share)
    asked.axes.copy_(axes)
    return GradientQuery(asked, Scaled(problem.likelihood.loss, pace.factor))


def of_records(problem: Problem, axes: Tensor, release: Release, pace: Pace) -> Tensor:
    """R^T grad of the records' negative log-likelihood, as it was released, as far as they can tell it."""
    slope = release.sum[: len(axes)] * (problem.records / (release.expected_batch * pace.factor))
    onto = told_of(problem, axes)
    return slope if onto is None else onto.to(slope.dtype) @ slope


def of_prior(problem: Problem, own: Prior, axes: Tensor) -> Tensor:
    """R^T grad of the prior's energy."""
    return axes.mT @ problem.prior(own).add_energy_gradient_(problem.position, torch.zeros_like(problem.position))


@dataclass(frozen=True)
class TakenByClip:
    """A clip, along R, and what it takes on average by the program's own law: of a score, and of its products."""

    clip: float
    scores: Tensor
    products: Tensor

    def doubt(self, records: int, unlike: float = 0.0) -> Tensor:
        """Covariance of the gradient of all records, from inputs that are not like those that were made up.

        unlike   by how much released products of scores differ from what those lead to expect, as a share of it
        """
        return torch.diag(((DOUBT + unlike) * records * self.scores).square())


def cut_of(
    problem: Problem, here: Local, pace: Pace, at: Tensor, clips: Sequence[float], axes: Tensor | None = None
) -> TakenByClip | None:
    """Of the clip that adds least: noise grows with it, and what is taken shrinks. None where that is not known.

    axes   along which scores of the program are like those of records along R. None: those of its own, where R is to be
           where the two agree
    """
    program, likelihood = problem.module, problem.likelihood
    assert isinstance(program, Program)
    assert isinstance(likelihood, ProgramLikelihood)
    size = len(at)
    if likelihood.form is None or min(clips) > UNCUT * math.sqrt(size):
        return None
    try:
        along = here.own_axes() if axes is None else axes
        found = taken_by_clips(program, at, likelihood.form, along, clips, pace.share)
    except Exception:  # whatever the program does not like at this vector
        return None
    if found is None:
        return None
    mechanism, records = problem.plan.mechanism, problem.records
    noise = mechanism.noise_std / mechanism.clip * records / problem.plan.expected_batch
    cuts = [TakenByClip(clip, *taken) for clip, taken in zip(clips, found, strict=True)]
    return min(cuts, key=lambda cut: size * (noise * cut.clip) ** 2 / pace.counted + float(cut.doubt(records).trace()))


def move_(problem: Problem, axes: Tensor, reach: Tensor, step: Tensor) -> None:
    """By R d, no further than a step may go."""
    move = axes @ step
    beyond = float((move / reach).abs().max())
    if not beyond <= 1:
        move = move / beyond if math.isfinite(beyond) else torch.zeros_like(move)
    problem.position.add_(move)
