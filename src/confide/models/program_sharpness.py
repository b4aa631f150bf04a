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
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from confide.data.trees import Tree, map_tensors, rows_of, size_of
from confide.models.programs import Program, hessian_of, logs_of, scores_of

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
MOST_CLASSES, EXACTLY_ONE = 12, 1e-4
"""Classes that nobody has declared; their chances leave nothing for another one."""
NEARLY_ONE = 0.05
"""What sums over such points miss of a law that they cover; a wrong range is off by more."""
LEAST_OF_A_PART = 0.2
"""Of the information about the best known number of a parameter: less for others makes their steps longer."""
SHARPEST = 1e6
"""Beyond this a chain of any length would stand still."""
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
    pairs of numbers have in common is believed as far as there are more inputs than numbers, and no number of a
    parameter is held for much less known than the others of the same one, such as the effect of another group.
    """
    with torch.no_grad():
        found = _information(program, position, x, y, classes, math.inf)
    for part in program.parts:
        known = found.diagonal()[part.where]
        if len(known):
            known.clamp_(min=float(known.max()) * LEAST_OF_A_PART)
    doubt = 0.5 * min(1.0, len(found) / size_of(x))
    held = (1 - doubt) * found + doubt * torch.diag(found.diagonal())
    return held if bool(torch.isfinite(held).all()) else None


def taken_by_clips(
    program: Program, position: Tensor, form: Form, axes: Tensor, clips: Sequence[float], share: float = 0.0
) -> list[tuple[Tensor, Tensor]] | None:
    """What each of these clips takes of scores along the axes, and of their products, on average, by the program's own
    law of y: means of (c - 1) s and of (c - 1) s s^T. None where that law is not known.

    Whole scores are nought on average, at the law's own parameters. A record answers with its score s and with
    share * s s^T, which are clipped together.
    """
    with torch.no_grad():
        found = _scores(program, position, *form)
    if found is None:
        return None
    scores, chances = found
    along = (scores @ axes.double()).flatten(0, 1)
    long = along.norm(dim=1)
    answer = long * (1 + (share * long).square()).sqrt()
    means = []
    for clip in clips:
        # What a clip takes, not what it leaves: sums over points miss little of that.
        lost = ((clip / answer).clamp(max=1) - 1) * chances.flatten() / size_of(form[0])
        weighted = along * lost[:, None]
        means.append((weighted.sum(0), weighted.mT @ along))
    return means if all(bool(torch.isfinite(one).all()) for pair in means for one in pair) else None


def _scores(
    program: Program, position: Tensor, x: Tree, y: Tensor, classes: int | None
) -> tuple[Tensor, Tensor] | None:
    """Scores at made-up inputs and all values of y, with the chances of these; None where the values are not found."""
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
            return torch.where((chances > 0)[..., None], scores.double(), 0.0), chances
    return None


def _adds_up(said: Tensor, widths: Tensor, error: float) -> bool:
    return bool((((said.double().exp() * widths).sum(1) - 1).abs() < error).all())


def _information(program: Program, position: Tensor, x: Tree, y: Tensor, classes: int | None, clip: float) -> Tensor:
    """F at one vector; of second derivatives, without their signs, where the values of y are not found."""
    found = _scores(program, position, x, y, classes)
    if found is not None:
        scores, chances = found
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
