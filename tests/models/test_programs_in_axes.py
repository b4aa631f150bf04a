"""Samplers on programs move along axes of one record's information, put back what a clip takes, and say what fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Beta, HalfNormal, Normal, Poisson

import confide
from confide.evaluate.mixing import mixing_facts
from confide.layers.programs import WhitenedProgram, unpacked
from confide.mechanism.clipping import clipped_sum
from confide.methods import SGHMC, SGLD, LaplaceApproximation, _chain
from confide.methods._bends import STRAIGHT
from confide.methods._carried import carried
from confide.methods._told import ToldBelief
from confide.models.likelihoods import Gaussian
from confide.models.program_sharpness import taken_by_clips
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
        found = taken_by_clips(model, position, form, axes, [clip])
        assert found is not None
        assert torch.allclose(found[0][0], taken, atol=0.02)
        assert taken.abs() > 0.1
    wide = taken_by_clips(model, position, form, axes, [1e6])
    assert wide is not None
    assert wide[0][0].abs() < 1e-6


def test_a_record_answers_with_its_score_and_the_products_of_it() -> None:
    """Differences stand for the score in products: they agree with gradients, and records stay apart."""
    x, y = (one.double() for one in records())
    model = regression().double()
    position = model.unconstrained.detach()
    root = torch.tril(torch.rand(len(position), len(position), generator=torch.Generator().manual_seed(3)) + 0.5)
    asked = WhitenedProgram(model, share=0.5)
    asked.axes.copy_(root)
    total = torch.zeros(len(position) + len(asked.products), dtype=torch.float64)
    norms = clipped_sum(asked, ProgramLikelihood().loss, x, y, clip=1e6, out=total)
    each = torch.stack([scores_of(model, position, x[i : i + 1], y[i : i + 1])[0][0, 0] for i in range(len(y))])
    scores = each @ root.double()
    assert torch.allclose(-total[: len(position)], scores.sum(0), rtol=1e-6)
    products = unpacked(-total[len(position) :] / 0.5, len(position))
    assert torch.allclose(products, scores.mT @ scores, rtol=1e-5, atol=1e-5)
    long = scores.norm(dim=1)
    assert torch.allclose(norms, long * (1 + (0.5 * long) ** 2).sqrt(), rtol=1e-5), "clipped together"


@pytest.mark.parametrize(
    "method",
    [
        SGLD(),
        pytest.param(SGHMC(), marks=pytest.mark.slow),
        pytest.param(LaplaceApproximation(), marks=pytest.mark.slow),
    ],
)
def test_a_chain_that_is_worth_few_draws_gives_its_belief(method: Any) -> None:
    """Of a mean and a scale: as wide as the records and the noise leave them, where a chain would be anywhere."""
    count = 2000
    model = confide.models.program(
        lambda p, x, y: Normal(p["m"], p["s"]).log_prob(y), {"m": Normal(0.0, 3.0), "s": HalfNormal(2.0)}
    ).double()
    generator = torch.Generator().manual_seed(1)
    y = 1.5 + 0.4 * torch.randn(count, generator=generator, dtype=torch.float64)
    data = confide.PrivateData(torch.zeros(count, 1), y, schema=confide.Schema(records=count), seed=2)
    plan = confide.plan(records=count, batch=200, steps=120, epsilon=1.0, delta=1e-5)
    found: Any = confide.fit(method, model, data, plan, seed=3).posterior
    assert found.facts["draws_of"].startswith("the belief")
    assert "rests on one peak" in found.facts["warning"]
    m, s = (found.named_draws()[name] for name in ("m", "s"))
    alone = float(y.std()) / count**0.5
    assert alone < float(m.std()) < 2.5 * alone, "noise and batches widen it, and not to the prior's three"
    assert abs(float(m.mean()) - float(y.mean())) < 3 * float(m.std())
    assert abs(float(s.mean()) - float(y.std())) < 3 * float(s.std())
    assert float(s.std()) < 2.5 * alone


def count_regression(haste: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of counts up to some hundreds, from a start where all are one."""
    count, generator = 2000, torch.Generator().manual_seed(1)
    x = torch.randn(count, 1, generator=generator, dtype=torch.float64).clamp(-2, 2)
    y = torch.poisson(torch.exp(2.2 - 1.7 * x[:, 0]), generator)
    model = confide.models.program(
        lambda p, x, y: Poisson(torch.exp(p["slope"] * x[0] + p["level"])).log_prob(y),
        {"slope": Normal(0.0, 1.0), "level": Normal(0.0, 1.0)},
    ).double()
    monkeypatch.setattr(_chain, "each_generation", lambda burn_in: 0)  # no scouts, who would bring it there
    if not haste:
        monkeypatch.setattr(_chain, "far_off", lambda *given: 0.0)
    data = confide.PrivateData(x, y, schema=confide.Schema(records=count), seed=2)
    plan = confide.plan(records=count, batch=200, steps=160, epsilon=1.0, delta=1e-5)
    return confide.fit(SGLD(), model, data, plan, seed=3).posterior


