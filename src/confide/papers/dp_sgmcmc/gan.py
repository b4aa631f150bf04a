"""A Bayesian GAN by DP-SGHMC (Saatchi and Wilson, NIPS 2017), which learns classes from a few labels.

A discriminator has an output o_k for every class; a fake has the output 0. With Z = sum_k exp(o_k) a record pays

    unlabelled   log(1 + 1 / Z)                      that it is real
    labelled     log(1 + 1 / Z) - log(exp(o_y) / Z)  that it is real, and its class: one gradient, clipped once
    fake         log(1 + Z)                          of a generator: no record, so it joins in `tell` as the prior does

and an unlabelled record may pay for not being sure of a class, whichever it is (Springenberg, ICLR 2016):

    unlabelled   w H(o),  H the entropy of softmax(o)

Generators are to make fakes that are taken for real, and whose mean features (the last hidden layer of a discriminator)
are those of real records. That mean is read from records: it is a query of its own, and paid for. Chains of
discriminators and of generators run side by side by SGHMC. Every discriminator asks for itself, so every chain pays.

Steps are scaled weight by weight by the usual size of the gradients that were told so far, as in pSGLD: the weights of
a generator's layers have gradients of sizes that differ by orders of magnitude, and with one step for all of them the
fakes never come near the records (docs/protocols.md).

The few labelled records answer at every step: rate 1. The others are drawn by coins. A record is one or the other, so
that adding or removing it changes the answers of one of the two sources, and both together are as private as the worse.
No layer has statistics of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from confide.data.schema import Schema
from confide.errors import Refusal
from confide.mechanism.clipping import Recordwise
from confide.mechanism.plan import plan
from confide.papers.dp_sgmcmc.gan_networks import dense_network, features, inputs_of_units, judge_network, renew_view
from confide.privacy.accountants import sound_epsilon
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, StatisticQuery

DELTA = 1e-5
CLASSES = 10
UNLABELLED = CLASSES
MATCHING = 1.0
"""Weight of the squared distance between mean features, in which a record has about length 1."""
MEMORY = 0.999
"""Of the mean square of a weight's gradients: a thousand steps, as is usual for Adam."""
LEAST_SCALE = 0.1
"""Of a weight's usual gradient, in parts of that of its tensor: a unit that is off has none, and must not run away."""
LOOK_EVERY = 25
"""Steps between two positions that predict."""
LABELS = tuple(range(CLASSES + 1))
"""The classes, and one more for records that have none."""


@dataclass(frozen=True)
class GanSetting:
    """Public settings.

    chains          discriminators, and as many generators
    hidden, latent  widths of the hidden layers of all networks, and numbers that a generator starts from
    filters         of a discriminator's convolutions, which see a fresh view at every step; none: dense, no views
    steps, batch    of every chain; unlabelled records and fakes of a step
    matched_every   steps between two queries for the mean features of real records
    rate, generator_rate   of SGHMC in units of a weight's usual gradient, at first; they fall linearly to a tenth
    clip, feature_clip     of a record's gradient and of its features, under privacy
    sure            w of an unlabelled record, after the first third of the steps, in which it grows from nothing
    prior_scale     of a weight, over the root of the inputs of its unit
    kept            last part of the steps whose positions predict
    """

    chains: int = 2
    hidden: int = 200
    latent: int = 30
    filters: tuple[int, ...] = ()
    steps: int = 1500
    batch: int = 400
    matched_every: int = 1
    rate: float = 5e-4
    generator_rate: float = 5e-4
    friction: float = 0.5
    clip: float = 1.0
    feature_clip: float = 1.0
    sure: float = 0.0
    prior_scale: float = 1.0
    kept: float = 0.3


@dataclass(frozen=True)
class Digits:
    """Real-valued records, of which few are labelled.

    bounded   whether a record's numbers lie in [-1, 1], as pixels do
    """

    x: Tensor
    y: Tensor
    labelled: Tensor
    x_test: Tensor
    y_test: Tensor
    bounded: bool


@dataclass(frozen=True)
class GanRun:
    """What the chains left: chances of the test records' classes, records that generators make, and the price."""

    chances: Tensor
    samples: Tensor
    epsilon: float

    def accuracy(self, y: Tensor) -> float:
        return float((self.chances.argmax(1) == y).double().mean())


@dataclass
class DiscriminatorLoss:
    """One loss per record: that it is real, and its class with it, or `sure` times the entropy of its class."""

    sure: float = 0.0

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        total = outputs.logsumexp(1)
        own = outputs.gather(1, y.long().clamp(max=CLASSES - 1)[:, None])[:, 0]
        logs = outputs - total[:, None]
        entropy = -(logs.exp() * logs).sum(1)
        return F.softplus(-total) + torch.where(y < CLASSES, total - own, self.sure * entropy)


def fake_loss(outputs: Tensor) -> Tensor:
    return F.softplus(outputs.logsumexp(1))


