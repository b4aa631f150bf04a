"""The belief of a program's short chain: what its releases tell of the peak and of the information (`_whitened`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from confide.devices import HOST
from confide.layers.programs import packed_matrix, unpacked
from confide.methods._bends import STRAIGHT, Bend, bent
from confide.methods._trace import curvatures_of, drawn
from confide.methods._whitened import DOUBT, TRUST, UNCUT, Local, Pace, TakenByClip, cut_of, least_precision, told_of
from confide.methods.base import Problem
from confide.models.priors import Prior
from confide.models.program_sharpness import bend_of
from confide.models.programs import Program, ProgramLikelihood
from confide.sources.queries import Release

FAR = 4.0
"""Deviations of what noise explains: a mean slope beyond them is the way to a peak that is not here."""
LARGEST_WAY, SURE_WAY = 2.0, 1.25
"""Of a belief, in its deviations: one that lies further from where was asked rests on a line nobody saw there. Beyond
the second it is believed only where scouts were told nothing that could stand in its place."""
LARGEST_EXCESS = 1.5
"""Slopes that scatter by more than this many times their known noise are not those of a line, unless they are few: the
mean of m squares is one within a few times the root of 2 / m."""
LARGEST_UNLIKE = 1.0
"""Products of scores that are off by all of what the program expects: records scatter twice as much, or no peak."""
LARGEST_UNLIKE_BENT = DOUBT
"""Where scores bend, which is the program's word about vectors at which nobody was asked: its word about those where
they were must be as good as it is about inputs."""
PROBED, LEAST_STEADY = 16, 0.5
"""Draws of a belief at which the program's information is looked at, and the share at which it must be alike."""
LEAST_OF_PRIOR = 0.1
"""Of the precision of every number by draws of the prior: what numbers have in common may be known less well."""
ASKED = 12
"""Points of those where records were asked, at which the program says what a line through them does not see."""
LARGEST_CHANGE = 4.0
"""Of what records tell along any direction, from one look to the next: noise may look like more."""


@dataclass(frozen=True)
class Told:
    """What a chain was told after burn-in, one row for every question.

    points     where it asked: the unbounded vector
    slopes     along R, of the negative log-likelihood of all records, as they were released
    products   mean of c s s^T over a batch, packed
    noise      variances of the known noise in every slope and in every product
    """

    points: tuple[Tensor, ...] = field(default=(), repr=False)
    slopes: tuple[Tensor, ...] = field(default=(), repr=False)
    products: tuple[Tensor, ...] = field(default=(), repr=False)
    noise: tuple[tuple[float, float], ...] = ()

    def with_one(self, problem: Problem, slope: Tensor, release: Release, pace: Pace) -> Told:
        each = release.expected_batch * pace.factor
        noise = (problem.records * release.noise_std / each) ** 2, (release.noise_std / (each * pace.share)) ** 2
        product = -release.sum[len(slope) :] / (each * pace.share)
        return Told(
            (*self.points, problem.position.to(HOST, torch.float64, copy=True)),
            (*self.slopes, slope.to(HOST, torch.float64, copy=True)),
            (*self.products, product.to(HOST, torch.float64)),
            (*self.noise, noise),
        )


@dataclass(frozen=True)
class ToldBelief:
    """Draws of the unbounded vector.

    way      how far their mean is from where was asked, in their deviations
    excess   of the scatter of slopes over what is known of their noise
    trust    how far the information that was released was believed against the program's own guess
    steady   share of draws at which the program expects about the information that it expects in their midst
    unlike   by how much released products of scores differ from what the program expects, as a share of it
    most_excess   beyond which they are not those of a line
    bends    by how much scores bend within the belief of a line (`_bends`)
    cut_known   whether it is known what the clip takes, or the clip is so wide that it takes nothing
    """

    draws: Tensor
    way: float
    excess: float
    trust: float
    steady: float
    unlike: float
    cut_known: bool
    most_excess: float = LARGEST_EXCESS
    bends: float = 0.0

    @property
    def one_peak(self) -> bool:
        """Whether a line through the slopes is all that there is to it, as far as that can be seen."""
        near = self.way <= LARGEST_WAY and self.excess <= self.most_excess
        alike = self.unlike <= (LARGEST_UNLIKE_BENT if self.bends > STRAIGHT else LARGEST_UNLIKE)
        return near and alike and self.steady >= LEAST_STEADY


