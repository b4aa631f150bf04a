"""Frozen fits: seeded posteriors of every method that is found, and what fits and questions write in a ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import confide
from confide import data as records_of
from confide import likelihoods, methods, networks, priors
from tests.frozen.tools import named, plain

DELTA = 1e-5
OPEN = ("time", "who", "version")
SHOWN = 8
"""Values of a posterior that are kept one by one; the rest is in the mean and the norm."""


@dataclass(frozen=True)
class Problem:
    """Made-up records with the network that fits them."""

    x: Tensor
    y: Tensor
    schema: confide.Schema
    module: nn.Module

    def data(self, **options: Any) -> confide.PrivateData:
        return confide.PrivateData(self.x, self.y, schema=self.schema, **{"seed": 7, **options})


def classification(records: int = 60) -> Problem:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(records, 4, generator=generator)
    y = (x @ torch.randn(4, 3, generator=generator)).argmax(1)
    module = networks.mlp(4, 3, hidden=(5,), generator=generator)
    return Problem(x, y, confide.Schema(classes=3, records=records), module)


def regression(records: int = 60) -> Problem:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(records, 4, generator=generator) * 2 - 1
    y = 0.5 * torch.sin(2 * x[:, 0]) + 0.1 * torch.randn(records, generator=generator)
    module = networks.mlp(4, 1, hidden=(5,), generator=generator)
    return Problem(x, y, confide.Schema(records=records), module)


def binary(records: int = 60) -> Problem:
    """A hidden layer, for with none the sign of the directions that `sep` asks along is decided by rounding alone."""
    one = classification(records)
    module = networks.mlp(4, 1, hidden=(3,), generator=torch.Generator().manual_seed(2))
    return Problem(one.x, (one.y > 0).long(), confide.Schema(classes=2, records=records), module)


def linear(records: int = 60) -> Problem:
    return replace(binary(records), module=networks.logistic(4))


def mixture(records: int = 60) -> Problem:
    """Two clusters without targets; the zeros stand where targets would."""
    generator = torch.Generator().manual_seed(1)
    side = torch.randint(0, 2, (records, 1), generator=generator) * 2 - 1
    x = side + 0.5 * torch.randn(records, 4, generator=generator)
    module = named("MixtureOfGaussians")(2, 4, scale=0.5, generator=generator)
    return Problem(x, torch.zeros(records), confide.Schema(records=records), module)


TASKS: dict[str, Callable[[], Problem]] = {
    "classification": classification,
    "regression": regression,
    "binary": binary,
    "mixture": mixture,
    "linear": linear,
}


def small_plan(**options: Any) -> confide.Plan:
    settings: dict[str, Any] = {
        "records": 60,
        "batch": 20,
        "steps": 12,
        "noise_multiplier": 1.0,
        "delta": DELTA,
        "clip": 1.0,
    }
    return confide.plan(**{**settings, **options})


def tasks_of(name: str) -> list[str]:
    """What the method says it is for; most say nothing and are for every network."""
    named_tasks = getattr(methods.get(name), "tasks", ("classification", "regression", "binary"))
    return [task for task in TASKS if task in named_tasks]


# -- posteriors ----------------------------------------------------------------------------------------------


def vector(values: Any) -> dict[str, Any]:
    flat = torch.as_tensor(values).detach().to(torch.float64).flatten()
    return {
        "shape": list(torch.as_tensor(values).shape),
        "first": plain(flat[:SHOWN]),
        "mean": plain(flat.mean()),
        "norm": plain(flat.norm()),
    }


def of_posterior(posterior: Any, features: int = 4) -> dict[str, Any]:
    """What a posterior says: parameters, draws, predictions. Dropout draws from torch's own stream, so it is seeded."""
    generator = torch.Generator().manual_seed(3)
    found = {
        "kind": posterior.kind,
        "facts": plain(dict(posterior.facts)),
        "sample": vector(posterior.sample(5, generator=generator)),
        "mean": vector(posterior.mean()),
    }
    if hasattr(posterior, "draws"):
        found |= {"draws": vector(posterior.draws), "weights": vector(posterior.weights)}
    torch.manual_seed(0)
    predictive = posterior.predict(torch.randn(6, features, generator=torch.Generator().manual_seed(8)))
    centre = predictive.probabilities if hasattr(predictive, "probabilities") else predictive.mean
    found |= {"predicted": vector(centre), "epistemic": vector(predictive.epistemic)}
    return found | {"aleatoric": vector(predictive.aleatoric)}


