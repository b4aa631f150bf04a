"""Adult, Bayesian logistic regression: accuracy against epsilon for the samplers and their baselines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from confide.papers import sets
from confide.papers.base import COLOURS, MARKERS, Cell, Context, Figure, Measured, Outcome, Table

DELTA = 1e-4
EPSILONS = (0.05, 0.1, 0.2, 0.5, 1.0)
TITLES = {
    "sgld": "SGLD",
    "sghmc": "SGHMC",
    "sgnht": "SGNHT",
    "dp-vi": "DP-VI",
    "hybrid": "hybrid",
    "ops": "OPS",
}
LARGEST_RATE, NOISE_OF_ALL_STEPS, FRICTION = 2.0, 0.6, 0.1
WIDTH = 10.0
"""W = R D of the posterior draws: by how much one record's log-likelihood may vary."""


@dataclass(frozen=True)
class Problem:
    """Records with a public feature map, and the one schedule that all methods on noisy sums share."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    found: sets.Set
    context: Context
    batch: int
    steps: int

    @property
    def features(self) -> int:
        return self.x.shape[1]

    @cached_property
    def feature_bound(self) -> float:
        """R: every input lies in [-1, 1], and of a categorical column's inputs at most one is not zero."""
        widths = [_inputs(column) for column in self.found.schema.columns]
        return math.sqrt(sum(widths) + 1)

    def private(self) -> Any:
        from confide.boundary import PrivateData

        seed = self.context.noise_seed
        return PrivateData(self.x, self.y, schema=self.found.schema, name=self.found.name, seed=seed)

    def plan(self, epsilon: float | None, **options: Any) -> Any:
        from confide.plan import plan

        sizes = {"records": self.found.records, "batch": self.batch, "steps": self.steps, **options}
        if epsilon is None:
            return plan(delta=DELTA, private=False, clip=math.inf, **sizes)
        return plan(delta=DELTA, epsilon=epsilon, clip=1.0, **sizes)

    def accuracy(self, posterior: Any) -> float:
        return float((posterior.predict(self.x_test).labels == self.y_test).double().mean())


def load(context: Context) -> Problem:
    found = sets.load("adult", context)
    x, x_test = (public_map(part, found.schema.columns) for part in (found.x, found.x_test))
    batch, steps = (500, 60) if context.quick else (8000, 400)
    return Problem(x, found.y, x_test, found.y_test, found, context, batch, steps)


def public_map(x: Tensor, columns: Any) -> Tensor:
    """A map of each record by itself, from what the columns mean and not from any record.

    Amounts of money spread over many orders of magnitude: capital_gain and capital_loss become their logarithm and
    their square root, each scaled to [0, 1] by the declared bounds. fnlwgt, the census's sampling weight, says nothing
    about a person and is left out.
    """
    parts, start = [], 0
    for column in columns:
        part = x[:, start : start + column.width]
        start += column.width
        if column.name in ("capital_gain", "capital_loss"):
            high = column.bounds[1]
            amount = (part + 1) / 2 * high
            part = torch.cat([amount.log1p() / math.log1p(high), (amount / high).sqrt()], 1)
        if column.name != "fnlwgt":
            parts.append(part)
    return torch.cat(parts, 1)


def _inputs(column: Any) -> int:
    """The largest squared norm of a column's inputs."""
    if column.name == "fnlwgt":
        return 0
    return 2 if column.name in ("capital_gain", "capital_loss") else 1


def mean_rate(plan: Any) -> float:
    """The step on the mean gradient: as long as the noise of all steps adds up to 0.6 in a coefficient, at most 2."""
    noise = plan.mechanism.noise_std
    if noise == 0:
        return LARGEST_RATE
    walk: float = noise / plan.expected_batch * math.sqrt(plan.steps)
    return min(LARGEST_RATE, NOISE_OF_ALL_STEPS / walk)


