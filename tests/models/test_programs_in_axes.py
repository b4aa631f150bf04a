"""Samplers on programs move along axes of one record's information, put back what a clip takes, and say what fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import HalfNormal, Normal

import confide
from confide.evaluate.mixing import mixing_facts
from confide.methods import SGHMC, SGLD
from confide.models.likelihoods import Gaussian
from confide.models.program_sharpness import clipped_score
from confide.models.programs import ProgramLikelihood, scores_of
from confide.posteriors.draws import Draws
from confide.running.journal import Checkpoints
from confide.sources.replay import Recorder, Replay
from tests.models.test_programs import RECORDS, fitted, records, regression


@pytest.mark.parametrize("method", [SGLD(), SGHMC()])
def test_a_replay_that_knows_the_form_of_records_is_the_same_run(method: Any) -> None:
    x, y = records()
    plan = confide.plan(records=RECORDS, delta=1e-3, epsilon=1.0, clip=1.0, batch=20, steps=24)
    recorder = Recorder(confide.PrivateData(x, y, schema=confide.Schema(records=RECORDS), seed=1))
    whole: Any = confide.fit(method, regression(), recorder, plan, seed=2).posterior
    replay = Replay(recorder.releases, recorder.schema, form=recorder.form())
    again: Any = confide.fit(method, regression(), replay, plan, seed=2).posterior
    assert torch.equal(whole.draws, again.draws)
    assert whole.facts["clip_of_the_loss"] >= 2 * 2.0, "twice the root of four parameters"


def test_what_a_clip_takes_is_put_back() -> None:
    """Scores of a scale are skewed: cut at one they lead away from it by many deviations."""
    model = confide.models.program(lambda p, x, y: Normal(0.0, p["s"]).log_prob(y), {"s": HalfNormal(1.0)}).double()
    form = torch.zeros(4, 1), torch.zeros(4), None
    axes, position = torch.eye(1, dtype=torch.float64), model.unconstrained.detach()
    y = torch.distributions.Normal(0.0, float(model.constrained(position)["s"])).sample((100_000,)).double()
    scores = scores_of(model, position, torch.zeros(1, 1), y)[0][0]
    for clip in (1.0, 2.0):
        taken = (scores * ((clip / scores.abs()).clamp(max=1) - 1)).mean(0)
        found = clipped_score(model, position, form, axes, clip)
        assert found is not None
        assert torch.allclose(found, taken, atol=0.02)
        assert taken.abs() > 0.1
    wide = clipped_score(model, position, form, axes, 1e6)
    assert wide is not None
    assert wide.abs() < 1e-6


def test_classes_that_nobody_declared_are_found() -> None:
    """Four of them; a fifth would be out of range."""
    cuts = torch.tensor([-1.0, 0.0, 1.0])

    def said(p: Any, x: Any, y: Any) -> Any:
        below = torch.cat([torch.zeros(1), torch.sigmoid(cuts - p["slope"] @ x), torch.ones(1)])
        return below.diff().log().gather(0, y.long().reshape(1)).squeeze(0)

    model = confide.models.program(said, {"slope": Normal(0.0, 1.0).expand([2])})
    x, _ = records()
    y = torch.arange(RECORDS).remainder(4).float()
    found = fitted(model, x, y, SGLD(), plan={"steps": 40}).posterior
    assert "clipping" not in found.facts


def test_a_program_whose_values_are_not_found_says_so() -> None:
    """Records have their randomness in x, so that no law of y tells what the clip takes."""
    model = confide.models.program(
        lambda p, x, y: Normal(p["slope"], 0.5).log_prob(x).sum() + 0.0 * y, {"slope": Normal(0.0, 1.0).expand([2])}
    )
    x, y = records()
    found = fitted(model, x, torch.zeros_like(y), SGLD(), plan={"steps": 40})
    assert "not known" in found.posterior.facts["warning"]


def test_a_chain_on_its_way_is_told_by_its_worst_parameter() -> None:
    """One of three wanders off: their median says nothing of it."""
    draws = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    draws[:, 2] += torch.arange(100) / 10
    model = confide.models.program(
        lambda p, x, y: Normal(p["m"].sum(), 1.0).log_prob(y), {"m": Normal(0.0, 1.0).expand([3])}
    )
    posterior = Draws(model, ProgramLikelihood(), draws, torch.full((100,), 0.01), {"burn_in_steps": 1})
    assert "did not mix" in mixing_facts(posterior)["warning"]
    network = Draws(nn.Linear(2, 1), Gaussian(), draws, torch.full((100,), 0.01), {"burn_in_steps": 1})
    assert "warning" not in mixing_facts(network)


def test_a_short_chain_says_what_its_draws_are_worth() -> None:
    """Halves that agree say little of a parameter that stands still for fifteen draws at a time."""
    fresh = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    model = confide.models.program(
        lambda p, x, y: Normal(p["m"].sum(), 1.0).log_prob(y), {"m": Normal(0.0, 1.0).expand([2])}
    )

    def facts(draws: Any, module: Any, likelihood: Any) -> Any:
        posterior = Draws(module, likelihood, draws, torch.full((100,), 0.01), {"burn_in_steps": 1})
        return mixing_facts(posterior)

    slow = fresh.clone()
    slow[:, 0] = fresh[:7, 0].repeat_interleave(15)[:100]  # fifteen draws alike
    assert facts(slow, model, ProgramLikelihood())["warning"].startswith("The chain was short: its 100 draws are worth")
    assert "warning" not in facts(fresh, model, ProgramLikelihood())
    assert "warning" not in facts(slow, nn.Linear(1, 1), Gaussian()), "of networks nobody reads single weights"


@pytest.mark.parametrize("method", [SGLD(), SGHMC()])
def test_a_killed_chain_goes_on_along_its_axes(method: Any, tmp_path: Any) -> None:
    x, y = records()
    whole: Any = fitted(regression(), x, y, method, plan={"steps": 24}).posterior

    class KilledError(Exception):
        pass

    def kill(done: int, total: int) -> None:
        if done == 15:
            raise KilledError

    book = Checkpoints(tmp_path / "run", every=5)
    with pytest.raises(KilledError):
        fitted(regression(), x, y, method, plan={"steps": 24}, checkpoint=book, progress=kill)
    again: Any = fitted(regression(), x, y, method, plan={"steps": 24}, checkpoint=book).posterior
    assert torch.isfinite(again.mean()).all()
    assert again.facts["pace"] == whole.facts["pace"]
    assert len(again.draws) == len(whole.draws)
