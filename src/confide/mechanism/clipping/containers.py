"""Containers that user code may write to: what was in them, whether it still is, and putting it back."""

from __future__ import annotations

from collections import OrderedDict, deque
from operator import is_
from typing import Any

CONTAINERS = (dict, list, set, deque, bytearray)


def contents_of(container: Any) -> Any:
    """A plain copy, by the methods of the built-in type: a subclass may have a constructor or a copy of its own."""
    if isinstance(container, dict):
        return dict(_kind_of_dict(container).items(container))
    if isinstance(container, set):
        kept = sorted(set.__iter__(container), key=id)  # in one order for all who look, or they would undo each other
        if not _is_as_kept(container, kept):  # in what order a set is gone through depends on how it came about
            _put_back(container, kept)
        return kept
    return bytes(container) if isinstance(container, bytearray) else list(_items(container))


def _kind_of_dict(container: Any) -> type[dict[Any, Any]]:
    """Whose order counts: an OrderedDict has one of its own beside that of a dict."""
    return OrderedDict if isinstance(container, OrderedDict) else dict


def _items(container: Any) -> Any:
    kind = list if isinstance(container, list) else deque
    return kind.__iter__(container)


def _is_as_kept(container: Any, kept: Any) -> bool:
    if isinstance(container, dict):
        kind = _kind_of_dict(container)
        return (
            dict.__len__(container) == len(kept)
            and all(map(is_, kind.keys(container), kept))
            and all(map(is_, kind.values(container), kept.values()))
        )
    if isinstance(container, list | deque):
        now = list(_items(container))
        return len(now) == len(kept) and all(map(is_, now, kept))
    if isinstance(container, set):
        again = set(kept)
        return set.__len__(container) == len(kept) and all(map(is_, set.__iter__(container), again))
    return bool(bytes(container) == kept)


def _put_back(container: Any, kept: Any) -> None:
    if isinstance(container, OrderedDict):
        OrderedDict.clear(container)
        for key, value in kept.items():
            OrderedDict.__setitem__(container, key, value)
    elif isinstance(container, dict):
        dict.clear(container)
        dict.update(container, kept)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, kept)
    elif isinstance(container, deque):
        deque.clear(container)
        deque.extend(container, kept)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), kept)
    else:
        container[:] = kept


def restore_container(container: Any, kept: Any) -> bool:
    """Put back what was kept; whether anything had changed."""
    if _is_as_kept(container, kept):
        return False
    _put_back(container, kept)
    return True
