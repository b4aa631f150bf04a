"""Zhang, Bu, Chen and Long: differentially private Bayesian neural networks, run again under a sound epsilon."""

from __future__ import annotations

from functools import partial

from confide.papers.base import Experiment, Paper
from confide.papers.dp_bnn.claims import CLAIMS
from confide.papers.dp_bnn.mnist import run_cnn, run_effects, run_epsilon, run_mlp, run_printed_mlp
from confide.papers.dp_bnn.printed import run_family, run_seconds
from confide.papers.dp_bnn.regression import run_regression

PRINTED_EPOCHS = 15.0  # of figure 5

PAPER = Paper(
    "dp-bnn",
    "Differentially Private Bayesian Neural Networks on Accuracy, Privacy and Reliability",
    "Q. Zhang, Z. Bu, K. Chen and Q. Long, ECML PKDD 2022 (arXiv:2107.08461)",
    (
        Experiment(
            "regression",
            "heteroscedastic regression, uncertainty split in two (table 5)",
            run_regression,
            minutes=9,
            once=True,
        ),
        Experiment("mnist-mlp", "accuracy and calibration of all methods, MLP (tables 2 and 3)", run_mlp, minutes=5.5),
        Experiment("mnist-printed", "the MLP of the paper's own size (table 2)", run_printed_mlp, minutes=27.5),
        Experiment("mnist-cnn", "accuracy and calibration of all methods, CNN (tables 2 and 4)", run_cnn, minutes=11.5),
        Experiment(
            "effects", "batch size and learning rate in DP-SGD and DP-SGLD (figure 5)", run_effects, minutes=0.5
        ),
        Experiment(
            "effects-cnn",
            f"the same with a CNN and {PRINTED_EPOCHS:g} epochs, as printed (figure 5)",
            partial(run_effects, network="CNN", epochs=PRINTED_EPOCHS),
            minutes=21,
            quick=False,
        ),
        Experiment("epsilon", "accuracy against epsilon (figure 1)", run_epsilon, minutes=6.5),
        Experiment("family", "clip, noise, epochs and a falling clip (figure 4)", run_family, minutes=4),
        Experiment(
            "seconds", "time of an epoch on the network as printed (table 2)", run_seconds, minutes=0.4, once=True
        ),
    ),
    CLAIMS,
)
