"""What the samplers share: a schedule of steps, burn-in, thinning, and the draws that were kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from confide.devices import HOST, normals
from confide.errors import Refusal
from confide.methods._heard import Heard, heard_draws, most_in_their_midst
from confide.methods._scouts import GENERATIONS, Scouts, each_generation, sent_out
from confide.methods._told import SURE_WAY, Told, belief_of, far_off, met_anew, prior_draws
from confide.methods._whitened import (
    UNCUT,
    WIDER,
    Local,
    Pace,
    axes_of,
    cut_of,
    looks,
    move_,
    of_prior,
    of_records,
    pace_of,
    query_of,
)
from confide.methods.base import Method, Problem
from confide.models.priors import GaussianPrior, Prior
from confide.posteriors.draws import Draws
from confide.sources.queries import GradientQuery, Release

CLIP_UNKNOWN = (
    "What clipping does to this program is not known, since the values that y can take were not found; intervals of "
    "parameters are not to be relied on."
)
FEWEST_TOLD = 8
"""A run that was ended before so many questions counted gives its chain."""
NO_PEAK = (
    "What was released does not tell of one peak (a belief would lie {:.1f} of its deviations from where was asked, "
    "slopes scatter {:.1f} times as much as their noise, their products are off by {:.0%} of what the program expects, "
    "scores bend by {:.1f} in it, and {:.0%} of it is where the program is as sharp as in its midst): draws are those "
    "of {}. Use more steps, a larger budget, or start values nearer to the truth."
)
OF_SCOUTS = (
    "what scouts were told: releases do not tell of one peak",
    "what the first releases say about vectors of the prior, which is less than a peak would",
)
OF_THE_PRIOR = ("the prior: releases do not tell of one peak", "the prior, and say nothing of the records")
"""Whose draws they are, and what that means, where there is no peak."""
RESTS_ON = (
    "The belief rests on one peak, and on inputs like those that were made up within the declared bounds; where either "
    "fails, intervals of parameters hold the truth less often than they say."
)
"""Said of every belief: nothing that was released tells whether it is so, and programs were seen where it was not."""
MOST_HASTE = 4.0
"""Of the fastest pace: where that takes a chain past the peak it still comes back."""
LEAST_COUNTED = 0.5
"""Of the steps after burn-in: so many are left for the belief, however far the peak was when burn-in ended."""
MOST_DRAWS = 100  # by default: predictions cost in proportion, and draws of one chain resemble each other


@dataclass(frozen=True)
class ChainState:
    """step: releases told so far; draws: kept positions; weights: the step size at each.

    axes, reach   of a program: along which it moves, and how far at most (`_whitened`)
    taken, clip   by the clip from a record's gradient along them, on average, and the clip: since they were looked for
    told          since then: what its belief is made of, where the chain is worth few draws
    met           what records tell beyond what made-up inputs have led to expect (`_told`)
    haste         of the pace while the peak is far: what was told since the last look leaves no doubt that it is
    scouts        vectors that are asked about before the chain of a program begins (`_scouts`)
    heard         what they were told, for a chain that does not arrive (`_heard`)
    """

    step: int = 0
    draws: tuple[Tensor, ...] = field(default=(), repr=False)
    weights: tuple[float, ...] = ()
    axes: Tensor | None = field(default=None, repr=False)
    reach: Tensor | None = field(default=None, repr=False)
    taken: Tensor | None = field(default=None, repr=False)
    clip: float | None = None
    told: Told = field(default_factory=Told, repr=False)
    met: Tensor | None = field(default=None, repr=False)
    haste: float = 1.0
    scouts: Scouts | None = None
    heard: tuple[Heard, ...] = field(default=(), repr=False)


StateType = TypeVar("StateType", bound=ChainState)


@dataclass(frozen=True)
class Chain(Method):
    """Settings of every sampler.

    prior       over all parameters, outside the clip
    step_size   at the first step; None: such that the release's noise is exactly what the sampler needs
    decay       the step at time t is step_size * t^(-decay); 1/3 in Li et al. (2019), 0 for a fixed step
    burn_in     fraction of the steps that is thrown away
    thinning    keep one in so many positions after burn-in; None: as few as give at most 100 draws
    """

    prior: Prior = field(default_factory=GaussianPrior)
    step_size: float | None = None
    decay: float = 0.0
    burn_in: float = 0.5
    thinning: int | None = None
    may_stop: ClassVar[bool] = True
    noise_in_width: ClassVar[str] = "counted, as far as the chain has mixed"
    follows_clip: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.step_size is not None and not (math.isfinite(self.step_size) and self.step_size > 0):
            raise Refusal(f"step_size={self.step_size}: must be a finite number > 0, or None to follow the noise")
        if not 0 <= self.decay < 1:
            raise Refusal(f"decay={self.decay}: must be in [0, 1)")
        if not 0 <= self.burn_in < 1:
            raise Refusal(f"burn_in={self.burn_in}: must be a fraction in [0, 1)")
        if self.thinning is not None and self.thinning < 1:
            raise Refusal(f"thinning={self.thinning}: must be at least 1")

    def ask(self, problem: Problem, state: Any) -> GradientQuery:
        if state.scouts is not None:
            return state.scouts.query(problem)  # type: ignore[no-any-return]
        if state.axes is None:
            return problem.gradient_query
        return query_of(problem, state.axes, self._pace(problem, state))

    def later(self, problem: Problem, state: Any) -> tuple[Any, ...]:
        return () if state.scouts is None else (replace(state, scouts=None),)

    def _begun(self, problem: Problem, state: StateType) -> StateType:
        """Before the first step: along the axes of a program, where its belief is asked for with scouts ahead."""
        state = self._aligned(problem, state)
        told = state.axes is not None and self._pace(problem).share > 0
        if not told or each_generation(self.burn_in_steps(problem)) == 0:
            return state
        return replace(state, scouts=sent_out(problem))

    def scouted(self, problem: Problem, state: StateType, release: Release) -> StateType:
        """A step before the chain begins, which it does where scouts have found it best."""
        assert state.scouts is not None
        scouts, each = state.scouts.told(problem, release), each_generation(self.burn_in_steps(problem))
        if (state.step + 1) % each:
            return replace(state, scouts=scouts)
        if state.step + 1 < each * GENERATIONS:
            return replace(state, scouts=scouts.drawn_anew(problem))
        heard = scouts.all_heard()
        found = heard_draws(problem, heard)
        problem.position.copy_(scouts.midst() if found is None else most_in_their_midst(found))
        return self._aligned(problem, replace(state, scouts=None, heard=heard))

    def _aligned(self, problem: Problem, state: StateType) -> StateType:
        """With the axes of a program at its present position, where steps follow from public rules."""
        at = problem.position.detach()
        here = Local.at(problem, self.prior, at, state.met) if self.step_size is None else None
        found = None if here is None else axes_of(here, at.dtype)
        if here is None or found is None:
            return state
        pace = self._pace(problem)
        clips = [pace.clip * wider for wider in (WIDER if pace.share else (1.0,))]
        cut = cut_of(problem, here, pace, at, clips)
        if cut is None:  # what a clip takes cannot be put back: it shall take little, whatever noise that costs
            return replace(state, axes=found[0], reach=found[1], taken=None, clip=clips[-1])
        return replace(state, axes=found[0], reach=found[1], taken=cut.scores, clip=cut.clip)

    def _pace(self, problem: Problem, state: ChainState | None = None) -> Pace:
        pace = pace_of(problem, problem.plan.steps - self.burn_in_steps(problem))
        return pace.with_clip(None if state is None else state.clip)

    def believes(self, problem: Problem) -> bool:
        """Whether the run of a program gives its belief instead of a chain."""
        asks = self.step_size is None and self._pace(problem).share > 0
        return asks and Local.at(problem, self.prior, problem.position, None) is not None

    def slope_along(
        self, problem: Problem, state: StateType, axes: Tensor, release: Release
    ) -> tuple[Tensor, StateType]:
        """R^T grad U of a program's posterior, and the state that remembers what was told."""
        pace = self._pace(problem, state)
        slope = of_records(problem, axes, release, pace)
        if pace.share:
            state = replace(state, told=state.told.with_one(problem, slope, release, pace))
        if state.taken is not None:
            slope = slope.add_(state.taken.to(slope.dtype), alpha=problem.records)
        return slope + of_prior(problem, self.prior, axes), state

    def moved_along(self, problem: Problem, state: StateType, step: Tensor) -> StateType:
        """A step of a program's chain along its axes, which are looked for anew until draws begin."""
        assert state.axes is not None
        assert state.reach is not None
        move_(problem, state.axes, state.reach, step)
        if not self._looks_now(problem, state):
            return state
        if state.told.points:
            state = replace(self._met_anew(problem, state, state.axes), told=Told())
        return self._aligned(problem, state)

    def _looks_now(self, problem: Problem, state: ChainState) -> bool:
        """Before draws begin, and later as long as the peak was far at the last look, while enough steps are left."""
        burn_in, steps = self.burn_in_steps(problem), problem.plan.steps
        often = looks(burn_in)
        if state.step + 1 < burn_in or state.haste == 1.0 or not often:
            return state.step + 1 in often
        return (state.step + 1) % min(often) == 0 and steps - state.step > LEAST_COUNTED * (steps - burn_in)

    def _met_anew(self, problem: Problem, state: StateType, axes: Tensor) -> StateType:
        """What records tell of themselves, once the chain is where they tell it of; until then, more haste.

        Far from the peak scores are no longer nought on average, and their products say more of the way than of the
        information; with axes that they made shorter the chain would stand still.
        """
        pace = self._pace(problem, state)
        if far_off(problem, self.prior, axes, state.told, state.taken) > 1:
            return replace(state, met=None, haste=min(MOST_HASTE, 2 * state.haste))
        return replace(state, met=met_anew(problem, self.prior, axes, state.told, pace, state.met), haste=1.0)

    def given_along(self, problem: Problem, state: ChainState, facts: dict[str, Any]) -> Draws:
        """The posterior of a program: the belief where the chain is worth few draws, else the chain."""
        assert state.axes is not None
        own = self.facts_along(problem, state)
        if len(state.told.points) < FEWEST_TOLD:
            return self.collected(problem, state, {**own, **facts})
        belief = belief_of(problem, self.prior, state.axes, state.told, self._pace(problem, state), state.met)
        dtype, worth = problem.position.dtype, self._pace(problem).worth
        doubted = not belief.one_peak or belief.way > SURE_WAY
        heard = heard_draws(problem, state.heard) if doubted else None
        if belief.one_peak and heard is None:
            draws, warning = belief.draws.to(dtype), RESTS_ON if belief.cut_known else CLIP_UNKNOWN
            drawn_of = f"the belief that releases give: the chain itself is worth {worth:.1f} draws"
        else:
            drawn_of, meaning = OF_THE_PRIOR if heard is None else OF_SCOUTS
            draws = (prior_draws(problem, len(belief.draws)) if heard is None else heard).to(dtype)
            warning = NO_PEAK.format(belief.way, belief.excess, belief.unlike, belief.bends, belief.steady, meaning)
        about = {
            "warning": warning,
            **own,
            **facts,
            "draws_of": drawn_of,
            "draws": len(draws),
            "way": round(belief.way, 3),
            "residuals_over_known_noise": round(belief.excess, 3),
            "trust_in_released_information": round(belief.trust, 3),
            "as_sharp_as_in_its_midst": round(belief.steady, 3),
            "bends": round(belief.bends, 3),
            "products_unlike_expected": round(belief.unlike, 3),
        }
        weights = torch.full((len(draws),), 1 / len(draws), dtype=draws.dtype)
        return Draws(problem.module, problem.likelihood, draws, weights, about)

    def facts_along(self, problem: Problem, state: ChainState) -> dict[str, Any]:
        """Of a program's chain: its step in units of a record's information, its clip in those, and how hot it ran."""
        pace, plan = self._pace(problem, state), problem.plan
        noise = plan.mechanism.noise_std / pace.factor
        heat = pace.rate * problem.records * noise**2 / (2 * plan.expected_batch**2)
        cut = plan.mechanism.noise_std > 0 and pace.clip <= UNCUT * math.sqrt(problem.position.numel())
        unknown = cut and state.taken is None
        told = {"clipping": CLIP_UNKNOWN} if unknown else {}
        return {**told, "pace": pace.rate, "clip_of_the_loss": pace.clip, "temperature": max(1.0, heat)}

    def keep(self, problem: Problem, state: StateType, eta: float) -> StateType:
        """Count the step, and keep the position if it is one of the draws. Decreasing steps weigh draws by eta."""
        step, steps = state.step + 1, problem.plan.steps
        # Counted from the end, so that the last position is always kept.
        if step <= self._burn_in(steps) or (steps - step) % self._thinning(steps):
            return replace(state, step=step)
        draws = (*state.draws, problem.position.to(HOST, copy=True))  # on the host, where there is room for many
        return replace(state, step=step, draws=draws, weights=(*state.weights, eta))

    def draws_of(self, steps: int) -> int:
        """How many draws a chain of so many steps keeps."""
        return (steps - self._burn_in(steps) - 1) // self._thinning(steps) + 1

    def burn_in_steps(self, problem: Problem) -> int:
        return self._burn_in(problem.plan.steps)

    def _burn_in(self, steps: int) -> int:
        return min(int(self.burn_in * steps), steps - 1)

    def _thinning(self, steps: int) -> int:
        return self.thinning or math.ceil((steps - self._burn_in(steps)) / MOST_DRAWS)

    def collected(self, problem: Problem, state: ChainState, facts: dict[str, Any]) -> Draws:
        """The posterior of the kept draws."""
        weights = torch.tensor(state.weights, dtype=problem.position.dtype)
        about = {**facts, "draws": len(state.draws), "burn_in_steps": self.burn_in_steps(problem)}
        draws = torch.stack(state.draws)
        return Draws(problem.module, problem.likelihood, draws, weights / weights.sum(), about)


def energy_gradient_(prior: Prior, problem: Problem, total: Tensor, expected_batch: float) -> Tensor:
    """(n/b) R + grad r(theta): the noisy gradient of the negative log posterior."""
    gradient = total * (problem.records / expected_batch)
    return problem.prior(prior).add_energy_gradient_(problem.position, gradient)


def add_normal_(problem: Problem, out: Tensor, std: float | Tensor) -> Tensor:
    """Noise from the method's own stream, for what the release's noise leaves missing."""
    noise = normals(out.shape, problem.generator, out.dtype, out.device)
    return out.add_(noise.mul_(std))
