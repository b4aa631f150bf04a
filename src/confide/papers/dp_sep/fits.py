"""Networks on the regression sets of Vinaroz and Park (2022): SEP, EP, VI and point estimates under one protocol."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from confide.papers import protocol, sets
from confide.papers.base import Context
from confide.papers.sets import Set

SETS = ("naval", "kin8nm", "power_plant", "wine_red", "protein")
DELTA, EPSILON, CLIP, STEPS = 1e-5, 1.0, 2.0, 200
OPEN_STEPS = 800  # of SEP without noise: steps cost nothing there, and 200 that go as far are too long (protocols.md)
START_SCALE = 0.3  # of the noise, in half ranges of the target: where SEP starts, and the mean of its prior
VARIATIONAL_EPOCHS = 40  # of DP-VI; without noise the epochs are tried
OPEN_BATCH = 100  # of VI and the point estimate, as the paper has it: without noise many short steps learn more
ADF_BATCH = 10
PRINTED_CLIP, PRINTED_DAMPING = 1.0, 1.0  # of Algorithm 3 as printed, which it divides by the records once, or twice
LARGEST_EP = 8 * 2**30  # bytes for the factors of EP; those of the other sets take less than one
TRIAL_SEED, TRIAL_RECORDS = 90_001, 2000  # of trials: no run of a table has the seed, and more records tell little more
_STEPS_LONG = [{"learning_rate": rate, "epochs": epochs} for rate in (0.003, 0.01) for epochs in (50, 150)]
_CLIPS: list[dict[str, Any]] = [{"clip": 1.0}, {"clip": 2.0}, {"clip": 4.0}, {"clip": 2.0, "horizon": 10.0}]
CANDIDATES: dict[str, list[dict[str, Any]]] = {
    "VI": _STEPS_LONG,
    "ADF": [{"passes": passes} for passes in (1, 5, 20, 40)],
    "EP": [{"damping": damping, "passes": passes} for damping in (0.1, 0.2) for passes in (80, 160)],
    "SEP": [{"horizon": horizon} for horizon in (5.0, 10.0, 20.0, 40.0)],
    "SEP clipped": _CLIPS,
    "DP-SEP": _CLIPS,
    "DP-VI": [{"learning_rate": rate} for rate in (0.001, 0.003, 0.01, 0.03)],
    "point": _STEPS_LONG,
}
"""As many for every method; the first of SEP's clips and DP-VI's rates are the smallest that were published."""


@dataclass(frozen=True)
class SepScore:
    """Test error and log-likelihood in the units of the target, with the sound epsilon of the run."""

    error: float
    log_likelihood: float
    epsilon: float
    seconds: float


def hidden_units(name: str, context: Context) -> int:
    """As in the paper: 100 for protein and year, else 50."""
    return 10 if context.quick else 100 if name in ("protein", "year") else 50


def batch_of(given: Set) -> int:
    """A tenth of the records, and at most 1000."""
    return min(1000, given.records // 10)


def sep(
    given: Set,
    context: Context,
    seed: int,
    epsilon: float | None,
    clip: float = CLIP,
    real: Set | None = None,
    **settings: Any,
) -> SepScore:
    """DP-SEP, or without an epsilon SEP (clip = inf) and clipped SEP; the clip is in median norms of an answer, or in
    natural coordinates as it stands."""
    from confide import rules
    from confide.methods.sep import SEP

    steps = sep_steps(context, private=epsilon is not None)
    network = _network(given, context, seed)
    bound = clip if settings.get("coordinates") == "natural" else rules.CLIP * clip
    return _score(SEP(**settings), network, given, context, seed, epsilon, bound, START_SCALE, steps, real=real)


def as_printed(given: Set, context: Context, seed: int) -> SepScore:
    """Algorithm 3's update as it stands: clipped natural parameters, and the damping divided by the records twice."""

    def compute() -> SepScore:
        settings: dict[str, Any] = {"damping": PRINTED_DAMPING, "double_damping": True}
        return sep(given, context, seed, EPSILON, PRINTED_CLIP, coordinates="natural", **settings)

    return context.part(SepScore, ("dp-sep", given.name, "as printed", seed), compute)


