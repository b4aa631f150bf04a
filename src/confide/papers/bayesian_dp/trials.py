"""The same trials for DP-VI and DP-SGLD at every epsilon, on a made-up set as large and as wide as the real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from confide.evaluate import metrics
from confide.mechanism.plan import Plan
from confide.methods.base import Method
from confide.methods.bbp import BBP
from confide.methods.sgld import SGLD
from confide.models import networks
from confide.papers import protocol, sets
from confide.papers.base import Context
from confide.papers.bayesian_dp.rules import Split, class_probabilities, private
from confide.running.fit import fit

HELD_OUT, TRIAL_SEED = 2000, 90_001  # no row has the seed
CANDIDATES: dict[str, list[dict[str, float]]] = {
    "DP-VI": [{"rate": rate} for rate in (1.0, 2.0, 4.0)],
    "DP-SGLD": [{"step": step} for step in (0.5, 1.0, 2.0)],
}
"""A step is in units of the one whose Langevin noise is the noise of the release."""


def method_for(name: str, taken: dict[str, Any], setting: Plan) -> Method:
    if name == "DP-VI":
        return BBP(learning_rate=taken["rate"])
    equal = 2 * setting.expected_batch / (setting.records * setting.mechanism.noise_std)
    return SGLD(step_size=taken["step"] * equal**2)


def settled(
    split: Split, widths: Sequence[int], epsilons: Sequence[float], plan_of: Callable[[float], Plan], context: Context
) -> protocol.Protocol:
    """`widths`: of the encoded columns; `plan_of`: of the real run at an epsilon."""
    x, y = sets.made_up_classes(widths, split.records + HELD_OUT, TRIAL_SEED)
    learnt = slice(0, split.records)
    made_up = replace(split, x=x[learnt], y=y[learnt], x_test=x[split.records :], y_test=y[split.records :])
    wanted = {(name, f"{epsilon:g}"): (name, epsilon) for name in CANDIDATES for epsilon in epsilons}

    def score(key: tuple[str, ...], candidate: protocol.Candidate) -> float:
        name, epsilon = wanted[key[0], key[1]]

        def compute() -> float:
            setting = plan_of(epsilon)
            method = method_for(name, dict(candidate), setting)
            data = private(made_up, context, TRIAL_SEED)
            run = fit(method, networks.softmax(made_up.features, 2), data, setting, seed=TRIAL_SEED)
            return metrics.nll(class_probabilities(run, made_up.x_test), made_up.y_test)

        return context.part(float, ("bayesian-dp trial", split.name, key, dict(candidate)), compute)

    about = (
        f"{HELD_OUT} records of a made-up set with the columns of {split.name}, learnt from {split.records} others of "
        "it under the plan of the real run"
    )
    offered: dict[tuple[str, ...], list[dict[str, float]]] = {
        key: CANDIDATES[name] for key, (name, _) in wanted.items()
    }
    return protocol.settle(offered, score, about=about, score="log loss", context=context)
