"""DP-SEP: stochastic expectation propagation from noisy sums of clipped natural parameters."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from confide import rules
from confide.errors import Refusal
from confide.expectation.approximation import AnySites, noise_of, sites_for, starting_point
from confide.expectation.metric import (
    LARGEST,
    MEDIAN,
    Metric,
    NetworkChart,
    affordable_directions,
    gauss_newton,
    independent,
)
from confide.expectation.mixture import MixtureOfGaussians, MixtureSites
from confide.expectation.natural import COVARIANCES, Covariance, LocalChart
from confide.expectation.precision import learnt_precision, with_precision
from confide.expectation.sites import NetworkSites, PlainChart
from confide.expectation.standardise import InputMoments, after, centre_of, public_directions, standardiser
from confide.mechanism.clipping import Recordwise
from confide.methods.base import Method, Problem
from confide.models.networks import recipe_of
from confide.models.priors import GaussianPrior
from confide.posteriors.natural import NaturalGaussian
from confide.sources.queries import Release, Statistic, StatisticQuery

AnyChart: TypeAlias = NetworkChart | LocalChart | PlainChart
Coordinates: TypeAlias = Literal["local", "natural"]
Noise: TypeAlias = Literal["learnt", "fixed"]
Inputs: TypeAlias = Literal["standardised", "raw"]
Precision: TypeAlias = Literal["given", "learnt"]

REFRESHES = 25  # how often in a run the metric is computed anew
WARM_UP = (0.02, 0.06)  # shares of the steps that go to means and covariances of the inputs, where it is worth it
LARGEST_ERROR = 0.05  # noise in a covariance beyond which it is not: inputs of encoders have variances of about 0.1
LEAST_PRECISION = 20.0  # of a network's weights under noise, in prior precisions: what is not known need not wander
# See `horizon`; of networks where records are ample, and of a single layer.
NETWORK_HORIZON, SIMPLE_HORIZON = 20.0, 8.0
EXCESS = 0.2  # See `excess`; where records are ample.
# Of mixtures whose budget is scarce. Scalar covariances have the fewest numbers that noise falls on, and steps that add
# up to 3 leave e^-3 of the start: a twentieth, less than the noise of a longer run. See docs/protocols.md.
SCARCE_HORIZON = 3.0
AFFORDED = 3.0  # records * mu for each number of an answer, from which on a mixture's covariances are full
# Where the components of such a mixture begin, in parts of their distance from the prior's centre: a run that is too
# short to leave a wrong start begins at none.
TOGETHER = 0.03
AMPLE = 2000.0  # records * mu, mu as in Gaussian differential privacy; budgets below it get shorter runs: `_scarcity`


@dataclass(frozen=True)
class SepState:
    """step      releases told so far
    theta     natural parameters of the approximation q = prior * factor^records
    gathered  moments of the inputs, as far as they have been released; centre: their means
    inputs    the public map of the inputs: of many features onto few directions, and what standardises them, once it is
              known; spread: a root of their covariance under it
    root      of the metric; reach: its unit of length, of which the usual clip makes the median norm of an answer
    precision of the prior over the weights, in units of the one that was asked for
    """

    step: int
    theta: Tensor = field(repr=False)
    gathered: Tensor | None = field(default=None, repr=False)
    centre: Tensor | None = field(default=None, repr=False)
    inputs: Tensor | None = field(default=None, repr=False)
    spread: Tensor | None = field(default=None, repr=False)
    root: Tensor | None = field(default=None, repr=False)
    reach: float = 1.0
    precision: float = 1.0


@dataclass(frozen=True)
class SEP(Method):
    """Every record's likelihood is replaced by the same factor f, so q = prior * f^n: theta = theta_0 + n theta_f.

    init       theta_f such that q is narrow about a public starting point
    ask        the cavity is q / f. For a record i: the factor theta_i that makes cavity * f_i match the moments of
               cavity * p(record | w), and the change theta_i - theta_f that the record asks for
    tell       with a release R = sum of clipped changes + noise, of a batch expected to hold b records,

                   theta_f' = theta_f + (a / b) R,        so        theta' = theta + (a n / b) R,

               and the precision is kept positive. a is the damping; a = 1 / n with b = 1 is SEP as published, whose
               dampings add up to T over T epochs.
    posterior  q

    theta_f is a function of earlier releases, so one record moves R by at most the clip C. The whole vector of changes
    is clipped at once, with off-diagonal precisions counted twice, as in the Frobenius norm.

    coordinates="natural" clips theta_i - theta_f as it stands, as the paper does. coordinates="local" (the default)
    first passes to public coordinates at the present q, in which all records and all directions count alike: see
    LocalChart for simple models and NetworkChart for networks. The clip of the plan is then in units of the median norm
    that an answer has once the posterior is reached, for networks of half of it, so that the clip that plans have where
    none is given, 2, cuts their answers at the median: with twice as much, noise throws a network to another place at
    every run. A run with private=False is SEP itself (clip=math.inf) or clipped SEP.

    Papers: Vinaroz and Park, TMLR 2022 (DP-SEP); Li, Hernandez-Lobato and Turner, NeurIPS 2015 (SEP); Hernandez-Lobato
    and Adams, ICML 2015 (moments of networks).

    prior           N(0, scale^2) on all weights; with hidden layers divided by the inputs of the unit. Mixtures have
                    their own
    covariance      "diagonal" for networks; also "full" or "scalar" for linear models and mixtures. None: diagonal, but
                    for mixtures full where the budget pays for so many numbers, else scalar
    noise           "learnt": the noise of a network's Gaussian target has a Gamma posterior, whose rate is released in
                    the same clipped vector; "fixed": it is the likelihood's noise_scale
    precision       "learnt": the precision of a network's weights has a Gamma hyper-prior about that of `prior`, and is
                    read off the approximation as it stands, which costs nothing; "given": it is that of `prior`
    inputs          "standardised": where their moments can be had precisely enough, a few steps go to them, and
                    networks see features of mean 0 and covariance 1; "raw": features as they are
    damping         a at every step; None: falls linearly to 0, adding up to `horizon`
    horizon         sum of all dampings; None: 8 for simple models, 3 for mixtures whose budget is small, 20 for
                    networks, less where the budget is small
    excess          largest mean squared error, in noise variances, that noise may add to a network's predictions; None:
                    0.2, less where the budget is small
    double_damping  the update as printed in the paper, which divides a by the number of records once more
    """

    prior: GaussianPrior = field(default_factory=GaussianPrior)
    covariance: Covariance | None = None
    coordinates: Coordinates = "local"
    noise: Noise = "learnt"
    precision: Precision = "given"
    inputs: Inputs = "standardised"
    damping: float | None = None
    horizon: float | None = None
    excess: float | None = None
    double_damping: bool = False
    name: ClassVar[str] = "sep"
    on_host: ClassVar[bool] = True
    tasks: ClassVar[tuple[str, ...]] = ("regression", "binary", "classification", "mixture")

    def __post_init__(self) -> None:
        if not isinstance(self.prior, GaussianPrior):
            raise TypeError(
                f"prior={self.prior!r}: factors are Gaussian, so the prior must be; use priors.GaussianPrior"
            )
        choices = {"covariance": COVARIANCES, "coordinates": get_args(Coordinates)}
        choices |= {"noise": get_args(Noise), "inputs": get_args(Inputs)}
        choices |= {"precision": get_args(Precision)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed and not (name == "covariance" and self.covariance is None):
                raise Refusal(f"{name}={getattr(self, name)!r}: must be one of {', '.join(allowed)}")
        for name in ("damping", "horizon", "excess"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise Refusal(f"{name}={value}: must be a finite number > 0")

    def init(self, problem: Problem) -> SepState:
        sites = self._sites(problem)
        # As certain as if a tenth of the records had spoken: steps are relative to the present precision. A mixture
        # starts as uncertain as its prior: soft responsibilities find the clusters that a sharp start would miss.
        certainty = 1.0 if isinstance(sites, MixtureSites) else 1 + problem.records / 10
        inputs = self._directions_of_inputs(problem)
        position = problem.position
        if isinstance(sites, MixtureSites) and self.covariance is None and not self._affords(problem):
            centre = problem.module.centre.to(position).repeat(len(sites.weights))  # type: ignore[operator]
            position = torch.lerp(centre, position, TOGETHER)
        state = SepState(0, starting_point(sites, position, certainty, problem.generator), inputs=inputs)
        if isinstance(sites, NetworkSites) and any(self._warm_up(problem, sites)):
            return replace(state, gathered=torch.zeros(InputMoments(sites.features).sizes[0], dtype=torch.float64))
        return self._measured(problem, state)

    def ask(self, problem: Problem, state: SepState) -> StatisticQuery:
        sites = self._sites(problem, state)
        size = self._answer_size(problem, sites)
        if state.gathered is not None:
            assert isinstance(sites, NetworkSites)
            return _moment_query(problem, sites, state.centre, size)
        factor = (state.theta - sites.prior) / problem.records
        cavity = state.theta - factor
        chart = self._chart(problem, sites, state)
        return _padded(lambda x, y: chart.encode(sites.factors(cavity, x, y) - factor), chart.size, size)

    def tell(self, problem: Problem, state: SepState, release: Release) -> SepState:
        sites, step = self._sites(problem, state), state.step + 1
        if state.gathered is not None:
            assert isinstance(sites, NetworkSites)
            state = replace(state, step=step, gathered=state.gathered + release.sum[: len(state.gathered)])
            return self._warmed_up(problem, sites, state)
        scale = self._damping(problem, step) * problem.records / release.expected_batch
        chart = self._chart(problem, sites, state)
        theta = chart.advance(scale * release.sum[: chart.size])
        state = replace(state, step=step, theta=theta)
        every = max(1, problem.plan.steps // REFRESHES)
        return self._measured(problem, self._with_precision(problem, state)) if step % every == 0 else state

    def posterior(self, problem: Problem, state: SepState) -> NaturalGaussian:
        sites = self._sites(problem, state)
        noise = noise_of(sites, state.theta, problem.likelihood)
        facts = {
            "variant": self._variant(problem),
            "covariance": sites.family.covariance,
            "coordinates": self.coordinates,
            "horizon": self._horizon(problem),
            "standardised_inputs": state.spread is not None,
            "noise_scale": float(noise.sqrt()),
            **({"prior_precision": state.precision} if self.precision == "learnt" else {}),
        }
        natural = state.theta[: sites.family.size]
        found = NaturalGaussian(problem.module, problem.likelihood, natural, noise, state.inputs, facts)
        problem.position.copy_(found.mean())
        return found

    def steps_apart(self, problem: Problem, state: SepState) -> int:
        """Networks, until their metric is computed anew: it is the same for all, and so are the coordinates.

        Nobody sees how far the others close the gap meanwhile, so that dampings add up to 1 at most: not beyond it.
        """
        if state.gathered is not None or state.root is None or self.coordinates == "natural":
            return 1
        every = max(1, problem.plan.steps // REFRESHES)
        ahead = range(state.step + 1, state.step + 1 + every - state.step % every)
        closed = itertools.accumulate(self._damping(problem, step) for step in ahead)
        return max(1, sum(total <= 1 for total in closed))

    def shapes_of_state(self, problem: Problem, start: SepState) -> dict[str, tuple[tuple[int, ...] | None, ...]]:
        found, sites = super().shapes_of_state(problem, start), self._sites(problem)
        if isinstance(sites, NetworkSites):  # moments of the inputs and the metric come, and some of them go
            seen, means, covariances = sites.features, *InputMoments(sites.features).sizes
            found |= {
                "gathered": (None, (means,), (covariances,)),
                "centre": (None, (seen,)),
                "inputs": found.get("inputs", (None, (seen, seen + 1))),
                "spread": (None, (seen, seen)),
                "root": (None, (sites.weights, self._directions(problem, sites))),
            }
        return found

    @property
    def learns_noise(self) -> bool:
        return self.noise == "learnt"

    def with_given_noise(self) -> SEP:
        return replace(self, noise="fixed")

    def _variant(self, problem: Problem) -> str:
        mechanism = problem.plan.mechanism
        if mechanism.private:
            return "DP-SEP with double damping" if self.double_damping else "DP-SEP"
        return "clipped SEP, not private" if math.isfinite(mechanism.clip) else "SEP, not private"

    def _sites(self, problem: Problem, state: SepState | None = None) -> AnySites:
        return sites_for(
            problem.module,
            problem.likelihood,
            problem.records,
            scale=self.prior.scale / math.sqrt(1.0 if state is None else state.precision),
            covariance=self._covariance(problem),
            learn_noise=self.noise == "learnt",
            inputs=self._directions_of_inputs(problem) if state is None else state.inputs,
        )

    def _directions_of_inputs(self, problem: Problem) -> Tensor | None:
        """The low-rank chart of a network with many features: public directions that its first layer sees."""
        recipe = recipe_of(problem.module)
        if recipe is None or self._covariance(problem) != "diagonal" or self.coordinates == "natural":
            return None
        return public_directions(recipe.features)

    def _chart(self, problem: Problem, sites: AnySites, state: SepState) -> AnyChart:
        """The coordinates in which answers are clipped, at the present approximation."""
        if self.coordinates == "natural":
            return PlainChart(sites, state.theta)
        records, mechanism = problem.records, problem.plan.mechanism
        if isinstance(sites, NetworkSites):
            weight, metric = math.sqrt(records / sites.weights), Metric(state.root, state.reach)
            return NetworkChart(
                sites, state.theta, metric, mechanism.clip, weight, floor=_floor(problem), longest=math.sqrt(records)
            )
        size = sites.family.locations / records
        return LocalChart(
            sites.family, state.theta, sites.least_precision, weight=size**-0.5, unit=MEDIAN * math.sqrt(size)
        )

    def _damping(self, problem: Problem, step: int) -> float:
        """a at this step."""
        if self.damping is not None:
            a = self.damping
        else:
            left = 1 - (step - 0.5) / problem.plan.steps
            a = min(1.0, 2 * self._horizon(problem) / problem.plan.steps * left)
        return a / problem.records if self.double_damping else a

    def _horizon(self, problem: Problem) -> float:
        if self.damping is not None:
            return self.damping * problem.plan.steps
        mixture = isinstance(problem.module, MixtureOfGaussians)
        if mixture and self.horizon is None and self.covariance is None and not self._affords(problem):
            return SCARCE_HORIZON
        simple = mixture or not problem.module.recipe.hidden  # type: ignore[union-attr]
        return self.horizon or (SIMPLE_HORIZON if simple else NETWORK_HORIZON * self._scarcity(problem) ** 0.5)

    def _covariance(self, problem: Problem) -> Covariance:
        if self.covariance is not None or not isinstance(problem.module, MixtureOfGaussians):
            return self.covariance or "diagonal"
        return "full" if self._affords(problem) else "scalar"

    def _affords(self, problem: Problem) -> bool:
        """Whether the budget pays for full covariances of a mixture.

        An answer's noise has length sqrt(numbers) / mu in units of the clip, against n / clip of all records together;
        every number then has a share n mu / numbers of the signal. Public sizes alone.
        """
        numbers = MixtureSites.of(problem.module, "full").size
        return problem.records * _budget(problem) >= AFFORDED * numbers

    def _excess(self, problem: Problem) -> float:
        return self.excess or EXCESS * self._scarcity(problem) ** 1.5

    def _scarcity(self, problem: Problem) -> float:
        """n mu / AMPLE, at most 1, with mu that of the whole run: both sides are public.

        What the data do not hold in place wanders under noise, over a distance that is proportional to the horizon and
        to 1 / (n mu). So small budgets get shorter runs, in fewer directions.
        """
        return min(1.0, problem.records * _budget(problem) / AMPLE)

    def _warm_up(self, problem: Problem, sites: NetworkSites) -> tuple[int, int]:
        """Steps that go to means and covariances of the inputs: none where noise would make them useless."""
        if self.inputs == "raw" or self.coordinates == "natural":
            return 0, 0
        means, covariances = (max(1, round(share * problem.plan.steps)) for share in WARM_UP)
        useful = self._moment_error(problem, sites, covariances) <= LARGEST_ERROR
        return (means, covariances) if useful and means + covariances < problem.plan.steps else (0, 0)

    def _moment_error(self, problem: Problem, sites: NetworkSites, steps: int) -> float:
        mechanism = problem.plan.mechanism
        return InputMoments(sites.features).error(mechanism.noise_multiplier, mechanism.expected_batch, steps)

    def _warmed_up(self, problem: Problem, sites: NetworkSites, state: SepState) -> SepState:
        """The centre once the means are complete, and the map of the inputs once the covariances are."""
        assert state.gathered is not None
        means, covariances = self._warm_up(problem, sites)
        if state.step == means:
            blank = torch.zeros(InputMoments(sites.features).sizes[1], dtype=torch.float64)
            return replace(state, centre=centre_of(state.gathered), gathered=blank)
        if state.step < means + covariances:
            return state
        assert state.centre is not None
        error = self._moment_error(problem, sites, covariances)
        inputs, spread = standardiser(state.gathered, state.centre, error)
        return self._measured(problem, replace(state, gathered=None, inputs=after(state.inputs, inputs), spread=spread))

    def _with_precision(self, problem: Problem, state: SepState) -> SepState:
        """The prior of a network's weights as q has it, once a step has been told."""
        sites = self._sites(problem, state)
        if self.precision == "given" or not isinstance(sites, NetworkSites):
            return state
        found = learnt_precision(sites, state.theta, state.precision)
        floor = 1.0 if self.coordinates == "natural" else _floor(problem)  # that of the chart
        theta = with_precision(sites, state.theta, found / state.precision, floor)
        return replace(state, theta=theta, precision=found)

    def _measured(self, problem: Problem, state: SepState) -> SepState:
        """The metric of a network at the present approximation."""
        sites = self._sites(problem, state)
        if self.coordinates == "natural" or not isinstance(sites, NetworkSites):
            return state
        if sites.weights > LARGEST:
            metric = independent(sites, problem.records)
        else:
            directions = self._directions(problem, sites)
            metric = gauss_newton(sites, state.theta, problem.records, directions, state.spread)
        return replace(state, root=metric.root, reach=metric.reach / rules.CLIP)

    def _directions(self, problem: Problem, sites: NetworkSites) -> int:
        """Directions of a network's weights that the budget can pay for: see the module `metric`."""
        mechanism = problem.plan.mechanism
        if mechanism.noise_multiplier == 0 or sites.weights > LARGEST:
            return sites.weights
        clip = mechanism.clip / rules.CLIP
        most = affordable_directions(
            problem.records, _budget(problem), clip, self._horizon(problem), self._excess(problem)
        )
        return max(1, int(min(most, sites.weights)))

    def _answer_size(self, problem: Problem, sites: AnySites) -> int:
        """One size for all answers of a run, those about moments of the inputs included."""
        if self.coordinates == "natural" or not isinstance(sites, NetworkSites):
            return sites.size
        size = self._directions(problem, sites) + sites.size - sites.weights
        return max(size, *InputMoments(sites.features).sizes) if any(self._warm_up(problem, sites)) else size


