"""A model beside one that learns nothing, class by class, with intervals that hold what they say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from confide.evaluate import metrics
from confide.evaluate.intervals import intervals
from confide.evaluate.judgement import BETTER, UNTOLD, WORSE, judge, judge_classes, judge_reals
from confide.evaluate.ordering import auroc_of, average_precision_of
from confide.models.predictive import ClassPredictive, RealPredictive


def drawn(count: int, sharper: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two classes of logistic odds; `sharper` than 1 states too much confidence."""
    generator = torch.Generator().manual_seed(seed)
    odds = torch.randn(count, dtype=torch.float64, generator=generator)
    y = torch.bernoulli(torch.sigmoid(odds), generator=generator).long()
    p = torch.sigmoid(sharper * odds)
    return torch.stack([1 - p, p], 1), y


def predictive(p: Tensor) -> ClassPredictive:
    return ClassPredictive(p[None], torch.ones(1, dtype=p.dtype))


@pytest.mark.parametrize("ties", [False, True])
def test_areas_equal_those_of_scikit_learn(ties: bool) -> None:
    from sklearn.metrics import average_precision_score, roc_auc_score

    p, y = drawn(500)
    scores = (p[:, 1] * 8).round() if ties else p[:, 1]
    assert auroc_of(scores, y == 1) == pytest.approx(roc_auc_score(y.numpy(), scores.numpy()), abs=1e-12)
    theirs = average_precision_score(y.numpy(), scores.numpy())
    assert average_precision_of(scores, y == 1) == pytest.approx(theirs, abs=1e-12)


def test_areas_of_several_classes_are_means_over_those_that_occur() -> None:
    generator = torch.Generator().manual_seed(1)
    p = torch.randn(300, 4, generator=generator, dtype=torch.float64).softmax(1)
    y = torch.multinomial(p[:, :3], 1, generator=generator).squeeze(1)  # the last class never occurs
    found = metrics.evaluate(predictive(p), y)
    assert found["auroc"] == pytest.approx(sum(auroc_of(p[:, k], y == k) for k in range(3)) / 3)
    assert "auroc" not in metrics.evaluate(predictive(p), torch.zeros(300, dtype=torch.long))


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Overconfident probabilities, 200 test sets of 300: three deviations of chance below 95 % are 90.4 %."""
    p, y = drawn(400_000, sharper=1.5)
    truth = metrics.evaluate(predictive(p), y)
    names = ("accuracy", "nll", "brier", "ece", "classwise_ece", "auroc", "average_precision")
    held = dict.fromkeys(names, 0)
    for part in range(200):
        rows = slice(300 * part, 300 * (part + 1))
        for name, (low, high) in intervals(predictive(p[rows]), y[rows]).items():
            if name in held:
                held[name] += low <= truth[name] <= high
    assert min(held.values()) >= 181, held


def test_intervals_of_numbers_hold_the_truth() -> None:
    generator = torch.Generator().manual_seed(2)
    y = torch.randn(200, 400, dtype=torch.float64, generator=generator)
    held = {"rmse": 0, "coverage_90": 0, "log_likelihood": 0}
    truth = {
        "rmse": math.sqrt(2.0),
        "coverage_90": 2 * 0.5 * (1 + math.erf(1.6448536 / math.sqrt(2) / math.sqrt(2))) - 1,
        "log_likelihood": -0.5 * math.log(2 * math.pi) - 1.0,
    }
    for values in y:
        # Said N(0, 1), and N(0, 2) is true.
        said = RealPredictive(torch.zeros(1, 400).double(), torch.ones(1, 400).double(), torch.ones(1).double())
        for name, (low, high) in intervals(said, values * math.sqrt(2)).items():
            held[name] += low <= truth[name] <= high
    assert min(held.values()) >= 181, held


def test_honest_probabilities_could_be_chance_and_others_could_not() -> None:
    honest, sharp = (judge_classes(*drawn(3000, sharper)) for sharper in (1.0, 3.0))
    assert all(line.calibration.low == 0 for line in honest.classes)
    assert all(line.calibration.low > 0 for line in sharp.classes)


def test_confusion_and_recall() -> None:
    p = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.7, 0.3]])
    found = judge_classes(p, torch.tensor([0, 1, 1, 1]), ("no", "yes"))
    assert found.confusion == ((1, 0), (2, 1))
    yes = found.classes[1]
    assert (yes.label, yes.records, yes.named) == ("yes", 3, 1)
    assert yes.recall.value == pytest.approx(1 / 3)
    assert yes.precision.value == 1
    assert found.majority == "yes"
    assert found.baseline.value == 0.75
    assert found.gain.value == pytest.approx(-0.25)


def test_one_class_only_is_said() -> None:
    p = torch.tensor([[0.8, 0.15, 0.05]]).repeat(50, 1)
    y = torch.tensor([0] * 40 + [1] * 10)
    found = judge_classes(p, y, ("a", "b", "c"))
    assert found.only == "a"
    assert found.never == ("b",)
    assert found.verdict == UNTOLD
    assert found.classes[2].recall is None
    assert judge_classes(*drawn(500)).only is None


def test_verdicts_beside_no_learning() -> None:
    p, y = drawn(2000)
    assert judge_classes(p, y).verdict == BETTER
    assert judge_classes(p.flip(1), y).verdict == WORSE
    truth = torch.linspace(-1, 1, 400).double()
    ones = torch.full((1, 400), 0.1).double()
    weight = torch.ones(1).double()
    good, bad = RealPredictive(truth[None] * 0.9, ones, weight), RealPredictive(-truth[None], ones, weight)
    assert judge_reals(good, truth).verdict == BETTER
    assert judge_reals(good, truth).gain.value == pytest.approx(0.99)
    assert judge(bad, truth).verdict == WORSE


def test_constant_targets_are_not_beaten_and_do_not_divide_by_nothing() -> None:
    same = RealPredictive(torch.zeros(1, 9).double(), torch.ones(1, 9).double(), torch.ones(1).double())
    assert judge_reals(same, torch.full((9,), 2.0)).verdict == WORSE


def test_everything_is_defined_for_few_records_and_perfect_order() -> None:
    p = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    found = judge_classes(p, torch.tensor([0, 1]))
    assert found.classes[0].auroc.value == 1
    assert 0 < found.classes[0].auroc.low < 1
    for low, high in intervals(predictive(p), torch.tensor([0, 1])).values():
        assert math.isfinite(low)
        assert low <= high
    judge_classes(p[:1], torch.tensor([0]))
