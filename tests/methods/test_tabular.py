"""The tabular method: its plan, products of columns, recalibration, checkpoints, files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import confide
from benchmarks import monotone, tables
from confide import rules
from confide.data.schema import Column, Schema
from confide.data.table import Table
from confide.methods._additive_state import Together
from confide.methods.additive import Additive
from confide.methods.tabular import Tabular
from confide.models.calibrated import Calibrated
from confide.models.likelihoods import Bernoulli, Categorical
from confide.models.tabular import TabularNetwork, tabular
from confide.posteriors.draws import Draws
from confide.posteriors.files import load_posterior
from confide.privacy.accountants import sound_epsilon
from confide.running.checkpoint_files import Tensors, names_in, unpacked_fields
from confide.running.fit import make_problem
from confide.sources.queries import Release
from confide.workflow import odds, recalibrate
from confide.workflow.request import Request
from confide.workflow.run import Outcome, run_request


def _counts(exact: torch.Tensor, noise: float, generator: torch.Generator | None = None) -> odds.Counts:
    """Of counts (2, bins) as a release would tell them; without a generator none of its noise is there."""
    told = [math.sqrt(1 - odds.GROUPED) * exact, math.sqrt(odds.GROUPED) * exact @ odds.GROUPS]
    found = torch.cat([part.flatten() for part in told])
    if generator is not None:
        found = found + noise * torch.randn(len(found), generator=generator, dtype=torch.float64)
    return odds.Counts.of(found, noise)


def product(records: int = 3000) -> tuple[Table, Schema]:
    """The sign of a product of two columns: nothing for a sum over columns."""
    random = np.random.default_rng(3)
    x = random.uniform(-1, 1, (records, 2))
    y = ((x[:, 0] * x[:, 1] > 0) ^ (random.random(records) < 0.05)).astype(int)
    columns = tuple(Column(name, bounds=(-1, 1)) for name in "ab")
    return Table({"a": x[:, 0], "b": x[:, 1]}, target="y", labels=y), Schema(
        records=records, columns=columns, target="y", classes=2
    )


def fitted(method: str = "tabular", **options: Any) -> Outcome:
    table, schema = product()
    return run_request(Request(table, facts=schema, epsilon=8.0, seed=1, method=method, **options))


def accuracy(outcome: Outcome) -> float:
    table, _ = product()
    x = torch.tensor(np.column_stack([table.columns["a"], table.columns["b"]]), dtype=torch.float32)
    found = outcome.run.posterior.summary(x).centre.argmax(1).numpy()
    return float((found == table.labels).mean())


@pytest.mark.slow
def test_columns_that_say_something_together_are_learnt() -> None:
    """Catches a network that does not learn, or is not asked: effects alone are at chance."""
    found = fitted()
    assert accuracy(found) > 0.85
    assert accuracy(fitted(method="additive")) < 0.65


def test_all_releases_stay_within_the_target() -> None:
    run = fitted().run
    whole, sampled = (mechanism.sampling for mechanism, _ in run.plan.blocks)
    assert (whole, sampled) == ("full-batch", "poisson")
    releases = sum(event.count for event in run.privacy.events)
    assert releases == run.plan.steps + 1
    assert 7.5 < sound_epsilon(run.privacy.events, rules.DELTA) <= 8.0


def test_a_given_number_of_steps_is_kept_to() -> None:
    run = fitted(steps=10).run
    assert len(run.plan.blocks) == 1
    assert run.plan.steps == 10


def test_recalibration_is_for_methods_that_want_it_and_is_saved(tmp_path: Path) -> None:
    run = fitted(steps=10).run
    assert isinstance(run.posterior.likelihood, Calibrated)
    assert isinstance(fitted("sgld", steps=10).run.posterior.likelihood, Categorical)
    run.posterior.save(tmp_path / "p.safetensors")
    again = load_posterior(tmp_path / "p.safetensors")
    assert again.likelihood == run.posterior.likelihood
    assert isinstance(again.module, TabularNetwork)
    x = torch.rand(7, 2) * 2 - 1
    torch.testing.assert_close(again.summary(x).centre, run.posterior.summary(x).centre)


@pytest.mark.parametrize("likelihood", [Categorical(2), Bernoulli(), Categorical(3), Categorical(7)])
def test_answers_of_recalibration_are_bounded_by_rule(likelihood: Any) -> None:
    """No record's row is longer than the clip, however sure and wrong the posterior is: nothing is left to clip."""
    outputs = likelihood.outputs
    steep = torch.linspace(30.0, -30.0, outputs) if outputs > 1 else torch.tensor([30.0])
    draws = torch.cat([steep, torch.zeros(outputs)])[None]
    posterior = Draws(torch.nn.Linear(1, outputs), likelihood, draws, torch.ones(1))
    x = torch.linspace(-1, 1, 401)[:, None]
    query = recalibrate.odds_of(posterior, 1.0, 0.3)
    for label in range(max(2, outputs)):
        rows = query.function(x, torch.full((401,), label))
        assert rows.shape == (401, query.size)
        assert float(rows.norm(dim=1).max()) <= 1 + 1e-12


