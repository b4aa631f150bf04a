"""The belief about a linear model's weights that accounts for every noise in what was released: post-processing.

Stage t asked, at a point theta_t that earlier releases chose, for the sum of clipped scores G_t and for the curvature
there. With theta the true weights, D_t = theta - theta_t and H the curvature,

    G_t = m_t(theta) + f_t (E D_t + xi) + privacy noise + batch noise + bend.

m_t    expected scores, f_t H D_t up to bends that are known: clips of residuals, the saturation of a sigmoid
f_t    the share of a residual's slope that its clip leaves; 1 for classes
xi     N(0, s^2 H), the same in all stages: what the records themselves leave open, s^2 the noise of a real target or 1.
       The non-private posterior is the case without the other noises
E      error of the curvature that was pooled from all releases of it, symmetric Gaussian noise of entry variance v:
       cov(E a, E b) = (v/2) (<a, b> I + b a^T), the same in all stages
bend   what the formulas for m_t leave out, relative to H D_t

Given second moments of the D_t under the belief, all G_t are jointly Gaussian with known covariance, and about the
belief's mean linear in theta. A Gaussian prior gives a Gaussian belief: solved by fixed-point iteration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from confide.methods._noise_aware_inputs import clipped_mean, clipped_square, denoised, tilted_curvature, tilted_scores

ROUNDS, SETTLED = 20, 1e-3
"""Of the fixed point: at most so many, or until the mean moves by less than a thousandth of a deviation."""
LEAST_SHARE = 1e-9
"""Of the largest variance of an estimate: less than this is rounding."""
CURVATURE_SPREAD = 0.35
"""Prior deviation of an entry of the curvature, per record and unit of weight: moments of inputs in [-1, 1]."""
DRIFT = {"gaussian": 0.0, "bernoulli": 0.1, "categorical": 0.3}
"""Relative error of a curvature that is carried over an output distance of one. With one logit it is carried by the
formula for Gaussian inputs, so that only their shape counts; with several it is taken as it is."""
SECOND_ORDER = 0.15
"""Of sum z w (1 - 2p) (z d)^2 / 2 for several classes, in units of H; two classes: see `_second_order`."""
BEND = {"gaussian": 0.25, "bernoulli": 0.1, "categorical": 0.2}
"""Relative error of m_t: of the share that is clipped, where residuals are not Gaussian; of large distances else."""


@dataclass(frozen=True)
class ReleasedEvidence:
    """What was released, stage by stage (first axis), in sums over all records.

    points       theta_t
    scores       G_t;               score_noise: variance of the privacy noise in each entry
    curvatures   noisy H_t;         curvature_noise: variance of the noise in each entry (off the diagonal: half)
    thinning     (1 - q) / (q L) for L batches at rate q: batch noise, in units of the scores' own covariance
    reaches      residual clips
    spreads      mean of min(r^2 / reach^2, 1) over records; spread_noise: its variance; of a real target only
    """

    points: Tensor
    scores: Tensor
    score_noise: Tensor
    curvatures: Tensor
    curvature_noise: Tensor
    thinning: Tensor
    reaches: Tensor
    spreads: Tensor
    spread_noise: Tensor


@dataclass(frozen=True)
class Model:
    """The public side of it.

    kind         of the likelihood, by name
    precision    of the prior
    moments      second moments of inputs with the constant, per record, as expected
    outputs      of the network; weights stand output by output, that of the constant last
    records      how many
    scale        noise scale of a real target, as given
    learn_scale  whether it is learnt
    """

    kind: str
    precision: float
    moments: Tensor
    outputs: int
    records: int
    scale: float
    learn_scale: bool

    @property
    def size(self) -> int:
        return self.outputs * len(self.moments)

    @property
    def weight(self) -> float:
        """Second derivative of the loss in an output, as expected."""
        return {"gaussian": 1.0, "bernoulli": 0.2}.get(self.kind, 1 / self.outputs)

    def curvature_at(self, moments: Tensor, point: Tensor) -> Tensor:
        """The curvature that inputs of such moments have, if they are Gaussian; several logits: at zero."""
        if self.kind == "gaussian":
            return moments
        if self.kind == "bernoulli":
            return tilted_curvature(moments, point)
        classes = self.outputs
        across = torch.eye(classes, dtype=torch.float64) / classes - 1 / classes**2
        return torch.kron(across, moments)

    def mass(self, curvature: Tensor) -> float:
        """Sum over records and outputs of the loss's second derivative: where the constant meets itself."""
        own = curvature.diagonal().reshape(self.outputs, -1)[:, -1].sum()
        return max(0.05 * self.weight * self.records, float(own))


