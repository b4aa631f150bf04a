"""The price of noise: `python -m benchmarks.noise [--json] [--quick]`.

By torch's own generator and by each back end of confide's noise stream, ratios to torch:

    large   2.4 million float32 normals, one for each parameter of a 784-1200-1200-10 network
    small   a thousand fills of 1000 normals each, as a small model asks for them (so ms is microseconds per fill)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks import _harness
from benchmarks._harness import Clock, Report, Step
from confide.mechanism.noise import BACKENDS, NoiseStream

SHAPES = {"large": (2_400_000, 1), "small": (1000, 1000)}  # size of a fill, fills in a step
STD = 1.3


def by_torch() -> Callable[[Tensor], object]:
    return lambda out: out.normal_(0.0, STD)


def by_confide(backend: str) -> Callable[[Tensor], object]:
    stream = NoiseStream(backend=backend)
    return lambda out: stream.normal_(out, STD)


SOURCES: dict[str, Callable[[], Callable[[Tensor], object]]] = {
    "torch": by_torch,
    **{name: partial(by_confide, name) for name in BACKENDS},
}


def make(source: Callable[[], Callable[[Tensor], object]], size: int, fills: int) -> Step:
    fill, out = source(), torch.empty(size)

    def step() -> None:
        for _ in range(fills):
            fill(out)

    return step


def run(seconds: float, clock: Clock) -> Report:
    result: Report = {"machine": _harness.machine()}
    _harness.warn_if_busy(result["machine"])
    for name, shape in SHAPES.items():
        makers = {source: partial(make, SOURCES[source], *shape) for source in SOURCES}
        result[name] = _harness.race(makers, seconds, "torch", clock)
    return result


def show(result: Report) -> None:
    for name in SHAPES:
        _harness.print_table(f"{name} (ratio to torch)", result[name])


if __name__ == "__main__":
    _harness.main(__doc__, run, (4.0, 20.0), show)
