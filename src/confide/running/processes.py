"""Work in processes of joblib's: loky, or another backend that joblib.parallel_config names."""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterable
from concurrent.futures import BrokenExecutor
from typing import Any

from confide.errors import RankLost


def in_processes(calls: Iterable[Any], jobs: int, *, in_order: bool = False) -> Generator[Any, None, None]:
    """What `joblib.delayed` calls give, as they end. They begin at once, whether or not anybody looks already."""
    import joblib

    kind = "generator" if in_order else "generator_unordered"
    return _heard(joblib.Parallel(n_jobs=jobs, return_as=kind)(calls))


def begin(jobs: int, module: str) -> Generator[Any, None, None]:
    """Have joblib start its processes and import a module, while this one does so too; to be heard to its end."""
    import joblib

    return in_processes([joblib.delayed(_imported)(module)] * jobs, jobs)


def _imported(module: str) -> None:
    importlib.import_module(module)


def _heard(results: Generator[Any, None, None]) -> Generator[Any, None, None]:
    try:
        yield from results
    except BrokenExecutor as error:
        raise RankLost(
            "jobs: a worker process was killed, by somebody or for want of memory; what was charged stays charged, and "
            "fewer jobs need less memory"
        ) from error
