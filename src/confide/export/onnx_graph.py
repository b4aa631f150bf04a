"""All draws and the encoder as one ONNX graph: raw columns in, probabilities or means with both uncertainties out.

    inputs    one per declared column, of shape (n, 1): double for numbers, where NaN is missing, and string for
              categories, spelt as declared; for plain arrays one input, "inputs", of shape (n, features); for pictures
              their features, which predict.py makes
    outputs   centre, epistemic, aleatoric: as in predict.py (what a likelihood makes of a network is in `onnx_laws`)

A graph cannot refuse: where a column has no input for a missing value, all outputs of that row are NaN.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from confide.data.labels import category_key
from confide.data.table import MISSING_TOKENS
from confide.errors import Refusal
from confide.export.column_features import ColumnFeatures
from confide.export.onnx_laws import ROOT_HALF, OnnxGraph, averaged_draws, axes_of
from confide.export.stacked_draws import LINEAR, StackedDraws

OPSET, OPSET_ML, IR_VERSION = 17, 3, 8
"""Of 2022: read by every runtime since."""
_LARGEST = float(np.finfo(np.float64).max)


def graph_of(draws: StackedDraws, about: Mapping[str, Any]) -> Any:
    """The model, checked."""
    try:
        import onnx
        from onnx import TensorProto, helper
    except ImportError:
        raise Refusal("to='onnx': needs the package onnx; install it with: pip install confide[onnx]") from None
    columns = about.get("columns")
    graph = OnnxGraph({column["name"] for column in columns or ()} | {"inputs"})
    if columns is None:
        kind, size = (TensorProto.DOUBLE, draws.features)
        entrances = [helper.make_tensor_value_info("inputs", kind, ["n", size])]
        encoded = _scaled_block(graph, about)
    else:
        kinds = {"numeric": TensorProto.DOUBLE, "categorical": TensorProto.STRING}
        entrances = [helper.make_tensor_value_info(one["name"], kinds[one["kind"]], ["n", 1]) for one in columns]
        parts = [_number(graph, one) if one["kind"] == "numeric" else _category(graph, one) for one in columns]
        encoded = graph.add("Concat", *parts, axis=1)
    averaged_draws(graph, _outputs(graph, draws, encoded), draws, about)
    centre, doubt = axes_of(about["likelihood"]["name"])
    axes = {"centre": centre, "epistemic": doubt, "aleatoric": doubt}
    exits = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, sizes) for name, sizes in axes.items()]
    made = helper.make_graph(graph.nodes, "confide", entrances, exits, graph.constants)
    sets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", OPSET_ML)]
    model = helper.make_model(made, opset_imports=sets, producer_name="confide", ir_version=IR_VERSION)
    helper.set_model_props(model, {"confide": json.dumps(dict(about))})
    onnx.checker.check_model(model)
    return model


# -- the encoder -------------------------------------------------------------------------------------------------------


def _scaled(graph: OnnxGraph, name: str, low: Any, high: Any, missing: str) -> tuple[str, str]:
    """Numbers in [-1, 1] as floats, and which of them are finite."""
    low, high = np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
    middle, half = low / 2 + high / 2, high / 2 - low / 2
    finite = graph.add("LessOrEqual", graph.add("Abs", name), graph.constant(_LARGEST))
    present = graph.add("Where", finite, name, graph.constant(middle))
    clamped = graph.add("Min", graph.add("Max", present, graph.constant(low)), graph.constant(high))
    scaled = graph.add("Div", graph.add("Sub", clamped, graph.constant(middle)), graph.constant(half))
    kept = graph.add("Min", graph.add("Max", scaled, graph.constant(-1.0)), graph.constant(1.0))
    if missing == "refuse":
        kept = graph.add("Where", finite, kept, graph.constant(np.nan))
    return graph.add("Cast", kept, to=1), finite


def _scaled_block(graph: OnnxGraph, about: Mapping[str, Any]) -> str:
    if about.get("bounds") is None or "picture" in about:
        return graph.add("Cast", "inputs", to=1)
    pairs = np.asarray(about["bounds"], dtype=np.float64)
    return _scaled(graph, "inputs", pairs[:, 0], pairs[:, 1], about["missing"])[0]


def _number(graph: OnnxGraph, column: Mapping[str, Any]) -> str:
    scaled, finite = _scaled(graph, column["name"], column["low"], column["high"], column["missing"])
    if column["missing"] != "category":
        return scaled
    return graph.add("Concat", scaled, graph.add("Cast", graph.add("Not", finite), to=1), axis=1)


def _category(graph: OnnxGraph, column: Mapping[str, Any]) -> str:
    """One input per declared category; -1 stands for a value that is not declared, -2 for one that is missing."""
    labels = column["categories"]
    places: dict[str, int] = {}
    for place, label in enumerate(labels):
        places.setdefault(str(label), place)
        places.setdefault(str(category_key(label)), place)
    for token in MISSING_TOKENS:
        places.setdefault(token, -2)
    known: dict[str, Any] = {"keys_strings": list(places), "values_int64s": list(places.values()), "default_int64": -1}
    code = graph.add("LabelEncoder", column["name"], domain="ai.onnx.ml", **known)
    one = graph.add("Cast", graph.add("Equal", code, graph.constant(np.arange(len(labels))[None])), to=1)
    absent = graph.add("Equal", code, graph.constant(np.array([[-2]])))
    if column["missing"] == "category":
        return graph.add("Concat", one, graph.add("Cast", absent, to=1), axis=1)
    filled = np.float32(np.nan if column["missing"] == "refuse" else 1 / len(labels))
    return graph.add("Where", absent, graph.constant(filled), one)


# -- the draws ---------------------------------------------------------------------------------------------------------


def _outputs(graph: OnnxGraph, draws: StackedDraws, values: str) -> str:
    """(draws, n, outputs) in double precision."""
    if draws.columns is not None:
        values = _features(graph, draws.columns, values)
    features = values
    for place, layer in enumerate(draws.layers):
        if layer == LINEAR:
            matrix = draws.matrices[place].float().transpose(1, 2).contiguous().numpy()
            values = graph.add("MatMul", values, graph.constant(matrix))
            if place in draws.biases:
                values = graph.add("Add", values, graph.constant(draws.biases[place].float()[:, None].numpy()))
        else:
            values = _activation(graph, layer, values)
    if draws.effects is not None:
        effects = graph.constant(draws.effects.float().transpose(1, 2).contiguous().numpy())
        values = graph.add("Add", values, graph.add("MatMul", features, effects))
    return graph.add("Cast", values, to=11)


def _features(graph: OnnxGraph, columns: ColumnFeatures, values: str) -> str:
    """Of an additive model; quantiles in double precision, cosines in single, which every runtime knows."""
    parts = [graph.add("Gather", values, graph.constant(columns.categories), axis=1)]
    if len(columns.numbers):
        numbers = graph.add("Cast", graph.add("Gather", values, graph.constant(columns.numbers), axis=1), to=11)
        plain = graph.add("Mul", graph.add("Add", numbers, graph.constant(1.0)), graph.constant(0.5))
        wide = graph.add("Unsqueeze", plain, graph.constant(np.array([2])))
        beyond = graph.add("Max", graph.add("Sub", wide, graph.constant(columns.knots[:-1])), graph.constant(0.0))
        steps = graph.add("Min", beyond, graph.constant(columns.widths))
        rises = graph.add("Mul", steps, graph.constant(columns.slopes))
        risen = graph.add("ReduceSum", rises, graph.constant(np.array([2])), keepdims=1)
        # A missing number is NaN, which not every runtime's Max keeps: 0 * number does.
        kept = graph.add("Add", risen, graph.add("Mul", wide, graph.constant(0.0)))
        u = graph.add("Add", kept, graph.constant(columns.heights[:, :1]))
        angles = graph.add("Cast", graph.add("Mul", u, graph.constant(columns.angles)), to=1)
        size = graph.constant(np.array([0, len(columns.numbers) * columns.waves]))
        parts.insert(0, graph.add("Reshape", graph.add("Cos", angles), size))
    together = graph.add("Concat", *parts, axis=1) if len(parts) > 1 else parts[0]
    centred = graph.add("Sub", together, graph.constant(columns.centres[1:].astype(np.float32)))
    scaled = graph.add("Mul", centred, graph.constant(columns.amplitudes[1:].astype(np.float32)))
    first = np.float32((1 - columns.centres[0]) * columns.amplitudes[0])
    return graph.add("Pad", scaled, graph.constant(np.array([0, 1, 0, 0])), graph.constant(first))


def _activation(graph: OnnxGraph, name: str, values: str) -> str:
    if name in ("relu", "tanh", "sigmoid"):
        return graph.add(name.capitalize(), values)
    if name == "silu":
        return graph.add("Mul", values, graph.add("Sigmoid", values))
    if name == "identity":
        return values
    half, one = graph.constant(np.float32(0.5)), graph.constant(np.float32(1))
    if name == "gelu":
        inner = graph.add("Erf", graph.add("Mul", values, graph.constant(np.float32(ROOT_HALF))))
    else:
        cube = graph.add("Mul", graph.add("Mul", values, values), values)
        cubed = graph.add("Mul", cube, graph.constant(np.float32(0.044715)))
        slope = graph.constant(np.float32(math.sqrt(2 / math.pi)))
        inner = graph.add("Tanh", graph.add("Mul", graph.add("Add", values, cubed), slope))
    return graph.add("Mul", graph.add("Mul", values, half), graph.add("Add", inner, one))
