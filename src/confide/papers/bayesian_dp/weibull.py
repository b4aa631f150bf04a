"""Figures 1 to 4: how the rules behave on gradients with heavy tails, drawn anew at every step.

A gradient has 1000 entries from a Weibull distribution of shape 0.5. C is a quantile of its norm, the noise has
standard deviation 2 C sigma as in section V-A. The paper's rules look at distances between pairs of gradients in
units of 2 C, the most that a pair can be apart; the sound rule and PLD look at the same mechanism from norms in units
of C.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confide.papers.base import Cell, Context, Figure, PaperOutcome, PaperTable
from confide.papers.bayesian_dp.rules import DELTA, KINDS, RULES, epsilon, finite, plain_numbers
from confide.privacy import bayesian
from confide.privacy.accountants.pld import PLD
from confide.privacy.bayesian import Distances
from confide.privacy.events import GaussianEvent

Array = NDArray[np.float64]

SHAPE, RATE = 0.5, 1e-3
CURVES = ("DP, moments (paper)", "product (paper's rule)", "Hoelder", "sound", "DP by PLD")


@dataclass(frozen=True)
class Sizes:
    """How much is drawn: entries of a gradient, gradients in a batch, steps, fresh records."""

    entries: int = 1000
    batch: int = 50
    steps: int = 100
    longest: int = 1000
    fresh: int = 2000
    pool: int = 20_000


QUICK = Sizes(entries=100, batch=20, steps=20, longest=100, fresh=200, pool=2000)


@dataclass(frozen=True, eq=False)
class Gradients:
    """What was drawn: gradients of each step for pairs, and norms of one population for records."""

    sizes: Sizes
    norms: Array
    batches: tuple[Array, ...]
    known: dict[tuple[float, float, int], tuple[float, float]] = field(default_factory=dict)

    def bound(self, quantile: float) -> float:
        return float(np.quantile(self.norms, quantile))

    def pairs(self, clip: float, sigma: float, clipped: bool, steps: int) -> list[Distances]:
        from scipy.spatial.distance import pdist

        event = GaussianEvent(sigma, "poisson", RATE)
        found = []
        for gradients in self.batches[:steps]:
            norms = np.linalg.norm(gradients, axis=1)
            scale = np.minimum(1.0, clip / norms)[:, None] if clipped else 1.0
            found.append(Distances(event, pdist(gradients * scale) / (2 * clip)))
        # the same batches again where more steps are asked for than were drawn
        return (found * -(-steps // len(found)))[:steps]

    def sound(self, clip: float, sigma: float, steps: int) -> tuple[float, float]:
        """(sound, DP by PLD), of clipped gradients: noise 2 C sigma is 2 sigma in units of one record's bound."""
        key = (clip, sigma, steps)
        if key not in self.known:
            self.known[key] = self._sound(*key)
        return self.known[key]

    def _sound(self, clip: float, sigma: float, steps: int) -> tuple[float, float]:
        random = np.random.default_rng(1)
        event = GaussianEvent(2 * sigma, "poisson", RATE, steps)
        norms = random.choice(self.norms, (self.sizes.fresh, steps))
        sequences = bayesian.sequences_of(np.minimum(norms / clip, 1.0), event)
        found = bayesian.averaged(sequences, DELTA, failure=DELTA / 10).release(acknowledge="made-up gradients")
        return finite(found.bayesian.epsilon), finite(found.dp.epsilon)


