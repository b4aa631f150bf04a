"""`torch.set_default_device`, set aside: confide's tensors are the host's wherever no device is named.

A user's network may count on it, as with `torch.arange(n)` in its forward, so it holds again while that runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from confide.devices import HOST

Given = ParamSpec("Given")
Found = TypeVar("Found")


class _Aside(threading.local):
    device: torch.device | None = None


_ASIDE = _Aside()


def default_aside(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """A door of confide, behind which new tensors are on the host."""

    @wraps(function)
    def behind(*args: Given.args, **kwargs: Given.kwargs) -> Found:
        default = torch.get_default_device()
        if default.type == HOST.type:
            return function(*args, **kwargs)
        before, _ASIDE.device = _ASIDE.device, default
        try:
            with HOST:
                return function(*args, **kwargs)
        finally:
            _ASIDE.device = before

    return behind


def default_back() -> AbstractContextManager[Any]:
    """While the user's network runs."""
    return nullcontext() if _ASIDE.device is None else _ASIDE.device
