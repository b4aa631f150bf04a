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
from functools import cache

import torch
from torch import Tensor

from confide.devices import HOST
from confide.methods._noise_aware_bends import BentScores, moments_of_draws
from confide.methods._noise_aware_inputs import (
    Doubt,
    cleaned,
    clipped_mean,
    clipped_square,
    mean_curvature,
    tilted_curvature,
    tilted_scores,
)

ROUNDS, SETTLED = 20, 1e-3
"""Of the fixed point: at most so many, or until the mean moves by less than a thousandth of a deviation."""
CLIP_IN_DEVIATIONS = 2.5
"""Residual clip: 1 % of a Gaussian's slope is lost, so that shapes hardly matter, at a quarter more noise than 2."""
FIRST_REACH = 1.5
"""Largest clip of the first stage: targets are scaled to [-1, 1], whatever the prior would allow."""
LEAST_SHARE = 1e-9
"""Of the largest variance of an estimate: less than this is rounding."""
CURVATURE_SPREAD = 0.35
"""Prior deviation of an entry of the curvature, per record and unit of weight: moments of inputs in [-1, 1]."""
DRIFT = {"gaussian": 0.0, "bernoulli": 0.1, "categorical": 0.3}
"""Relative error of a curvature that is carried over an output distance of one. With one logit it is carried by the
formula for Gaussian inputs, so that only their shape counts; with several it is taken as it is."""
SECOND_ORDER = 0.15
"""Of sum z w (1 - 2p) (z d)^2 / 2 for several classes, in units of H; two classes: see `_line`."""
BENT_ROUNDS, LEAST_BENT = 2, 0.01
"""Rounds in which draws mend a belief and noises are weighed by the mended one; and the square of what the line leaves,
in deviations of the noise, below which nothing is to be mended: means would move by a tenth of a deviation."""
REMAINDERS = 16
"""Pairs of points at which it is looked at: a mean curvature is then known to a hundredth, and more take long."""
BEND = {"gaussian": 0.25, "bernoulli": 0.1, "categorical": 0.2}
"""Relative error of m_t: of the share that is clipped, where residuals are not Gaussian; of large distances else."""


@dataclass(frozen=True)
class ReleasedEvidence:
    """What was released, stage by stage, in sums over all records. Axes before that of the stages are other fits.

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
    precision    of the prior, of every weight
    moments      second moments of inputs with the constant, per record, as expected
    outputs      of the network; weights stand output by output, that of the constant last
    records      how many
    scale        noise scale of a real target, as given
    learn_scale  whether it is learnt
    """

    kind: str
    precision: Tensor
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

    def curvature_at(self, moments: Tensor, points: Tensor) -> Tensor:
        """The curvatures that inputs of such moments have, if they are Gaussian; several logits: at zero."""
        if self.kind == "bernoulli":
            return tilted_curvature(moments, points)
        if self.kind != "gaussian":
            classes = self.outputs
            across = torch.eye(classes, dtype=torch.float64) / classes - 1 / classes**2
            moments = torch.kron(across, moments)
        return moments[..., None, :, :].expand(*points.shape[:-1], *moments.shape[-2:])

    def mass(self, curvature: Tensor) -> Tensor:
        """Sum over records and outputs of the loss's second derivative: where the constant meets itself."""
        own: Tensor = _diagonal(curvature).unflatten(-1, (self.outputs, -1))[..., -1].sum(-1)
        return own.clamp(min=0.05 * self.weight * self.records)


@dataclass(frozen=True)
class Belief:
    """A Gaussian over the weights, the curvature at its mean, and the scale of a real target's noise."""

    mean: Tensor
    covariance: Tensor
    curvature: Tensor
    scale: Tensor

    def squared_distance(self, model: Model) -> Tensor:
        """Expected mean square, over records, of how far outputs at the mean are from the true ones."""
        return (self.curvature * self.covariance).sum((-2, -1)).clamp(min=0) / model.mass(self.curvature)


