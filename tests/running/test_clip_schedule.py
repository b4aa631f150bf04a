"""A clip that changes over time by a public schedule: what is cut, what is charged, and who refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import confide
from confide.data.schema import Schema
from confide.methods.sep import SEP
from confide.methods.sgd import SGD
from confide.methods.sgld import SGLD
from confide.models import networks
from confide.models.likelihoods import Gaussian
from confide.models.priors import FlatPrior
from confide.privacy.accountants import sound_epsilon
from confide.sources.private_data import PrivateData

X = torch.tensor([[1.0], [-0.5], [0.25], [0.8]])
Y = torch.tensor([3.0, -2.0, 4.0, 0.5])
CLIPS = (2.0, 0.5, 0.1)


def data(seed: int | None = 1) -> PrivateData:
    return PrivateData(X, Y, schema=Schema(records=4), seed=seed)


def by_hand(clips: list[float], rate: float) -> Tensor:
    place = torch.zeros(2, dtype=torch.float64)
    rows = torch.cat([X, torch.ones(4, 1)], 1).double()
    for clip in clips:
        gradients = (rows @ place - Y.double())[:, None] * rows
        gradients *= (clip / gradients.norm(dim=1, keepdim=True)).clamp(max=1)
        place = place - rate * gradients.mean(0)
    return place


def test_every_step_has_the_clip_of_its_block() -> None:
    plan = confide.plan(delta=1e-5, records=4, steps=6, sampling="full-batch", private=False, clip=1.0)
    scheduled = plan.with_clips(CLIPS)
    method = SGD(learning_rate=0.3, prior=FlatPrior())
    run = confide.fit(method, networks.linear(1), data(), scheduled, likelihood=Gaussian(1.0), seed=1)
    expected = by_hand([2.0, 2.0, 0.5, 0.5, 0.1, 0.1], 0.3)
    assert torch.allclose(run.posterior.mean().double(), expected, atol=1e-5)
    assert not torch.allclose(by_hand([2.0] * 6, 0.3), expected, atol=1e-2), "the first clip throughout would be seen"


def test_noise_goes_with_the_clip_and_the_price_stays() -> None:
    plan = confide.plan(delta=1e-5, records=1000, batch=100, steps=10, epsilon=2.0, clip=4.0)
    scheduled = plan.with_clips(CLIPS)
    assert [count for _, count in scheduled.blocks] == [3, 4, 3]
    for mechanism, _ in scheduled.blocks:
        assert mechanism.noise_std == pytest.approx(mechanism.clip * plan.mechanism.noise_multiplier)
    whole, parts = plan.events(), scheduled.events()
    assert sum(event.count for event in parts) == whole[0].count
    assert sound_epsilon(parts, 1e-5) == pytest.approx(sound_epsilon(whole, 1e-5), rel=1e-6)
    run = confide.fit(SGLD(), networks.linear(1), data(None), _small(scheduled), likelihood=Gaussian(1.0), seed=1)
    assert run.privacy.epsilon() <= 2.0


def _small(plan: confide.Plan) -> confide.Plan:
    """The same blocks for four records, all in every batch."""
    return confide.plan(delta=1e-5, records=4, steps=plan.steps, sampling="full-batch", epsilon=2.0).with_clips(CLIPS)


def test_methods_with_a_unit_of_their_own_refuse_before_the_charge() -> None:
    source = data()
    plan = confide.plan(delta=1e-5, records=4, steps=4, sampling="full-batch", noise_multiplier=5.0)
    with pytest.raises(ValueError, match="sep has one unit for all steps"):
        confide.fit(SEP(), networks.linear(1), source, plan.with_clips((1.0, 2.0)), likelihood=Gaussian(1.0))
    assert not source.ledger.entries()


@pytest.mark.parametrize("clips", [(), (1.0, 2.0, 3.0, 4.0, 5.0), (1.0, math.nan), (1.0, -1.0)])
def test_bad_schedules(clips: tuple[float, ...]) -> None:
    plan = confide.plan(delta=1e-5, records=4, steps=4, sampling="full-batch", noise_multiplier=5.0)
    with pytest.raises(ValueError, match="clip"):
        plan.with_clips(clips)
