"""Private selection: everything is charged, first, within epsilon; scores are noised; the outlook is honest."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import confide
from confide.data.schema import Schema
from confide.data.table import Table
from confide.errors import BudgetExceeded, DataError, PrivacyWarning, Refusal
from confide.methods.sgd import SGD
from confide.posteriors.base import Posterior
from confide.privacy.accountants import sound_epsilon
from confide.privacy.events import merged
from confide.privacy.ledger import Ledger
from confide.sources.base import priced
from confide.workflow import search
from confide.workflow.request import Request
from confide.workflow.run import records_of
from confide.workflow.search import Searched, Trials, prepare_search, run_search, score_query

RECORDS, EPSILON = 400, 20.0
GOOD, BAD = SGD(learning_rate=1.0), SGD(learning_rate=1e-12)
CHANGES = ({"method": BAD}, {"method": GOOD})


def _request(**more: Any) -> Request:
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (RECORDS, 3))
    y = (x @ [2.0, -1.0, 0.5] > 0.4).astype(int)
    facts = Schema(records=RECORDS, classes=2, bounds=(-1, 1))
    settings: dict[str, Any] = {"epsilon": EPSILON, "delta": 1e-4, "steps": 20, "sampling": "full-batch", **more}
    return Request(Table.from_arrays(x, y), facts=facts, **settings)


@pytest.fixture(scope="module")
def trials() -> Trials:
    return prepare_search(_request(), CHANGES)


@pytest.fixture(scope="module")
def found(trials: Trials) -> Searched:
    return run_search(trials)


def test_all_fits_and_scores_together_are_within_epsilon_and_use_most_of_it(trials: Trials) -> None:
    total = sound_epsilon(trials.events, 1e-4)
    assert 0.97 * EPSILON <= total <= EPSILON
    alone = sound_epsilon(priced(trials.jobs[0].parts), 1e-4)
    assert alone == pytest.approx(trials.outlook.epsilon_each, rel=1e-3)
    assert alone < EPSILON


def test_the_better_setting_wins_and_the_statement_is_about_the_whole_search(found: Searched, trials: Trials) -> None:
    assert found.best == 1
    run = found.outcome.run
    assert tuple(run.privacy.events) == tuple(merged(trials.events))
    assert run.posterior.facts["chosen_among"] == 2
    assert run.privacy.epsilon() <= EPSILON


def test_the_ledger_is_charged_for_every_candidate_in_one_entry_before_the_first_fit() -> None:
    book = Ledger()
    trials = prepare_search(_request(ledger=book, name="all"), CHANGES)
    assert not book.entries("all")
    run_search(trials)
    charged = [entry for entry in book.entries("all") if entry.event is not None]
    assert len({entry.plan for entry in charged}) == 1
    assert sound_epsilon(book.events("all"), 1e-4) == pytest.approx(sound_epsilon(trials.events, 1e-4), rel=1e-6)


def test_a_search_that_pays_for_one_candidate_only_is_caught() -> None:
    """What was not paid ahead is charged when it is asked: the ledger ends beyond what the search states."""

    class ForgetsTheOthers(Trials):
        @property
        def parts(self) -> Any:
            return (*self.jobs[0].parts, (self.score, len(self.jobs)))

    book = Ledger()
    honest = prepare_search(_request(ledger=book, name="fault"), CHANGES)
    planted = ForgetsTheOthers(**{name: getattr(honest, name) for name in honest.__dataclass_fields__})
    run_search(planted)
    booked = sound_epsilon(book.events("fault"), 1e-4)
    assert booked > sound_epsilon(planted.events, 1e-4) * 1.2  # what it states is less than what was booked
    assert booked == pytest.approx(sound_epsilon(honest.events, 1e-4), rel=1e-6)


def test_a_budget_that_suffices_for_one_fit_and_not_for_all_refuses_all_and_reads_nothing() -> None:
    book = Ledger()
    trials = prepare_search(_request(ledger=book, name="short"), CHANGES)
    book.limit(0.75 * EPSILON, 1e-4)
    with pytest.raises(BudgetExceeded):
        run_search(trials)
    assert not book.events("short")


def test_scores_carry_the_noise_that_is_stated(trials: Trials, found: Searched) -> None:
    """The oracle is the score without noise; what is released differs from it by noise of the stated size."""
    posterior = found.outcome.run.posterior
    differences = []
    job = replace(trials.jobs[0], settled=trials.held_out)
    query = score_query(posterior, "classification")
    x, y = trials.held_out.x, torch.as_tensor(trials.held_out.y)
    exact = 0.5 + float(query.function(torch.as_tensor(x), y).sum()) / trials.outlook.scored
    for _ in range(200):
        release = records_of(replace(job, request=replace(job.request, ledger=Ledger()))).answer(query, trials.score)
        differences.append(0.5 + float(release.sum) / trials.outlook.scored - exact)
    deviation = float(np.std(differences))
    assert deviation == pytest.approx(found.noise, rel=0.2)
    assert abs(float(np.mean(differences))) < 4 * found.noise / np.sqrt(200)
    assert deviation > 0.5 * found.noise  # scores without noise, a planted fault, have none at all


def test_a_score_of_one_record_is_at_most_a_half_whatever_the_record(found: Searched) -> None:
    query = score_query(found.outcome.run.posterior, "classification")
    x = torch.tensor([[1e30, -1e30, 0.0], [0.0, 0.0, 0.0], [float("inf"), 0.0, 1.0]])
    answers = query.function(x, torch.tensor([0, 1, 1]))
    assert float(answers.nan_to_num(9).abs().max()) <= 0.5


def test_regression_scores_lie_between_their_bounds() -> None:
    class Wild:
        def summary(self, x: Any) -> Any:
            class Found:
                centre = torch.tensor([1e9, 0.5, -1e9])

            return Found()

    posterior: Posterior = Wild()  # type: ignore[assignment]
    answers = score_query(posterior, "regression").function(torch.zeros(3, 1), torch.tensor([0.0, 0.5, 1.0]))
    assert answers.flatten().tolist() == [-0.5, 0.5, -0.5]


def test_the_parts_are_apart_and_by_a_coin_of_each_record(trials: Trials) -> None:
    sizes = len(trials.held_out.y), len(trials.jobs[0].settled.y)
    assert sum(sizes) == RECORDS
    assert 0.1 < sizes[0] / RECORDS < 0.3
    again = prepare_search(_request(), CHANGES, trials.coins)
    np.testing.assert_array_equal(again.held_out.y, trials.held_out.y)
    fresh = [len(prepare_search(_request(), CHANGES).held_out.y) for _ in range(4)]
    assert len(set(fresh)) > 1  # never the same coins twice


def test_the_outlook_says_before_the_charge_whether_it_can_pay_off(trials: Trials) -> None:
    assert not trials.outlook.pays_off  # 80 records are scored
    assert "a matter of chance" in trials.outlook.sentence()
    large = replace(trials.outlook, scored=10**6, resolution=search._resolution(trials.score, 10**6, "classification"))
    assert large.pays_off
    assert "chance" not in large.sentence()


def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(Refusal, match="among 2 to 64"):
        prepare_search(_request(), CHANGES[:1])
    request = replace(_request(), facts=Schema(classes=2, bounds=(-1, 1)))
    with pytest.raises(DataError, match=r"records: not declared; .* so declare them"):
        prepare_search(request, CHANGES)
    with pytest.raises(Refusal, match="give reopen="):
        run_search(prepare_search(_request(), CHANGES), jobs=2)


def _reopened(ledger: str) -> tuple[Request, Any]:
    return _request(ledger=ledger, name="jobs"), CHANGES


@pytest.mark.parametrize("backend", ["threading", pytest.param("loky", marks=pytest.mark.slow)])
def test_workers_open_the_records_by_themselves_and_take_what_was_paid(tmp_path: Any, backend: str) -> None:
    import joblib

    ledger = str(tmp_path / "budget.db")
    reopen = partial(_reopened, ledger)
    trials = prepare_search(*reopen())
    with joblib.parallel_config(backend=backend):
        found = run_search(trials, jobs=2, reopen=reopen)
    assert found.best == 1
    book = Ledger(ledger)
    assert sound_epsilon(book.events("jobs"), 1e-4) == pytest.approx(sound_epsilon(trials.events, 1e-4), rel=1e-6)
    book.close()


def test_the_estimator_searches_warns_and_predicts() -> None:
    request = _request()
    assert request.data.block is not None
    base = confide.PrivateBayesClassifier(
        epsilon=4.0, delta=1e-4, bounds=(-1, 1), classes=2, records=RECORDS, steps=20, sampling="full-batch"
    )
    model = confide.PrivateSearchCV(base, {"method": [BAD, GOOD]})
    with pytest.warns(PrivacyWarning, match="cannot be told apart"):
        model.fit(request.data.block, request.data.labels)
    assert len(model.cv_results_["noisy_test_score"]) == 2
    assert model.predict(request.data.block).shape == (RECORDS,)
    assert model.privacy_.epsilon() <= 4.0
    with pytest.raises(Refusal, match="epsilon is not to be searched"):
        confide.PrivateSearchCV(base, {"epsilon": [1.0, 2.0]}).fit(request.data.block, request.data.labels)
