"""The Gamma hyper-prior on the weights' precision, which the paper's networks have: what it changes."""

from __future__ import annotations

import math

from confide.papers import sets
from confide.papers.base import Cell, Context, PaperMeasure, PaperOutcome, PaperTable
from confide.papers.dp_sep import fits

SETS = ("wine_red",)
"""Where records are fewest for the weights, so that their prior counts most."""
CHOICES = ("given", "learnt")


def run(context: Context) -> PaperOutcome:
    """SEP and DP-SEP with the precision of the weights given and learnt, on the same splits."""
    rows: list[tuple[Cell, ...]] = []
    notes: tuple[str, ...] = ()
    for name in SETS:
        scores: dict[tuple[str, str], list[fits.SepScore]] = {}
        for split in context.seeds:
            notes = sets.load(name, context, split=split).notes
            for method, epsilon, clip in (("SEP", None, math.inf), ("DP-SEP", fits.EPSILON, fits.CLIP)):
                for choice in CHOICES:
                    score = fits.sep_on_split(name, context, split, epsilon, clip, precision=choice)
                    scores.setdefault((method, choice), []).append(score)
        for (method, choice), found in scores.items():
            errors = PaperMeasure(tuple(score.error for score in found))
            densities = PaperMeasure(tuple(score.log_likelihood for score in found))
            spent = max(score.epsilon for score in found)
            rows.append((name, method, choice, None, errors, spent, densities))
        context.progress("hyper-prior", len(rows), 2 * len(CHOICES) * len(SETS))
    columns = ("set", "method", "precision", "paper", "ours", "sound epsilon", "log-likelihood")
    title = "Gamma hyper-prior on the weights' precision: test RMSE"
    return PaperOutcome((PaperTable(title, columns, tuple(rows), (_note(context), *notes)),))


def _note(context: Context) -> str:
    splits = ", ".join(map(str, context.seeds))
    steps, open_steps = fits.sep_steps(context, private=True), fits.sep_steps(context, private=False)
    return (
        f"Splits {splits}, one run of each on every split, {steps} steps under privacy and {open_steps} without; clip "
        f"{fits.CLIP:g} under privacy, and nothing else was tried for either choice. The precision is read off the "
        "approximation, which is released: it costs no budget and no share of the clip, and stays between a tenth and "
        "ten times what was asked for."
    )
