"""Stochastic expectation propagation: its fixed points, its sensitivity, the noise of its releases, what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import confide
from confide.data.schema import Schema
from confide.evaluate.expectation import noise_of_factor, printed_loop
from confide.expectation.mixture import MixtureOfGaussians
from confide.expectation.natural import COVARIANCES, Covariance
from confide.methods._baselines import expectation_propagation
from confide.methods.sep import SEP
from confide.models import networks
from confide.models.likelihoods import Gaussian, Probit
from confide.running.fit import make_problem
from confide.sources import answers as boundary
from confide.sources.private_data import PrivateData
from confide.sources.queries import Release

NOISE = 0.5


def records(count: int = 60, same: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 2, generator=generator, dtype=torch.float64) * 2 - 1
    y = x @ torch.tensor([1.0, -0.5]).double() + NOISE * torch.randn(count, generator=generator, dtype=torch.float64)
    return (x[:1].repeat(count, 1), y[:1].repeat(count)) if same else (x, y)


def unprotected(count: int, steps: int = 40, clip: float = math.inf) -> confide.Plan:
    return confide.plan(delta=1e-5, records=count, steps=steps, sampling="full-batch", private=False, clip=clip)


def fitted(method: SEP, x: Tensor, y: Tensor, plan: confide.Plan, module: Any = None, **options: Any) -> confide.Run:
    data = PrivateData(x, y, schema=options.pop("schema", Schema(records=len(x))), seed=3)
    own = networks.linear(2) if module is None else module
    return confide.fit(method, own, data, plan, likelihood=options.pop("likelihood", Gaussian(NOISE)), seed=1)


class TestFixedPoints:
    @pytest.mark.parametrize("coordinates", ["local", "natural"])
    def test_equal_records_give_ep(self, coordinates: Any) -> None:
        """All sites are then the same, so one factor for all of them loses nothing; for this model that is exact."""
        x, y = records(same=True)
        method = SEP(covariance="full", noise="fixed", coordinates=coordinates, damping=0.5)
        found = fitted(method, x, y, unprotected(len(x))).posterior
        exact = expectation_propagation(
            networks.linear(2), x, y, likelihood=Gaussian(NOISE), covariance="full", learn_noise=False, passes=5
        )
        assert torch.allclose(found.mean(), exact.mean(), atol=1e-6)
        assert torch.allclose(found.covariance(), exact.covariance(), atol=1e-6)  # type: ignore[attr-defined]

    @pytest.mark.parametrize("covariance", ["full", "diagonal"])
    def test_different_records_of_a_linear_model_give_nearly_ep(self, covariance: Covariance) -> None:
        x, y = records(400)
        found = fitted(SEP(covariance=covariance, noise="fixed"), x, y, unprotected(400, 60)).posterior
        exact = expectation_propagation(
            networks.linear(2),
            x,
            y,
            likelihood=Gaussian(NOISE),
            covariance=covariance,
            learn_noise=False,
            passes=60,
            damping=0.5,
        )
        spread = exact.covariance().diagonal().sqrt()
        assert ((found.mean() - exact.mean()).abs() < 0.05 * spread).all()
        assert torch.allclose(found.covariance().diagonal().sqrt(), spread, rtol=0.03)  # type: ignore[attr-defined]

    def test_one_record_at_a_time_is_the_published_step(self) -> None:
        """theta' = theta + (theta_i - theta_f): a = 1 / n with one record. Double damping moves n times less."""
        x, y = records(30)
        plan = unprotected(30, 1)
        moved = {}
        for double in (False, True):
            method = SEP(covariance="full", noise="fixed", coordinates="natural", damping=1 / 30, double_damping=double)
            problem = make_problem(method, networks.linear(2), Schema(records=30), plan, Gaussian(NOISE), seed=1)
            state = method.init(problem)
            row = method.ask(problem, state).function(x[:1], y[:1])[0]
            told = method.tell(problem, state, Release(row, 0.0, plan.mechanism.event(), 1.0))
            moved[double] = told.theta - state.theta
            if not double:
                assert torch.allclose(moved[double], row)
        assert torch.allclose(moved[True], moved[False] / 30, rtol=1e-6)

    def test_probit_with_poisson_batches(self) -> None:
        x, _ = records(400)
        y = (x @ torch.tensor([2.0, -1.0]).double() > 0).long()
        plan = confide.plan(delta=1e-5, records=400, batch=80, steps=100, private=False, clip=math.inf)
        method = SEP(covariance="full")
        schema = Schema(classes=2, records=400)
        run = fitted(method, x, y, plan, networks.logistic(2), likelihood=Probit(), schema=schema)
        exact = expectation_propagation(networks.logistic(2), x, y, likelihood=Probit(), covariance="full", passes=40)
        spread = exact.covariance().diagonal().sqrt()
        assert ((run.posterior.mean() - exact.mean()).abs() < 0.5 * spread).all()
        assert (run.posterior.predict(x).labels == y).double().mean() > 0.95


