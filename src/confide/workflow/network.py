"""The network and the likelihood of a request: the user's own, or the public rule's."""

from __future__ import annotations

import torch
from torch import nn

from confide import rules
from confide.data.schema import Schema
from confide.errors import Refusal
from confide.methods.base import Method
from confide.models.additive import NUMBER, blocks_of
from confide.models.flat import shaped
from confide.models.likelihoods import Gaussian, Likelihood
from confide.models.networks import MLP, Recipe
from confide.running.fit import default_likelihood
from confide.workflow.named_likelihood import made
from confide.workflow.request import Request

MOST_WEIGHTS = 10**7
"""Of a network by widths alone: 40 MB, and a typing error in a width is far beyond it."""


def network_of(
    request: Request, schema: Schema, features: int, method: Method, shape: tuple[int, ...] | None = None
) -> nn.Module:
    """The user's module, the method's own, or a fully connected one; its first weights come from the seed, if any.

    shape   of one encoded record, where it is more than so many features: a lazy layer of the user's is told by it
    """
    if request.module is not None:
        return shaped(request.module, shape or (features,))
    own = method.network(schema, features, outputs_of(request, schema)) if request.hidden is None else None
    if own is not None:
        return own
    return MLP(
        Recipe(features, outputs_of(request, schema), hidden_of(request, schema, features)), generator_of(request.seed)
    )


def hidden_of(request: Request, schema: Schema, features: int) -> tuple[int, ...]:
    """The widths of the hidden layers. They do not depend on the method."""
    outputs = outputs_of(request, schema)
    if request.hidden is None:
        assert schema.records is not None  # declared, assumed or counted by now
        regression = schema.classes is None
        return rules.default_hidden(schema.records, features, outputs, request.epsilon, regression=regression)
    hidden = tuple(request.hidden)
    weights = rules.weight_count((features, *hidden, outputs))
    if weights > MOST_WEIGHTS:
        raise Refusal(f"hidden={','.join(map(str, hidden))}: gives {weights} weights; {MOST_WEIGHTS} at most")
    return hidden


def clip_of(request: Request, schema: Schema, features: int, method: Method) -> float | None:
    """The given clip, or the rule's for classes that a network of confide's own learns by descent; else None.

    Methods whose unit the clip is, numbers, networks and likelihoods of one's own keep to the usual one; so does a fit
    whose records or classes are counted, for what it costs and asks may not follow from the count.
    """
    own = request.module is None and request.likelihood is None and not request.counts_first
    if request.clip is not None or not (own and method.follows_clip) or schema.classes is None:
        return request.clip
    assert schema.records is not None  # declared or assumed
    blocks = blocks_of(schema, features)
    numbers = sum(width == NUMBER for width in blocks)
    widths = (features, *hidden_of(request, schema, features), outputs_of(request, schema))
    return rules.default_clip(schema.records, request.epsilon, numbers, len(blocks) - numbers, widths)


def outputs_of(request: Request, schema: Schema) -> int:
    likelihood = made(request.likelihood, schema, request.noise_scale)
    return (schema.class_count or 1) if likelihood is None else likelihood.outputs


def likelihood_of(request: Request, schema: Schema, module: nn.Module) -> Likelihood:
    """The given likelihood, or the usual one of the task; a regression starts with the given or the rule's noise."""
    likelihood = made(request.likelihood, schema, request.noise_scale)
    if likelihood is not None:
        return likelihood
    if schema.classes is not None:
        found: Likelihood = default_likelihood(module, schema)
        return found
    return Gaussian(rules.NOISE_SCALE if request.noise_scale is None else request.noise_scale)


def generator_of(seed: int | None) -> torch.Generator:
    """Randomness that no privacy rests on; reproducible where a seed is given."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