def belief_of(problem: Problem, own: Prior, axes: Tensor, told: Told, pace: Pace, met: Tensor | None) -> ToldBelief:
    """In d, about the mean of the points: u = centre + R d. pace: with the clip that questions had."""
    assert isinstance(problem.module, Program)
    wide, points, slopes = axes.to(HOST, torch.float64), torch.stack(told.points), torch.stack(told.slopes)
    centre, slope, count = points.mean(0), slopes.mean(0), len(points)
    here = Local.at(problem, own, centre.to(axes.dtype), met)
    here, along, cut = _likelier(problem, here, wide, told, pace)
    ways = torch.linalg.solve(wide, (points - centre).mT).mT
    bend, more = _bend(problem, along, pace, centre.to(axes.dtype), ways)
    mean, error, trust, unlike = _information(problem, here, wide, cut, told, TRUST**2, more)
    noise = torch.randn(curvatures_of(len(centre)), len(mean), generator=problem.generator, dtype=torch.float64)
    drawn_matrices = _as_told(problem, wide, unpacked(mean + math.sqrt(error) * noise, len(centre)))
    curvatures = problem.records * _of_one_sign(drawn_matrices, 0.0, math.inf)
    curvature = curvatures.mean(0)
    of_noise, size = sum(one for one, _ in told.noise) / count, len(centre)
    of_batches = max(0.0, problem.records / problem.plan.expected_batch - 1)
    errors = of_noise * torch.eye(size, dtype=torch.float64) + of_batches * curvature
    off = slopes - slope - ways @ curvature
    silent = of_noise * (size - _rank(problem, wide))
    excess = float(off.square().sum() / max(1, count - 1) / (errors.trace() - silent))
    errors = errors * max(1.0, excess) / count
    energy, nought = problem.prior(own).energy, torch.zeros_like(centre)
    if cut is not None:
        slope, errors = slope + problem.records * cut.scores, errors + cut.doubt(problem.records, unlike)

    def around(at: Tensor) -> Tensor:
        return energy(centre + wide @ at)

    least = LEAST_OF_PRIOR * wide.mT @ (least_precision(problem.module)[:, None] * wide)
    draws = drawn(curvatures, nought, slope, errors, around, nought, problem.generator, least)
    bends = 0.0
    if bend is not None:
        draws, bends = bent(draws, curvatures, slope, errors, around, least, bend, problem.generator)
    way = float((draws.mean(0).square() / draws.var(0)).mean().sqrt())
    found = centre + draws @ wide.mT
    steady = 1.0 if here is None or bend is not None else _steady(problem, own, here, found)
    known = cut is not None or pace.clip > UNCUT * math.sqrt(size)
    most = max(LARGEST_EXCESS, 1 + FAR * math.sqrt(2 / (count * size)))
    return ToldBelief(found, way, excess, trust, steady, unlike, known, most, bends)


def _likelier(
    problem: Problem, here: Local | None, axes: Tensor, told: Told, pace: Pace
) -> tuple[Local | None, Tensor | None, TakenByClip | None]:
    """What is expected of records, along which axes of the program, and what the clip then takes.

    Records may be as the program expects of made-up inputs, whatever R is; or unlike these, and R is where they tell
    what made-up ones tell along the program's own axes. Released products of scores say which.
    """
    if here is None:
        return None, None, None
    centre = torch.stack(told.points).mean(0).to(problem.position.dtype)
    found = []
    for one, along in ((replace(here, root=here.expected), axes), (here, here.own_axes())):
        cut = cut_of(problem, one, pace, centre, (pace.clip,), along)
        found.append((_information(problem, one, axes, cut, told, 0.0)[3], one, along, cut))
    return min(found, key=lambda one: one[0])[1:]


def _bend(
    problem: Problem, axes: Tensor | None, pace: Pace, centre: Tensor, ways: Tensor
) -> tuple[Bend | None, Tensor | None]:
    """n r(d), and what products of scores are more than at the centre, by the program along these axes.

    ways   from the centre to where records were asked, along R
    """
    program, likelihood = problem.module, problem.likelihood
    assert isinstance(program, Program)
    assert isinstance(likelihood, ProgramLikelihood)
    if axes is None or likelihood.form is None:
        return None, None
    some = ways[torch.linspace(0, len(ways) - 1, ASKED).long()]
    try:
        found = bend_of(program, centre, likelihood.form, axes, pace.clip, pace.share, some - some.mean(0))
        if found is None:
            return None, None
        off, products = found
        if not bool(torch.isfinite(off(torch.zeros_like(ways[0]))).all() and torch.isfinite(products).all()):
            return None, None
    except Exception:  # whatever the program does not like at one of these vectors, or inputs one by one
        return None, None
    return lambda d: problem.records * off(d), products


def _steady(problem: Problem, own: Prior, here: Local, draws: Tensor) -> float:
    """A peak that is no Gaussian, and a ridge, have other information where draws are than in their midst.

    Draws are many and the first of them as good as any; what a record tells at each is the program's own word. The
    prior is held as it is in their midst: draws follow it wherever they are.
    """
    good = 0
    for draw in draws[:PROBED]:
        there = Local.at(problem, own, draw.to(problem.position.dtype), None)
        if there is None:
            continue
        whole = there.expected @ there.expected.mT + (here.prior - there.prior) / problem.records
        along = torch.linalg.solve_triangular(here.expected, whole, upper=False)
        sizes = torch.linalg.eigvalsh(torch.linalg.solve_triangular(here.expected, along.mT, upper=False))
        good += bool(sizes.max() <= LARGEST_CHANGE and sizes.min() >= 1 / LARGEST_CHANGE)
    return good / min(PROBED, len(draws))


