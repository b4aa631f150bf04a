"""One posterior sample: a draw from a tempered posterior of a linear model is differentially private by itself.

Releasing one draw from a posterior is the exponential mechanism (Wang, Fienberg and Smola, ICML 2015). Here

    pi(theta) ~ exp( -rho sum_i l_i(theta) - |theta|^2 / (2 s^2) )   on the ball |theta| <= D,
    l_i a convex loss of the products of x_i = (features, 1), scaled to norm at most R, with theta.

On the ball a record's loss varies by at most W: R D for logistic regression, for softmax and squared losses see
`sampled_losses`. Adding the record multiplies the density by exp(-rho l_i) and
divides it by the mean of that, so no density ratio leaves [exp(-rho W), exp(rho W)]: the draw is rho W differentially
private with delta = 0 when a record is added or removed, and 2 rho W when one is replaced.

That holds for exact draws, which a Markov chain of unknown length does not give. The sampler below is the proximal
sampler (Lee, Shen and Tian, COLT 2021), whose rate is known. One step draws v ~ N(theta, h I), then theta' from
exp(-U(theta') - |theta' - v|^2 / (2 h)), exactly. It divides the Kullback-Leibler divergence from pi by (1 + h / s^2)^2
or more, whatever the records (Chen, Chewi, Salim and Wibisono, COLT 2022). In short:

    Let mu_t and pi_t be the laws of theta + sqrt(t) noise, for theta from the chain and from pi. Both solve the heat
    equation, so d/dt KL(mu_t || pi_t) = -I(mu_t || pi_t) / 2 with the relative Fisher information I. pi is
    exp(-|theta|^2 / (2 s^2)) times a log-concave function, the ball's indicator included, so pi_t is
    exp(-|v|^2 / (2 (s^2 + t))) times a log-concave one (Prekopa), smooth and positive for t > 0, and
    I >= 2 KL / (s^2 + t) (Bakry and Emery, 1985). Integrated from 0 to h: KL(mu_h || pi_h) is at most
    KL(mu_0 || pi_0) / (1 + h / s^2).
    The second half of the step is the diffusion dZ = grad log pi_{h-t}(Z) dt + dB from Z_0 = v, the first half
    reversed, which takes pi_h back to pi. Two solutions of one such equation obey the same identity, whatever its
    drift, and the same integral divides by 1 + h / s^2 once more.

The chain starts where the divergence is bounded by known numbers and runs until Pinsker's inequality puts the total
variation distance below `tolerance`. What is left makes a draw (epsilon, slack)-private instead of epsilon-private,
with slack = (1 + e^epsilon) tolerance; the event says so, and with it the ledger and every statement. All of this is
for real numbers, of which doubles are taken to be good enough. How long a draw takes depends on the records: keep it
to yourself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from confide.errors import Refusal
from confide.mechanism.noise import NoiseStream
from confide.mechanism.sampled_losses import (
    SAMPLED_MODELS,
    AnyLosses,
    LogisticLosses,
    SampledModel,
    SoftmaxLosses,
    SquaredLosses,
    loss_width,
)
from confide.privacy.events import ADJACENCIES, Adjacency, PureEvent


@dataclass(frozen=True)
class PosteriorSampling:
    """The mechanism: settings, cost and draw in one frozen object.

    epsilon        of one draw
    radius         D, the largest norm of the coefficients (with the intercept, which comes last)
    feature_bound  R, the largest norm of a record's features with a 1 appended; longer ones are scaled down
    model          "logistic" for two classes, "softmax" for several, "linear" for numbers
    classes        of a softmax model
    noise_scale    of a linear model: standard deviation of the target around it
    target_bound   B of a linear model: targets are cut to [-B, B]; as encoded they lie in [-1, 1]
    prior_scale    s; None: D / sqrt(number of coefficients), so that the prior fills the ball
    adjacency      of the privacy claim
    tolerance      total variation distance of a draw from the posterior
    """

    epsilon: float
    radius: float = 5.0
    feature_bound: float = 1.0
    prior_scale: float | None = None
    adjacency: Adjacency = "add-remove"
    tolerance: float = 1e-10
    model: SampledModel = "logistic"
    classes: int = 2
    noise_scale: float = 1.0
    target_bound: float = 1.0

    def __post_init__(self) -> None:
        scales = {"epsilon": self.epsilon, "radius": self.radius, "feature_bound": self.feature_bound}
        scales |= {"noise_scale": self.noise_scale, "target_bound": self.target_bound}
        if self.model not in SAMPLED_MODELS:
            raise Refusal(f"model={self.model!r}: must be one of {', '.join(SAMPLED_MODELS)}")
        if self.classes < 2 or (self.model == "logistic" and self.classes != 2):
            raise Refusal(
                f"classes={self.classes}: a {self.model} model has {'2' if self.model == 'logistic' else 'at least 2'}"
            )
        if self.prior_scale is not None:
            scales["prior_scale"] = self.prior_scale
        for name, value in scales.items():
            if not (math.isfinite(value) and value > 0):
                raise Refusal(f"{name}={value}: must be a finite number > 0")
        if not 0 < self.tolerance <= 1e-6:
            raise Refusal(f"tolerance={self.tolerance}: must be in (0, 1e-6], far below any delta")
        if self.adjacency not in ADJACENCIES:
            raise Refusal(f"adjacency={self.adjacency!r}: must be one of {', '.join(ADJACENCIES)}")
        if self.slack >= 1:
            raise Refusal(
                f"epsilon={self.epsilon}: with tolerance={self.tolerance} a draw says nothing; make one of them smaller"
            )

    @property
    def width(self) -> float:
        """W: by how much one record's loss can vary over the ball."""
        reach = self.feature_bound * self.radius
        return loss_width(self.model, reach, self.classes, self.noise_scale, self.target_bound)

    @property
    def temper(self) -> float:
        """rho, what each record's log-likelihood counts; 1 is the posterior itself and never exceeded."""
        return min(1.0, self.epsilon / (self._factor * self.width))

    def event(self, draws: int = 1) -> PureEvent:
        """What `draws` draws cost; less than epsilon each where the posterior itself is more private."""
        return PureEvent(self._exact_epsilon, self.adjacency, draws, self.slack)

    @property
    def slack(self) -> float:
        """The delta of one draw, since it is only within `tolerance` of an exact one.

        Exact outcomes P, Q with P <= e^epsilon Q, replaced by P', Q' within t of them in total variation, have
        P' <= P + t <= e^epsilon Q + t <= e^epsilon (Q' + t) + t.
        """
        return (1 + math.exp(min(self._exact_epsilon, 700.0))) * self.tolerance

    @property
    def _factor(self) -> int:
        """A record that is replaced is one removed and one added."""
        return 1 if self.adjacency == "add-remove" else 2

    @property
    def _exact_epsilon(self) -> float:
        return min(self.epsilon, self._factor * self.temper * self.width)

    def draw(self, x: Tensor, y: Tensor, stream: NoiseStream) -> Tensor:
        """A draw of the coefficients, intercept last, from features (records, d) and targets. Private inside."""
        return _LogTarget(self, x, y).sample(stream)

    def losses(self, rows: Tensor, y: Tensor) -> AnyLosses:
        """Of the records, whose rows are bounded already."""
        if self.model == "softmax":
            return SoftmaxLosses(rows, y, self.classes)
        if self.model == "linear":
            return SquaredLosses(rows, y, self.noise_scale, self.target_bound)
        return LogisticLosses(rows, y)


