"""What every experiment on Bayesian DP shares: a watched run, and the run priced by each rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from confide.data.schema import Schema
from confide.mechanism.plan import Plan
from confide.methods.base import Method
from confide.models.predictive import ClassPredictive
from confide.papers.base import Cell, Context, PaperMeasure
from confide.privacy import bayesian
from confide.privacy.bayesian import Attack, Confidential, Distances, Sequences
from confide.running.fit import Run, fit
from confide.sources.hold_out import HoldOut, Watch
from confide.sources.private_data import PrivateData

DELTA = 1e-5
RULES = ("paper", "product (paper's rule)", "Hoelder", "sound", "DP by PLD")
WORD = "the records of a public benchmark"
KINDS = (
    "DP by PLD holds for every record whatever. The others are data-dependent and no DP guarantee: they are meant for "
    "records drawn like these and assume that distances along the run do not depend on whether a record took part.",
    "Product and Hoelder bound means by Student-t on the records of each batch, which fails for outliers not seen; the "
    "product rule also multiplies expectations over the same record, which makes it too small. Sound: delta averaged "
    "over fresh records that were never trained on, with a bound that holds for every distribution.",
)


@dataclass(frozen=True, eq=False)
class Split:
    """Records to train on, fresh ones to look at along the run, and a test part for accuracy."""

    name: str
    x: Tensor
    y: Tensor
    x_fresh: Tensor
    y_fresh: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    notes: tuple[str, ...] = ()

    @property
    def records(self) -> int:
        return len(self.x)

    @property
    def features(self) -> int:
        return self.x.shape[1]

    def accuracy(self, labels: Tensor) -> float:
        return float((labels == self.y_test).double().mean())


@dataclass(frozen=True)
class RulePrices:
    """One run under every rule, and what an attacker can do."""

    product: float
    hoelder: float
    sound: float
    dp: float
    attack_dp: Attack
    attack_bayesian: Attack


@dataclass(frozen=True, eq=False)
class Watched:
    """A finished run with what was watched; `looks` holds fresh records' sequences after some of the steps."""

    run: Run
    accuracy: float
    distances: list[Distances]
    looks: dict[int, Sequences] = field(default_factory=dict)

    @cached_property
    def prices(self) -> RulePrices:
        return self.prices_after(self.run.plan.steps)

    def prices_after(self, steps: int) -> RulePrices:
        """The prices of the first steps alone."""
        return priced(self.distances[:steps], self.looks[steps])


def priced(distances: Sequence[Distances], sequences: Sequences, delta: float = DELTA) -> RulePrices:
    """All rules on one run."""
    averaged = bayesian.averaged(sequences, delta, failure=delta / 10).release(acknowledge=WORD)
    return RulePrices(
        epsilon(bayesian.product(distances, delta)),
        epsilon(bayesian.hoelder(distances, delta)),
        finite(averaged.bayesian.epsilon),
        finite(averaged.dp.epsilon),
        averaged.attack["dp"],
        averaged.attack["bayesian"],
    )


def epsilon(estimate: Confidential) -> float:
    """The Bayesian number of an estimate from public records."""
    return finite(estimate.release(acknowledge=WORD).bayesian.epsilon)


def finite(value: float | None) -> float:
    return float("inf") if value is None else value


def watched_fit(
    method: Method,
    module: nn.Module,
    split: Split,
    plan: Plan,
    context: Context,
    seed: int,
    *,
    marks: Sequence[int] = (),
    label: str = "",
    hold_out: bool = True,
) -> Watched:
    """Fit with the accountant carried along; sequences of fresh records are kept after the steps in `marks`."""
    watch = Watch()
    source: Any = private(split, context, seed, watch)
    held = HoldOut(source, split.x_fresh, split.y_fresh, seed=seed) if hold_out else None
    looks: dict[int, Sequences] = {}
    kept = {*marks, plan.steps}

    def progress(done: int, total: int) -> None:
        context.progress(label or split.name, done, total)
        if held is not None and done in kept:
            looks[done] = held.sequences()

    run = fit(method, module, held or source, plan, seed=seed, progress=progress)
    labels = class_probabilities(run, split.x_test).argmax(1)
    return Watched(run, split.accuracy(labels), watch.distances() if hold_out else [], looks)


def class_probabilities(run: Run, x: Tensor) -> Tensor:
    found = run.posterior.predict(x)
    assert isinstance(found, ClassPredictive)
    return found.probabilities


def private(split: Split, context: Context, seed: int, watch: Any = None) -> PrivateData:
    schema = Schema(records=split.records, classes=split.classes)
    noise = None if context.noise_seed is None else context.noise_seed + 2 * seed
    return PrivateData(split.x, split.y, schema=schema, name=split.name, watch=watch, seed=noise)


def rule_cells(paper: Cell, prices: Sequence[RulePrices]) -> tuple[Cell, ...]:
    """One cell for each of RULES."""
    names = ("product", "hoelder", "sound", "dp")
    return (paper, *(measured([getattr(each, name) for each in prices]) for name in names))


def measured(values: Sequence[float], digits: int = 3) -> Cell:
    """A single cell; an infinite value makes it infinite."""
    if any(value == float("inf") for value in values):
        return float("inf")
    return PaperMeasure(tuple(values), digits if max(values) < 100 else 0)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def plain_numbers(axes: Any) -> None:
    """Numbers such as 0.1 on logarithmic axes: the style of the figures has no formulas in its texts."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        if scale == "log":
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
