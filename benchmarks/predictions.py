"""100 draws of a two-layer network on 10 000 records: `python -m benchmarks.predictions [--json] [--quick]`.

Every contender gives the same three vectors per network: probabilities (or means), epistemic and aleatoric uncertainty.

    loop      the plain loop: for each draw set the weights, run the network on all records, keep its probabilities;
              then average, and take entropies (or variances)
    batches   the same loop over batches of 256 records, as a data loader gives them
    vmap      torch.func.vmap of the network over the draws, 25 draws and 2048 records at a time
    predict   posterior.predict: every draw's probabilities kept, averages taken on the way
    summary   posterior.summary: averages alone

The last two run in the native kernel where it is built, and as stacked products in torch where it is not.

The networks are named by features-hidden-outputs; the last layer's outputs are classes, or one number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import _harness
from benchmarks._harness import Clock, Report, Step
from confide.models.flat import flatten_, named_slices
from confide.models.likelihoods import Categorical, Gaussian
from confide.models.networks import mlp
from confide.models.predictive import ClassPredictive, of_numbers
from confide.posteriors.draws import Draws

RECORDS, DRAWS = 10_000, 100
NETWORKS = {"8-50-1": (8, 50, 1), "20-50-2": (20, 50, 2), "64-64-10": (64, 64, 10), "784-50-10": (784, 50, 10)}
NOISE = 0.2

Found = tuple[Tensor, Tensor, Tensor]


def problem(features: int, hidden: int, outputs: int) -> tuple[Draws, Tensor]:
    generator = torch.Generator().manual_seed(0)
    network = mlp(features, outputs, (hidden,), generator=generator)
    size = sum(parameter.numel() for parameter in network.parameters())
    draws = 0.1 * torch.randn(DRAWS, size, generator=generator)
    likelihood: Any = Categorical(outputs) if outputs > 1 else Gaussian(NOISE)
    x = torch.randn(RECORDS, features, generator=generator)
    return Draws(network, likelihood, draws, torch.full((DRAWS,), 1 / DRAWS)), x


def averaged(outputs: Tensor) -> Found:
    """Probabilities of every draw, or means: their average and the two uncertainties."""
    mean = outputs.mean(0)
    if outputs.shape[-1] == 1:
        return mean[:, 0], outputs[..., 0].var(0, unbiased=False), torch.full((len(mean),), NOISE**2)
    noise = torch.special.entr(outputs).sum(-1).mean(0)
    return mean, torch.special.entr(mean).sum(-1) - noise, noise


def activated(outputs: Tensor) -> Tensor:
    return outputs.softmax(-1) if outputs.shape[-1] > 1 else outputs


def by_loop(posterior: Draws, x: Tensor, batch: int = RECORDS) -> Found:
    network = posterior.module
    position = flatten_(network)
    kept = []
    for draw in posterior.draws:
        position.copy_(draw)
        kept.append(torch.cat([activated(network(part)) for part in x.split(batch)]))
    return averaged(torch.stack(kept))


def by_vmap(posterior: Draws, x: Tensor) -> Found:
    slices = named_slices(posterior.module)
    named = {name: posterior.draws[:, part].reshape(DRAWS, *shape) for name, (part, shape) in slices.items()}

    def one(weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return activated(torch.func.functional_call(posterior.module, weights, (inputs,)))

    run = torch.func.vmap(one, in_dims=(0, None), chunk_size=25)
    return averaged(torch.cat([run(named, part) for part in x.split(2048)], 1))


def by_predict(posterior: Draws, x: Tensor) -> Found:
    found = posterior.predict(x)
    centre = found.probabilities if isinstance(found, ClassPredictive) else of_numbers(found).mean
    return centre, found.epistemic, found.aleatoric


def by_summary(posterior: Draws, x: Tensor) -> Found:
    found = posterior.summary(x)
    return found.centre, found.epistemic, found.aleatoric


WAYS: dict[str, Callable[[Draws, Tensor], Found]] = {
    "loop": by_loop,
    "batches": partial(by_loop, batch=256),
    "vmap": by_vmap,
    "predict": by_predict,
    "summary": by_summary,
}


def make(way: str, shape: tuple[int, int, int]) -> Step:
    posterior, x = problem(*shape)

    def step() -> None:
        with torch.no_grad():
            WAYS[way](posterior, x)

    return step


def run(seconds: float, clock: Clock) -> Report:
    result: Report = {"machine": _harness.machine(), "networks": {}}
    _harness.warn_if_busy(result["machine"])
    for name, shape in NETWORKS.items():
        makers = {way: partial(make, way, shape) for way in WAYS}
        rows = _harness.race(makers, seconds, "loop", clock)
        for row in rows.values():
            row["times_faster"] = 1 / row["ratio"] if row.get("ratio") else None
        result["networks"][name] = rows
    return result


def show(result: Report) -> None:
    for name, rows in result["networks"].items():
        _harness.print_table(f"{name} (ratio to the plain loop)", rows)


if __name__ == "__main__":
    _harness.main(__doc__, run, (6.0, 20.0), show)