class _LogTarget:
    """The posterior of one data set, and the chain that draws from it."""

    def __init__(self, mechanism: PosteriorSampling, x: Tensor, y: Tensor) -> None:
        rows = x.detach().to(torch.float64).flatten(1)
        rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], 1)
        lengths = rows.norm(dim=1, keepdim=True)
        # A record whose length is no number counts as zero.
        scale = torch.where(torch.isfinite(lengths), (mechanism.feature_bound / lengths).clamp(max=1), 0.0)
        self.losses = mechanism.losses(torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0) * scale, y)
        self.temper, self.radius, self.size = mechanism.temper, mechanism.radius, self.losses.size
        self.tolerance = mechanism.tolerance
        self.prior_precision = (mechanism.prior_scale or mechanism.radius / math.sqrt(self.size)) ** -2
        self.total_curvature, self.largest_curvature = (self.temper * one for one in self.losses.curvatures())
        self.mode = self.minimiser(torch.zeros(self.size, dtype=torch.float64), 0.0, torch.zeros(()), 2000)
        self.step = self._step()

    def energy(self, theta: Tensor) -> Tensor:
        """E = rho sum_i l_i, for one vector or several (draws, size)."""
        return self.temper * self.losses.total(theta)

    def slope(self, theta: Tensor) -> Tensor:
        return self.tangent(theta)[1]

    def tangent(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Height and slope of E at theta."""
        height, slope = self.losses.tangent(theta)
        return self.temper * height, self.temper * slope

    def minimiser(self, start: Tensor, pull: float, centre: Tensor, most: int) -> Tensor:
        """About the least of E + |theta|^2 / (2 s^2) + (pull/2) |theta - centre|^2 on the ball: projected descent."""
        precision = pull + self.prior_precision
        theta, close = start, (0.1 if pull else 1e-3) / math.sqrt(precision + self.largest_curvature)
        for _ in range(most):
            gradient = self.slope(theta) + self.prior_precision * theta + pull * (theta - centre)
            moved = theta - gradient / (precision + self.largest_curvature)
            moved = moved * min(1.0, self.radius / max(moved.norm().item(), 1e-300))
            distance, theta = (moved - theta).norm().item(), moved
            if distance < close:
                break
        return theta

    def _gradient(self, theta: Tensor) -> Tensor:
        return self.slope(theta) + self.prior_precision * theta

    def _step(self) -> float:
        """h: short enough that a good part of the proposals is taken, in the bulk and at the edge of the ball.

        Any value gives the right law. Where the data press against the edge with force p, the posterior is a layer
        of thickness 1/p there, and steps must not bend away from it.
        """
        within = self.radius**2 / (4 * self.size)
        pressure = -(self._gradient(self.mode) @ self.mode).item() / self.radius
        layer = self.radius / (2 * self.size * pressure) if pressure > 0 else math.inf
        bulk = _STEP_IN_BULK / self.total_curvature if self.total_curvature > 0 else math.inf
        return min(bulk, within, layer)

    def start(self, stream: NoiseStream) -> tuple[Tensor, float]:
        """Uniform on a small ball near the mode, and an upper bound of its divergence from the posterior.

        KL <= sup U on the small ball - inf U on the large one + d log(D / r), each bounded by convexity.
        """
        smooth = self.prior_precision + self.largest_curvature
        small = min(self.radius / 2, 1 / (self._gradient(self.mode).norm().item() + math.sqrt(smooth)))
        centre = self.mode * min(1.0, (self.radius - small) / max(self.mode.norm().item(), 1e-300))
        at_mode, at_centre = self._gradient(self.mode), self._gradient(centre)
        highest = self._potential(centre) + at_centre.norm().item() * small + smooth * small**2 / 2
        lowest = self._potential(self.mode) - (at_mode @ self.mode).item() - self.radius * at_mode.norm().item()
        direction: Tensor = stream.normal_(torch.empty(self.size, dtype=torch.float64), 1.0)
        length = small * float(stream.uniform(1)[0]) ** (1 / self.size) / direction.norm().item()
        return centre + direction * length, highest - lowest + self.size * math.log(self.radius / small)

    def _potential(self, theta: Tensor) -> float:
        return self.energy(theta).item() + self.prior_precision * theta.square().sum().item() / 2

    def steps(self, divergence: float) -> int:
        """Enough for the tolerance: KL_0 / (1 + h / s^2)^(2 k) <= 2 tolerance^2, by Pinsker's inequality."""
        needed = math.log(max(1.0, divergence / (2 * self.tolerance**2)))
        return math.ceil(needed / (2 * math.log1p(self.step * self.prior_precision)))

    def sample(self, stream: NoiseStream) -> Tensor:
        theta, divergence = self.start(stream)
        for _ in range(self.steps(divergence)):
            theta = self.advance(theta, stream)
        return theta

    def advance(self, theta: Tensor, stream: NoiseStream) -> Tensor:
        """One step of the proximal sampler."""
        centre = theta + stream.normal_(torch.empty_like(theta), math.sqrt(self.step))
        return self.proximal_draw(theta, centre, self.step, stream)

    def proximal_draw(self, near: Tensor, centre: Tensor, step: float, stream: NoiseStream) -> Tensor:
        """Exactly from exp(-U(theta) - |theta - centre|^2 / (2 h)) on the ball.

        The likelihood's energy E is convex, so its tangent at any anchor lies below it: the Gaussian of prior, pull to
        the centre and tangent is an envelope, and exp(-(E - tangent)) is the chance to keep a proposal. The anchor
        decides how many are kept, not which law they have.
        """
        precision = 1 / step + self.prior_precision
        anchor = self.minimiser(near, 1 / step, centre, _ANCHOR_STEPS)
        height, slope = self.tangent(anchor)
        mean = (centre / step - slope) / precision
        while True:
            proposals, chance = self._proposals(mean, anchor, precision, stream)
            gap = self.energy(proposals) - height - (proposals - anchor) @ slope
            kept = torch.from_numpy(np.log1p(-stream.uniform(_PROPOSALS))) <= chance - gap
            kept &= proposals.norm(dim=1) <= self.radius
            if bool(kept.any()):
                return proposals[int(kept.nonzero()[0])]

    def _proposals(
        self, mean: Tensor, anchor: Tensor, precision: float, stream: NoiseStream
    ) -> tuple[Tensor, Tensor | float]:
        """Draws of N(mean, 1 / precision), and the logarithm of the chance at which each may be kept.

        Where the mean lies beyond the edge at the anchor, the coordinate across the edge is drawn from the tail inside
        (Robert, Statistics and Computing 1995): exponential beyond a, kept with chance exp(-(z - rate)^2 / 2).
        """
        noise = stream.normal_(torch.empty(_PROPOSALS, self.size, dtype=torch.float64), 1.0)
        outward = anchor / max(anchor.norm().item(), 1e-300)
        beyond = ((mean @ outward).item() - self.radius) * math.sqrt(precision)
        if beyond <= 0:
            return mean + noise / math.sqrt(precision), 0.0
        rate = (beyond + math.sqrt(beyond**2 + 4)) / 2
        tail = beyond - torch.from_numpy(np.log1p(-stream.uniform(_PROPOSALS))) / rate
        noise -= torch.outer(noise @ outward + tail, outward)
        return mean + noise / math.sqrt(precision), -(tail - rate).square() / 2


# These decide how long a draw takes, not which law it has.
_PROPOSALS = 2
"""Tried at once: one pass over the records serves them all."""
_STEP_IN_BULK = 3.0
"""h times the trace of the likelihood's largest curvature: a third of the proposals or so is kept."""
_ANCHOR_STEPS = 2  # of Newton: the bound holds at any anchor, and is close to its best after two