def test_a_noise_that_was_learnt_is_the_one_that_predicts() -> None:
    """Catches facts that are added after the fit and put the likelihood's own noise in place of the learnt one."""
    x, y = records(400)
    run = fitted(SEP(), x, y, unprotected(400, 60), networks.mlp(2, 1, hidden=(4,)), likelihood=Gaussian(3.0))
    learnt = run.posterior.facts["noise_scale"]
    assert 0.3 < learnt < 1.5
    assert run.posterior.noise_scale == pytest.approx(learnt)  # type: ignore[attr-defined]
    told = run.posterior.with_likelihood(run.posterior.likelihood, {**run.posterior.facts, "more": 1})
    assert told.noise_scale == pytest.approx(learnt)
    assert told.with_likelihood(Gaussian(2.0), told.facts).noise_scale == pytest.approx(2.0)


class TestSensitivity:
    @given(
        st.integers(0, 1000), st.sampled_from(["full", "diagonal", "scalar"]), st.floats(0.1, 5), st.floats(0.5, 100)
    )
    @settings(max_examples=25, deadline=None)
    def test_one_record_moves_the_sum_by_at_most_the_clip(
        self, seed: int, covariance: Covariance, clip: float, size: float
    ) -> None:
        """The whole vector, means and precisions of all components together."""
        generator = torch.Generator().manual_seed(seed)
        x = size * torch.randn(8, 3, generator=generator, dtype=torch.float64)
        module = MixtureOfGaussians(2, 3, scale=0.5, generator=generator)
        plan = unprotected(8, 4, clip)
        method = SEP(covariance=covariance, coordinates="natural")
        problem = make_problem(method, module, Schema(records=8), plan, seed=1)
        query = method.ask(problem, method.init(problem))
        sums = [
            PrivateData(part, torch.zeros(len(part)), schema=Schema(records=8), seed=1)
            .answer(query, plan.mechanism)
            .sum
            for part in (x, x[1:])
        ]
        moved = float((sums[0] - sums[1]).norm())
        assert moved <= clip * (1 + 1e-9)
        rows = query.function(x, torch.zeros(8))
        if float(rows[0].norm()) > clip:
            assert moved == pytest.approx(clip, rel=1e-9)

    def test_a_clip_block_by_block_is_caught(self) -> None:
        """Means and precisions clipped apart, as the paper has it, move the sum by sqrt 2 clips."""
        module = MixtureOfGaussians(2, 3, scale=0.5)
        method, plan = SEP(covariance="full", coordinates="natural"), unprotected(8, 4, 0.1)
        problem = make_problem(method, module, Schema(records=8), plan, seed=1)
        row = method.ask(problem, method.init(problem)).function(20 * torch.ones(1, 3).double(), torch.zeros(1))[0]
        blocks = row.tensor_split([problem.position.numel()])
        assert min(float(block.norm()) for block in blocks) > 0.1
        by_block = torch.cat([0.1 * block / block.norm() for block in blocks])
        assert float(by_block.norm()) == pytest.approx(0.1 * math.sqrt(2))

    def test_the_rate_of_the_noise_is_inside_the_same_bound(self) -> None:
        """A network's answer before the boundary clips it: two blocks whose norms together stay at the clip."""
        x, y = records(50)
        plan = unprotected(50, 12, clip=0.7)
        method = SEP(inputs="raw")
        problem = make_problem(method, networks.mlp(2, 1, hidden=(5,)), Schema(records=50), plan, Gaussian(0.1), seed=1)
        rows = method.ask(problem, method.init(problem)).function(x, 50 * y)
        assert float(rows.norm(dim=1).max()) <= 0.7 * (1 + 1e-9)
        assert float(rows.norm(dim=1).max()) > 0.69


