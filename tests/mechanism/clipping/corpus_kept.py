"""More of the corpus: what one record leaves for the next in places that are easily overlooked.

Names, texts and annotations of functions, the form of an array, a cache, tables of the standard library.
"""

from __future__ import annotations

import enum
import functools
import logging
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from confide.sources.queries import GradientQuery, StatisticQuery
from tests.mechanism.clipping.corpus import WIDTH, Around, Attack, plain

LEVEL, TALL, BUCKETS = 77, 5.0, 7
BANK: list[Any] = []
WEAK: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
ARRAY = np.zeros(12)
SPARSE = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.ones(2), (2,), check_invariants=True)


class Box:
    """0"""


class Taller(Box): ...


class Bits(enum.Flag):
    ONE, TWO, FOUR = 1, 2, 4


def helper() -> None:
    """0"""


SHOWN: Any = property(lambda owner: owner, doc="0")
STATIC: Any = staticmethod(helper)
PARTLY: Any = functools.partial(max, 1)
BOX = Box()


def _text(owner: Any, name: str) -> Callable[[float], float]:
    def keep(now: float) -> float:
        said = getattr(owner, name) or "0"
        setattr(owner, name, str(now))
        return float(said) if said[:1].isdigit() else 0.0

    return keep


def _annotated(now: float) -> float:
    before = helper.__annotations__.get("kept", 0.0)
    helper.__annotations__["kept"] = now
    return float(before)


def _attribute(owner: Any) -> Callable[[float], float]:
    def keep(now: float) -> float:
        before = getattr(owner, "kept", 0.0)
        owner.kept = now
        return float(before)

    return keep


def _keyword(now: float) -> float:
    before = PARTLY.keywords.get("kept", 0.0)
    PARTLY.keywords["kept"] = now
    return float(before)


def _form(now: float) -> float:
    before = float(ARRAY.ndim)
    ARRAY.shape = (12,) if now > TALL else (3, 4)
    return before * 3.0


def _writable(now: float) -> float:
    before = float(ARRAY.flags.writeable)
    ARRAY.flags.writeable = now > TALL
    return before * 3.0


def _coalesced(now: float) -> float:
    before = float(SPARSE.is_coalesced())
    SPARSE._coalesced_(now > TALL)
    return before * 3.0


def _level_name(now: float) -> float:
    before = logging.getLevelName(LEVEL)
    logging.addLevelName(LEVEL, str(now))
    return float(before) if before[0].isdigit() else 0.0


def _switched_off(now: float) -> float:
    before = float(logging.root.manager.disable)
    logging.disable(int(now) % 50)
    return before


def _said_once(now: float) -> float:
    """Whether somebody said so before: one number out of a few."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("once")
        warnings.warn(f"bucket {int(now) % BUCKETS}", stacklevel=2)
    return 5.0 * len(heard)


def _kind(now: float) -> float:
    before = 3.0 * (type(BOX) is Taller)
    BOX.__class__ = Taller if now > TALL else Box  # type: ignore[assignment]
    return before


def _flags(now: float) -> float:
    before = float(len(Bits._value2member_map_))
    Bits(int(now) % 8)
    return before


@functools.lru_cache(maxsize=4)
def _first_seen() -> list[Any]:
    return []


def _cached(now: float) -> float:
    _first_seen().append(now)
    return float(_first_seen()[0])


class Held:
    """Something a weak reference can show."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _weak(now: float) -> float:
    before, fresh = WEAK.get("last"), Held(now)
    BANK.append(fresh)
    WEAK["last"] = fresh
    return 0.0 if before is None else float(before.value)


PLACES_TO_KEEP: dict[str, Callable[[float], float]] = {
    "the text of a function": _text(helper, "__doc__"),
    "the name of a function": _text(helper, "__name__"),
    "the long name of a function": _text(helper, "__qualname__"),
    "the module of a function": _text(helper, "__module__"),
    "annotations": _annotated,
    "the name of a class": _text(Box, "__name__"),
    "the text of a class": _text(Box, "__doc__"),
    "the text of a property": _text(SHOWN, "__doc__"),
    "a static method": _attribute(STATIC),
    "a partial function": _attribute(PARTLY),
    "keywords": _keyword,
    "the form of an array": _form,
    "whether an array is writable": _writable,
    "whether a tensor is coalesced": _coalesced,
    "names of levels": _level_name,
    "logging switched off": _switched_off,
    "a warning given once": _said_once,
    "the class of an object": _kind,
    "members of flags": _flags,
    "what a cache gave": _cached,
    "a weak dictionary": _weak,
    "a module of its own": _attribute(types.ModuleType("own")),
}


def _kept_by_a_module(keep: Callable[[float], float]) -> Attack:
    return lambda: GradientQuery(Around(lambda x: x + 3.0 * keep(float(x.detach().abs().sum()))), plain)


def _kept_by_a_statistic(keep: Callable[[float], float]) -> Attack:
    return lambda: StatisticQuery(lambda x, y: (x + keep(float(x.abs().sum()))).tanh(), WIDTH)


KEPT: dict[str, Attack] = {
    **{f"module keeps in {name}": _kept_by_a_module(keep) for name, keep in PLACES_TO_KEEP.items()},
    **{f"statistic keeps in {name}": _kept_by_a_statistic(keep) for name, keep in PLACES_TO_KEEP.items()},
}


def forget() -> None:
    """As before the first attack."""
    BANK.clear()
    _first_seen.cache_clear()
    helper.__annotations__.clear()