def sampler(name: str, plan: Any, **options: Any) -> Any:
    """The three samplers at the same speed: momentum adds up 1 / friction steps, so theirs are that much shorter."""
    from confide.methods.sghmc import SGHMC
    from confide.methods.sgld import SGLD
    from confide.methods.sgnht import SGNHT

    rate, records = mean_rate(plan), plan.records
    if name == "sgld":
        return SGLD(step_size=2 * rate / records, **options)
    step = FRICTION * rate / records
    if name == "sghmc":
        return SGHMC(step_size=step, friction=FRICTION, **options)
    return SGNHT(step_size=math.sqrt(step), diffusion=FRICTION / math.sqrt(step), **options)


def fitted(problem: Problem, name: str, epsilon: float | None, seed: int, **options: Any) -> Any:
    """A run of one of the methods on noisy sums."""
    from confide.fit import fit
    from confide.methods.bbp import BBP
    from confide.models.likelihoods import Bernoulli
    from confide.models.networks import logistic

    plan = problem.plan(epsilon, **({} if epsilon is not None else {"steps": 4 * problem.steps}))
    method = BBP() if name == "dp-vi" else sampler(name, plan, **options)
    return fit(method, logistic(problem.features), problem.private(), plan, likelihood=Bernoulli(), seed=seed)


def drawing(problem: Problem, epsilon: float) -> Any:
    """The mechanism of posterior draws; the prior keeps most draws off the edge of the ball."""
    from confide.mechanism.posterior_sampling import PosteriorSampling

    radius = WIDTH / problem.feature_bound
    scale = 0.7 * radius / math.sqrt(problem.features + 1)
    return PosteriorSampling(epsilon, radius, problem.feature_bound, prior_scale=scale, tolerance=1e-8)


def one_sample(problem: Problem, epsilon: float, seed: int) -> Any:
    from confide.methods.ops import one_posterior_sample

    return one_posterior_sample(problem.private(), problem.features, drawing(problem, epsilon), delta=DELTA)


def hybrid_sample(problem: Problem, epsilon: float, seed: int) -> Any:
    """Half of the budget for the draw, half for SGLD from there on."""
    from confide.methods.ops import hybrid

    plan = problem.plan(epsilon / 2)
    mechanism, method = drawing(problem, epsilon / 2), sampler("sgld", plan)
    return hybrid(problem.private(), problem.features, mechanism, method, plan, seed=seed)


def runner(name: str) -> Callable[[Problem, float, int], Any]:
    if name == "ops":
        return one_sample
    if name == "hybrid":
        return hybrid_sample
    return lambda problem, epsilon, seed: fitted(problem, name, epsilon, seed)


def run(context: Context) -> Outcome:
    problem = load(context)
    epsilons = (1.0, 4.0) if context.quick else EPSILONS
    rows: list[tuple[Cell, ...]] = []
    found: dict[tuple[str, float], Measured] = {}
    total = len(epsilons) * len(TITLES) * len(context.seeds)
    baseline = _measured(problem, [fitted(problem, "sgld", None, seed) for seed in context.seeds])
    for epsilon in epsilons:
        for name, title in TITLES.items():
            runs = []
            for seed in context.seeds:
                runs.append(runner(name)(problem, epsilon, seed))
                context.progress("Adult", len(found) * len(context.seeds) + len(runs), total)
            found[name, epsilon] = _measured(problem, runs)
            gap = Measured(tuple(100 * (baseline.mean - one) for one in found[name, epsilon].values), 2)
            rows.append((title, epsilon, _paper(name, epsilon), found[name, epsilon], gap, runs[0].privacy.epsilon()))
    rows.append(("SGLD, not private", math.inf, "dashed line of Figure 3", baseline, 0.0, math.inf))
    table = Table(
        f"Adult, Bayesian logistic regression, delta {DELTA:g}: test accuracy",
        ("method", "epsilon asked for", "paper", "ours", "points below not private", "sound epsilon"),
        tuple(rows),
        (*_notes(problem), *problem.found.notes),
    )
    return Outcome((table,), (_accuracy_figure(found, baseline, epsilons), _trace_figure(problem, epsilons)))


def _measured(problem: Problem, runs: list[Any]) -> Measured:
    return Measured(tuple(problem.accuracy(one.posterior) for one in runs))