@cache
def sep_on_split(
    name: str, context: Context, split: int, epsilon: float | None, clip: float = CLIP, **settings: Any
) -> SepScore:
    """`sep` on a split, with the split's number as its seed; one run serves all tables of a call that show it."""

    def compute() -> SepScore:
        return sep(sets.load(name, context, split=split), context, split, epsilon, clip, **settings)

    return context.part(SepScore, ("dp-sep", name, "split", split, epsilon, clip, settings), compute)


def variational(
    given: Set,
    context: Context,
    seed: int,
    epsilon: float | None,
    clip: float = CLIP,
    epochs: int = VARIATIONAL_EPOCHS,
    real: Set | None = None,
    **settings: Any,
) -> SepScore:
    """DP-VI: Bayes by Backprop with a learnt noise scale; without an epsilon VI, on short batches."""
    from confide.methods.bbp import BBP
    from confide.models.likelihoods import LearntNoise

    network, method = LearntNoise(_network(given, context, seed), START_SCALE), BBP(optimiser="adam", **settings)
    batch = batch_of(real or given) if epsilon is not None else min(OPEN_BATCH, given.records)
    steps = _steps(real or given, context, epochs, batch)
    return _score(method, network, given, context, seed, epsilon, clip, None, steps, batch, real)


def point(given: Set, context: Context, seed: int, epochs: int, **settings: Any) -> SepScore:
    """A point estimate, not private."""
    from confide.methods.sgd import SGD

    network, batch = _network(given, context, seed), min(OPEN_BATCH, given.records)
    method, steps = SGD(optimiser="adam", **settings), _steps(given, context, epochs, batch)
    return _score(method, network, given, context, seed, None, math.inf, START_SCALE, steps, batch)


def _steps(given: Set, context: Context, epochs: int, batch: int) -> int:
    return max(1, round((epochs / 16 if context.quick else epochs) * given.records / batch))


