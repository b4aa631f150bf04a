"""How sharp a program's likelihood is, by the program alone: what steps that follow from a public rule are divided by.

    F(u) = mean over x of  sum over y of  p(y | u, x) min(1, C / |s|) s s^T,      s = d log p(y | u, x) / d u,

is the information of one record about the unbounded vector u, as far as a clip at C lets it through, and its largest
eigenvalue the curvature of the mean loss as a chain sees it. No record is needed: inputs are made up within what is
declared of them, and the law of y is the program's own. It is taken at vectors drawn from the prior, and a step must be
stable at nine in ten of them (`SHARE`).

The values that y can take are not declared. They are the first of `_ranges` over which the density adds up to one.
Where there are none, since y is a vector or records have their randomness in x, second derivatives at the made-up
records stand for F.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from confide.data.trees import Tree, map_tensors, rows_of, size_of
from confide.models.programs import Program, hessian_of, logs_at, logs_of, scores_of

Form: TypeAlias = tuple[Tree, Tensor, int | None]
DRAWS = 20
"""Of the prior: enough for a ninth decile, about a second of work."""
SHARE = 0.9
"""A step that is stable at all of them would be as small as the sharpest model that the prior does not rule out."""
COUNTS = ((64, 1.08, 90), (256, 1.01, 550))
"""Values of a count that are looked at: one by one from zero, then in so many steps that grow, to some fifty thousand;
once more in smaller steps, since a Poisson law of ten thousand is a hundred wide."""
POINTS, FARTHEST = 301, 60.0
"""Of a number without limits: sinh of equal steps, dense where laws with parameters of about one have their mass."""
SMALLEST_AND_LARGEST = (-14.0, 7.0)
"""Logarithms of a number that must be positive: a law may have its mass next to zero."""
FARTHEST_LOGIT = 30.0
"""Of a number between zero and one, which may be next to either."""
MOST_CLASSES, EXACTLY_ONE = 12, 1e-6
"""Classes that nobody has declared; their chances leave nothing for another one, not even what counts of a low rate do,
whose law has more of them at other parameters."""
ROUNDED = 100.0
"""Smallest steps of the program's own type, by which its chances may miss one."""
NEARLY_ONE = 0.05
"""What sums over such points miss of a law that they cover; a wrong range is off by more."""
LEAST_OF_A_PART = 0.2
"""Of the information about the best known number of a parameter, for those that no made-up input meets."""
SHARPEST = 1e6
"""Beyond this a chain of any length would stand still."""
MOST_CELLS, FEWEST = 4000, 16
"""Inputs times values of y at which a bend is looked at, and inputs at least."""
SOME = 32
"""Inputs at which draws of the prior are looked at: of these there are many."""
FEW = 2
"""Records whose second derivatives are looked at, which take longer."""


def sharpness(program: Program, x: Tree, y: Tensor, classes: int | None, clip: float) -> float:
    """The curvature of a record's loss; 1 at least, and where it cannot be found. Rows of x and y show their form."""
    if program.unconstrained.device.type != "cpu":
        return 1.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        few = rows_of(x, slice(0, SOME))
        try:
            found = torch.tensor([_at(program, start, few, y, classes, clip) for start in _starts(program)])
        except Exception:  # whatever the program does not like: its own errors come up in the rehearsal
            return 1.0
    known = found[torch.isfinite(found)]
    return float(known.quantile(SHARE).clamp(1.0, SHARPEST)) if len(known) else 1.0


def _starts(program: Program) -> Iterator[Tensor]:
    yield program.unconstrained.detach()
    for _ in range(DRAWS):
        yield program.prior_draw()


def information(program: Program, position: Tensor, x: Tree, y: Tensor, classes: int | None) -> Tensor | None:
    """F without a clip, at one vector; None where it is not finite.

    Made-up inputs are few, so that directions which none of them meets would seem to be unknown to all records: what
    pairs of numbers have in common is believed as far as there are more inputs than numbers, and a number that none of
    them meets, such as the effect of another group, is held for not much less known than others of its parameter. One
    that they meet and say little of is little known, such as the width of a class that is rare.
    """
    with torch.no_grad():
        found = _information(program, position, x, y, classes, math.inf)
    for part in program.parts:
        known = found.diagonal()[part.where]
        if len(known):
            known[known == 0] = float(known.max()) * LEAST_OF_A_PART
    doubt = 0.5 * min(1.0, len(found) / size_of(x))
    held = (1 - doubt) * found + doubt * torch.diag(found.diagonal())
    return held if bool(torch.isfinite(held).all()) else None


