"""What a likelihood makes of the outputs of all draws, as nodes of an ONNX graph: the centre and both uncertainties."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from confide.export.predictor.outcomes import AT_ZERO, CLASSES, GAP, KEPT, LABELS, LEAST_GAP, MOST, MOST_TIMES
from confide.export.stacked_draws import StackedDraws

ROOT_HALF = math.sqrt(0.5)
_TINY = float(np.finfo(np.float32).tiny)
_LANCZOS_SHIFT = 7.0  # g of the coefficients below
_LANCZOS = (
    0.99999999999980993, 676.5203681218851, -1259.1392167224028, 771.32342877765313, -176.61502916214059,
    12.507343278686905, -0.13857109526572012, 9.9843695780195716e-6, 1.5056327351493116e-7,
)  # fmt: skip
"""Coefficients of the gamma function (Lanczos, SIAM Journal on Numerical Analysis 1964): right to 1e-14 from 1 on."""


class OnnxGraph:
    """Nodes as they are added; every value has a name that no column has."""

    def __init__(self, taken: set[str]) -> None:
        from onnx import helper

        self._helper = helper
        self._prefix = "_"
        while any(name.startswith(self._prefix) for name in taken | {"centre", "epistemic", "aleatoric"}):
            self._prefix += "_"
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def add(self, kind: str, *inputs: str, out: str = "", domain: str = "", **attributes: Any) -> str:
        name = out or f"{self._prefix}{len(self.nodes)}"
        self.nodes.append(self._helper.make_node(kind, list(inputs), [name], domain=domain, **attributes))
        return name

    def constant(self, value: Any) -> str:
        from onnx import numpy_helper

        name = f"{self._prefix}c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def plus(self, value: str, number: Any) -> str:
        return self.add("Add", value, self.constant(np.asarray(number, dtype=np.float64)))

    def times(self, value: str, number: Any) -> str:
        return self.add("Mul", value, self.constant(np.asarray(number, dtype=np.float64)))

    def squared(self, value: str) -> str:
        return self.add("Mul", value, value)

    def output(self, outputs: str, place: int) -> str:
        """One output of every draw: (draws, n)."""
        return self.add("Gather", outputs, self.constant(np.int64(place)), axis=2)

    def softplus(self, value: str) -> str:
        """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)"""
        small = self.add("Exp", self.add("Neg", self.add("Abs", value)))
        return self.add("Add", self.add("Max", value, self.constant(0.0)), self.add("Log", self.plus(small, 1.0)))


def axes_of(name: str) -> tuple[list[str], list[str]]:
    """The axes of centre and of the uncertainties under a likelihood."""
    if name in CLASSES or name in LABELS:
        return ["n", "classes" if name in CLASSES else "targets"], ["n"]
    return (["n", "targets"], ["n", "targets"]) if name == "multi-gaussian" else (["n"], ["n"])


def averaged_draws(graph: OnnxGraph, outputs: str, draws: StackedDraws, about: Mapping[str, Any]) -> None:
    """From outputs (draws, n, outputs) to the three results."""
    likelihood, weights = about["likelihood"], draws.weights.numpy()
    name = likelihood["name"]
    if name in CLASSES or name in LABELS:
        probabilities = _probabilities(graph, outputs, likelihood)
        centre = _mean(graph, probabilities, weights, 2, "centre")
        noise = _mean(graph, _entropy(graph, probabilities, 2, name), weights, 1, "aleatoric")
        doubt = graph.add("Sub", _entropy(graph, centre, 1, name), noise)
        graph.add("Max", doubt, graph.constant(0.0), out="epistemic")
        return
    means, variances = _law(graph, outputs, likelihood)
    axes = 2 if name == "multi-gaussian" else 1
    centre = _mean(graph, means, weights, axes)
    square = _mean(graph, graph.squared(means), weights, axes)
    doubt = graph.add("Max", graph.add("Sub", square, graph.squared(centre)), graph.constant(0.0))
    if isinstance(variances, float):  # of the inputs' length, and NaN where they are: 0 * centre
        noise = graph.plus(graph.times(centre, 0.0), variances)
    else:
        noise = _mean(graph, variances, weights, axes)
    scale, shift = (np.asarray(about.get(key, usual), dtype=np.float64) for key, usual in (("scale", 1), ("centre", 0)))
    graph.add("Add", graph.times(centre, scale), graph.constant(shift), out="centre")
    graph.add("Mul", doubt, graph.constant(scale**2), out="epistemic")
    graph.add("Mul", noise, graph.constant(scale**2), out="aleatoric")


def _probabilities(graph: OnnxGraph, outputs: str, likelihood: Mapping[str, Any]) -> str:
    name = likelihood["name"]
    if name == "calibrated":  # slope and shifts are in the last layer
        straight = {"name": "bernoulli" if likelihood["one_logit"] else "categorical"}
        floor, found = float(likelihood["floor"]), _probabilities(graph, outputs, straight)
        if likelihood["power"] != 1:
            found = _stretched(graph, outputs, found, likelihood)
        found = graph.plus(graph.times(found, 1 - floor), floor / int(likelihood["classes"]))
        if not likelihood["curve"]:
            return found
        return _bent(graph, outputs, found, likelihood["curve"], not likelihood["one_logit"])
    if name == "categorical":
        return graph.add("Softmax", outputs, axis=2)
    if name in LABELS:
        return graph.add("Sigmoid", outputs)
    if name == "ordinal":
        return _ordered(graph, outputs, int(likelihood["classes"]))
    first = graph.add("Sigmoid", outputs) if name == "bernoulli" else _probit(graph, outputs)
    return graph.add("Concat", graph.add("Sub", graph.constant(1.0), first), first, axis=2)


def _stretched(graph: OnnxGraph, outputs: str, probabilities: str, likelihood: Mapping[str, Any]) -> str:
    """Of several classes, the likeliest as likely as a power of all log odds against it makes it."""
    classes = int(likelihood["classes"])
    levels = np.array(likelihood["levels"] or [0.0] * classes)
    beside = graph.plus(outputs, -levels)
    gaps = graph.add("Sub", graph.add("ReduceMax", beside, axes=[2], keepdims=1), beside)
    gaps = graph.add("Max", gaps, graph.constant(LEAST_GAP))
    wide = graph.add("Pow", graph.times(gaps, 1 / GAP), graph.constant(float(likelihood["power"])))
    wide = graph.add("Min", graph.times(wide, GAP), graph.times(gaps, MOST_TIMES))
    powers = graph.add("Softmax", graph.plus(graph.times(wide, -1.0), levels), axis=2)
    place = graph.add("ArgMax", probabilities, axis=2, keepdims=1)
    likeliest = graph.add("Equal", place, graph.constant(np.arange(classes)))
    others, left = (graph.add("Where", likeliest, graph.constant(0.0), value) for value in (probabilities, powers))
    axis = graph.constant(np.array([2]))
    rest = graph.add("Max", graph.add("ReduceSum", others, axis, keepdims=1), graph.constant(1e-30))
    others = graph.add("Div", others, rest)
    second = graph.add("ReduceMax", others, axes=[2], keepdims=1)
    most = graph.add("Reciprocal", graph.plus(second, 1.0))
    left = graph.add("Min", graph.add("ReduceSum", left, axis, keepdims=1), most)
    return graph.add("Where", likeliest, graph.add("Sub", graph.constant(1.0), left), graph.add("Mul", left, others))


def _bent(graph: OnnxGraph, outputs: str, probabilities: str, curve: Any, two: bool) -> str:
    """Of two classes, with what a curve adds to the second: one piece after the other, each as far as odds go in it."""
    places, heights = np.array(curve, dtype=np.float64).T
    widths = np.diff(places)
    odds = graph.add("MatMul", outputs, graph.constant(np.array([[-1.0], [1.0]] if two else [[1.0]])))
    along = graph.add("Max", graph.plus(odds, -places[:-1]), graph.constant(0.0))
    along = graph.add("Min", along, graph.constant(widths))
    added = graph.plus(graph.add("MatMul", along, graph.constant((np.diff(heights) / widths)[:, None])), heights[0])
    one = graph.add("MatMul", probabilities, graph.constant(np.array([[0.0], [1.0]])))
    bent = graph.add("Max", graph.add("Add", one, added), graph.times(one, KEPT))
    bent = graph.add("Min", bent, graph.plus(graph.times(one, KEPT), 1.0 - KEPT))
    return graph.add("Concat", graph.add("Sub", graph.constant(1.0), bent), bent, axis=2)


def _probit(graph: OnnxGraph, outputs: str) -> str:
    # Erf of a runtime may know single precision alone.
    single = graph.add("Mul", graph.add("Cast", outputs, to=1), graph.constant(np.float32(ROOT_HALF)))
    return graph.times(graph.plus(graph.add("Cast", graph.add("Erf", single), to=11), 1.0), 0.5)


def _ordered(graph: OnnxGraph, outputs: str, classes: int) -> str:
    """Cumulative logits: a first threshold, and positive gaps that a triangle of ones adds up."""
    even = np.log(np.arange(1, classes) / np.arange(classes - 1, 0, -1))
    gaps = np.diff(even)
    shifted = graph.plus(outputs, np.concatenate([even[:1], gaps + np.log(-np.expm1(-gaps))]))
    if classes > 2:
        first, rest = (
            graph.add("Slice", shifted, *(graph.constant(np.array([end])) for end in (start, stop, 2)))
            for start, stop in ((0, 1), (1, classes))
        )
        steps = graph.add("Concat", first, graph.softplus(rest), axis=2)
        shifted = graph.add("MatMul", steps, graph.constant(np.triu(np.ones((classes - 1, classes - 1)))))
    below = graph.add("Sigmoid", shifted)
    ends = ((np.array([0, 0, 0, 0, 0, 1]), 1.0), (np.array([0, 0, 1, 0, 0, 0]), 0.0))
    upper, lower = (graph.add("Pad", below, graph.constant(pads), graph.constant(value)) for pads, value in ends)
    return graph.add("Sub", upper, lower)


def _law(graph: OnnxGraph, outputs: str, likelihood: Mapping[str, Any]) -> tuple[str, str | float]:
    """Means and variances of every draw; a variance that is the same everywhere is a number."""
    name = likelihood["name"]
    if name == "multi-gaussian":
        return outputs, float(likelihood["noise_scale"]) ** 2
    first = graph.output(outputs, 0)
    if name == "heteroscedastic-gaussian":
        spread = graph.plus(graph.softplus(graph.output(outputs, 1)), likelihood["smallest"])
        return first, graph.squared(spread)
    if name in ("gaussian", "laplace", "student-t"):
        return first, _constant_variance(likelihood)
    power = graph.add("Exp", graph.add("Min", graph.add("Max", first, graph.constant(-MOST)), graph.constant(MOST)))
    mean = graph.times(power, likelihood["mean" if name in ("poisson", "negative-binomial") else "time"])
    if name == "poisson":
        return mean, mean
    if name == "exponential":
        return mean, graph.squared(mean)
    if name == "negative-binomial":
        size = graph.plus(graph.softplus(graph.output(outputs, 1)), likelihood["smallest"])
        return mean, graph.add("Add", mean, graph.add("Div", graph.squared(mean), size))
    raw = graph.plus(graph.output(outputs, 1), AT_ZERO)  # weibull
    shape = graph.plus(graph.softplus(raw), likelihood["smallest"])
    once, twice = (_gamma(graph, graph.add("Div", graph.constant(float(k)), shape)) for k in (1, 2))
    share = graph.add("Max", graph.add("Sub", twice, graph.squared(once)), graph.constant(0.0))
    return graph.add("Mul", mean, once), graph.add("Mul", graph.squared(mean), share)


def _constant_variance(likelihood: Mapping[str, Any]) -> float:
    if likelihood["name"] == "gaussian":
        return float(likelihood["noise_scale"]) ** 2
    variance = float(likelihood["scale"]) ** 2
    if likelihood["name"] == "laplace":
        return 2 * variance
    freedom = float(likelihood["freedom"])
    return variance * freedom / (freedom - 2) if freedom > 2 else math.inf


def _gamma(graph: OnnxGraph, value: str) -> str:
    """Gamma(1 + value) for values from 0 on."""
    total = graph.plus(graph.times(value, 0.0), _LANCZOS[0])
    for place, number in enumerate(_LANCZOS[1:], start=1):
        part = graph.add("Div", graph.constant(number), graph.plus(value, float(place)))
        total = graph.add("Add", total, part)
    high = graph.plus(value, _LANCZOS_SHIFT + 0.5)
    power = graph.add("Mul", graph.plus(value, 0.5), graph.add("Log", high))
    logarithm = graph.add("Add", graph.add("Sub", power, high), graph.add("Log", total))
    return graph.add("Exp", graph.plus(logarithm, 0.5 * math.log(2 * math.pi)))


def _mean(graph: OnnxGraph, values: str, weights: Any, axes: int, out: str = "") -> str:
    """Over the draws; axes: how many there are beside."""
    weighted = graph.times(values, weights.reshape(-1, *[1] * axes))
    return graph.add("ReduceSum", weighted, graph.constant(np.array([0])), keepdims=0, out=out)


def _entropy(graph: OnnxGraph, probabilities: str, axis: int, name: str) -> str:
    """In nats; labels of which any may hold have one each, added up."""
    terms = _entropies(graph, probabilities)
    if name in LABELS:
        others = _entropies(graph, graph.add("Sub", graph.constant(1.0), probabilities))
        terms = graph.add("Add", terms, others)
    return graph.add("ReduceSum", terms, graph.constant(np.array([axis])), keepdims=0)


def _entropies(graph: OnnxGraph, probabilities: str) -> str:
    # 0 log 0 = 0: the logarithm of what is too small to count is finite.
    logarithm = graph.add("Log", graph.add("Max", probabilities, graph.constant(_TINY)))
    return graph.add("Neg", graph.add("Mul", probabilities, logarithm))