def of_privacy(privacy: confide.Privacy) -> dict[str, Any]:
    return {
        "events": plain(privacy.events, 8),
        "delta": privacy.delta,
        "adjacency": privacy.adjacency,
        "seeded": privacy.seeded,
        "epsilon": plain(privacy.epsilon(), 8),
    }


def of_run(run: confide.Run) -> dict[str, Any]:
    method = {"name": run.method.name, "settings": plain(run.method)}
    return {"method": method, "posterior": of_posterior(run.posterior), "privacy": of_privacy(run.privacy)}


def fitted(method: str, task: str, *, secure: bool = False, options: Any = None, **changed: Any) -> dict[str, Any]:
    problem = TASKS[task]()
    chosen = methods.get(method)(**(options or {}))
    return of_run(confide.fit(chosen, problem.module, problem.data(), small_plan(**changed), seed=5, secure=secure))


def chains() -> dict[str, Any]:
    problem = classification()
    plan = small_plan(noise_multiplier=None, epsilon=3.0, chains=3, steps=24)
    return of_run(confide.fit_chains(methods.SGLD(), problem.module, problem.data(), plan, chains=3, seed=5))


def two_blocks() -> dict[str, Any]:
    """A plan whose noise changes on the way."""
    problem, plan = binary(), small_plan()
    later = replace(plan.mechanism, noise_multiplier=2.0)
    plan = replace(plan, blocks=((plan.mechanism, 6), (later, 6)))
    return of_run(confide.fit(methods.SGLD(), problem.module, problem.data(), plan, seed=5))


def one_sample() -> dict[str, Any]:
    problem = binary()
    mechanism = named("PosteriorSampling")(epsilon=2.0, radius=4.0, tolerance=1e-9)
    sampled = named("one_posterior_sample")(problem.data(), 4, mechanism, delta=DELTA, draws=2)
    return {"posterior": of_posterior(sampled.posterior), "privacy": of_privacy(sampled.privacy)}


def hybrid(data: confide.PrivateData | None = None) -> dict[str, Any]:
    mechanism = named("PosteriorSampling")(epsilon=2.0, radius=4.0, tolerance=1e-9)
    data = binary().data() if data is None else data
    return of_run(named("hybrid")(data, 4, mechanism, methods.SGLD(), small_plan(), seed=5))


def prior_and_likelihood() -> dict[str, Any]:
    problem = regression()
    # What is frozen here is the fit; `names` holds what the prior is called.
    laplace = next(vars(priors)[name] for name in ("Laplace", "LaplacePrior") if hasattr(priors, name))
    method = methods.SGLD(prior=laplace(0.5))
    noise = likelihoods.Gaussian(0.2)
    return of_run(confide.fit(method, problem.module, problem.data(), small_plan(), likelihood=noise, seed=5))


VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "sgld, lattice noise": partial(fitted, "sgld", "classification", secure=True),
    "sgld, full batch": partial(fitted, "sgld", "binary", sampling="full-batch", batch=None),
    "sgld, replace-one": partial(fitted, "sgld", "binary", adjacency="replace-one"),
    "sgld, fixed size": partial(fitted, "sgld", "binary", sampling="fixed-size", adjacency="replace-one"),
    "sgld, shuffle": partial(fitted, "sgld", "binary", sampling="shuffle", adjacency="replace-one"),
    "sgld, not private": partial(fitted, "sgld", "binary", private=False, noise_multiplier=None),
    "sgd, small clip": partial(fitted, "sgd", "regression", clip=0.1),
    "sgld, linear": partial(fitted, "sgld", "linear"),
    "bbp, linear": partial(fitted, "bbp", "linear"),
    "sep, linear": partial(fitted, "sep", "linear", options={"coordinates": "natural", "covariance": "full"}),
    "sgld, prior and likelihood": prior_and_likelihood,
    "sgld, two blocks": two_blocks,
    "chains of sgld": chains,
    "one posterior sample": one_sample,
    "hybrid": hybrid,
}


def posterior_cases() -> dict[str, Callable[[], dict[str, Any]]]:
    every = {f"{name}, {task}": partial(fitted, name, task) for name in methods.names() for task in tasks_of(name)}
    return {**every, **VARIANTS}


# -- ledgers -------------------------------------------------------------------------------------------------