def _budget(problem: Problem) -> float:
    """mu of the whole run, by the central limit theorem for sampled Gaussians; infinite without noise."""
    mechanism = problem.plan.mechanism
    if mechanism.noise_multiplier == 0:
        return math.inf
    return mechanism.rate * math.sqrt(problem.plan.steps) / mechanism.noise_multiplier


def _floor(problem: Problem) -> float:
    """Smallest precision of a network's weights, in prior precisions."""
    return LEAST_PRECISION if problem.plan.mechanism.noise_std > 0 else 1.0


def _padded(function: Statistic, size: int, whole: int) -> StatisticQuery:
    """Answers of `size` numbers, with zeros behind them up to `whole`."""
    return StatisticQuery(Recordwise(lambda x, y: F.pad(function(x, y), (0, whole - size))), whole)


def _moment_query(problem: Problem, sites: NetworkSites, centre: Tensor | None, size: int) -> StatisticQuery:
    """Means of the inputs, and their covariances once the means are known, in units of the clip."""
    clip = problem.plan.mechanism.clip
    unit, moments, seen = clip if math.isfinite(clip) else 1.0, InputMoments(sites.features), sites.transformed
    if centre is None:
        return _padded(lambda x, y: unit * moments.mean_rows(seen(x)), moments.sizes[0], size)
    return _padded(lambda x, y: unit * moments.covariance_rows(seen(x), centre), moments.sizes[1], size)
