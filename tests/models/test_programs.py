"""Programs in the place of networks: the same chains as built-in models, priors with their Jacobian, and refusals."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import (
    Bernoulli,
    Beta,
    Categorical,
    Dirichlet,
    Distribution,
    Exponential,
    Gamma,
    HalfCauchy,
    HalfNormal,
    Independent,
    Laplace,
    LKJCholesky,
    LogNormal,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    Poisson,
    StudentT,
    Uniform,
    Weibull,
)

import confide
from confide.data import Input
from confide.errors import Refusal
from confide.methods import BBP, PSGLD, SGD, SGHMC, SGLD, SGNHT, all_methods
from confide.models.likelihoods import Likelihood
from confide.models.programs import Program, ProgramPrior

RECORDS = 60


def records(counts: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(RECORDS, 2, generator=generator)
    y = torch.randn(RECORDS, generator=generator) + x[:, 0]
    return x, y.abs().round() if counts else y


def fitted(model: nn.Module, x: Any, y: Tensor, method: Any = None, **options: Any) -> confide.Run:
    settings = {"epsilon": 1.0, "clip": 1.0, "batch": 20, "steps": 12, **options.pop("plan", {})}
    plan = confide.plan(records=RECORDS, delta=1e-3, **settings)
    schema = options.pop("schema", confide.Schema(records=RECORDS))
    data = confide.PrivateData(x, y, schema=schema, seed=1)
    return confide.fit(method or SGLD(), model, data, plan, seed=2, **options)


def regression() -> Program:
    return confide.models.program(
        lambda p, x, y: Normal(p["slope"] @ x + p["shift"], p["noise"]).log_prob(y),
        {"slope": Normal(0.0, 1.0).expand([2]), "shift": Normal(0.0, 1.0), "noise": HalfNormal(1.0)},
        predict=lambda p, x: Normal(p["slope"] @ x + p["shift"], p["noise"]),
    )


SLOPES = {"slope": Normal(0.0, 1.0).expand([2])}
BUILT_IN: dict[str, tuple[Callable[..., Tensor], Likelihood]] = {
    "logistic": (
        lambda p, x, y: Bernoulli(logits=p["slope"] @ x).log_prob((y > 0).to(x.dtype)),
        confide.likelihoods.Bernoulli(),
    ),
    "poisson": (
        lambda p, x, y: Poisson(torch.exp(p["slope"] @ x)).log_prob(y.abs().round()),
        confide.likelihoods.Poisson(),
    ),
    "robust": (
        lambda p, x, y: StudentT(4.0, p["slope"] @ x, 0.9).log_prob(y),
        confide.likelihoods.StudentT(scale=0.9, freedom=4.0),
    ),
}


@pytest.mark.parametrize("method", [SGLD(), PSGLD(), SGHMC(), SGNHT(), SGD()], ids=lambda method: method.name)
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_program_makes_the_chain_of_the_built_in_model(name: str, method: Any) -> None:
    """At epsilon 1, step by step: so its coverage is that of the built-in model too."""
    log_likelihood, likelihood = BUILT_IN[name]
    x, y = records()
    target = {"logistic": (y > 0).float(), "poisson": y.abs().round()}.get(name, y)
    network = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(network.weight)
    step = 0.01 if method.name in ("sgld", "psgld") else 0.05
    method = type(method)(**({"learning_rate": 0.1} if method.name == "sgd" else {"step_size": step}))
    expected = fitted(network, x, target, method, likelihood=likelihood)
    found = fitted(confide.models.program(log_likelihood, SLOPES), x, y, method)
    assert found.privacy.epsilon() == expected.privacy.epsilon()
    assert found.posterior.sample(1).abs().max() > 0.01
    assert torch.allclose(found.posterior.draws, expected.posterior.draws, rtol=1e-3, atol=1e-5)  # type: ignore[attr-defined]


# priors ------------------------------------------------------------------------------------------------------------

ONE_NUMBER: dict[str, Distribution] = {
    "normal": Normal(1.0, 2.0),
    "half-normal": HalfNormal(0.5),
    "half-cauchy": HalfCauchy(1.0),
    "gamma": Gamma(2.0, 3.0),
    "beta": Beta(2.0, 3.0),
    "uniform": Uniform(-1.0, 3.0),
    "log-normal": LogNormal(0.0, 0.5),
    "exponential": Exponential(2.0),
    "weibull": Weibull(1.0, 2.0),
    "student": StudentT(5.0),
}


def mass(model: Program, low: float = -60.0, high: float = 60.0) -> float:
    """The integral of the density over the unbounded line."""
    line = torch.linspace(low, high, 40_001, dtype=torch.float64)
    heights = torch.stack([model.log_prior(row) for row in line[::20, None]]).exp()
    return float(torch.trapezoid(heights, line[::20]))


@pytest.mark.parametrize("name", ONE_NUMBER)
def test_the_prior_over_the_unbounded_line_is_a_density(name: str) -> None:
    model = confide.models.program(lambda p, x, y: p["a"], {"a": ONE_NUMBER[name]})
    assert mass(model) == pytest.approx(1.0, abs=0.02)


def test_a_prior_without_its_jacobian_is_caught() -> None:
    law = Gamma(2.0, 3.0)

    class Forgetful(Program):
        def log_prior(self, position: Tensor) -> Tensor:
            return law.log_prob(position.exp()).sum()

    assert abs(mass(Forgetful(lambda p, x, y: p["a"], {"a": law}, None, None)) - 1) > 0.1


SEVERAL_NUMBERS: dict[str, tuple[Distribution, int]] = {
    "dirichlet": (Dirichlet(torch.tensor([2.0, 1.0, 3.0])), 2),
    "correlations": (LKJCholesky(3, 2.0), 3),
    "vector": (MultivariateNormal(torch.zeros(2).double(), torch.tensor([[1.0, 0.5], [0.5, 2.0]]).double()), 2),
    "independent": (Independent(Gamma(torch.ones(2), torch.ones(2)), 1), 2),
    "several": (Beta(2.0, 2.0).expand([2, 3]), 6),
}


@pytest.mark.parametrize("name", SEVERAL_NUMBERS)
def test_the_gradient_of_the_prior_is_that_of_its_density(name: str) -> None:
    law, size = SEVERAL_NUMBERS[name]
    model = confide.models.program(lambda p, x, y: p["a"].sum(), {"a": law}).double()
    assert model.unconstrained.shape == (size,)
    position = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 2
    value = model.constrained(position)["a"]
    assert bool(law.support.check(value.float()).all())
    found = ProgramPrior(model).add_energy_gradient_(position, torch.zeros_like(position))
    for place in range(size):
        step = torch.zeros_like(position)
        step[place] = 1e-3
        slope = (model.log_prior(position + step) - model.log_prior(position - step)) / 2e-3
        assert float(found[place]) == pytest.approx(-float(slope), rel=1e-3, abs=1e-3)


def levels(groups: int = 3) -> Program:
    """A parameter for every declared group, around a mean with a spread."""
    return confide.models.program(
        lambda p, x, y: Normal(p["effect"][x["group"]] + p["slope"] * x["value"], 1.0).log_prob(y),
        {
            "mean": Normal(0.0, 1.0),
            "spread": HalfNormal(1.0),
            "effect": lambda p: Normal(p["mean"], p["spread"]).expand([groups]),
            "slope": Normal(0.0, 1.0),
        },
        predict=lambda p, x: Normal(p["effect"][x["group"]] + p["slope"] * x["value"], 1.0),
    )


def test_a_prior_may_depend_on_the_parameters_before_it() -> None:
    model = levels().double()
    position = torch.tensor([0.3, -0.5, 1.0, 0.2, -0.4, 0.7], dtype=torch.float64)
    spread = math.exp(-0.5)
    expected = (
        Normal(0.0, 1.0).log_prob(torch.tensor(0.3, dtype=torch.float64))
        + HalfNormal(1.0).log_prob(torch.tensor(spread, dtype=torch.float64))
        - 0.5
        + Normal(0.3, spread).log_prob(position[2:5]).sum()
        + Normal(0.0, 1.0).log_prob(position[5])
    )
    assert float(model.log_prior(position)) == pytest.approx(float(expected), rel=1e-6)


# records -----------------------------------------------------------------------------------------------------------


def test_records_are_trees_and_groups_are_declared(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = {"group": torch.arange(RECORDS) % 3, "value": torch.randn(RECORDS, generator=generator)}
    y = x["group"].float() - 1 + 0.5 * x["value"]
    schema = confide.Schema(records=RECORDS, inputs={"group": Input(vocabulary=3), "value": Input(bounds=(-4, 4))})
    run = fitted(levels(), x, y, SGD(learning_rate=0.3), schema=schema, plan={"epsilon": 200.0, "clip": 3.0})
    effects = run.posterior.named_draws()["effect"][0]  # type: ignore[attr-defined]
    assert effects[0] < effects[1] < effects[2]
    run.posterior.save(tmp_path / "levels.safetensors")
    again = confide.load_posterior(tmp_path / "levels.safetensors", levels())
    few = {name: tensor[:4] for name, tensor in x.items()}
    assert torch.equal(again.summary(few).centre, run.posterior.summary(few).centre)


@pytest.mark.parametrize("broken", ["raises", "nan", "infinite"])
def test_a_record_on_which_a_program_fails_counts_as_zero(broken: str) -> None:
    """The release is the one without the record but for the last bits: a sum of other rows is rounded otherwise."""

    def log_likelihood(p: Any, x: Tensor, y: Tensor) -> Tensor:
        bad = {"nan": math.nan, "infinite": -math.inf}.get(broken, 0.0)
        found = Normal(p["slope"] @ x, 1.0).log_prob(y)
        if broken == "raises":  # an index out of range
            return found + 0.0 * p["slope"][(x[0] > 50).long() * 7]
        return found * torch.where(x[0] > 50, bad, 1.0)  # not around it: what where leaves out has NaN for a gradient

    x, y = records()
    hostile, absent = x.clone(), y.clone()
    hostile[0] = 99.0
    absent[0] = math.nan
    model = confide.models.program(log_likelihood, SLOPES)
    whole = {"batch": None, "steps": 2, "sampling": "full-batch"}
    found = fitted(model, hostile, y, plan=whole).posterior.mean()
    without = fitted(model, x, absent, plan=whole).posterior.mean()
    torch.testing.assert_close(found, without, rtol=4 * torch.finfo(found.dtype).eps, atol=0.0)
    with_it = fitted(model, x, y, plan=whole).posterior.mean()
    assert not torch.allclose(found, with_it, rtol=1e-4), "so that a record that does count is caught"


def test_one_record_moves_a_sum_by_the_clip_at_most() -> None:
    from confide.mechanism.clipping import clipped_sum

    model = regression()
    x, y = records()
    likelihood = confide.models.programs.ProgramLikelihood()
    total = torch.zeros(4)
    norms = clipped_sum(model, likelihood.loss, x * 100, y * 100, clip=0.5, out=total)
    assert norms.max() > 0.5
    one = torch.zeros(4)
    clipped_sum(model, likelihood.loss, x[:1] * 100, y[:1] * 100, clip=0.5, out=one)
    assert float(one.norm()) == pytest.approx(0.5, rel=1e-3)


def _as_many_as_it_likes(p: Any, x: Tensor, y: Tensor) -> Tensor:
    drawn = torch.randn(3 if float(x[0]) > 0 else 1).sum()
    return Normal(p["slope"] @ x + 3 * drawn, 1.0).log_prob(y)


DRAWING: dict[str, Callable[..., Tensor]] = {
    "a number each": lambda p, x, y: Normal(p["slope"] @ x + 2 * torch.randn(1)[0], 1.0).log_prob(y),
    "a law": lambda p, x, y: Normal(p["slope"] @ x + Normal(0.0, 3.0).sample(), 1.0).log_prob(y),
    "as many as it likes": _as_many_as_it_likes,
}


MANY = 60  # records, so that what all others draw moves a sum by several clips


def moves_by_another_record(drawing: str, other_draws: bool = False) -> float:
    """In clips: another record in the place of one, everybody else drawing the same. Without one of them all later ones
    would draw other numbers, as they do when the same records are asked twice, and a sum moves by several clips."""
    from confide.mechanism.gaussian import SampledGaussian
    from confide.sources.queries import GradientQuery

    model = confide.models.program(DRAWING[drawing], SLOPES)
    query = GradientQuery(model, confide.models.programs.ProgramLikelihood().loss)
    x, y = (values[:MANY] for values in records())
    other_x, other_y = x.clone(), y.clone()
    other_x[0], other_y[0] = -50 * x[0], -30.0
    whole = SampledGaussian(0.0, 1.0, 1.0, MANY, "full-batch", private=False)
    asked = [(x, y, 3), (other_x, other_y, 4 if other_draws else 3)]
    found = [
        confide.PrivateData(features, targets, schema=confide.Schema(records=MANY), seed=seed).answer(query, whole).sum
        for features, targets, seed in asked
    ]
    return float((found[0] - found[1]).norm()) / 2


@pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("drawing", DRAWING)
def test_what_one_record_draws_moves_no_other(drawing: str) -> None:
    assert moves_by_another_record(drawing) <= 1.0 + 1e-5
    assert moves_by_another_record("a law", other_draws=True) > 1.0 + 1e-5, "what the draws alone do"


@pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_records_that_go_on_drawing_where_another_ended_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confide.mechanism.clipping.randomness.start_from", lambda seed: None)
    assert moves_by_another_record("as many as it likes") > 1.0 + 1e-5


# what comes out ----------------------------------------------------------------------------------------------------


def test_named_draws_go_to_arviz_in_their_supports() -> None:
    pytest.importorskip("arviz_base")
    for method in (SGLD(), BBP(predictive_draws=7)):
        tree = fitted(regression(), *records(), method).posterior.to_arviz()["posterior"]
        assert set(tree.data_vars) == {"slope", "shift", "noise"}
        assert tree["slope"].shape[2:] == (2,)
        assert float(tree["noise"].min()) > 0


LAWS: dict[str, Callable[[Tensor], Distribution]] = {
    "normal": lambda a: Normal(a, 0.5),
    "laplace": lambda a: Laplace(a, 0.5),
    "student": lambda a: StudentT(5.0, a, 0.5),
    "poisson": lambda a: Poisson(a.exp()),
    "negative-binomial": lambda a: NegativeBinomial(torch.tensor(3.0), logits=a),
    "exponential": lambda a: Exponential(a.exp()),
    "weibull": lambda a: Weibull(a.exp(), torch.tensor(1.5)),
}


@pytest.mark.parametrize("name", LAWS)
def test_predictions_have_the_density_of_the_law_that_was_given(name: str) -> None:
    def predict(p: Any, x: Tensor) -> Distribution:
        return LAWS[name](p["slope"] @ x)

    x, y = records(counts=True)
    y = y + (1 if name in ("exponential", "weibull") else 0)
    model = confide.models.program(lambda p, x, y: predict(p, x).log_prob(y), SLOPES, predict=predict)
    run = fitted(model, x, y)
    slopes = run.posterior.named_draws()["slope"]  # type: ignore[attr-defined]
    densities = torch.stack([LAWS[name](x @ slope).log_prob(y) for slope in slopes])
    expected = torch.logsumexp(densities + run.posterior.weights.log()[:, None], 0)  # type: ignore[attr-defined]
    found: Any = run.posterior.predict(x)
    assert torch.allclose(found.log_density(y), expected, atol=1e-4)
    assert torch.isfinite(run.posterior.summary(x).total).all()


def test_predictions_of_classes_labels_and_several_numbers() -> None:
    x, y = records()
    for law, shape in (
        (lambda p, x: Bernoulli(logits=p["slope"] @ x), (RECORDS, 2)),
        (lambda p, x: Categorical(logits=torch.cat([p["slope"] * x, x[:1] * 0])), (RECORDS, 3)),
        (lambda p, x: Independent(Bernoulli(logits=p["slope"] * x), 1), (RECORDS, 2)),
    ):
        model = confide.models.program(lambda p, x, y: -(p["slope"] @ x - y).square(), SLOPES, predict=law)
        found: Any = fitted(model, x, y).posterior.predict(x)
        assert found.probabilities.shape == shape
    model = confide.models.program(
        lambda p, x, y: -(p["slope"] @ x - y).square(), SLOPES,
        predict=lambda p, x: Independent(Normal(p["slope"] * x, 1.0), 1),
    )  # fmt: skip
    assert fitted(model, x, y).posterior.summary(x).centre.shape == (RECORDS, 2)


def test_a_branch_on_a_record_is_slow_and_right() -> None:
    def branching(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return Normal(p["slope"] @ x, 1.0).log_prob(y) if y > 0 else -0.5 * (p["slope"] @ x - y).square()

    x, y = records()
    with pytest.warns(confide.errors.SpeedWarning, match="one by one"):
        found = fitted(confide.models.program(branching, SLOPES), x, y, SGLD(step_size=0.01))
    straight = confide.models.program(lambda p, x, y: Normal(p["slope"] @ x, 1.0).log_prob(y), SLOPES)
    assert torch.allclose(
        found.posterior.mean(), fitted(straight, x, y, SGLD(step_size=0.01)).posterior.mean(), atol=1e-5
    )


def test_several_draws_of_a_step_are_averaged_before_the_clip() -> None:
    run = fitted(regression(), *records(), BBP(draws=3, predictive_draws=5))
    assert run.posterior.facts["bayesian_share"] == 1.0
    assert run.posterior.predict(records()[0]).means.shape == (5, RECORDS)  # type: ignore[union-attr]


@pytest.mark.parametrize("before", [True, False])
def test_torch_checks_its_arguments_afterwards_as_it_did_before(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Set here: torch.compile, wherever it ran first in this process, switches the checks off for good.
    monkeypatch.setattr(Distribution, "_validate_args", before)
    fitted(regression(), *records())
    assert Distribution._validate_args is before


SCRIPT = """
import sys, torch, confide
from tests.models.test_programs import records, regression
posterior = confide.load_posterior(sys.argv[1], regression())
print(repr(posterior.summary(records()[0]).centre.double().sum().item()))
"""


def test_a_program_is_loaded_in_a_fresh_process(tmp_path: Path) -> None:
    run = fitted(regression(), *records())
    run.save(tmp_path / "run")
    path = tmp_path / "run" / "posterior.safetensors"
    command = [sys.executable, "-c", SCRIPT, str(path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(run.posterior.summary(records()[0]).centre.double().sum().item())
    others = confide.models.program(lambda p, x, y: p["slope"].sum(), {"slope": HalfNormal(1.0).expand([4])})
    with pytest.raises(Refusal, match="shape and support"):
        confide.load_posterior(path, others)
    with pytest.raises(Refusal, match="module=None"):
        confide.load_posterior(path)
    with pytest.raises(Refusal, match="belongs to a program"):
        confide.load_posterior(path, nn.Linear(2, 1))


# refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", all_methods())
def test_every_method_takes_a_program_or_refuses_it_in_one_sentence(name: str) -> None:
    x, y = records()
    data = confide.PrivateData(x, y, schema=confide.Schema(records=RECORDS))
    plan = confide.plan(records=RECORDS, batch=20, steps=2, clip=1.0, epsilon=1.0, delta=1e-3)
    if name in ("sgld", "psgld", "sghmc", "sgnht", "sgd", "bbp", "dpvi", "laplace"):
        confide.fit(all_methods()[name](), regression(), data, plan)
        assert data.ledger.entries()
        return
    with pytest.raises(Refusal) as refusal:
        confide.fit(all_methods()[name](), regression(), data, plan)
    assert ("use it alone" if name == "traced" else "module") in str(refusal.value)
    assert not data.ledger.entries()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"parameters": {"k": Categorical(torch.ones(3))}}, "summed out"),
        ({"parameters": {}}, "at least one name"),
        ({"parameters": {"a": 3.0}}, "is no prior"),
        ({"parameters": {"a": lambda p: 3.0}}, "is no prior"),
        ({"log_likelihood": nn.Linear(2, 1)}, "log_likelihood"),
        ({"log_likelihood": lambda p: p}, "must take"),
        ({"start": {"b": 0.0}}, "no such parameters"),
        ({"parameters": {"a": HalfNormal(1.0)}, "start": {"a": -1.0}}, "not inside of the support"),
    ],
)
def test_what_is_no_program_is_refused(arguments: dict[str, Any], said: str) -> None:
    usual: dict[str, Any] = {"log_likelihood": lambda p, x, y: p["a"], "parameters": {"a": Normal(0.0, 1.0)}}
    with pytest.raises(Refusal, match=said):
        confide.models.program(**{**usual, **arguments})


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (regression(), {"likelihood": confide.likelihoods.Gaussian()}, "log-likelihood of its own"),
        (regression(), {"method": SGLD(prior=confide.priors.LaplacePrior())}, "priors of its own"),
        (confide.models.program(lambda p, x, y: p["slope"], SLOPES), {}, "single number"),
        (confide.models.program(lambda p, x, y: cast(Any, "three"), SLOPES), {}, "single number"),
        (confide.models.program(lambda p, x, y: p["slop"].sum(), SLOPES), {}, "slop"),
        (
            confide.models.program(lambda p, x, y: p["slope"].sum(), SLOPES, predict=lambda p, x: Gamma(1.0, 1.0)),
            {},
            "one of Bernoulli",
        ),
    ],
)
def test_a_fit_that_could_not_end_well_costs_nothing(model: Program, options: dict[str, Any], said: str) -> None:
    x, y = records()
    data = confide.PrivateData(x, y, schema=confide.Schema(records=RECORDS))
    plan = confide.plan(records=RECORDS, batch=20, steps=2, clip=1.0, epsilon=1.0, delta=1e-3)
    with pytest.raises((Refusal, KeyError), match=said):
        confide.fit(options.pop("method", SGLD()), model, data, plan, **options)
    assert not data.ledger.entries()


def test_a_program_without_predictions_is_fitted_and_says_so() -> None:
    run = fitted(confide.models.program(lambda p, x, y: Normal(p["slope"] @ x, 1.0).log_prob(y), SLOPES), *records())
    with pytest.raises(Refusal, match="predict=None"):
        run.posterior.predict(records()[0])