@dataclass(frozen=True)
class Belief:
    """A Gaussian over the weights, the curvature at its mean, and the scale of a real target's noise."""

    mean: Tensor
    covariance: Tensor
    curvature: Tensor
    scale: float

    def squared_distance(self, model: Model, point: Tensor) -> float:
        """Expected mean square, over records, of how far outputs at the point are from the true ones."""
        gap = self.mean - point
        second = torch.outer(gap, gap) + self.covariance
        return max(0.0, float((self.curvature * second).sum())) / model.mass(self.curvature)


@dataclass(frozen=True)
class _Curvatures:
    """At the points of the stages and at the belief's mean, pooled; moments of inputs; entry variances per point."""

    points: Tensor
    mean: Tensor
    moments: Tensor
    entry: Tensor


def prior_belief(model: Model) -> Belief:
    mean = torch.zeros(model.size, dtype=torch.float64)
    covariance = torch.eye(model.size, dtype=torch.float64) / model.precision
    return Belief(mean, covariance, model.curvature_at(model.records * model.moments, mean), model.scale)


def believe(model: Model, evidence: ReleasedEvidence, start: Belief) -> Belief:
    """The fixed point, from the belief before the last stage."""
    belief, moments = start, model.records * model.moments
    for _ in range(ROUNDS):
        curvatures = _pooled(model, evidence, belief, moments)
        moments = curvatures.moments
        belief = replace(belief, curvature=curvatures.mean)
        if model.learn_scale:
            belief = replace(belief, scale=fitted_scale(model, evidence, belief))
        before = belief.mean
        belief, information = _solved(model, evidence, belief, curvatures)
        if bool(((belief.mean - before).abs() <= SETTLED * belief.covariance.diagonal().sqrt()).all()):
            break
    _, without = _solved(model, evidence, belief, curvatures, sure=True)
    unsure = 1 - float(information.trace() / without.trace().clamp(min=1e-300))
    # Noise of a size that is known from as many numbers as there are weights gives a t distribution in place of a
    # Gaussian one: its variance is larger by (size + 4) / (size + 2).
    return replace(belief, covariance=belief.covariance * (1 + max(0.0, unsure) * 2 / (model.size + 2)))


def _pooled(model: Model, evidence: ReleasedEvidence, belief: Belief, moments: Tensor) -> _Curvatures:
    """Curvatures from all stages and the public prior, cleaned of what can only be noise.

    Each stage's is carried to the point in question by the formula for inputs of the moments found so far. Variances
    of entries stay those before the cleaning, which brings the whole closer to the truth.
    """
    targets = torch.cat([evidence.points, belief.mean[None], torch.zeros_like(belief.mean)[None]])
    formula = torch.stack([model.curvature_at(moments, point) for point in targets])
    public = torch.stack([model.curvature_at(model.records * model.moments, point) for point in targets])
    count, size = evidence.points.shape
    own = (CURVATURE_SPREAD * model.weight * model.records) ** 2
    gaps = targets[:, None] - evidence.points[None]
    squared = torch.einsum("tsi,ij,tsj->ts", gaps, belief.curvature, gaps).clamp(min=0) / model.mass(belief.curvature)
    unit = DRIFT[model.kind] * float(belief.curvature.trace()) / size * math.sqrt(2 / size)
    precision = 1 / (evidence.curvature_noise + 1e-12 * own + unit**2 * squared)
    carried = evidence.curvatures[None] + formula[:, None] - formula[None, :count]
    total = precision.sum(1) + 1 / own
    seen = torch.einsum("ts,tsij->tij", precision, carried) + public / own
    pooled = zip(seen / total[:, None, None], total, strict=True)
    found = torch.stack([denoised(one, 1 / float(known), model.outputs == 1) for one, known in pooled])
    inputs = {"gaussian": found[-1], "bernoulli": 4 * found[-1]}.get(model.kind, moments)  # weights are 1/4 at zero
    return _Curvatures(found[:count], found[count], inputs, 1 / total[: count + 1])