def test_recalibration_finds_a_slope_that_was_spoilt() -> None:
    """Nearly without noise: logits that are too large by a half are made smaller, and shifts stay."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, 1, generator=generator)
    y = (torch.rand(20_000, generator=generator) < torch.sigmoid(x[:, 0])).long()
    posterior = Draws(torch.nn.Linear(1, 1), Bernoulli(), torch.tensor([[1.5, 0.0]]), torch.ones(1))
    data = confide.PrivateData(x, y, schema=Schema(classes=2, records=20_000), seed=1)
    plan = confide.plan(delta=1e-6, records=20_000, sampling="full-batch", steps=1, noise_multiplier=0.5, clip=1.0)
    closing = recalibrate.closing_of(plan.mechanism, plan)
    found = closing.tell(posterior, data.answer(closing.ask(posterior), closing.mechanism))
    assert found.facts["slope"] == pytest.approx(1 / 1.5, abs=0.12)
    assert max(map(abs, found.facts["shifts"])) < 0.1


def test_a_fit_of_noise_is_flattened_and_one_that_is_right_is_left() -> None:
    """Counts without a relation between odds and answers give a slope near 0, those that agree with the odds 1."""
    middles = odds.MIDDLES
    present = torch.full_like(middles, 500.0)
    for truth, slope in ((torch.full_like(middles, 0.5), 0.0), (middles.sigmoid(), 1.0)):
        counts = torch.stack([present * truth, present * (1 - truth)])
        found, shift, floor = odds.fitted(_counts(counts, 5.0), 500 * len(middles))
        assert found == pytest.approx(slope, abs=0.05)
        assert shift == pytest.approx(0.0, abs=0.1)
        assert floor == pytest.approx(0.0, abs=0.01 if slope else 0.4)  # of all that are possible
    nothing = torch.zeros(2, len(middles), dtype=torch.float64)
    found, shift, floor = odds.fitted(_counts(nothing, 1e6), 500 * len(middles))
    assert found == pytest.approx(math.exp(odds.STEEPER), rel=0.05)
    assert shift == pytest.approx(0.0, abs=1e-6)
    assert floor <= odds.EXPECTED_FLOOR / 2


def test_noise_in_more_bins_than_there_are_records_for_is_no_slope() -> None:
    """250 records and a noise of 200 in each of 50 counts: were any number of records taken for possible, slopes would
    differ by 7 per cent and shifts by .05."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(4):
        counts = _counts(torch.zeros(2, len(odds.MIDDLES), dtype=torch.float64), 200.0, generator)
        slope, shift, _ = odds.fitted(counts, 250)
        found.append((math.log(slope) - odds.STEEPER, shift))
    assert float(torch.tensor(found).square().mean(0).sqrt().max()) < 0.03


@pytest.mark.parametrize("soft", [0.1, 0.2])
def test_a_network_that_says_the_right_thing_very_softly_is_heard(soft: float) -> None:
    """All of its odds lie about 1: by groups of bins alone nobody sees what they say (the broken variant)."""
    generator = torch.Generator().manual_seed(3)
    x = 1.5 * torch.randn(30_000, 1, generator=generator)
    y = (torch.rand(30_000, generator=generator) < torch.sigmoid(x[:, 0])).long()
    posterior = Draws(torch.nn.Linear(1, 1), Bernoulli(), torch.tensor([[soft, 0.0]]), torch.ones(1))
    counts = recalibrate.odds_of(posterior, 1.0, math.inf).function(x, y).sum(0)
    noisy = counts + 16 * torch.randn(len(counts), generator=generator).double()
    assert recalibrate.told(noisy, 16.0, 30_000, 2)[0] == pytest.approx(1 / soft, rel=0.15)
    noisy[: 2 * len(odds.MIDDLES)] = 16 * torch.randn(2 * len(odds.MIDDLES), generator=generator)
    assert recalibrate.told(noisy, 16.0, 30_000, 2)[0] != pytest.approx(1 / soft, rel=0.15)


