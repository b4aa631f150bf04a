"""A program with an independent Gaussian for every number of its unbounded vector: the mean-field form of a model."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.layers.bayesian import BayesianLayer, Source, _check_draws, _noise_like
from confide.models.programs import Program, ProgramOutput, record_tree

NEVER = -1e30
"""Of a log-likelihood: one that is no number is as good as none."""
WORST = 4.0
"""By so much in its logarithm a vector may explain a record worse than another: beyond, it does not explain it."""


class MeanFieldProgram(BayesianLayer):
    """In the place of a program: its vector is unconstrained_mean + softplus(unconstrained_rho) * noise."""

    unconstrained_noise: Tensor | None

    def __init__(self, program: Program, initial_rho: float) -> None:
        super().__init__()
        # Not a layer of this one: the program's own vector is no parameter any more.
        self.held = (program,)
        values = program.unconstrained.detach()
        self.unconstrained_mean = nn.Parameter(values.clone())
        self.unconstrained_rho = nn.Parameter(torch.full_like(values, initial_rho))
        self.unconstrained_noise = None

    @property
    def program(self) -> Program:
        return self.held[0]

    def sample_(self, generator: Source = None, draws: int = 1) -> Self:
        _check_draws(draws)
        self.draws = draws
        self.unconstrained_noise = _noise_like(self.unconstrained_mean, draws, generator)
        return self

    def use_mean_(self) -> Self:
        self.draws = 1
        self.unconstrained_noise = torch.zeros_like(self.unconstrained_mean, requires_grad=False).unsqueeze(0)
        return self

    def forward(self, *x: Tensor, **named: Tensor) -> ProgramOutput:
        if self.unconstrained_noise is None:
            raise RuntimeError(f"{type(self).__name__}: call sample_() before the forward pass, or use_mean_()")
        deviation = F.softplus(self.unconstrained_rho)
        positions = torch.addcmul(self.unconstrained_mean, deviation, self.unconstrained_noise)
        return ProgramOutput(self.program, positions, record_tree(x, named))

    @torch.no_grad()
    def ordinary(self) -> Program:
        """The program again, at the mean."""
        found: Any = copy.deepcopy(self.program)
        found.unconstrained = nn.Parameter(self.unconstrained_mean.detach().clone())
        made: Program = found
        return made


class WhitenedProgram(nn.Module):
    """A program about its present position, in other axes: the vector is the program's own plus axes @ unconstrained.

    `unconstrained` stays zero, so that what is asked of a record is s, the gradient along the axes. `products` stay
    zero as well; where they are asked for, a record's answer is s and share * s s^T, packed: its own information.
    """

    axes: Tensor

    def __init__(self, program: Program, share: float = 0.0) -> None:
        super().__init__()
        self.held = (program,)  # not a layer of this one: its vector moves by what is released alone
        self.share = share
        self.unconstrained = nn.Parameter(torch.zeros_like(program.unconstrained))
        size = len(self.unconstrained)
        self.products = nn.Parameter(self.unconstrained.new_zeros(size * (size + 1) // 2), requires_grad=share > 0)
        self.register_buffer("axes", torch.eye(size, dtype=self.unconstrained.dtype))

    def forward(self, *x: Tensor, **named: Tensor) -> WhitenedOutput:
        program = self.held[0]
        origin = program.unconstrained.detach()
        little = torch.finfo(origin.dtype).eps ** (1 / 3)
        shifts = self.axes.mT * little if self.share else ()
        with torch.no_grad():
            shifted = tuple((program.constrained(origin + one), program.constrained(origin - one)) for one in shifts)
        position = origin + self.axes @ self.unconstrained
        return WhitenedOutput(program, position[None], record_tree(x, named), self, shifted, little)


@dataclass(frozen=True)
class WhitenedOutput(ProgramOutput):
    """What a program says of a batch along the axes of a method.

    shifted   the parameters by name a little ahead and behind along every axis. Differences of what the program says
              there stand for s in s s^T: a record's gradient inside of its gradient would run records one by one
    """

    asked: WhitenedProgram
    shifted: tuple[tuple[Any, Any], ...]
    little: float

    def _said(self, values: Any, x: Any, y: Tensor) -> Tensor:
        found = super()._said(values, x, y)
        if not self.shifted:
            return found
        said = super()._said
        s = torch.stack([said(ahead, x, y) - said(behind, x, y) for ahead, behind in self.shifted])
        # Not by @: a product of matrices rounds a record's part by how many records stand beside it.
        return found + self.asked.share * (self.asked.products * packed(s / (2 * self.little))).sum()


class ScoutedProgram(nn.Module):
    """Several vectors of a program at once: by how much each explains a record worse than the best of them does.

    That is min(1, (l_best - l) / WORST) for log-likelihoods l, less its mean over the vectors, times `weights`, which
    stay zero: what is asked of a record are these numbers, at most half of the root of how many vectors there are.
    """

    vectors: Tensor

    def __init__(self, program: Program, count: int) -> None:
        super().__init__()
        self.held = (program,)
        size, dtype = program.unconstrained.numel(), program.unconstrained.dtype
        self.weights = nn.Parameter(torch.zeros(count, dtype=dtype))
        self.register_buffer("vectors", torch.zeros(count, size, dtype=dtype))

    def forward(self, *x: Tensor, **named: Tensor) -> ScoutedOutput:
        program = self.held[0]
        with torch.no_grad():
            values = tuple(program.constrained(vector) for vector in self.vectors)
        return ScoutedOutput(program, self.vectors[:1], record_tree(x, named), self, values)


@dataclass(frozen=True)
class ScoutedOutput(ProgramOutput):
    """What several vectors of a program say of a batch, by name in `values`."""

    asked: ScoutedProgram
    values: tuple[Any, ...]

    def _said(self, values: Any, x: Any, y: Tensor) -> Tensor:
        said = torch.stack([super(ScoutedOutput, self)._said(one, x, y) for one in self.values])
        known = torch.nan_to_num(said, nan=NEVER, posinf=NEVER, neginf=NEVER).clamp(min=NEVER)
        worse = ((known.amax() - known) / WORST).clamp(max=1)
        return -(self.asked.weights * (worse - worse.mean())).sum()


def packed(vector: Tensor) -> Tensor:
    """v v^T of a vector as its upper triangle, in which entries off the diagonal stand times the root of two."""
    rows, columns, double = _triangle(len(vector), vector.dtype)
    return vector[rows] * vector[columns] * double


def packed_matrix(matrix: Tensor) -> Tensor:
    """The same of any symmetric matrix."""
    rows, columns, double = _triangle(len(matrix), matrix.dtype)
    return matrix[rows, columns] * double


def unpacked(values: Tensor, size: int) -> Tensor:
    """Symmetric matrices from what `packed` gives."""
    rows, columns, double = _triangle(size, values.dtype)
    whole = values.new_zeros(*values.shape[:-1], size, size)
    whole[..., rows, columns] = values / double
    whole[..., columns, rows] = values / double
    return whole


def _triangle(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = torch.triu_indices(size, size)
    return rows, columns, torch.where(rows == columns, 1.0, math.sqrt(2.0)).to(dtype)


def program_of(module: nn.Module) -> Program | None:
    """The program that a module is, or is the mean-field form of; None for a network."""
    if isinstance(module, MeanFieldProgram):
        return module.program
    return module if isinstance(module, Program) else None
