"""What Triastcyn and Faltings (2019) claim, and what decides it."""

from __future__ import annotations

from confide.papers.base import Claim

CLAIMS = (
    Claim(
        "Theorem 1: the losses of T steps compose by products of means over records",
        "Theorem 1",
        (),
        {"does not": "The same record is in every step: the product understates (T1 in soundness.md, section 6.5)."},
        proven="does not",
    ),
    Claim(
        "Theorem 3: the estimate from a sample is too low with probability at most gamma",
        "gamma = 1e-15",
        (),
        {"does not": "A credible statement under normality, not coverage (T2)."},
        proven="does not",
    ),
    Claim(
        "MNIST, CIFAR-10 and Adult at a Bayesian epsilon far below the DP one",
        "0.62 against 2.18 on MNIST",
        (),
        {"does not": "The two numbers belong to different noise; at the printed noise DP by PLD is 1904 (T8)."},
        proven="does not",
    ),
)