def test_labels_that_are_now_and_then_wrong_give_a_floor_and_keep_the_slope() -> None:
    """A tenth of the labels flipped: odds are right in the middle and never beyond nine to one."""
    middles = odds.MIDDLES
    truth = 0.8 * torch.sigmoid(1.5 * middles) + 0.1
    counts = torch.stack([500 * truth, 500 * (1 - truth)])
    slope, shift, floor = odds.fitted(_counts(counts, 5.0), 500 * len(middles))
    assert slope == pytest.approx(1.5, abs=0.15)
    assert shift == pytest.approx(0.0, abs=0.05)
    assert floor == 0.2


def test_a_fit_that_is_surely_wrong_of_some_records_is_bent() -> None:
    """Odds of e^1.4 to e^2.6 that are even in truth: no slope, shift and floor can follow (the broken variant)."""
    generator = torch.Generator().manual_seed(4)
    x = 2 * torch.randn(20_000, 1, generator=generator)
    wrong = (x > 1.4) & (x < 2.6)
    truth = torch.where(wrong, 0.5, torch.sigmoid(x))[:, 0]
    y = (torch.rand(20_000, generator=generator) < truth).long()
    posterior = Draws(torch.nn.Linear(1, 1), Bernoulli(), torch.tensor([[1.0, 0.0]]), torch.ones(1))
    counts = recalibrate.odds_of(posterior, 1.0, math.inf).function(x, y).sum(0)
    noisy = counts + 13 * torch.randn(len(counts), generator=generator).double()
    slope, shifts, floor, curve, _ = recalibrate.told(noisy, 13.0, 20_000, 2)
    errors = []
    for bent in ((), curve):
        found = Calibrated(2, slope, shifts, True, floor, bent).predictive(x[None], torch.ones(1)).draws[0, :, 1]
        errors.append(float((found - truth).abs().mean()))
    assert errors[1] < 0.035 < 0.06 < errors[0]
    slope, shifts, floor, curve, _ = recalibrate.told(0 * noisy, 1e6, 20_000, 2)
    assert max((abs(added) for _, added in curve), default=0.0) < 0.01  # noise alone bends nothing


def test_a_fit_that_has_gone_astray_as_a_whole_is_brought_back() -> None:
    """All odds at about e^-30 where a third belongs to the class: bins that end at e^-5 would leave e^-5 and less."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 1, generator=generator) - 30
    y = (torch.rand(4000, generator=generator) < 0.35).long()
    posterior = Draws(torch.nn.Linear(1, 1), Bernoulli(), torch.tensor([[1.0, 0.0]]), torch.ones(1))
    counts = recalibrate.odds_of(posterior, 1.0, 0.3).function(x, y).sum(0)
    noisy = counts + 21 * torch.randn(len(counts), generator=generator).double()
    slope, shifts, floor, curve, _ = recalibrate.told(noisy, 21.0, 4000, 2)
    found = (
        Calibrated(2, slope, shifts, True, floor, curve)
        .predictive(x[None].double(), torch.ones(1))
        .draws[..., 1]
        .mean()
    )
    assert float(found) == pytest.approx(0.35, abs=0.1)


def _spoilt(classes: int, records: int, slope: float, shifts: torch.Tensor) -> tuple[Draws, torch.Tensor, torch.Tensor]:
    """A posterior whose logits are too small by the slope and off by the shifts, and records of the truth."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(records, classes, generator=generator)
    y = torch.multinomial((slope * logits + shifts).softmax(1), 1, generator=generator)[:, 0]
    likelihood, network = Categorical(classes), torch.nn.Linear(classes, classes, bias=False)
    return Draws(network, likelihood, torch.eye(classes).reshape(1, -1), torch.ones(1)), logits, y


