"""A program with an independent Gaussian for every number of its unbounded vector: the mean-field form of a model."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.layers.bayesian import BayesianLayer, Source, _check_draws, _noise_like
from confide.models.programs import Program, ProgramOutput, record_tree


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

    `unconstrained` stays zero, so that what is asked of a record is the gradient along the axes.
    """

    axes: Tensor

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.held = (program,)  # not a layer of this one: its vector moves by what is released alone
        self.unconstrained = nn.Parameter(torch.zeros_like(program.unconstrained))
        self.register_buffer("axes", torch.eye(len(self.unconstrained), dtype=self.unconstrained.dtype))

    def forward(self, *x: Tensor, **named: Tensor) -> ProgramOutput:
        program = self.held[0]
        position = program.unconstrained.detach() + self.axes @ self.unconstrained
        return ProgramOutput(program, position[None], record_tree(x, named))


def program_of(module: nn.Module) -> Program | None:
    """The program that a module is, or is the mean-field form of; None for a network."""
    if isinstance(module, MeanFieldProgram):
        return module.program
    return module if isinstance(module, Program) else None
