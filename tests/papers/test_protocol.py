"""One protocol for every comparison: equal trials, a held-out part, never the test part, and a table."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import confide
from confide.errors import Refusal
from confide.papers import protocol, sets
from confide.papers.base import Context
from confide.papers.dp_sep import fits
from confide.papers.dp_sgmcmc import adult

QUICK = Context(quick=True, seeds=(0,), noise_seed=1)
FULL = Context(data=Path("nowhere"))


def settled(scores: dict[str, list[float]]) -> protocol.Protocol:
    offered = {(name,): [{"place": place} for place in range(len(values))] for name, values in scores.items()}
    return protocol.settle(
        offered, lambda key, one: scores[key[0]][one["place"]], about="a part", score="loss", context=FULL
    )


def test_the_best_of_equal_trials_is_taken_and_told() -> None:
    found = settled({"one": [3.0, 1.0, 2.0], "other": [math.nan, 5.0, math.inf]})
    assert (found.of("one"), found.of("other")) == ({"place": 1}, {"place": 1})
    table = found.table()
    assert table.rows == (("one", 3, "place 1", 1.0, 3.0, "nothing"), ("other", 3, "place 1", 5.0, 5.0, "nothing"))
    assert "3 trials for every method" in table.notes[0]


@pytest.mark.parametrize("scores", [{"one": [1.0, 2.0], "other": [1.0]}, {"one": []}])
def test_a_method_that_gets_more_trials_is_refused_before_the_first(scores: dict[str, list[float]]) -> None:
    with pytest.raises(Refusal, match="the same number of trials"):
        settled(scores)


@pytest.mark.parametrize("candidates", [fits.CANDIDATES, adult.CANDIDATES])
def test_the_papers_offer_equal_trials(candidates: dict[str, list[object]]) -> None:
    assert {len(offered) for offered in candidates.values()} == {4}


def test_no_trial_can_see_the_test_part() -> None:
    """A set for trials holds other records than the private one, and not one of the test part."""
    given = sets.load("adult", QUICK)
    private, public = protocol.parted(given, 400)
    assert (len(private.x), private.records, len(public.x), len(public.x_test)) == (1600, 1600, 280, 120)
    assert torch.equal(torch.cat([private.x, public.x, public.x_test]), given.x)
    assert torch.equal(private.x_test, given.x_test)
    with pytest.raises(Refusal, match="leave some of the 2000"):
        protocol.parted(given, 2000)


def test_trials_of_adult_do_not_change_with_private_or_test_records() -> None:
    """Planted: private and test records are spoilt; every score stays what it was."""
    _, trial = adult.load(QUICK)
    settings = dict(adult.CANDIDATES["dp-vi"][0])
    before = trial.log_loss(adult.one_run(trial, "dp-vi", 1.0, 5, settings).posterior)
    assert trial.real is not None
    trial.real.x.fill_(math.nan)
    trial.real.x_test.fill_(math.nan)
    assert trial.log_loss(adult.one_run(trial, "dp-vi", 1.0, 5, settings).posterior) == before


def test_trials_of_networks_are_on_made_up_records() -> None:
    given = sets.load("wine_red", QUICK)
    trial = sets.made_up_like(given, 500, 3)
    assert (trial.records, trial.x.shape, trial.y.dtype) == (500, (500, given.x.shape[1]), given.y.dtype)
    assert float(trial.y.abs().max()) <= 1
    assert not set(map(tuple, trial.x.tolist())) & set(map(tuple, given.x.tolist()))


def test_a_note_says_what_ran_and_not_what_usually_runs() -> None:
    plan = confide.plan(delta=1e-5, records=1000, batch=50, steps=40, noise_multiplier=1.5, clip=0.5)
    sizes = "1000 records, poisson batches of 50 on average, 40 steps (2 passes)"
    expected = f"{sizes}, clip 0.5, noise multiplier 1.5; seeds 3, 4"
    assert protocol.ran(plan, (3, 4)) == expected


def test_a_trial_has_the_noise_of_the_real_run() -> None:
    real = confide.plan(delta=1e-5, records=8000, batch=400, steps=50, epsilon=1.0, clip=2.0)
    trial = protocol.with_noise_of(real, 1000)
    of_mean = [plan.mechanism.noise_std / plan.expected_batch for plan in (real, trial)]
    assert of_mean[0] == pytest.approx(of_mean[1])
    assert (trial.steps, trial.mechanism.clip, trial.mechanism.rate) == (50, 2.0, real.mechanism.rate)
    open_plan = confide.plan(delta=1e-5, records=8000, batch=400, steps=50, private=False, clip=math.inf)
    assert not protocol.with_noise_of(open_plan, 1000).mechanism.private
