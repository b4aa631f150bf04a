"""Metrics: how good predictions are, and how honest. Pure functions of tensors, computed in double precision.

Classification takes class probabilities of shape (inputs, classes) and labels 0, ..., classes - 1. With the
confidence c_i = max_k p_ik and a_i = 1 if that class is right, a bin B has gap |mean_B a - mean_B c|, and

    ECE = sum_B |B|/n gap(B)        MCE = max over non-empty B of gap(B)

over bins (l, u] of equal width; a confidence of exactly 1 falls in the last bin, one of 0 in the first
(Naeini, Cooper and Hauskrecht, AAAI 2015; Guo, Pleiss, Sun and Weinberger, ICML 2017).

Regression takes a RealPredictive: the mixture over posterior draws of one law per input, nearly always a Gaussian. What
other kinds of targets need is in `laws`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.evaluate import laws
from confide.evaluate.ordering import auroc_of, average_precision_of, defined_classes
from confide.models.ordinal import OrderedPredictive
from confide.models.predictive import ClassPredictive, LabelPredictive, Predictive, RealPredictive, VectorPredictive
from confide.models.survival import SurvivalPredictive
from confide.sources.private_data import PrivateData

BINS = 15  # convention: Guo et al., ICML 2017
_ELEMENTS_AT_ONCE = 1 << 16  # draws times inputs: stays in the processor's cache, which is four times faster
SMALLER_IS_BETTER = ("nll", "brier", "ece", "rmse", "crps", "ranked_probability", "class_distance")
LARGER_IS_BETTER = ("accuracy", "log_likelihood", "label_accuracy", "exact_match", "concordance")
"""Metrics by which one run is better than another."""


def refuse_private(name: str, value: object) -> None:
    """Metrics are computed without noise, so that they publish what they are computed from."""
    if isinstance(value, PrivateData):
        raise TypeError(
            f"{name}: is PrivateData, and a metric without noise would publish it; pass records that are public or "
            "separate, or pay for the numbers with confide.evaluate.private.private_scores"
        )


def evaluate(predictive: Predictive, y: Tensor) -> dict[str, float]:
    """All metrics of one predictive distribution: the classification ones, or the regression ones."""
    refuse_private("y", y)
    if isinstance(predictive, LabelPredictive):
        return laws.label_scores(predictive, y)
    if isinstance(predictive, VectorPredictive):
        return _vector_scores(predictive, y)
    if isinstance(predictive, SurvivalPredictive):
        return laws.survival_scores(predictive, y)
    if isinstance(predictive, ClassPredictive):
        p = predictive.probabilities
        ordered = laws.ordered_scores(p, y) if isinstance(predictive, OrderedPredictive) else {}
        found = {
            "accuracy": accuracy(p, y),
            "nll": nll(p, y),
            "brier": brier(p, y),
            "ece": ece(p, y),
            "mce": mce(p, y),
            "adaptive_ece": adaptive_ece(p, y),
            "classwise_ece": classwise_ece(p, y),
            **ordered,
        }
        return found | ranking_scores(p, y)
    return {
        "rmse": rmse(predictive, y),
        "log_likelihood": log_likelihood(predictive, y),
        "coverage_90": coverage(predictive, y, 0.9),
        "width_90": interval_width(predictive, 0.9),
        "crps": crps(predictive, y),
    }


def _vector_scores(predictive: VectorPredictive, y: Tensor) -> dict[str, float]:
    """Of several numbers: means over the targets, and the log density of all of them together."""
    exact, y = predictive.double(), laws.columns(y, predictive.means.shape[1], predictive.targets)
    each = [evaluate(exact.of(target), y[:, target]) for target in range(exact.targets)]
    found = {name: sum(one[name] for one in each) / len(each) for name in each[0]}
    squares = sum(one["rmse"] ** 2 for one in each) / len(each)
    return {**found, "rmse": math.sqrt(squares), "log_likelihood": _mean(exact.log_density(y))}


def accuracy(probabilities: Tensor, y: Tensor) -> float:
    """Share of inputs whose most probable class is the right one."""
    p, y = checked_classes(probabilities, y)
    return _mean(p.argmax(-1) == y)


def ranking_scores(probabilities: Tensor, y: Tensor) -> dict[str, float]:
    """auroc and average_precision, means over classes against the rest; of two classes the second one's.

    Nothing where the test records are all of one class: there is no order to judge.
    """
    p, labels = checked_classes(probabilities, y)
    classes = defined_classes(p, labels)
    if not classes:
        return {}
    return {
        name: sum(score(p[:, k], labels == k) for k in classes) / len(classes)
        for name, score in (("auroc", auroc_of), ("average_precision", average_precision_of))
    }


def nll(probabilities: Tensor, y: Tensor) -> float:
    """Mean negative log-likelihood, -mean log p_i(y_i), in nats.

    A probability too small for the number type it came in counts as the smallest one that type can hold, so
    that one underflow does not make the mean infinite.
    """
    p, y = checked_classes(probabilities, y)
    least = torch.finfo(probabilities.dtype if probabilities.is_floating_point() else p.dtype).tiny
    return -_mean(p.gather(1, y[:, None]).clamp(min=least).log())


def brier(probabilities: Tensor, y: Tensor) -> float:
    """Mean over inputs of sum_k (p_k - 1[y = k])^2: 0 is perfect, 2 the worst (Brier, 1950)."""
    p, y = checked_classes(probabilities, y)
    return _mean((p - torch.nn.functional.one_hot(y, p.shape[1])).square().sum(1))


def ece(probabilities: Tensor, y: Tensor, bins: int = BINS) -> float:
    """Expected calibration error of the most probable class, over bins of equal width."""
    return reliability(probabilities, y, bins).expected_gap


def mce(probabilities: Tensor, y: Tensor, bins: int = BINS) -> float:
    """Maximum calibration error: the largest gap of any non-empty bin of equal width."""
    return reliability(probabilities, y, bins).largest_gap


def adaptive_ece(probabilities: Tensor, y: Tensor, bins: int = BINS) -> float:
    """Expected calibration error over bins of about equally many inputs; equal confidences stay together.

    (Nixon, Dusenberry, Zhang, Jerfel and Tran, CVPR workshops 2019.)
    """
    confidence, correct = _top_class(probabilities, y)
    _check_bins(bins)
    ordered = confidence.sort().values
    ends = [len(ordered) * part // bins for part in range(1, bins)]
    cuts = torch.unique(ordered[[end - 1 for end in ends if end > 0]])
    return _binned(confidence, correct, cuts).expected_gap


def classwise_ece(probabilities: Tensor, y: Tensor, bins: int = BINS) -> float:
    """Mean over classes k of the calibration error of p_k as the probability of y = k.

    (Kull, Perello Nieto, Kängsepp, Silva Filho, Song and Flach, NeurIPS 2019.)
    """
    p, y = checked_classes(probabilities, y)
    cuts = _equal_width_cuts(bins)
    gaps = [_binned(p[:, k].contiguous(), (y == k).double(), cuts).expected_gap for k in range(p.shape[1])]
    return sum(gaps) / len(gaps)


@dataclass(frozen=True)
class Reliability:
    """Bins of a reliability diagram; `confidence` and `accuracy` are means in a bin, 0 where it is empty."""

    edges: Tensor
    counts: Tensor
    confidence: Tensor
    accuracy: Tensor

    @property
    def gaps(self) -> Tensor:
        return (self.accuracy - self.confidence).abs()

    @property
    def expected_gap(self) -> float:
        return float((self.gaps * self.counts).sum() / self.counts.sum())

    @property
    def largest_gap(self) -> float:
        return float(self.gaps.max())


def reliability(probabilities: Tensor, y: Tensor, bins: int = BINS) -> Reliability:
    """Counts, mean confidence and accuracy of the most probable class, in bins of equal width."""
    confidence, correct = _top_class(probabilities, y)
    return _binned(confidence, correct, _equal_width_cuts(bins))


@dataclass(frozen=True)
class SelectiveCurve:
    """Accuracy among the most confident share of inputs: one point per distinct confidence."""

    threshold: Tensor
    coverage: Tensor
    accuracy: Tensor


def selective_curve(probabilities: Tensor, y: Tensor) -> SelectiveCurve:
    """What accuracy would be if only inputs with at least a given confidence were answered."""
    confidence, correct = _top_class(probabilities, y)
    threshold, group = torch.unique(confidence, return_inverse=True)
    answered = torch.bincount(group, minlength=len(threshold)).flip(0).cumsum(0)
    right = torch.zeros_like(threshold).index_add_(0, group, correct).flip(0).cumsum(0)
    return SelectiveCurve(threshold.flip(0), answered / len(confidence), right / answered)


def entropies(predictive: ClassPredictive) -> dict[str, float]:
    """Mean total, aleatoric and epistemic uncertainty in nats; total = aleatoric + epistemic."""
    return {name: _mean(getattr(predictive, name)) for name in ("total", "aleatoric", "epistemic")}


def variances(predictive: RealPredictive) -> dict[str, float]:
    """Mean total, aleatoric and epistemic predictive variance; total = aleatoric + epistemic."""
    return {name: _mean(getattr(predictive, name)) for name in ("total", "aleatoric", "epistemic")}


def sharpness(predictive: RealPredictive) -> float:
    """Root mean predictive variance, in units of the target: how narrow the claims are, right or wrong."""
    return math.sqrt(variances(predictive)["total"])


def out_of_distribution_auroc(inside: Tensor, outside: Tensor) -> float:
    """Chance that an input from elsewhere gets a higher score (such as `epistemic`) than a usual one; ties count half.

    The area under the ROC curve, by ranks (Mann and Whitney, 1947): 0.5 is blind, 1 tells all apart.
    """
    usual, strange = inside.double().flatten(), outside.double().flatten()
    if not (len(usual) and len(strange)):
        raise Refusal(f"inside, outside: hold {len(usual)} and {len(strange)} scores; each needs at least one")
    if not (usual.isfinite().all() and strange.isfinite().all()):
        raise Refusal("inside, outside: all scores must be finite numbers")
    ordered = usual.sort().values
    below = torch.searchsorted(ordered, strange)
    not_above = torch.searchsorted(ordered, strange, right=True)
    return _mean((below + not_above).double() / (2 * len(usual)))


def proportion_interval(share: float, count: float, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson's interval for a share observed on `count` inputs, 95 % by default: what so few inputs can say.

    centre = (p + z^2/2n) / (1 + z^2/n),  half-width = z/(1 + z^2/n) sqrt(p(1-p)/n + z^2/4n^2)  (Wilson, 1927)
    """
    if not 0 <= share <= 1:
        raise Refusal(f"share={share}: must be in [0, 1]")
    if not count > 0:
        raise Refusal(f"count={count}: must be above 0")
    shrink = 1 + z**2 / count
    centre = (share + z**2 / (2 * count)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def rmse(predictive: RealPredictive, y: Tensor) -> float:
    """Root mean squared error of the predictive mean."""
    exact, y = _reals_checked(predictive, y)
    return math.sqrt(_mean((exact.mean - y).square()))


def log_likelihood(predictive: RealPredictive, y: Tensor) -> float:
    """Mean log predictive density of the targets, in nats."""
    exact, y = _reals_checked(predictive, y)
    return _mean(exact.log_density(y))


def coverage(predictive: RealPredictive, y: Tensor, level: float = 0.9) -> float:
    """Share of targets inside their central predictive interval; should be near `level`.

    A target lies inside when its cumulative probability is within level / 2 of one half: no quantile is needed.
    """
    if not 0 < level < 1:
        raise Refusal(f"level={level}: must be in (0, 1)")
    exact, y = _reals_checked(predictive, y)
    return _mean(exact.inside(y, level))


def interval_width(predictive: RealPredictive, level: float = 0.9) -> float:
    """Mean width of the central predictive intervals, in units of the target."""
    ends = torch.cat([part.interval(level) for _, part in _parts(_exact(predictive))])
    return _mean(ends.diff(dim=-1))


def crps(predictive: RealPredictive, y: Tensor) -> float:
    """Mean continuous ranked probability score; smaller is better. Of a Gaussian mixture in closed form:

    CRPS = sum_i w_i A(y - m_i, v_i) - 1/2 sum_ij w_i w_j A(m_i - m_j, v_i + v_j)
    A(m, v) = m (2 Phi(m / sqrt v) - 1) + 2 sqrt(v) phi(m / sqrt v)        (Grimit et al., QJRMS 2006)
    """
    exact, y = _reals_checked(predictive, y)
    gaussian = type(exact).cumulatives is RealPredictive.cumulatives
    score = _crps if gaussian else laws.crps_of_law
    return _mean(torch.cat([score(part, y[rows]) for rows, part in _parts(exact)]))


def _crps(predictive: RealPredictive, y: Tensor) -> Tensor:
    means, variances, weights = predictive.means, predictive.variances, predictive.weights
    total: Tensor = weights @ _expected_distance(y - means, variances)
    for i, weight in enumerate(weights):
        # The table is symmetric: the diagonal enters with half its weight, each pair above it with the whole.
        pairs = weights[i:].clone()
        pairs[0] /= 2
        total -= weight * (pairs @ _expected_distance(means[i] - means[i:], variances[i] + variances[i:]))
    return total


def _expected_distance(mean: Tensor, variance: Tensor) -> Tensor:
    """E|Z| of Z ~ N(mean, variance), for variance > 0."""
    scale = variance.sqrt()
    standard = mean / scale
    density = torch.exp(-0.5 * standard.square()) * math.sqrt(2 / math.pi)
    return mean * torch.erf(standard * math.sqrt(0.5)) + scale * density


def _parts(exact: RealPredictive) -> Iterator[tuple[slice, RealPredictive]]:
    """The same distribution for a few inputs at a time."""
    size = max(1, _ELEMENTS_AT_ONCE // len(exact.weights))
    for start in range(0, exact.means.shape[1], size):
        rows = slice(start, start + size)
        yield rows, exact.some(rows)


def _top_class(probabilities: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    p, y = checked_classes(probabilities, y)
    confidence, label = p.max(-1)
    return confidence, (label == y).double()


def calibration(probability: Tensor, truth: Tensor, bins: int = BINS) -> Reliability:
    """Bins of equal width of any probability, with the share that came true in each."""
    return _binned(probability.double().contiguous(), truth.double(), _equal_width_cuts(bins))


def _equal_width_cuts(bins: int) -> Tensor:
    _check_bins(bins)
    return torch.arange(1, bins, dtype=torch.float64) / bins


def _binned(confidence: Tensor, correct: Tensor, cuts: Tensor) -> Reliability:
    """Bins (l, u] between the inner `cuts`."""
    index = torch.bucketize(confidence, cuts)
    counts = torch.bincount(index, minlength=len(cuts) + 1)
    ones = counts.clamp(min=1)
    sums = [torch.zeros(len(counts), dtype=torch.float64).index_add_(0, index, v) for v in (confidence, correct)]
    edges = torch.cat([cuts.new_zeros(1), cuts, cuts.new_ones(1)])
    return Reliability(edges, counts, sums[0] / ones, sums[1] / ones)


def checked_classes(probabilities: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities in double precision and labels as integers, or a ValueError."""
    if probabilities.ndim != 2 or not len(probabilities):
        raise Refusal(f"probabilities of shape {tuple(probabilities.shape)}: must be (inputs, classes), not empty")
    y = _flat_targets(y, len(probabilities))
    p = probabilities.detach().double()
    if not bool(((p >= 0) & (p <= 1 + 1e-5)).all()):
        raise Refusal("probabilities: must be finite and between 0 and 1; pass softmax(outputs), not outputs")
    labels = y.to(torch.int64)
    if not bool(((labels >= 0) & (labels < p.shape[1]) & (labels == y)).all()):
        raise Refusal(f"y: must hold whole numbers from 0 to {p.shape[1] - 1}, one per input")
    return p.clamp(max=1), labels  # a weighted mean over draws can round to a hair above 1


def _reals_checked(predictive: RealPredictive, y: Tensor) -> tuple[RealPredictive, Tensor]:
    """The predictive distribution in double precision and matching targets, or a ValueError."""
    y = _flat_targets(y, predictive.means.shape[1]).double()
    if not bool(torch.isfinite(y).all()):
        raise Refusal("y: must be finite")
    return _exact(predictive), y


def _exact(predictive: RealPredictive) -> RealPredictive:
    return predictive.double()


def _flat_targets(y: Tensor, inputs: int) -> Tensor:
    if y.numel() != inputs or inputs == 0:
        raise Refusal(f"y of shape {tuple(y.shape)}: need one entry for each of {inputs} inputs, at least one")
    return y.detach().reshape(-1)


def _check_bins(bins: int) -> None:
    if bins < 1:
        raise Refusal(f"bins={bins}: must be at least 1")


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
