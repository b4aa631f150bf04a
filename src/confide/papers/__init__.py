"""Papers: published experiments run again, the paper's figure beside ours at a sound epsilon.

confide.papers.names()             the papers that can be run
confide.papers.get("dp-sep")       one of them, with its experiments
confide.papers.from_file("p.py")   a paper that stands in a file or folder of its own
confide.papers.base.run(...)       what `confide papers run` calls

Every module of this folder with a `PAPER` is found, and so is every installed package that names one under the entry
point `confide.papers`, with no other edit.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from confide.errors import Refusal
from confide.papers.base import Paper

__all__ = ["Paper", "all_papers", "from_file", "get", "names", "package_of"]

ENTRY_POINTS = "confide.papers"


@cache
def all_papers() -> dict[str, Paper]:
    """Every paper by name, in alphabetical order."""
    found: dict[str, Paper] = {}
    for info in pkgutil.iter_modules(__path__):
        paper = getattr(importlib.import_module(f"{__name__}.{info.name}"), "PAPER", None)
        if isinstance(paper, Paper):
            found[paper.name] = paper
    for paper in _of_packages():
        if paper.name in found:
            warnings.warn(f"a paper of an installed package is also called {paper.name}; it is left out", stacklevel=2)
        else:
            found[paper.name] = paper
    return dict(sorted(found.items()))


def _of_packages() -> Iterator[Paper]:
    """What installed packages name; one that is broken is told and left out, so that the others can be run."""
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            paper = point.load()
        except Exception as error:
            warnings.warn(f"the paper {point.name} ({point.value}) cannot be imported: {error}", stacklevel=3)
            continue
        if isinstance(paper, Paper):
            yield paper
        else:
            warnings.warn(f"the paper {point.name} ({point.value}) is no confide.papers.Paper", stacklevel=3)


def package_of(name: str) -> str:
    """The installed package that has the paper, with its version; empty for those of confide."""
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if point.dist is not None and all_papers().get(name) is _loaded(point):
            return f"{point.dist.name} {point.dist.version}"
    return ""


def _loaded(point: importlib.metadata.EntryPoint) -> object:
    try:
        return point.load()
    except Exception:  # it was told and left out when all were listed
        return point


def names() -> tuple[str, ...]:
    """The names of all papers."""
    return tuple(all_papers())


def get(name: str) -> Paper:
    """The paper of that name."""
    try:
        return all_papers()[name]
    except KeyError:
        raise Refusal(f"paper={name!r}: unknown; known: {', '.join(names())}") from None


def from_file(path: str | Path) -> Paper:
    """The `PAPER` of a Python file, or of a folder with an `__init__.py`; the file is run."""
    given = Path(path)
    file = given / "__init__.py" if given.is_dir() else given
    if not file.is_file() or file.suffix != ".py":
        raise Refusal(f"from={str(path)!r}: must be a Python file, or a folder with an __init__.py, that has a PAPER")
    name = f"confide_paper_{given.stem}"
    inside = [str(given)] if given.is_dir() else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=inside)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where the folder's own imports, and dataclasses, look for it
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        raise Refusal(f"from={str(path)!r}: the file fails with {type(error).__name__}: {error}") from error
    paper = vars(module).get("PAPER")
    if not isinstance(paper, Paper):
        raise Refusal(f"from={str(path)!r}: there is no PAPER in it, a confide.papers.Paper with its experiments")
    return paper
