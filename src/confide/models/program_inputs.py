"""What a program looks at: ids as far as its own tables reach, and parameters that its log-likelihood uses.

An effect for every group is looked up by a number of the record. If made-up records were all of the first group, the
program would seem to say that records tell of this one alone. How many groups there are stands in the shapes of the
program's parameters: the number of ids is the length of an axis, the last of which can be looked up, and the next not.

A parameter that is in priors of others alone, such as the spread of effects, no record tells of: not little, nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from confide.data.trees import Tree, map_tensors, rows_of, size_of
from confide.models.programs import Program, said_of, used_names

LOOKED_AT = 32
"""Made-up records: one may take a branch that uses fewer parameters."""
MOST_COLUMNS = 16
"""Of whole numbers in one tensor, which are tried one by one."""


def with_ids(program: Program, x: Tree, y: Tensor) -> Tree:
    """The same inputs, with ids at random where all were zero and the program looks them up; no record is read."""
    sizes = sorted({size for part in program.parts for size in part.shape if size > 1}, reverse=True)
    generator = torch.Generator().manual_seed(0)
    for tensor in _ids_in(x):
        columns = tensor.reshape(len(tensor), -1).unbind(1)  # views: what is written there is in x
        for column in columns if len(columns) <= MOST_COLUMNS else ():
            count = next((size for size in sizes if _are_ids(program, x, y, column, size)), 1)
            column.copy_(torch.randint(count, column.shape, generator=generator))
    return x


def used_numbers(program: Program, x: Tree, y: Tensor) -> Tensor:
    """Which numbers of the vector the log-likelihood of any of these made-up records is a function of.

    By autograd's record of what ran, not by its values: an effect that is nought here is used.
    """
    used = torch.zeros(program.unconstrained.numel(), dtype=torch.bool)
    for row in range(min(LOOKED_AT, size_of(x))):
        try:
            names = used_names(program, map_tensors(lambda tensor: tensor[row], x), y[row])  # noqa: B023
        except Exception:  # what it uses is not known: all of it
            return torch.ones_like(used)
        for part in program.parts:
            used[part.where] |= part.name in names
    return used


def _ids_in(x: Tree) -> list[Tensor]:
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
        if whole and tensor.is_contiguous() and not bool(tensor.any()):
            found.append(tensor)
        return tensor

    map_tensors(look, x)
    return found


def _are_ids(program: Program, x: Tree, y: Tensor, column: Tensor, count: int) -> bool:
    """Whether the last of so many can be looked up, and the one after it cannot."""
    last, beyond = (_raised(program, x, y, column, value) for value in (count - 1, count))
    return last is None and beyond is IndexError


def _raised(program: Program, x: Tree, y: Tensor, column: Tensor, value: int) -> type[Exception] | None:
    column[0] = value
    try:
        said_of(program, map_tensors(lambda tensor: tensor[0], rows_of(x, slice(0, 1))), y[0])
    except Exception as error:  # the program's own, about a made-up record
        return type(error)
    finally:
        column[0] = 0
    return None
