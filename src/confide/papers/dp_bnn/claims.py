"""What Zhang, Bu, Chen and Long (2022) claim, and what decides it."""

from __future__ import annotations

from confide.papers.base import Claim, FigureComparison, Place

MLP, CNN = "mnist-mlp", "mnist-cnn"


def _table_two(experiment: str, network: str, figures: dict[tuple[str, str], float]) -> tuple[FigureComparison, ...]:
    title = f"MNIST, {network}, posterior-predictive"
    rows = {f"{method}, {network}, {prior}": value for (method, prior), value in figures.items()}
    return tuple(FigureComparison(Place(experiment, title, (row,)), value, 1.0) for row, value in rows.items())


GAUSSIAN = "Gaussian"
MLP_FIGURES = {("SGLD", GAUSSIAN): 0.90, ("BBP", GAUSSIAN): 0.80, ("MC dropout", GAUSSIAN): 0.78, ("SGD", "none"): 0.77}
ERRORS = {"SGLD": 0.510, "BBP": 1.276, "MC dropout": 0.682}
CNN_FIGURES = {("SGLD", GAUSSIAN): 0.95, ("MC dropout", GAUSSIAN): 0.77, ("SGD", "none"): 0.95}

MLP_ROWS = tuple(f"{method}, MLP, {prior}" for method, prior in MLP_FIGURES)


def _of_table_two(row: str) -> Place:
    return Place(MLP, "MNIST, MLP, posterior-predictive", (row,))


CLAIMS = (
    Claim(
        "Table 2, MLP: accuracy of DP-SGLD, DP-BBP, DP-MC dropout and DP-SGD at epsilon 1",
        ", ".join(f"{value:g}" for value in MLP_FIGURES.values()),
        _table_two(MLP, "MLP", MLP_FIGURES),
        {
            "holds": "All are reached with a smaller network.",
            "partly": "With a smaller network, whose settings stand under its table.",
            "does not": "None is reached with the networks and settings under the table.",
        },
    ),
    Claim(
        "Table 2, CNN: accuracy of DP-SGLD, DP-MC dropout and DP-SGD at epsilon 1",
        ", ".join(f"{value:g}" for value in CNN_FIGURES.values()),
        _table_two(CNN, "CNN", CNN_FIGURES),
        {
            "holds": "All are reached.",
            "partly": "With a CNN of our own, described under its table.",
            "does not": "None is reached with the networks and settings under the table.",
        },
    ),
    Claim(
        "DP-SGLD is more accurate than DP-BBP, DP-MC dropout and DP-SGD (MLP, epsilon 1)",
        "0.9 against 0.8, 0.78, 0.77",
        tuple(FigureComparison(_of_table_two(MLP_ROWS[0]), _of_table_two(other), 1.0) for other in MLP_ROWS[1:]),
        {
            "holds": "With settings that were sought for every method alike.",
            "partly": "With settings that were sought for every method alike they are level.",
            "does not": "With settings that were sought for every method alike.",
        },
    ),
    Claim(
        "Table 5: squared error of DP-SGLD, DP-BBP and DP-MC dropout on heteroscedastic regression at epsilon 4.21",
        ", ".join(f"{value:g}" for value in ERRORS.values()),
        tuple(
            FigureComparison(
                Place("regression", "Heteroscedastic regression", (f"{method}, private",)), value, 4.21, higher=False
            )
            for method, value in ERRORS.items()
        ),
        {
            "holds": "In the units that the table names, since the paper does not say its own.",
            "partly": "In the units that the table names, since the paper does not say its own.",
            "does not": "In the units that the table names, since the paper does not say its own.",
        },
    ),
    Claim(
        "Theorem 1: DP-SGLD is DP-SGD with noise sqrt(eta) b / (n C)",
        "printed factor",
        (),
        {"does not": "The right factor is b / (n C sqrt(eta)) (Z1 in soundness.md, section 6)."},
        proven="does not",
    ),
    Claim(
        "Theorem 4: a rate of O(T^(-1/4)) with eta = O(T^(-1/3)) and C = O(T^(-1/6))",
        "O(T^(-1/4))",
        (),
        {"does not": "It follows from the wrong factor of Theorem 1 (Z4 in soundness.md, section 6)."},
        proven="does not",
    ),
    Claim(
        "DP-BBP takes 48 times as long as DP-SGLD, since it cannot be clipped by outer products",
        "480 s and 10 s an epoch",
        (FigureComparison(Place("seconds", "Seconds of an epoch", ("BBP",), "ours, over SGLD"), 48.0),),
        {
            "holds": "On the network as printed.",
            "does not": "Layers with a distribution for every weight are clipped by outer products here; the network "
            "is that of the paper.",
        },
    ),
)
