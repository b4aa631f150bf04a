"""Metrics against independent implementations, and on the edges where such code usually breaks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scoringrules
import torch
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, roc_auc_score
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error

from confide.evaluate import metrics
from confide.models.predictive import ClassPredictive, RealPredictive


def random_classes(seed: int, inputs: int = 400, classes: int = 5, sharp: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = sharp * torch.randn(inputs, classes, generator=generator, dtype=torch.float64)
    noise = torch.randn(inputs, classes, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), (logits + 2 * noise).argmax(-1)


def random_mixture(seed: int, draws: int = 7, inputs: int = 50) -> tuple[RealPredictive, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(draws, inputs, generator=generator, dtype=torch.float64)
    variances = torch.rand(draws, inputs, generator=generator, dtype=torch.float64) + 0.05
    weights = torch.rand(draws, generator=generator, dtype=torch.float64)
    y = 1.5 * torch.randn(inputs, generator=generator, dtype=torch.float64)
    return RealPredictive(means, variances, weights / weights.sum()), y


class TestClassificationAgainstOthers:
    @pytest.mark.parametrize("seed", range(4))
    def test_accuracy_nll_and_brier_equal_scikit_learn(self, seed: int) -> None:
        p, y = random_classes(seed)
        labels = np.arange(p.shape[1])
        assert metrics.accuracy(p, y) == pytest.approx(accuracy_score(y, p.argmax(1)), abs=1e-15)
        assert metrics.nll(p, y) == pytest.approx(log_loss(y, p, labels=labels), rel=1e-12)
        theirs = brier_score_loss(y, p, labels=labels, scale_by_half=False)
        assert metrics.brier(p, y) == pytest.approx(theirs, rel=1e-12)

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("bins", [5, 15, 40])
    def test_ece_and_mce_equal_torchmetrics(self, seed: int, bins: int) -> None:
        p, y = random_classes(seed)
        for ours, norm in ((metrics.ece, "l1"), (metrics.mce, "max")):
            theirs = float(multiclass_calibration_error(p, y, num_classes=5, n_bins=bins, norm=norm))
            assert ours(p, y, bins) == pytest.approx(theirs, abs=2e-6)  # theirs in single precision

    def test_ece_notices_one_bin_more(self) -> None:
        """Catches an off-by-one in the number of bins, which agreement at large n would hide."""
        p, y = random_classes(0)
        theirs = float(multiclass_calibration_error(p, y, num_classes=5, n_bins=15, norm="l1"))
        assert abs(metrics.ece(p, y, 16) - theirs) > 1e-4


class TestCalibrationByHand:
    P = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.4, 0.6]], dtype=torch.float64)
    Y = torch.tensor([0, 1, 0, 1])

    def test_ece_and_mce(self) -> None:
        # Bin of 0.9: accuracy 1/2, gap 0.4, half of the inputs; of 0.6: accuracy 1, gap 0.4, the other half.
        assert metrics.ece(self.P, self.Y, 10) == pytest.approx(0.4)
        assert metrics.mce(self.P, self.Y, 10) == pytest.approx(0.4)
        assert metrics.ece(self.P, self.Y, 1) == pytest.approx(0.0, abs=1e-12)

    def test_adaptive_ece_keeps_equal_confidences_together(self) -> None:
        """Four bins, two confidences: a cut through a tie would depend on the order of the inputs."""
        assert metrics.adaptive_ece(self.P, self.Y, 4) == pytest.approx(0.4)
        flipped = metrics.adaptive_ece(self.P.flip(0), self.Y.flip(0), 4)
        assert flipped == metrics.adaptive_ece(self.P, self.Y, 4)

    def test_adaptive_ece_of_equal_parts(self) -> None:
        """Distinct confidences in equal parts: the plain definition, written out."""
        p, y = random_classes(3, inputs=300)
        confidence, label = p.max(1)
        order = confidence.argsort()
        gaps = [abs(float(((label == y).double() - confidence)[part].mean())) for part in order.chunk(15)]
        assert metrics.adaptive_ece(p, y, 15) == pytest.approx(sum(gaps) / 15, rel=1e-12)

    def test_classwise_ece(self) -> None:
        # p_1 takes 0.1 (twice, one of them class 1), 0.4 (class 0) and 0.6 (class 1); p_0 mirrors it.
        expected = (2 * 0.4 + 0.4 + 0.4) / 4
        assert metrics.classwise_ece(self.P, self.Y, 10) == pytest.approx(expected)

    def test_confidence_on_an_edge_belongs_to_the_bin_below(self) -> None:
        bins = metrics.reliability(torch.tensor([[0.5, 0.5]]), torch.tensor([0]), 2)
        assert bins.counts.tolist() == [1, 0]


class TestClassificationEdges:
    def test_certain_predictions(self) -> None:
        """Confidence exactly 1 must fall in the last bin, not beyond it; a sure mistake has gap 1."""
        p = torch.eye(3)[torch.tensor([0, 1, 2, 0])]
        right, wrong = torch.tensor([0, 1, 2, 0]), torch.tensor([1, 2, 0, 1])
        assert metrics.reliability(p, right).counts[-1] == 4
        assert (metrics.ece(p, right), metrics.mce(p, right), metrics.nll(p, right)) == (0.0, 0.0, 0.0)
        assert (metrics.ece(p, wrong), metrics.mce(p, wrong), metrics.brier(p, wrong)) == (1.0, 1.0, 2.0)

    def test_certain_mistake_has_a_finite_nll(self) -> None:
        for dtype in (torch.float32, torch.float64):
            value = metrics.nll(torch.tensor([[1.0, 0.0]], dtype=dtype), torch.tensor([1]))
            assert value == pytest.approx(-math.log(torch.finfo(dtype).tiny))

    def test_one_input(self) -> None:
        values = metrics.evaluate(ClassPredictive(torch.tensor([[[0.25, 0.75]]]), torch.ones(1)), torch.tensor([1]))
        assert values["accuracy"] == 1.0
        assert values["ece"] == values["mce"] == values["adaptive_ece"] == pytest.approx(0.25)

    def test_empty_bins_hold_zero_and_no_nan(self) -> None:
        bins = metrics.reliability(torch.tensor([[0.97, 0.03]]), torch.tensor([0]))
        assert bins.counts.tolist() == [0] * 14 + [1]
        assert torch.isfinite(bins.confidence).all()
        assert bins.gaps[:-1].abs().max() == 0

    def test_rounding_above_one_is_accepted(self) -> None:
        assert metrics.ece(torch.tensor([[1 + 1e-6, 0.0]]), torch.tensor([0])) == 0.0

    @pytest.mark.parametrize(
        ("p", "y", "match"),
        [
            (torch.tensor([[0.5, 0.5]]), torch.tensor([2]), "from 0 to 1"),
            (torch.tensor([[0.5, 0.5]]), torch.tensor([-1]), "from 0 to 1"),
            (torch.tensor([[0.5, 0.5]]), torch.tensor([0.5]), "from 0 to 1"),
            (torch.tensor([[0.5, 0.5]]), torch.tensor([0, 1]), "one entry for each of 1"),
            (torch.tensor([[3.0, -2.0]]), torch.tensor([0]), "softmax"),
            (torch.tensor([[math.nan, 0.5]]), torch.tensor([0]), "finite"),
            (torch.empty(0, 2), torch.empty(0), "not empty"),
        ],
    )
    def test_refuses_nonsense(self, p: Tensor, y: Tensor, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            metrics.accuracy(p, y)

    def test_refuses_no_bins(self) -> None:
        with pytest.raises(ValueError, match="bins=0"):
            metrics.ece(torch.tensor([[0.5, 0.5]]), torch.tensor([0]), 0)


class TestSelectivePrediction:
    def test_curve_by_hand(self) -> None:
        p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.3, 0.7]])
        curve = metrics.selective_curve(p, torch.tensor([0, 1, 0, 1]))
        assert curve.coverage.tolist() == pytest.approx([0.25, 0.5, 1.0])  # two inputs share the lowest confidence
        assert curve.accuracy.tolist() == pytest.approx([1.0, 0.5, 0.75])

    def test_ends_at_the_accuracy(self) -> None:
        p, y = random_classes(1)
        assert float(metrics.selective_curve(p, y).accuracy[-1]) == pytest.approx(metrics.accuracy(p, y))


class TestOutOfDistribution:
    @pytest.mark.parametrize("seed", range(3))
    def test_equals_scikit_learn_with_ties(self, seed: int) -> None:
        """Whole numbers, so that ties abound: an area that counts them as won or lost differs."""
        generator = torch.Generator().manual_seed(seed)
        inside = torch.randint(0, 6, (200,), generator=generator)
        outside = torch.randint(1, 8, (70,), generator=generator)
        theirs = roc_auc_score([0] * 200 + [1] * 70, torch.cat([inside, outside]).numpy())
        assert metrics.out_of_distribution_auroc(inside, outside) == pytest.approx(float(theirs), abs=1e-12)

    def test_nothing_to_compare_is_refused(self) -> None:
        with pytest.raises(ValueError, match="hold 0 and 3 scores"):
            metrics.out_of_distribution_auroc(torch.empty(0), torch.ones(3))
        with pytest.raises(ValueError, match="finite"):
            metrics.out_of_distribution_auroc(torch.ones(2), torch.tensor([float("nan")]))


def test_sharpness_is_the_spread_of_the_mixture() -> None:
    predictive, _ = random_mixture(3)
    mean = (predictive.weights[:, None] * predictive.means).sum(0)
    second = (predictive.weights[:, None] * (predictive.variances + predictive.means**2)).sum(0)
    assert metrics.sharpness(predictive) == pytest.approx(float((second - mean**2).mean().sqrt()), rel=1e-6)


class TestRegressionAgainstOthers:
    @pytest.mark.parametrize("seed", range(4))
    def test_crps_equals_scoringrules(self, seed: int) -> None:
        predictive, y = random_mixture(seed)
        theirs = scoringrules.crps_mixnorm(
            y.numpy(),
            predictive.means.T.numpy(),
            predictive.variances.sqrt().T.numpy(),
            predictive.weights.expand(50, 7).numpy(),
            backend="numpy",
        )
        assert metrics.crps(predictive, y) == pytest.approx(float(np.mean(theirs)), rel=1e-9)

    def test_crps_in_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        predictive, y = random_mixture(5)
        whole = metrics.crps(predictive, y)
        monkeypatch.setattr(metrics, "_ELEMENTS_AT_ONCE", 30)
        assert metrics.crps(predictive, y) == pytest.approx(whole, rel=1e-12)

    def test_crps_of_one_gaussian(self) -> None:
        predictive, y = random_mixture(6, draws=1)
        theirs = scoringrules.crps_normal(
            y.numpy(), predictive.means[0].numpy(), predictive.variances[0].sqrt().numpy(), backend="numpy"
        )
        assert metrics.crps(predictive, y) == pytest.approx(float(np.mean(theirs)), rel=1e-9)

    def test_log_likelihood_equals_scoringrules(self) -> None:
        predictive, y = random_mixture(7)
        theirs = scoringrules.logs_mixnorm(
            y.numpy(),
            predictive.means.T.numpy(),
            predictive.variances.sqrt().T.numpy(),
            predictive.weights.expand(50, 7).numpy(),
            backend="numpy",
        )
        assert metrics.log_likelihood(predictive, y) == pytest.approx(-float(np.mean(theirs)), rel=1e-9)


class TestRegression:
    def test_rmse(self) -> None:
        means = torch.tensor([[1.0, 2.0], [3.0, 2.0]])
        predictive = RealPredictive(means, torch.ones(2, 2), torch.tensor([0.5, 0.5]))
        assert metrics.rmse(predictive, torch.tensor([2.0, 4.0])) == pytest.approx(math.sqrt(2.0))

    def test_width_of_a_standard_gaussian(self) -> None:
        predictive = RealPredictive(torch.zeros(1, 3), torch.ones(1, 3), torch.ones(1))
        assert metrics.interval_width(predictive, 0.9) == pytest.approx(2 * 1.6448536269514722, abs=1e-6)
        assert metrics.coverage(predictive, torch.tensor([-1.6, 1.6, 1.7]), 0.9) == pytest.approx(2 / 3)

    def test_coverage_of_well_specified_targets_is_the_level(self) -> None:
        """Targets drawn from the mixture itself: coverage within four standard errors of the level."""
        generator = torch.Generator().manual_seed(11)
        predictive, _ = random_mixture(8, inputs=20_000)
        chosen = torch.multinomial(predictive.weights, 20_000, replacement=True, generator=generator)
        rows = torch.arange(20_000)
        noise = torch.randn(20_000, generator=generator, dtype=torch.float64)
        y = predictive.means[chosen, rows] + predictive.variances[chosen, rows].sqrt() * noise
        for level in (0.5, 0.9):
            error = math.sqrt(level * (1 - level) / 20_000)
            assert abs(metrics.coverage(predictive, y, level) - level) < 4 * error

    def test_coverage_counts_the_targets_between_the_interval_ends(self) -> None:
        predictive, y = random_mixture(12, inputs=500)
        low, high = predictive.interval(0.8).unbind(-1)
        inside = float(((low <= y) & (y <= high)).double().mean())
        assert metrics.coverage(predictive, y, 0.8) == inside
        with pytest.raises(ValueError, match="level=1"):
            metrics.coverage(predictive, y, 1.0)

    def test_evaluate_names_and_column_targets(self) -> None:
        predictive, y = random_mixture(9)
        values = metrics.evaluate(predictive, y[:, None])
        assert list(values) == ["rmse", "log_likelihood", "coverage_90", "width_90", "crps"]
        assert values["width_90"] == pytest.approx(metrics.interval_width(predictive))
        assert values == metrics.evaluate(predictive, y)

    def test_single_precision_is_raised_to_double(self) -> None:
        predictive, y = random_mixture(10)
        single = RealPredictive(predictive.means.float(), predictive.variances.float(), predictive.weights.float())
        for name, value in metrics.evaluate(predictive, y).items():
            assert metrics.evaluate(single, y.float())[name] == pytest.approx(value, rel=1e-4), name

    def test_refuses_targets_that_do_not_fit(self) -> None:
        predictive, y = random_mixture(0)
        with pytest.raises(ValueError, match="each of 50 inputs"):
            metrics.rmse(predictive, y[:-1])
        with pytest.raises(ValueError, match="finite"):
            metrics.crps(predictive, y.fill_(math.inf))


class TestUncertainty:
    def test_entropies_add_up(self) -> None:
        generator = torch.Generator().manual_seed(2)
        draws = torch.randn(6, 9, 4, generator=generator).softmax(-1)
        parts = metrics.entropies(ClassPredictive(draws, torch.full((6,), 1 / 6)))
        assert parts["total"] == pytest.approx(parts["aleatoric"] + parts["epistemic"], rel=1e-5)
        assert parts["epistemic"] > 0

    def test_variances_add_up(self) -> None:
        parts = metrics.variances(random_mixture(1)[0])
        assert parts["total"] == pytest.approx(parts["aleatoric"] + parts["epistemic"])

    @pytest.mark.parametrize(("share", "count"), [(0.0, 10), (1.0, 10), (0.93, 360), (0.5, 1)])
    def test_proportion_interval_equals_scipy(self, share: float, count: int) -> None:
        from scipy.stats import binomtest

        theirs = binomtest(round(share * count), count).proportion_ci(0.95, method="wilson")
        exact = round(share * count) / count
        assert metrics.proportion_interval(exact, count) == pytest.approx((theirs.low, theirs.high), abs=1e-12)

    def test_proportion_interval_refuses(self) -> None:
        with pytest.raises(ValueError, match=r"share=1\.5"):
            metrics.proportion_interval(1.5, 3)
        with pytest.raises(ValueError, match="count=0"):
            metrics.proportion_interval(0.5, 0)
