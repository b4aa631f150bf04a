"""Fits of the paper's three methods, and what is measured of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from confide.evaluate import metrics
from confide.papers.base import Context, PaperMeasure
from confide.papers.mnist_cnn import encoded, learnt_cnn
from confide.papers.predictions import class_probabilities
from confide.papers.protocol import with_noise_of
from confide.papers.scattering_features import centred, public_centre, scattered
from confide.papers.sets import Set, load
from confide.posteriors.base import Posterior
from confide.posteriors.variational import DiagonalGaussian

DELTA = 1e-5
DRAWS = 30  # of a prediction
DROPOUT, SVI, SGD = "variational dropout", "SVI without dropout", "DP-SGD"
METHODS = (DROPOUT, SVI, SGD)
TRIAL_SEED = 90_001  # which no row has
INK = 0.3
"""What is taken off the pixels of DIGITS: a guess that needs no data."""


@dataclass(frozen=True)
class DropoutSetting:
    """Public settings of a fit. The rate is that of momentum 0.9 on the mean gradient.

    hidden   widths of the hidden layers; None: the convolutional network, all of whose weights are learnt
    weight   of the divergence from the log-uniform prior
    """

    hidden: tuple[int, ...] | None
    batch: int
    epochs: float
    clip: float
    rate: float
    weight: float | None = 0.0
    deviation: str = "tied"


@dataclass(frozen=True)
class DropoutScores:
    """What one fit came to, on the test part."""

    posterior: Posterior
    accuracy: float
    ece: float
    epsilon: float
    sparsity: float | None


def pixels(name: str, context: Context) -> Set:
    """MNIST with pixels in [0, 1], so that an empty pixel has no gradient; DIGITS less INK, a third of full ink."""
    if name == "digits":
        found = replace(load("mnist", replace(context, data=None, quick=True)), name="digits", stand_in="")
        return replace(found, x=(found.x + 1) / 2 - INK, x_test=(found.x_test + 1) / 2 - INK)
    found = load(name, context)
    return replace(found, x=(found.x + 1) / 2, x_test=(found.x_test + 1) / 2)


def images(context: Context) -> Set:
    """MNIST as the convolutional network reads it: every image normalised by itself."""
    found = load("mnist", context)
    return replace(found, x=encoded(found.x), x_test=encoded(found.x_test))


def scattering(context: Context) -> Set:
    """MNIST by its scattering features, centred by public digits; a stand-in of those very digits is not centred."""
    found = load("mnist", context, layout="image")
    x, x_test = scattered(found.x, context), scattered(found.x_test, context)
    if not found.stand_in:
        centre = public_centre()
        x, x_test = centred(x, centre), centred(x_test, centre)
    return replace(found, x=x, x_test=x_test)


def method(name: str, setting: DropoutSetting, share: float = 1.0) -> Any:
    """The method of a row. SVI has a standard Gaussian prior and learns its deviations; its divergence has weight 1,
    or `share` where a trial has but that share of the records."""
    from confide.methods import sgd
    from confide.methods.variational_dropout import VariationalDropout
    from confide.models.priors import GaussianPrior

    common: dict[str, Any] = {"optimiser": "momentum", "learning_rate": setting.rate}
    if name == SGD:
        return sgd.SGD(**common)
    if name == SVI:
        return VariationalDropout(
            prior=GaussianPrior(), deviation="learnt", weight=share, predictive_draws=DRAWS, **common
        )
    deviation: Any = setting.deviation
    return VariationalDropout(deviation=deviation, weight=setting.weight, predictive_draws=DRAWS, **common)


def _network(inputs: int, setting: DropoutSetting, seed: int) -> nn.Module:
    from confide.models.networks import mlp

    if setting.hidden is None:
        return learnt_cnn(math.isqrt(inputs), 10, seed)
    return mlp(inputs, 10, setting.hidden, "tanh", torch.Generator().manual_seed(seed))


def fitted(data: Set, name: str, setting: DropoutSetting, epsilon: float, context: Context, seed: int) -> DropoutScores:
    """One fit at a sound epsilon, on all training records."""
    run = _run(data, name, setting, _plan(data, setting, epsilon), context, seed)
    sparsity = run.posterior.facts.get("sparsity")
    return DropoutScores(run.posterior, *quality(run.posterior, data), run.privacy.epsilon(), sparsity)


def trial(public: Set, real: Set, name: str, setting: DropoutSetting, epsilon: float, context: Context) -> float:
    """Log loss on the test part of a public set, learnt from its other records under the noise of the real run."""
    made = with_noise_of(_plan(real, setting, epsilon), public.records)
    run = _run(public, name, setting, made, context, TRIAL_SEED, public.records / real.records)
    return metrics.nll(class_probabilities(run.posterior, public.x_test), public.y_test)


def _plan(data: Set, setting: DropoutSetting, epsilon: float) -> Any:
    from confide.mechanism.plan import plan

    sizes: dict[str, Any] = {"records": data.records, "batch": min(setting.batch, data.records)}
    return plan(epsilon=epsilon, delta=DELTA, epochs=setting.epochs, clip=setting.clip, **sizes)


def _run(
    data: Set, name: str, setting: DropoutSetting, made: Any, context: Context, seed: int, share: float = 1.0
) -> Any:
    from confide.running.fit import fit

    network = _network(data.x.shape[1], setting, seed)
    return fit(method(name, setting, share), network, data.private(context), made, seed=seed)


@dataclass(frozen=True)
class DropoutFigures:
    """The figures of a fit alone."""

    accuracy: float
    ece: float
    epsilon: float


def figures(
    data: Set, name: str, setting: DropoutSetting, epsilon: float, context: Context, seed: int
) -> DropoutFigures:
    """Those of `fitted`, which are not made twice where finished parts are kept."""

    def compute() -> DropoutFigures:
        found = fitted(data, name, setting, epsilon, context, seed)
        return DropoutFigures(found.accuracy, found.ece, found.epsilon)

    return context.part(DropoutFigures, ("dp-variational-dropout", data.name, name, setting, epsilon, seed), compute)


def quality(posterior: Posterior, data: Set) -> tuple[float, float]:
    """Accuracy and expected calibration error of the predictive distribution on the test part."""
    found = class_probabilities(posterior, data.x_test)
    return metrics.accuracy(found, data.y_test), metrics.ece(found, data.y_test)


def measured(found: Sequence[DropoutScores] | Sequence[DropoutFigures], name: str) -> PaperMeasure:
    return PaperMeasure(tuple(float(getattr(one, name)) for one in found))


def dropped(posterior: DiagonalGaussian) -> Tensor:
    """Which weights have log alpha > 3."""
    from confide.methods.variational_dropout import SPARSE, log_alpha

    has_distribution: Tensor = posterior.spread > 0
    alphas = log_alpha(posterior.centre, posterior.spread.clamp(min=1e-18))
    return has_distribution & (alphas > SPARSE)


def pruned(posterior: Posterior) -> DiagonalGaussian:
    """The posterior with the dropped weights at zero."""
    assert isinstance(posterior, DiagonalGaussian)  # what variational dropout leaves behind
    gone = dropped(posterior)
    return replace(
        posterior,
        centre=posterior.centre.masked_fill(gone, 0.0),
        spread=posterior.spread.masked_fill(gone, 0.0),
    )
