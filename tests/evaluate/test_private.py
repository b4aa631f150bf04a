"""Scores on private records: bounded per record, paid before they are read, refused where nobody paid."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import confide
from confide.errors import BudgetExceeded, Refusal
from confide.evaluate import private
from confide.evaluate.metrics import evaluate
from confide.evaluate.private import CLASS_SCORES, REAL_SCORES, _Questions, private_scores
from confide.mechanism.gaussian import SampledGaussian
from confide.models.likelihoods import Categorical
from confide.models.predictive import ClassPredictive, RealPredictive
from confide.posteriors.draws import Draws
from confide.posteriors.prediction import native
from confide.privacy.ledger import Ledger
from confide.report import PUBLIC, Evaluation
from confide.sources.private_data import PrivateData


class Classes:
    """A posterior whose probabilities are the inputs' own softmax: certain and wrong where an input says so."""

    def predict(self, x: torch.Tensor) -> ClassPredictive:
        return ClassPredictive(x.double().softmax(-1)[None], torch.ones(1, dtype=torch.float64))


class Numbers:
    """A posterior that predicts the first input, with noise of standard deviation 0.2."""

    def predict(self, x: torch.Tensor) -> RealPredictive:
        means = x[:, 0].double()[None]
        return RealPredictive(means, torch.full_like(means, 0.04), torch.ones(1, dtype=torch.float64))