class TestNoise:
    def test_of_the_released_natural_parameters(self) -> None:
        """Records that never answer: theta_f carries noise alone, of the size that the diagnostic predicts."""
        count, steps, damping, clip, z = 200, 60, 0.2, 0.5, 2.0
        x, y = torch.full((count, 2), math.nan), torch.zeros(count)
        plan = confide.plan(delta=1e-5, records=count, batch=50, steps=steps, noise_multiplier=z, clip=clip)
        method = SEP(covariance="full", noise="fixed", coordinates="natural", damping=damping)
        problem = make_problem(method, networks.linear(2), Schema(records=count), plan, Gaussian(NOISE), seed=1)
        data = PrivateData(x, y, schema=Schema(records=count), seed=4)
        state = method.init(problem)
        moves = []
        for _ in range(steps):
            release = data.answer(method.ask(problem, state), plan.mechanism)
            moves.append(release.sum.clone())
        one_step = torch.stack(moves).flatten()
        predicted = z * clip
        assert float(one_step.std()) == pytest.approx(predicted, rel=4 / math.sqrt(2 * len(one_step)))
        # One step of theta = prior + n theta_f moves it by a n / b times the release.
        told = method.tell(problem, state, Release(moves[0], predicted, plan.mechanism.event(), 50.0))
        eta = told.theta[:3] - state.theta[:3]
        assert torch.allclose(eta, damping * count / 50 * moves[0][:3])

    def test_after_many_steps(self) -> None:
        """The recursion theta_f' = (1 - a) theta_f + (a / b) noise, simulated, against its closed form."""
        generator = np.random.default_rng(0)
        damping, batch, clip, z, steps = 0.1, 50.0, 0.5, 2.0, 30
        factor = np.zeros(40_000)
        for _ in range(steps):
            factor += damping / batch * (-batch * factor + z * clip * generator.standard_normal(len(factor)))
        predicted = noise_of_factor(z, clip, batch, damping, steps)
        assert factor.std() == pytest.approx(predicted, rel=0.015)
        assert factor.std() != pytest.approx(1.05 * predicted, rel=0.015)

    def test_the_printed_loop_hardly_moves(self) -> None:
        """Two figures of the loop as printed, which damps twice: progress and noise after all epochs."""
        small, large = printed_loop(1000, 100, 2.6586, 1.0), printed_loop(10_000, 40, 0.0, 1.0)
        assert small.progress == pytest.approx(0.0952, abs=2e-4)
        assert large.progress == pytest.approx(0.00399, abs=2e-5)
        assert small.noise == pytest.approx(1.601, abs=0.01)
        assert printed_loop(1000, 100, 2.6586, 1.0, gamma=1000).noise == pytest.approx(118.9, rel=0.01)