def root_of(covariance: Tensor) -> Tensor:
    """Its Cholesky factor. Where releases are nearly noise alone, an estimate may not be positive: directions of the
    wrong sign then count by their size, and none for less than rounding."""
    even = (covariance + covariance.mT) / 2
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(even)
    if not bool(failed):
        return root
    values, vectors = torch.linalg.eigh(even)
    sizes = values.abs().clamp(min=LEAST_SHARE * float(values.abs().max()))
    root = torch.linalg.cholesky((vectors * sizes) @ vectors.mT)
    return root


def _solved(
    model: Model, evidence: ReleasedEvidence, belief: Belief, curvatures: _Curvatures, sure: bool = False
) -> tuple[Belief, Tensor]:
    """The Gaussian belief, given the covariance of all noises under the belief before; precision from the data.

    sure   leave out the noises whose size depends on how far the truth is: error of the curvature, bends
    """
    count, size = evidence.points.shape
    here, eye = curvatures.mean, torch.eye(size, dtype=torch.float64)
    gaps = belief.mean - evidence.points
    moments = gaps[:, None, :, None] * gaps[None, :, None, :] + belief.covariance  # (s, t, i, j): E D_s D_t^T
    distance = torch.einsum("ij,ttij->t", here, moments).clamp(min=0)
    factors, expected, left = _expected_scores(model, evidence, belief, curvatures, distance)
    shared = ((1.0 if model.kind != "gaussian" else belief.scale**2) * here).expand(count, count, size, size)
    floor = 1e-9 * (float(here.diagonal().mean()) + 1)  # keeps the sum invertible where nothing was noisy
    residual = _residual_square(model, evidence, belief, distance)
    alone = (evidence.score_noise + floor)[:, None, None] * eye + (evidence.thinning * residual)[:, None, None] * here
    if not sure:
        inner = torch.einsum("stii->st", moments)[..., None, None]
        shared = shared + curvatures.entry[-1] / 2 * (inner * eye + moments.transpose(-1, -2))
        shared = shared + _second_order(model, belief, here) * here
        alone = alone + (left**2 * distance)[:, None, None] * here
    whole = shared * (factors[:, None] * factors[None])[..., None, None]
    whole[range(count), range(count)] += alone
    covariance = whole.permute(0, 2, 1, 3).reshape(count * size, count * size)
    design = factors[:, None, None] * here
    target = evidence.scores - expected + design @ belief.mean
    root = root_of(covariance)
    both = torch.cat([design.reshape(-1, size), target.reshape(-1, 1)], 1)
    white = torch.linalg.solve_triangular(root, both, upper=False)
    information = white[:, :-1].mT @ white[:, :-1]
    inverse = torch.linalg.inv((information + information.mT) / 2 + model.precision * eye)
    mean = inverse @ (white[:, :-1].mT @ white[:, -1])
    return replace(belief, mean=mean, covariance=(inverse + inverse.mT) / 2), information


