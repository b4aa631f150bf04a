"""Settings that hold for the whole process, most of them in C: as they were, and put back after every record.

Of torch all that can be asked for and set (`torch._C._get_x` or `_is_x`, and `_set_x`) are found by their names, so
that one which a later version brings is put back too. Some have a way of their own.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.autograd import forward_ad

from confide.mechanism.clipping.containers import contents_of, restore_container

Setting: TypeAlias = tuple[Callable[[], Any], Callable[[Any], object]]  # how to ask for it, and how to set it

# With a way of their own below, of a thread or a tracer and not of the process, or fixed once threads have started.
_APART_WORDS = (
    "deterministic_algorithms default_dtype grad_enabled anomaly_enabled thread_name torch_function_state "
    "tracing_state graph_exec_group num_threads num_interop_threads"
)
_APART = frozenset(_APART_WORDS.split())
_SMALL = 5e-324  # the least number above zero, which is zero where such numbers are flushed
_CORE: Any = torch._C


def _asked_for(name: str) -> Callable[[], Any] | None:
    """What tells the setting `name`, if there is something that tells it without being told more."""
    plain = name.removesuffix("_enabled")
    of_attention = f"_get_{plain.removeprefix('sdp_use_')}_sdp_enabled"
    for getter in (f"_get_{name}", f"_is_{name}", f"_is_{plain}_enabled", f"is_{name}", of_attention):
        found: Any = vars(torch._C).get(getter)
        try:
            if found is not None:
                found()
                return found  # type: ignore[no-any-return]
        except (TypeError, RuntimeError):
            continue
    return None


def _pairs() -> list[Setting]:
    names = [name.partition("set_")[2] for name in vars(torch._C) if name.startswith(("_set_", "set_"))]
    kept = [name for name in dict.fromkeys(names) if name not in _APART and not name.startswith("autocast")]
    found = [(name, _asked_for(name)) for name in kept]
    return [(partial(_answer, getter), _setter(name)) for name, getter in found if getter is not None]


def _answer(getter: Callable[..., Any], *of: str) -> Any:
    """None where torch does not say: what was set in the new way has no answer in the old one."""
    try:
        return getter(*of)
    except RuntimeError:
        return None


def _precisions() -> list[Setting]:
    """Of single-precision products, which were set by name of a backend and of an operation."""
    ask, tell = _CORE._get_fp32_precision_getter, _CORE._set_fp32_precision_setter
    kinds = [("generic", "all"), *((one, of) for one in ("mkldnn", "cuda") for of in ("all", "matmul", "conv", "rnn"))]
    known = [kind for kind in kinds if _answer(ask, *kind) is not None]
    return [(partial(_answer, ask, *kind), partial(tell, *kind)) for kind in known]


def _setter(name: str) -> Callable[[Any], object]:
    function: Any = vars(torch._C).get(f"_set_{name}") or vars(torch._C)[f"set_{name}"]
    return lambda value: None if value is None else function(*value) if isinstance(value, tuple) else function(value)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _flushes() -> bool:
    """Whether this thread takes the smallest numbers for zero."""
    return _SMALL * 1.0 == 0.0


def _leave_levels(level: int) -> None:
    while _level() > level:
        forward_ad.exit_dual_level()


def _level() -> int:
    found: int = vars(forward_ad)["_current_level"]
    return found


def _regions() -> int:
    """How many regions of autocast this thread is in."""
    found = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return found


def _leave_regions(before: int) -> None:
    now = _regions()
    for _ in range(abs(now - before)):
        (torch.autocast_decrement_nesting if now > before else torch.autocast_increment_nesting)()


def _fusions() -> tuple[tuple[str, int], ...]:
    """How compiled functions are put together, which torch tells only to those who set it."""
    kept = _CORE._jit_set_fusion_strategy([])
    _CORE._jit_set_fusion_strategy(kept)
    return tuple(kept)


_OWN: list[Setting] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    (partial(torch.get_autocast_dtype, "cpu"), partial(torch.set_autocast_dtype, "cpu")),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (_deterministic, lambda kept: _CORE._set_deterministic_algorithms(kept[0], warn_only=kept[1])),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.sparse.check_sparse_tensor_invariants.is_enabled, _CORE._set_check_sparse_tensor_invariants),
    (_flushes, torch.set_flush_denormal),
    (_level, _leave_levels),
    (_regions, _leave_regions),
    (_fusions, lambda kept: _CORE._jit_set_fusion_strategy(list(kept))),
    (lambda: tuple(np.geterr().items()), lambda errors: np.seterr(**dict(errors))),
]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some are on their way out
    _KNOWN = [*_OWN, *_pairs(), *_precisions()]


class Settings:
    """As they are now; `restore` says whether one had changed."""

    def __init__(self) -> None:
        self.kept, self.filters = self._now(), list(warnings.filters)
        self.of_logging = [(one, contents_of(one)) for one in _of_logging()]

    @staticmethod
    def _now() -> list[Any]:
        return [asked() for asked, _ in _KNOWN]

    def restore(self) -> bool:
        now = self._now()
        if warnings.filters != self.filters:  # a part of torch that is loaded late has some too: no reason to be slow
            _filters()[:] = self.filters
        written = [restore_container(*pair) for pair in self.of_logging]
        if any(written):
            clear_levels()
        if now == self.kept:
            return any(written)
        for (_, set_anew), value, before in zip(_KNOWN, now, self.kept, strict=True):
            if value != before:
                set_anew(before)
        return True


def _of_logging() -> list[dict[Any, Any]]:
    """Names of levels, what holds for all loggers, and which warnings were given once."""
    home = vars(logging)
    return [home["_levelToName"], home["_nameToLevel"], vars(logging.root.manager), vars(warnings)["onceregistry"]]


def _filters() -> list[Any]:
    found: Any = warnings.filters
    return found  # type: ignore[no-any-return]


def clear_levels() -> None:
    """Loggers remember which levels are heard: one that was put back is asked anew, else it stays silent for good."""
    forget: Any = vars(logging.Manager)["_clear_cache"]
    forget(logging.root.manager)