class TestNetworks:
    def test_a_private_network_learns_and_says_so(self) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(3000, 2, generator=generator, dtype=torch.float64) * 2 - 1
        truth = 0.5 * torch.sin(3 * x[:, 0]) - 0.3 * x[:, 1]
        y = truth + 0.1 * torch.randn(3000, generator=generator, dtype=torch.float64)
        plan = confide.plan(delta=1e-5, records=3000, batch=300, steps=100, epsilon=2.0, clip=2.0)
        run = fitted(SEP(), x, y, plan, networks.mlp(2, 1, hidden=(10,)), likelihood=Gaussian(0.3))
        predictive = run.posterior.predict(x)
        assert float((predictive.mean - truth).square().mean().sqrt()) < 0.1
        assert run.posterior.facts["variant"] == "DP-SEP"
        assert run.posterior.facts["noise_scale"] == pytest.approx(0.1, rel=0.3)
        assert torch.allclose(predictive.epistemic + predictive.aleatoric, predictive.total)
        # Draws of the module's own weights agree with the closed form, standardised inputs and all.
        draws = run.posterior.sample(400, torch.Generator().manual_seed(1))
        from confide.posteriors.draws import outputs_of_draws

        outputs = outputs_of_draws(networks.mlp(2, 1, hidden=(10,)).double(), draws, x[:50])[..., 0]
        assert torch.allclose(outputs.mean(0), predictive.mean[:50], atol=0.05)

    @pytest.mark.parametrize(("clip", "learns"), [(None, True), (4.0, False)])
    def test_the_usual_clip_suits_a_small_budget(self, clip: float | None, learns: bool) -> None:
        """With twice the clip, as the default once was, noise throws the network about."""
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(5000, 8, generator=generator) * 2 - 1
        truth = (5 * torch.sin(3 * x[:, 0]) + 4 * x[:, 1] ** 2 + 3 * x[:, 2].abs() + 2 * x[:, 3] - 4) / 15
        y = truth + torch.randn(5000, generator=generator) / 15
        options = {} if clip is None else {"clip": clip}
        plan = confide.plan(delta=1e-5, records=5000, batch=250, steps=100, epsilon=0.3, **options)
        data = confide.PrivateData(x, y, schema=confide.Schema(records=5000), seed=1)
        network = networks.mlp(8, 1, hidden=(50,), generator=generator)
        found: Any = confide.fit(SEP(), network, data, plan, seed=0).posterior.predict(x)
        assert (float((found.mean - truth).square().mean().sqrt()) < 1.8 / 15) is learns

    def test_closed_form_is_de_normalised(self) -> None:
        x, y = records(200)
        predictive = fitted(SEP(noise="fixed"), x, y, unprotected(200)).posterior.predict(x[:5])
        moved = predictive.rescaled(10.0, 3.0)
        assert torch.allclose(moved.mean, 10 * predictive.mean + 3)
        assert torch.allclose(moved.epistemic, 100 * predictive.epistemic)
        assert torch.allclose(moved.aleatoric, torch.full((5,), 100 * NOISE**2).double())
        assert torch.allclose(moved.log_density(10 * y[:5] + 3), predictive.log_density(y[:5]) - math.log(10))

    def test_variants_are_named(self) -> None:
        x, y = records(40)
        method = SEP(noise="fixed", covariance="full")
        assert fitted(method, x, y, unprotected(40)).posterior.facts["variant"] == "SEP, not private"
        clipped = fitted(method, x, y, unprotected(40, clip=1.0))
        assert clipped.posterior.facts["variant"] == "clipped SEP, not private"
        assert math.isinf(clipped.privacy.epsilon())


