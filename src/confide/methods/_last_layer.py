"""What a Bayesian last layer asks, and the belief that follows from the answers.

The second moments of features are the gradient of a network too: behind the frozen part stands a linear layer that is
the identity, and half the squared length of its output has the gradient f f^T in its matrix and f in its bias. So they
are clipped, summed and certified by the same engine as every gradient, at the price of one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from confide.devices import HOST
from confide.errors import Refusal
from confide.methods.base import Problem
from confide.models.flat import copied, trainable
from confide.models.likelihoods import Gaussian
from confide.models.networks import FeatureNetwork, LastLayerNetwork
from confide.models.priors import GaussianPrior
from confide.sources.queries import GradientQuery, Release

KINDS = ("gaussian", "bernoulli", "categorical")
RESIDUAL_CLIP = 2.5
"""In deviations of a real target's noise: 1 % of a Gaussian's slope is lost."""
RESIDUAL = 0.35
"""Length to which residuals of classes are clipped, of at most 1.41. Most of them get shorter than that soon, and noise
shrinks with it; what that does to probabilities is taken off again (`expected_scores`)."""
IMAGINED = 512
"""Made-up features under which second derivatives are averaged: a share known to some per cent is enough for a step."""
BATCHES = 64
"""Of them, under which scores are averaged: these are set off against the noise of a release, and stay below it."""
USUAL_OUTPUT = 3.0
"""Standard deviation of an output under a prior that was not given: from one class to another, with some doubt left."""
FACTORS = torch.logspace(-4, 1, 51, dtype=torch.float64, device=HOST)
"""By which a prior that was not given may be narrower or, within reason, wider; a quarter apart."""
LEAST_MOMENT = 1e-3
"""Of the mean one: a direction in which features hardly vary has a prior too."""
FORGOTTEN = 0.8
"""The least share of its variance that a step leaves a weight with: the curvature changes on the way, and gains that
fell as fast as under a linear model would end it before its end."""


@dataclass(frozen=True)
class LinearHead:
    """The one trainable linear layer: outputs, inputs with the constant behind them, and the length of its features."""

    outputs: int
    inputs: int
    biased: bool
    length: float

    @property
    def weights(self) -> int:
        return self.outputs * self.inputs

    def matrix(self, flat: Tensor) -> Tensor:
        """(outputs, inputs) of the flat vector: a layer's matrix, then its bias."""
        features = self.inputs - self.biased
        weights = flat[: self.outputs * features].reshape(self.outputs, features)
        return torch.cat([weights, flat[self.outputs * features :, None]], 1) if self.biased else weights

    def flat(self, matrix: Tensor) -> Tensor:
        features = self.inputs - self.biased
        return torch.cat([matrix[:, :features].reshape(-1), matrix[:, features:].reshape(-1)])


@dataclass(frozen=True)
class Curvature:
    """Second moments of the features, summed over the records, in their own axes; and the features' mean.

    ceilings   what the moments along an axis may be, as far as noise allows: that of the bulk reaches to the end of
               the semicircle that noise spreads eigenvalues over
    """

    values: Tensor
    vectors: Tensor = field(repr=False)
    mean: Tensor = field(repr=False)
    ceilings: Tensor = field(repr=False)

    @classmethod
    def blank(cls, inputs: int) -> Curvature:
        """Before anything is known: of the same form, so that a run that was kept goes on."""
        nothing = torch.zeros(inputs, dtype=torch.float64)
        return cls(nothing, torch.eye(inputs, dtype=torch.float64), nothing, nothing)

    @classmethod
    def of(cls, moments: Tensor, entry: float, records: int, centred: bool) -> Curvature:
        """Of noisy moments, whose entries on the diagonal have noise of this variance."""
        whole = denoised(moments, entry, centred)
        values, vectors = torch.linalg.eigh((whole + whole.mT) / 2)
        values = values.clamp(min=0)
        ceilings = values.clamp(min=float(values.median()) + math.sqrt(2 * len(values) * entry))
        return cls(values, vectors, moments[:, -1] / records, ceilings)


def denoised(curvature: Tensor, entry: float, centred: bool) -> Tensor:
    """A curvature with symmetric Gaussian noise of this entry variance, its eigenvalues set right.

    The noise spreads eigenvalues over 2 r, r^2 = 2 size entry (Wigner's semicircle). Those that lie within r of their
    median cannot be told apart and become their mean; one that stands out by d is known to stand out by
    (d + sqrt(d^2 - r^2)) / 2; none is negative. Without this a direction that inputs hardly vary in would by chance
    seem to be known. For one output it is done to the covariance of the features, so that their mean, which is known
    far better, does not enter.
    """
    if not centred:
        return _spiked(curvature, entry)
    count = curvature[-1, -1].clamp(min=1e-9)
    column = curvature[:, -1:]
    whole = column @ column.mT / count
    whole[:-1, :-1] += _spiked(curvature[:-1, :-1] - whole[:-1, :-1], entry)
    return whole


