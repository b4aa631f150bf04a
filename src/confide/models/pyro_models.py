"""Models written for Pyro, as programs: one plate over the records, everything outside of it a parameter.

    def model(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("records", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=x @ slope), obs=y)

    program = confide.models.from_pyro(model, x=torch.zeros(1, 3), y=torch.zeros(1))

Sample statements before the plate give the priors, in their order; the observed ones inside of it the log-likelihood of
a record, which is asked for with a batch of one. The model is looked at with made-up records of the shape given, never
with private ones. What has another form is refused: a latent number of every record must be summed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from confide.data.trees import Tree, map_tensors
from confide.errors import Refusal
from confide.models.programs import LogLikelihood, Predict, Program, Values, program

PyroModel = Callable[..., Any]


def from_pyro(
    model: PyroModel, x: Tree, y: Tensor, *, predict: Predict | None = None, start: dict[str, Any] | None = None
) -> Program:
    """A Pyro model with one plate over the records, for `confide.fit`.

    model     model(x, y), or with the tensors of x by name and y=; records come first on every tensor
    x, y      made-up or public records of the right shape and type, to look at the model with; one is enough
    predict   predict(parameters, x): the distribution of y at one new input, for predictions
    start     values by name to start from; otherwise each parameter starts at the mean of its prior
    """
    _pyro()
    one = map_tensors(lambda tensor: tensor[:1], (x, y))
    with _quiet():
        names = _parameters(model, *one)
    priors = {name: partial(_prior, model, one, name) for name in names}
    return program(_likelihood(model, frozenset(names)), priors, predict=predict, start=start)


def _pyro() -> Any:
    try:
        return import_module("pyro")
    except ImportError:
        raise ImportError("pyro: not installed; pip install 'confide[pyro]'") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without checks that branch on values, and with random numbers that nobody else sees."""
    with torch.random.fork_rng(devices=[]), _pyro().validation_enabled(False), torch.no_grad():
        yield


def _traced(model: PyroModel, x: Tree, y: Tensor | None, values: Values) -> Any:
    poutine = _pyro().poutine
    conditioned = poutine.condition(model, data=dict(values))
    return poutine.trace(partial(conditioned, y=y)).get_trace(*_positional(x), **_named(x))


def _positional(x: Tree) -> tuple[Any, ...]:
    return () if isinstance(x, dict) else x if isinstance(x, tuple) else (x,)


def _named(x: Tree) -> dict[str, Any]:
    return x if isinstance(x, dict) else {}


def _parameters(model: PyroModel, x: Tree, y: Tensor) -> list[str]:
    """The names of what is sampled outside of the plate, in order."""
    sites = [site for site in _traced(model, x, y, {}).nodes.values() if site["type"] == "sample"]
    plates = {frame.name for site in sites for frame in site["cond_indep_stack"]}
    if len(plates) != 1:
        raise Refusal(f"model: has {len(plates)} plates ({', '.join(sorted(plates))}); one plate, over the records")
    inside = [site for site in sites if site["cond_indep_stack"]]
    hidden = [site["name"] for site in inside if not site["is_observed"]]
    if hidden:
        raise Refusal(f"model: {hidden[0]!r} is sampled for every record; sum it out, or move it out of the plate")
    outside = [site for site in sites if not site["cond_indep_stack"] and type(site["fn"]).__name__ != "_Subsample"]
    seen = [site["name"] for site in outside if site["is_observed"]]
    if seen:
        raise Refusal(f"model: {seen[0]!r} is observed outside of the plate, where no record is; put it inside")
    return [site["name"] for site in outside]


class _PlateReached(Exception):  # noqa: N818 - a way out of the model, not an error that anybody sees
    """The model has come to the parameter that was asked for; nothing was drawn for it."""


def _prior(model: PyroModel, one: tuple[Tree, Tensor], name: str, before: Values) -> Distribution:
    """The law of a parameter given those before it."""
    found: list[Distribution] = []

    def stop(message: dict[str, Any]) -> bool:
        if message["name"] == name:
            found.append(message["fn"])
            raise _PlateReached
        return False

    try:
        with _pyro().poutine.block(hide_fn=stop):
            _traced(model, *one, before)
    except _PlateReached:
        return found[0]
    raise Refusal(f"model: {name!r} is not sampled in every run; a model has the same parameters for all records")


def _likelihood(model: PyroModel, names: frozenset[str]) -> LogLikelihood:
    def log_likelihood(parameters: Values, x: Any, y: Tensor) -> Tensor:
        batch, target = map_tensors(lambda tensor: tensor.unsqueeze(0), (x, y))
        sites = _traced(model, batch, target, parameters).nodes.values()
        seen = [site for site in sites if site["type"] == "sample" and site["cond_indep_stack"]]
        return torch.stack([site["fn"].log_prob(site["value"]).sum() for site in seen]).sum()

    return log_likelihood