def of_ledger(ledger: confide.Ledger) -> dict[str, Any]:
    """Entries and rows without what time, hashing and the user at the machine put in."""
    entries = [
        {"purpose": one.purpose, "dataset": one.dataset, "partition": one.partition, "event": plain(one.event, 8)}
        for one in ledger.entries()
    ]
    rows = [{key: value for key, value in row.items() if key not in OPEN} for row in ledger.to_rows(DELTA)]
    spent = {name: plain(ledger.spent(DELTA, name), 8) for name in ledger.datasets()}
    limits = [plain(one.limit, 8) for one in ledger.limits()]
    return {"entries": entries, "rows": plain(rows, 8), "spent": spent, "limits": limits}


def ledger_of_fit() -> dict[str, Any]:
    ledger, problem = confide.Ledger(), classification()
    data = problem.data(ledger=ledger, name="people")
    for name in ("sgld", "sgd", "bbp"):
        confide.fit(methods.get(name)(), problem.module, data, small_plan(), seed=5)
    return of_ledger(ledger)


def ledger_of_chains() -> dict[str, Any]:
    ledger, problem = confide.Ledger(), binary()
    data = problem.data(ledger=ledger, name="people")
    confide.fit_chains(methods.SGLD(), problem.module, data, small_plan(steps=24), chains=2, seed=5)
    return of_ledger(ledger)


def ledger_of_estimator(task: str, **options: Any) -> dict[str, Any]:
    ledger, problem = confide.Ledger(), TASKS[task](1000)  # type: ignore[call-arg]
    settings: dict[str, Any] = {"bounds": (-3, 3), "delta": DELTA, "ledger": ledger, "name": "people", "seed": 3}
    if task == "regression":
        model: Any = confide.PrivateBayesRegressor(target_bounds=(-1, 1), **settings, **options)
    else:
        model = confide.PrivateBayesClassifier(classes=3, **settings, **options)
    model.fit(problem.x.numpy(), problem.y.numpy())
    shown = model.predict_proba(problem.x.numpy()[:5]) if task != "regression" else model.predict(problem.x.numpy()[:5])
    return {
        "ledger": of_ledger(ledger),
        "privacy": of_privacy(model.privacy_),
        "assumptions": list(model.privacy_.assumptions),
        "schema": plain(model.schema_.to_dict()),
        "method": model.run_.method.name,
        "facts": plain(dict(model.posterior_.facts)),
        "predicted": plain(np.asarray(shown)),
    }


def ledger_of_statistics() -> dict[str, Any]:
    """Means, scales and bounds under the budget, charged as they are asked."""
    ledger, problem = confide.Ledger(), regression()
    data = problem.data(ledger=ledger, name="people")
    whole = small_plan(sampling="full-batch", batch=None).mechanism
    answers: dict[str, Any] = {}
    for name, statistic in {
        "moments": records_of.moment_statistic(4),
        "histogram": records_of.histogram_statistic(4, bins=8),
    }.items():
        mechanism = replace(whole, clip=statistic.norm_bound)
        release = data.answer(named("StatisticQuery")(statistic.function, statistic.size), mechanism, purpose=name)
        answers[name] = {"sum": vector(release.sum), "std": plain(release.noise_std), "batch": release.expected_batch}
        if name == "moments":
            read: Any = records_of.private_mean_and_scale(release.sum, release.noise_std, release.expected_batch)
        else:
            read = records_of.private_bounds(release.sum, release.noise_std, release.expected_batch, bins=8)
        answers[name]["read"] = plain(read)
    return {"ledger": of_ledger(ledger), "answers": answers}


def ledger_of_hybrid() -> dict[str, Any]:
    ledger = confide.Ledger()
    hybrid(binary().data(ledger=ledger, name="people"))
    return of_ledger(ledger)


def ledger_of_limits() -> dict[str, Any]:
    """A ceiling, a fit within it, the refusal of a second one, and a ceiling that is raised."""
    ledger, problem = confide.Ledger(), binary()
    ledger.limit(epsilon=8.0, delta=DELTA)
    data = problem.data(ledger=ledger, name="people", seed=None)  # a seeded run has no place under a ceiling
    confide.fit(methods.SGLD(), problem.module, data, small_plan(steps=3), seed=5)
    refusal: dict[str, Any] = {}
    try:
        confide.fit(methods.SGLD(), problem.module, data, small_plan(steps=40), seed=5)
    except confide.BudgetExceeded as error:
        refusal = {"text": str(error), "after": plain(error.epsilon_after, 8), "limit": error.limit}
    ledger.limit(epsilon=30.0, delta=DELTA)
    confide.fit(methods.SGLD(), problem.module, data, small_plan(steps=40), seed=5)
    return {"refusal": refusal, "ledger": of_ledger(ledger), "remaining": plain(ledger.remaining("people"), 8)}


