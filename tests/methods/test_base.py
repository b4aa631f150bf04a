"""A method's traits are members of its base class: nothing probes for them, and what is no method is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import confide
from confide import methods
from confide.data.schema import Schema
from confide.errors import Refusal
from confide.methods.base import Method, Problem
from confide.models import networks
from confide.posteriors.draws import Draws
from confide.running.chains import fit_chains
from confide.sources.queries import GradientQuery, Release

RECORDS = 40


def _data() -> confide.PrivateData:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(RECORDS, 3, generator=generator)
    return confide.PrivateData(x, (x.sum(1) > 1.5).long(), schema=Schema(classes=2, records=RECORDS), seed=0)


def _plan() -> confide.Plan:
    return confide.plan(epsilon=3, delta=1e-3, records=RECORDS, batch=10, epochs=2)


@dataclass(frozen=True)
class Standing(Method):
    """Stays where it starts: the least that a method can be."""

    name: ClassVar[str] = "standing"

    def init(self, problem: Problem) -> int:
        return 0

    def ask(self, problem: Problem, state: int) -> GradientQuery:
        return problem.gradient_query

    def tell(self, problem: Problem, state: int, release: Release) -> int:
        return state + 1

    def posterior(self, problem: Problem, state: int) -> Draws:
        return Draws(
            problem.module, problem.likelihood, problem.position[None].clone(), torch.ones(1), {"steps": state}
        )


def test_four_functions_are_enough() -> None:
    run = confide.fit(Standing(), networks.softmax(3, 2), _data(), _plan(), seed=0)
    assert run.posterior.facts["steps"] == _plan().steps


def test_a_method_that_lacks_a_function_cannot_be_made() -> None:
    class Half(Standing):
        tell = Method.tell

    with pytest.raises(TypeError, match="tell"):
        Half()  # type: ignore[abstract]


@pytest.mark.parametrize("name", methods.names())
def test_traits_are_typed(name: str) -> None:
    cls = methods.get(name)
    method = cls()
    assert issubclass(cls, Method)
    assert cls.name == name
    assert cls.tasks
    assert isinstance(method.learns_noise, bool)
    assert not method.with_given_noise().learns_noise
    assert method.draws_of(100) is None or isinstance(method.draws_of(100), int)
    assert isinstance(method.prepare(networks.mlp(3, 2)), nn.Module)


def test_the_samplers_are_known_by_their_trait() -> None:
    assert methods.samplers() == ("psgld", "sghmc", "sgld", "sgnht")
    with pytest.raises(Refusal, match="use one of psgld, sghmc, sgld, sgnht"):
        fit_chains(Standing(), networks.softmax(3, 2), _data(), _plan(), chains=2)


def test_methods_are_found_by_task() -> None:
    assert methods.for_task("mixture") == ("em", "sep")
    assert "em" not in methods.for_task("regression")
    assert set(methods.for_task("classification")) == set(methods.names()) - {"em"}


@pytest.mark.parametrize("thing", ["sgld", None, methods.SGLD, object()])
def test_what_is_no_method_is_refused_before_the_charge(thing: Any) -> None:
    data = _data()
    for run in (confide.fit, fit_chains):
        with pytest.raises(TypeError, match="must be a method"):
            run(thing, networks.softmax(3, 2), data, _plan())
