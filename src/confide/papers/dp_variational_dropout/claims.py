"""What Ermis and Cemgil (2017) claim, and what decides it."""

from __future__ import annotations

from confide.papers.base import Claim, FigureComparison, Place

DROPOUT, SVI, SGD = "variational dropout", "SVI without dropout", "DP-SGD"
FIGURES = {10.0: 0.9687, 1.0: 0.9327, 0.1: 0.9026}
DIGITS = {10.0: 0.9417, 1.0: 0.9278, 0.1: 0.9038}


def _place(experiment: str, method: str, epsilon: float) -> Place:
    return Place(experiment, "", (method, f"epsilon {epsilon:g}"))


def _table_one(experiment: str, figures: dict[float, float]) -> tuple[FigureComparison, ...]:
    return tuple(FigureComparison(_place(experiment, DROPOUT, e), value, e) for e, value in figures.items())


PRINTED: dict[str, dict[str, tuple[float, float | None]]] = {
    "digits": {"AC": (0.9139, 1.0), "zCDP": (0.9278, 1.0), "not private": (0.9535, None)},
    "mnist": {"AC": (0.9102, 1.0), "zCDP": (0.9327, 1.0), "not private": (0.9780, None)},
}
"""Accuracy and claimed epsilon of the settings as printed."""


def _as_printed(name: str) -> Claim:
    title = f"{name.upper()}, variational dropout as printed"
    return Claim(
        f"{name.upper()} with the printed settings: noise by AC and by zCDP for epsilon 1, and no noise",
        ", ".join(f"{value:g}" for value, _ in PRINTED[name].values()),
        tuple(
            FigureComparison(Place(f"printed-{name}", title, (rule,)), value, epsilon)
            for rule, (value, epsilon) in PRINTED[name].items()
        ),
        {
            "holds": "At the sound epsilon of the printed noise.",
            "partly": "Rates that fall as 1 / t add up to few first rates: private rows hardly learn.",
            "does not": "Rates that fall as 1 / t add up to few first rates: private rows hardly learn.",
        },
    )


CLAIMS = (
    Claim(
        "Table 1, MNIST: accuracy of variational dropout at epsilon 10, 1 and 0.1, one hidden layer",
        ", ".join(f"{value:g}" for value in FIGURES.values()),
        _table_one("mnist", FIGURES),
        {
            "holds": "With one hidden layer on pixels.",
            "partly": "With one hidden layer on pixels.",
            "does not": "The printed algorithm is no private trainer (D1 in soundness.md, section 6.3).",
        },
    ),
    Claim(
        "The same with a CNN learnt throughout",
        ", ".join(f"{value:g}" for value in FIGURES.values()),
        _table_one("mnist-cnn", FIGURES),
        {"holds": "With a network that the paper does not have.", "does not": "Not with a CNN either."},
    ),
    Claim(
        "The same at epsilon 1 with 1000 hidden units, as the paper has them",
        f"{FIGURES[1.0]:g}",
        _table_one("mnist-wide", {1.0: FIGURES[1.0]}),
        {
            "holds": "With batch and passes of a smaller network.",
            "does not": "With batch and passes of a smaller network: noise grows with the number of weights.",
        },
    ),
    Claim(
        "Table 1, DIGITS: accuracy of variational dropout at epsilon 10, 1 and 0.1",
        ", ".join(f"{value:g}" for value in DIGITS.values()),
        _table_one("digits", DIGITS),
        {
            "holds": "With the settings under the table.",
            "partly": "With 1437 records the noise of a few steps at small epsilon exceeds the weights; the notes "
            "give the amounts.",
            "does not": "With 1437 records the noise of a few steps exceeds the weights.",
        },
    ),
    _as_printed("digits"),
    _as_printed("mnist"),
    Claim(
        "Variational dropout is above SVI and DP-SGD at epsilon 1",
        "0.9327 against 0.9126 and 0.9305",
        tuple(
            FigureComparison(_place("mnist", DROPOUT, 1.0), _place("mnist", other, 1.0), 1.0) for other in (SVI, SGD)
        ),
        {
            "holds": "With the same trials for all.",
            "partly": "With the same trials for all.",
            "does not": "With the same trials for all: the dropout itself gains nothing.",
        },
    ),
    Claim(
        "Algorithm 1 is private after T steps, by the printed composition",
        "epsilon 1 with sigma 2.68",
        (),
        {"does not": "None of its three readings is a private trainer with the reported accuracy (D1 to D3)."},
        proven="does not",
    ),
)
