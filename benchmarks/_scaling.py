"""How the time of a step grows: log-log slopes in the batch size and in the number of parameters (1 is linear)."""

from __future__ import annotations

import math
import statistics
from functools import partial

import torch

from benchmarks import _harness
from benchmarks._contenders import CONTENDERS
from benchmarks._harness import Clock, Report, Step
from benchmarks._models import Case, cross_entropy, images, mlp

BATCHES = (128, 256, 512, 1024, 2048)
WIDTHS = (256, 512, 1024, 2048)
WIDTH, BATCH = 512, 256  # what is held fixed while the other grows


def scaling(seconds: float, clock: Clock) -> Report:
    """Slopes for confide, and for plain SGD beside it."""
    by_batch = {size: (WIDTH, size) for size in BATCHES}
    by_parameters = {parameter_count(width): (width, BATCH) for width in WIDTHS}
    return {"batch": growth(by_batch, seconds / 2, clock), "parameters": growth(by_parameters, seconds / 2, clock)}


def parameter_count(width: int) -> int:
    return 2 * width * (width + 1) + 10 * (width + 1)


def growth(shapes: dict[int, tuple[int, int]], seconds: float, clock: Clock) -> Report:
    """One race over all sizes of both contenders, then a line through the logarithms of each."""
    names = ("confide", "plain")
    makers = {f"{name} {size}": partial(make, name, *shape) for name in names for size, shape in shapes.items()}
    rows = _harness.race(makers, seconds, None, clock)
    return {name: fit_line(list(shapes), [rows[f"{name} {size}"] for size in shapes]) for name in names}


def make(name: str, width: int, batch: int) -> Step:
    torch.manual_seed(0)
    return CONTENDERS[name](Case("", mlp(width, width, width, 10), *images(batch, width), cross_entropy))


def fit_line(sizes: list[int], rows: list[Report]) -> Report:
    broken = [row["error"] for row in rows if "error" in row]
    if broken:
        return {"error": broken[0]}
    times = [row["ms"] for row in rows]
    fitted = statistics.linear_regression([math.log(size) for size in sizes], [math.log(ms) for ms in times])
    return {"slope": fitted.slope, "sizes": sizes, "ms": times}
