"""The collector of garbage runs when it likes: what it sets off is not user code's, and nothing stays behind."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from confide.mechanism.clipping import clipped_sum, structure
from confide.mechanism.clipping.collection import collect_young, no_collection
from confide.mechanism.clipping.containers import contents_of, restore_container
from confide.mechanism.clipping.engine import engine_of
from tests.mechanism.clipping.mixers import CLASSES, WIDTH, Net, plain

pytestmark = pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning")
COLLECTIONS: dict[str, Any] = {"last": None}
LEFT: list[float] = []


class Finaliser:
    """In a cycle, so that only the collector ends it; then it writes down what it was made with."""

    def __init__(self, value: float) -> None:
        self.value, self.itself = value, self

    def __del__(self) -> None:
        LEFT.append(self.value)


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """A collector that runs all the time and tells a function, as test tools and profilers ask it to."""
    before = gc.get_threshold()

    def told(phase: str, info: dict[str, int]) -> None:
        COLLECTIONS["last"] = (phase, object())

    gc.callbacks.append(told)
    gc.set_threshold(20, 2, 2)
    yield
    gc.set_threshold(*before)
    gc.callbacks.remove(told)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, WIDTH, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, CLASSES, (5,), generator=generator)


def clipped(module: Any) -> set[str]:
    """The ways that the module took."""
    out = torch.zeros(sum(value.numel() for value in module.parameters()), dtype=torch.float64)
    clipped_sum(module, plain, *batch(), clip=1.0, out=out)
    anatomy = engine_of(module).anatomy
    assert anatomy is not None
    return {examined.way for examined in anatomy.examined.values()}


def looks(self: Any, x: Tensor) -> Tensor:
    return x + len(COLLECTIONS)


@pytest.mark.usefixtures("eager_collector")
def test_callbacks_of_the_collector_do_not_make_a_module_slow() -> None:
    assert clipped(Net(looks, True).double()) == {"isolated"}


@pytest.mark.usefixtures("eager_collector")
def test_callbacks_while_a_module_is_examined_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the collector does not rest."""
    monkeypatch.setattr(structure, "no_collection", contextlib.nullcontext)
    assert clipped(Net(looks, True).double()) == {"one by one"}


def finalised(self: Any, x: Tensor) -> Tensor:
    Finaliser(x.detach().mean().item())
    return x


@pytest.mark.usefixtures("eager_collector")
def test_callbacks_are_not_told_of_what_is_collected_between_records() -> None:
    with no_collection():
        COLLECTIONS["last"] = None
        collect_young()
        assert COLLECTIONS["last"] is None
    gc.collect()
    assert COLLECTIONS["last"] is not None, "afterwards they are told again"


def test_finalisers_leave_nothing_behind() -> None:
    LEFT.clear()
    assert clipped(Net(finalised, True).double()) == {"one by one"}
    gc.collect()
    assert not LEFT


def test_finalisers_that_come_later_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: nobody asks the collector before things are put back."""
    LEFT.clear()
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)
    clipped(Net(finalised, True).double())
    monkeypatch.undo()
    gc.collect()
    assert LEFT


def test_two_who_keep_one_set_do_not_undo_each_other() -> None:
    """7 and 15 want one place of the table, and each order of adding them gives the other when gone through."""
    place = {7, 15}
    first, second = contents_of(place), contents_of(place)
    assert not restore_container(place, first)
    assert not restore_container(place, second)
