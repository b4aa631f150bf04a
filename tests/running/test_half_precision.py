"""Networks in half precision: steps are not lost, sums are made in single precision, the statement says so."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import confide
from confide import methods
from confide.mechanism.clipping import clipped_sum
from confide.mechanism.clipping.places import UNEVEN, Even
from confide.models.likelihoods import Categorical
from confide.running.fit import HALF, make_problem
from tests.conformance.conftest import Case, classification, small_plan

HALVES = (torch.bfloat16, torch.float16)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))


class Casting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = self.inner(x)
        return out


def fitted(case: Case, module: nn.Module, name: str = "sgld", steps: int = 20) -> confide.Run:
    return confide.fit(methods.get(name)(), module, case.data(), small_plan(case, steps=steps), seed=5)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["sgld", "bbp", "mc-dropout", "variational-dropout"])
def test_from_fit_to_file(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    case = classification()
    run = fitted(case, network().to(dtype), name)
    assert next(run.posterior.module.parameters()).dtype == dtype
    assert run.posterior.mean().dtype == torch.float32
    assert HALF in run.privacy.assumptions
    said = run.posterior.summary(case.x).centre
    whole = fitted(case, network(), name).posterior.summary(case.x).centre
    assert HALF not in fitted(case, network(), "sgd", steps=2).privacy.assumptions
    assert float((said - whole).abs().max()) < 0.1
    run.posterior.save(tmp_path / "a.safetensors")
    again = confide.load_posterior(tmp_path / "a.safetensors", module=network().to(dtype))
    assert torch.equal(again.summary(case.x).centre, said)


def test_small_steps_are_not_lost() -> None:
    """In bfloat16 itself a step of a thousandth of a weight would round to nothing."""
    case = classification()
    problem = make_problem(methods.SGD(), network().bfloat16(), case.schema, small_plan(case), seed=0)
    assert problem.rounded is not None
    before = problem.rounded.clone()
    for _ in range(100):
        problem.position.mul_(1.001)
    problem.settle()
    moved = problem.rounded.float() / before.float()
    torch.testing.assert_close(moved, torch.full_like(moved, 1.001**100), rtol=0.01, atol=0)
    assert torch.equal(before.clone().mul_(1.001), before)  # what a position in bfloat16 would do


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_sums_of_half_precision_are_made_in_single(dtype: torch.dtype) -> None:
    """Many records of one direction: a sum in half precision would stop growing, or overflow."""
    module = nn.Linear(4, 3).to(dtype)
    x, y = torch.ones(4096, 4).to(dtype), torch.zeros(4096, dtype=torch.long)
    out = torch.zeros(15)
    norms = clipped_sum(module, Categorical(3).loss, x, y, clip=1.0, out=out)
    assert norms.dtype == torch.float32
    one = torch.zeros(15)
    clipped_sum(module, Categorical(3).loss, x[:1], y[:1], clip=1.0, out=one)
    torch.testing.assert_close(out, 4096 * one, rtol=1e-2, atol=0)
    assert float(one.norm()) <= 1.0


def test_autocast_of_the_networks_own() -> None:
    case = classification()
    said = fitted(case, Casting()).posterior.summary(case.x).centre
    torch.testing.assert_close(said, fitted(case, Casting().inner).posterior.summary(case.x).centre, atol=0.1, rtol=0.1)


def test_autocast_around_a_fit_does_not_freeze_the_network() -> None:
    """Torch keeps the weights that it has cast for as long as autocast lasts; every question forgets them."""
    case = classification()
    whole = fitted(case, network())
    with torch.autocast("cpu", torch.bfloat16):
        run = fitted(case, network())
    found, expected = (one.posterior.mean() for one in (run, whole))
    assert float((found - expected).norm() / expected.norm()) < 0.05
    assert HALF in run.privacy.assumptions


@pytest.mark.parametrize("name", ["sgld", "mc-dropout", "bbp"])
def test_double_precision_records_are_cast(name: str) -> None:
    case = classification()
    data = confide.PrivateData(case.x.double().numpy(), case.y.numpy(), schema=case.schema, seed=7)
    run = confide.fit(methods.get(name)(), copy.deepcopy(network()), data, small_plan(case, steps=5), seed=5)
    said: Any = run.posterior.summary(case.x.double().numpy())
    torch.testing.assert_close(said.centre, fitted(case, network(), name, 5).posterior.summary(case.x).centre)


def test_a_device_that_rounds_by_the_size_of_a_batch_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    for alike, stated in ((True, False), (False, True)):
        monkeypatch.setattr("confide.mechanism.clipping.structure.even_batches", lambda *_, a=alike: Even(alike=a))
        privacy = fitted(classification(), network(), "sgd", steps=2).privacy
        assert (UNEVEN in privacy.assumptions) is stated
        assert (UNEVEN in privacy.statement()) is stated


@pytest.mark.parametrize("name", ["sgd", "bbp", "sep"])
def test_ordinary_networks_are_not_stated(name: str) -> None:
    """Thirteen columns, and few outputs: rows of odd length, which were stated on processors with long vectors."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(50, 13, generator=generator) * 2 - 1, torch.randint(2, (50,), generator=generator)
    module = nn.Sequential(nn.Linear(13, 5), nn.SiLU(), nn.Linear(5, 2))
    chosen = confide.networks.logistic(13) if name == "sep" else module
    case = Case(x, y, confide.Schema(classes=2, records=50), chosen)
    assert fitted(case, chosen, name, steps=2).privacy.assumptions == ()
