"""The audit can fail: bugs planted in the code that a real run goes through, and in the data, each caught."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import confide
import confide.sources.answers as answers
import confide.sources.private_data as boundary
from confide import methods
from confide.auditing import audit, self_test
from confide.auditing.canaries import combined
from confide.auditing.checks import CHECKS, Bench, run_checks
from confide.auditing.faults import FAULTS, FaultyData
from confide.auditing.problems import problem_for
from confide.auditing.self_test import SETTINGS, faults_of
from confide.mechanism import sampling
from confide.mechanism.clipping import certified, rows
from confide.mechanism.clipping.anatomy import anatomy_of
from confide.mechanism.noise import NoiseStream

# What has to speak against the claim, at least.
CAUGHT_BY = {
    "noise halved": {"lower bound", "noise size", "empty batch"},
    "no clip": {"lower bound", "sensitivity"},
    "clip per layer": {"lower bound", "sensitivity"},
    "same noise": {"lower bound", "fresh noise"},
    "no sampling": {"lower bound", "sampling"},
}
BY_CHECKS = {
    **{fault: names - {"lower bound"} for fault, names in CAUGHT_BY.items()},
    "noise halved every second step": {"noise size", "empty batch"},
    "noise with period 2": {"fresh noise", "empty batch"},
    "noise with period 3": {"fresh noise", "empty batch"},
    "no noise in the last coordinates": {"noise size", "empty batch", "wide noise"},
    "noise held over 8 coordinates": {"fresh noise", "empty batch", "wide noise"},
    "a block of 8 repeated": {"fresh noise", "empty batch", "wide noise"},
    "uniform noise": {"noise shape", "empty batch", "wide noise"},
    "no noise after step 8": {"noise size", "empty batch"},
    "record 0 always in": {"sampling"},
    "previous batch added": {"sensitivity", "sampling"},
    "half of the steps charged": {"ledger"},
    "nothing charged": {"ledger"},
    "records counted in low-order bits": {"no trace"},
}


# The quick run breaks the mechanism itself in one way and plants every second fault; all others are slow tests.
BROKEN = [fault if fault == "no clip" else pytest.param(fault, marks=pytest.mark.slow) for fault in CAUGHT_BY]
PLANTED = [
    (fault, "sgd") if place % 2 == 0 else pytest.param(fault, "sgd", marks=pytest.mark.slow)
    for place, fault in enumerate(FAULTS)
]
# Where releases are small, and steps are of several kinds.
ELSEWHERE = [("clip per layer", "bbp"), ("noise halved every second step", "features")]
# Three checks of one run.
GROUP = dict.fromkeys(("noise size", "noise shape", "fresh noise"), "noise")


def plant(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the mechanism's own code."""
    normal = NoiseStream.normal_
    if fault == "noise halved":
        monkeypatch.setattr(NoiseStream, "normal_", lambda self, out, std: normal(self, out, std / 2))
    elif fault == "no clip":
        monkeypatch.setattr(certified, "clip_factors", lambda norms, *_: torch.ones_like(norms))
        for module in (certified, rows):
            monkeypatch.setattr(module, "row_factors", lambda sizes, scale, *_: scale)
    elif fault == "clip per layer":
        right = answers.clipped_sum  # type: ignore[attr-defined]

        def per_layer(module: Any, *arguments: Any, clip: float, style: str, **options: Any) -> Tensor:
            wide = clip * math.sqrt(anatomy_of(module).groups)
            return right(module, *arguments, clip=wide, style="per-layer", **options)

        monkeypatch.setattr(answers, "clipped_sum", per_layer)
    elif fault == "same noise":
        monkeypatch.setattr(NoiseStream, "normal_", lambda self, out, std: normal(NoiseStream(5), out, std))
    else:
        # The stream is the same object for all batches of one data set, so it can count them.
        def in_order(stream: Any, size: int, rate: float) -> Any:
            stream.batches = getattr(stream, "batches", -1) + 1
            batch = round(rate * size)
            return np.sort((np.arange(batch) + stream.batches * batch) % size)

        monkeypatch.setattr(sampling, "poisson_batch", in_order)


@pytest.mark.parametrize("fault", BROKEN)
def test_a_bug_in_the_mechanism_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(fault, monkeypatch)
    found = audit(methods.SGLD(), seed=6, **SETTINGS[fault])
    assert set(found.caught_by) >= CAUGHT_BY[fault]
    assert not found.passed


