"""More of the corpus: windows that show more than the record at hand.

Frames of who called, profiles, addresses, the inside of torch's vmap and of confide.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide.sources.queries import GradientQuery, StatisticQuery
from tests.mechanism.clipping.corpus import WIDTH, Attack, network, plain


def _largest(found: list[Any]) -> float:
    tables = [one for one in found if isinstance(one, Tensor) and one.dim() == 2 and one.shape[1] == WIDTH]
    return max([0.0, *(float(one.detach().double().abs().sum()) for one in tables)])


def _behind(frame: Any) -> float:
    found: list[Any] = []
    while frame is not None:
        found += list(getattr(frame, "_".join(("f", "locals"))).values())
        frame = getattr(frame, "_".join(("f", "back")))
    return _largest(found)


def _frame_of_a_generator(x: Tensor) -> float:
    own: list[Any] = []

    def steps() -> Any:
        yield getattr(own[0], "_".join(("gi", "frame")))

    own.append(steps())
    return _behind(next(own[0]))


def _frame_of_an_error(x: Tensor) -> float:
    try:
        raise KeyError
    except KeyError as error:
        return _behind(getattr(error.__traceback__, "_".join(("tb", "frame"))))


def _shown_stack(x: Tensor) -> float:
    shown = traceback.StackSummary.extract(traceback.walk_stack(None), capture_locals=True)
    return float(sum(len(text) for frame in shown for text in (frame.locals or {}).values()))


def _profile(x: Tensor) -> float:
    with torch.profiler.profile(record_shapes=True) as found:
        x @ x.mT
    return float(sum(sum(size) for event in found.events() for size in event.input_shapes if isinstance(size, list)))


def _size_of_the_region(x: Tensor) -> float:
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

    inner: Any = retrieve_all_functorch_interpreters()
    return float(inner[0].batch_size()) if inner else 1.0


def _unguarded(x: Tensor) -> float:
    from confide.mechanism.clipping.isolation import unguarded

    with unguarded():
        return float(len(repr(x)))


def _without_the_guard(x: Tensor) -> float:
    from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

    if _get_current_function_mode() is None:
        return 0.0
    with _pop_mode_temporarily():
        return float(len(repr(x)))


def _behind_an_array(x: Tensor) -> float:
    """Memory that lies behind a record's own."""

    class Longer:
        def __init__(self, of: Any) -> None:
            start = of.__array_interface__["data"][0]
            self.__array_interface__ = {"shape": (400,), "typestr": "<f8", "data": (start, False), "version": 3}

    return float(np.nan_to_num(np.clip(np.asarray(Longer(x.detach().numpy())), -5, 5)).sum())


WINDOWS: dict[str, Callable[[Tensor], float]] = {
    "frames of a generator": _frame_of_a_generator,
    "frames of an error": _frame_of_an_error,
    "frames": lambda x: _behind(sys._getframe()),
    "a stack that is shown": _shown_stack,
    "a profile": _profile,
    "the size of a region": _size_of_the_region,
    "confide's own way out": _unguarded,
    "a guard put aside": _without_the_guard,
    "an address": lambda x: float(x.data_ptr() % 997),
    "memory behind an array": _behind_an_array,
    "an address of an array": lambda x: float(x.detach().numpy().ctypes.data % 997),
    "all objects": lambda x: _largest(__import__("gc").get_objects()),
}


def _turned(seen: float) -> float:
    return 9.0 * float(np.cos(3.0 * seen))


def _seen_by_a_loss(look: Callable[[Tensor], float]) -> Attack:
    return lambda: GradientQuery(network(), lambda output, y: plain(output * _turned(look(output)), y))


def _seen_by_a_statistic(look: Callable[[Tensor], float]) -> Attack:
    return lambda: StatisticQuery(lambda x, y: (x + _turned(look(x))).tanh(), WIDTH)


SEEN: dict[str, Attack] = {
    **{f"loss sees {name}": _seen_by_a_loss(look) for name, look in WINDOWS.items()},
    **{f"statistic sees {name}": _seen_by_a_statistic(look) for name, look in WINDOWS.items()},
}
