"""What Zhang, Bu, Chen and Long (2022) claim, and what decides it."""

from __future__ import annotations

from confide.papers.base import Claim, FigureComparison, Place

MLP, CNN = "mnist-mlp", "mnist-cnn"
EPSILONS = (0.25, 1.0, 4.0)
"""Of figure 1, as they are run here."""


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


CALIBRATION = {("SGLD", GAUSSIAN): 0.007, ("MC dropout", GAUSSIAN): 0.008, ("SGD", "none"): 0.106}
"""Table 3, private, expected calibration error; BBP's 0.204 is the error of a network that hardly learnt."""


def _calibration(method: str, prior: str) -> Place:
    return Place(MLP, "MNIST, MLP, calibration", (f"{method}, MLP, {prior}",), "ECE ours")


def _against_epsilon(method: str, epsilon: float) -> Place:
    return Place("epsilon", "MNIST, accuracy against epsilon", (method, f"epsilon {epsilon:g}"), "accuracy, ours")


def _price(setting: str) -> Place:
    return Place("effects", "MNIST, effects of batch size", (f"SGLD, {setting}",), "sound epsilon")


def _family(setting: str) -> Place:
    return Place("family", "MNIST, clip, noise and epochs", (setting,))


def _cheaper(setting: str, other: str) -> FigureComparison:
    return FigureComparison(_price(setting), _price(other), higher=False)


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
            "holds": "With the same trials for every method.",
            "partly": "With the same trials for every method.",
            "does not": "With the same trials for every method.",
        },
    ),
    Claim(
        "Figure 1: DP-SGLD is the most accurate at every epsilon (MLP, Gaussian priors)",
        "no numbers",
        tuple(
            FigureComparison(_against_epsilon("SGLD", epsilon), _against_epsilon(other, epsilon), epsilon)
            for epsilon in EPSILONS
            for other in ("BBP", "MC dropout", "SGD")
        ),
        {
            "holds": "With settings that were sought for every method alike, at epsilon 1.",
            "partly": "Settings were sought for every method alike, at epsilon 1.",
            "does not": "Settings were sought for every method alike, at epsilon 1.",
        },
    ),
    Claim(
        "Table 3, MLP: calibration error of DP-SGLD, DP-MC dropout and DP-SGD at epsilon 1",
        ", ".join(f"{value:g}" for value in CALIBRATION.values()),
        tuple(FigureComparison(_calibration(*row), value, 1.0, higher=False) for row, value in CALIBRATION.items()),
        {
            "holds": "With nothing recalibrated.",
            "partly": "With nothing recalibrated; all errors are small here, with a smaller network.",
            "does not": "With nothing recalibrated.",
        },
    ),
    Claim(
        "A Gaussian prior calibrates private networks better than none (MLP, epsilon 1)",
        "SGLD 0.007 against 0.126, MC dropout 0.008 against 0.078, SGD 0.013 against 0.106",
        tuple(
            FigureComparison(_calibration(method, GAUSSIAN), _calibration(method, "none"), 1.0, higher=False)
            for method in ("SGLD", "MC dropout", "SGD")
        ),
        {
            "holds": "For all three.",
            "partly": "Networks without a prior are well calibrated here too, so that little is left to gain.",
            "does not": "Networks without a prior are well calibrated here too, so that nothing is left to gain.",
        },
    ),
    Claim(
        "Larger batches and smaller rates make DP-SGLD more private (figure 5, appendix D.3)",
        "no numbers",
        (
            _cheaper("batch size 512", "batch size 128"),
            _cheaper("batch size 2048", "batch size 512"),
            _cheaper("learning rate 0.05", "learning rate 0.25"),
            _cheaper("learning rate 0.25", "learning rate 1"),
        ),
        {
            "holds": "By the sound epsilon: the noise that Langevin dynamics asks for grows with batch / sqrt(rate).",
            "partly": "By the sound epsilon.",
            "does not": "By the sound epsilon.",
        },
    ),
    Claim(
        "Figure 4: within the family of DP-SGD, whatever the clip, DP-SGLD is the most accurate",
        "no numbers",
        tuple(
            FigureComparison(_family("SGLD, clip 1.5"), _family(f"SGD, clip {clip:g}"))
            for clip in (0.5, 1.0, 1.5, 2.0, 5.0)
        ),
        {
            "holds": "At the same noise multiplier, epochs and rate, so at the same epsilon.",
            "partly": "At the same noise multiplier, epochs and rate, so at the same epsilon.",
            "does not": "At the same noise multiplier, epochs and rate, so at the same epsilon.",
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
