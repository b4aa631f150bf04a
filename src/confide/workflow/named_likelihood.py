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
from confide.models.several import MultiGaussian, MultiLabel
from confide.models.survival import Exponential, Weibull
from confide.wording import meant

TASKS: dict[str, Task] = {
    "poisson": "regression",
    "negative-binomial": "regression",
    "laplace": "regression",
    "student-t": "regression",
    "exponential": "regression",
    "weibull": "regression",
    "multi-label": "regression",
    "multi-gaussian": "regression",
    "ordinal": "classification",
}
"""The names, and what they are for. Others need more than the facts say, and are given as objects."""
OF_A_SCALE = ("laplace", "student-t", "multi-gaussian")
"""Those whose noise has a scale that may be given, beside the usual one of regression."""
USUAL_PART = 1 / 3
"""Of the longest declared time: the guess from which a network of zeros starts, and which its outputs correct."""


def check_name(likelihood: Likelihood | str | None, task: Task | None) -> None:
    """Refuse a name that is not known, or is for another task."""
    if not isinstance(likelihood, str):
        return
    wanted = TASKS.get(_spelt(likelihood))
    if wanted is None:
        raise Refusal(
            f"likelihood={likelihood!r}: must be one of {', '.join(TASKS)}; any other of confide.likelihoods is given "
            f"as an object{meant(likelihood, TASKS)}"
        )
    if task is not None and task != wanted:
        raise Refusal(f"likelihood={likelihood!r}: is for {wanted}, and this is {task}; leave it out, or use another")


def in_own_units(likelihood: Likelihood | str | None) -> bool:
    """Whether the target means what it says, as counts and times do, and is not scaled."""
    if likelihood is None:
        return False
    kind = LIKELIHOODS.get(_spelt(likelihood)) if isinstance(likelihood, str) else type(likelihood)
    return kind in IN_OWN_UNITS


def means_what_it_says(schema: Schema) -> bool:
    """Whether the targets are times or labels, which are not scaled."""
    return schema.observed is not None or any(bounds is None for _, bounds in schema.targets)


def made(likelihood: Likelihood | str | None, schema: Schema, noise_scale: float | None) -> Likelihood | None:
    """The likelihood of that name for records with these facts, an object as it is, and of several targets or times
    that the facts declare the usual one."""
    if likelihood is None and (schema.targets or schema.observed):
        likelihood = _usual_of(schema)
    task: Task = "regression" if schema.classes is None else "classification"
    check_name(likelihood, task)
    if noise_scale is not None and not _has_scale(likelihood, task):
        raise Refusal(f"noise_scale={noise_scale:g}: {likelihood or task} has no such scale; leave it out")
    if not isinstance(likelihood, str):
        return likelihood
    name = _spelt(likelihood)
    if name == "ordinal":
        assert schema.class_count is not None  # it is classification
        return Ordinal(schema.class_count)
    if name in ("exponential", "weibull"):
        return _of_times(name, schema)
    if name in ("multi-label", "multi-gaussian"):
        return _of_several(name, schema, noise_scale)
    if name in ("poisson", "negative-binomial"):
        mean = _usual_count(schema)
        return Poisson(mean) if name == "poisson" else NegativeBinomial(mean)
    scale = rules.NOISE_SCALE if noise_scale is None else noise_scale
    return Laplace(scale) if name == "laplace" else StudentT(scale)


def _has_scale(likelihood: Likelihood | str | None, task: Task) -> bool:
    if likelihood is None:
        return task == "regression"
    return not isinstance(likelihood, str) or _spelt(likelihood) in OF_A_SCALE


def _usual_of(schema: Schema) -> str:
    if schema.observed is not None:
        return "weibull"
    return "multi-label" if means_what_it_says(schema) else "multi-gaussian"


def _of_times(name: str, schema: Schema) -> Likelihood:
    if schema.observed is None or schema.target_bounds is None:
        raise Refusal(
            f"likelihood={name!r}: is of times until an event; the facts need target, the column of times, its "
            "target_bounds, and observed, the column that says 1 where the event came"
        )
    time = USUAL_PART * schema.target_bounds[1]
    return Exponential(time) if name == "exponential" else Weibull(time)


def _of_several(name: str, schema: Schema, noise_scale: float | None) -> Likelihood:
    if not schema.targets or name != _usual_of(schema):
        ways = {"multi-label": 'targets = ["a", "b"], columns of 0 and 1', "multi-gaussian": "[targets.a] with bounds"}
        raise Refusal(f"likelihood={name!r}: the facts need {ways[name]}")
    if name == "multi-label":
        return MultiLabel(len(schema.targets))
    return MultiGaussian(len(schema.targets), rules.NOISE_SCALE if noise_scale is None else noise_scale)


def _usual_count(schema: Schema) -> float:
    """Between one and the largest declared count, in the geometric middle: an output of zero says this."""
    assert schema.target_bounds is not None  # a regression has them by now
    return math.sqrt(max(1.0, schema.target_bounds[1]))


def _spelt(name: str) -> str:
    return name.replace("_", "-").lower()
