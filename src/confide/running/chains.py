"""Several chains of one method: each is a run of its own, and each is charged.

    plan = confide.plan(epsilon=1, delta=1e-5, records=n, batch=256, epochs=10, chains=4)
    run = confide.fit_chains(method, module, data, plan, chains=4)

`plan(..., chains=4)` gives the plan of one chain with the noise that keeps all four together within epsilon. All chains
are charged before the first one starts: a budget that does not suffice for all of them refuses, and nothing is spent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from confide import methods
from confide.errors import Refusal
from confide.evaluate.chains import effective_sample_size, split_r_hat
from confide.evaluate.mixing import with_mixing
from confide.mechanism.plan import Plan
from confide.methods.base import Method, check_method
from confide.models.likelihoods import Likelihood
from confide.posteriors.draws import Draws
from confide.privacy.statement import Privacy
from confide.running.fit import Run, fit, head_behind, stated
from confide.sources.base import Source
from confide.sources.together import PaidTogether

FEWEST_DRAWS = 4
"""Of each chain: R-hat compares the variances of its halves."""


def fit_chains(
    method: Method,
    module: nn.Module,
    data: Source,
    plan: Plan,
    *,
    chains: int = 4,
    likelihood: Likelihood | None = None,
    seed: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Run:
    """Run the plan `chains` times and pool the draws; facts state the largest R-hat and the smallest sample size."""
    if chains < 2:
        raise Refusal(f"chains={chains}: must be at least 2; use fit for one chain")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress={progress!r}: must be a function of (done, total)")
    check_draws(method, plan)
    started = time.perf_counter()
    source = PaidTogether(data, times=chains)
    runs = []
    for chain in range(chains):
        shown = None if progress is None else _offset(progress, chain * plan.steps, chains * plan.steps)
        chain_seed = None if seed is None else seed + chain
        runs.append(fit(method, module, source, plan, likelihood=likelihood, seed=chain_seed, progress=shown))
    posterior = _pooled([run.posterior for run in runs])
    events = tuple(event for run in runs for event in run.privacy.events)  # what sources charge beside the plan, too
    privacy = stated(Privacy(events, plan.delta, plan.adjacency, seeded=data.seeded), data)
    seconds = time.perf_counter() - started
    return Run(posterior, privacy, runs[0].plan, method, data.schema, seconds, head_behind(data))


def check_draws(method: Method, plan: Plan) -> None:
    """Refuse what `_pooled` could not pool, before anything is charged."""
    check_method(method)
    draws = method.draws_of(plan.steps)
    if draws is None:
        raise Refusal(
            f"method={method.name!r}: chains need a sampler, which says by draws_of(steps) how many draws it keeps; "
            f"use one of {', '.join(methods.samplers())}"
        )
    if draws < FEWEST_DRAWS:
        raise Refusal(
            f"steps={plan.steps}: this sampler would keep {draws} draws of a chain, and R-hat needs {FEWEST_DRAWS}; "
            "plan more steps, or give the method a smaller burn_in or thinning"
        )


def _offset(progress: Callable[[int, int], None], before: int, total: int) -> Callable[[int, int], None]:
    return lambda done, _: progress(before + done, total)


def _pooled(posteriors: list[Any]) -> Draws:
    stacked = torch.stack([posterior.draws for posterior in posteriors])
    first = posteriors[0]
    facts = {
        **first.facts,
        "chains": len(posteriors),
        "draws": stacked.shape[0] * stacked.shape[1],
        "largest_r_hat": split_r_hat(stacked).max().item(),
        "smallest_effective_sample_size": effective_sample_size(stacked).min().item(),
    }
    weights = torch.cat([posterior.weights for posterior in posteriors]) / len(posteriors)
    return with_mixing(Draws(first.module, first.likelihood, stacked.flatten(0, 1), weights, facts))
