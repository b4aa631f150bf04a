"""Before a program's short chain begins, records say near which draws of the prior it should."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import HalfNormal, Normal

import confide
from confide.layers.programs import ScoutedProgram
from confide.mechanism.clipping import clipped_sum
from confide.methods import SGHMC, SGLD, _chain
from confide.methods._scouts import Scouts
from confide.models.programs import Program, ProgramLikelihood
from confide.running.journal import Checkpoints
from tests.models.test_programs import fitted, records, regression


def two_clouds() -> Program:
    """Which record belongs to which of them is summed out; the second is above the first."""

    def said(p: Any, x: Tensor, y: Tensor) -> Tensor:
        centres = torch.stack([p["low"], p["low"] + p["gap"]])
        return torch.logsumexp(Normal(centres, 0.5).log_prob(y), 0) - math.log(2)

    priors: dict[str, Any] = {"low": Normal(0.0, 3.0), "gap": HalfNormal(5.0)}
    return confide.models.program(said, priors, start={"low": -6.0, "gap": 0.3}).double()


def test_a_record_answers_with_how_much_worse_each_vector_explains_it() -> None:
    model = two_clouds()
    asked = ScoutedProgram(model, 4)
    rows = [[-1.0, 0.7], [1.0, 0.0], [math.nan, 0.0], [1.2, 0.0]]
    asked.vectors.copy_(torch.tensor(rows, dtype=torch.float64))
    y = torch.tensor([-1.0, 1.2, 3.0, 1e200], dtype=torch.float64)  # the last is as unlikely to one as to the other
    x, likelihood = torch.zeros(4, 1, dtype=torch.float64), ProgramLikelihood()
    alone = []
    for row in range(4):
        total = torch.zeros(4, dtype=torch.float64)
        clipped_sum(asked, likelihood.loss, x[row : row + 1], y[row : row + 1], clip=10.0, out=total)
        alone.append(total)
    for row in range(3):
        values = [model.constrained(asked.vectors[number]) for number in (0, 1, 3)]
        said = torch.stack([model.log_likelihood(value, x[row], y[row]) for value in values])
        worse = torch.ones(4, dtype=torch.float64)  # a vector that says nothing explains nothing
        worse[[0, 1, 3]] = ((said.max() - said) / 4).clamp(max=1)
        assert torch.allclose(alone[row], worse - worse.mean(), atol=1e-9)
    assert float(alone[3].norm()) < 1e-9
    together = torch.zeros(4, dtype=torch.float64)
    norms = clipped_sum(asked, likelihood.loss, x, y, clip=10.0, out=together)
    assert torch.allclose(together, torch.stack(alone).sum(0))
    assert float(norms.max()) <= math.sqrt(4) / 2


def test_vectors_are_drawn_anew_only_where_losses_differ_beyond_noise() -> None:
    problem: Any = SimpleNamespace(generator=torch.Generator().manual_seed(0))
    vectors = torch.linspace(-8, 8, 32, dtype=torch.float64)[:, None]
    by_chance = 0.02 * torch.randn(32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    nothing = Scouts(vectors, 2 * by_chance, noise=4 * 0.02**2, asked=2)
    assert nothing.drawn_anew(problem) is nothing
    assert torch.equal(nothing.midst(), vectors[0])
    found = Scouts(vectors, 2 * (by_chance + 0.1 * (vectors[:, 0] - 4).abs()), noise=4 * 0.02**2, asked=2)
    again = found.drawn_anew(problem)
    assert again.asked == 0
    assert float((again.vectors - 4).abs().mean()) < 0.5 * float((vectors - 4).abs().mean())
    assert abs(float(again.vectors.mean() - found.midst())) < 0.5, "about the same midst"


def led(monkeypatch: pytest.MonkeyPatch, scouts: bool) -> Any:
    generator = torch.Generator().manual_seed(1)
    count = 2000
    upper = torch.rand(count, generator=generator) < 0.5
    y = 1.0 + 4.0 * upper + 0.5 * torch.randn(count, generator=generator, dtype=torch.float64)
    if not scouts:
        monkeypatch.setattr(_chain, "each_generation", lambda burn_in: 0)
    data = confide.PrivateData(torch.zeros(count, 1), y, schema=confide.Schema(records=count), seed=2)
    plan = confide.plan(records=count, batch=200, steps=100, epsilon=1.0, delta=1e-5)
    return confide.fit(SGLD(), two_clouds(), data, plan, seed=3).posterior


def test_a_chain_begins_where_records_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its start both clouds are one, and slopes lead to a single cloud in their midst."""
    found = led(monkeypatch, True)
    assert found.facts["draws_of"].startswith("the belief")
    draws = found.named_draws()
    for name, truth in (("low", 1.0), ("gap", 4.0)):
        assert abs(float(draws[name].mean()) - truth) < 4 * float(draws[name].std()) < 0.3


@pytest.mark.slow
def test_without_scouts_it_does_not_come_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = led(monkeypatch, False)
    gap = found.named_draws()["gap"]
    assert found.facts["draws_of"].startswith("the prior") or abs(float(gap.mean()) - 4.0) > 0.3


@pytest.mark.parametrize("method", [SGLD(), pytest.param(SGHMC(), marks=pytest.mark.slow)])
def test_a_run_that_is_killed_while_scouts_are_out_goes_on(method: Any, tmp_path: Any) -> None:
    x, y = records()

    class KilledError(Exception):
        pass

    def kill(done: int, total: int) -> None:
        if done == 3:
            raise KilledError

    book = Checkpoints(tmp_path / "run", every=2)
    with pytest.raises(KilledError):
        fitted(regression(), x, y, method, plan={"steps": 60}, checkpoint=book, progress=kill)
    again: Any = fitted(regression(), x, y, method, plan={"steps": 60}, checkpoint=book).posterior
    assert torch.isfinite(again.mean()).all()
