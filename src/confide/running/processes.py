"""Work in processes of joblib's: loky, or another backend that joblib.parallel_config names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import BrokenExecutor
from typing import Any

from confide.errors import RankLost


def in_processes(calls: Iterable[Any], jobs: int, *, in_order: bool = False) -> Generator[Any, None, None]:
    """What `joblib.delayed` calls give, as they end. They begin at once, whether or not anybody looks already.

    Backends that tell nothing before the last call has ended, such as Ray's, are waited for.
    """
    import joblib

    kind = "generator" if in_order else "generator_unordered"
    backend, _ = joblib.parallel.get_active_backend()
    if not backend.supports_return_generator:
        kind = "list"
    return _heard(joblib.Parallel(n_jobs=jobs, return_as=kind)((_lasting, call, {}) for call in calls))


def begin(jobs: int, module: str) -> Generator[Any, None, None]:
    """Have joblib start its processes and import a module, while this one does so too; to be heard to its end."""
    import joblib

    return in_processes([joblib.delayed(_imported)(module)] * jobs, jobs)


def _lasting(work: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A call, in a process that stays until all are made.

    loky ends one that has grown by 300 MB since its first call, which it takes for a leak. What confide and its
    libraries load for a fit is as much, and the next process would have to load and open everything once more.
    """
    from joblib.externals.loky import process_executor

    if hasattr(process_executor, "_USE_PSUTIL"):
        process_executor._USE_PSUTIL = False
    return work(*arguments, **named)


def _imported(module: str) -> None:
    importlib.import_module(module)


def _heard(results: Iterable[Any]) -> Generator[Any, None, None]:
    try:
        yield from results
    except BrokenExecutor as error:
        raise RankLost(
            "jobs: a worker process was killed, by somebody or for want of memory; what was charged stays charged, and "
            "fewer jobs need less memory"
        ) from error