@dataclass(frozen=True)
class _Curvatures:
    """At the points of the stages and at the belief's mean, pooled; moments of inputs; the error at the mean."""

    points: Tensor
    mean: Tensor
    moments: Tensor
    doubt: Doubt


def prior_belief(model: Model) -> Belief:
    mean = torch.zeros(model.size, dtype=torch.float64)
    covariance = torch.diag(1 / model.precision)
    scale = torch.tensor(model.scale, dtype=torch.float64)
    curvature = model.curvature_at(model.records * model.moments, mean[None])[0]
    return Belief(mean, covariance, curvature, scale)


def residual_clip(model: Model, belief: Belief, first: bool = False) -> Tensor:
    """At the belief's mean; residuals of classes have a largest norm by themselves. first: nothing is known yet."""
    if model.kind != "gaussian":
        return torch.full_like(belief.scale, math.sqrt(2) if model.kind == "categorical" else 1.0)
    clip = CLIP_IN_DEVIATIONS * (belief.scale**2 + belief.squared_distance(model)).sqrt()
    return clip.clamp(max=FIRST_REACH) if first else clip


def believe(model: Model, evidence: ReleasedEvidence, start: Belief, last: bool = True) -> Belief:
    """The fixed point, from the belief before the last stage.

    last   no stage follows: what a line leaves of the bends of two classes is mended, which a next point does not need
    """
    belief, moments = start, model.records * model.moments
    for _ in range(ROUNDS):
        curvatures = _pooled(model, evidence, belief, moments)
        moments = curvatures.moments
        belief = replace(belief, curvature=curvatures.mean)
        if model.learn_scale:
            belief = replace(belief, scale=fitted_scale(model, evidence, belief))
        before = belief.mean
        belief, information = _solved(model, evidence, belief, curvatures)
        if bool(((belief.mean - before).abs() <= SETTLED * _diagonal(belief.covariance).sqrt()).all()):
            break
    _, without = _solved(model, evidence, belief, curvatures, sure=True)
    if last and model.kind == "bernoulli":
        for _ in range(BENT_ROUNDS):
            belief = _bent(model, evidence, belief, curvatures)
            curvatures = _pooled(model, evidence, belief, moments)
            moments = curvatures.moments
            belief = replace(belief, curvature=curvatures.mean)
    unsure = 1 - _diagonal(information).sum(-1) / _diagonal(without).sum(-1).clamp(min=1e-300)
    # Noise of a size that is known from as many numbers as there are weights gives a t distribution in place of a
    # Gaussian one: its variance is larger by (size + 4) / (size + 2).
    wider = 1 + unsure.clamp(min=0) * 2 / (model.size + 2)
    return replace(belief, covariance=belief.covariance * wider[..., None, None])


def _diagonal(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1)


def _pooled(model: Model, evidence: ReleasedEvidence, belief: Belief, moments: Tensor) -> _Curvatures:
    """Curvatures from all stages and the public prior, cleaned of what can only be noise.

    Each stage's is carried to the point in question by the formula for inputs of the moments found so far.
    """
    here = belief.mean[..., None, :]
    targets = torch.cat([evidence.points, here, torch.zeros_like(here)], -2)
    formula = model.curvature_at(moments, targets)
    public = model.curvature_at(model.records * model.moments, targets)
    count, size = evidence.points.shape[-2:]
    own = (CURVATURE_SPREAD * model.weight * model.records) ** 2
    gaps = targets[..., :, None, :] - evidence.points[..., None, :, :]
    squared = torch.einsum("...tsi,...ij,...tsj->...ts", gaps, belief.curvature, gaps).clamp(min=0)
    unit = DRIFT[model.kind] * _diagonal(belief.curvature).sum(-1) / size * math.sqrt(2 / size)
    drift = (unit.square() / model.mass(belief.curvature))[..., None, None] * squared
    precision = 1 / (evidence.curvature_noise + 1e-12 * own + drift)
    carried = evidence.curvatures[..., None, :, :, :] + formula[..., :, None, :, :] - formula[..., None, :count, :, :]
    total = precision.sum(-1) + 1 / own
    seen = torch.einsum("...ts,...tsij->...tij", precision, carried) + public / own
    way = (
        formula - formula[..., -1:, :, :]
    )  # from zero, where all records weigh the same: what is cleaned is seen there
    plain, doubt = cleaned(seen / total[..., None, None] - way, 1 / total, own, model.outputs == 1)
    found, at_zero = _positive(plain + way), plain[..., -1, :, :]
    inputs = {"gaussian": at_zero, "bernoulli": 4 * at_zero}.get(model.kind, moments)  # weights are 1/4 at zero
    return _Curvatures(found[..., :count, :, :], found[..., count, :, :], inputs, doubt.at(count))


