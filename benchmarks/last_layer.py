"""A last layer by noisy curvature against DP-SGD on the same features, with as many trials for each.

    python -m benchmarks.last_layer [--quick] [--only FAMILY ...]

Features are those of a frozen random layer over made-up records. Each method has six settings; which one is used at
an epsilon is chosen by log loss on development seeds, and figures come from other seeds. docs/protocols.md has the
protocol. DP-SGD takes 120 steps over all records, the last layer at most a tenth of that.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import confide
from confide.data.schema import Schema
from confide.methods import SGD, LastLayer
from confide.methods.base import Method
from confide.models.networks import last_layer
from confide.models.priors import GaussianPrior

RECORDS, TEST, DELTA = 5000, 4000, 1e-5
EPSILONS = (0.1, 1.0, 3.0)
DEVELOPMENT, EVALUATION = (1000, 1001), (0, 1, 2, 3, 4)
STEPS = 120  # of DP-SGD; 6 or 12 releases of the last layer


@dataclass(frozen=True)
class Setting:
    """One trial of a method: the method and how many releases it takes."""

    method: Method
    steps: int


PRIORS = (None, GaussianPrior(1.0), GaussianPrior(0.3))
RATES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
SETTINGS: dict[str, list[Setting]] = {
    "last-layer": [Setting(LastLayer(prior), steps) for prior in PRIORS for steps in (6, 12)],
    "dp-sgd": [Setting(SGD(learning_rate=rate, averaging=0.5), STEPS) for rate in RATES],
}


@dataclass(frozen=True)
class FeatureTask:
    backbone: nn.Module
    x: Tensor
    y: Tensor
    classes: int


def _task(x: Tensor, logits: Tensor, width: int, activation: nn.Module, generator: torch.Generator) -> FeatureTask:
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    layer = nn.Linear(x.shape[1], width)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) / x.shape[1] ** 0.5)
        layer.bias.copy_(torch.randn(width, generator=generator) / 2)
    return FeatureTask(nn.Sequential(layer, activation), x, labels, logits.shape[1])


def clusters(generator: torch.Generator) -> FeatureTask:
    """Ten classes, each about a centre of its own."""
    centres = torch.randn(10, 32, generator=generator) / 2
    x = torch.randn(RECORDS + TEST, 32, generator=generator)
    x += centres[torch.randint(10, (len(x),), generator=generator)]
    return _task(x, x @ centres.T * 2, 64, nn.Tanh(), generator)


def curved(generator: torch.Generator) -> FeatureTask:
    """Two classes along waves and steps."""
    x = 2 * torch.rand(RECORDS + TEST, 8, generator=generator) - 1
    found = 2 * torch.sin(3 * x[:, 0]) + 2 * (x[:, 1] > 0.2) - 1 + 1.5 * x[:, 2] * x[:, 3]
    return _task(x, torch.stack([torch.zeros_like(found), found], 1), 64, nn.ReLU(), generator)


def skewed(generator: torch.Generator) -> FeatureTask:
    """Five classes of unequal share, on inputs whose variances fall off."""
    x = torch.randn(RECORDS + TEST, 24, generator=generator) * torch.logspace(0.5, -1.5, 24)
    weights = torch.randn(24, 5, generator=generator)
    return _task(x, x @ weights + torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0]), 48, nn.Tanh(), generator)


FAMILIES: dict[str, Callable[[torch.Generator], FeatureTask]] = {
    "clusters": clusters, "curved": curved, "skewed": skewed
}  # fmt: skip


@dataclass(frozen=True)
class Score:
    log_loss: float
    accuracy: float


def score(family: str, seed: int, setting: Setting, epsilon: float) -> Score:
    """One fit at this epsilon, measured on records that it did not see."""
    task = FAMILIES[family](torch.Generator().manual_seed(seed))
    schema = Schema(records=RECORDS, classes=task.classes)
    data = confide.PrivateData(task.x[:RECORDS], task.y[:RECORDS], schema=schema)
    sizes: dict[str, Any] = {"records": RECORDS, "sampling": "full-batch", "steps": setting.steps, "clip": 1.0}
    module = last_layer(task.backbone, task.classes, task.backbone[0].out_features)  # type: ignore[index]
    run = confide.fit(setting.method, module, data, confide.plan(epsilon=epsilon, delta=DELTA, **sizes))
    probabilities = run.posterior.summary(task.x[RECORDS:]).centre
    truth = task.y[RECORDS:]
    chosen = probabilities.gather(1, truth[:, None]).clamp(min=1e-12)
    return Score(float(-chosen.log().mean()), float((probabilities.argmax(1) == truth).double().mean()))


def chosen(family: str, name: str, epsilon: float, seeds: tuple[int, ...]) -> Setting:
    """The setting with the least log loss on the development seeds."""

    def loss(setting: Setting) -> float:
        return statistics.mean(score(family, seed, setting, epsilon).log_loss for seed in seeds)

    return min(SETTINGS[name], key=loss)


def compare(family: str, quick: bool) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    for epsilon in EPSILONS[1:2] if quick else EPSILONS:
        for name in SETTINGS:
            setting = chosen(family, name, epsilon, DEVELOPMENT[:1] if quick else DEVELOPMENT)
            scores = [score(family, seed, setting, epsilon) for seed in EVALUATION[: 2 if quick else None]]
            losses = [one.log_loss for one in scores]
            error = statistics.stdev(losses) / len(losses) ** 0.5
            accuracy = statistics.mean(one.accuracy for one in scores)
            found = {"log_loss": statistics.mean(losses), "error": error, "accuracy": accuracy}
            rows.append({"family": family, "epsilon": epsilon, "method": name, "setting": setting, **found})
            _show(rows[-1])
    return rows


def _show(row: Mapping[str, Any]) -> None:
    setting: Setting = row["setting"]
    method: Any = setting.method
    told = f"rate {method.learning_rate}" if isinstance(method, SGD) else f"prior {method.prior}"
    used = f"{setting.steps} steps, {told}"
    print(
        f"{row['family']:10}{row['epsilon']:6.1f}  {row['method']:12}{row['log_loss']:8.4f} +- {row['error']:.4f}"
        f"{row['accuracy']:9.4f}   {used}",
        flush=True,
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="one family, one epsilon, few seeds")
    arguments.add_argument("--only", nargs="+", choices=list(FAMILIES), metavar="FAMILY", help=", ".join(FAMILIES))
    options = arguments.parse_args()
    print(f"{'family':10}{'eps':>6}  {'method':12}{'log loss':>8}{'':10}{'accuracy':>9}   setting")
    for family in options.only or (list(FAMILIES)[:1] if options.quick else FAMILIES):
        compare(family, options.quick)


if __name__ == "__main__":
    main()
