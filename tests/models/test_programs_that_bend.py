"""What a program says of itself without a record: ids that it looks up, parameters that it uses, scores that bend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributions import HalfNormal, Normal, Poisson

import confide
from confide.methods._bends import bent
from confide.methods._carried import carried
from confide.methods._trace import LocalPrior
from confide.models.program_inputs import used_numbers, with_ids
from confide.models.program_sharpness import bend_of, information

GROUPS = 7


def groups(looked_up: bool = True) -> Any:
    """Effects of groups, whose mean and spread are in their prior alone."""

    def said(p: Any, x: Any, y: Any) -> Any:
        where = x["group"] if looked_up else torch.zeros_like(x["group"])
        return Normal(p["effect"][where] + 0.0 * x["trials"], 1.0).log_prob(y)

    priors: dict[str, Any] = {
        "mean": Normal(0.0, 1.0),
        "spread": HalfNormal(1.0),
        "effect": lambda p: Normal(p["mean"], p["spread"]).expand([GROUPS]),
    }
    return confide.models.program(said, priors).double()


def inputs() -> dict[str, torch.Tensor]:
    return {"group": torch.zeros(160, dtype=torch.long), "trials": torch.zeros(160, dtype=torch.long)}


def test_ids_that_nobody_declared_are_those_that_the_program_can_look_up() -> None:
    """Otherwise all made-up records are of the first group, and records seem to tell of that one alone."""
    found: Any = with_ids(groups(), inputs(), torch.zeros(160))
    assert found["group"].unique().tolist() == list(range(GROUPS))
    assert not found["trials"].any(), "a number that is not looked up has no last one"
    unused: Any = with_ids(groups(looked_up=False), inputs(), torch.zeros(160))
    assert not unused["group"].any()


def test_every_group_is_told_of_alike() -> None:
    model, y = groups(), torch.zeros(160, dtype=torch.float64)
    known = information(model, model.unconstrained.detach(), with_ids(model, inputs(), y), y, None)
    blind = information(model, model.unconstrained.detach(), inputs(), y, None)
    assert known is not None
    assert blind is not None
    told, alone = known.diagonal()[2:], blind.diagonal()[2:]
    assert float(told.max() / told.min()) < 2.5
    assert float(alone.max() / alone.min()) == pytest.approx(5.0), "the broken variant: the others by a guess"


def test_parameters_of_priors_alone_are_not_told_of() -> None:
    model = groups()
    used = used_numbers(model, with_ids(model, inputs(), torch.zeros(160)), torch.zeros(160))
    assert used.tolist() == [False, False] + GROUPS * [True]


def test_a_parameter_that_is_nought_here_is_used() -> None:
    model = confide.models.program(
        lambda p, x, y: Normal(torch.where(x > 10, p["rare"], 0.0).sum(), 1.0).log_prob(y), {"rare": Normal(0.0, 1.0)}
    )
    assert used_numbers(model, torch.zeros(4, 1), torch.zeros(4)).all()


def test_a_rare_class_is_little_known() -> None:
    """The width of a class that one record in a thousand is in, beside one that half of them are in."""

    def said(p: Any, x: Any, y: Any) -> Any:
        cuts = torch.cat([p["gap"].new_zeros(1), p["gap"].cumsum(0)]) - 5.0
        below = torch.cat([torch.zeros(1), torch.sigmoid(cuts), torch.ones(1)])
        return below.diff().log().gather(0, y.long().reshape(1)).squeeze(0)

    model = confide.models.program(said, {"gap": HalfNormal(1.0).expand([2])}, start={"gap": [0.1, 5.0]}).double()
    found = information(model, model.unconstrained.detach(), torch.zeros(8, 1), torch.zeros(8), None)
    assert found is not None
    assert float(found[0, 0] / found[1, 1]) < 0.01


def counts() -> Any:
    return confide.models.program(lambda p, x, y: Poisson(torch.exp(p["level"])).log_prob(y), {"level": Normal(0.0, 1)})


def test_scores_of_a_count_bend_like_an_exponential() -> None:
    """A score is y - exp(u), whose mean is exp(u) (exp(d) - 1) if the truth is d away, and exp(u) d by a line."""
    model, level = counts().double(), torch.tensor([-1.0], dtype=torch.float64)
    form = torch.zeros(4, 1), torch.zeros(4, dtype=torch.float64), None
    axes, ways = torch.eye(1, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64)
    found = bend_of(model, level, form, axes, 1e6, 0.0, ways)
    assert found is not None
    for d in (-1.0, 0.0, 0.5, 1.5):
        known = math.exp(-1.0) * (math.exp(d) - 1 - d)
        assert float(found[0](torch.tensor([d], dtype=torch.float64))) == pytest.approx(known, abs=0.02)
    aside = torch.tensor([[-0.5], [0.5]], dtype=torch.float64)  # asked there, exp(u) cosh(.5) is taken off on average
    found = bend_of(model, level, form, axes, 1e6, 0.0, aside)
    assert found is not None
    known = math.exp(-1.0) * (1 - math.cosh(0.5))
    assert float(found[0](torch.zeros(1, dtype=torch.float64))) == pytest.approx(known, abs=0.02)


def test_a_belief_about_a_rare_count_has_its_long_tail() -> None:
    """Twenty in a thousand were expected and eight were seen: by a line the logarithm is off by far."""
    mean, seen = 20.0, 8.0
    slope, curvature = torch.tensor([mean - seen], dtype=torch.float64), torch.full((1, 1, 1), mean).double()
    errors, generator = torch.full((1, 1), 4.0, dtype=torch.float64), torch.Generator().manual_seed(0)

    def energy(d: torch.Tensor) -> torch.Tensor:
        return d.square().sum() / 2

    def bend(d: torch.Tensor) -> torch.Tensor:
        return mean * (d.exp() - 1 - d)

    line = -0.6 + 0.25 * torch.randn(1000, 1, generator=generator, dtype=torch.float64)
    least = torch.full((1, 1), 1e-3, dtype=torch.float64)
    found, much = bent(line, curvature, slope, errors, energy, least, bend, generator)
    grid = torch.linspace(-6, 3, 4000, dtype=torch.float64)
    left = mean - seen + mean * (grid.exp() - 1)
    weights = torch.softmax(-left.square() / (2 * (mean + 4)) - grid.square() / 2, 0)
    centre = float((weights * grid).sum())
    spread = float((weights * (grid - centre).square()).sum().sqrt())
    assert much > 0.1
    assert float(found.mean()) == pytest.approx(centre, abs=4 * spread / math.sqrt(len(found)))
    assert float(found.std()) == pytest.approx(spread, rel=0.2)
    assert abs(float(line.mean()) - centre) > 0.5 * spread, "so that draws of the line are caught"


def test_draws_that_lie_where_a_density_falls_off_a_cliff_come_back() -> None:
    """A prior like exp(-exp(u)): no leap leads back from u = 90, and an interval of exp(u) would end at 1e39."""

    def energies(points: Any) -> Any:
        return (points.exp() - points).sum(1), points.exp() - 1

    generator = torch.Generator().manual_seed(0)
    start = 30 * torch.randn(1000, 1, generator=generator, dtype=torch.float64)
    found = carried(start, energies, torch.eye(1, dtype=torch.float64), generator).exp()
    assert float(start.exp().quantile(0.95)) > 1e10
    assert float(found.quantile(0.95)) == pytest.approx(-math.log(0.05), rel=0.15)


def test_a_prior_that_bends_the_other_way_has_an_end() -> None:
    """The spread of effects: far from it the Gaussian nearest to its prior would have no precision at all."""
    model = groups()
    point = torch.tensor([0.0, -1.0, *torch.linspace(-2, 2, GROUPS)], dtype=torch.float64)
    least = 0.1 * torch.eye(len(point), dtype=torch.float64)

    def energy(u: torch.Tensor) -> torch.Tensor:
        return -model.log_prior(u)

    assert float(torch.linalg.eigvalsh(LocalPrior.at(energy, point, least).precision).min()) >= 0.1 - 1e-9
    assert float(torch.linalg.eigvalsh(LocalPrior.at(energy, point).precision).min()) < 0.01
