"""Adult, Bayesian logistic regression: accuracy against epsilon for the samplers and their baselines."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from confide.models.predictive import of_classes
from confide.papers import protocol, sets
from confide.papers.base import COLOURS, MARKERS, Cell, Context, Figure, PaperMeasure, PaperOutcome, PaperTable
from confide.posteriors.base import Posterior

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
OPEN = "SGLD, not private"
TRIAL_SEED = 90_001  # of trials: no run of a table has it
FRICTION = 0.1
CLIP = 1.0
STEPS_PER_EPSILON = 2000
PUBLIC_RECORDS = 10_000
"""The last training records, taken as public: trials learn from and are scored on them, private runs never see them."""
CHAINS = [{"largest": largest, "noise": noise} for largest in (2.0, 4.0) for noise in (0.3, 0.6)]
"""Of the samplers: the largest step on the mean gradient, and the noise of all steps that a coefficient keeps."""
CANDIDATES: dict[str, list[dict[str, Any]]] = {
    "sgld": CHAINS,
    "sghmc": CHAINS,
    "sgnht": CHAINS,
    "dp-vi": [
        {"optimiser": "sgd"},
        {"optimiser": "momentum"},
        {"optimiser": "adam"},
        {"optimiser": "sgd", "rate": "as SGLD's"},
    ],
    "hybrid": [{"width": width, "share": share} for width in (5.0, 10.0) for share in (0.3, 0.5)],
    "ops": [{"width": width} for width in (5.0, 10.0, 20.0, 40.0)],
    "open": [{"open": rate} for rate in (0.5, 1.0, 2.0, 4.0)],
}
"""By method; `open` is SGLD without privacy. width is W = R D of posterior draws, share what a draw has of epsilon."""
START = {"largest": 4.0, "noise": 0.6}
"""Of the chain that follows a hybrid's draw and of the rate that DP-VI borrows: the longest of SGLD's candidates."""


@dataclass(frozen=True)
class AdultProblem:
    """Records with a public feature map, and the one schedule that all methods on noisy sums share.

    fewest, most   steps: in proportion to epsilon between these, since less noise lets a chain go further
    real           of a trial on public records: the problem whose noise and steps it has; None: this one
    """

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    found: sets.Set
    context: Context
    batch: int
    fewest: int
    most: int
    real: AdultProblem | None = None

    @property
    def features(self) -> int:
        return self.x.shape[1]

    @cached_property
    def feature_bound(self) -> float:
        """R: every input lies in [-1, 1], and of a categorical column's inputs at most one is not zero."""
        widths = [_inputs(column) for column in self.found.schema.columns]
        return math.sqrt(sum(widths) + 1)

    def private(self) -> Any:
        from confide.sources.private_data import PrivateData

        seed = self.context.noise_seed
        return PrivateData(self.x, self.y, schema=self.found.schema, name=self.found.name, seed=seed)

    def steps(self, epsilon: float | None) -> int:
        """Four times the most for a run that is not private."""
        if epsilon is None:
            return 4 * self.most
        return min(self.most, max(self.fewest, round(STEPS_PER_EPSILON * epsilon)))

    def plan(self, epsilon: float | None, spent: tuple[Any, ...] = ()) -> Any:
        """For what is left of epsilon beside what was spent."""
        from confide.mechanism.plan import plan

        if self.real is not None:
            return protocol.with_noise_of(self.real.plan(epsilon, spent), self.found.records)
        sizes: dict[str, Any] = {"records": self.found.records, "batch": self.batch, "steps": self.steps(epsilon)}
        if epsilon is None:
            return plan(delta=DELTA, private=False, clip=math.inf, **sizes)
        return plan(delta=DELTA, epsilon=epsilon, clip=CLIP, spent=spent, **sizes)

    @property
    def scale(self) -> float:
        """How many records of the real problem stand behind one of a trial."""
        return 1.0 if self.real is None else self.real.found.records / self.found.records

    def accuracy(self, posterior: Posterior) -> float:
        return float((of_classes(posterior.predict(self.x_test)).labels == self.y_test).double().mean())

    def log_loss(self, posterior: Posterior) -> float:
        chance = of_classes(posterior.predict(self.x_test)).probabilities.double()
        return float(-chance[torch.arange(len(chance)), self.y_test.long()].clamp(min=1e-12).log().mean())


