"""Papers: published experiments run again, the paper's figure beside ours at a sound epsilon.

confide.papers.names()          the papers that can be run
confide.papers.get("dp-sep")    one of them, with its experiments
confide.papers.base.run(...)    what `confide papers run` calls

Every module of this folder with a `PAPER` is found, with no other edit.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from confide.errors import Refusal
from confide.papers.base import Paper

__all__ = ["Paper", "all_papers", "get", "names"]


@cache
def all_papers() -> dict[str, Paper]:
    """Every paper by name, in alphabetical order."""
    found: dict[str, Paper] = {}
    for info in pkgutil.iter_modules(__path__):
        paper = getattr(importlib.import_module(f"{__name__}.{info.name}"), "PAPER", None)
        if isinstance(paper, Paper):
            found[paper.name] = paper
    return dict(sorted(found.items()))


def names() -> tuple[str, ...]:
    """The names of all papers."""
    return tuple(all_papers())


def get(name: str) -> Paper:
    """The paper of that name."""
    try:
        return all_papers()[name]
    except KeyError:
        raise Refusal(f"paper={name!r}: unknown; known: {', '.join(names())}") from None