def _positive(matrices: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh((matrices + matrices.mT) / 2)
    found: Tensor = (vectors * values.clamp(min=0)[..., None, :]) @ vectors.mT
    return found


def root_of(covariance: Tensor) -> Tensor:
    """Its Cholesky factor. Where releases are nearly noise alone, an estimate may not be positive: directions of the
    wrong sign then count by their size, and none for less than rounding."""
    even = (covariance + covariance.mT) / 2
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(even)
    if not bool(failed.any()):
        return root
    values, vectors = torch.linalg.eigh(even)
    sizes = values.abs().clamp(min=LEAST_SHARE * values.abs().amax(-1, keepdim=True))
    mended: Tensor = torch.linalg.cholesky((vectors * sizes[..., None, :]) @ vectors.mT)
    return torch.where(failed[..., None, None] == 0, root, mended)


def _solved(
    model: Model, evidence: ReleasedEvidence, belief: Belief, curvatures: _Curvatures, sure: bool = False
) -> tuple[Belief, Tensor]:
    """The Gaussian belief, given the covariance of all noises under the belief before; precision from the data.

    sure   leave out the noises whose size depends on how far the truth is: error of the curvature, bends
    """
    slope, above, rest = _line(model, belief, curvatures)
    factors, expected, whole = _noises(model, evidence, belief, curvatures, slope, None if sure else rest)
    design = factors[..., None, None] * slope[..., None, :, :]
    target = evidence.scores - expected - above[..., None, :] + (design @ belief.mean[..., None, :, None])[..., 0]
    information, seen = _told(design, target, whole)
    inverse = torch.linalg.inv(information + torch.diag(model.precision))
    return replace(belief, mean=(inverse @ seen)[..., 0], covariance=(inverse + inverse.mT) / 2), information


def _told(design: Tensor, target: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Precision of x and precision times mean, where target = design x + noise in every stage."""
    both = torch.cat([design, target[..., None]], -1).flatten(-3, -2)
    white = torch.linalg.solve_triangular(root_of(covariance), both, upper=False)
    across, seen = white[..., :-1], white[..., -1:]
    information = across.mT @ across
    return (information + information.mT) / 2, across.mT @ seen


def _noises(
    model: Model,
    evidence: ReleasedEvidence,
    belief: Belief,
    curvatures: _Curvatures,
    slope: Tensor,
    rest: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """f_t, m_t at the belief's mean, and the covariance of all stages' noises under the belief.

    rest   second moments of what the scores' line leaves; None: no noise whose size depends on how far the truth is
    """
    count, size = evidence.points.shape[-2:]
    here, eye = curvatures.mean, torch.eye(size, dtype=torch.float64)
    gaps = belief.mean[..., None, :] - evidence.points
    moments = gaps[..., :, None, :, None] * gaps[..., None, :, None, :] + belief.covariance[..., None, None, :, :]
    distance = torch.einsum("...ij,...ttij->...t", here, moments).clamp(min=0)  # moments, (s, t, i, j): E D_s D_t^T
    factors, expected, left = _expected_scores(model, evidence, belief, curvatures, distance)
    dispersion = belief.scale**2 if model.kind == "gaussian" else torch.ones_like(belief.scale)
    shared = (dispersion[..., None, None] * slope)[..., None, None, :, :].expand_as(moments)
    floor = 1e-9 * (_diagonal(here).mean(-1, keepdim=True) + 1)  # keeps the sum invertible where nothing was noisy
    spread = evidence.thinning * _residual_square(model, evidence, belief, distance)
    if rest is not None:
        shared = shared + curvatures.doubt.of_products(moments) + rest[..., None, None, :, :]
        spread = spread + left**2 * distance
    alone = (evidence.score_noise + floor)[..., None, None] * eye + spread[..., None, None] * here[..., None, :, :]
    whole = shared * (factors[..., :, None] * factors[..., None, :])[..., None, None]
    whole = whole + torch.eye(count, dtype=torch.float64)[:, :, None, None] * alone[..., None, :, :]
    return factors, expected, whole.transpose(-3, -2).flatten(-4, -3).flatten(-2, -1)


def _bent(model: Model, evidence: ReleasedEvidence, belief: Belief, curvatures: _Curvatures) -> Belief:
    """The belief of two classes with the moments of the density in which scores bend."""
    slope, _, rest = _line(model, belief, curvatures)
    _, expected, whole = _noises(model, evidence, belief, curvatures, slope, torch.zeros_like(rest))
    eye = torch.eye(model.size, dtype=torch.float64).expand(*evidence.points.shape, model.size)
    precision, seen = _told(eye, evidence.scores - expected, whole)
    there = tilted_curvature(curvatures.moments, belief.mean[..., None, :])[..., 0, :, :]
    bent = BentScores(
        curvatures.moments, belief.mean, curvatures.mean - there, seen[..., 0], precision, model.precision
    )
    bends = (precision * rest).sum((-2, -1)) > LEAST_BENT
    if not bool(bends.any()):
        return belief
    mean, covariance = moments_of_draws(bent.at, belief.mean, root_of(belief.covariance))
    mean = torch.where(bends[..., None], mean, belief.mean)
    return replace(belief, mean=mean, covariance=torch.where(bends[..., None, None], covariance, belief.covariance))


def _line(model: Model, belief: Belief, curvatures: _Curvatures) -> tuple[Tensor, Tensor, Tensor]:
    """The line that scores follow best over the belief: its slope, what it lies above its tangent at the mean by, and
    second moments of what it leaves.

    Of two classes by the formula for Gaussian inputs at points of the belief: a sigmoid moves no further than to its
    ends, so that a tangent would claim too much of a truth that is far away. By Stein's lemma the slope is the mean
    curvature. Of several classes it is the tangent, and what is left is in units of the curvature.
    """
    here, middle = curvatures.mean, belief.mean[..., None, :]
    if model.kind == "bernoulli":
        half = _normals(REMAINDERS, model.size) @ root_of(belief.covariance).mT
        away = torch.cat([half, -half], -2)
        slope = mean_curvature(curvatures.moments, middle + away)
        scores = tilted_scores(curvatures.moments, middle + away) - tilted_scores(curvatures.moments, middle)
        above = scores.mean(-2, keepdim=True)
        off = scores - above - away @ slope
        there = tilted_curvature(curvatures.moments, middle)[..., 0, :, :]
        return here + slope - there, above[..., 0, :], off.mT @ off / off.shape[-2]
    mass = model.mass(here)
    squared = (here * belief.covariance).sum((-2, -1)).clamp(min=0) / mass
    share = SECOND_ORDER * mass * squared**2 if model.kind != "gaussian" else torch.zeros_like(mass)
    return here, torch.zeros_like(belief.mean), share[..., None, None] * here


@cache
def _normals(count: int, size: int) -> Tensor:
    """The same for every belief, so that a fixed point does not wander."""
    return torch.randn(count, size, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


def _expected_scores(
    model: Model, evidence: ReleasedEvidence, belief: Belief, curvatures: _Curvatures, distance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """f_t, m_t at the belief's mean, and the relative error that is left in m_t."""
    gaps = belief.mean[..., None, :] - evidence.points
    if model.kind == "gaussian":
        constant, scale = curvatures.mean[..., -1], belief.scale[..., None]
        count = constant[..., -1:].clamp(min=0.05 * model.records)
        offset = (gaps @ constant[..., None])[..., 0] / count
        around = (scale**2 + distance / model.records - offset**2).clamp(min=1e-3 * scale**2).sqrt()
        slope, mean = clipped_mean(offset, around, evidence.reaches)
        expected = slope[..., None] * (gaps @ curvatures.mean)
        expected = expected + (mean - slope * offset)[..., None] * constant[..., None, :]
        return slope, expected, BEND[model.kind] * (1 - slope)
    ends = curvatures.points + curvatures.mean[..., None, :, :]
    trapezoid = torch.einsum("...tij,...tj->...ti", ends, gaps) / 2
    squared = distance / model.mass(curvatures.mean)[..., None]
    left = BEND[model.kind] * squared / (1 + squared)
    if model.kind == "bernoulli":
        trapezoid = trapezoid + _bend(curvatures.moments, evidence.points, belief.mean[..., None, :])
    return torch.ones_like(distance), trapezoid, left


def _bend(moments: Tensor, points: Tensor, mean: Tensor) -> Tensor:
    """How far the scores of Gaussian inputs are from the trapezoid rule."""
    ends = tilted_curvature(moments, points) + tilted_curvature(moments, mean)
    rule = (ends @ (mean - points)[..., None])[..., 0] / 2
    return tilted_scores(moments, mean) - tilted_scores(moments, points) - rule


def _residual_square(model: Model, evidence: ReleasedEvidence, belief: Belief, distance: Tensor) -> Tensor:
    """Mean square of a clipped residual; in units of the curvature for classes."""
    if model.kind != "gaussian":
        return torch.ones_like(distance)
    scale = (belief.scale[..., None] ** 2 + distance / model.records).sqrt() / evidence.reaches
    return evidence.reaches**2 * clipped_square(scale)


SCALES = torch.logspace(-3, 0.5, 141, dtype=torch.float64, device=HOST)
"""Noise scales that are considered, from a thousandth to three times half a target's range, 6 % apart."""
LOG_SPREAD = 1.5
"""Prior deviation of the logarithm of the noise scale about the given one: a factor of four and a half."""


def fitted_scale(model: Model, evidence: ReleasedEvidence, belief: Belief) -> Tensor:
    """Root of the mean squared noise scale, from how large clipped residuals were in every stage."""
    gaps = belief.mean[..., None, :] - evidence.points
    second = gaps[..., :, None] * gaps[..., None, :] + belief.covariance[..., None, :, :]
    away = torch.einsum("...ij,...tij->...t", belief.curvature, second).clamp(min=0)[..., None, :] / model.records

    def expected(distance: Tensor) -> Tensor:
        return clipped_square((SCALES[:, None] ** 2 + distance).sqrt() / evidence.reaches[..., None, :])

    # The distance is known about to half its size; the spread of min(r^2, 1) over records is below a half.
    doubt = (expected(1.5 * away) - expected(0.5 * away)) ** 2 / 4
    variance = evidence.spread_noise + doubt + 0.25 / model.records
    fit = -((evidence.spreads[..., None, :] - expected(away)) ** 2 / variance + variance.log()).sum(-1) / 2
    weights = torch.softmax(fit - (SCALES / model.scale).log() ** 2 / (2 * LOG_SPREAD**2), -1)
    return (weights @ SCALES**2).sqrt()
