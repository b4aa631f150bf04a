"""Likelihoods by name, for requests from the command line and the estimators: made of the public facts alone."""

from __future__ import annotations

import math

from confide import rules
from confide.data.schema import Schema, Task
from confide.errors import Refusal
from confide.models.counts import NegativeBinomial, Poisson
from confide.models.heavy_tails import Laplace, StudentT
from confide.models.likelihoods import IN_OWN_UNITS, LIKELIHOODS, Likelihood
from confide.models.ordinal import Ordinal

TASKS: dict[str, Task] = {
    "poisson": "regression",
    "negative-binomial": "regression",
    "laplace": "regression",
    "student-t": "regression",
    "ordinal": "classification",
}
"""The names, and what they are for. Others need more than the facts say, and are given as objects."""


def check_name(likelihood: Likelihood | str | None, task: Task | None) -> None:
    """Refuse a name that is not known, or is for another task."""
    if not isinstance(likelihood, str):
        return
    wanted = TASKS.get(_spelt(likelihood))
    if wanted is None:
        raise Refusal(
            f"likelihood={likelihood!r}: must be one of {', '.join(TASKS)}; any other of confide.likelihoods is given "
            "as an object"
        )
    if task is not None and task != wanted:
        raise Refusal(f"likelihood={likelihood!r}: is for {wanted}, and this is {task}; leave it out, or use another")


def in_own_units(likelihood: Likelihood | str | None) -> bool:
    """Whether the target means what it says, as counts and times do, and is not scaled."""
    if likelihood is None:
        return False
    kind = LIKELIHOODS.get(_spelt(likelihood)) if isinstance(likelihood, str) else type(likelihood)
    return kind in IN_OWN_UNITS


def made(likelihood: Likelihood | str | None, schema: Schema, noise_scale: float | None) -> Likelihood | None:
    """The likelihood of that name for records with these facts; an object as it is."""
    if not isinstance(likelihood, str):
        return likelihood
    check_name(likelihood, "regression" if schema.classes is None else "classification")
    name = _spelt(likelihood)
    if name == "ordinal":
        assert schema.class_count is not None  # it is classification
        return Ordinal(schema.class_count)
    if name in ("poisson", "negative-binomial"):
        mean = _usual_count(schema)
        return Poisson(mean) if name == "poisson" else NegativeBinomial(mean)
    scale = rules.NOISE_SCALE if noise_scale is None else noise_scale
    return Laplace(scale) if name == "laplace" else StudentT(scale)


def _usual_count(schema: Schema) -> float:
    """Between one and the largest declared count, in the geometric middle: an output of zero says this."""
    assert schema.target_bounds is not None  # a regression has them by now
    return math.sqrt(max(1.0, schema.target_bounds[1]))


def _spelt(name: str) -> str:
    return name.replace("_", "-").lower()
