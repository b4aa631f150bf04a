"""Code that may make tensors or arrays of memory which nobody has written to: there it finds what others left.

torch's functions for that are cleared as they are called (`isolation.clear`); these here are not seen by anybody. Old
constructors of torch (`torch.Tensor(5)`) are filled where records run one by one, so code that may call one takes that
way; numpy has nothing of the kind, nor have storages: these
are refused.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from confide.mechanism.clipping.may_run import calls_a_class, steps_of

_OLD = frozenset(name for name in dir(torch) if name.endswith("Tensor") and name != "Tensor")
STORAGES = frozenset(name for name in dir(torch) if name.endswith("Storage"))  # filled by nobody: refused
_OF_NUMPY = frozenset(
    {"empty", "empty_like", "as_strided", "recarray", "chararray", "nested_iters", "nditer", "rec", "records"}
    | {"masked_all", "masked_all_like", "recfunctions"}
)
_FUNCTIONS_OF_NUMPY: tuple[Any, ...] = (np.empty, np.empty_like, np.lib.stride_tricks.as_strided)
_LOADED = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "LOAD_DEREF", "IMPORT_FROM"})
_ASKS_FOR_KINDS = frozenset({"isinstance", "issubclass"})


@functools.cache
def _called(code: types.CodeType) -> frozenset[str]:
    """Names of what is called, not given on: Python marks the beginning of a chain of names that leads to a call."""
    steps = [step for step in steps_of(code) if step.opname not in ("CACHE", "PRECALL")]
    found, marked = set[str](), False
    for step, after in pairwise(steps):
        begins = step.opname == "PUSH_NULL" or "NULL" in step.argrepr or step.opname == "LOAD_METHOD"
        marked = begins or (marked and step.opname in ("LOAD_ATTR", "LOAD_FAST", "LOAD_DEREF", "LOAD_NAME"))
        if marked and step.opname in _LOADED and after.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            found.add(str(step.argval))
            marked = False
    return frozenset(found)


@functools.cache
def makes_tensors(code: types.CodeType) -> bool:
    """Whether it may call one of torch's old constructors, which give memory as it is."""
    steps = [step for step in steps_of(code) if step.opname not in ("CACHE", "PRECALL", "PUSH_NULL")]
    named = {step.argval for step in steps if step.opname in _LOADED}
    if named & _OLD or calls_a_class(steps):
        return True
    loaded = [after for step, after in pairwise(steps) if step.opname in _LOADED and step.argval == "Tensor"]
    kept = any(after.opname.startswith("STORE") for after in loaded)
    return "Tensor" in _called(code) or kept or bool(loaded and not named & _ASKS_FOR_KINDS)


def makes_arrays(code: types.CodeType, named: Iterable[str]) -> str:
    """What may give an array of numpy that nobody has written to, by the names it is asked for; else an empty text."""
    wrong = sorted(_OF_NUMPY.intersection(named))
    return f"numpy.{wrong[0]}" if wrong else _makes_arrays(code)


@functools.cache
def _makes_arrays(code: types.CodeType) -> str:
    names = {step.argval for step in steps_of(code) if step.opname in _LOADED}
    if "ndarray" in _called(code) or {"ndarray", "__new__"} <= names:
        return "numpy.ndarray, called"
    if "pad" in names and "empty" in _constants(code):
        return "numpy.pad with what nobody has written"
    constants = [one for one in _constants(code) if isinstance(one, tuple)]
    if any("where" in one and "out" not in one for one in constants):
        return "numpy's where= without out="
    return ""


def gives_arrays(value: Any) -> bool:
    return any(value is one for one in _FUNCTIONS_OF_NUMPY)


def _constants(code: types.CodeType) -> Iterator[Any]:
    for constant in code.co_consts:
        yield constant
        if isinstance(constant, types.CodeType):
            yield from _constants(constant)


@contextmanager
def filled() -> Iterator[None]:
    """New tensors hold no number at all instead of what lies there; torch does so for algorithms that repeat."""
    core: Any = torch._C  # torch's own function would load its compiler first
    before = core._get_deterministic_algorithms(), core._get_deterministic_algorithms_warn_only()
    fills = core._get_deterministic_fill_uninitialized_memory()
    core._set_deterministic_algorithms(True, warn_only=not before[0] or before[1])
    core._set_deterministic_fill_uninitialized_memory(True)
    try:
        yield
    finally:
        core._set_deterministic_fill_uninitialized_memory(fills)
        core._set_deterministic_algorithms(before[0], warn_only=before[1])
