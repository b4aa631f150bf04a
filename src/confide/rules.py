"""Public rules: what is used where a user has said nothing. The only place where defaults stand.

A rule reads declared sizes and the budget, never a record, so that following it costs nothing. Every door (command
line, estimators, Python) and every method gets the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from confide.privacy.events import Adjacency, Sampling

EPSILON, DELTA = 1.0, 1e-5
"""The usual example of a meaningful budget, and a delta below 1 / records up to a hundred thousand records."""
SAMPLER, LINEAR = "sgld", "noise-aware"
"""The method of "auto" for networks, and for a model that is asked to be linear."""
PICTURES = "features"
"""The method of "auto" for classes of pictures."""
MOST_LINEAR = 128
"""Weights of the latter at most: it asks for their curvature, which has a half of the square as many entries."""
MOST_COLUMNS, WIDE, NUMBERS_PER_EFFECT = 40, "features", 25.0
"""Up to so many columns a model of columns is the method of "auto" for more than two classes, each of which has effects
of its own to learn; beyond, one that is linear in all columns, until records times epsilon are so many for every column
of every class. Settled on made-up tables, see docs/protocols.md."""
WIDEST = 600
"""Columns beyond which effects are not tried at all: their histogram has some thirty bins for each."""
SAMPLING: Sampling = "poisson"
"""Keeps the number of records private, and has the tightest proven bound under add-remove."""
ADJACENCY: Adjacency = "add-remove"
"""A person's record is there or not: the notion under which membership itself is protected."""
CLIP = 2.0
"""Largest norm of a record's answer; settled on digits, Adult and diabetes, see benchmarks."""
MOST_CLIP, RECORDS_PER_CLIP, HIDDEN_CLIP = 8.0, 30.0, 2.0
"""Of classes that are learnt by descent: the largest clip that a budget buys, records times epsilon for every weight of
a linear model from which on it does, and the factor of a network with a hidden layer, whose gradients are longer.
Settled on made-up tables, see docs/protocols.md."""
NOISE_SCALE = 0.2
"""Standard deviation of a regression target's noise while the weights are learnt, as a part of half its range."""
WIDE_LAYER = (64,)
"""The hidden layer of a network that the budget carries."""
RECORDS_PER_WEIGHT = 10.0
"""Records times epsilon for every weight, from which on a hidden layer gains more where the truth is curved than it
costs where it is linear. Settled on made-up tables, see docs/which_method.md and benchmarks/default_network.py."""
NUMBERS_PER_WEIGHT = 5.0
"""The same where a network stands beside effects of columns and the target is a number, which says more than a class:
what columns say together is found earlier. See docs/protocols.md."""
EPOCHS = 40.0
"""Passes over the data."""
BATCHES_PER_EPOCH = 32
"""Some thousand steps are left to move in."""
SMALLEST_BATCH = 128
"""Below it the privacy noise of a step outweighs what its records say."""
COUNTED_RATE = 0.05
"""Rate of a fit whose number of records was counted: a constant, so that the plan rests on no count."""


def default_batch(records: int, batches: int = BATCHES_PER_EPOCH) -> int:
    """A 32nd of all records (or another part) but at least 128, and at most a quarter of all.

    At the same passes and epsilon the noise multiplier grows slower than the batch, so that large batches are less
    noisy; some thousand steps are left to move in.
    """
    return max(1, min(max(SMALLEST_BATCH, round(records / batches)), records // 4))


def default_hidden(records: int, features: int, outputs: int, epsilon: float, *, regression: bool) -> tuple[int, ...]:
    """One hidden layer of 64 where n * epsilon >= 10 * its weights, else none; in regression epsilon is 1 at most.

    The noise of a private sum grows with the number of weights and its signal with n * epsilon, so that a small or
    closely guarded data set is better served by a linear model. Beyond epsilon 1 it is the posterior's own width that
    costs, about weights / n, and no budget makes that smaller: labels seldom change by it, errors of real numbers do,
    and the noise of the target is then learnt too large.
    """
    budget = records * (min(epsilon, 1.0) if regression else epsilon)
    enough = budget >= RECORDS_PER_WEIGHT * weight_count((features, *WIDE_LAYER, outputs))
    return WIDE_LAYER if enough else ()


def default_clip(records: int, epsilon: float, numbers: int, categories: int, widths: Sequence[int]) -> float:
    """Of a record's gradient, for classes: what no record of a usual length is cut at, where the budget bears it.

    A gradient is a residual, at most the root of 2 long, times the inputs, whose usual square is 1 for the constant, 1
    for every category and a third for every number that is spread evenly over its bounds. A smaller clip makes
    probabilities wrong however large the budget is; a larger one adds noise, which small budgets do not bear.
    """
    hidden = len(widths) > 2
    if not hidden and records * epsilon < RECORDS_PER_CLIP * weight_count(widths):
        return CLIP
    usual = math.sqrt(2 * (1 + numbers / 3 + categories))
    return min(max(CLIP, usual * (HIDDEN_CLIP if hidden else 1.0)), MOST_CLIP)


def default_method(records: int | None, epsilon: float, columns: int, features: int, outputs: int) -> str:
    """Of a table, where nothing but its target and its budget was said; docs/protocols.md has the runs.

    Effects of columns are learnt well from little, so that they come first unless several classes meet many columns.
    From n * epsilon >= 10 * weights on (5 for a number), a network beside them finds what columns say together. A
    number of records that is not known is not relied on.

    outputs   the number of classes, or 1 for a number
    """
    if columns > MOST_COLUMNS and outputs > 2:
        enough = records is not None and records * epsilon >= NUMBERS_PER_EFFECT * columns * outputs
        return "additive" if enough and columns <= WIDEST else WIDE
    if columns > WIDEST:
        return SAMPLER
    weights = weight_count((features, *WIDE_LAYER, outputs))
    needed = weights * (NUMBERS_PER_WEIGHT if outputs == 1 else RECORDS_PER_WEIGHT)
    enough = records is not None and records * epsilon >= needed
    return "tabular" if enough else "additive"


def usual_delta(records: int) -> float:
    """A round number well below 1 / records."""
    return float(10.0 ** math.floor(math.log10(0.5 / records)))


def weight_count(widths: Sequence[int]) -> int:
    """Weights and biases of a fully connected network of these widths."""
    return sum((before + 1) * after for before, after in pairwise(widths))
