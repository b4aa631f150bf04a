"""A Laplace approximation that knows its noise: for programs and small networks, from gradients at chosen points."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from confide.devices import HOST
from confide.errors import Refusal
from confide.methods._chain import ChainState
from confide.methods._trace import Line, LocalPrior, Trace, believed, fitted_line
from confide.methods._whitened import Scaled
from confide.methods.base import Method, Problem
from confide.methods.sgld import SGLD
from confide.models.priors import GaussianPrior, Prior
from confide.posteriors.draws import Draws
from confide.sources.queries import GradientQuery, Release

MOST_PARAMETERS = 256
"""Points must explore every direction, and the curvature has a half of its square as many entries."""
WALK, BLOCKS = 0.4, 6
"""Share of the steps that lead to the peak; the clip is looked at so often on the way."""
STAGES = 4
"""In which the rest looks about: the later ones are longer, and each is as wide as the belief before it."""
RATE, LAST_RATE = 0.1, 0.01
"""Of Adam's steps on the way, in deviations of the prior: forty steps cross it."""
LARGEST_UNIT = 2.0
"""A prior that is wider than this says nothing about the length of a step."""
FIRST_RADIUS = 0.05
"""Of the first stage, in the same unit: about what the way leaves open. A stage may be twice as wide as the last."""
REACH = 2.0
"""Points lie so many deviations of the belief away: far enough to see the curvature, near enough for a line."""
RELEASES = 80
"""By default: about thirty for the way, and about fifty points in four stages."""
LARGEST_WAY = 2.0
"""Of the last stage, in deviations: a belief that had to move further was not where it looked about."""
STILL_ON_ITS_WAY = (
    "The belief did not settle: in its last stage it moved by {:.1f} of its own deviations. Intervals of parameters "
    "are not to be relied on; give it more steps."
)


@dataclass(frozen=True)
class LaplaceState:
    """step: releases told so far; point: where the next question is asked; clip: that of narrow questions, in units of
    the loss.

    mean, root       where the belief is, and a root of the covariance that the present stage's points have
    first, second    Adam's moments;  average: of the last positions of the way
    differences      sums of what wide and narrow questions released in the present block or stage, and their numbers
    points ... wide  of all questions after the way
    draws, way       of the belief after the last complete stage, and how far it had to move, in its deviations
    """

    step: int
    point: Tensor = field(repr=False)
    clip: float
    mean: Tensor = field(repr=False)
    root: Tensor = field(repr=False)
    first: Tensor = field(repr=False)
    second: Tensor = field(repr=False)
    average: Tensor = field(repr=False)
    released: Tensor = field(repr=False)
    counts: Tensor = field(repr=False)
    points: Tensor = field(repr=False)
    gradients: Tensor = field(repr=False)
    noise: Tensor = field(repr=False)
    wide: Tensor = field(repr=False)
    draws: Tensor = field(repr=False)
    way: float = 0.0