def _spiked(matrix: Tensor, entry: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    radius = math.sqrt(2 * len(values) * entry)
    apart = values - values.median()
    alike = apart.abs() <= radius
    middle = values[alike].mean()
    standing = middle + (apart + apart.sign() * (apart.square() - radius**2).clamp(min=0).sqrt()) / 2
    whole: Tensor = (vectors * torch.where(alike, middle, standing).clamp(min=0)) @ vectors.mT
    return whole


def named_head(module: nn.Module) -> tuple[str, nn.Linear]:
    """The linear layer that is learnt, with its name: the only one that is trainable, or the last of a sequence."""
    own = [id(parameter) for parameter in trainable(module)]
    for name, layer in module.named_modules():
        if type(layer) is nn.Linear and set(own) == {id(value) for value in layer.parameters()}:
            return name, layer
    name, last = (
        list(module.named_children())[-1] if isinstance(module, nn.Sequential) and len(module) else ("", module)
    )
    if type(last) is nn.Linear and own[-len(list(last.parameters())) :] == [id(value) for value in last.parameters()]:
        return name, last
    raise Refusal(
        f"module={type(module).__name__}: a last layer is learnt where one nn.Linear is all that is trainable, or ends "
        "an nn.Sequential; freeze the rest, or make it by confide.networks.last_layer(backbone, outputs)"
    )


_LEARNERS: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


def learner_of(problem: Problem) -> nn.Module:
    """The network of the problem, with nothing trainable but the head; hidden layers stay as they started."""
    module = problem.module
    name, layer = named_head(module)
    if len(trainable(module)) == len(list(layer.parameters())):
        return module
    if module not in _LEARNERS:
        own = copied(module).requires_grad_(False)
        for mine, given in zip(
            own.get_submodule(name).requires_grad_(True).parameters(), layer.parameters(), strict=True
        ):
            mine.data = given.data  # a view of the position, so that moving it moves this one too
        _LEARNERS[module] = own
    return _LEARNERS[module]


def head_of(problem: Problem) -> LinearHead:
    _, layer = named_head(problem.module)
    if problem.likelihood.name not in KINDS:
        raise Refusal(f"likelihood={problem.likelihood.name!r}: a last layer is learnt for {', '.join(KINDS)}")
    biased = layer.bias is not None
    # Features of columns fill [-1, 1]; those of a network of confide's own have a known length.
    length = problem.module.length if isinstance(problem.module, LastLayerNetwork) else math.sqrt(layer.in_features / 2)
    return LinearHead(layer.out_features, layer.in_features + biased, biased, length)


# -- what is asked ---------------------------------------------------------------------------------------------------


def feature_network(module: nn.Module) -> nn.Module:
    name, layer = named_head(module)
    identity = nn.Linear(layer.in_features, layer.in_features, layer.bias is not None, dtype=layer.weight.dtype)
    with torch.no_grad():
        identity.weight.copy_(torch.eye(layer.in_features))
        if layer.bias is not None:
            identity.bias.zero_()
    if not name:
        return identity
    frozen = without_head(module, name)
    plain = isinstance(module, nn.Sequential)  # which a batch may run through as it is
    return nn.Sequential(frozen, identity) if plain else FeatureNetwork(frozen, identity)


def without_head(module: nn.Module, name: str) -> nn.Module:
    """A copy that ends in what the head would have seen; it shares all parameters."""
    first, _, rest = name.partition(".")
    own = copy.copy(module)
    own._modules = dict(module._modules)
    child = own._modules[first]
    assert child is not None
    own._modules[first] = without_head(child, rest) if rest else nn.Identity()
    return own


@dataclass(frozen=True)
class HalfSquare:
    """unit |output|^2 / 2 of every record."""

    unit: float

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        return self.unit / 2 * output.square().sum(-1)


@dataclass(frozen=True)
class InUnits:
    """A loss times a public number, so that gradients fill the clip."""

    loss: Callable[[Any, Tensor], Tensor]
    unit: float

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        return self.unit * self.loss(output, y)


_FEATURES: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


def feature_query(problem: Problem) -> GradientQuery:
    """The gradient that is the second moments of the features."""
    if problem.module not in _FEATURES:
        _FEATURES[problem.module] = feature_network(learner_of(problem))
    return GradientQuery(_FEATURES[problem.module], HalfSquare(_moment_unit(problem)))


def score_query(problem: Problem) -> GradientQuery:
    return GradientQuery(learner_of(problem), InUnits(problem.likelihood.loss, score_unit(problem)))


def _moment_unit(problem: Problem) -> float:
    """Such that features of the expected length answer with the clip."""
    head = head_of(problem)
    return _clip(problem) / (head.length * math.hypot(head.length, head.biased))


def score_unit(problem: Problem) -> float:
    """Such that the gradient of a record whose features have the expected length is at most the clip.

    Residuals of classes have a length of at most the root of two, or one; those of a real target are clipped.
    """
    head, given = head_of(problem), problem.likelihood
    residual = RESIDUAL_CLIP / given.noise_scale if isinstance(given, Gaussian) else RESIDUAL
    return _clip(problem) / (residual * math.hypot(head.length, head.biased))


def _clip(problem: Problem) -> float:
    clip = problem.plan.mechanism.clip
    return clip if math.isfinite(clip) else 1.0


def moments_of(head: LinearHead, problem: Problem, release: Release) -> tuple[Tensor, float]:
    """Second moments of features and constant, summed over all records, and the noise in an entry of the diagonal."""
    whole = problem.records / release.expected_batch / _moment_unit(problem)
    features = head.inputs - head.biased
    found = release.sum.double() * whole
    square = found[: features**2].reshape(features, features)
    square = (square + square.mT) / 2
    if head.biased:
        column = found[features**2 :, None]
        corner = torch.full((1, 1), float(problem.records), dtype=torch.float64)
        square = torch.cat([torch.cat([square, column], 1), torch.cat([column.mT, corner], 1)])
    return square, release.noise_std * whole


# -- what follows ----------------------------------------------------------------------------------------------------


def across_outputs(problem: Problem, known: Curvature, mean: Tensor) -> tuple[Tensor, Tensor]:
    """What a record's clipped residual c tells of the outputs, and its covariance, both averaged over features.

    With p the probabilities at the present mean and classes y drawn from them, slope = E c (e_y - p)^T: how much
    expected scores move with the true outputs. Unclipped, both are diag(p) - p p^T.
    """
    given = problem.likelihood
    if isinstance(given, Gaussian):
        one = torch.eye(len(mean), dtype=torch.float64) / given.noise_scale**2
        return one, one
    (features,) = _imagined(problem, known, 1)
    outputs = features @ mean.mT
    # Half of them without any weights: where all is sure the curvature seems to vanish, and a step would go anywhere.
    outputs[: IMAGINED // 2] = 0
    shares = _shares(outputs)
    slope, square = torch.zeros(2, shares.shape[1], shares.shape[1], dtype=torch.float64)
    for share, residual, clipped in _residuals(shares, _reaches(problem, features), outputs.shape[1] == 1):
        slope += (clipped * share).mT @ residual / IMAGINED
        square += (clipped * share).mT @ clipped / IMAGINED
    return (slope[:1, :1], square[:1, :1]) if outputs.shape[1] == 1 else (slope, square)


def expected_scores(problem: Problem, known: Curvature, mean: Tensor) -> Tensor:
    """What all records' clipped scores would come to if the present mean were the truth: (outputs, inputs).

    Unclipped that is zero. A residual is long where a class came that was not expected, so the clip takes most from
    what says that a class was not sure, and scores that are set to zero leave probabilities nearer to their ends than
    they should be (.85 where .7 is right). Less what they would come to anyway, they are zero where the mean is right.
    """
    found = torch.zeros_like(mean)
    if isinstance(problem.likelihood, Gaussian):  # its noise is symmetric
        return found
    for features in _imagined(problem, known, BATCHES):
        outputs = features @ mean.mT
        single = outputs.shape[1] == 1
        expected = torch.zeros(IMAGINED, max(2, outputs.shape[1]), dtype=torch.float64)
        for share, _, clipped in _residuals(_shares(outputs), _reaches(problem, features), single):
            expected += share * clipped
        found += (expected[:, :1] if single else expected).mT @ features
    return found * (problem.records / (BATCHES * IMAGINED))


def _shares(outputs: Tensor) -> Tensor:
    """Probabilities of the classes, that of class 1 first where there is one logit for it."""
    if outputs.shape[1] > 1:
        return outputs.softmax(1)
    return torch.cat([outputs.sigmoid(), 1 - outputs.sigmoid()], 1)


def _reaches(problem: Problem, features: Tensor) -> Tensor:
    """How long a residual may be: gradients are clipped, so that those of short features keep more of it."""
    head = head_of(problem)
    found: Tensor = RESIDUAL * math.hypot(head.length, head.biased) / features.norm(dim=1).clamp(min=1e-12)
    return found


def _residuals(shares: Tensor, reaches: Tensor, single: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For every class: its share, the residual if it comes, and that clipped to its reach."""
    for label in range(shares.shape[1]):
        residual = -shares
        residual[:, label] += 1
        length = residual[:, 0].abs() if single else residual.norm(dim=1)
        kept = (reaches / length.clamp(min=1e-12)).clamp(max=1)
        yield shares[:, label : label + 1], residual, residual * kept[:, None]


def _imagined(problem: Problem, known: Curvature, batches: int) -> Iterator[Tensor]:
    """Gaussian features with the moments that were released, each batch in the place of the one before."""
    level, axes, more = _symmetric_root(known.values, known.vectors, known.mean, problem.records)
    features = torch.empty(IMAGINED, len(known.values), dtype=torch.float64)
    for _ in range(batches):  # all in one place, for to fetch memory takes longer than to compute
        features.normal_(generator=problem.generator)
        along = features @ axes * more
        yield features.mul_(level).add_(known.mean).addmm_(along, axes.mT)


@lru_cache(maxsize=2)  # every step asks for it twice, and the moments are released seldom
def _symmetric_root(values: Tensor, vectors: Tensor, mean: Tensor, records: int) -> tuple[float, Tensor, Tensor]:
    """Of the features' covariance, as level * I + axes diag(more) axes^T, where most axes are at one level.

    Being symmetric it is the same on every machine, whichever signs its axes come with.
    """
    scaled = vectors * (values / records).sqrt()
    around = scaled @ scaled.mT - torch.outer(mean, mean)
    found, axes = torch.linalg.eigh((around + around.mT) / 2)
    roots = found.clamp(min=0).sqrt()
    level = float(roots.median())
    # Beyond rounding errors of what was subtracted, whose roots are 1e-8 of it.
    apart = (roots - level).abs() > 1e-6 * math.sqrt(float(values.max()) / records)
    # Numbers below those that a processor has in full make products many times as slow.
    return level, torch.where(axes.abs() > 1e-30, axes, 0.0)[:, apart], roots[apart] - level


def prior_variances(prior: GaussianPrior | None, known: Curvature, outputs: int, records: int) -> Tensor:
    """(outputs, inputs), in the axes of the curvature.

    Where no prior is given an output has the usual deviation, to which all axes contribute alike.
    """
    if prior is not None:
        return torch.full((outputs, len(known.values)), prior.scale**2, dtype=torch.float64)
    values = known.values.clamp(min=LEAST_MOMENT * float(known.values.mean()) + 1e-300)
    return (USUAL_OUTPUT**2 * records / len(values) / values).expand(outputs, -1)


def gained(known: Curvature, sizes: Tensor, variances: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """The gain of a score in every axis, and the variances after it: a Kalman filter's, held below the ceilings.

    With variance P, curvature h and noise variance R it is P h / (P h h' + R), where h' >= h is as large as the
    curvature may be: no step goes further than a Newton step of the steepest direction that an axis may stand for.
    """
    own, steepest = sizes[:, None] * known.values, sizes[:, None] * known.ceilings
    pull = variances * own
    floor = LEAST_MOMENT * pull * steepest.max()  # outputs that only differ by a constant have no curvature at all
    gains = pull / (pull * steepest + noise**2 + floor).clamp(min=1e-300)
    return gains, torch.maximum(variances * (1 - gains * own), FORGOTTEN * variances)


def posterior_variances(variances: Tensor, information: Tensor, mean: Tensor, prior: GaussianPrior | None) -> Tensor:
    """1 / (1 / prior + information); a prior that was not given is scaled by its likeliest factor.

    The mean is w z, with w = v i / (1 + v i) for prior variance v and information i, and z of variance v + 1 / i.
    """
    factor = 1.0
    if prior is None:
        weight = variances * information / (1 + variances * information)
        found = (FACTORS[:, None, None] * variances + 1 / information.clamp(min=1e-300)) * weight.square() + 1e-300
        fits = -0.5 * (found.log() + mean.square() / found).sum((1, 2))
        factor = float(FACTORS[int(fits.argmax())])
    found_variances: Tensor = 1 / (1 / (factor * variances) + information)
    return found_variances