def _second_order(model: Model, belief: Belief, here: Tensor) -> float:
    """Mean square of the scores' second-order term about the belief's mean, in units of the curvature.

    Of two classes it is (3/4) E(1 - 2p)^2 = (3/4) (1 - 4 E p(1 - p)), and E p(1 - p) is the mass of a record.
    """
    if model.kind == "gaussian":
        return 0.0
    mass = model.mass(here)
    squared = max(0.0, float((here * belief.covariance).sum())) / mass
    share = 0.75 * max(0.0, 1 - 4 * mass / model.records) if model.kind == "bernoulli" else SECOND_ORDER
    return share * mass * squared**2


def _expected_scores(
    model: Model, evidence: ReleasedEvidence, belief: Belief, curvatures: _Curvatures, distance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """f_t, m_t at the belief's mean, and the relative error that is left in m_t."""
    gaps = belief.mean - evidence.points
    if model.kind == "gaussian":
        constant = curvatures.mean[:, -1]
        offset = gaps @ constant / constant[-1].clamp(min=0.05 * model.records)
        around = (belief.scale**2 + distance / model.records - offset**2).clamp(min=1e-3 * belief.scale**2).sqrt()
        slope, mean = clipped_mean(offset, around, evidence.reaches)
        expected = slope[:, None] * (gaps @ curvatures.mean) + (mean - slope * offset)[:, None] * constant
        return slope, expected, BEND[model.kind] * (1 - slope)
    trapezoid = torch.einsum("tij,tj->ti", curvatures.points + curvatures.mean, gaps) / 2
    squared = distance / model.mass(curvatures.mean)
    left = BEND[model.kind] * squared / (1 + squared)
    if model.kind == "bernoulli":
        trapezoid = trapezoid + _bend(curvatures.moments, evidence.points, belief.mean)
    return torch.ones_like(distance), trapezoid, left


def _bend(moments: Tensor, points: Tensor, mean: Tensor) -> Tensor:
    """How far the scores of Gaussian inputs are from the trapezoid rule."""
    here, end = tilted_scores(moments, mean), tilted_curvature(moments, mean)
    found = []
    for point in points:
        rule = (tilted_curvature(moments, point) + end) @ (mean - point) / 2
        found.append(here - tilted_scores(moments, point) - rule)
    return torch.stack(found)


def _residual_square(model: Model, evidence: ReleasedEvidence, belief: Belief, distance: Tensor) -> Tensor:
    """Mean square of a clipped residual; in units of the curvature for classes."""
    if model.kind != "gaussian":
        return torch.ones_like(distance)
    scale = (belief.scale**2 + distance / model.records).sqrt() / evidence.reaches
    return evidence.reaches**2 * clipped_square(scale)


SCALES = torch.logspace(-3, 0.5, 141, dtype=torch.float64)
"""Noise scales that are considered, from a thousandth to three times half a target's range, 6 % apart."""
LOG_SPREAD = 1.5
"""Prior deviation of the logarithm of the noise scale about the given one: a factor of four and a half."""


def fitted_scale(model: Model, evidence: ReleasedEvidence, belief: Belief) -> float:
    """Root of the mean squared noise scale, from how large clipped residuals were in every stage."""
    gaps = belief.mean - evidence.points
    second = gaps[:, :, None] * gaps[:, None, :] + belief.covariance
    away = torch.einsum("ij,tij->t", belief.curvature, second).clamp(min=0) / model.records

    def expected(distance: Tensor) -> Tensor:
        return clipped_square((SCALES[:, None] ** 2 + distance).sqrt() / evidence.reaches)

    # The distance is known about to half its size; the spread of min(r^2, 1) over records is below a half.
    doubt = (expected(1.5 * away) - expected(0.5 * away)) ** 2 / 4
    variance = evidence.spread_noise + doubt + 0.25 / model.records
    fit = -((evidence.spreads - expected(away)) ** 2 / variance + variance.log()).sum(1) / 2
    weights = torch.softmax(fit - (SCALES / model.scale).log() ** 2 / (2 * LOG_SPREAD**2), 0)
    return float((weights @ SCALES**2).sqrt())
