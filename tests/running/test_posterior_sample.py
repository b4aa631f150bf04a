"""One posterior sample and hybrid sampling: cheap baselines whose cost is a pure epsilon."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import confide
from confide.data.schema import Schema
from confide.mechanism.posterior_sampling import PosteriorSampling
from confide.methods.sgld import SGLD
from confide.privacy.accountants import sound_epsilon
from confide.privacy.events import PureEvent
from confide.running.posterior_sample import hybrid, one_posterior_sample
from confide.sources.private_data import PrivateData

MECHANISM = PosteriorSampling(epsilon=2.0, radius=4.0, tolerance=1e-9)
SCHEMA = Schema(classes=2, records=120)


def records(count: int = 120) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 3, generator=generator) * 2 - 1
    return x, (x @ torch.tensor([3.0, -3.0, 0.0]) > 0.5).long()


def private(schema: Schema = SCHEMA, seed: int | None = 1) -> PrivateData:
    return PrivateData(*records(), schema=schema, seed=seed)


def accuracy(posterior: object) -> float:
    x, y = records()
    return (posterior.predict(x).labels == y).double().mean().item()  # type: ignore[attr-defined]


def test_draws_predict_and_are_charged_one_by_one() -> None:
    data = private()
    sampled = one_posterior_sample(data, 3, MECHANISM, delta=1e-5, draws=2)
    assert accuracy(sampled.posterior) > 0.75
    assert sampled.privacy.events == (PureEvent(2.0, "add-remove", 2, MECHANISM.slack),)
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
    exact = (replace(MECHANISM.event(), slack=0.0), *plan.events())
    assert run.privacy.delta == 1e-5
    assert run.privacy.epsilon() > sound_epsilon(exact, 1e-5), "the slack is part of the price"
    other = PosteriorSampling(epsilon=1.0, adjacency="replace-one")
    with pytest.raises(ValueError, match="adjacency="):
        hybrid(data, 3, other, SGLD(), plan)


def test_ledger_and_statement_know_that_the_sampler_is_inexact() -> None:
    """An event without the slack would let both claim a delta that the draws do not keep."""
    data = private(seed=None)
    sampled = one_posterior_sample(data, 3, MECHANISM, delta=1e-5, draws=3)
    missed = 3 * (1 + math.exp(2.0)) * 1e-9
    for spent in (data.ledger.spent, lambda delta: sampled.privacy.epsilon(delta)):
        assert math.isinf(spent(0.999 * missed)), "below the slack nothing is claimed"
        assert spent(1.001 * missed) == pytest.approx(6.0)
    assert "epsilon 2 and delta 8.39e-09" in sampled.privacy.statement()
    assert "slack 8.39e-09" in data.ledger.to_rows()[0]["event"]
    with pytest.raises(ValueError, match=r"delta=1e-08: .*above 2\.5e-08"):
        one_posterior_sample(data, 3, MECHANISM, delta=1e-8, draws=3)
    assert len(data.ledger.entries()) == 3, "refused before anything was charged"


def test_a_ceiling_counts_the_slack() -> None:
    data = private(seed=None)
    data.ledger.limit(100.0, delta=MECHANISM.slack / 2)
    with pytest.raises(confide.BudgetExceeded):
        data.draw(MECHANISM)
    data.ledger.limit(100.0, delta=MECHANISM.slack * 1.01)
    data.draw(MECHANISM)
    with pytest.raises(confide.BudgetExceeded):
        data.draw(MECHANISM)


def test_what_cannot_work_is_refused_before_the_draw_is_paid() -> None:
    """Another number of features, or a plan for other records, showed only after the draw was charged."""
    data = private()
    plan = confide.plan(delta=1e-5, records=120, batch=50, steps=5, noise_multiplier=2.0)
    with pytest.raises(Exception, match="shape"):
        one_posterior_sample(data, 4, MECHANISM, delta=1e-5)
    with pytest.raises(Exception, match="shape"):
        hybrid(data, 4, MECHANISM, SGLD(), plan)
    elsewhere = confide.plan(delta=1e-5, records=999, batch=50, steps=5, noise_multiplier=2.0)
    with pytest.raises(ValueError, match="records=999"):
        hybrid(data, 3, MECHANISM, SGLD(), elsewhere)
    assert not data.ledger.entries()


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