@dataclass(frozen=True)
class LaplaceApproximation(Method):
    """The posterior of a program or a small network, whose width counts privacy noise, clipping and distance left.

    ask        on the way (two fifths of the steps) the gradient at the present position; then, in four stages, at
               points scattered about the belief in opposite pairs. Every other question has twice the clip
    tell       on the way a step of Adam. After a stage a line through all gradients, G = H (theta - theta_hat), and
               with it the belief; the next stage looks about there
    posterior  draws of N(prior) times N(theta_hat; theta, H^-1 + noise), each with a curvature H as likely as the
               noise allows: see `confide.methods._trace`

    Where wide and narrow questions disagree by more than their noise, records are being clipped that matter, and the
    clip doubles. What they still disagree by in the end stands in the width, as does every residual beyond the known
    noise. Clips are made by scaling the loss, so that the plan's own clip is only where it starts. Points and clips
    depend on earlier releases alone; the rest is post-processing.

    A private program that says what one record tells of its parameters (`confide.methods._whitened`) is asked for
    scores and their products instead, and the belief follows from these: it is that of a short chain of SGLD.

    For models that are smooth and have one peak near the way; at most 256 parameters, and several times as many steps.
    Parameters whose curvature cannot be told from noise keep their prior.

    Papers: MacKay, Neural Computation 1992 (Laplace approximations); Alrawajfeh, Jaelkoe and Honkela, AISTATS 2025 (a
    posterior from the trace of releases); Garcia-Fernandez, Svensson, Morelande and Sarkka, IEEE Transactions on Signal
    Processing 2015 (lines through points of the belief).

    prior   over all parameters, outside the clip; a program brings its own
    """

    prior: Prior = field(default_factory=GaussianPrior)
    name: ClassVar[str] = "laplace"
    noise_in_width: ClassVar[str] = "counted"

    def init(self, problem: Problem) -> LaplaceState | ChainState:
        told = self._told(problem)
        if told is not None:
            return told.init(problem)
        size, rest = problem.position.numel(), problem.plan.steps - _way(problem)
        if size > MOST_PARAMETERS:
            raise Refusal(
                f"module: has {size} trainable parameters, and a Laplace approximation is for at most "
                f"{MOST_PARAMETERS}, since it looks for their curvature; use method sgld, or freeze some"
            )
        start = problem.position.to(HOST, torch.float64, copy=True)
        clip = problem.plan.mechanism.clip
        return LaplaceState(
            step=0,
            point=start,
            clip=clip if math.isfinite(clip) else 1.0,
            mean=start,
            root=torch.diag(FIRST_RADIUS * self._unit(problem, start)),
            first=torch.zeros_like(start),
            second=torch.zeros_like(start),
            average=torch.zeros_like(start),
            released=start.new_zeros(2, size),
            counts=start.new_zeros(2),
            points=start.new_zeros(rest, size),
            gradients=start.new_zeros(rest, size),
            noise=start.new_ones(rest),
            wide=torch.zeros(rest, dtype=torch.bool),
            draws=start.new_zeros(1, size),
        )

    def later(self, problem: Problem, state: LaplaceState | ChainState) -> tuple[Any, ...]:
        return SGLD(prior=self.prior).later(problem, state) if isinstance(state, ChainState) else ()

    def ask(self, problem: Problem, state: LaplaceState | ChainState) -> GradientQuery:
        if isinstance(state, ChainState):
            return SGLD(prior=self.prior).ask(problem, state)
        problem.position.copy_(state.point)
        problem.settle()
        return GradientQuery(problem.module, Scaled(problem.likelihood.loss, _factor(problem, state)))

    def tell(self, problem: Problem, state: LaplaceState | ChainState, release: Release) -> LaplaceState | ChainState:
        if isinstance(state, ChainState):
            return SGLD(prior=self.prior).tell(problem, state, release)
        whole = problem.records / release.expected_batch / _factor(problem, state)
        gradient = release.sum.to(HOST, torch.float64) * whole
        # Without any noise a small one stands for what numbers are rounded to.
        noise = max((release.noise_std * whole) ** 2, 1e-12 * float(gradient.square().mean()), 1e-30)
        row = int(_is_wide(problem, state.step))
        released, counts = state.released.clone(), state.counts.clone()
        counts[row] += 1
        released[row] += gradient
        told = replace(state, released=released, counts=counts)
        if state.step < _way(problem):
            return self._walked(problem, told, gradient, noise)
        return self._looked(problem, told, gradient, noise)

    def posterior(self, problem: Problem, state: LaplaceState | ChainState) -> Draws:
        if isinstance(state, ChainState):
            return SGLD(prior=self.prior).posterior(problem, state)
        draws = state.draws.to(problem.position.dtype)
        problem.position.copy_(draws.mean(0))
        weights = torch.full((len(draws),), 1 / len(draws), dtype=draws.dtype)
        return Draws(problem.module, problem.likelihood, draws, weights, self._facts(problem, state))

    @property
    def releases(self) -> int:
        return RELEASES

    def _told(self, problem: Problem) -> SGLD | None:
        """The chain of a program that remembers scores and their products: its belief needs no points about it."""
        chain = SGLD(prior=self.prior)
        return chain if chain.believes(problem) else None

    # the way to the peak ------------------------------------------------------------------------------------------

    def _walked(self, problem: Problem, state: LaplaceState, gradient: Tensor, noise: float) -> LaplaceState:
        step, way = state.step + 1, _way(problem)
        unit = state.root.diagonal() / FIRST_RADIUS
        slope = problem.prior(self.prior).add_energy_gradient_(state.mean, gradient.clone()) * unit
        first, second = 0.9 * state.first + 0.1 * slope, 0.98 * state.second + 0.02 * slope.square()
        rate = RATE + (LAST_RATE - RATE) * step / way
        length = (second / (1 - 0.98**step)).sqrt() + 1e-300
        mean = state.mean - rate * unit * first / (1 - 0.9**step) / length
        late = step - math.floor(0.7 * way)
        average = state.average + (mean - state.average) / late if late > 0 else state.average
        moved = replace(state, step=step, mean=mean, point=mean, first=first, second=second, average=average)
        if step < way and step % max(4, way // BLOCKS):
            return moved
        known = noise / (4 if _is_wide(problem, state.step) else 1)
        moved = self._clipped_anew(moved, known)
        return self._next_point(problem, replace(moved, mean=average, step=step)) if step == way else moved

    def _clipped_anew(self, state: LaplaceState, narrow: float) -> LaplaceState:
        """Twice the clip where wide and narrow questions disagree; narrow: the noise of one narrow question."""
        blank = replace(state, released=torch.zeros_like(state.released), counts=torch.zeros_like(state.counts))
        if float(state.counts.min()) < 1:
            return blank
        gap = state.released[1] / state.counts[1] - state.released[0] / state.counts[0]
        known = narrow * (1 / state.counts[0] + 4 / state.counts[1])
        excess = float((gap.square() / known).mean())
        return replace(blank, clip=2 * state.clip) if excess > 1 + math.sqrt(2 / len(gap)) else blank

    # looking about ------------------------------------------------------------------------------------------------

    def _looked(self, problem: Problem, state: LaplaceState, gradient: Tensor, noise: float) -> LaplaceState:
        place, step = state.step - _way(problem), state.step + 1
        points, gradients = state.points.clone(), state.gradients.clone()
        noises, wide = state.noise.clone(), state.wide.clone()
        points[place], gradients[place], noises[place] = state.point, gradient, noise
        wide[place] = _is_wide(problem, state.step)
        seen = replace(state, step=step, points=points, gradients=gradients, noise=noises, wide=wide)
        if place + 1 in _ends(problem):
            seen = self._next_stage(problem, seen, place + 1)
        return self._next_point(problem, seen)

    def _next_point(self, problem: Problem, state: LaplaceState) -> LaplaceState:
        """The second of a pair lies opposite to the first."""
        place = state.step - _way(problem)
        if place % 2 and place not in _ends(problem):
            return replace(state, point=2 * state.mean - state.point)
        noise = torch.randn(len(state.mean), generator=problem.generator, dtype=torch.float64)
        return replace(state, point=state.mean + REACH * state.root @ noise)

    def _next_stage(self, problem: Problem, state: LaplaceState, count: int) -> LaplaceState:
        """The belief from all stages so far, and where the next one looks about."""
        line, gap, known = self._line(problem, state, count)
        unsure = torch.outer(gap, gap) * max(0.0, 1 - known / float(gap.square().mean() + 1e-300))
        draws = believed(line, self._energy(problem), state.mean, problem.generator, unsure)
        mean, covariance = draws.mean(0), torch.cov(draws.mT).reshape(draws.shape[1], -1)
        shift = torch.linalg.solve_triangular(state.root, (mean - state.mean)[:, None], upper=False)
        far = float(shift.square().mean().sqrt())
        clip = 2 if float(gap.square().mean()) > known * (1 + math.sqrt(2 / len(gap))) else 1
        last = count == len(state.points)
        return replace(
            state,
            mean=mean if last else state.mean + (mean - state.mean) * min(1.0, 2 * REACH / max(far, 1e-300)),
            root=_widened(state.root, covariance),
            clip=state.clip if last else clip * state.clip,
            draws=draws,
            way=float(((mean - state.mean).square() / covariance.diagonal()).mean().sqrt()),
        )

    def _line(self, problem: Problem, state: LaplaceState, count: int) -> tuple[Line, Tensor, float]:
        """Through all gradients; by how much wide questions of the last stage lie above narrow ones, and its noise."""
        stages = torch.bucketize(torch.arange(count), torch.tensor(_ends(problem)), right=True)
        noise, wide = state.noise[:count], state.wide[:count]
        trace = Trace(state.points[:count], state.gradients[:count], noise, stages)
        line = fitted_line(trace)
        off = line.residuals(trace) * noise[:, None].sqrt()
        ours = stages == stages.max()
        above, below = ours & wide, ours & ~wide
        if not bool(above.any() and below.any()):
            return line, torch.zeros_like(state.mean), 1.0
        excess = float(line.excess[-1])
        known = excess * float(noise[above].sum() / above.sum() ** 2 + noise[below].sum() / below.sum() ** 2)
        return line, off[above].mean(0) - off[below].mean(0), known

    def _facts(self, problem: Problem, state: LaplaceState) -> dict[str, Any]:
        if not bool(state.points.any()):
            return {"draws": len(state.draws)}
        line, _, _ = self._line(problem, state, len(state.points))
        prior = LocalPrior.at(self._energy(problem), state.mean).precision
        sizes, axes = torch.linalg.eigh(line.curvature)
        alone = torch.linalg.inv(prior + (axes * sizes.clamp(min=0)) @ axes.mT).diagonal()
        share = 1 - float((alone / state.draws.var(0)).clamp(max=1).mean().sqrt())
        late = {} if state.way <= LARGEST_WAY else {"warning": STILL_ON_ITS_WAY.format(state.way)}
        return {
            **late,
            "way": round(state.way, 3),
            "draws": len(state.draws),
            "clip_of_the_loss": state.clip,
            "share_of_noise_in_width": round(share, 4),
            "residuals_over_known_noise": round(float(line.excess[-1]), 3),
        }

    def _energy(self, problem: Problem) -> Any:
        return problem.prior(self.prior).energy

    def _unit(self, problem: Problem, point: Tensor) -> Tensor:
        """Deviations of the prior, as lengths of steps."""
        precision = LocalPrior.at(self._energy(problem), point).precision
        found: Tensor = torch.linalg.inv(precision).diagonal().sqrt().clamp(max=LARGEST_UNIT)
        return found


def _way(problem: Problem) -> int:
    return math.floor(WALK * problem.plan.steps)


def _ends(problem: Problem) -> tuple[int, ...]:
    """Questions after the way after which a stage is complete; each of an even number, but for the last."""
    rest = problem.plan.steps - _way(problem)
    ends = {2 * round(rest / 2 * ((stage + 1) / STAGES) ** 1.5) for stage in range(STAGES - 1)}
    return (*sorted(end for end in ends if 0 < end < rest), rest)


def _is_wide(problem: Problem, step: int) -> bool:
    """On the way every other question, then every other pair."""
    way = _way(problem)
    return step % 2 == 1 if step < way else (step - way) // 2 % 2 == 1


def _factor(problem: Problem, state: LaplaceState) -> float:
    """What the loss is multiplied by, so that the plan's clip is the one that is wanted."""
    clip = problem.plan.mechanism.clip
    wanted = state.clip * (2 if _is_wide(problem, state.step) else 1)
    return clip / wanted if math.isfinite(clip) else 1.0


def _widened(root: Tensor, covariance: Tensor) -> Tensor:
    """A root of the covariance, in every direction between a quarter and twice as wide as the root before."""
    half = torch.linalg.solve_triangular(root, covariance, upper=False)
    inner = torch.linalg.solve_triangular(root, half.mT, upper=False)
    values, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
    kept = (vectors * values.clamp(min=1 / 16, max=4.0)) @ vectors.mT
    found: Tensor = torch.linalg.cholesky(root @ ((kept + kept.mT) / 2) @ root.mT)
    return found
