"""Which method a request gets: the one that it names, or for "auto" the choice of a public rule.

The rule (`rules.default_method`) reads declared sizes, the budget and what else was asked for, never a record. Where a
request says something that only some methods understand, one of these is taken: a network of one's own, hidden
layers, several chains, a prior or another likelihood are sampled; so is a plan of batches and steps, which is a way to
say how to descend. A model that is asked to be linear is learnt by the method that knows its own noise.
"""

from __future__ import annotations

from confide import methods, rules
from confide.data.schema import Schema, Task
from confide.errors import Refusal
from confide.methods.base import Method
from confide.models.additive import blocks_of
from confide.models.priors import Prior
from confide.workflow.request import Request


def method_of(request: Request, schema: Schema, features: int) -> Method:
    """The method that was given, the named one with the given prior, or the rule's choice.

    schema   the public facts in full; a number of records that is not known yet may be made up
    """
    task: Task = "regression" if schema.classes is None else "classification"
    name = request.method
    method = named(chosen(request, schema, features), request.prior) if isinstance(name, str) else name
    if task not in method.tasks:
        fitting = ", ".join(name for name in methods.for_task(task))
        elsewhere = "; mixtures have a command of their own, `confide mixture`" if "mixture" in method.tasks else ""
        raise Refusal(f"method={method.name!r}: is not for {task}; use one of {fitting}{elsewhere}")
    # A method that would learn the noise of the target by itself keeps to a noise that was given.
    return method if request.noise_scale is None else method.with_given_noise()


def chosen(request: Request, schema: Schema, features: int) -> str:
    """The name of the method: what was typed, or for "auto" what the public rule says."""
    assert isinstance(request.method, str)  # a method with its settings is what it is
    if request.method != "auto":
        return request.method
    if says_how(request):
        return rules.SAMPLER
    outputs = schema.class_count or 1
    if request.hidden is not None:
        return rules.LINEAR if rules.weight_count((features, outputs)) <= rules.MOST_LINEAR else rules.SAMPLER
    # The price of a fit is paid before its records are counted, so that it may not follow from the count.
    records = None if request.counted else schema.records
    columns = len(blocks_of(schema, features))
    return rules.default_method(records, request.epsilon, columns, features, outputs)


def says_how(request: Request) -> bool:
    """Whether a request says what only a sampler understands: a network, a prior, or how to descend."""
    return (
        (request.batch, request.epochs, request.steps, request.clip) != (None,) * 4
        or request.sampling != rules.SAMPLING
        or request.module is not None
        or bool(request.hidden)
        or request.chains > 1
        or request.prior is not None
        or request.likelihood is not None
    )


def named(name: str, prior: Prior | None) -> Method:
    """The method of that name with its own settings, and the given prior."""
    cls = methods.get(name)
    return cls() if prior is None else cls(prior=prior)  # type: ignore[call-arg]  # the request was checked
