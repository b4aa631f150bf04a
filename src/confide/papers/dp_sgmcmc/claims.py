"""What Li, Chen, Liu and Carin (2019) claim, and what decides it."""

from __future__ import annotations

from confide.papers.base import Claim, FigureComparison, Place

EPSILONS = (0.05, 0.1, 0.2, 0.5, 1.0)


def _adult(method: str, epsilon: float | None) -> Place:
    return Place("adult", "Adult, Bayesian", (method, epsilon))


def _above(*others: str) -> tuple[FigureComparison, ...]:
    return tuple(FigureComparison(_adult("SGLD", e), _adult(other, e), e) for other in others for e in EPSILONS)


CLAIMS = (
    Claim(
        "DP-SGLD is above OPS on Adult at every epsilon",
        "Figure 3, no numbers",
        _above("OPS"),
        {"holds": "OPS pays for one draw by a pure epsilon.", "does not": "OPS is as good at the same sound epsilon."},
    ),
    Claim(
        "DP-SGLD is above the hybrid on Adult at every epsilon",
        "Figure 3, no numbers",
        _above("hybrid"),
        {
            "holds": "The hybrid is the same SGLD from another start, and pays for the start.",
            "partly": "The hybrid is the same SGLD from another start.",
            "does not": "The hybrid is the same SGLD from a better start.",
        },
    ),
    Claim(
        "DP-SGLD is above DP-VI on Adult at every epsilon",
        "not in the paper's figure",
        _above("DP-VI"),
        {
            "holds": "With equal trials, which for DP-VI were four ways to descend; their table has its standard "
            "errors. Trials of rates might narrow it.",
            "partly": "With equal trials the two tie within a standard error where noise is small.",
            "does not": "With equal trials DP-VI is as good.",
        },
    ),
    Claim(
        "DP-SGLD is as accurate as SGLD without privacy from epsilon 0.08 on",
        "equal from 0.08 on",
        tuple(
            FigureComparison(_adult("SGLD", e), _adult("SGLD, not private", None), e, margin=0.001)
            for e in EPSILONS
            if e >= 0.08
        ),
        {
            "holds": "Within a tenth of a point.",
            "partly": "A tenth of a point counts as equal.",
            "does not": "The gap is above a tenth of a point throughout.",
        },
    ),
    Claim(
        "DP-SGD reaches 90 % at epsilon 0.5 and 97 % at 8 on MNIST",
        "0.90 and 0.97",
        tuple(
            FigureComparison(Place("mnist", "MNIST, test accuracy", ("DP-SGD", f"{e:g}")), stated, e)
            for e, stated in ((0.5, 0.90), (8.0, 0.97))
        ),
        {
            "holds": "With one hidden layer of 64.",
            "partly": "With one hidden layer of 64; published runs had PCA and 1000 units.",
            "does not": "With one hidden layer of 64; published runs had PCA and 1000 units.",
        },
    ),
    Claim(
        "DP-SGLD reaches 99.21 % on MNIST",
        "0.9921 at 0.99",
        tuple(
            FigureComparison(Place("mnist", "MNIST, test accuracy", (f"DP-SGLD, {which}",)), 0.9921, 0.99)
            for which in ("the paper's settings", "ours", "ours, CNN")
        ),
        {
            "holds": "At a sound epsilon.",
            "partly": "At a sound epsilon.",
            "does not": "At a sound epsilon neither the printed settings, on one hidden layer, nor ours come near it.",
        },
    ),
    Claim(
        "Confident-GNMax, the rival of Table 1, reaches 98.51 % with public images",
        "0.9851 at 1.97, data-dependent",
        (
            FigureComparison(Place("pate", "MNIST, PATE", ("semi-supervised", "epsilon 1")), 0.9851, 1.97),
            *(
                FigureComparison(
                    Place("pate", "MNIST, PATE", ("semi-supervised, with an estimate", f"epsilon {e:g}")),
                    0.9851,
                    1.97,
                    price="estimated epsilon",
                )
                for e in (2.3, 5.3)
            ),
        ),
        {
            "holds": "At a sound epsilon, and at the estimated ones of rows with an estimate; with public features and "
            "a graph of public images: what these alone allow, the row without teachers shows.",
            "partly": "With linear teachers on scattering features; rows with an estimate are held to that.",
            "does not": "With linear teachers on scattering features; rows with an estimate are held to that. The "
            "published teachers were convolutional networks.",
        },
    ),
    Claim(
        "Proposition 5: the error with falling steps converges like that of standard SG-MCMC",
        "2 terms fall with T, best at eta_0 = O(T^(2/9))",
        (),
        {
            "does not": "At a fixed epsilon the term 1/(3 eta_0) does not fall with T; the named optimum lets epsilon "
            "grow like T^(1/9) (L10 in soundness.md, section 6.2)."
        },
        proven="does not",
    ),
    Claim(
        "Proposition 6: the error of SGLD with a fixed step, and its value at the private step",
        "1/(T eta) + eta^2",
        (),
        {
            "partly": "Right for SGLD without a clip. At the private step the first term is constant in T: more steps "
            "do not help at a fixed epsilon (L11)."
        },
        proven="partly",
    ),
    Claim(
        "Proposition 7: excess risk that a choice of omega balances",
        "T^(1/5) omega^(4/5) + omega + 1/N",
        (),
        {
            "does not": "T is tied to omega, so that the first term grows as omega falls; the Lambert form is wrong "
            "and constants were dropped (L12)."
        },
        proven="does not",
    ),
    Claim(
        "A GAN by DP-SGHMC reaches 98.3 % with 100 labelled images",
        "0.983 at epsilon 0.2, delta 1e-5",
        (),
        {
            "does not": "Impossible with private labels: exchanging the names of two classes replaces 20 records, "
            "which bounds the accuracy on that pair by 73 % (89 % under add/remove), and by 98.21 % for any "
            "mechanism (L13)."
        },
        proven="does not",
    ),
)