def load(context: Context) -> tuple[AdultProblem, AdultProblem]:
    """The private problem, and that of trials on public records."""
    found = sets.load("adult", context)
    private, public = protocol.parted(found, len(found.x) // 4 if found.stand_in else PUBLIC_RECORDS)
    batch, fewest, most = (500, 60, 60) if context.quick else (4000, 400, 1000)
    real = _mapped(private, context, batch, fewest, most)
    trial = _mapped(public, context, batch, fewest, most)
    return real, replace(trial, real=real)


def _mapped(found: sets.Set, context: Context, batch: int, fewest: int, most: int) -> AdultProblem:
    x, x_test = (public_map(part, found.schema.columns) for part in (found.x, found.x_test))
    return AdultProblem(x, found.y, x_test, found.y_test, found, context, batch, fewest, most)


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


def mean_rate(plan: Any, largest: float, noise: float) -> float:
    """The step on the mean gradient: as long as the noise of all steps adds up to `noise` in a coefficient."""
    walk: float = plan.mechanism.noise_std / plan.expected_batch * math.sqrt(plan.steps)
    return min(largest, noise / walk)


def sampler(name: str, rate: float, records: int, **options: Any) -> Any:
    """The three samplers at the same speed: momentum adds up 1 / friction steps, so theirs are that much shorter."""
    from confide.methods.sghmc import SGHMC
    from confide.methods.sgld import SGLD
    from confide.methods.sgnht import SGNHT

    if name in ("sgld", "open"):
        return SGLD(step_size=2 * rate / records, **options)
    step = FRICTION * rate / records
    if name == "sghmc":
        return SGHMC(step_size=step, friction=FRICTION, **options)
    return SGNHT(step_size=math.sqrt(step), diffusion=FRICTION / math.sqrt(step), **options)


def fitted(
    problem: AdultProblem, name: str, epsilon: float | None, seed: int, taken: dict[str, Any], **options: Any
) -> Any:
    """A run of one of the methods on noisy sums, with the settings that were taken."""
    from confide.methods.bbp import BBP
    from confide.models.likelihoods import Bernoulli
    from confide.models.networks import logistic
    from confide.running.fit import fit

    plan = problem.plan(epsilon)
    if name == "dp-vi":
        rate = mean_rate(plan, **START) if "rate" in taken else None
        method: Any = BBP(optimiser=taken["optimiser"], learning_rate=rate)
    else:
        rate = taken["open"] if name == "open" else mean_rate(plan, **taken)
        method = sampler(name, rate, plan.records, **options)
    return fit(method, logistic(problem.features), problem.private(), plan, likelihood=Bernoulli(), seed=seed)


def drawing(problem: AdultProblem, epsilon: float, width: float) -> Any:
    """The mechanism of posterior draws; the prior keeps most draws off the edge of the ball.

    A trial has fewer records; each counts for as many more, so that the law that is drawn from is as narrow.
    """
    from confide.mechanism.posterior_sampling import PosteriorSampling

    radius = width / problem.feature_bound
    scale = 0.7 * radius / math.sqrt(problem.features + 1)
    tolerance = 1e-8 if problem.real is None else 1e-12  # a trial's larger epsilon would let more of it through
    return PosteriorSampling(
        epsilon * problem.scale, radius, problem.feature_bound, prior_scale=scale, tolerance=tolerance
    )


def one_sample(problem: AdultProblem, epsilon: float, width: float) -> Any:
    from confide.running.posterior_sample import one_posterior_sample

    delta = DELTA if problem.real is None else 0.1  # the price of a draw from public records means nothing
    return one_posterior_sample(problem.private(), problem.features, drawing(problem, epsilon, width), delta=delta)


def hybrid_sample(problem: AdultProblem, epsilon: float, seed: int, width: float, share: float) -> Any:
    """A share of epsilon for the draw, and SGLD from there on with all that is left."""
    from confide.running.posterior_sample import hybrid

    spent = drawing(problem.real or problem, share * epsilon, width).event()
    plan = problem.plan(epsilon, (spent,))
    chain = sampler("sgld", mean_rate(plan, **START), plan.records)
    return hybrid(problem.private(), problem.features, drawing(problem, share * epsilon, width), chain, plan, seed=seed)


def one_run(problem: AdultProblem, name: str, epsilon: float | None, seed: int, taken: dict[str, Any]) -> Any:
    """A run of any of the methods."""
    if name == "ops":
        assert epsilon is not None  # a draw has a price
        return one_sample(problem, epsilon, **taken)
    if name == "hybrid":
        assert epsilon is not None
        return hybrid_sample(problem, epsilon, seed, **taken)
    return fitted(problem, name, epsilon, seed, taken)


def settled(trial: AdultProblem, epsilons: tuple[float, ...]) -> protocol.Protocol:
    """The same trials for every method at every epsilon, on public records under the noise of the real run."""
    wanted: dict[tuple[str, ...], tuple[str, float | None]] = {(OPEN, "none"): ("open", None)}
    wanted |= {(TITLES[name], f"{epsilon:g}"): (name, epsilon) for epsilon in epsilons for name in TITLES}

    def score(key: tuple[str, ...], candidate: protocol.Candidate) -> float:
        name, epsilon = wanted[key]
        return trial.log_loss(one_run(trial, name, epsilon, TRIAL_SEED, dict(candidate)).posterior)

    about = (
        f"{len(trial.x_test)} of the last {len(trial.x) + len(trial.x_test)} training records, which are taken as "
        f"public; the trials learn from the other {len(trial.x)} under the noise of the real run, and the private runs "
        "see none of them"
    )
    offered = {key: CANDIDATES[name] for key, (name, _) in wanted.items()}
    before = {key: _before(trial, name, epsilon) for key, (name, epsilon) in wanted.items()}
    return protocol.settle(offered, score, about=about, score="log loss", context=trial.context, before=before)


def _before(trial: AdultProblem, name: str, epsilon: float | None) -> str:
    """What earlier trials on the same public records had settled, as the runs have it."""
    if name == "ops":
        return "scale of the prior over the radius"
    real = trial.real or trial
    clip = "" if epsilon is None else f", clip {CLIP:g}"
    chain = f", {protocol.told(START)} of its chain" if name == "hybrid" else ""
    return f"batch {real.batch}{clip}, {real.steps(epsilon)} steps{chain}"


def run(context: Context) -> PaperOutcome:
    problem, trial = load(context)
    epsilons = (1.0, 4.0) if context.quick else EPSILONS
    taken = settled(trial, epsilons)
    rows: list[tuple[Cell, ...]] = []
    found: dict[tuple[str, float], PaperMeasure] = {}
    open_runs = [one_run(problem, "open", None, seed, taken.of(OPEN, "none")) for seed in context.seeds]
    baseline = _measured(problem, open_runs)
    for epsilon in epsilons:
        for name, title in TITLES.items():
            settings = taken.of(title, f"{epsilon:g}")
            runs = [one_run(problem, name, epsilon, seed, settings) for seed in context.seeds]
            cell = found[name, epsilon] = _measured(problem, runs)
            gap = PaperMeasure(tuple(100 * (baseline.mean - one) for one in cell.values), 2)
            sound = max(one.privacy.epsilon() for one in runs)
            rows.append((title, epsilon, _paper(name, epsilon), cell, gap, len(runs), sound))
            context.progress("Adult", len(found), len(epsilons) * len(TITLES))
    rows.append((OPEN, math.inf, "dashed line of Figure 3", baseline, 0.0, len(context.seeds), math.inf))
    table = PaperTable(
        f"Adult, Bayesian logistic regression, delta {DELTA:g}: test accuracy",
        ("method", "epsilon asked for", "paper", "ours", "points below not private", "runs", "sound epsilon"),
        tuple(rows),
        (*_notes(problem, taken), *problem.found.notes),
    )
    figures = (_accuracy_figure(found, baseline, epsilons), _trace_figure(problem, epsilons, taken))
    tried = taken.table(("method", "epsilon asked for"))
    return PaperOutcome((table, _comparison(found, rows), tried), figures)


def _comparison(found: dict[tuple[str, float], PaperMeasure], rows: list[tuple[Cell, ...]]) -> PaperTable:
    """By how much SGLD is above each baseline, and how sure that is."""
    sound = {(row[0], row[1]): row[-1] for row in rows}
    lines: list[tuple[Cell, ...]] = []
    for (name, epsilon), other in found.items():
        if name in ("ops", "hybrid", "dp-vi"):
            ours = found["sgld", epsilon]
            error = standard_error(ours, other)
            cells = (round(100 * (ours.mean - other.mean), 2), None if error is None else round(100 * error, 2))
            lines.append((TITLES[name], epsilon, "SGLD above", *cells, sound[TITLES["sgld"], epsilon]))
    return PaperTable(
        "Adult: points by which SGLD is above its baselines",
        ("baseline", "epsilon asked for", "paper", "ours", "standard error", "sound epsilon"),
        tuple(lines),
        (
            "From the runs of the table above; the standard error is over runs, on the one official test part. The "
            "hybrid is the same SGLD from another start.",
            _verdict(lines),
        ),
    )


def _verdict(lines: list[tuple[Cell, ...]]) -> str:
    """Where SGLD is ahead, behind or neither by two standard errors, read off the lines."""
    told: dict[str, list[str]] = {"ahead": [], "behind": [], "neither": []}
    for name, epsilon, _, points, error, _ in lines:
        if isinstance(points, float) and isinstance(error, float):
            side = "neither" if abs(points) <= 2 * error else "ahead" if points > 0 else "behind"
            told[side].append(f"{name} at {epsilon:g}")
    parts = [f"{side} {'of ' if side != 'neither' else ''}{', '.join(names)}" for side, names in told.items() if names]
    return "By two standard errors SGLD is " + "; ".join(parts) + "." if parts else "Single runs: no standard error."


def standard_error(one: PaperMeasure, other: PaperMeasure) -> float | None:
    """Of the difference of two means over independent runs; None for single runs."""
    if one.deviation is None or other.deviation is None:
        return None
    return math.sqrt(one.deviation**2 / len(one.values) + other.deviation**2 / len(other.values))


def _measured(problem: AdultProblem, runs: list[Any]) -> PaperMeasure:
    return PaperMeasure(tuple(problem.accuracy(one.posterior) for one in runs))


def _paper(name: str, epsilon: float) -> Cell:
    """The paper gives a figure without numbers, and one sentence on it."""
    return "as not private" if name == "sgld" and epsilon >= 0.08 else None


def _notes(problem: AdultProblem, taken: protocol.Protocol) -> tuple[str, ...]:
    return (
        taken.note,
        f"{len(problem.x)} private records. All but OPS: clip {CLIP:g}, Poisson batches of {problem.batch} on average, "
        f"{STEPS_PER_EPSILON} steps per unit of epsilon but at least {problem.fewest} and at most {problem.most}, "
        "second half kept; the step on the mean gradient is the longest at which the noise of all steps together stays "
        "at what the protocol took (SGLD, SGHMC, SGNHT). At small epsilon the release carries more noise than the step "
        "needs: the chains run above temperature 1. DP-VI is Bayes by Backprop on the linear model.",
        f"Not private: SGLD without clip and noise, {problem.steps(None)} steps. Runs: one per seed of "
        f"{', '.join(map(str, problem.context.seeds))}, none of which a trial had.",
        "The feature map (logarithm and square root of the two capital columns, fnlwgt left out) follows from what "
        "the columns mean. What earlier trials on the same public records had settled stands in the last column of the "
        "protocol's table; it was the same for all methods on noisy sums.",
        "OPS: one draw from a tempered posterior on a ball where no record's log-likelihood varies by more than the "
        "width, a pure epsilon but for the sampler's slack in delta; hybrid: a share of epsilon for such a draw, and "
        "SGLD from there on with all that composition leaves. Both are priced for add/remove, a factor of two and more "
        "below the published constants.",
        "The paper plots this experiment (its Figure 3) without numbers, by a moments accountant and a sampler at half "
        "the temperature it states; it says that DP-SGLD equals plain SGLD from epsilon 0.08 on. Its delta is above 1 "
        "over the number of records, where a record might be published outright: we keep it for comparison only.",
    )


def _accuracy_figure(found: dict[tuple[str, float], PaperMeasure], baseline: PaperMeasure, epsilons: Any) -> Figure:
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


def _trace_figure(problem: AdultProblem, epsilons: Any, taken: protocol.Protocol) -> Figure:
    """Three coefficients of every sampler from the first step on."""
    epsilon = epsilons[1]
    options: dict[str, Any] = {"burn_in": 0.0, "thinning": 1}
    names = ("sgld", "sghmc", "sgnht")
    traces = {
        name: fitted(problem, name, epsilon, 0, taken.of(TITLES[name], f"{epsilon:g}"), **options).posterior.draws
        for name in names
    }
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