@pytest.mark.slow
def test_a_bug_for_shuffled_passes_is_seen_by_the_check_of_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes over a permuted data set, charged as Poisson: no score knows the order, but rows join too evenly."""
    passes: dict[int, list[int]] = {}

    def shuffled(stream: NoiseStream, size: int, rate: float) -> Any:
        left = passes.setdefault(id(stream), [])
        if len(left) < round(rate * size):
            left[:] = stream.permutation(size).tolist()
        batch, left[:] = left[: round(rate * size)], left[round(rate * size) :]
        return np.sort(np.asarray(batch, dtype=np.int64))

    monkeypatch.setattr(sampling, "poisson_batch", shuffled)
    plan = confide.plan(noise_multiplier=1.0, delta=1e-5, records=160, batch=10, steps=4)
    failed = [c.name for c in checks_of(methods.SGD(), plan, boundary.PrivateData) if not c.passed]
    assert failed == ["sampling"]


def checks_of(method: Any, plan: confide.Plan, make_data: Any) -> Any:
    return run_checks(method, problem_for(method), plan, make_data, seed=8)


@pytest.mark.parametrize(
    ("fault", "name"), [*PLANTED, *(pytest.param(*case, marks=pytest.mark.slow) for case in ELSEWHERE)]
)
def test_planted_data_fails_the_checks_that_look_for_it(fault: str, name: str) -> None:
    """What `confide audit --self-test` plants. The slow form below looks at all checks in all methods."""
    method = methods.get(name)()
    plan = confide.plan(noise_multiplier=1.5, delta=1e-5, records=160, batch=10, steps=4)
    bench = Bench(method, problem_for(method), plan, partial(FaultyData, fault=fault), 8)
    groups = {GROUP.get(expected, expected) for expected in BY_CHECKS[fault]}
    failed = {check.name for group in groups for check in CHECKS[group](bench) if not check.passed}
    assert failed >= BY_CHECKS[fault]


def test_a_step_without_noise_is_worth_more_than_the_others() -> None:
    """Scores go by step, so that the guesses alone see noise that stops half-way."""
    found = audit(methods.SGD(), fault="no noise after step 8", seed=3, **SETTINGS["no noise after step 8"])
    assert "lower bound" in found.caught_by


def test_noise_that_steps_share_falls_out_of_the_guesses() -> None:
    """Three of four steps have one noise, the other its own: a mean of them shows who is in, a sum does not."""
    random = np.random.default_rng(0)
    included, shared = random.random(400) < 0.5, random.normal(size=400)
    steps = [random.normal(size=400), shared, -shared, shared]
    scores = np.stack([step + 0.3 * included for step in steps], 1)

    def apart(found: np.ndarray[Any, Any]) -> float:
        return float((found[included].mean() - found[~included].mean()) / found[included].std())

    assert apart(scores.sum(1)) < 2
    assert apart(combined(scores)) > 20
    right = random.normal(size=(400, 4)) + 0.3 * included[:, None]
    assert np.array_equal(combined(right), right.sum(1))


@pytest.mark.slow
def test_false_alarms_of_whole_audits_are_rare() -> None:
    """All checks of a right mechanism over many seeds: chances are seldom small, and none alarms."""
    seeds, level = 60, 0.05
    method, plan = methods.SGD(), confide.plan(noise_multiplier=1.5, delta=1e-5, records=160, batch=10, steps=4)
    seldom: Counter[str] = Counter()
    for seed in range(seeds):
        for check in run_checks(method, problem_for(method), plan, boundary.PrivateData, seed=seed):
            assert check.passed, (seed, check)
            seldom[check.name] += check.chance is not None and check.chance <= level
    assert max(seldom.values()) <= seeds * level + 4 * math.sqrt(seeds * level * (1 - level))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # nineteen audits
@pytest.mark.parametrize("name", methods.names())
def test_every_fault_is_caught_in_every_method(name: str) -> None:
    method = methods.get(name)()
    rows = self_test(method, seed=9)
    assert [row.fault for row in rows] == [None, *faults_of(method)]
    assert rows[0].caught_by == ()
    for row in rows[1:]:
        assert row.fault is not None
        assert set(row.caught_by) >= CAUGHT_BY.get(row.fault, BY_CHECKS[row.fault]), row
