"""A posterior from the trace of any method that asks for gradients: noise and the way that is left in its width."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from confide.devices import HOST
from confide.errors import Refusal
from confide.methods.base import Method, Problem
from confide.methods.sgd import SGD
from confide.models.flat import named_slices
from confide.models.priors import GaussianPrior, Prior
from confide.posteriors.low_rank import LowRankGaussian
from confide.posteriors.variational import DiagonalGaussian, DropoutNetwork
from confide.sources.queries import GradientQuery, Query, Release

BLOCKS = 10
"""Means of so many stretches of the last half: enough to know a variance to a third, and one direction each."""
LONGEST_MEMORY = 0.9
"""Correlation of neighbouring stretches at most: ten of them cannot tell more."""
LARGEST_WAY = 2.4
"""From the first stretches to the last, in deviations that noise would give it; a way without return has 2.8."""
STILL_ON_ITS_WAY = (
    "The average did not settle: over the last half of the steps positions moved on, by {:.1f} deviations of the "
    "posterior. Intervals of parameters are not to be relied on; give it more steps or a larger rate."
)


@dataclass(frozen=True)
class TracedState:
    """inner: the state of the method that is traced; step: releases told so far.

    blocks, counts       sums of the positions of every stretch of the last half, and how many they are
    moments              of every tensor in the last half: sums of squares of positions, and of their products with
                         gradients
    position, gradient   sums over the same steps; variance: of the known noise
    """

    inner: Any
    step: int
    blocks: Tensor = field(repr=False)
    counts: Tensor = field(repr=False)
    moments: Tensor = field(repr=False)
    position: Tensor = field(repr=False)
    gradient: Tensor = field(repr=False)
    variance: float = 0.0


@dataclass(frozen=True)
class Traced(Method):
    """The posterior that the releases of another method tell of, whichever way it went; it costs nothing more.

    ask, tell  those of the method; positions and what was released there are summed up over the last half of the steps
    posterior  a Gaussian about the average of these positions,

                   covariance = covariance of that average + diag 1 / (h + 1 / scale^2).

    The first part is that of the means of ten stretches, which differ by privacy noise and by whatever way is still
    left: ten directions, longer where one stretch remembers the one before. The second is what the records leave open,
    with one curvature h for each tensor by regression of released gradients on positions, as large as its error allows.
    Where the method has a distribution of its own for every weight (bbp, dpvi), its variances stand in its place.

    So noise and non-convergence are part of the width. What clipping moves alike at every step no trace can tell: for
    small models use `laplace`, which asks for it, or `noise-aware`.

    Papers: Alrawajfeh, Jaelkoe and Honkela, AISTATS 2025 (posteriors from the trace); Maddox, Izmailov, Garipov, Vetrov
    and Wilson, NeurIPS 2019 (SWAG: a Gaussian from averages of positions).

    of                 the name of the method that is traced; it has its defaults but for the prior
    method             a method with settings of its own, in the place of `of` and `prior`
    prior              over all parameters
    predictive_draws   draws that a prediction averages over
    """

    of: str = "sgld"
    method: Method | None = None
    prior: Prior = field(default_factory=GaussianPrior)
    predictive_draws: int = 100
    name: ClassVar[str] = "traced"
    noise_in_width: ClassVar[str] = "counted, but for what clipping moves alike at every step"
    follows_clip: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.predictive_draws < 1:
            raise Refusal(f"predictive_draws={self.predictive_draws}: must be at least 1")
        if not hasattr(self.traced, "prior") or isinstance(self.traced, Traced):
            raise Refusal(
                f"of={self.traced.name!r}: must be a method that descends along gradients, such as sgd or sgld"
            )

    @property
    def traced(self) -> Method:
        if self.method is not None:
            return self.method
        if self.of == SGD.name:
            return SGD(prior=self.prior, averaging=0.5)
        from confide.methods import get

        found: Any = get(self.of)
        made: Method = found(prior=self.prior) if "prior" in found.__dataclass_fields__ else found()
        return made

    def prepare(self, module: nn.Module) -> nn.Module:
        return self.traced.prepare(module)

    def init(self, problem: Problem) -> TracedState:
        size = problem.position.numel()
        blank = torch.zeros(size, dtype=torch.float64)
        return TracedState(
            inner=self.traced.init(problem),
            step=0,
            blocks=torch.zeros(BLOCKS, size, dtype=problem.position.dtype),
            counts=torch.zeros(BLOCKS, dtype=torch.float64),
            moments=torch.zeros(2, len(named_slices(problem.module)), dtype=torch.float64),
            position=blank,
            gradient=blank.clone(),
        )

    def ask(self, problem: Problem, state: TracedState) -> Query:
        query = self.traced.ask(problem, state.inner)
        if not isinstance(query, GradientQuery):
            raise Refusal(f"of={self.traced.name!r}: asks for more than gradients, and knows its noise by itself")
        if query.size != problem.position.numel():
            raise Refusal(
                f"of={self.traced.name!r}: on a program its draws count noise by themselves; use it alone, or of='sgd'"
            )
        return query

    def tell(self, problem: Problem, state: TracedState, release: Release) -> TracedState:
        whole = problem.records / release.expected_batch
        gradient = release.sum.to(HOST, torch.float64, copy=True).mul_(whole)
        noise = max((release.noise_std * whole) ** 2, 1e-12 * float(gradient.square().mean()), 1e-30)
        point = problem.position.to(HOST, torch.float64, copy=True)
        seen = replace(self._seen(problem, state, point, gradient, noise), step=state.step + 1)
        return replace(seen, inner=self.traced.tell(problem, state.inner, release))

    def _seen(self, problem: Problem, state: TracedState, point: Tensor, gradient: Tensor, noise: float) -> TracedState:
        """With one step more, as sums that are written to in place."""
        steps = problem.plan.steps
        late = state.step - steps // 2
        if late < 0:
            return state
        block = late * BLOCKS // (steps - steps // 2)
        state.blocks[block] += point.to(state.blocks.dtype)
        state.counts[block] += 1
        state.position.add_(point)
        state.gradient.add_(gradient)
        for place, (part, _) in enumerate(named_slices(problem.module).values()):
            state.moments[0, place] += point[part].square().sum()
            state.moments[1, place] += point[part] @ gradient[part]
        return replace(state, variance=state.variance + noise)

    def posterior(self, problem: Problem, state: TracedState) -> LowRankGaussian:
        own = self.traced.posterior(problem, state.inner)
        if isinstance(own, DropoutNetwork):
            raise Refusal(f"of={self.traced.name!r}: its masks are its posterior; use sgd, sgld or bbp")
        filled = state.counts > 0
        means = state.blocks[filled] / state.counts[filled][:, None].to(state.blocks.dtype)
        if not len(means):  # looked at before the last half
            means = problem.position.detach().clone()[None]
        if isinstance(own, DiagonalGaussian) and len(own.centre) != len(problem.position):
            means = torch.stack([self._centre(problem, state, mean) for mean in means])
        centre, number = means.mean(0), len(means)
        factors = (means - centre) / max(1.0, number * (number - 1.0)) ** 0.5 * _remembered(means - centre) ** 0.5
        if isinstance(own, DiagonalGaussian):
            spread, curvatures = own.spread, None
        else:
            spread, curvatures = self._left_open(problem, state)
        of_average = factors.square().sum(0)
        quarter = max(1, number // 4)
        gap = (means[-quarter:].mean(0) - means[:quarter].mean(0)).square()
        way = float((gap / (2 * (means - centre).square().mean(0) / quarter + 1e-300)).mean().sqrt())
        far = float((gap / (of_average + spread.square() + 1e-300)).mean().sqrt())
        settled = way <= LARGEST_WAY or far <= 1
        facts: dict[str, Any] = {
            **({} if settled else {"warning": STILL_ON_ITS_WAY.format(far)}),
            "of": self.traced.name,
            "way": round(way, 3),
            "directions": number,
            "share_of_noise_in_width": round(float((of_average / (of_average + spread.square())).mean()), 4),
            "clipping": "not counted",
        }
        if curvatures is not None:
            facts["tensors_without_curvature"] = curvatures
        spread = spread.to(centre.dtype)
        return LowRankGaussian(own.module, own.likelihood, centre, spread, self.predictive_draws, facts, factors)

    def _centre(self, problem: Problem, state: TracedState, mean: Tensor) -> Tensor:
        """The means of the weights that a variational method has at this position of its own."""
        problem.position.copy_(mean)
        return self.traced.posterior(problem, state.inner).mean()

    def _left_open(self, problem: Problem, state: TracedState) -> tuple[Tensor, int]:
        """Deviations that the records leave, from one curvature for each tensor; and how many of them show none."""
        count = max(1.0, float(state.counts.sum()))
        position, gradient = state.position / count, state.gradient / count
        prior = self._prior.scale**-2 if isinstance(self._prior, GaussianPrior) else 0.0
        spread, flat = torch.zeros_like(position), 0
        for place, (part, _) in enumerate(named_slices(problem.module).values()):
            scatter = float(state.moments[0, place] - count * position[part].square().sum())
            across = float(state.moments[1, place] - count * position[part] @ gradient[part])
            if scatter <= 0:  # never moved: nothing can be told of it
                flat += 1
                continue
            error = (state.variance / count / scatter) ** 0.5
            flat += across / scatter < error
            spread[part] = (max(0.0, across / scatter) + error + prior) ** -0.5
        return spread, flat

    @property
    def _prior(self) -> Prior:
        found: Prior = getattr(self.traced, "prior", self.prior)
        return found


def _remembered(away: Tensor) -> float:
    """By how much the variance of an average grows because one stretch resembles the one before: (1 + r) / (1 - r).

    r is the correlation of neighbours over all weights, set right for the mean that was taken off so few of them.
    """
    total = float(away.square().sum())
    if len(away) < 3 or total <= 0:
        return 1.0
    found = float((away[1:] * away[:-1]).sum()) / total
    r = min(LONGEST_MEMORY, max(0.0, found + (1 + 3 * found) / len(away)))
    return (1 + r) / (1 - r)