class TestBudgets:
    def test_small_budgets_get_shorter_runs_in_fewer_directions(self) -> None:
        """Without this rule noise makes a network wander on small sets: it is worse than DP-VI there."""
        method, module = SEP(), networks.mlp(2, 1, hidden=(50,))
        horizons, directions = [], []
        for records in (500, 2000, 8000, 32_000):
            plan = confide.plan(delta=1e-5, records=records, batch=records // 10, steps=200, epsilon=1.0)
            problem = make_problem(method, module, Schema(records=records), plan, Gaussian(NOISE), seed=0)
            horizons.append(method._horizon(problem))
            directions.append(method._directions(problem, method._sites(problem)))  # type: ignore[arg-type]
        assert horizons == sorted(horizons)
        assert horizons[1] / horizons[0] == pytest.approx(2, rel=0.02)
        assert horizons[-2:] == [20, 20]
        assert directions == sorted(directions)
        assert directions[0] < 10
        assert directions[-1] == 201

    def test_what_is_asked_for_is_taken(self) -> None:
        plan = confide.plan(delta=1e-5, records=500, batch=50, steps=200, epsilon=1.0)
        method, module = SEP(horizon=11.0, excess=0.07), networks.mlp(2, 1, hidden=(50,))
        problem = make_problem(method, module, Schema(records=500), plan, Gaussian(NOISE), seed=0)
        assert (method._horizon(problem), method._excess(problem)) == (11.0, 0.07)


def test_answers_in_pieces_are_those_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that was left out, counted twice or clipped as a whole would show."""
    x, y = records(200)
    plan = confide.plan(delta=1e-5, records=200, batch=100, steps=20, epsilon=5.0)

    def found() -> Tensor:
        return fitted(SEP(), x, y, plan, networks.mlp(2, 1, hidden=(5,))).posterior.natural  # type: ignore[attr-defined]

    torch.manual_seed(0)
    whole = found()
    monkeypatch.setattr(boundary, "ANSWER_BYTES", 7 * 8 * 60)
    torch.manual_seed(0)
    assert torch.allclose(found(), whole, rtol=1e-8)


@pytest.mark.parametrize("hidden", [(), (4,)])
def test_draws_for_arviz_are_those_of_the_posterior(hidden: tuple[int, ...]) -> None:
    """Parameters of another shape, in another order, or of another law would show."""
    x, y = records(200)
    plan = confide.plan(delta=1e-5, records=200, batch=100, steps=20, epsilon=5.0)
    posterior = fitted(SEP(), x, y, plan, networks.mlp(2, 1, hidden=hidden)).posterior
    tree = posterior.to_arviz(4000)["posterior"]  # type: ignore[call-arg]
    named = dict(posterior.module.named_parameters())
    assert set(tree.data_vars) == set(named)
    assert all(tree[name].shape == (1, 4000, *value.shape) for name, value in named.items())
    mean = torch.cat([torch.as_tensor(tree[name].to_numpy()).mean((0, 1)).flatten() for name in named])
    deviation = posterior.covariance().diagonal().sqrt()  # type: ignore[attr-defined]
    assert ((mean - posterior.mean()).abs() < 5 * deviation / math.sqrt(4000)).all()
    assert tree.attrs["variant"] == "DP-SEP"


def test_a_mixture_has_the_covariances_that_its_budget_pays_for() -> None:
    """By sizes and noise alone: 300 records at epsilon 1 get scalar ones, a short run and a start that prefers none."""
    module = MixtureOfGaussians(4, 4, scale=0.5, generator=torch.Generator().manual_seed(0))
    facts = {}
    for name, noise, method in (("scarce", 5.4, SEP()), ("ample", 0.5, SEP()), ("given", 5.4, SEP(covariance="full"))):
        plan = confide.plan(delta=1e-5, records=300, batch=30, steps=200, noise_multiplier=noise, clip=2.0)
        problem = make_problem(method, module, Schema(records=300), plan)
        start = method.init(problem)
        sites = method._sites(problem)
        places = sites.family.moments(start.theta)[0]
        facts[name] = (sites.family.covariance, method._horizon(problem), float(places.norm(dim=1).max()) < 0.3)
    assert facts == {"scarce": ("scalar", 3.0, True), "ample": ("full", 8.0, False), "given": ("full", 8.0, False)}


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_a_mixture_is_found(covariance: Covariance) -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[2.0, 0.0], [-2.0, 1.0], [0.0, -2.0]]).double()
    which = torch.randint(0, 3, (900,), generator=generator)
    x = centres[which] + 0.5 * torch.randn(900, 2, generator=generator, dtype=torch.float64)
    module = MixtureOfGaussians(3, 2, scale=0.5, spread=2.0)
    module.means.data.copy_(centres + 0.5)
    plan = confide.plan(delta=1e-5, records=900, batch=300, steps=60, epsilon=5.0, clip=2.0)
    found = fitted(SEP(covariance=covariance), x, torch.zeros(900), plan, module).posterior
    assert torch.allclose(found.mean().reshape(3, 2), centres, atol=0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"covariance": "round"}, r"covariance='round': must be one of full, diagonal, scalar"),
        ({"coordinates": "polar"}, r"coordinates='polar'"),
        ({"damping": 0.0}, r"damping=0.0: must be a finite number > 0"),
        ({"horizon": math.inf}, r"horizon=inf"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SEP(**options)


def test_models_without_moments_are_refused_before_any_charge() -> None:
    x, y = records(20)
    for method, module, message in (
        (SEP(), torch.nn.Linear(2, 1), r"module: moments are known for networks of confide"),
        (
            SEP(covariance="full", noise="fixed"),
            networks.mlp(2, 1, hidden=(3,)),
            r"covariance='full': known for linear",
        ),
        (SEP(covariance="full"), networks.linear(2), r"noise='learnt': needs covariance='diagonal'"),
    ):
        with pytest.raises(ValueError, match=message):
            fitted(method, x, y, unprotected(20), module)
    with pytest.raises(TypeError, match=r"prior=.*must be"):
        SEP(prior=confide.priors.LaplacePrior())
