"""One posterior sample and hybrid posterior sampling for linear models (Wang, Fienberg and Smola, ICML 2015).

These two do not ask for noisy sums. A draw from a tempered posterior is private by itself, so the boundary makes the
draw, by `mechanism.posterior_sampling.PosteriorSampling`, and the cost is a pure epsilon. They serve as the baselines
that samplers on noisy gradients are compared with.

    one_posterior_sample   `draws` independent draws, each charged
    hybrid                 one draw as the start of a sampler such as SGLD, which then needs little burn-in

A draw comes from a chain that is run until it is within the mechanism's `tolerance` of the posterior. Its event carries
the `slack` in delta that this leaves, so that ledger and statement count it.
Draws predict from features as they are: choose a `feature_bound` by which none has to be scaled down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from confide.devices.default import default_aside
from confide.errors import Refusal
from confide.mechanism.posterior_sampling import PosteriorSampling
from confide.models.flat import flatten_
from confide.models.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from confide.models.networks import linear, logistic, softmax
from confide.posteriors.draws import Draws
from confide.privacy.accountants.bound import slack
from confide.privacy.events import Adjacency, PureEvent
from confide.privacy.statement import Privacy
from confide.sources.base import Source
from confide.sources.queries import GradientQuery

if TYPE_CHECKING:
    from confide.mechanism.plan import Plan
    from confide.running.fit import Run


@dataclass(frozen=True)
class Sampled:
    """The draws and what they cost."""

    posterior: Draws
    privacy: Privacy


@default_aside
def one_posterior_sample(
    data: Source, features: int, mechanism: PosteriorSampling, *, delta: float, draws: int = 1
) -> Sampled:
    """`draws` independent draws of the mechanism's model on so many features; the cost adds up over them."""
    if draws < 1:
        raise Refusal(f"draws={draws}: must be at least 1")
    event = mechanism.event(draws)
    _check_delta(delta, event, mechanism.adjacency)
    network, likelihood = _model(mechanism, features)
    data.rehearse(GradientQuery(network, likelihood.loss))  # another number of features fails before the charge
    drawn = [_flat(data.draw(mechanism, purpose="one posterior sample"), mechanism) for _ in range(draws)]
    facts = {"draws": draws, "temper": mechanism.temper, "radius": mechanism.radius}
    weights = torch.full((draws,), 1 / draws)
    posterior = Draws(network, likelihood, torch.stack(drawn).float(), weights, facts)
    return Sampled(posterior, Privacy((event,), delta, mechanism.adjacency, seeded=data.seeded))


def _model(mechanism: PosteriorSampling, features: int) -> tuple[nn.Module, Likelihood]:
    """The network that the draws are of, and how its outputs explain the target."""
    if mechanism.model == "softmax":
        return softmax(features, mechanism.classes), Categorical(mechanism.classes)
    if mechanism.model == "linear":
        return linear(features), Gaussian(mechanism.noise_scale)
    return logistic(features), Bernoulli()


def _flat(drawn: Tensor, mechanism: PosteriorSampling) -> Tensor:
    """The draw as the network's flat vector, all weights before all intercepts; the mechanism goes class by class."""
    if mechanism.model != "softmax":
        return drawn  # one class: the intercept is last already
    rows = drawn.reshape(mechanism.classes, -1)
    return torch.cat([rows[:, :-1].reshape(-1), rows[:, -1]])


def _check_delta(delta: float, event: PureEvent, adjacency: Adjacency) -> None:
    """Refuse a delta that the draws do not keep, before anything is charged."""
    missed = slack((event,), adjacency)
    if not missed < delta < 1:
        raise Refusal(
            f"delta={delta}: must be in (0, 1) and above {missed:.2g}, by which the draws miss the exact law; choose a "
            "larger delta or a smaller tolerance"
        )


@default_aside
def hybrid(
    data: Source, features: int, mechanism: PosteriorSampling, method: Any, plan: Plan, *, seed: int | None = None
) -> Run:
    """A sampler that starts from one posterior sample. Both are paid for, and the statement covers both."""
    from confide.running.fit import fit, rehearse

    if mechanism.adjacency != plan.adjacency:
        raise Refusal(f"adjacency={mechanism.adjacency!r}: the plan's is {plan.adjacency!r}; claim one of the two")
    module, likelihood = _model(mechanism, features)
    rehearse(method, module, data, plan, likelihood=likelihood, seed=seed)  # what fit refuses, before the draw is paid
    start = one_posterior_sample(data, features, mechanism, delta=plan.delta)
    flatten_(module).copy_(start.posterior.draws[0])
    run = fit(method, module, data, plan, likelihood=likelihood, seed=seed)
    events = (*start.privacy.events, *run.privacy.events)
    return replace(run, privacy=replace(run.privacy, events=events))