def ledger_cases() -> dict[str, Callable[[], dict[str, Any]]]:
    quick = {"steps": 10, "batch": 100, "epsilon": 2.0}
    return {
        "fits of three methods": ledger_of_fit,
        "chains": ledger_of_chains,
        "classifier": partial(ledger_of_estimator, "classification", records=1000, **quick),
        "classifier, records counted": partial(ledger_of_estimator, "classification", steps=10, epsilon=2.0),
        "classifier, facts assumed public": partial(
            ledger_of_estimator, "classification", assume_public=True, method="sgd", **quick
        ),
        "regressor": partial(ledger_of_estimator, "regression", records=1000, **quick),
        "regressor, records counted": partial(
            ledger_of_estimator, "regression", steps=10, epsilon=2.0, likelihood=likelihoods.Gaussian(0.2)
        ),
        "statistics": ledger_of_statistics,
        "hybrid": ledger_of_hybrid,
        "ceilings": ledger_of_limits,
    }


# -- refusals ------------------------------------------------------------------------------------------------


def refused(attempt: Callable[[], object]) -> dict[str, str]:
    """The error in words, and the built-in types by which a caller may catch it."""
    try:
        attempt()
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        return {"types": ", ".join(kinds), "text": str(error)}
    return {"types": "", "text": ""}


def _fit(**changed: Any) -> object:
    problem = classification()
    given = {"method": methods.SGLD(), "module": problem.module, "data": problem.data(), "plan": small_plan()}
    return confide.fit(**{**given, **changed})


def _classifier(**options: Any) -> object:
    problem = classification()
    return confide.PrivateBayesClassifier(**options).fit(problem.x.numpy(), problem.y.numpy())


def refusal_cases() -> dict[str, Callable[[], dict[str, str]]]:
    problem = classification()
    ragged = partial(confide.PrivateData, problem.x, problem.y[:-1], schema=problem.schema)
    tempered = partial(named("PosteriorSampling"), epsilon=2.0, tolerance=0.5)
    attempts: dict[str, Callable[[], object]] = {
        "unknown method": lambda: methods.get("nonsense"),
        "unknown name": lambda: methods.Nonsense,
        "unknown name of the package": lambda: confide.nonsense,
        "a setting out of range": lambda: methods.SGLD(decay=5.0),
        "plan with neither epsilon nor noise": lambda: small_plan(noise_multiplier=None),
        "plan with epochs and steps": lambda: small_plan(epochs=3),
        "plan with a batch beyond the records": lambda: small_plan(batch=61),
        "plan with a delta of one": lambda: small_plan(delta=1.0),
        "plan with unknown sampling": lambda: small_plan(sampling="random"),
        "two sizes": lambda: _fit(plan=small_plan(records=61)),
        "a network with too few outputs": lambda: _fit(module=networks.softmax(4, 2)),
        "a network of another width": lambda: _fit(module=networks.softmax(5, 3)),
        "progress that cannot be called": lambda: _fit(progress=3),
        "batch norm": lambda: _fit(module=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))),
        "one chain": lambda: confide.fit_chains(methods.SGLD(), problem.module, problem.data(), small_plan(), chains=1),
        "chains of no sampler": lambda: confide.fit_chains(
            methods.SGD(), problem.module, problem.data(), small_plan(), chains=2
        ),
        "a ragged table": ragged,
        "length of private data": lambda: len(problem.data()),  # type: ignore[arg-type]
        "a draw of a mixture": lambda: _fit(method=methods.EM()),
        "one class": lambda: confide.Schema(classes=1),
        "bounds the wrong way round": lambda: confide.Schema(bounds=(1, 0)),
        "no such posterior": lambda: confide.load_posterior("absent.safetensors"),
        "a ceiling of nothing": lambda: confide.Ledger().limit(epsilon=0.0, delta=DELTA),
        "a tolerance beyond all use": tempered,
        "classifier without facts": lambda: _classifier(),
        "classifier of an unknown method": lambda: _classifier(method="nonsense", bounds=(-3, 3), classes=3),
        "classifier with epochs and steps": lambda: _classifier(bounds=(-3, 3), classes=3, epochs=1, steps=1),
        "moments of no feature": lambda: records_of.moment_statistic(0),
        "no such table": lambda: records_of.load_table("absent.csv"),
    }
    return {name: partial(refused, attempt) for name, attempt in attempts.items()}