def taken_by_clips(
    program: Program, position: Tensor, form: Form, axes: Tensor, clips: Sequence[float], share: float = 0.0
) -> list[tuple[Tensor, Tensor]] | None:
    """What each of these clips takes of scores along the axes, and of their products, on average, by the program's own
    law of y: means of (c - 1) s and of (c - 1) s s^T. None where that law is not known.

    Whole scores are nought on average, at the law's own parameters.
    """
    with torch.no_grad():
        found = _scores(program, position, *form)
    if found is None:
        return None
    along = (found.scores @ axes.double()).flatten(0, 1)
    long = along.norm(dim=1)
    means = []
    for clip in clips:
        # What a clip takes, not what it leaves: sums over points miss little of that.
        lost = (_kept(long, clip, share) - 1) * found.chances.flatten() / size_of(form[0])
        weighted = along * lost[:, None]
        means.append((weighted.sum(0), weighted.mT @ along))
    return means if all(bool(torch.isfinite(one).all()) for pair in means for one in pair) else None


def bend_of(
    program: Program, position: Tensor, form: Form, axes: Tensor, clip: float, share: float, ways: Tensor
) -> tuple[Callable[[Tensor], Tensor], Tensor] | None:
    """What is not seen by a line through a vector, if records are asked some way from it and the truth is away from it.

    A clipped score a = c s along the axes, at u + R w, has a mean of sum over y of p(y | u + R d, x) a, over the inputs
    and the ways w. First, as a function of d: by how much that is off E[c s] + E[c s s^T] d at w = 0, for one record.
    Second: by how much the mean of c s s^T over the ways is off that at w = 0. None where the law of y is not known;
    raises where the program does not run for many inputs at once.

    ways   (points, numbers), whose mean is nought
    """
    x, y, classes = form
    here, wide = position.double(), axes.double()
    with torch.no_grad():
        table = _scores(program, position, x, y, classes)
        if table is None:
            return None
        inputs = min(size_of(x), max(FEWEST, MOST_CELLS // len(table.values)))
        x, chances = rows_of(x, slice(0, inputs)), table.chances[:inputs]
        mean, line, _ = _means(table.scores[:inputs] @ wide, chances, clip, share)
        asked, products = torch.zeros_like(table.scores[:inputs]), torch.zeros_like(line)
        for way in ways:
            scores = scores_of(program, (here + wide @ way).to(position.dtype), x, table.values)[0].double()
            _, some, clipped = _means(torch.where((chances > 0)[..., None], scores, 0.0) @ wide, chances, clip, share)
            asked, products = asked + clipped / len(ways), products + some / len(ways)

    def off(d: Tensor) -> Tensor:
        said = logs_at(program, (here + wide @ d).to(position.dtype), x, table.values).double().exp() * table.widths
        found: Tensor = torch.einsum("xy,xya->a", said, asked) / inputs - mean - line @ d
        return found

    return off, products - line


class Outcomes(NamedTuple):
    """A few made-up inputs, the values that y can take there, and how far each of them reaches."""

    program: Program
    x: Tree
    values: Tensor
    widths: Tensor

    def logs(self, position: Tensor) -> Tensor:
        """log p(y | u, x), (inputs, values), as a function of u."""
        return logs_at(self.program, position.to(self.program.unconstrained.dtype), self.x, self.values).double()


def outcomes_of(program: Program, positions: Tensor, form: Form) -> Outcomes | None:
    """Of the values of y that add up at most of these vectors: at one alone a wide law of numbers adds up over counts
    as well. None where none do at half of them."""
    x, y, classes = form
    first = map_tensors(lambda tensor: tensor[0], rows_of(x, slice(0, 1)))
    found, most = None, len(positions) / 2
    for values, widths, error in _ranges(classes):
        targets = values.to(y.dtype)
        good = sum(_adds_up_at(program, position, first, targets, widths, error) for position in positions)
        if good > most:
            found, most = (targets, widths), good
    if found is None:
        return None
    inputs = min(size_of(x), max(FEWEST, MOST_CELLS // len(found[0])))
    return Outcomes(program, rows_of(x, slice(0, inputs)), *found)


def _adds_up_at(program: Program, position: Tensor, x: Any, targets: Tensor, widths: Tensor, error: float) -> bool:
    try:
        said = logs_of(program, position.to(program.unconstrained.dtype), x, targets)
    except (IndexError, RuntimeError, ValueError):  # no such value
        return False
    return _adds_up(said[None], widths, error)


def _means(along: Tensor, chances: Tensor, clip: float, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of clipped scores c s and of c s s^T, (inputs, values, numbers); and c s itself."""
    clipped = along * _kept(along.norm(dim=2), clip, share)[..., None]
    products = torch.einsum("xy,xya,xyb->ab", chances, clipped, along)
    return torch.einsum("xy,xya->a", chances, clipped) / len(along), products / len(along), clipped


def _kept(long: Tensor, clip: float, share: float) -> Tensor:
    """Of scores of this length: a record answers with its score s and with share * s s^T, clipped together."""
    answer = long * (1 + (share * long).square()).sqrt()
    return (clip / answer).clamp(max=1)


class ScoreTable(NamedTuple):
    """Scores at made-up inputs and all values of y, the chances of these, the values and how far they reach."""

    scores: Tensor
    chances: Tensor
    values: Tensor
    widths: Tensor


def _scores(program: Program, position: Tensor, x: Tree, y: Tensor, classes: int | None) -> ScoreTable | None:
    """None where the values that y can take are not found."""
    first = map_tensors(lambda tensor: tensor[0], rows_of(x, slice(0, 1)))
    for values, widths, error in _ranges(classes):
        targets = values.to(y.dtype)
        try:
            if not _adds_up(logs_of(program, position, first, targets)[None], widths, error):
                continue
            scores, said = scores_of(program, position, x, targets)
        except (IndexError, RuntimeError, ValueError):  # no such value
            continue
        if _adds_up(said, widths, error):
            chances = said.double().exp() * widths
            return ScoreTable(torch.where((chances > 0)[..., None], scores.double(), 0.0), chances, targets, widths)
    return None


def _adds_up(said: Tensor, widths: Tensor, error: float) -> bool:
    most = error + ROUNDED * torch.finfo(said.dtype).eps
    return bool((((said.double().exp() * widths).sum(1) - 1).abs() < most).all())


def _information(program: Program, position: Tensor, x: Tree, y: Tensor, classes: int | None, clip: float) -> Tensor:
    """F at one vector; of second derivatives, without their signs, where the values of y are not found."""
    found = _scores(program, position, x, y, classes)
    if found is not None:
        scores, chances = found.scores, found.chances
        factors = (clip / scores.norm(dim=2)).clamp(max=1) if math.isfinite(clip) else 1.0
        weighted = (scores * (chances * factors).sqrt()[..., None]).flatten(0, 1)
        return weighted.mT @ weighted / size_of(x)
    some = range(min(FEW, size_of(x)))
    few = [map_tensors(lambda tensor: tensor[0], rows_of(x, slice(row, row + 1))) for row in some]
    second = torch.stack([_clipped_hessian(program, position, one, y, clip) for one in few]).double().mean(0)
    sizes, vectors = torch.linalg.eigh((second + second.mT) / 2)
    unsigned: Tensor = (vectors * sizes.abs()) @ vectors.mT
    return unsigned


def _at(program: Program, position: Tensor, x: Tree, y: Tensor, classes: int | None, clip: float) -> float:
    return _largest(_information(program, position, x, y, classes, clip))


def _clipped_hessian(program: Program, position: Tensor, x: Any, y: Tensor, clip: float) -> Tensor:
    one = map_tensors(lambda tensor: tensor[None], x)
    norm = float(scores_of(program, position, one, y[:1])[0].norm())
    return hessian_of(program, position, x, y[0]) * min(1.0, clip / max(norm, 1e-12))


def _largest(values: Tensor) -> float:
    """The largest singular value; not a number where there is none."""
    return float(torch.linalg.matrix_norm(values, 2)) if torch.isfinite(values).all() else math.nan


def _ranges(classes: int | None) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Values with their widths, and by how much chances may miss one: classes, counts, numbers, positive
    numbers, shares."""
    for count in (classes, *range(2, MOST_CLASSES + 1)):
        if count:
            yield torch.arange(count), torch.ones(count, dtype=torch.float64), EXACTLY_ONE
    for first, further, more in COUNTS:
        edges = torch.cat([torch.arange(first), (first * further ** torch.arange(more)).long()]).unique()
        yield (edges[:-1] + edges[1:] - 1) // 2, edges.diff().double(), NEARLY_ONE  # then the middle of each few
    steps = torch.linspace(-1, 1, POINTS, dtype=torch.float64) * torch.asinh(torch.tensor(FARTHEST).double())
    numbers = torch.sinh(steps)
    widths = torch.cosh(steps) * (steps[1] - steps[0])
    yield numbers, widths, NEARLY_ONE
    steps = torch.linspace(*SMALLEST_AND_LARGEST, POINTS, dtype=torch.float64)
    yield steps.exp(), steps.exp() * (steps[1] - steps[0]), NEARLY_ONE
    steps = torch.linspace(-FARTHEST_LOGIT, FARTHEST_LOGIT, POINTS, dtype=torch.float64)
    shares = torch.sigmoid(steps)
    yield shares, shares * (1 - shares) * (steps[1] - steps[0]), NEARLY_ONE
