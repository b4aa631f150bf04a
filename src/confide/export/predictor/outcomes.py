"""What the outputs of a network mean under a likelihood: probabilities or means, with both kinds of uncertainty."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

CLASSES = ("categorical", "bernoulli", "calibrated", "probit", "ordinal")
LABELS = ("multi-label",)
MOST = 15.0  # outputs of counts and times beyond +-15 count as that
KEPT = 0.05  # of every probability, whatever a curve adds
GAP, LEAST_GAP, MOST_TIMES = 3.0, 1e-12, 2.0  # what a power leaves as it is, the least, and how far it may go
AT_ZERO = 0.5413248546129181  # softplus(this) = 1


def averaged(outcomes: Iterable[tuple[float, Any]], about: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Centre, epistemic and aleatoric from (weight, outputs) of every draw, in the target's units."""
    likelihood = about["likelihood"]
    one, square, noise = 0.0, 0.0, 0.0
    for weight, outputs in outcomes:
        centre, spread = outcome(outputs, likelihood)
        one, square, noise = one + weight * centre, square + weight * centre**2, noise + weight * spread
    if likelihood["name"] in (*CLASSES, *LABELS):
        whole = _entropy(one, likelihood["name"])
        return one, np.maximum(whole - noise, 0.0), noise
    scale, shift = np.asarray(about.get("scale", 1.0)), np.asarray(about.get("centre", 0.0))
    return one * scale + shift, np.maximum(square - one**2, 0.0) * scale**2, noise * scale**2


def outcome(outputs: Any, likelihood: dict[str, Any]) -> tuple[Any, Any]:
    """Of one draw: probabilities and their entropy, or means and noise variances."""
    name = likelihood["name"]
    if name in CLASSES or name in LABELS:
        probabilities = _probabilities(outputs, name)
        if name == "calibrated" and likelihood.get("power", 1.0) != 1:
            probabilities = _stretched(outputs, probabilities, likelihood)
        if name == "calibrated":  # slope and shifts are in the last layer
            probabilities = (1 - likelihood["floor"]) * probabilities + likelihood["floor"] / probabilities.shape[1]
            probabilities = _bent(outputs, probabilities, likelihood["curve"]) if likelihood["curve"] else probabilities
        return probabilities, _entropy(probabilities, name)
    if name == "multi-gaussian":
        return outputs, np.full(outputs.shape, likelihood["noise_scale"] ** 2)
    mean, variance = _law(outputs, likelihood)
    return mean, np.broadcast_to(variance, mean.shape)