def _paper(name: str, epsilon: float) -> Cell:
    """The paper gives a figure without numbers, and one sentence on it."""
    return "as not private" if name == "sgld" and epsilon >= 0.08 else None


def _notes(problem: Problem) -> tuple[str, ...]:
    return (
        f"All but OPS: clip 1, Poisson batches of {problem.batch} on average, {problem.steps} steps, second half kept; "
        "the step on the mean gradient is the longest at which the noise of all steps together stays at 0.6 in a "
        "coefficient, at most 2 (SGLD, SGHMC, SGNHT), and by its own default rule for DP-VI (Bayes by Backprop on the "
        "linear model). At small epsilon the release carries more noise than the step needs: the chains run above "
        "temperature 1.",
        "Not private: SGLD without clip and noise, four times the steps at 2; it is not the optimum, which penalised "
        "logistic regression puts at 85.2 % of the training part. The hybrid is the same SGLD from a better start: if "
        "epsilon leaves room for both, from 0.2 on, the two are within a standard deviation of each other.",
        "These settings were compared on training accuracy at epsilon 0.1, which is tuning on the private part and was "
        "not paid for; the official test part was not used for choosing. The feature map (logarithm and square root of "
        "the two capital columns, fnlwgt left out) follows from what the columns mean.",
        "OPS: one draw from a tempered posterior on a ball where no record's log-likelihood varies by more than "
        f"{WIDTH:g}, a pure epsilon; hybrid: half of epsilon for such a draw, half for SGLD from there on. Both are "
        "priced for add/remove, a factor of two and more below the published constants.",
        "The paper plots this experiment (its Figure 3) without numbers, by a moments accountant and a sampler at half "
        "the temperature it states; it says that DP-SGLD equals plain SGLD from epsilon 0.08 on. Its delta is above 1 "
        "over the number of records, where a record might be published outright: we keep it for comparison only.",
    )


def _accuracy_figure(found: dict[tuple[str, float], Measured], baseline: Measured, epsilons: Any) -> Figure:
    def draw(canvas: Any) -> None:
        axes = canvas.subplots()
        for place, (name, title) in enumerate(TITLES.items()):
            cells = [found[name, epsilon] for epsilon in epsilons]
            means, spread = [cell.mean for cell in cells], [cell.deviation or 0.0 for cell in cells]
            axes.errorbar(epsilons, means, spread, color=COLOURS[place], marker=MARKERS[place], label=title, capsize=2)
        axes.axhline(baseline.mean, color="black", linestyle="--", linewidth=1, label="SGLD, not private")
        axes.set(xscale="log", xlabel=f"sound epsilon (delta {DELTA:g})", ylabel="test accuracy")
        axes.set_xticks(list(epsilons), [f"{epsilon:g}" for epsilon in epsilons])
        axes.minorticks_off()
        axes.legend(ncols=2, fontsize=9)

    return Figure("adult_accuracy", "Adult: test accuracy against epsilon; bars are standard deviations.", draw)


def _trace_figure(problem: Problem, epsilons: Any) -> Figure:
    """Three coefficients of every sampler from the first step on."""
    epsilon = epsilons[1]
    options: dict[str, Any] = {"burn_in": 0.0, "thinning": 1}
    names = ("sgld", "sghmc", "sgnht")
    traces = {name: fitted(problem, name, epsilon, 0, **options).posterior.draws for name in names}
    # The same coefficients for all: those that the first sampler's mean finds largest.
    chosen = traces["sgld"].mean(0).abs().topk(3).indices

    def draw(canvas: Any) -> None:
        axes = canvas.subplots(1, 3, sharey=True)
        for panel, (name, values) in zip(axes, traces.items(), strict=True):
            for place, column in enumerate(chosen.tolist()):
                panel.plot(range(1, len(values) + 1), values[:, column], color=COLOURS[place], linewidth=1)
            panel.set(title=TITLES[name], xlabel="step")
        axes[0].set_ylabel("coefficient")

    caption = f"Adult: traces of three coefficients at epsilon {epsilon:g}, by sampler."
    return Figure("adult_traces", caption, draw, (8.0, 3.2))
