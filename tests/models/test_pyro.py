"""Pyro models with one plate over the records, against the same models written as programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import HalfNormal, Normal, StudentT

import confide
from confide.errors import Refusal
from confide.mechanism.clipping import clipped_sum
from confide.mechanism.clipping.engine import engine_of
from confide.models.programs import Program, ProgramLikelihood
from confide.posteriors.draws import Draws

pyro: Any = pytest.importorskip("pyro")
dist: Any = pytest.importorskip("pyro.distributions")
GROUPS = 4


def robust(x: Tensor, y: Tensor | None = None) -> None:
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    scale = pyro.sample("scale", dist.HalfNormal(0.5 + slope[0].abs()))
    with pyro.plate("records", len(x)):
        pyro.sample("y", dist.StudentT(4.0, x @ slope, scale), obs=y)


def robust_written() -> Program:
    return confide.models.program(
        lambda p, x, y: StudentT(4.0, x @ p["slope"], p["scale"]).log_prob(y),
        {"slope": Normal(0.0, 1.0).expand([2]), "scale": lambda p: HalfNormal(0.5 + p["slope"][0].abs())},
    )


def effects(group: Tensor, y: Tensor | None = None) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    spread = pyro.sample("spread", dist.LogNormal(0.0, 1.0))
    effect = pyro.sample("effect", dist.Normal(mean, spread).expand([GROUPS]).to_event(1))
    with pyro.plate("people", len(group)):
        pyro.sample("seen", dist.Normal(effect[group], 0.5), obs=y)


def effects_written() -> Program:
    return confide.models.program(
        lambda p, x, y: Normal(p["effect"][x["group"]], 0.5).log_prob(y),
        {
            "mean": Normal(0.0, 1.0),
            "spread": torch.distributions.LogNormal(0.0, 1.0),
            "effect": lambda p: Normal(p["mean"], p["spread"]).expand([GROUPS]),
        },
    )


def records(name: str) -> tuple[Any, Tensor]:
    torch.manual_seed(3)
    x: Any = torch.randn(20, 2) if name == "robust" else {"group": torch.arange(20) % GROUPS}
    return x, torch.randn(20)


PAIRS = {"robust": (robust, robust_written), "effects": (effects, effects_written)}


@pytest.mark.parametrize("name", PAIRS)
def test_the_same_as_the_program_written_out(name: str) -> None:
    """Prior with its Jacobian, and every record's clipped gradient, at a position that is not the start."""
    model, written = PAIRS[name]
    x, y = records(name)
    made, wanted = confide.models.from_pyro(model, x, y), written()
    torch.manual_seed(5)
    position = torch.randn_like(wanted.unconstrained)
    sums = []
    for program in (made, wanted):
        with torch.no_grad():
            program.unconstrained.copy_(position)
        out = torch.zeros(len(position))
        clipped_sum(program, ProgramLikelihood().loss, x, y, clip=1.0, out=out)
        sums.append(out)
    torch.testing.assert_close(made.log_prior(position), wanted.log_prior(position))
    torch.testing.assert_close(sums[0], sums[1])
    anatomy = engine_of(made).anatomy
    assert anatomy is not None
    assert {seen.way for seen in anatomy.examined.values()} == {"isolated"}  # not one by one


def test_from_fit_to_named_draws() -> None:
    x, y = records("robust")
    program = confide.models.from_pyro(robust, x[:1], y[:1])
    data = confide.PrivateData(x, y, schema=confide.Schema(records=20))
    plan = confide.plan(records=20, batch=10, steps=6, epsilon=3.0, delta=1e-2)
    posterior = confide.fit(confide.methods.SGLD(), program, data, plan).posterior
    assert isinstance(posterior, Draws)
    draws = posterior.named_draws()
    assert draws["slope"].shape[1:] == (2,)
    assert (draws["scale"] > 0).all()


def test_nothing_is_drawn_and_nothing_is_left_behind() -> None:
    x, y = records("robust")
    state = torch.get_rng_state()
    program = confide.models.from_pyro(robust, x, y)
    program.log_prior(program.unconstrained.detach())
    assert torch.equal(state, torch.get_rng_state())
    assert not pyro.get_param_store().keys()


def two_plates(x: Tensor, y: Tensor | None = None) -> None:
    with pyro.plate("features", x.shape[1]):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("records", len(x)):
        pyro.sample("y", dist.Normal(x @ slope, 1.0), obs=y)


def hidden_numbers(x: Tensor, y: Tensor | None = None) -> None:
    with pyro.plate("records", len(x)):
        own = pyro.sample("own", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(own, 1.0), obs=y)


def seen_outside(x: Tensor, y: Tensor | None = None) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("records", len(x)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    pyro.sample("total", dist.Normal(mean, 1.0), obs=torch.zeros(()))


@pytest.mark.parametrize(
    ("model", "said"),
    [(two_plates, "2 plates"), (hidden_numbers, "'own'"), (seen_outside, "'total' is observed outside")],
)
def test_other_forms_are_refused_in_one_sentence(model: Any, said: str) -> None:
    x, y = records("robust")
    with pytest.raises(Refusal, match=said):
        confide.models.from_pyro(model, x, y)
