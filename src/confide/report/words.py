"""Numbers and names as readers expect them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from confide.privacy.bayesian.result import Trusted

METRICS = {
    "accuracy": ("Accuracy", "share of test inputs whose most probable class was right; higher is better"),
    "nll": ("Negative log-likelihood", "surprise at the right class, in nats; 0 is perfect, smaller is better"),
    "brier": ("Brier score", "squared error of the probabilities, summed over classes; 0 is perfect, 2 the worst"),
    "ece": ("Expected calibration error", "average gap between stated confidence and share right; smaller is better"),
    "mce": ("Maximum calibration error", "the same gap in the worst bin; noisy where a bin holds few inputs"),
    "adaptive_ece": ("Adaptive calibration error", "the same average over bins of equally many inputs"),
    "classwise_ece": ("Classwise calibration error", "the average gap for each class's probability, over classes"),
    "rmse": ("Root mean squared error", "typical miss of the prediction, in units of the target; smaller is better"),
    "log_likelihood": ("Log-likelihood", "mean log density of the actual values, in nats; higher is better"),
    "coverage_90": ("Coverage of 90% intervals", "share of actual values inside their interval; 90% is honest"),
    "width_90": ("Width of 90% intervals", "mean width, in units of the target; smaller is sharper"),
    "crps": ("Ranked probability score", "distance of the whole prediction from the actual value; smaller is better"),
}
SHARES = ("accuracy", "coverage_90")
ACCOUNTANTS = {
    "pld": "Privacy loss distribution (PLD)",
    "rdp": "Rényi, moments (RDP)",
    "gdp_clt": "Gaussian limit (GDP, CLT)",
    "zcdp": "Concentrated (zCDP)",
    "advanced_composition": "Advanced composition",
}
ASSUMES = {
    "pld": "Proven for these events: the exact distribution of the privacy loss, composed numerically and rounded up.",
    "rdp": "Proven for these events: Rényi divergences, composed and converted; some tightness is lost on the way.",
    "gdp_clt": "A limit for many steps. Its error is not bounded, so it may claim too little.",
    "zcdp": "Proven, but blind to sampling: it counts every record in every step.",
    "advanced_composition": "Proven, but generic: it knows each step's epsilon and delta, not its noise.",
}
SAMPLING = {
    "poisson": "each record joins each batch by an independent coin toss",
    "fixed-size": "each batch is a fresh draw of a fixed number of records",
    "shuffle": "each pass goes once through the shuffled records",
    "full-batch": "each step uses every record",
}


def number(value: Any) -> str:
    """A number with four significant digits."""
    if value is None:
        return "not set"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "∞" if value > 0 else "-∞"
    whole = value == int(value) and 1000 <= abs(value) < 1e15
    return f"{int(value):,}" if whole else f"{value:.4g}"


def epsilon(value: float | None) -> str:
    """Rounded up, to three decimals or to two digits: a claim may be weaker than what holds, never stronger."""
    if value is None:
        return "none"
    if not math.isfinite(value):
        return "∞"
    decimals = max(3, 1 - math.floor(math.log10(value))) if value > 0 else 3
    return f"{math.ceil(value * 10**decimals - 1e-6) / 10**decimals:.{decimals}f}"


def small(value: float) -> str:
    """A delta: written out where that is readable, for "1e-05" breaks over lines."""
    return f"{value:.12f}".rstrip("0") if 1e-7 <= value < 1 else f"{value:g}"


def share(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f}%" if math.isfinite(value) else "not a number"


def metric(name: str, value: float) -> dict[str, str]:
    """One row of the table of metrics."""
    title, meaning = METRICS.get(name, (name, ""))
    if name in SHARES:
        text = share(value)
    elif 1e-3 <= abs(value) < 1000:
        text = f"{value:.4f}" if abs(value) < 10 else f"{value:#.4g}"
    else:
        text = number(value)
    return {"name": title, "value": text, "meaning": meaning}


def settings(thing: object) -> dict[str, Any]:
    """The public fields of a frozen settings object, by name."""
    if is_dataclass(thing) and not isinstance(thing, type):
        return {field.name: getattr(thing, field.name) for field in fields(thing)}
    return {name: value for name, value in vars(thing).items() if not name.startswith("_")}


def shown(value: Any) -> str:
    """A setting as text: nested settings by name and fields, functions by name."""
    if isinstance(value, Trusted):
        return "not shown: computed from private records without protection"
    if is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(f"{name} = {shown(inner)}" for name, inner in settings(value).items())
        return f"{type(value).__name__} ({inner})" if inner else type(value).__name__
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {shown(inner)}" for key, inner in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(shown(inner) for inner in value) or "none"
    if callable(value) and hasattr(value, "__name__"):
        return str(value.__name__)
    text = number(value)
    return text if len(text) <= 500 else f"{text[:500]} ..."


def label(name: str) -> str:
    """`burn_in_steps` as "Burn in steps"."""
    text = str(name).replace("_", " ")
    return text[:1].upper() + text[1:]


def first_sentence(docstring: str | None) -> str:
    """The first line of a docstring: what the thing is."""
    return (docstring or "").strip().split("\n")[0].strip()
