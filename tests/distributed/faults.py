"""Mistakes that somebody could make in a data-parallel source, planted into the running program."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

from torch import Tensor

from confide.data.fingerprint import Sketch
from confide.distributed import Ranks
from confide.mechanism.noise import NoiseStream
from confide.mechanism.sampling import BatchSampler
from confide.sources import answers, private_data

fit = import_module("confide.running.fit")  # the module, whose function has the same name
FAULTS = (
    "noise on every rank",
    "noise on none",
    "noise a little low",
    "one noise key",
    "one sampling key",
    "empty batch skipped",
    "every rank charges",
    "divided by a local batch",
    "one rank is sketched",
    "nobody looks at states",
)


@contextmanager
def planted(fault: str, ranks: Ranks) -> Iterator[None]:
    """The fault, as long as the context is open; none for an empty name."""
    with ExitStack() as stack:
        if fault:
            assert fault in FAULTS, fault
            stack.enter_context(_patch(fault, ranks))
        yield


def _patch(fault: str, ranks: Ranks) -> Any:
    normal, add_up, fill = NoiseStream.normal_, Ranks.add_up, answers.add_answers

    def every(self: Ranks, own: Tensor, what: str, noise: Any, parts: Any = None) -> Tensor:
        own.add_(noise(len(own)))
        return add_up(self, own, what, noise, parts)

    def none(self: Ranks, own: Tensor, what: str, noise: Any, parts: Any = None) -> Tensor:
        return add_up(self, own, what, own.new_zeros, parts)

    def skipping(self: Ranks, own: Tensor, what: str, noise: Any, parts: Any = None) -> Tensor:
        return add_up(self, own, what, noise, parts) if own.any() else own

    def low(self: NoiseStream, out: Tensor, std: float) -> Tensor:
        return normal(self, out, std * math.sqrt(0.97))

    def charging(self: Ranks, what: str, work: Any) -> Any:
        return work()

    def divided(query: Any, batch: Any, mechanism: Any, total: Tensor, **options: Any) -> Tensor:
        norms = fill(query, batch, mechanism, total, **options)
        total.mul_(mechanism.expected_batch / (ranks.size * max(len(batch[1]), 1)))
        return norms

    return {
        "noise on every rank": lambda: patch.object(Ranks, "add_up", every),
        "noise on none": lambda: patch.object(Ranks, "add_up", none),
        "noise a little low": lambda: patch.object(NoiseStream, "normal_", low),
        "one noise key": lambda: patch.object(private_data, "_seed_of", lambda seed, rank: seed),
        "one sampling key": lambda: patch.object(
            private_data, "BatchSampler", lambda size, stream: BatchSampler(size, NoiseStream(5))
        ),
        "empty batch skipped": lambda: patch.object(Ranks, "add_up", skipping),
        "every rank charges": lambda: patch.multiple(Ranks, led=charging, leads=True),
        "divided by a local batch": lambda: patch.object(private_data, "add_answers", divided),
        "nobody looks at states": lambda: patch.object(
            fit, "kept_alike", lambda crew, problem, state, last=False: state
        ),
        "one rank is sketched": lambda: patch.object(Sketch, "of_all", staticmethod(lambda parts: parts[0])),
    }[fault]()
