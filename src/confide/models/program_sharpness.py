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
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from confide.data.trees import Tree, map_tensors, rows_of, size_of
from confide.models.programs import Program, hessian_of, scores_of

DRAWS = 20
"""Of the prior: enough for a ninth decile, about a second of work."""
SHARE = 0.9
"""A step that is stable at all of them would be as small as the sharpest model that the prior does not rule out."""
COUNTS = 64
"""Values of a count that are looked at, from zero."""
POINTS, FARTHEST = 301, 60.0
"""Of a number without limits: sinh of equal steps, dense where laws with parameters of about one have their mass."""
NEARLY_ONE = 0.05
"""What sums over such points miss of a law that they cover; a wrong range is off by more."""
SHARPEST = 1e6
"""Beyond this a chain of any length would stand still."""
FEW = 2
"""Records whose second derivatives are looked at, which take longer."""


def sharpness(program: Program, x: Tree, y: Tensor, classes: int | None, clip: float) -> float:
    """The curvature of a record's loss; 1 at least, and where it cannot be found. Rows of x and y show their form."""
    if program.unconstrained.device.type != "cpu":
        return 1.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            found = torch.tensor([_at(program, start, x, y, classes, clip) for start in _starts(program)])
        except Exception:  # whatever the program does not like: its own errors come up in the rehearsal
            return 1.0
    known = found[torch.isfinite(found)]
    return float(known.quantile(SHARE).clamp(1.0, SHARPEST)) if len(known) else 1.0


def _starts(program: Program) -> Iterator[Tensor]:
    yield program.unconstrained.detach()
    for _ in range(DRAWS):
        yield program.prior_draw()


def _at(program: Program, position: Tensor, x: Tree, y: Tensor, classes: int | None, clip: float) -> float:
    """The largest eigenvalue of F at one vector; of second derivatives where the values of y are not found."""
    rows = [map_tensors(lambda tensor: tensor[0], rows_of(x, slice(row, row + 1))) for row in range(size_of(x))]
    for values, widths in _ranges(classes):
        try:
            targets = values.to(y.dtype)
            found = [_weighted_scores(program, position, one, targets, widths, clip) for one in rows]
        except (IndexError, RuntimeError, ValueError):  # no such value
            continue
        weighted = [one for one in found if one is not None]
        if len(weighted) == len(rows):
            return _largest(torch.cat(weighted)) ** 2 / len(rows)
    second = [_clipped_hessian(program, position, one, y, clip) for one in rows[:FEW]]
    return _largest(torch.stack(second).double().mean(0))


def _clipped_hessian(program: Program, position: Tensor, x: Any, y: Tensor, clip: float) -> Tensor:
    norm = float(scores_of(program, position, x, y[:1])[0].norm())
    return hessian_of(program, position, x, y[0]) * min(1.0, clip / max(norm, 1e-12))


def _largest(values: Tensor) -> float:
    """The largest singular value; not a number where there is none."""
    return float(torch.linalg.matrix_norm(values, 2)) if torch.isfinite(values).all() else math.nan


def _weighted_scores(
    program: Program, position: Tensor, x: Any, y: Tensor, widths: Tensor, clip: float
) -> Tensor | None:
    """Scores times the roots of their chances and of their factors; None where chances do not add up to one."""
    scores, said = scores_of(program, position, x, y)
    chances = said.double().exp() * widths
    if not abs(float(chances.sum()) - 1) < NEARLY_ONE:
        return None
    seen = chances > 0
    kept, norms = scores[seen].double(), scores[seen].double().norm(dim=1)
    found: Tensor = kept * (chances[seen] * (clip / norms).clamp(max=1)).sqrt().unsqueeze(1)
    return found


def _ranges(classes: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Values with their widths: classes, two of them, counts, numbers, positive numbers."""
    for count in (classes, 2, COUNTS):
        if count:
            yield torch.arange(count), torch.ones(count, dtype=torch.float64)
    steps = torch.linspace(-1, 1, POINTS, dtype=torch.float64) * torch.asinh(torch.tensor(FARTHEST).double())
    numbers = torch.sinh(steps)
    widths = torch.cosh(steps) * (steps[1] - steps[0])
    yield numbers, widths
    yield numbers[numbers > 0], widths[numbers > 0]
