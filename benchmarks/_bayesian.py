"""Bayesian layers on the 784-1200-1200-10 network, beside confide's DP-SGD step on the same network.

A step draws the weights (or activations) anew, clips, adds noise and updates means and spreads. The `plain` steps are
the same without clipping and noise, by ordinary autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from benchmarks import _models
from benchmarks._architectures import resnet18_gn
from benchmarks._contenders import confide, confide_step, plain, sgd
from benchmarks._harness import Maker, Step

MODEL, WIDTHS, TINY_WIDTHS = "mlp1200", (784, 1200, 1200, 10), (8, 8, 8, 10)


def bayes_by_backprop(tiny: bool = False) -> Mapping[str, Maker]:
    """One and four draws; norms exact or bounded from above, a valid clip that needs fewer products."""
    makers: dict[str, Maker] = {"dp_sgd": partial(dp_sgd, tiny), "plain_sgd": partial(plain_sgd, tiny)}
    for draws in (1, 4):
        makers[f"plain_{draws}_draws"] = partial(plain_step, partial(mean_field, "exact"), draws, tiny)
        for norms in ("exact", "bound"):
            makers[f"confide_{draws}_draws_{norms}"] = partial(private_step, partial(mean_field, norms), draws, tiny)
    return makers


def residual_network(tiny: bool = False) -> Mapping[str, Maker]:
    """A distribution for every weight of ResNet-18 with group normalisation, one draw, as `BBP` makes it."""
    return {"dp_sgd": partial(residual_step, False, tiny), "dp_bbp": partial(residual_step, True, tiny)}


def residual_step(bayesian: bool, tiny: bool) -> Step:
    from confide.layers.bayesian import draw_
    from confide.mechanism.noise import NoiseStream
    from confide.methods import BBP

    torch.manual_seed(0)
    case, weights = resnet18_gn(tiny), NoiseStream()
    module = BBP().prepare(case.module) if bayesian else case.module
    clipped = confide_step(module, case.loss, case.x, case.y)

    def step() -> None:
        if bayesian:
            draw_(module, weights, 1)
        clipped()

    return step


def variational_dropout(tiny: bool = False) -> Mapping[str, Maker]:
    """Activations drawn instead of weights; variances tied to the privacy noise (the method's default) or learnt."""
    makers: dict[str, Maker] = {"dp_sgd": partial(dp_sgd, tiny), "plain_sgd": partial(plain_sgd, tiny)}
    for kind in ("tied", "learnt"):
        makers[f"plain_{kind}"] = partial(plain_step, partial(dropout_layer, kind, "exact"), 1, tiny)
    makers["confide_tied"] = partial(private_step, partial(dropout_layer, "tied", "exact"), 1, tiny)
    for norms in ("exact", "bound"):
        makers[f"confide_learnt_{norms}"] = partial(private_step, partial(dropout_layer, "learnt", norms), 1, tiny)
    return makers


def dp_sgd(tiny: bool) -> Step:
    return confide(_models.build(MODEL, tiny))


def plain_sgd(tiny: bool) -> Step:
    return plain(_models.build(MODEL, tiny))


def mean_field(norms: str, inputs: int, outputs: int) -> nn.Module:
    from confide.layers.bayesian import MeanFieldLinear

    return MeanFieldLinear(inputs, outputs, norms=norms)  # type: ignore[arg-type]


def dropout_layer(kind: str, norms: str, inputs: int, outputs: int) -> nn.Module:
    from confide.layers.dropout import SharedNoiseLinear

    layer = SharedNoiseLinear(inputs, outputs, norms=norms)  # type: ignore[arg-type]
    layer.weight_log_variance.requires_grad_(kind == "learnt")
    return layer


def network(layer: Callable[[int, int], nn.Module], tiny: bool) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(TINY_WIDTHS if tiny else WIDTHS):
        layers += [layer(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def private_step(layer: Callable[[int, int], nn.Module], draws: int, tiny: bool) -> Step:
    from confide.layers.bayesian import draw_
    from confide.mechanism.noise import NoiseStream

    case, module, weights = _models.build(MODEL, tiny), network(layer, tiny), NoiseStream()
    clipped = confide_step(module, case.loss, case.x, case.y)

    def step() -> None:
        draw_(module, weights, draws)
        clipped()

    return step


def plain_step(layer: Callable[[int, int], nn.Module], draws: int, tiny: bool) -> Step:
    from confide.layers.bayesian import draw_, fold_draws

    case, module = _models.build(MODEL, tiny), network(layer, tiny)
    optimizer = sgd(module)
    x, y = fold_draws(case.x, draws), fold_draws(case.y, draws)

    def step() -> None:
        draw_(module, draws=draws)
        optimizer.zero_grad()
        case.loss(module(x), y).mean().backward()
        optimizer.step()

    return step
