"""Animals of other pages with a distribution for every parameter: layers that have no Bayesian form of their own."""

from __future__ import annotations

from confide.layers.conversion import mean_field
from tests.mechanism.clipping import zoo_layers, zoo_networks  # noqa: F401
from tests.mechanism.clipping.zoo_tools import ZOO, Animal, Case

DRAWN = (
    "convolution_over_time", "convolution_in_three_dimensions", "transposed_convolution", "norms_over_features",
    "transformer", "cross_attention", "attention_with_learnt_keys", "lstm", "deep_lstm_both_ways", "gru",
    "recurrent_cell", "module_used_twice", "bare_parameter", "bilinear_layer", "vision_transformer",
    "weight_used_outside_its_layer", "frozen_parameters", "several_outputs",
)  # fmt: skip
SEVERAL = ("transformer", "lstm", "gru", "convolution_over_time")


def drawn(name: str, draws: int) -> Case:
    module, loss, x, y = ZOO[name].build()
    module = mean_field(module, 0.3, normalisations=True)
    module.zoo_draws = draws  # type: ignore[assignment]
    return module, loss, x, y


def register() -> None:
    """After the pages of those animals."""
    for count, names in ((1, DRAWN), (4, SEVERAL)):
        for name in names:
            ZOO[f"{name}_drawn_{count}_draws"] = Animal(lambda name=name, draws=count: drawn(name, draws))  # type: ignore[misc]


register()