@dataclass
class SghmcChain:
    """Position and velocity of one network, with g a mean gradient and G = 1 / (its usual size), weight by weight:

    v' = (1 - a) v - h G g + N(0, 2 a h G / n less what the release brought),    theta' = theta + v'
    """

    network: nn.Sequential
    velocity: Tensor
    square: Tensor
    inputs: Tensor
    told: int = 0

    @classmethod
    def of(cls, network: nn.Sequential) -> SghmcChain:
        blank = torch.zeros_like(parameters_to_vector(network.parameters()))
        return cls(network, blank, blank.clone(), inputs_of_units(network))

    def tell(self, gradient: Tensor, brought: float, rate: float, setting: GanSetting, records: int) -> None:
        """`gradient`: of the mean loss, with noise of deviation `brought` in it; the prior joins here, unclipped."""
        position = parameters_to_vector(self.network.parameters()).detach()
        gradient = gradient + self.inputs * position / (setting.prior_scale**2 * records)
        self.told += 1
        self.square = MEMORY * self.square + (1 - MEMORY) * gradient.square()
        scale = self._scale()
        missing = 2 * setting.friction * rate * scale / records - (rate * scale * brought).square()
        noise = missing.clamp(min=0).sqrt() * torch.randn_like(scale)
        self.velocity = (1 - setting.friction) * self.velocity - rate * scale * gradient + noise
        vector_to_parameters(position + self.velocity, self.network.parameters())

    def _scale(self) -> Tensor:
        """G, from what was told: a function of releases and fakes."""
        usual = (self.square / (1 - MEMORY**self.told)).sqrt()
        sizes = [parameter.numel() for parameter in self.network.parameters()]
        least = [part.square().mean().sqrt().expand(len(part)) for part in usual.split(sizes)]
        return (usual + LEAST_SCALE * torch.cat(least)).clamp(min=1e-12).reciprocal()


class DigitsReader:
    """What is asked of records: noisy mean gradients and mean features, all of them paid for before the first.

    epsilon         None: not private
    labels_public   whether the labelled records are public: then their gradient is free, and has no noise
    """

    def __init__(
        self, data: Digits, setting: GanSetting, epsilon: float | None, labels_public: bool, seed: int | None
    ) -> None:
        self.setting, self.labels_public, self.loss = setting, labels_public, DiscriminatorLoss()
        self.labelled = (data.x[data.labelled], data.y[data.labelled])
        others = torch.ones(len(data.x), dtype=torch.bool)
        others[data.labelled] = False
        x, y = data.x[others], torch.full((int(others.sum()),), UNLABELLED)
        self.unlabelled = PrivateData(x, y, schema=Schema(len(x), LABELS), name="unlabelled", seed=seed)
        self.few = PrivateData(*self.labelled, schema=Schema(len(self.labelled[1]), LABELS), name="labelled", seed=seed)
        self.count = len(self.labelled[1])
        asked = setting.chains * setting.steps
        means = setting.chains * math.ceil(setting.steps / setting.matched_every)
        noise: dict[str, Any] = {"private": False} if epsilon is None else {"epsilon": epsilon}
        clip = math.inf if epsilon is None else setting.clip
        many = plan(delta=DELTA, records=len(x), batch=setting.batch, steps=asked + means, clip=clip, **noise)
        every = plan(delta=DELTA, records=self.count, steps=asked, sampling="full-batch", clip=clip, **noise)
        self.drawn, self.whole = many.mechanism, every.mechanism
        self.means = self.drawn if epsilon is None else replace(self.drawn, clip=setting.feature_clip)
        self.receipt = self.unlabelled.charge([(self.drawn, asked), (self.means, means)], "a Bayesian GAN")
        self.few_receipt = None if labels_public else self.few.charge([(self.whole, asked)], "its labelled records")

    @property
    def epsilon(self) -> float:
        """A record is labelled or not, so that it is in one of the two sources."""
        found = sound_epsilon(self.receipt.events, DELTA)
        return found if self.few_receipt is None else max(found, sound_epsilon(self.few_receipt.events, DELTA))

    def gradient(self, network: nn.Sequential) -> tuple[Tensor, float]:
        """Of the mean loss over labelled records and that over the others, and the deviation of its noise."""
        query = GradientQuery(network, self.loss)
        release = self.unlabelled.answer(query, self.drawn, self.receipt)
        found, variance = release.sum / release.expected_batch, (release.noise_std / release.expected_batch) ** 2
        if self.few_receipt is None:
            x, y = self.labelled
            return found + _gradient(network, self.loss(network(x), y).mean()), math.sqrt(variance)
        few = self.few.answer(query, self.whole, self.few_receipt)
        return found + few.sum / self.count, math.sqrt(variance + (few.noise_std / self.count) ** 2)

    def mean_features(self, network: nn.Sequential) -> Tensor:
        def statistic(x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                return features(network, x)

        query = StatisticQuery(Recordwise(statistic), self.setting.hidden, torch.float32)
        release = self.unlabelled.answer(query, self.means, self.receipt)
        return release.sum / release.expected_batch


def _gradient(network: nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(network.parameters()))])