def classes_of(records: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(records, 3, generator=generator)
    return x, torch.multinomial(x.softmax(-1), 1, generator=generator).squeeze(1)


def numbers_of(records: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(records, 1, generator=generator)
    return x, x[:, 0] + 0.3 * torch.randn(records, generator=generator)


def hidden(x: Any, y: Any, classes: int | None, records: int | None, **more: Any) -> confide.PrivateData:
    facts: dict[str, Any] = {"target_bounds": (-1, 1)} if classes is None else {"classes": classes}
    return confide.PrivateData(x, y, schema=confide.Schema(records=records, **facts), **more)


@pytest.mark.parametrize("declared", [True, False])
def test_the_noisy_scores_are_the_metrics(declared: bool) -> None:
    """Catches a wrong bound, a lost half, a score read from its neighbour's place, and a wrong divisor."""
    x, y = classes_of(4000)
    data = hidden(x, y, 3, 4000 if declared else None, seed=1)
    found = private_scores(Classes(), data, epsilon=8, delta=1e-5)
    truth = evaluate(Classes().predict(x), y)
    assert tuple(found.scores) == CLASS_SCORES
    assert found.counted is not declared
    assert found.records == pytest.approx(4000, abs=5)
    for name in ("accuracy", "brier", "nll"):
        score = found.scores[name]
        assert 0 < score.standard_error < 0.01
        assert score.value == pytest.approx(truth[name], abs=4 * score.standard_error + 0.002)
    assert found.scores["ece"].value == pytest.approx(truth["ece"], abs=0.02)
    x, y = numbers_of(4000)
    real = private_scores(Numbers(), hidden(x, y, None, 4000, seed=2), epsilon=8, delta=1e-5).scores
    shown = evaluate(Numbers().predict(x), y)
    assert tuple(real) == REAL_SCORES
    for name, score in real.items():
        assert score.value == pytest.approx(shown[name], abs=4 * score.standard_error)


class OfOnesOwn(Categorical):
    """A likelihood that nobody vouches for: its records run apart."""


@pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning")
def test_draws_under_a_likelihood_of_ones_own_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small networks are predicted by a library that asks for addresses, which is refused where records run apart."""
    x, y = classes_of(300)
    draws = torch.cat([torch.eye(3).flatten(), torch.zeros(3)]).repeat(2, 1)
    posterior = Draws(torch.nn.Linear(3, 3), OfOnesOwn(3), draws, torch.ones(2) / 2, {})

    def accuracy() -> float:
        data = hidden(x, y, 3, 300, seed=1)
        return private_scores(posterior, data, epsilon=50, delta=1e-5, metrics=["accuracy"]).scores["accuracy"].value

    assert accuracy() == pytest.approx(evaluate(posterior.predict(x), y)["accuracy"], abs=0.05)
    if native._kernel() is not None:
        monkeypatch.setattr(native, "is_watched", lambda: False)  # planted
        with pytest.raises(Refusal, match="addressof"):
            accuracy()


def test_the_standard_error_is_that_of_the_noise() -> None:
    x, y = classes_of(300)
    values, stated = [], 0.0
    for seed in range(200):
        data = hidden(x, y, 3, None, seed=seed)
        score = private_scores(Classes(), data, epsilon=1, delta=1e-4, metrics=["accuracy"]).scores["accuracy"]
        values.append(score.value)
        stated = score.standard_error
    assert torch.tensor(values).std().item() == pytest.approx(stated, rel=0.2)


def longest(asked: _Questions) -> float:
    """The largest norm that a record can answer with: sure and wrong, sure and right, far away, in between."""
    x = torch.tensor([[1e4, 0, 0], [1e4, 0, 0], [0, 0, 0], [3, 1, 0]], dtype=torch.float64)
    y = torch.tensor([1, 0, 2, 1])
    if asked.names[0] in REAL_SCORES:
        x, y = torch.tensor([[1e9], [0.0], [0.5]], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    predictive: Any = (Numbers() if asked.names[0] in REAL_SCORES else Classes()).predict(x)
    return float(asked.answers(predictive, y).norm(dim=1).max())


@pytest.mark.parametrize("names", [CLASS_SCORES, ("nll",), REAL_SCORES, ("rmse",)])
@pytest.mark.parametrize("counted", [True, False])
def test_no_record_answers_beyond_the_bound(
    names: tuple[str, ...], counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is the clip of the mechanism: beyond it a record would be cut, and the means would be wrong."""
    asked = _Questions(names, nll_bound=5.0, error_bound=1.0, counted=counted)
    assert longest(asked) <= asked.norm_bound + 1e-12
    monkeypatch.setattr(private, "_halved", lambda scores, bound: scores / bound - 0.5)
    assert longest(asked) > asked.norm_bound + 1, "scores that nobody clips must be noticed here"


@pytest.mark.parametrize("names", [CLASS_SCORES, ("accuracy",)])
def test_neighbours_differ_by_one_clipped_record(names: tuple[str, ...]) -> None:
    """Same noise, one record more: the released sums differ by at most the clip, whatever the record is."""
    x, y = classes_of(50)
    worst = torch.tensor([[1e4, 0.0, 0.0]])
    asked = _Questions(names, 5.0, 1.0, counted=True)
    sums = []
    for more in (False, True):
        data = hidden(
            torch.cat([x, worst]) if more else x, torch.cat([y, y[:1] * 0 + 1]) if more else y, 3, None, seed=9
        )
        mechanism = SampledGaussian(1.0, asked.norm_bound, 1.0, 1, "full-batch")
        sums.append(data.answer(asked.query(Classes()), mechanism).sum.clone())
    moved = float((sums[1] - sums[0]).norm())
    assert 0.4 < moved <= asked.norm_bound + 1e-9


def test_it_is_charged_before_a_record_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    usual: Any = vars(PrivateData)["_PrivateData__batch"]

    def watched(*arguments: Any, **more: Any) -> Any:
        seen.append(len(book.entries()))
        return usual(*arguments, **more)

    monkeypatch.setattr(PrivateData, "_PrivateData__batch", watched)
    book = Ledger()
    x, y = classes_of(30)
    found = private_scores(Classes(), hidden(x, y, 3, 30, ledger=book, name="wards"), epsilon=0.5, delta=1e-3)
    assert set(seen) == {1}
    seen.clear()
    (entry,) = book.entries()
    assert (entry.dataset, entry.purpose) == ("wards", "evaluate accuracy, brier, nll, ece")
    assert (entry.event,) == found.privacy.events
    assert found.privacy.epsilon() <= 0.5
    book.limit(0.6, 1e-3)
    with pytest.raises(BudgetExceeded):
        private_scores(Classes(), hidden(x, y, 3, 30, ledger=book, name="wards"), epsilon=0.5, delta=1e-3)
    assert not seen


def test_a_posterior_that_does_not_fit_is_refused_before_the_charge() -> None:
    class Broken:
        def predict(self, x: torch.Tensor) -> ClassPredictive:
            raise ValueError("the network takes 7 features")

    book = Ledger()
    x, y = classes_of(30)
    with pytest.raises(ValueError, match="7 features"):
        private_scores(Broken(), hidden(x, y, 3, 30, ledger=book), epsilon=1, delta=1e-3)
    assert book.entries() == ()


def test_records_that_cannot_be_scored_count_as_nothing() -> None:
    x, y = classes_of(400)
    odd = torch.cat([x, torch.full((3, 3), math.nan)]), torch.cat([y, torch.tensor([0, 1, 2])])
    plain = private_scores(Classes(), hidden(x, y, 3, None, seed=4), epsilon=5, delta=1e-4)
    assert private_scores(Classes(), hidden(*odd, 3, None, seed=4), epsilon=5, delta=1e-4).scores == plain.scores


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"metrics": ["rmse"]}, "metrics=rmse: must be among accuracy"),
        ({"metrics": []}, "metrics=none"),
        ({"nll_bound": 0.0}, "nll_bound=0.0: must be"),
        ({"error_bound": math.inf}, "error_bound=inf: must be"),
        ({"epsilon": 0.0}, "epsilon=0.0: must be"),
        ({"delta": 2.0}, "delta=2.0: must be"),
    ],
)
def test_bad_arguments(change: dict[str, Any], match: str) -> None:
    x, y = classes_of(10)
    book = Ledger()
    with pytest.raises(ValueError, match=match):
        private_scores(Classes(), hidden(x, y, 3, 10, ledger=book), **{"epsilon": 1.0, "delta": 1e-3, **change})
    assert book.entries() == ()


def test_private_records_have_no_free_metrics() -> None:
    """The way out is named, and public records have no business here."""
    x, y = classes_of(10)
    data: Any = hidden(x, y, 3, 10)
    for refused in (
        lambda: evaluate(Classes().predict(x), data),
        lambda: Evaluation(Classes().predict(x), data, PUBLIC),
    ):
        with pytest.raises(TypeError, match=r"y: is PrivateData.*private_scores"):
            refused()
    with pytest.raises(TypeError, match=r"data: must be a PrivateData; public records.*metrics\.evaluate"):
        private_scores(Classes(), (x, y), epsilon=1, delta=1e-3)  # type: ignore[arg-type]
