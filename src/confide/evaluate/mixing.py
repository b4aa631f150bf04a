"""Did a chain go round its posterior? Read off the draws that were kept, so it costs nothing; said in the facts.

A chain under a small budget takes small steps. Its draws then lie along one path, narrower than the posterior and about
wherever the path led, and nothing in them says so but their order: the halves of such a chain disagree (split R-hat),
and the way from its first draws to its last is longer than its draws are wide.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from confide.evaluate.chains import split_r_hat
from confide.posteriors.base import Posterior
from confide.posteriors.draws import Draws

AnyPosterior = TypeVar("AnyPosterior", bound=Posterior)
NAMES = ("split_r_hat", "way", "warning")
LEAST_DRAWS = 8
"""Fewer say nothing about halves."""
LARGEST_R_HAT = 1.2
"""Of the median parameter. 100 draws of which 10 are independent give 1.1 by chance; a path without return 1.5."""
COORDINATES = 4096
"""Of large networks evenly spaced ones are looked at: the median of so many is known to one in a hundred."""
STUCK = 99.0
"""Stands for an infinite R-hat, where a chain never moved."""


def mixing_facts(posterior: Posterior) -> dict[str, Any]:
    """split_r_hat and way of a chain, and a warning if it did not mix; nothing for what is no chain.

    way   from the mean of the first quarter to that of the last, in deviations of the draws; root mean square over
          parameters. About 0.3 for a chain that mixes, above 1 for one that is still on its way
    """
    if not isinstance(posterior, Draws) or "burn_in_steps" not in posterior.facts:
        return {}
    chains = int(posterior.facts.get("chains", 1))
    count, size = posterior.draws.shape
    if count // chains < LEAST_DRAWS:
        return {"warning": f"Too few draws ({count // chains}) to tell whether the chain mixed."}
    draws = posterior.draws[:, :: max(1, size // COORDINATES)].double().reshape(chains, count // chains, -1)
    spread = draws.flatten(0, 1).std(0)
    found = split_r_hat(draws)
    r_hat = min(STUCK, float(torch.where(spread > 0, found, torch.full_like(found, STUCK)).median()))
    quarter = draws.shape[1] // 4
    gap = (draws[:, -quarter:].mean(1) - draws[:, :quarter].mean(1)) / spread.clamp(min=torch.finfo(spread.dtype).tiny)
    way = min(STUCK, float(gap.square().mean().sqrt()))
    facts: dict[str, Any] = {"split_r_hat": round(r_hat, 3), "way": round(way, 3)}
    if r_hat > LARGEST_R_HAT:
        facts["warning"] = (
            f"The chain did not mix: its halves disagree (split R-hat {r_hat:.2f}, 1 is agreement), so its draws are "
            "narrower than the posterior. Intervals of parameters are not to be relied on."
        )
    return facts


def with_mixing(posterior: AnyPosterior) -> AnyPosterior:
    """The same posterior, with these facts among its own in place of those of a part of it."""
    found = mixing_facts(posterior)
    if not found:
        return posterior
    kept = {name: value for name, value in posterior.facts.items() if name not in NAMES}
    return posterior.with_likelihood(posterior.likelihood, {**kept, **found})
