"""Public rules: what a run uses where its user has typed nothing. The command line and the estimators share them.

A rule reads declared sizes and the budget, never a record, so that following it costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise

import torch

from confide.data.preprocessing import Encoder
from confide.data.schema import Schema
from confide.models.predictive import RealPredictive

DEFAULT_CLIP = 2.0
DEFAULT_NOISE_SCALE = 0.2
"""Standard deviation of a regression target's noise, as a part of half its declared range."""
DEFAULT_METHOD = "sgld"
WIDE_LAYER = (64,)
BUDGET_PER_WEIGHT = 10.0
EPOCHS = 40.0
STEPS_PER_EPOCH = 32


def default_batch(records: int) -> int:
    """The public rule for the batch: a 32nd of all records but at least 128, and at most a quarter of all.

    At the same passes and epsilon the noise multiplier grows slower than the batch, so that large batches are less
    noisy; some thousand steps are left to move in.
    """
    return max(1, min(max(128, round(records / STEPS_PER_EPOCH)), records // 4))


def default_epochs(records: int) -> float:
    """The public rule for the passes: 40, whatever the number of records."""
    return EPOCHS


def default_hidden(records: int, features: int, outputs: int, epsilon: float) -> tuple[int, ...]:
    """The public rule for the network: one hidden layer of 64 where n * epsilon >= 10 * its weights, else none.

    The noise of a private sum grows with the number of weights and its signal with n * epsilon, so that a small or
    closely guarded data set is better served by a linear model.
    """
    enough = records * epsilon >= BUDGET_PER_WEIGHT * weight_count((features, *WIDE_LAYER, outputs))
    return WIDE_LAYER if enough else ()


def weight_count(widths: Sequence[int]) -> int:
    """Weights and biases of a fully connected network of these widths."""
    return sum((before + 1) * after for before, after in pairwise(widths))


def generator_of(seed: int | None) -> torch.Generator:
    """Randomness that no privacy rests on; reproducible where a seed is given."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def assumed_facts(schema: Schema) -> list[str]:
    """The facts that were read off the data because the user said that they are public."""
    return [fact.fact for fact in schema.public_facts() if fact.source == "assumed public"]


def assumptions_of(schema: Schema) -> tuple[str, ...]:
    """What the user vouches for, as a clause of the privacy statement."""
    facts = assumed_facts(schema)
    if not facts:
        return ()
    return (f"the facts read off the data ({', '.join(facts[:8])}{', ...' if len(facts) > 8 else ''}) are public",)


def in_units(predictive: RealPredictive, encoder: Encoder) -> RealPredictive:
    """A predictive distribution in the units of the target, in double precision."""
    # Every field, for a kind of predictive of its own may keep more than means and variances.
    exact = replace(predictive, **{part.name: getattr(predictive, part.name).double() for part in fields(predictive)})
    return exact.rescaled(encoder.target_scale, encoder.target_centre)
