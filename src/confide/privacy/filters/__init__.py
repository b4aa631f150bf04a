"""Filters: a ceiling that holds although each plan is chosen after seeing what the earlier ones released.

A *plan* is a list of events that was fixed before any of it was released. Inside a plan, composition by privacy loss
distributions (PLD) is proven and tight. Between plans it is not: if the noise or the length of the second plan is
chosen by what the first one showed, "stop when the composed epsilon passes the ceiling" proves nothing (Rogers, Roth,
Ullman and Vadhan 2016; Regehr et al. 2026). The rules below do. The first plan is chosen before anything was seen,
so everything that depends on the ceiling (epsilon, delta) and on the first plan alone is fixed in advance.

    one plan      PLD at the ceiling itself. Nothing is lost.
    more plans    at least one of three filters must have room, each of which has a share of delta:
      repetition  every plan is a multiple of the same base (of the first plan): PLD of the sum
      gaussian    PLD of (first plan, one Gaussian of mu^2 = sum of mu_k^2), where the k-th later plan is covered by a
                  Gaussian of mu_k up to a little delta (Smith and Thakurta 2022; Koskela et al. 2023)
      renyi       sum of Renyi divergences at ONE order, which the ceiling and the first plan choose
                  (Feldman and Zrnic 2021; Lecuyer 2021)

The proofs, and what adaptivity costs compared with PLD, stand in docs/soundness.md, "Filters".
"""

from confide.privacy.filters.history import (
    FIXED,
    GAUSSIAN,
    RENYI,
    REPETITION,
    History,
    Log,
    Plan,
    Promise,
    Sum,
    plan_of,
)
from confide.privacy.filters.judge import Filters, Verdict, falls_short

__all__ = [
    "FIXED",
    "GAUSSIAN",
    "RENYI",
    "REPETITION",
    "Filters",
    "History",
    "Log",
    "Plan",
    "Promise",
    "Sum",
    "Verdict",
    "falls_short",
    "plan_of",
]
