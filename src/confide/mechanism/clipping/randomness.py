"""Random numbers while records run one by one: every record starts from a state of its own.

A record that draws more numbers than another, or sets the generator, must not decide what the next one draws. So
torch's, numpy's and Python's own generators are set anew for every record, from numbers drawn beforehand, and put
where they would be without any record afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from confide.devices import generators


def seeds(records: int) -> list[int]:
    """One for each record, from torch's own generator."""
    drawn: list[int] = torch.randint(2**62, (records,)).tolist()
    return drawn


@contextmanager
def restored() -> Iterator[None]:
    """The generators as they were, those of the host and of its devices."""
    ours = [(generator, generator.get_state()) for generator in generators()]
    theirs, python = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        for generator, state in ours:
            generator.set_state(state)
        np.random.set_state(theirs)
        random.setstate(python)


def start_from(seed: int) -> None:
    for generator in generators():
        generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