def fitted(
    data: Digits,
    setting: GanSetting,
    epsilon: float | None,
    *,
    labels_public: bool = False,
    seed: int = 0,
    noise_seed: int | None = None,
    progress: Any = None,
) -> GanRun:
    """Run all chains; `epsilon` None: without privacy."""
    if len(data.labelled) < 1:
        raise Refusal("labelled: none; a GAN learns classes from some labelled records")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        reader = DigitsReader(data, setting, epsilon, labels_public, noise_seed)
        size = data.x.shape[1]
        judges = [_judge(size, setting) for _ in range(setting.chains)]
        makers = [
            SghmcChain.of(dense_network(setting.latent, setting.hidden, size, nn.Tanh() if data.bounded else None))
            for _ in range(setting.chains)
        ]
        real: list[Tensor] = []
        chances, looks = torch.zeros(len(data.x_test), CLASSES), 0
        for step in range(setting.steps):
            share = 1 - 0.9 * step / setting.steps
            reader.loss.sure = setting.sure * min(1.0, 3 * step / setting.steps)
            for judge in judges:
                renew_view(judge.network)
                _tell_judge(judge, makers, reader, share * setting.rate, len(data.x))
            if step % setting.matched_every == 0:
                real = [reader.mean_features(judge.network) for judge in judges]
            for maker in makers:
                _tell_maker(maker, judges, real, share * setting.generator_rate, setting, len(data.x))
            if _predicts(step, setting):
                chances += sum(_chances(judge.network, data.x_test) for judge in judges)
                looks += len(judges)
            if progress is not None:
                progress(step + 1, setting.steps)
        with torch.no_grad():
            samples = torch.cat([maker.network(torch.randn(20, setting.latent)) for maker in makers])
    return GanRun(chances / max(1, looks), samples, reader.epsilon)


def _judge(size: int, setting: GanSetting) -> SghmcChain:
    return SghmcChain.of(judge_network(size, setting.hidden, CLASSES, setting.filters))


def _predicts(step: int, setting: GanSetting) -> bool:
    """Whether the position after this step is one of those that predict."""
    return step >= (1 - setting.kept) * setting.steps and (setting.steps - 1 - step) % LOOK_EVERY == 0


def _chances(network: nn.Sequential, x: Tensor) -> Tensor:
    """Of the classes, under a fresh view, in parts that fit into memory."""
    renew_view(network)
    with torch.no_grad():
        return torch.cat([network(part).softmax(1) for part in x.split(1000)])


def _fakes(makers: list[SghmcChain], count: int) -> Tensor:
    share = max(1, count // len(makers))
    return torch.cat([maker.network(torch.randn(share, _inputs(maker.network))) for maker in makers])


def _inputs(network: nn.Sequential) -> int:
    first = network[0]
    assert isinstance(first, nn.Linear)  # as `_network` makes it
    return first.in_features


def _tell_judge(judge: SghmcChain, makers: list[SghmcChain], reader: DigitsReader, rate: float, records: int) -> None:
    """A release, and the fakes of all generators, which no record had a part in."""
    gradient, brought = reader.gradient(judge.network)
    with torch.no_grad():
        fakes = _fakes(makers, reader.setting.batch)
    gradient = gradient + _gradient(judge.network, fake_loss(judge.network(fakes)).mean())
    judge.tell(gradient, brought, rate, reader.setting, records)


def _tell_maker(
    maker: SghmcChain, judges: list[SghmcChain], real: list[Tensor], rate: float, setting: GanSetting, records: int
) -> None:
    """Post-processing: discriminators and mean features are what was released, and the latent numbers are fresh."""
    fakes = _fakes([maker], setting.batch)
    loss = torch.zeros(())
    for judge, mean in zip(judges, real, strict=True):
        loss = loss + F.softplus(-judge.network(fakes).logsumexp(1)).mean()
        loss = loss + MATCHING * (features(judge.network, fakes).mean(0) - mean).square().sum()
    maker.tell(_gradient(maker.network, loss / len(judges)), 0.0, rate, setting, records)


def supervised_only(data: Digits, setting: GanSetting, seed: int) -> float:
    """The floor where labels are public: the same network, sampler and views on the labelled records alone, for free,
    its late positions averaged as those of the whole are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        chain = _judge(data.x.shape[1], setting)
        x, y = data.x[data.labelled], data.y[data.labelled]
        chances = torch.zeros(len(data.x_test), CLASSES)
        for step in range(setting.steps):
            renew_view(chain.network)
            share = 1 - 0.9 * step / setting.steps
            gradient = _gradient(chain.network, F.cross_entropy(chain.network(x), y.long()))
            chain.tell(gradient, 0.0, share * setting.rate, setting, len(data.x))
            if _predicts(step, setting):
                chances += _chances(chain.network, data.x_test)
        return float((chances.argmax(1) == data.y_test).double().mean())


def labelled_rows(y: Tensor, each: int, seed: int) -> Tensor:
    """`each` records of every class, at random."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    return torch.cat([order[y[order] == label][:each] for label in range(CLASSES)])


def blocks(samples: Tensor, across: int) -> Iterator[Tensor]:
    """Rows of pictures, each as many pictures wide as `across`."""
    side = math.isqrt(samples.shape[1])
    for row in samples.reshape(-1, side, side).split(across):
        yield torch.cat(list(row), 1)
