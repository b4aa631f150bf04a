"""Every method in methods/ is audited without being listed: the lower bound stays below the claim, the checks pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import confide
from confide import methods
from confide.auditing import audit
from confide.auditing.canaries import CanarySource, marked_rows, unit_directions
from confide.auditing.problems import problem_for
from confide.mechanism.gaussian import SampledGaussian
from confide.sources.private_data import PrivateData
from confide.sources.queries import StatisticQuery

every_method = pytest.mark.parametrize("name", methods.names())
# One whole audit; those of the other methods are among the slow tests.
AUDITED = ("sgld",)


@pytest.mark.parametrize(
    "name", [name if name in AUDITED else pytest.param(name, marks=pytest.mark.slow) for name in methods.names()]
)
def test_the_claim_survives(name: str) -> None:
    found = audit(methods.get(name)(), epsilon=2.0, canaries=300, steps=4, rate=0.5, seed=3)
    assert found.epsilon_lower < found.epsilon_claimed
    assert found.caught_by == ()
    assert [check.name for check in found.checks] == [
        "sensitivity",
        "noise size",
        "noise shape",
        "fresh noise",
        "empty batch",
        "wide noise",
        "no trace",
        "sampling",
        "ledger",
    ]


@every_method
def test_canaries_count_for_exactly_the_clip(name: str) -> None:
    """The signal is what theory says; a canary that never counts would let every mechanism pass."""
    method, canaries, steps, noise = methods.get(name)(), 200, 4, 2.0
    given = problem_for(method)
    included = np.random.default_rng(0).random(canaries) < 0.5
    rows = marked_rows(given.x, included)
    targets = torch.cat([given.y, torch.zeros(canaries, dtype=given.y.dtype)])
    data = PrivateData(rows, targets, schema=given.schema(len(rows)), seed=1)
    source = CanarySource(data, given.x.shape[1:], canaries, len(rows))
    plan = confide.plan(noise_multiplier=noise, delta=1e-5, records=len(rows), steps=steps, sampling="full-batch")
    confide.fit(method, given.module, source, plan, seed=1)
    scores = source.scores.sum(1) / np.sqrt(steps)
    difference = scores[included].mean() - scores[~included].mean()
    assert difference == pytest.approx(np.sqrt(steps) / noise, abs=5 * 2 / np.sqrt(canaries))
    assert scores[~included].std() == pytest.approx(1.0, abs=0.25)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # two audits of thousands of canaries, perhaps beside others
@every_method
def test_the_claim_survives_a_strong_attack(name: str) -> None:
    for rate, steps in ((1.0, 4), (0.25, 16)):
        found = audit(methods.get(name)(), epsilon=2.0, canaries=8000, steps=steps, rate=rate, seed=4)
        assert found.passed, found.caught_by
        assert found.epsilon_lower > 0.5, "an attack without power proves nothing"


@pytest.mark.parametrize("name", ["sgd", "sgld"])
def test_the_black_box_stays_below_the_claim(name: str) -> None:
    found = audit(methods.get(name)(), epsilon=8.0, canaries=300, steps=16, rate=1.0, attack="black-box", seed=2)
    assert found.epsilon_lower < found.epsilon_claimed
    assert found.score == "posterior"
    if name == "sgd":
        assert found.epsilon_lower > 0.5, "labels learnt by heart must show"


def test_canaries_in_several_groups_are_one_run() -> None:
    found = audit(methods.SGD(), epsilon=2.0, canaries=1500, steps=2, rate=1.0, seed=1)
    assert found.canaries == 1500
    assert 0 < found.epsilon_lower < 2.0


def test_statistics_have_canaries_too() -> None:
    rows = marked_rows(torch.zeros(3, 2), [True, False, True])
    data = PrivateData(rows, torch.zeros(6), schema=confide.Schema(records=6), seed=0)
    source = CanarySource(data, torch.Size([2]), 3, 6)
    mechanism = SampledGaussian(0.0, 0.5, 1.0, 6, "full-batch", private=False)
    query = StatisticQuery(lambda x, y: torch.ones(len(x), 8, dtype=torch.float64) * 1e-9, 8)
    found = source.answer(query, mechanism).sum
    directions = source.directions(8, torch.float64)
    assert torch.allclose(directions @ found, torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64), atol=1e-6)


def test_directions_are_orthonormal_where_there_is_room() -> None:
    square = unit_directions(5, 9, torch.float64, 0)
    assert torch.allclose(square @ square.T, torch.eye(5, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(unit_directions(9, 5, torch.float64, 0).norm(dim=1), torch.ones(9, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attack": "grey-box"}, "attack='grey-box': must be one of white-box, black-box"),
        ({"canaries": 3}, "canaries=3: must be at least 10"),
        ({"steps": 3}, "steps=3: must be an even number"),
        ({"rate": 0.0}, r"rate=0.0: must be between 0.01 and 1"),
        ({"fault": "gremlins"}, "fault='gremlins': must be one of noise halved"),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        audit(methods.SGD(), epsilon=1.0, **options)  # type: ignore[arg-type]
