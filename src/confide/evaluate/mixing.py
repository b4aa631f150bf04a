"""Did a chain go round its posterior? Read off the draws that were kept, so it costs nothing; said in the facts.

A chain under a small budget takes small steps. Its draws then lie along one path, narrower than the posterior and about
wherever the path led, and nothing in them says so but their order: the halves of such a chain disagree (split R-hat),
and the way from its first draws to its last is longer than its draws are wide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import torch

from confide.evaluate.chains import effective_sample_size, split_r_hat
from confide.models.programs import Program
from confide.posteriors.base import Posterior
from confide.posteriors.draws import Draws

AnyPosterior = TypeVar("AnyPosterior", bound=Posterior)
NAMES = ("split_r_hat", "way", "warning")
LEAST_DRAWS = 8
"""Fewer say nothing about halves."""
LARGEST_R_HAT = 1.2
"""Of the median parameter. 100 draws of which 10 are independent give 1.1 by chance; a path without return 1.5."""
LARGEST_OF_ALL = 1.5
"""Where every parameter counts: the worst of ten, each known by ten independent draws, has 1.4 by chance."""
LEAST_EFFECTIVE = 10.0
"""Independent draws, where every parameter counts: with fewer, chance moves a 90 % interval by more than a fifth of its
half-width, and makes it narrower. Five hold the truth in about 82 of 100 runs, ten in 88."""
COORDINATES = 4096
"""Of large networks evenly spaced ones are looked at: the median of so many is known to one in a hundred."""
STUCK = 99.0
"""Stands for an infinite R-hat, where a chain never moved."""


@dataclass(frozen=True)
class Mixing:
    """How a chain went round its posterior, over its parameters.

    r_hat, largest       split R-hat of the median parameter, and at the 95 % point
    effective, fewest    effective draws of the median parameter, and at the 5 % point (of a program: the least)
    way                  from the mean of the first quarter to that of the last, in deviations of the draws; root mean
                         square over parameters. About 0.3 for a chain that mixes, above 1 for one still on its way
    temperature          at which it ran, where the method says so: above 1, privacy noise is more than is needed
    every                whether each of them counts, since they are looked at one by one: those of a program
    """

    chains: int
    draws: int
    r_hat: float
    largest: float
    effective: float
    fewest: float
    way: float
    temperature: float | None
    every: bool = False

    @property
    def shown(self) -> float:
        return self.largest if self.every else self.r_hat

    @property
    def converged(self) -> bool:
        return self.shown <= (LARGEST_OF_ALL if self.every else LARGEST_R_HAT)


def mixing_of(posterior: Posterior) -> Mixing | None:
    """Read off the draws of a chain; None for what is no chain, or too short to tell."""
    if not _is_chain(posterior) or posterior.draws.shape[0] // _chains(posterior) < LEAST_DRAWS:
        return None
    chains, (count, size) = _chains(posterior), posterior.draws.shape
    draws = posterior.draws[:, :: max(1, size // COORDINATES)].double().reshape(chains, count // chains, -1)
    spread = draws.flatten(0, 1).std(0)
    moved = spread > 0
    r_hats = torch.where(moved, split_r_hat(draws), torch.full_like(spread, STUCK)).clamp(max=STUCK)
    effective = torch.where(moved, effective_sample_size(draws), torch.ones_like(spread)).clamp(max=float(count))
    quarter, every = draws.shape[1] // 4, isinstance(posterior.module, Program)
    gap = (draws[:, -quarter:].mean(1) - draws[:, :quarter].mean(1)) / spread.clamp(min=torch.finfo(spread.dtype).tiny)
    return Mixing(
        chains,
        count,
        float(r_hats.median()),
        float(r_hats.quantile(0.95)),
        float(effective.median()),
        float(effective.min() if every else effective.quantile(0.05)),
        min(STUCK, float(gap.square().mean().sqrt())),
        posterior.facts.get("temperature"),
        every,
    )


def mixing_facts(posterior: Posterior) -> dict[str, Any]:
    """split_r_hat and way of a chain (see `Mixing`), and a warning if it did not mix; nothing for what is no chain."""
    if not _is_chain(posterior):
        return {}
    found = mixing_of(posterior)
    if found is None:
        count = len(posterior.draws) // _chains(posterior)
        return {"warning": f"Too few draws ({count}) to tell whether the chain mixed."}
    facts: dict[str, Any] = {"split_r_hat": round(found.r_hat, 3), "way": round(found.way, 3)}
    own = posterior.facts.get("clipping")
    if own is not None:
        facts["warning"] = own
    if not found.converged:
        who, draws = "The chain did not mix: its halves", "its draws are"
        if found.chains > 1:
            who, draws = f"The {found.chains} chains did not mix: they", "the draws of each are"
        facts["warning"] = (
            f"{who} disagree (split R-hat {found.shown:.2f}, 1 is agreement), so {draws} narrower than the posterior. "
            "Intervals of parameters are not to be relied on."
        )
    elif found.every and found.fewest < LEAST_EFFECTIVE and own is None:
        facts["warning"] = (
            f"The chain was short: its {found.draws} draws are worth {found.fewest:.1f} independent ones for its "
            "slowest parameter, so that intervals hold the truth less often than they say. Use more steps, records or "
            "epsilon."
        )
    return facts


def _is_chain(posterior: Posterior) -> TypeGuard[Draws]:
    return isinstance(posterior, Draws) and "burn_in_steps" in posterior.facts


def _chains(posterior: Draws) -> int:
    return int(posterior.facts.get("chains", 1))


def with_mixing(posterior: AnyPosterior, noise_in_width: str | None = None) -> AnyPosterior:
    """The same posterior, with these facts among its own in place of those of a part of it.

    noise_in_width   what the method says of it, where it is not known yet
    """
    found = mixing_facts(posterior)
    kept = {name: value for name, value in posterior.facts.items() if name not in NAMES or not found}
    if noise_in_width is not None:
        kept = {"noise_in_width": noise_in_width, **kept}
    if not hasattr(posterior, "with_likelihood"):  # somebody's own: it says of itself what it likes
        return posterior
    return posterior.with_likelihood(posterior.likelihood, {**kept, **found})