def _probabilities(outputs: Any, name: str) -> Any:
    if name == "multi-label":
        return sigmoid(outputs)
    if name == "ordinal":
        return _ordered(outputs)
    if name == "probit":
        first = 0.5 * (1.0 + _erf(outputs * math.sqrt(0.5)))
        return np.concatenate([1.0 - first, first], 1)
    if outputs.shape[1] == 1:  # the logit of the second of two classes
        outputs = np.concatenate([np.zeros_like(outputs), outputs], 1)
    powers = np.exp(outputs - outputs.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def _stretched(outputs: Any, probabilities: Any, likelihood: dict[str, Any]) -> Any:
    """Of several classes, the likeliest as likely as a power of all log odds against it makes it."""
    levels = np.array(likelihood["levels"] or [0.0] * outputs.shape[1])
    beside = outputs - levels
    gaps = np.maximum(beside.max(1, keepdims=True) - beside, LEAST_GAP)
    wide = np.minimum(GAP * (gaps / GAP) ** likelihood["power"], MOST_TIMES * gaps)
    powers = _probabilities(levels - wide, "categorical")
    likeliest = np.arange(outputs.shape[1]) == probabilities.argmax(1)[:, None]
    others = np.where(likeliest, 0.0, probabilities)
    others = others / np.maximum(others.sum(1, keepdims=True), 1e-30)
    most = 1 / (1 + others.max(1, keepdims=True))
    left = np.minimum(np.where(likeliest, 0.0, powers).sum(1, keepdims=True), most)
    return np.where(likeliest, 1 - left, left * others)


def _bent(outputs: Any, probabilities: Any, curve: Any) -> Any:
    """Of two classes, with what a curve of their log odds adds to the second."""
    places, heights = np.array(curve).T
    odds = outputs[:, 0] if outputs.shape[1] == 1 else outputs[:, 1] - outputs[:, 0]
    one = probabilities[:, 1]
    bent = np.maximum(one + np.interp(odds, places, heights), KEPT * one)
    bent = np.minimum(bent, 1.0 - KEPT * (1.0 - one))
    return np.stack([1.0 - bent, bent], 1)


def _ordered(outputs: Any) -> Any:
    """Cumulative logits: a first threshold, and gaps that are positive."""
    classes = outputs.shape[1] + 1
    even = np.log(np.arange(1, classes) / np.arange(classes - 1, 0, -1))
    gaps = np.diff(even)
    start = gaps + np.log(-np.expm1(-gaps))  # softplus(start) = gap
    first = outputs[:, :1] + even[0]
    cuts = np.concatenate([first, first + np.cumsum(np.logaddexp(0.0, outputs[:, 1:] + start), 1)], 1)
    ends = np.zeros((len(outputs), 1))
    return np.diff(np.concatenate([ends, sigmoid(cuts), ends + 1.0], 1), axis=1)


def _law(outputs: Any, likelihood: dict[str, Any]) -> tuple[Any, Any]:
    """Mean and variance of one number."""
    name, first = likelihood["name"], outputs[:, 0]
    if name == "gaussian":
        return first, likelihood["noise_scale"] ** 2
    if name == "heteroscedastic-gaussian":
        return first, (likelihood["smallest"] + np.logaddexp(0.0, outputs[:, 1])) ** 2
    if name == "laplace":
        return first, 2 * likelihood["scale"] ** 2
    if name == "student-t":
        freedom = likelihood["freedom"]
        return first, likelihood["scale"] ** 2 * freedom / (freedom - 2) if freedom > 2 else math.inf
    power = np.exp(np.clip(first, -MOST, MOST))
    if name == "poisson":
        return likelihood["mean"] * power, likelihood["mean"] * power
    if name == "negative-binomial":
        mean = likelihood["mean"] * power
        return mean, mean + mean**2 / (likelihood["smallest"] + np.logaddexp(0.0, outputs[:, 1]))
    time = likelihood["time"] * power
    if name == "exponential":
        return time, time**2
    shape = likelihood["smallest"] + np.logaddexp(0.0, outputs[:, 1] + AT_ZERO)  # weibull
    once, twice = (np.exp(_lgamma(1 + power / shape)) for power in (1, 2))
    return time * once, time**2 * np.maximum(twice - once**2, 0.0)


def _entropy(probabilities: Any, name: str) -> Any:
    """In nats; labels of which any may hold have one each, added up."""
    found = _entropies(probabilities)
    return (found + _entropies(1.0 - probabilities) if name in LABELS else found).sum(1)


def _entropies(probabilities: Any) -> Any:
    return -probabilities * np.log(np.where(probabilities > 0, probabilities, 1.0))


def sigmoid(values: Any) -> Any:
    return np.exp(-np.logaddexp(0.0, -values))


def _gelu(values: Any) -> Any:
    return values * 0.5 * (1.0 + _erf(values / math.sqrt(2.0)))


def _gelu_tanh(values: Any) -> Any:
    return 0.5 * values * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (values + 0.044715 * values**3)))


_erf = np.vectorize(math.erf, otypes=[np.float64])
_lgamma = np.vectorize(math.lgamma, otypes=[np.float64])

ACTIVATIONS: dict[str, Any] = {
    "relu": lambda values: np.maximum(values, 0),
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "silu": lambda values: values * sigmoid(values),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "identity": lambda values: values,
}
