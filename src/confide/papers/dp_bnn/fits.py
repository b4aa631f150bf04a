"""Zhang, Bu, Chen and Long (2021): the networks, the settings of every method, and one fit of any of them.

SGLD is run at temperature 1 with nothing but privacy noise. A step on the mean gradient of length a needs Langevin
noise of variance 2a/n, and the release brings (a z C / b)^2; both agree for the clip

    C = (b / z) sqrt(2 / (n a)),

so that the learning rate a is chosen and the clip follows.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.evaluate import metrics
from confide.mechanism.plan import Plan, plan
from confide.methods.base import Method
from confide.methods.bbp import BBP
from confide.methods.mc_dropout import MCDropout
from confide.methods.sgd import SGD
from confide.methods.sgld import SGLD
from confide.models.networks import mlp
from confide.models.predictive import of_classes
from confide.models.priors import FlatPrior, GaussianPrior, LaplacePrior, Prior
from confide.papers import sets
from confide.papers.base import Context
from confide.papers.mnist_cnn import encoded, learnt_cnn, normalised
from confide.papers.predictions import class_probabilities
from confide.posteriors.base import Posterior
from confide.running.fit import fit
from confide.sources.private_data import PrivateData

MethodName: TypeAlias = Literal["SGLD", "BBP", "MC dropout", "SGD"]
NetworkName: TypeAlias = Literal["MLP", "MLP as printed", "CNN", "CNN on fixed public edges"]
PriorName: TypeAlias = Literal["Gaussian", "Laplace", "none"]

EDGES: NetworkName = "CNN on fixed public edges"
PRINTED: NetworkName = "MLP as printed"
PRINTED_HIDDEN, QUICK_HIDDEN = (1200, 1200), (30, 30)
METHODS: tuple[MethodName, ...] = ("SGLD", "BBP", "MC dropout", "SGD")
DELTA = 1e-5
LAPLACE_SCALE = 0.1
DRAWS = 100
"""Of the predictions that are shown, as many as the paper has; half of them for a CNN, for their time."""
DIRECTIONS = 8


@dataclass(frozen=True)
class Setting:
    """What was chosen for one method on one network.

    rate        learning rate a: the step on the mean gradient
    prior       scale of the Gaussian prior
    clip        None: by the rule for SGLD
    free_rate   learning rate of the run without privacy (SGLD plain, the others Adam)
    """

    rate: float
    prior: float
    clip: float | None = None
    free_rate: float = 5e-3


SETTINGS: dict[tuple[MethodName, NetworkName], Setting] = {
    ("SGLD", "MLP"): Setting(5.7, 0.15, free_rate=1.0),
    ("BBP", "MLP"): Setting(4.0, 0.2, 1.75),
    ("MC dropout", "MLP"): Setting(4.0, 0.2, 1.75),
    ("SGD", "MLP"): Setting(5.7, 0.13, 1.75),
    ("SGLD", PRINTED): Setting(5.7, 0.15, free_rate=0.3),  # 1 runs away (docs/protocols.md)
    ("BBP", PRINTED): Setting(4.0, 0.2, 1.75),
    ("MC dropout", PRINTED): Setting(4.0, 0.2, 1.75),
    ("SGD", PRINTED): Setting(5.7, 0.13, 1.75),
    ("SGLD", "CNN"): Setting(2.0, 0.2, free_rate=0.3),
    ("BBP", "CNN"): Setting(3.0, 0.2, 2.0),
    ("MC dropout", "CNN"): Setting(4.0, 0.2, 2.0),
    ("SGD", "CNN"): Setting(4.0, 0.2, 2.0),
    ("SGLD", EDGES): Setting(3.3, 0.15),
    ("BBP", EDGES): Setting(4.0, 0.2, 2.0),
    ("MC dropout", EDGES): Setting(10.0, 0.3, 1.0),
    ("SGD", EDGES): Setting(4.0, 0.15, 2.0),
}
EPOCHS: dict[NetworkName, float] = {"MLP": 15, PRINTED: 15, "CNN": 6.5, EDGES: 8}
BATCH, HIDDEN = 2048, 64
FREE_EPOCHS: dict[NetworkName, float] = {"MLP": 20, PRINTED: 20, "CNN": 8}  # by trials, docs/protocols.md
FREE_BATCH = 512
DROPOUT: dict[NetworkName, float] = {"MLP": 0.1, PRINTED: 0.1, "CNN": 0.1, EDGES: 0.2}
DEVIATION: dict[NetworkName, float] = {"MLP": 0.06, PRINTED: 0.06, "CNN": 0.03, EDGES: 0.03}


@dataclass(frozen=True)
class TableRow:
    """One fit that is asked for; what is None is as the settings say. `scale` is that of the Gaussian prior."""

    method: MethodName
    network: NetworkName = "MLP"
    prior: PriorName = "Gaussian"
    private: bool = True
    epsilon: float = 1.0
    batch: int | None = None
    epochs: float | None = None
    rate: float | None = None
    noise_multiplier: float | None = None
    clip: float | None = None
    clips: tuple[float, ...] = ()
    scale: float | None = None


@dataclass(frozen=True)
class Images:
    """The images, each normalised by itself: without its mean and of norm 1; no other record is looked at."""

    found: sets.Set
    quick: bool

    @property
    def side(self) -> int:
        return math.isqrt(self.found.x[:1].numel())

    @property
    def labels(self) -> Tensor:
        return self.found.y_test

    def inputs(self, network: NetworkName) -> tuple[Tensor, Tensor]:
        """Training and test inputs of a network."""
        if network in ("MLP", PRINTED):
            return self._pixels
        return self._images if network == "CNN" else self._edges

    @cached_property
    def _pixels(self) -> tuple[Tensor, Tensor]:
        return 8 * normalised(self.found.x.flatten(1)), 8 * normalised(self.found.x_test.flatten(1))

    @cached_property
    def _images(self) -> tuple[Tensor, Tensor]:
        return encoded(self.found.x), encoded(self.found.x_test)

    @cached_property
    def _edges(self) -> tuple[Tensor, Tensor]:
        return 16 * _edges(self.found.x, self.side), 16 * _edges(self.found.x_test, self.side)


def load(context: Context) -> Images:
    return Images(sets.load("mnist", context), context.quick)


def _filters(side: int) -> Tensor:
    """Derivatives of a Gaussian in eight directions: a constant, the same for every data set."""
    size, deviation = (7, 1.2) if side >= 20 else (3, 0.6)
    line = torch.arange(size, dtype=torch.float32) - size // 2
    down, across = torch.meshgrid(line, line, indexing="ij")
    bell = torch.exp(-(down.square() + across.square()) / (2 * deviation**2))
    angles = [2 * math.pi * turn / DIRECTIONS for turn in range(DIRECTIONS)]
    bank = torch.stack([bell * (across * math.cos(angle) + down * math.sin(angle)) for angle in angles])
    scaled: Tensor = bank / bank.abs().sum((1, 2), keepdim=True)
    return scaled.unsqueeze(1)


def _edges(images: Tensor, side: int) -> Tensor:
    """The fixed first layer: oriented edges, rectified, averaged over cells, square roots, normalised per image."""
    bank, cell = _filters(side), max(1, side // 7)
    parts = []
    for part in images.reshape(-1, 1, side, side).split(2000):
        edges = F.relu(F.conv2d((part + 1) / 2, bank, padding=bank.shape[-1] // 2))
        parts.append(F.avg_pool2d(edges, cell).sqrt())
    return normalised(torch.cat(parts))


def network(name: NetworkName, side: int, classes: int, seed: int, dropout: bool = False) -> nn.Module:
    """MLP with 64 hidden units, or as printed; CNN learnt throughout; CNN with 16 learnt filters on the fixed edges."""
    if name in ("MLP", PRINTED):
        wide = PRINTED_HIDDEN if side >= 20 else QUICK_HIDDEN  # digits of 8 x 8 stand in for MNIST
        hidden = wide if name == PRINTED else (HIDDEN,)
        return mlp(side * side, classes, hidden, "relu", torch.Generator().manual_seed(seed))
    rate = DROPOUT[name] if dropout else 0.0
    if name == "CNN":
        return learnt_cnn(side, classes, seed, rate)
    grid = side // max(1, side // 7)
    masks = [nn.Dropout(rate)] if dropout else []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        convolution = nn.Conv2d(DIRECTIONS, 16, 3, padding=1)
        return nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), *masks, nn.Linear(16 * grid * grid, classes))


@dataclass(frozen=True)
class Fitted:
    """What one fit gave on the public test part."""

    row: TableRow
    predicted: Tensor
    y: Tensor
    epsilon: float
    seconds_per_epoch: float
    posterior: Posterior
    inputs: Tensor
    plan: Plan

    @cached_property
    def accuracy(self) -> float:
        return metrics.accuracy(self.predicted, self.y)

    @cached_property
    def ece(self) -> float:
        return metrics.ece(self.predicted, self.y)

    @cached_property
    def mce(self) -> float:
        return metrics.mce(self.predicted, self.y)

    def draws_at(self, index: int) -> Tensor:
        """Class probabilities of one test image under every draw: (draws, classes)."""
        return of_classes(self.posterior.predict(self.inputs[index : index + 1])).draws[:, 0]


def planned(row: TableRow, images: Images) -> Plan:
    """The plan of a row."""
    made = plan_for(row, SETTINGS[row.method, row.network], images.found.records, images.quick)
    return made.with_clips(row.clips) if row.clips else made


def network_for(row: TableRow, images: Images, seed: int) -> nn.Module:
    classes = images.found.schema.class_count or 2
    return network(row.network, images.side, classes, seed, row.method == "MC dropout")


def train(row: TableRow, images: Images, context: Context, seed: int) -> Fitted:
    """One fit, and its predictions for the test part."""
    setting = SETTINGS[row.method, row.network]
    x, x_test = images.inputs(row.network)
    found = images.found
    calibrated, module = planned(row, images), network_for(row, images, seed)
    noise_seed = None if context.noise_seed is None else context.noise_seed + seed
    data = PrivateData(x, found.y, schema=found.schema, name=found.name, seed=noise_seed)
    before = time.process_time()
    run = fit(method_for(row, setting, calibrated), module, data, calibrated, seed=seed)
    taken = time.process_time() - before
    predicted = class_probabilities(run.posterior, x_test)
    epochs = calibrated.steps * calibrated.expected_batch / found.records
    return Fitted(
        row, predicted, found.y_test, run.privacy.epsilon(), taken / epochs, run.posterior, x_test, calibrated
    )


@dataclass(frozen=True)
class Scored:
    """The figures of a fit."""

    accuracy: float
    ece: float
    mce: float
    epsilon: float
    seconds_per_epoch: float


def scored(row: TableRow, images: Images, context: Context, seed: int) -> Scored:
    """The figures of a fit alone, which are not made twice where finished parts are kept."""

    def compute() -> Scored:
        found = train(row, images, context, seed)
        return Scored(found.accuracy, found.ece, found.mce, found.epsilon, found.seconds_per_epoch)

    return context.part(Scored, ("dp-bnn", row, seed), compute)


def plan_for(row: TableRow, setting: Setting, records: int, quick: bool = False) -> Plan:
    """Sound noise for the row's epsilon; for SGLD also the clip that the rule gives."""
    if not row.private:
        batch = min(FREE_BATCH, records // 8)
        epochs = row.epochs or FREE_EPOCHS[row.network]
        return plan(delta=DELTA, records=records, batch=batch, epochs=epochs, clip=math.inf, private=False)
    batch = min(row.batch or BATCH, records // 6)
    epochs = row.epochs or EPOCHS[row.network]
    clip = row.clip or setting.clip
    epsilon = row.epsilon if row.noise_multiplier is None else None
    draft = plan(
        delta=DELTA,
        records=records,
        batch=batch,
        epochs=epochs,
        clip=clip or 1.0,
        epsilon=epsilon,
        noise_multiplier=row.noise_multiplier,
    )
    if clip is not None:
        return draft
    mechanism, steps = draft.blocks[0]
    rate = row.rate or setting.rate
    own = draft.expected_batch / mechanism.noise_multiplier * math.sqrt(2 / (records * rate))
    return replace(draft, blocks=((replace(mechanism, clip=own), steps),))


def langevin_noise_multiplier(rate: float, batch: int, clip: float, records: int) -> float:
    """z for which the release's noise is the Langevin noise of a step of that rate: the same rule, solved for z."""
    return batch / clip * math.sqrt(2 / (records * rate))


def method_for(row: TableRow, setting: Setting, calibrated: Plan) -> Method:
    """The method of a row; without privacy the others than SGLD descend with Adam."""
    priors: dict[PriorName, Prior] = {
        "Gaussian": GaussianPrior(row.scale or setting.prior),
        "Laplace": LaplacePrior(LAPLACE_SCALE),
        "none": FlatPrior(),
    }
    prior = priors[row.prior]
    rate = row.rate or (setting.rate if row.private else setting.free_rate)
    draws = DRAWS if row.network in ("MLP", PRINTED) else DRAWS // 2
    if row.method == "SGLD":
        thinning = max(1, math.ceil(0.4 * calibrated.steps / draws))
        return SGLD(prior=prior, step_size=2 * rate / calibrated.records, burn_in=0.6, thinning=thinning)
    options: dict[str, Any] = {"prior": prior, "learning_rate": rate, "optimiser": "sgd" if row.private else "adam"}
    if row.method == "BBP":
        return BBP(**options, initial_deviation=DEVIATION[row.network], predictive_draws=draws)
    if row.method == "MC dropout":
        return MCDropout(**options, dropout_rate=DROPOUT[row.network], predictive_draws=draws)
    return SGD(**options, averaging=0.3)