def ep(given: Set, context: Context, seed: int, passes: int, damping: float) -> SepScore:
    """EP with a factor for every record, not private."""
    from confide.methods._baselines import expectation_propagation

    settings = {"passes": max(1, passes // 24) if context.quick else passes, "damping": damping}
    return _by_records(expectation_propagation, settings | {"start": 1 + given.records / 10}, given, context, seed)


def ep_bytes(given: Set, context: Context) -> int:
    """What the factors of all records take: mean and precision of every weight."""
    hidden = hidden_units(given.name, context)
    return 16 * given.records * (hidden * (given.x.shape[1] + 2) + 1)


def ep_fits(given: Set, context: Context) -> bool:
    return ep_bytes(given, context) <= LARGEST_EP


def ep_note(given: Set, context: Context) -> str:
    gigabytes = ep_bytes(given, context) / 2**30
    return f"EP was not run: a factor for each of the {given.records} records takes {gigabytes:.0f} GB."


def adf(given: Set, context: Context, seed: int, passes: int) -> SepScore:
    """Assumed density filtering: probabilistic backpropagation, not private."""
    from confide.methods._baselines import assumed_density_filtering

    settings = {"batch": ADF_BATCH, "passes": max(1, passes // 6) if context.quick else passes}
    return _by_records(assumed_density_filtering, settings, given, context, seed)


def one_run(method: str, given: Set, context: Context, seed: int, taken: dict[str, Any], real: Set | None) -> SepScore:
    """A run of any method with these settings; `real` is the set whose noise a trial on `given` has."""
    what = ("dp-sep", given.name, method, seed, taken, real is not None)
    return context.part(SepScore, what, lambda: _one_run(method, given, context, seed, taken, real))


def _one_run(method: str, given: Set, context: Context, seed: int, taken: dict[str, Any], real: Set | None) -> SepScore:
    if method in ("EP", "ADF", "point"):
        by_records: dict[str, Callable[..., SepScore]] = {"EP": ep, "ADF": adf, "point": point}
        return by_records[method](given, context, seed, **taken)
    epsilon = EPSILON if method.startswith("DP") else None
    real = real if epsilon is not None else None  # without noise a trial has nothing to imitate
    if method.endswith("VI"):
        clip = CLIP if epsilon is not None else math.inf
        return variational(given, context, seed, epsilon, clip, real=real, **taken)
    options = {"clip": math.inf, **taken} if method == "SEP" else taken
    return sep(given, context, seed, epsilon, real=real, **options)


def settled(given: Set, context: Context, methods: tuple[str, ...]) -> protocol.Protocol:
    """The same trials for every method on a made-up set as wide as this one, under the noise of the real run."""
    records = TRIAL_RECORDS // 8 if context.quick else TRIAL_RECORDS
    trial = sets.made_up_like(given, min(records, given.records), TRIAL_SEED)

    def score(key: tuple[str, ...], candidate: protocol.Candidate) -> float:
        return one_run(key[0], trial, context, TRIAL_SEED, dict(candidate), given).error / trial.scale

    about = (
        f"a made-up set of {trial.records} records and {trial.x.shape[1]} features with {len(trial.y_test)} more held "
        "out, private methods under the noise of the real run"
    )
    offered: dict[tuple[str, ...], list[dict[str, Any]]] = {(method,): CANDIDATES[method] for method in methods}
    score_name = "error over the half range of the target"
    before: dict[tuple[str, ...], str] = {(method,): _before(method, given, context) for method in methods}
    return protocol.settle(offered, score, about=about, score=score_name, context=context, before=before)


def _before(method: str, given: Set, context: Context) -> str:
    """What no trial chose: from earlier trials on other splits, or from the paper."""
    if method in ("VI", "point"):
        return f"batch {OPEN_BATCH}, as published"
    if method in ("EP", "ADF"):
        return "precision that it starts with" if method == "EP" else f"{ADF_BATCH} records at a time"
    if method == "DP-VI":
        return f"batch {batch_of(given)}, clip {CLIP:g}, {VARIATIONAL_EPOCHS} passes"
    steps = sep_steps(context, private=method.startswith("DP"))
    return f"batch {batch_of(given)}, {steps} steps, directions and least precision by the budget"


def sep_steps(context: Context, *, private: bool) -> int:
    steps = STEPS if private else OPEN_STEPS
    return STEPS // 4 if context.quick else steps


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
    batch: int | None = None,
    real: Set | None = None,
) -> SepScore:
    from confide.mechanism.plan import plan
    from confide.models.likelihoods import Gaussian, HeteroscedasticGaussian
    from confide.running.fit import fit

    owner = real or given
    batch = min(batch or batch_of(owner), owner.records)
    settings: dict[str, Any] = {"delta": DELTA, "records": owner.records, "batch": batch, "steps": steps}
    privacy = {"private": False} if epsilon is None else {"epsilon": epsilon}
    made = plan(**settings, **privacy, clip=clip)
    if real is not None:
        made = protocol.with_noise_of(made, given.records)
    likelihood = HeteroscedasticGaussian() if noise_scale is None else Gaussian(noise_scale)
    run = fit(method, module, given.private(context), made, likelihood=likelihood, seed=seed)
    spent = run.privacy.epsilon() if real is None else math.inf
    return SepScore(*_quality(run.posterior.predict(given.x_test), given), spent, run.seconds)


def _quality(predictive: Any, given: Set) -> tuple[float, float]:
    """Test error and log-likelihood, in the units of the target.

    Means are kept within the declared range of the target, [-1, 1] as encoded: a network that was given a record far
    from all others may say anything, and one such record of protein outweighs all others in the mean squared error.
    """
    target = given.y_test.double()
    error = float((predictive.mean.double().clamp(-1, 1) - target).square().mean().sqrt()) * given.scale
    return error, float(predictive.log_density(target).mean()) - math.log(given.scale)
