"""One posterior sample and hybrid sampling: cheap baselines whose cost is a pure epsilon."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import confide
from confide.boundary import PrivateData
from confide.data.schema import Schema
from confide.mechanism.posterior_sampling import PosteriorSampling
from confide.methods.ops import hybrid, one_posterior_sample
from confide.methods.sgld import SGLD
from confide.privacy.events import PureEvent

MECHANISM = PosteriorSampling(epsilon=2.0, radius=4.0, tolerance=1e-9)
SCHEMA = Schema(classes=2, records=120)


def records(count: int = 120) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 3, generator=generator) * 2 - 1
    return x, (x @ torch.tensor([3.0, -3.0, 0.0]) > 0.5).long()


def private(schema: Schema = SCHEMA) -> PrivateData:
    return PrivateData(*records(), schema=schema, seed=1)


def accuracy(posterior: object) -> float:
    x, y = records()
    return (posterior.predict(x).labels == y).double().mean().item()  # type: ignore[attr-defined]


def test_draws_predict_and_are_charged_one_by_one() -> None:
    data = private()
    sampled = one_posterior_sample(data, 3, MECHANISM, delta=1e-5, draws=2)
    assert accuracy(sampled.posterior) > 0.75
    assert sampled.privacy.events == (PureEvent(2.0, "add-remove", 2),)
    assert sampled.privacy.epsilon() == pytest.approx(4.0, rel=1e-3)
    assert sum(event.count for event in data.ledger.events("")) == 2
    with pytest.raises(ValueError, match="draws=0"):
        one_posterior_sample(data, 3, MECHANISM, delta=1e-5, draws=0)


def test_a_smaller_epsilon_learns_less() -> None:
    tiny = PosteriorSampling(epsilon=0.001, radius=4.0)
    assert one_posterior_sample(private(), 3, tiny, delta=1e-5).posterior.facts["temper"] == pytest.approx(0.001 / 4)


def test_hybrid_starts_from_the_draw_and_pays_for_both() -> None:
    data = private()
    plan = confide.plan(delta=1e-5, records=120, batch=50, steps=5, noise_multiplier=2.0)
    run = hybrid(data, 3, MECHANISM, SGLD(step_size=1e-12, burn_in=0.0), plan, seed=1)
    assert run.privacy.events == (MECHANISM.event(), *plan.events())
    assert run.privacy.epsilon() > MECHANISM.epsilon
    assert accuracy(run.posterior) > 0.75, "steps of length zero stay at the start, which was a draw"
    together = run.privacy.epsilon()
    assert 1e-5 - run.privacy.delta >= MECHANISM.slack(1, together), "the slack of all that was released"
    other = PosteriorSampling(epsilon=1.0, adjacency="replace-one")
    with pytest.raises(ValueError, match="adjacency="):
        hybrid(data, 3, other, SGLD(), plan)


def test_the_statement_leaves_room_for_the_inexact_sampler() -> None:
    """The delta of the statement and the slack of the draws add up to the delta asked for."""
    sampled = one_posterior_sample(private(), 3, MECHANISM, delta=1e-5)
    assert 1e-5 - sampled.privacy.delta == pytest.approx(MECHANISM.slack(), rel=1e-3)
    assert MECHANISM.slack() == pytest.approx((1 + math.exp(2.0)) * 1e-9)
    data = private()
    careless = PosteriorSampling(epsilon=2.0, radius=4.0, tolerance=1e-6)
    with pytest.raises(ValueError, match="tolerance=1e-06"):
        one_posterior_sample(data, 3, careless, delta=1e-5)
    assert not data.ledger.events(""), "refused before anything was charged"


def test_a_draw_without_two_classes_is_refused_before_it_is_charged() -> None:
    three = private(Schema(classes=3, records=120))
    with pytest.raises(ValueError, match="two classes"):
        three.draw(MECHANISM)
    assert not three.ledger.events("")


def test_records_that_cannot_answer_do_not_enter_the_draw() -> None:
    """Features that are not finite and labels outside the classes: the same draw as without these records."""
    x, y = records()
    broken_x = torch.cat([x, torch.tensor([[float("nan"), 0.0, 0.0], [0.1, 0.2, 0.3]])])
    broken_y = torch.cat([y, torch.tensor([1, 7])])
    clean = PrivateData(x, y, schema=SCHEMA, seed=1).draw(MECHANISM)
    assert torch.equal(PrivateData(broken_x, broken_y, schema=SCHEMA, seed=1).draw(MECHANISM), clean)


def test_functions_are_not_taken_for_a_method() -> None:
    assert "ops" not in confide.methods.names()
