"""How confide writes things down: titles, numbers that are claims, and JSON. The same words everywhere.

A claim may be weaker than what holds, never stronger, so bounds are rounded up, and exactly: the decimal that is
printed, read back as a double, is never below the number it stands for. The arithmetic is decimal, for binary tricks
(scaling, forgiving the last digits, rounding up) can come out below.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from decimal import MAX_EMAX, MIN_EMIN, ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from numbers import Integral, Real
from typing import Any

# -- names ---------------------------------------------------------------------------------------------------------


def hyphened(name: Any) -> Any:
    """A name as it is listed: hyphens and underscores are taken alike."""
    return name.replace("_", "-") if isinstance(name, str) else name


def is_real(value: Any) -> bool:
    """Whether a value is a number, of Python or numpy, and no text that says one."""
    return isinstance(value, Real)


def is_whole(value: Any) -> bool:
    return isinstance(value, Integral)


def meant(name: Any, known: Iterable[str]) -> str:
    """ "; did you mean sgld?" for a name that is nearly a known one, as the end of a sentence that lists them."""
    from difflib import get_close_matches

    word = str(name).lower()
    for one in get_close_matches(word, [str(one) for one in known]):
        if word in one or _typing_errors(word, one) <= max(1, len(word) // 3):  # more make another word of it
            return f"; did you mean {one}?"
    return ""


def _typing_errors(word: str, other: str) -> int:
    """Letters left out, added, mistaken, or exchanged with the next (optimal string alignment)."""
    before, last = list[int](), list(range(len(other) + 1))
    for row, letter in enumerate(word):
        here = [row + 1]
        for place, wanted in enumerate(other):
            costs = [last[place] + (letter != wanted), last[place + 1] + 1, here[place] + 1]
            if row and place and letter == other[place - 1] and word[row - 1] == wanted:
                costs.append(before[place - 1] + 1)
            here.append(min(costs))
        before, last = last, here
    return last[-1]


KEY_VARIABLE, WHO_VARIABLE = "CONFIDE_KEY", "CONFIDE_WHO"
"""Name the file of the curator's key, for a team whose ledger is kept by a server; and who charges, where the system's
name of the user says nothing (a container's root)."""

# -- titles --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Title:
    """What a number is called: in a sentence, at the head of a narrow column, and what it means."""

    full: str
    short: str
    meaning: str

    @property
    def heading(self) -> str:
        """The full title where a line begins."""
        return self.full[:1].upper() + self.full[1:]


METRICS: Mapping[str, Title] = {
    "accuracy": Title(
        "accuracy", "Accuracy", "share of test inputs whose most probable class was right; higher is better"
    ),
    "auroc": Title(
        "area under the ROC curve",
        "AUROC",
        "chance that a record of the class is ranked above one of another; 0.5 is blind, 1 perfect",
    ),
    "average_precision": Title(
        "average precision",
        "Avg. prec.",
        "precision averaged over recall, one class against the rest; blind guessing gives the class's share",
    ),
    "nll": Title(
        "negative log-likelihood", "NLL", "surprise at the right class, in nats; 0 is perfect, smaller is better"
    ),
    "brier": Title(
        "Brier score", "Brier", "squared error of the probabilities, summed over classes; 0 is perfect, 2 the worst"
    ),
    "ece": Title(
        "expected calibration error",
        "ECE",
        "average gap between stated confidence and share right; smaller is better",
    ),
    "mce": Title(
        "maximum calibration error", "MCE", "the same gap in the worst bin; noisy where a bin holds few inputs"
    ),
    "adaptive_ece": Title(
        "adaptive calibration error", "Adaptive ECE", "the same average over bins of equally many inputs"
    ),
    "classwise_ece": Title(
        "classwise calibration error", "Classwise ECE", "the average gap for each class's probability, over classes"
    ),
    "rmse": Title(
        "root mean squared error",
        "RMSE",
        "typical miss of the prediction, in units of the target; smaller is better",
    ),
    "log_likelihood": Title(
        "log-likelihood", "Log-lik.", "mean log density of the actual values, in nats; higher is better"
    ),
    "coverage_90": Title(
        "coverage of 90% intervals", "90% inside", "share of actual values inside their interval; 90% is honest"
    ),
    "width_90": Title("width of 90% intervals", "Width", "mean width, in units of the target; smaller is sharper"),
    "crps": Title(
        "ranked probability score",
        "CRPS",
        "distance of the whole prediction from the actual value; smaller is better",
    ),
    "ranked_probability": Title(
        "ranked probability score of classes",
        "RPS",
        "squared error of the cumulative probabilities: near misses count less; smaller is better",
    ),
    "class_distance": Title(
        "distance in classes", "Distance", "how many classes away the most probable one was, on average"
    ),
    "label_accuracy": Title(
        "accuracy over labels", "Labels right", "share of labels that were said rightly to hold or not to hold"
    ),
    "exact_match": Title("exact match", "All right", "share of test inputs for which every label was right"),
    "concordance": Title(
        "concordance",
        "Concordance",
        "share of comparable pairs whose order in time was right; 50% is blind, higher is better",
    ),
}
SHARES = ("accuracy", "coverage_90", "label_accuracy", "exact_match", "concordance")
"""Metrics that are shares of the test records, written in per cent."""

ACCOUNTANTS: Mapping[str, Title] = {
    "pld": Title(
        "privacy loss distributions (PLD)",
        "PLD",
        "Proven for these events: the exact distribution of the privacy loss, composed numerically and rounded up.",
    ),
    "rdp": Title(
        "Rényi divergences (RDP)",
        "RDP",
        "Proven for these events: Rényi divergences, composed and converted; some tightness is lost on the way.",
    ),
    "gdp_clt": Title(
        "Gaussian limit (GDP, CLT)",
        "GDP",
        "A limit for many steps. Its error is not bounded, so it may claim too little.",
    ),
    "zcdp": Title(
        "concentrated privacy (zCDP)", "zCDP", "Proven, but blind to sampling: it counts every record in every step."
    ),
    "advanced_composition": Title(
        "advanced composition",
        "Advanced",
        "Proven, but generic: it knows each step's epsilon and delta, not its noise.",
    ),
}


def accountant(name: str) -> Title:
    """The title of an accountant; one that is not listed is called by its own name."""
    return ACCOUNTANTS.get(name, Title(name.replace("_", " "), name, ""))


# -- numbers that are claims ---------------------------------------------------------------------------------------

_EXACT = Context(prec=800, rounding=ROUND_CEILING, Emax=MAX_EMAX, Emin=MIN_EMIN)
"""A double has at most 17 digits in its shortest form, and at most 309 before and 324 after the point."""


def up(value: float, *, decimals: int | None = None, digits: int | None = None) -> str:
    """The number rounded up, to so many decimals or to so many significant digits (then without trailing zeros).

    The shortest decimal that stands for the double is what is rounded, so 0.1 stays 0.1.
    """
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite" if value > 0 else "-infinite"
    exact = Decimal(repr(float(value)))
    if decimals is not None:
        return f"{exact.quantize(Decimal(1).scaleb(-decimals), context=_EXACT):f}"
    if exact == 0:
        return "0"
    wanted = 4 if digits is None else digits
    rounded = exact.quantize(Decimal(1).scaleb(exact.adjusted() - wanted + 1), context=_EXACT)
    return f"{float(rounded):.{wanted}g}"


def epsilon(value: float | None) -> str:
    """An epsilon as all pages and commands show it, and as sentences do: rounded up to four digits."""
    if value is None:
        return "none"
    return up(value) if math.isfinite(value) else "∞"


def delta(value: float) -> str:
    """A delta as all pages and commands show it: rounded up to six digits."""
    return up(value, digits=6)


def remaining(value: float) -> str:
    """What is left of a budget: rounded down to four digits, for it is less that is safe to say."""
    if not math.isfinite(value):
        return "no ceiling"
    exact = Decimal(repr(float(value)))
    if exact <= 0:
        return "0"
    kept = exact.quantize(Decimal(1).scaleb(exact.adjusted() - 3), rounding=ROUND_FLOOR, context=_EXACT)
    return f"{kept.normalize():f}"


def share(value: float, decimals: int = 1) -> str:
    """A measured share in per cent, to the nearest."""
    return f"{100 * value:.{decimals}f}%" if math.isfinite(value) else "not a number"


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


def measure(name: str, value: float) -> str:
    """A metric as all pages and commands show it: shares in per cent, others to four digits."""
    if name in SHARES:
        return share(value)
    if 1e-3 <= abs(value) < 1000:
        return f"{value:.4f}" if abs(value) < 10 else f"{value:#.4g}"
    return number(value)


def measure_spread(name: str, error: float) -> str:
    """The standard error of a metric beside it, that of shares in points."""
    return f"± {100 * error:.1f}" if name in SHARES else f"± {error:.2g}"


def share_up(value: float, decimals: int = 1) -> str:
    """A share that bounds an attacker, in per cent: rounded up, and at most 100%."""
    if math.isnan(value):
        return "not a number"
    percent = _EXACT.multiply(Decimal(repr(float(min(1.0, value)))), Decimal(100))
    return f"{percent.quantize(Decimal(1).scaleb(-decimals), context=_EXACT):f}%"


# -- notebooks -----------------------------------------------------------------------------------------------------


def html_table(title: str, rows: Iterable[Sequence[object]], heads: Sequence[str] = ()) -> str:
    """A short table for a notebook, every cell escaped."""
    from html import escape

    def line(cells: Sequence[object], tag: str) -> str:
        return (
            "<tr>" + "".join(f'<{tag} style="text-align:left">{escape(str(cell))}</{tag}>' for cell in cells) + "</tr>"
        )

    head = line(heads, "th") if heads else ""
    return f"<table><caption>{escape(title)}</caption>{head}{''.join(line(row, 'td') for row in rows)}</table>"


# -- JSON ----------------------------------------------------------------------------------------------------------

WITHHELD = "not written: computed from private records without protection"


class Withheld:
    """What was computed from private records without protection: no file and no page shows it."""


def json_text(value: Any, *, pretty: bool = False, infinity_as_text: bool = False) -> str:
    """Strict JSON: one line of ASCII, or for a file that people open, indented text with a line's end."""
    found = plain(value, infinity_as_text=infinity_as_text)
    if not pretty:
        return json.dumps(found, allow_nan=False)
    return json.dumps(found, allow_nan=False, indent=2, ensure_ascii=False) + "\n"


def plain(value: Any, *, infinity_as_text: bool = False) -> Any:
    """The value in the types that JSON knows; settings objects become mappings that name their type.

    NaN is null. An infinity is null too, or the text "Infinity", which `float` reads back. What is `Withheld` is left
    out, and a sentence stands in its place.
    """
    if isinstance(value, Withheld):
        return WITHHELD
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return ("Infinity" if value > 0 else "-Infinity") if infinity_as_text and math.isinf(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(inner, infinity_as_text=infinity_as_text) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [plain(inner, infinity_as_text=infinity_as_text) for inner in value]
    if hasattr(value, "tolist"):  # arrays, tensors and their numbers
        return plain(value.tolist(), infinity_as_text=infinity_as_text)
    if is_dataclass(value) and not isinstance(value, type):
        inside = {field.name: getattr(value, field.name) for field in fields(value)}
        return {"type": type(value).__name__, **plain(inside, infinity_as_text=infinity_as_text)}
    return str(value)