def test_a_chain_that_has_far_to_go_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Axes that follow products of scores which are not nought on average would let it stand still."""
    found = count_regression(True, monkeypatch)
    assert found.facts["draws_of"].startswith("the belief")
    slope = found.named_draws()["slope"]
    assert abs(float(slope.mean()) + 1.7) < 4 * float(slope.std()) < 0.2


@pytest.mark.slow
def test_without_haste_it_stands_still_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    still = count_regression(False, monkeypatch)
    assert still.facts["draws_of"].startswith("the prior")
    assert "do not" in still.facts["draws_of"]
    assert float(still.named_draws()["slope"].std()) > 0.7, "and no narrow interval around what is wrong"


@pytest.mark.parametrize(
    "wrong", [{"way": 2.1}, {"excess": 3.1}, {"steady": 0.4}, {"unlike": 1.1}, {"unlike": 0.3, "bends": 0.2}]
)
def test_a_belief_is_told_only_where_a_line_explains_it(wrong: dict[str, float]) -> None:
    good = ToldBelief(torch.zeros(1, 1), 0.1, 1.0, 1.0, 1.0, 0.1, cut_known=True)
    assert good.one_peak
    assert not replace(good, **wrong).one_peak  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_ridge_is_no_peak() -> None:
    """Two halves of a mixture so near to each other that nobody can tell their shares: as wide as in the prior."""
    count, generator = 2000, torch.Generator().manual_seed(1)
    y = torch.randn(count, generator=generator, dtype=torch.float64)

    def said(p: Any, x: Any, y: Any) -> Any:
        centres = torch.stack([p["centre"], p["centre"] + p["apart"]])
        shares = torch.stack([1 - p["share"], p["share"]])
        return torch.logsumexp(shares.log() + Normal(centres, 1.0).log_prob(y), 0)

    priors: dict[str, Any] = {"share": Beta(2.0, 2.0), "centre": Normal(0.0, 2.0), "apart": HalfNormal(4.0)}
    model = confide.models.program(said, priors).double()
    data = confide.PrivateData(torch.zeros(count, 1), y, schema=confide.Schema(records=count), seed=2)
    plan = confide.plan(records=count, batch=200, steps=100, epsilon=1.0, delta=1e-5)
    found: Any = confide.fit(SGLD(), model, data, plan, seed=3).posterior
    assert found.facts["bends"] > STRAIGHT, "how much depends on where the chain began: .998 to 170 with four seeds"
    assert 0.15 < float(found.named_draws()["share"].std()) < 0.3


def test_draws_are_carried_to_a_density_that_is_no_gaussian() -> None:
    """A log of a chi-square with three degrees: skewed, its mean and deviation known; draws begin a deviation off."""

    def energies(points: Any) -> Any:
        return (0.5 * points.exp() - 1.5 * points).sum(1), 0.5 * points.exp() - 1.5

    generator = torch.Generator().manual_seed(0)
    start = 2.0 + torch.randn(1000, 1, generator=generator, dtype=torch.float64)
    found = carried(start, energies, torch.eye(1, dtype=torch.float64), generator)
    known = torch.distributions.Chi2(torch.tensor(3.0)).sample((100_000,)).log()
    assert abs(float(found.mean() - known.mean())) < 0.12
    assert abs(float(found.std() / known.std()) - 1) < 0.1
    assert abs(float(start.mean() - known.mean())) > 0.8, "so that draws left alone are caught"


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
    found = fitted(model, x, torch.zeros_like(y), SGLD(), plan={"steps": 40, "epsilon": 8.0})
    assert found.posterior.facts["draws_of"].startswith("the belief")
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
    # Noise is fresh after a stop, so that the one belief may bend and the other not: they differ in how many draws.
    assert {len(one.draws) for one in (again, whole)} <= {250, 1000}