def prior_draws(problem: Problem, count: int) -> Tensor:
    """Of the unbounded vector, for a belief that says nothing."""
    program = problem.module
    assert isinstance(program, Program)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(1 << 62, (), generator=problem.generator)))
        return torch.stack([program.prior_draw() for _ in range(count)])


def met_anew(problem: Problem, own: Prior, axes: Tensor, told: Told, pace: Pace, met: Tensor | None) -> Tensor | None:
    """N after what was told along R = (L N)^-T: the root of N B N^T, B being information and prior along R."""
    wide, centre = axes.to(HOST, torch.float64), torch.stack(told.points).mean(0)
    here = Local.at(problem, own, centre.to(axes.dtype), met)
    if here is None:
        return met
    here, _, cut = _likelier(problem, here, wide, told, pace)
    mean, _, _, _ = _information(problem, here, wide, cut, told, 0.0)
    assert here is not None
    whole = unpacked(mean, len(centre)) + wide.mT @ here.prior @ wide / problem.records
    whole = whole if cut is None else whole - cut.products  # what was taken is negative
    seen = _of_one_sign(whole, 1 / LARGEST_CHANGE, LARGEST_CHANGE)
    before = torch.eye(len(centre), dtype=torch.float64) if met is None else met
    found: Tensor = torch.linalg.cholesky(before @ seen @ before.mT)
    return found


def far_off(problem: Problem, own: Prior, axes: Tensor, told: Told, taken: Tensor | None) -> float:
    """By how much the square of the mean slope since the last look is beyond chance; 1 is where no doubt is left."""
    wide, centre = axes.to(HOST, torch.float64), torch.stack(told.points).mean(0)
    nought = torch.zeros_like(centre)
    slope = torch.stack(told.slopes).mean(0) + wide.mT @ problem.prior(own).add_energy_gradient_(centre, nought)
    slope = slope if taken is None else slope + problem.records * taken.double()
    of_noise = sum(one for one, _ in told.noise) / len(told.noise)
    of_batches = problem.records * max(1.0, problem.records / problem.plan.expected_batch)
    beyond = float(slope.square().sum()) * len(told.points) / (of_noise + of_batches) - len(centre)
    return beyond / (FAR * math.sqrt(2 * len(centre)))


def _information(
    problem: Problem,
    here: Local | None,
    axes: Tensor,
    cut: TakenByClip | None,
    told: Told,
    least: float,
    more: Tensor | None = None,
) -> tuple[Tensor, float, float, float]:
    """A along R, packed, the variance of each of its numbers, how much of what was released is in it, and by how much
    that is unlike what the program expects, as a share of it and beyond chance.

    least   mean square by which records differ from what is expected of them, where noise hides it
    more    products are expected to be, since they were not asked for at one point
    """
    seen = packed_matrix(_as_told(problem, axes, unpacked(torch.stack(told.products).mean(0), len(axes))))
    error = sum(one for _, one in told.noise) / len(told.noise) ** 2
    if here is None:
        return seen, error, 1.0, 0.0
    expected = here.told_along(axes, problem.records)
    expected = expected if cut is None else expected + cut.products
    guess = packed_matrix(expected if more is None else expected + more)
    whole = float(guess.square().sum())
    scale = min(max(float(seen @ guess) / whole, 1 / LARGEST_CHANGE), LARGEST_CHANGE)  # one number, known far better
    scaled, off = scale * guess, max(0.0, (scale - 1) ** 2 - error / whole)
    rank = _rank(problem, axes)
    numbers = rank * (rank + 1) / 2
    by_chance = 1 + 2 * math.sqrt(2 / numbers)  # two deviations of a mean of squares
    found = max(0.0, float((seen - scaled).square().sum()) / numbers - error * by_chance)
    beyond = max(least, found)
    share = beyond / (beyond + error) if beyond > 0 else 0.0
    unlike = math.sqrt(off + found * numbers / whole)
    return scaled + share * (seen - scaled), share * error, share, unlike


def _as_told(problem: Problem, axes: Tensor, matrices: Tensor) -> Tensor:
    """The same without what records cannot tell along R."""
    onto = told_of(problem, axes)
    return matrices if onto is None else onto @ matrices @ onto


def _rank(problem: Problem, axes: Tensor) -> int:
    """Directions of which records can tell."""
    onto = told_of(problem, axes)
    return len(axes) if onto is None else round(float(onto.trace()))


def _of_one_sign(matrices: Tensor, low: float, high: float) -> Tensor:
    """The same matrices with their eigenvalues between these."""
    sizes, vectors = torch.linalg.eigh(matrices)
    found: Tensor = (vectors * sizes.clamp(low, high)[..., None, :]) @ vectors.mT
    return found
