"""Records as trees of tensors: one tensor, a tuple of tensors, or tensors by name; the records come first in each.

A tensor is the simplest tree. Whoever handles records (the boundary, the clipping engine, sampling, fingerprints,
predictions) does it through the functions of this file, so that none of them asks what a record is made of. A module is
called as its inputs are given: with a tensor, with several, or by name.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from confide.data.columns import Input
from confide.data.table import Array
from confide.devices.default import default_back
from confide.errors import Refusal

Tree: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
_SHORT = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.bool)
"""Whole numbers that a plain array of features may be stored in; 64 bits are ids."""
LONGEST_ERROR = 240
"""Characters of what a network raised that stand in a sentence about it; the whole is chained to that."""
ROWS_AT_ONCE = 1 << 16
"""Records that are looked at together, so that tensors on a disk never are in memory as a whole."""


# any tree -----------------------------------------------------------------------------------------------------------


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of nested tuples, lists and dictionaries, in a fixed order."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) is tuple or type(tree) is list:
        return [tensor for part in tree for tensor in tensors_in(part)]
    if type(tree) is dict:
        return [tensor for part in tree.values() for tensor in tensors_in(part)]
    return [] if tree is None else [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(function: Any, tree: Any, *values: Sequence[Any]) -> Any:
    """Apply `function(tensor, *parallel values)` to every tensor of a tree, in the order of `tensors_in`."""
    return _mapped(function, tree, zip(*values, strict=False) if values else repeat(()))


def _mapped(function: Any, tree: Any, beside: Iterator[Any]) -> Any:
    """Plain containers by hand, which takes a tenth of the time of torch's trees; the others by those."""
    if isinstance(tree, Tensor):
        return function(tree, *next(beside))
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([_mapped(function, part, beside) for part in tree])
    if kind is dict:
        return {name: _mapped(function, part, beside) for name, part in tree.items()}
    if tree is None:
        return None
    leaves, structure = pytree.tree_flatten(tree)
    mapped = [function(leaf, *next(beside)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(mapped, structure)


# trees of records ---------------------------------------------------------------------------------------------------


def size_of(tree: Any) -> int:
    """How many records there are."""
    first = tree if isinstance(tree, Tensor) else tensors_in(tree)[0]
    return first.shape[0]  # len() would ask in Python, at every step


def rows_of(tree: Any, rows: slice | Tensor) -> Any:
    """Some of the records."""
    return tree[rows] if isinstance(tree, Tensor) else map_tensors(lambda tensor: tensor[rows], tree)


def called(module: Callable[..., Any], tree: Any) -> Any:
    """The module at these records: given as one argument, as several, or by name."""
    with default_back():
        if isinstance(tree, dict):
            return module(**tree)
        return module(*tree) if isinstance(tree, tuple) else module(tree)


def form_of(tree: Any) -> tuple[Any, ...]:
    """What is the same for every record: names, shapes and types."""
    names = tuple(tree) if isinstance(tree, dict) else ()
    return names, *((tensor.shape[1:], tensor.dtype) for tensor in tensors_in(tree))


def numbers_of(tree: Any) -> int:
    """How many numbers one record has."""
    return sum(tensor[:1].numel() for tensor in tensors_in(tree))


def in_type(tree: Any, dtype: torch.dtype) -> Any:
    """Real numbers in the number type of a network; ids, masks and other whole numbers as they are."""
    if isinstance(tree, Tensor) and (tree.dtype == dtype or not tree.is_floating_point()):
        return tree
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


def inputs_of(x: Any, dtype: torch.dtype) -> Tree:
    """What a network is asked about: arrays and tensors of records, in its number type.

    Plain whole numbers of less than 64 bits are features, as they are behind the boundary.
    """
    tree = tree_of(x)
    if isinstance(tree, Tensor) and tree.dtype in _SHORT:
        return tree.to(dtype)
    found: Tree = in_type(tree, dtype)
    return found


def tree_of(x: Any) -> Tree:
    """Tensors, of whatever was given: a tensor or an array, a tuple of them, or a dictionary."""
    named = isinstance(x, Mapping)
    if is_composed(x):
        parts: dict[Any, Any] = dict(x) if named else dict(enumerate(x))
        if not parts or (named and not all(isinstance(name, str) for name in parts)):
            raise Refusal(f"x: a dictionary of {len(parts)} tensors; name each of them by the module's argument")
        made = {name: _tensor(part, f"x[{name!r}]") for name, part in parts.items()}
        sizes = {name: len(part) for name, part in made.items()}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{size} in {name!r}" for name, size in sizes.items())
            raise Refusal(f"x: needs one row per record in each of its tensors; it has {listed}")
        return made if named else tuple(made.values())
    return _tensor(x, "x")


def is_composed(x: Any) -> bool:
    """Whether records are several tensors; a tuple of anything but arrays is one table, as in numpy."""
    if isinstance(x, Mapping):
        return not type(x).__module__.startswith("scipy.sparse")  # some of its matrices are dictionaries of numbers
    return isinstance(x, tuple) and bool(x) and all(isinstance(part, Tensor | np.ndarray) for part in x)


def arrays_in(x: Any) -> list[Array]:
    """The arrays that a tree of records is made of; anything else as one array."""
    if not is_composed(x):
        return [np.asarray(x)]
    return [
        tensor.numpy() if tensor.dtype != torch.bfloat16 else tensor.float().numpy()
        for tensor in tensors_in(tree_of(x))
    ]


def named_arrays(x: Any) -> dict[str, Array]:
    """The arrays of a tree by name, or by place; `from_named_arrays` is the inverse."""
    tree = tree_of(x)
    names = list(tree) if isinstance(tree, dict) else [str(place) for place in range(len(tensors_in(tree)))]
    return dict(zip(names, arrays_in(tree), strict=True))


def from_named_arrays(arrays: Mapping[str, Array]) -> Tree:
    if list(arrays) != [str(place) for place in range(len(arrays))]:
        return tree_of(dict(arrays))
    return tree_of(tuple(arrays.values()) if len(arrays) > 1 else arrays["0"])


def _tensor(part: Any, where: str) -> Tensor:
    if isinstance(part, Tensor):
        with torch._C.DisableTorchFunctionSubclass():  # a plain tensor, whatever it was: nobody's code comes with it
            found = part.detach().as_subclass(Tensor).cpu()
        if found.is_complex() or found.layout != torch.strided:
            raise Refusal(f"{where}: holds {found.dtype} in layout {found.layout}; use an ordinary tensor of numbers")
    else:
        with warnings.catch_warnings():  # arrays that stay on a disk cannot be written to, and nobody does
            warnings.filterwarnings("ignore", message=".*not writable.*")
            array = np.asarray(part)
            if array.dtype.kind not in "biuf":
                raise Refusal(f"{where}: holds {array.dtype} values; encode them as numbers first")
            found = torch.as_tensor(array)
    if found.ndim < 1:
        raise Refusal(f"{where} of shape (): needs one row per record")
    return found


# what is declared ---------------------------------------------------------------------------------------------------


def declared_for(tree: Tree, inputs: Sequence[tuple[str, Input]]) -> list[Input | None]:
    """What the schema says of each tensor of a tree; a name that no tensor has is refused."""
    said = dict(inputs)
    names = list(tree) if isinstance(tree, dict) else [str(place) for place in range(len(tensors_in(tree)))]
    unknown = sorted(said.keys() - set(names))
    if unknown:
        raise Refusal(f"inputs={unknown}: declared in the schema, but the records have {names}; use the same names")
    found = [said.get(name) for name in names]
    for name, one, tensor in zip(names, found, tensors_in(tree), strict=True):
        if one is not None and one.vocabulary is not None and tensor.is_floating_point():
            raise Refusal(
                f"inputs={name!r}: has a vocabulary, but the records hold {tensor.dtype}; store whole numbers"
            )
        sizes = None if one is None else one.vocabulary
        if isinstance(sizes, tuple) and (tensor.ndim < 2 or tensor.shape[-1] != len(sizes)):
            raise Refusal(
                f"inputs={name!r}: has {len(sizes)} vocabularies, but the records have the shape "
                f"{tuple(tensor.shape[1:])}; give one, or one for every place along the last axis"
            )
    return found


def checked(tree: Tree, inputs: Sequence[tuple[str, Input]]) -> tuple[Tree, Tensor]:
    """The records as they are kept, and which of them can answer: the others count as zero and raise nothing.

    A number that is not finite, or an id outside of its vocabulary, takes its record out. Numbers outside of declared
    bounds are moved to them. Types are kept, but for plain features, which are single or double precision.
    """
    said = declared_for(tree, inputs)
    usable = torch.ones(size_of(tree), dtype=torch.bool)
    plain = isinstance(tree, Tensor)
    kept = iter([_checked(tensor, one, plain, usable) for tensor, one in zip(tensors_in(tree), said, strict=True)])
    return map_tensors(lambda tensor: next(kept), tree), usable


def _checked(tensor: Tensor, said: Input | None, plain: bool, usable: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        if said is not None and said.vocabulary is not None:
            for start in range(0, len(tensor), ROWS_AT_ONCE):
                part = tensor[start : start + ROWS_AT_ONCE].long()
                known = (part >= 0) & (part < torch.tensor(said.vocabulary))
                usable[start : start + ROWS_AT_ONCE] &= _flat(known).all(1)
            return tensor
        return tensor.to(torch.float32) if plain and tensor.dtype in _SHORT else tensor
    if plain and tensor.dtype != torch.float64:
        tensor = tensor.to(torch.float32)
    usable &= torch.isfinite(_flat(tensor)).all(1)
    tensor = torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)
    return tensor if said is None or said.bounds is None else tensor.clamp_(*said.bounds)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))