# Where all predictions were too sure, a few wrong labels explain nearly as much as the slope does.
@pytest.mark.parametrize(("slope", "most_wrong"), [(0.6, 0.025), (1.0, 0.01), (1.7, 0.01)])
def test_slope_and_shifts_of_several_classes_are_found(slope: float, most_wrong: float) -> None:
    shifts = torch.tensor([0.4, -0.4, 0.2, 0.0, -0.2])
    posterior, logits, y = _spoilt(5, 40_000, slope, shifts)
    found = recalibrate.odds_of(posterior, 1.0, 0.3).function(logits, y).sum(0)
    told, moved, floor, *_ = recalibrate.told(found, 1.0, len(y), 5)
    assert told == pytest.approx(slope, rel=0.08)
    assert floor <= most_wrong
    assert float((torch.tensor(moved) - shifts).abs().max()) < 0.2


def test_the_slope_of_many_classes_does_not_drown_in_their_noise() -> None:
    """Ten classes, 1500 records, a release for epsilon 0.15, whose noise is 21."""
    posterior, logits, y = _spoilt(10, 1500, 1.4, torch.zeros(10))
    exact = recalibrate.odds_of(posterior, 1.0, 0.3).function(logits, y).sum(0)
    generator = torch.Generator().manual_seed(1)
    noisy = [exact + 21 * torch.randn(len(exact), generator=generator) for _ in range(10)]
    slopes = torch.tensor([recalibrate.told(one, 21.0, 1500, 10)[0] for one in noisy])
    assert float((slopes / 1.4).log().square().mean().sqrt()) < 0.25


def test_wrong_labels_of_several_classes_give_a_floor_and_noise_alone_leaves_what_is_expected() -> None:
    posterior, logits, y = _spoilt(5, 40_000, 1.5, torch.zeros(5))
    generator = torch.Generator().manual_seed(2)
    wrong = torch.rand(len(y), generator=generator) < 0.15
    y = torch.where(wrong, torch.randint(5, y.shape, generator=generator), y)
    found = recalibrate.odds_of(posterior, 1.0, 0.3).function(logits, y).sum(0)
    slope, _, floor, *_ = recalibrate.told(found, 1.0, len(y), 5)
    assert slope == pytest.approx(1.5, rel=0.12)
    assert floor == pytest.approx(0.15, abs=0.05)
    slope, shifts, floor, *_ = recalibrate.told(0 * found, 1e6, len(y), 5)
    assert slope == pytest.approx(math.exp(odds.STEEPER), rel=0.1)
    assert max(map(abs, shifts)) < 1e-3
    assert floor <= odds.EXPECTED_FLOOR / 2


@pytest.mark.parametrize("known", [True, False])
def test_what_a_record_has_moved_its_own_odds_by_is_taken_off(known: bool) -> None:
    """A fit that has pulled every record towards its own class: others would see a slope of 1, these see far more."""
    pull, classes = 0.5, 5
    _, logits, y = _spoilt(classes, 20_000, 1.0, torch.zeros(classes))
    residual = torch.eye(classes)[y] - logits.softmax(1)
    x = logits + pull * residual / residual.norm(dim=1, keepdim=True).clamp(min=recalibrate.WHOLE)
    facts = {"own_pull": pull} if known else {}
    network = torch.nn.Linear(classes, classes, bias=False)
    posterior = Draws(network, Categorical(classes), torch.eye(classes).reshape(1, -1), torch.ones(1), facts)
    found = recalibrate.odds_of(posterior, 1.0, 0.3).function(x, y).sum(0)
    told = recalibrate.told(found, 1.0, len(y), classes)
    likelihood = Calibrated(classes, told.slope, told.shifts, floor=told.floor, power=told.power)
    stated = likelihood.predictive(logits[None], torch.ones(1)).probabilities.amax(1)
    off = float((stated - logits.softmax(1).amax(1)).mean())
    assert (abs(off) < 0.01 and told.slope < 1.2) if known else (off > 0.04 and told.slope > 1.4)


