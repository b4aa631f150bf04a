"""Bayesian differential privacy (Triastcyn and Faltings 2019): figures and Table I, every rule beside the DP number.

The paper prices a run for records drawn like those that it saw. Its composition theorem is false and its estimator
trusts normality, so each table shows what the paper printed, its rule as run here, the later Hoelder rule, a sound
average over fresh records, and the DP epsilon by PLD that holds for everybody.
"""

from __future__ import annotations

from confide.papers.base import Context, Experiment, Paper, PaperOutcome
from confide.papers.bayesian_dp.claims import CLAIMS


def run_examples(context: Context) -> PaperOutcome:
    from confide.papers.bayesian_dp.examples import run

    return run(context)


def run_weibull(context: Context) -> PaperOutcome:
    from confide.papers.bayesian_dp.weibull import run

    return run(context)


def run_images(context: Context) -> PaperOutcome:
    from confide.papers.bayesian_dp.images import run

    return run(context)


def run_cnn(context: Context) -> PaperOutcome:
    from confide.papers.bayesian_dp.cnn import run

    return run(context)


def run_scan(context: Context) -> PaperOutcome:
    from confide.papers.bayesian_dp.images import run_scan as run

    return run(context)


def run_tables(context: Context) -> PaperOutcome:
    from confide.papers.bayesian_dp.tables import run

    return run(context)


PAPER = Paper(
    "bayesian-dp",
    "Bayesian Differential Privacy for Machine Learning",
    "Triastcyn and Faltings, arXiv:1901.09697, 2019 (revised version: ICML 2020)",
    (
        Experiment(
            "examples",
            "counter-example to Theorem 1, a worked example, what pairs leave out",
            run_examples,
            minutes=0.02,
            once=True,
        ),
        Experiment(
            "weibull",
            "Figures 1-4: noise, composition and orders on gradients with heavy tails",
            run_weibull,
            minutes=0.64,
            once=True,
        ),
        Experiment(
            "images", "Table I and Figures 5-8: MNIST; CIFAR-10 and SVHN if files are there", run_images, minutes=0.5
        ),
        Experiment("images-cnn", "the same for MNIST with a CNN learnt throughout", run_cnn, quick=False),
        Experiment(
            "scan",
            "where the sound Bayesian epsilon is below the DP one, by clip and noise",
            run_scan,
            minutes=1.7,
            once=True,
        ),
        Experiment(
            "tables", "Table I and Figures 9-10: Adult and Abalone, against DP-VI and DP-SGLD", run_tables, minutes=0.8
        ),
    ),
    CLAIMS,
)