def draw(sizes: Sizes) -> Gradients:
    random = np.random.default_rng(0)
    norms = [
        np.linalg.norm(random.weibull(SHAPE, (1000, sizes.entries)), axis=1) for _ in range(-(-sizes.pool // 1000))
    ]
    batches = tuple(random.weibull(SHAPE, (sizes.batch, sizes.entries)) for _ in range(sizes.steps))
    return Gradients(sizes, np.concatenate(norms), batches)


@lru_cache(maxsize=64)
def moments_accountant(sigma: float, steps: int) -> float:
    """The paper's DP baseline: every distance at its largest."""
    worst = Distances(GaussianEvent(sigma, "poisson", RATE, steps), np.ones(1), np.ones(1))
    return epsilon(bayesian.product([worst], DELTA, mean="exact"))


def rules(drawn: Gradients, quantile: float, sigma: float, steps: int, clipped: bool) -> tuple[float, ...]:
    """One value for each of CURVES; the last two are of clipped gradients in any case."""
    clip = drawn.bound(quantile)
    pairs = drawn.pairs(clip, sigma, clipped, steps)
    return (
        moments_accountant(sigma, steps),
        epsilon(bayesian.product(pairs, DELTA)),
        epsilon(bayesian.hoelder(pairs, DELTA)),
        *drawn.sound(clip, sigma, steps),
    )


def run(context: Context) -> PaperOutcome:
    """Figures 1 to 4 with their tables."""
    sizes = QUICK if context.quick else Sizes()
    context.progress("weibull", 0, 4)
    drawn = draw(sizes)
    by_noise, tables_noise = _noise(drawn, context)
    by_steps, table_steps = _steps(drawn, context)
    context.progress("weibull", 3, 4)
    by_order, table_order = _orders(context)
    return PaperOutcome((*tables_noise, table_steps, table_order), (*by_noise, by_steps, by_order))


def _noise(drawn: Gradients, context: Context) -> tuple[tuple[Figure, Figure], tuple[PaperTable, PaperTable]]:
    quantiles = (0.05, 0.95) if context.quick else (0.05, 0.5, 0.95)
    sigmas = (0.7, 1.5) if context.quick else (0.5, 0.7, 1.0, 1.4, 2.0)
    steps = drawn.sizes.steps
    figures, tables = [], []
    for number, clipped in ((1, True), (2, False)):
        context.progress("weibull", number, 4)
        values = {q: [rules(drawn, q, sigma, steps, clipped) for sigma in sigmas] for q in quantiles}
        how = "clipped" if clipped else "not clipped for the paper's rules"
        rows: list[tuple[Cell, ...]] = []
        for quantile in quantiles:
            rows += [
                (f"{quantile:g}", sigma, baseline, None, *rest)
                for sigma, (baseline, *rest) in zip(sigmas, values[quantile], strict=True)
            ]
        title = f"Figure {number}: epsilon against sigma, gradients {how}, {steps} steps, rate {RATE:g}"
        columns = ("C at the quantile", "sigma", "DP, moments (paper)", *RULES)
        tables.append(PaperTable(title, columns, tuple(rows), _NOTES[clipped]))
        panels = [(f"C at the {q:g}-quantile", sigmas, values[q]) for q in quantiles]
        drawing = _panels(panels, "sigma", logarithmic_x=False)
        figures.append(Figure(f"figure{number}_noise", title, drawing, (3.4 * len(quantiles), 3.6)))
    return (figures[0], figures[1]), (tables[0], tables[1])


_NOTES = {
    True: (
        "The paper prints no numbers for this figure, so its column is empty. The mechanism adds noise of 2 C sigma. "
        "The paper takes that as a multiplier of sigma for pairs, at most 2 C apart; PLD takes it as 2 sigma for one "
        "record, added or removed, which moves the sum by at most C: at the same noise the sound DP number lies below "
        "the paper's Bayesian one.",
        *KINDS,
    ),
    False: (
        "Without clipping there is neither a DP nor a sound Bayesian number; both are shown for the clipped gradients.",
    ),
}


def _steps(drawn: Gradients, context: Context) -> tuple[Figure, PaperTable]:
    quantiles = (0.25, 0.75) if context.quick else (0.05, 0.25, 0.5, 0.75)
    longest = drawn.sizes.longest
    counts = tuple(int(longest * share) for share in (0.1, 0.3, 1.0))
    values = {q: [rules(drawn, q, 1.0, steps, False) for steps in counts] for q in quantiles}
    rows: list[tuple[Cell, ...]] = []
    for quantile in quantiles:
        rows += [
            (f"{quantile:g}", steps, baseline, None, *rest)
            for steps, (baseline, *rest) in zip(counts, values[quantile], strict=True)
        ]
    title = "Figure 3: epsilon over the steps, sigma 1, gradients not clipped for the paper's rules"
    columns = ("noise at the quantile", "steps", "DP, moments (paper)", *RULES)
    again = f"Pairs come from {drawn.sizes.steps} batches, used again in turn for longer runs."
    table = PaperTable(title, columns, tuple(rows), (*_NOTES[False], again))
    panels = [(f"noise at the {q:g}-quantile", counts, values[q]) for q in quantiles]
    return Figure("figure3_steps", title, _panels(panels, "steps", True), (3.2 * len(quantiles), 3.6)), table


def _orders(context: Context) -> tuple[Figure, PaperTable]:
    """Fixed distances C, noise 1, q = 64 / 60 000, 10 000 steps, at every order."""
    steps, rate = 10_000, 64 / 60_000
    highest = 128 if context.quick else 1024
    orders = np.array([order for order in bayesian.WHOLE_ORDERS if order <= highest])
    curves: dict[float, Array] = {}
    rows: list[tuple[Cell, ...]] = []
    for clip in (0.1, 0.3, 0.5, 1.0):
        costs = [float(bayesian.log_moment(order, clip, 1.0, rate)) for order in orders]
        curves[clip] = (steps * np.array(costs) - np.log(DELTA)) / orders
        best = int(np.argmin(curves[clip]))
        sound = PLD().epsilon([GaussianEvent(1.0 / clip, "poisson", rate, steps)], DELTA).epsilon
        low = float(curves[clip][orders <= 32].min())
        rows.append((f"{clip:g}", int(orders[best]), None, float(curves[clip][best]), low, sound))
    title = f"Figure 4: epsilon against the order lambda, {steps} steps, q = {rate:.3g}, sigma 1"
    columns = ("C", "best order", "paper", "at the best order", "orders to 32 only", "DP by PLD")
    notes = ("Distances are fixed, so this is the moments accountant itself. Weak signals need high orders.",)

    def drawing(canvas: Any) -> None:
        axes = canvas.subplots()
        for clip, values in curves.items():
            axes.plot(orders, np.minimum(values, 1e3), label=f"C = {clip:g}")
        axes.set(xscale="log", yscale="log", ylim=(5e-3, 1e3), xlabel="order lambda", ylabel="epsilon")
        plain_numbers(axes)
        axes.legend()

    return Figure("figure4_orders", title, drawing), PaperTable(title, columns, tuple(rows), notes)


def _panels(panels: list[Any], label: str, logarithmic_x: bool) -> Any:
    def drawing(canvas: Any) -> None:
        every = canvas.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (title, places, values) in zip(every, panels, strict=True):
            for number, name in enumerate(CURVES):
                axes.plot(places, [row[number] for row in values], marker=".", label=name)
            axes.set(title=title, xlabel=label, yscale="log", xscale="log" if logarithmic_x else "linear")
            plain_numbers(axes)
        every[0].set_ylabel("epsilon")
        every[-1].legend(fontsize=8)

    return drawing
