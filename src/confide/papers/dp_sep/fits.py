"""Networks on the regression sets of Vinaroz and Park (2022): SEP, DP-SEP, DP-VI and a point estimate."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

from confide.papers import sets
from confide.papers.base import Context
from confide.papers.sets import Set

SETS = ("naval", "kin8nm", "power_plant", "wine_red", "protein")
DELTA, EPSILON, CLIP, STEPS = 1e-5, 1.0, 2.0, 200
START_SCALE = 0.3  # of the noise, in half ranges of the target: where SEP starts, and the mean of its prior
VARIATIONAL_EPOCHS, POINT_EPOCHS = 40, 40
ADF_BATCH = 10
EP_PASSES, EP_DAMPING, EP_RECORDS = 60, 0.05, 2000  # EP keeps a factor for every record: beyond so many it is left out


@dataclass(frozen=True)
class SepScore:
    """Test error and log-likelihood in the units of the target, with the sound epsilon of the run."""

    error: float
    log_likelihood: float
    epsilon: float
    seconds: float


def hidden_units(name: str, context: Context) -> int:
    """As in the paper: 100 for protein, else 50."""
    return 10 if context.quick else 100 if name == "protein" else 50


def batch_of(given: Set) -> int:
    """A tenth of the records, and at most 1000."""
    return min(1000, given.records // 10)


def sep(given: Set, context: Context, seed: int, epsilon: float | None, clip: float = CLIP) -> SepScore:
    """DP-SEP, or without an epsilon SEP (clip = inf) and clipped SEP."""
    from confide.methods.sep import SEP

    steps = STEPS // 4 if context.quick else STEPS
    return _score(SEP(), _network(given, context, seed), given, context, seed, epsilon, clip, START_SCALE, steps)


@cache
def sep_on_split(name: str, context: Context, split: int, epsilon: float | None, clip: float = CLIP) -> SepScore:
    """`sep` on a split, with the split's number as its seed; one run serves all tables of a call that show it."""
    return sep(sets.load(name, context, split=split), context, split, epsilon, clip)


def variational(given: Set, context: Context, seed: int, epsilon: float | None, clip: float = CLIP) -> SepScore:
    """DP-VI: Bayes by Backprop with a learnt noise scale, under the same kind of plan; without an epsilon VI."""
    from confide.methods.bbp import BBP
    from confide.models.likelihoods import LearntNoise

    epochs = VARIATIONAL_EPOCHS // 8 if context.quick else VARIATIONAL_EPOCHS
    network = LearntNoise(_network(given, context, seed), START_SCALE)
    steps = max(1, round(epochs * given.records / batch_of(given)))
    return _score(BBP(optimiser="adam"), network, given, context, seed, epsilon, clip, None, steps)


def ep(given: Set, context: Context, seed: int) -> SepScore:
    """EP with a factor for every record, not private."""
    from confide.methods._baselines import expectation_propagation

    passes = EP_PASSES // 6 if context.quick else EP_PASSES
    settings = {"passes": passes, "damping": EP_DAMPING, "start": 1 + given.records / 10}
    return _by_records(expectation_propagation, settings, given, context, seed)


def adf(given: Set, context: Context, seed: int) -> SepScore:
    """Assumed density filtering, one pass: probabilistic backpropagation, not private."""
    from confide.methods._baselines import assumed_density_filtering

    return _by_records(assumed_density_filtering, {"batch": ADF_BATCH}, given, context, seed)


def _by_records(method: Any, settings: dict[str, Any], given: Set, context: Context, seed: int) -> SepScore:
    """A method that reads records directly, on features with the mean and deviation of the training part."""
    import torch

    from confide.models.likelihoods import Gaussian

    started, generator = time.perf_counter(), torch.Generator().manual_seed(seed)
    centre, spread = given.x.mean(0), given.x.std(0).clamp(min=1e-6)
    order = torch.randperm(len(given.x), generator=generator)
    x, y = (given.x[order] - centre) / spread, given.y[order]
    likelihood = Gaussian(START_SCALE)
    found = method(_network(given, context, seed), x, y, likelihood=likelihood, generator=generator, **settings)
    error, density = _quality(found.predict((given.x_test - centre) / spread), given)
    return SepScore(error, density, math.inf, time.perf_counter() - started)


def point(given: Set, context: Context, seed: int) -> SepScore:
    """A point estimate, not private."""
    from confide.methods.sgd import SGD

    epochs = POINT_EPOCHS // 8 if context.quick else POINT_EPOCHS
    steps = max(1, round(epochs * given.records / batch_of(given)))
    method = SGD(optimiser="adam")
    return _score(method, _network(given, context, seed), given, context, seed, None, math.inf, START_SCALE, steps)


def _network(given: Set, context: Context, seed: int) -> Any:
    import torch

    from confide.models import networks

    generator = torch.Generator().manual_seed(seed)
    return networks.mlp(given.x.shape[1], 1, hidden=(hidden_units(given.name, context),), generator=generator)


def _score(
    method: Any,
    module: Any,
    given: Set,
    context: Context,
    seed: int,
    epsilon: float | None,
    clip: float,
    noise_scale: float | None,
    steps: int,
) -> SepScore:
    from confide.mechanism.plan import plan
    from confide.models.likelihoods import Gaussian, HeteroscedasticGaussian
    from confide.running.fit import fit

    settings: dict[str, Any] = {"delta": DELTA, "records": given.records, "batch": batch_of(given), "steps": steps}
    privacy = {"private": False} if epsilon is None else {"epsilon": epsilon}
    made = plan(**settings, **privacy, clip=clip)
    likelihood = HeteroscedasticGaussian() if noise_scale is None else Gaussian(noise_scale)
    run = fit(method, module, given.private(context), made, likelihood=likelihood, seed=seed)
    return SepScore(*_quality(run.posterior.predict(given.x_test), given), run.privacy.epsilon(), run.seconds)


def _quality(predictive: Any, given: Set) -> tuple[float, float]:
    """Test error and log-likelihood, in the units of the target.

    Means are kept within the declared range of the target, [-1, 1] as encoded: a network that was given a record far
    from all others may say anything, and one such record of protein outweighs all others in the mean squared error.
    """
    target = given.y_test.double()
    error = float((predictive.mean.double().clamp(-1, 1) - target).square().mean().sqrt()) * given.scale
    return error, float(predictive.log_density(target).mean()) - math.log(given.scale)
