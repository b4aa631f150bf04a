"""The quick seal of a pass inside a region: dictionaries, lists and sets in the attributes of a module.

There the values of records are stacks that cannot be written into an ordinary tensor, so references are all there is.
"""

from __future__ import annotations

import types
from typing import Any

from torch import Tensor, nn

from confide.mechanism.clipping.containers import CONTAINERS, contents_of, restore_container
from confide.mechanism.clipping.origins import attribute_of, is_known
from confide.mechanism.clipping.search import PLAIN


class Attributes:
    """The containers of a module's attributes, as they were; `restore` says whether anything had changed."""

    def __init__(self, module: nn.Module) -> None:
        self.kept: list[tuple[Any, Any]] = []
        seen: set[int] = set()
        for layer in module.modules():
            self._keep(layer.__dict__, seen)

    def _keep(self, container: Any, seen: set[int]) -> None:
        if id(container) in seen:
            return
        seen.add(id(container))
        self.kept.append((container, contents_of(container)))
        kept = self.kept[-1][1]
        for value in kept.values() if isinstance(kept, dict) else kept:
            if isinstance(value, CONTAINERS):
                self._keep(value, seen)
            elif type(value) not in PLAIN and not isinstance(value, Tensor | nn.Module | type | types.FunctionType):
                inner = attribute_of(value, "__dict__", None)
                if isinstance(inner, dict) and not is_known(type(value)):
                    self._keep(inner, seen)

    def restore(self) -> bool:
        changed = [restore_container(*pair) for pair in self.kept]  # all of them, also after one that had changed
        return any(changed)