def scattered(tree: Tree, inputs: Sequence[tuple[str, Input]], records: int) -> Tree:
    """Records of the same form that nobody has, anywhere within what is declared; numbers otherwise about one."""
    said, generator = iter(declared_for(tree, inputs)), torch.Generator().manual_seed(0)

    def make(tensor: Tensor) -> Tensor:
        one, shape = next(said), (records, *tensor.shape[1:])
        if not tensor.is_floating_point():
            values = 1 if one is None or one.vocabulary is None else one.vocabulary
            if isinstance(values, tuple):
                drawn = [torch.randint(size, shape[:-1], generator=generator) for size in values]
                return torch.stack(drawn, -1).to(tensor.dtype)
            return torch.randint(values, shape, generator=generator).to(tensor.dtype)
        if one is None or one.bounds is None:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
        low, high = one.bounds
        return torch.rand(shape, generator=generator, dtype=torch.float64).mul_(high - low).add_(low).to(tensor.dtype)

    made: Tree = map_tensors(make, tree)
    return made


def made_up(tree: Tree, inputs: Sequence[tuple[str, Input]], records: int = 2) -> Tree:
    """Records of the same form that nobody has: at the lowest and, the last one, at the highest that is declared."""
    said = iter(declared_for(tree, inputs))

    def make(tensor: Tensor) -> Tensor:
        one = next(said)
        found = torch.zeros((records, *tensor.shape[1:]), dtype=tensor.dtype)
        if one is not None and one.vocabulary is not None:
            found[-1] = torch.tensor(one.vocabulary) - 1  # a table with too few rows fails here, not at a record
        elif one is not None and one.bounds is not None and tensor.is_floating_point():
            found[:], found[-1] = one.bounds
        return found

    made: Tree = map_tensors(make, tree)
    return made


@contextmanager
def about_made_up(inputs: Sequence[tuple[str, Input]]) -> Iterator[None]:
    """What a network cannot do with made-up records is one sentence, with a way out, before anything is charged."""
    said = [f"{name} has ids below {one.sizes}" for name, one in inputs if one.vocabulary]
    try:
        yield
    except (Refusal, Warning, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, IndexError) and said:
            raise Refusal(
                f"module: {error}, asked about the highest ids that the schema declares ({'; '.join(said)}); declare "
                "as many as its tables have rows, Input(vocabulary=(4, 3)) for columns with tables of their own"
            ) from error
        raise Refusal(
            f"module, likelihood: raised {type(error).__name__} ({_in_short(error)}) on made-up records, which have "
            "the form of the data, at the lowest and the highest numbers that the schema declares (undeclared: zero); "
            "mend what it does with those, nothing was charged"
        ) from error


def _in_short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= LONGEST_ERROR else text[: LONGEST_ERROR - 3] + "..."
