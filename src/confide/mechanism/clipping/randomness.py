"""Random numbers: what records draw for themselves, and what all records of an answer have in common.

One by one, every record starts from a state of its own. A record that draws more numbers than another, or sets the
generator, must not decide what the next one draws. So torch's, numpy's and Python's own generators are set anew for
every record, from numbers drawn beforehand, and put where they would be without any record afterwards.

All at once, some numbers are the same for all records: one at a time (which layers to skip), or from a generator that
is not torch's own. They must be the same for all records of an answer, not of a pass: how many passes an answer takes
depends on how many records there are and on whether one of them raises, so that numbers of each pass would tell who was
with whom. In `one_answer` every pass begins with the same ones, and afterwards generators have moved on by one number,
whatever passes there were.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

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


# what all records have in common ---------------------------------------------------------------------------------


class _Common:
    """The numbers that are the same for all records of one answer."""

    def __init__(self) -> None:
        self.state = torch.default_generator.get_state()  # a secret of this answer, before anything was drawn
        self.stream: torch.Generator | None = None
        self.known: dict[int, tuple[Any, Callable[[], object]]] = {}

    def begin(self) -> None:
        """As at the first pass."""
        self.stream = None
        for _, put_back in self.known.values():
            put_back()

    def note(self, generator: Any) -> None:
        if id(generator) not in self.known:
            self.known[id(generator)] = generator, way_back(generator)

    def numbers(self) -> torch.Generator:
        if self.stream is None:
            digest = hashlib.sha256(b"common to all records" + self.state.numpy().tobytes()).digest()
            self.stream = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
        return self.stream


class _Answering(threading.local):
    common: _Common | None = None


_ANSWERING = _Answering()


@contextmanager
def one_answer(known: Iterable[Any] = ()) -> Iterator[None]:
    """What runs inside answers one question, in however many passes; an answer inside of another is part of it."""
    if _ANSWERING.common is not None:
        note(known)
        yield
        return
    common = _ANSWERING.common = _Common()
    note(known)
    try:
        yield
    finally:
        _ANSWERING.common = None
        common.begin()
        move_on(generator for generator, _ in common.known.values())


def note(found: Iterable[Any]) -> None:
    """These generators begin every pass of the present answer as they are now."""
    if _ANSWERING.common is not None:
        for generator in found:
            _ANSWERING.common.note(generator)


def rewind() -> None:
    """A pass is over."""
    if _ANSWERING.common is not None:
        _ANSWERING.common.begin()


def move_on(found: Iterable[Any]) -> None:
    """By one number, whatever the records drew: the next answer gets other ones. Inside of an answer: at its end."""
    if _ANSWERING.common is not None:
        note(found)
        return
    for generator in found:
        torch.rand((), generator=generator) if isinstance(generator, torch.Generator) else generator.random()


@contextmanager
def common_to_all(own: torch.Generator | None) -> Iterator[None]:
    """What is drawn inside is the same for all records: from a generator of the user's own, or the answer's."""
    common = _ANSWERING.common
    if common is None or own is not None:
        note(() if own is None else (own,))
        yield
        return
    stream, before = common.numbers(), [(one, one.get_state()) for one in generators()]
    torch.default_generator.set_state(stream.get_state())
    for generator, _ in before[1:]:
        generator.manual_seed(int(torch.randint(2**62, ())))
    try:
        yield
        stream.set_state(torch.default_generator.get_state())
    finally:
        for generator, state in before:
            generator.set_state(state)


def way_back(generator: Any) -> Callable[[], object]:
    """How to set a generator of torch, numpy or Python to the state that it has now."""
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        return lambda: generator.set_state(state)
    if isinstance(generator, np.random.Generator):
        bits, inside = generator.bit_generator, generator.bit_generator.state
        return lambda: setattr(bits, "state", inside)
    if isinstance(generator, np.random.RandomState):
        known = generator.get_state()
        return lambda: generator.set_state(known)
    found = generator.getstate()
    return lambda: generator.setstate(found)


def of_everybody() -> tuple[Any, Any]:
    """The generators of Python and of numpy that belong to nobody."""
    return random.seed.__self__, np.random.mtrand._rand  # type: ignore[attr-defined]


@contextmanager
def drawn_elsewhere() -> Iterator[list[Any]]:
    """Which of them made-up records draw from, whoever asks for it; they are left as they were."""
    found: list[Any] = []
    python, theirs = of_everybody()
    before, bits = python.getstate(), theirs.get_state()
    try:
        yield found
    finally:
        if python.getstate() != before:
            found.append(python)
        if not all(map(np.array_equal, theirs.get_state(), bits)):
            found.append(theirs)
        python.setstate(before)
        theirs.set_state(bits)