@pytest.mark.parametrize("classes", [2, 4])
def test_a_slope_that_nobody_measured_leaves_a_rare_class_its_rate(classes: int) -> None:
    """Of every class but the first one record in a hundred: the slope that is expected beforehand, 1.1 times all
    logits, would take a third of them away (the broken variant: no levels)."""
    shares = torch.tensor([1 - 0.01 * (classes - 1)] + [0.01] * (classes - 1), dtype=torch.float64)
    x = torch.zeros(500, classes)
    draws = torch.cat([torch.zeros(classes * classes), shares.log().float()])[None]
    rates = {}
    for known in (True, False):
        facts = {"levels": shares.log().tolist()} if known else {}
        posterior = Draws(torch.nn.Linear(classes, classes), Categorical(classes), draws, torch.ones(1), facts)
        plan = confide.plan(delta=1e-6, records=500, sampling="full-batch", steps=1, noise_multiplier=1e6, clip=1.0)
        closing = recalibrate.closing_of(plan.mechanism, plan)
        query = closing.ask(posterior)
        nothing = Release(torch.zeros(query.size), 1e6, plan.mechanism.event(), 500.0)
        rates[known] = float(closing.tell(posterior, nothing).predict(x).probabilities[:, -1].mean())
    assert rates[True] == pytest.approx(0.01, rel=0.02)
    assert rates[False] != pytest.approx(0.01, rel=0.05)


def test_states_are_kept_and_taken_up(tmp_path: Path) -> None:
    """A state inside of a state comes back as it was."""
    plan = confide.plan(delta=1e-4, records=100, steps=5, noise_multiplier=1.0, batch=20)
    problem = make_problem(Tabular(), tabular((0, 0), 1, (3,)), Schema(records=100), plan, seed=0)
    state = Tabular().init(problem)
    (tmp_path / "tensors").mkdir()
    kept = Tensors(tmp_path)
    body = kept.packed(state)["fields"]
    tensors = {name: kept.read(name) for name in names_in(list(body.values()))}
    back = unpacked_fields(body, tensors, state)
    assert type(back["effects"]) is type(state.effects)
    assert torch.equal(back["effects"].heights, state.effects.heights)
    assert torch.equal(back["descent"].first, state.descent.first)


def test_states_that_come_to_be_during_a_run_are_taken_up(tmp_path: Path) -> None:
    """Which columns move together is not known at the start: a run that was broken off after it could not go on."""
    plan = confide.plan(delta=1e-4, records=100, steps=5, noise_multiplier=1.0, batch=20)
    problem = make_problem(Tabular(), tabular((0, 0), 1, (3,)), Schema(records=100), plan, seed=0)
    state = Tabular().init(problem)
    assert state.effects.together is None
    later = replace(state, effects=replace(state.effects, together=Together(torch.eye(3), 0.25)))
    (tmp_path / "tensors").mkdir()
    kept = Tensors(tmp_path)
    body = kept.packed(later)["fields"]
    tensors = {name: kept.read(name) for name in names_in(list(body.values()))}
    back = unpacked_fields(body, tensors, state)["effects"].together
    assert type(back) is Together
    assert torch.equal(back.correlations, torch.eye(3))
    assert back.doubt == 0.25


def test_one_step_is_for_the_effects() -> None:
    data = confide.PrivateData(torch.rand(100, 2), torch.rand(100), schema=Schema(records=100), seed=0)
    plan = confide.plan(delta=1e-4, records=100, steps=1, noise_multiplier=1.0, batch=20)
    run = confide.fit(Tabular(), confide.networks.linear(2), data, plan, seed=0)
    assert torch.isfinite(run.posterior.summary(torch.rand(4, 2)).centre).all()
    assert Additive().opening is None


def test_what_counts_as_worse() -> None:
    assert monotone.faults([[0.5, 0.5], [0.4, 0.4], [0.5, 0.5]]) == [2]
    assert monotone.faults([[0.5, 0.5], [0.3, 0.5], [0.41, 0.41]]) == []  # within the noise of the seeds
    assert monotone.faults([[0.5], [0.504]]) == []


def test_more_budget_is_not_worse() -> None:
    """The quick form, on one table and two budgets that are far apart."""
    table, schema = product()
    requests = [Request(table, facts=schema, epsilon=e, seed=1, method="tabular", steps=60) for e in (0.1, 8.0)]
    small, large = (accuracy(run_request(request)) for request in requests)
    assert large > small - 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", [*tables.MADE_UP, *monotone.ADDED])
def test_more_budget_is_never_worse(name: str) -> None:
    assert monotone.line(name, monotone.EPSILONS, 3)["faults"] == []
