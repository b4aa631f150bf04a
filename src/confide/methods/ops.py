"""One posterior sample and hybrid posterior sampling for logistic regression (Wang, Fienberg and Smola, ICML 2015).

These two do not ask for noisy sums. A draw from a tempered posterior is private by itself, so the boundary makes the
draw, by `mechanism.posterior_sampling.PosteriorSampling`, and the cost is a pure epsilon. They serve as the baselines
that samplers on noisy gradients are compared with.

    one_posterior_sample   `draws` independent draws, each charged
    hybrid                 one draw as the start of a sampler such as SGLD, which then needs little burn-in

A draw comes from a chain that is run until it is within the mechanism's `tolerance` of the posterior. The statements
of privacy are made at delta less the mechanism's `slack`, so that with the slack they hold at the delta asked for.
Draws predict from features as they are: choose a `feature_bound` by which none has to be scaled down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from confide.mechanism.posterior_sampling import PosteriorSampling
from confide.models.flat import flatten_
from confide.models.likelihoods import Bernoulli
from confide.models.networks import logistic
from confide.posteriors import Draws
from confide.privacy.accountants import sound_epsilon
from confide.privacy.events import Event
from confide.privacy.statement import Privacy

if TYPE_CHECKING:
    from confide.fit import Run
    from confide.plan import Plan


_LEAST_SHARE = 0.9
"""Of delta, that must be left beside the slack."""


class DrawSource(Protocol):
    """Private data that can make a posterior draw: charge the mechanism's event, then read."""

    seeded: bool

    def draw(self, mechanism: PosteriorSampling, purpose: str = "") -> Tensor: ...


@dataclass(frozen=True)
class Sampled:
    """The draws and what they cost."""

    posterior: Draws
    privacy: Privacy


def one_posterior_sample(
    data: DrawSource, features: int, mechanism: PosteriorSampling, *, delta: float, draws: int = 1
) -> Sampled:
    """`draws` independent draws of a logistic regression on so many features; the cost adds up over them."""
    if draws < 1:
        raise ValueError(f"draws={draws}: must be at least 1")
    left = less_slack(delta, mechanism, draws)  # refuses before anything is charged
    drawn = [data.draw(mechanism, purpose="one posterior sample") for _ in range(draws)]
    facts = {"draws": draws, "temper": mechanism.temper, "radius": mechanism.radius}
    # The network's flat vector is the coefficients with the intercept last, as the mechanism draws them.
    posterior = Draws(
        logistic(features), Bernoulli(), torch.stack(drawn).float(), torch.full((draws,), 1 / draws), facts
    )
    events = (mechanism.event(draws),)
    return Sampled(posterior, Privacy(events, left, mechanism.adjacency, seeded=data.seeded))


def less_slack(delta: float, mechanism: PosteriorSampling, draws: int = 1, others: tuple[Event, ...] = ()) -> float:
    """The delta at which everything released can be accounted for as if the draws were exact."""
    # No claim below is made at a smaller delta, so none has a larger epsilon.
    together = sound_epsilon((mechanism.event(draws), *others), _LEAST_SHARE * delta, mechanism.adjacency)
    if math.isinf(together):
        return delta
    slack = mechanism.slack(draws, together)
    if slack > (1 - _LEAST_SHARE) * delta:
        raise ValueError(
            f"tolerance={mechanism.tolerance}: adds {slack:.2g} to delta={delta}; choose a smaller tolerance"
        )
    return delta - slack


def hybrid(
    data: Any, features: int, mechanism: PosteriorSampling, method: Any, plan: Plan, *, seed: int | None = None
) -> Run:
    """A sampler that starts from one posterior sample. Both are paid for, and the statement covers both."""
    from confide.fit import fit

    if mechanism.adjacency != plan.adjacency:
        raise ValueError(f"adjacency={mechanism.adjacency!r}: the plan's is {plan.adjacency!r}; claim one of the two")
    delta = less_slack(plan.delta, mechanism, others=plan.events())
    start = one_posterior_sample(data, features, mechanism, delta=plan.delta)
    module = logistic(features)
    flatten_(module).copy_(start.posterior.draws[0])
    run = fit(method, module, data, plan, likelihood=Bernoulli(), seed=seed)
    events = (*start.privacy.events, *run.privacy.events)
    return replace(run, privacy=replace(run.privacy, events=events, delta=delta))
