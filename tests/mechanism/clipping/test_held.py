"""What lies where attributes do not lead: a list in a slice, a counter in C, an address in a text, unwritten memory."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

from confide.errors import Refusal
from confide.mechanism.clipping import apart, sealed
from confide.mechanism.clipping.places import hearing_of_uneven
from confide.sources.queries import Query
from tests.mechanism.clipping.corpus import RECORDS
from tests.mechanism.clipping.corpus_held import ADDRESSES, CHANGES, HELD, changed, query
from tests.mechanism.clipping.test_corpus import HUGE, ROUNDING, answer, records

pytestmark = [
    pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="two worlds begin alike"),
]


def said(asked: Callable[[], Query], left_out: int | None) -> list[list[float]] | str:
    """What leaves in a world of its own, which begins as all others do."""
    x, y = records()
    kept = [place for place in range(RECORDS) if place != left_out]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        found: list[list[float]] | str = "broken"
        with suppress(BaseException):
            try:
                found = [answer(asked(), x[kept], y[kept]).tolist() for _ in range(2)]
            except Refusal as refusal:
                found = str(refusal)
        os.write(writing, pickle.dumps(found))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        text = told.read()
    os.waitpid(child, 0)
    return pickle.loads(text)  # type: ignore[no-any-return]


def moves(asked: Callable[[], Query]) -> float:
    """How far leaving out one record moves an answer or the one after it; 0 where it is refused in one sentence."""
    whole, less = said(asked, None), said(asked, HUGE)
    if isinstance(whole, str) or isinstance(less, str):
        assert whole == less
        assert whole != "broken"
        return 2.0 * ("\n" in whole)
    return max((torch.tensor(one) - torch.tensor(other)).norm().item() for one, other in zip(whole, less, strict=True))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("name", HELD)
def test_nothing_is_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "is_possible", lambda: False)
    assert moves(partial(query, HELD[name])) <= ROUNDING


@pytest.mark.parametrize("name", CHANGES)
def test_a_network_is_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "is_possible", lambda: False)
    assert moves(partial(changed, CHANGES[name])) <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("name", HELD)
def test_nothing_is_left_in_processes(name: str) -> None:
    assert moves(partial(query, HELD[name])) <= ROUNDING


@pytest.mark.parametrize("possible", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ADDRESSES)
def test_what_shows_addresses_or_memory_is_refused(name: str, possible: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not possible:
        monkeypatch.setattr(apart, "is_possible", lambda: False)
    x, y = records()
    with pytest.raises(Refusal, match="reaches"):
        answer(query(ADDRESSES[name]), x, y)


@pytest.mark.parametrize("name", ["a slice", "beside_a_node", "regions_of_autocast"])
def test_without_putting_back_it_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "is_possible", lambda: False)
    monkeypatch.setattr(sealed.Reachable, "check", lambda self: None)
    monkeypatch.setattr(sealed.Reachable, "lasting", "")
    monkeypatch.setattr(sealed.Reachable, "restore", lambda self: False)
    assert moves(partial(query, HELD[name])) > ROUNDING


def _views(now: float) -> float:
    one, other = object(), object()
    return 0.0 * len(dict.fromkeys((one, other)).keys() & {one: 1}.keys())


def _methods(now: float) -> float:
    return 0.0 * len(NOBODY.union((object(), object())))


def _plain(now: float) -> float:
    return 0.0 * now


NOBODY: frozenset[object] = frozenset()


@pytest.mark.parametrize(("keep", "stated"), [(_views, True), (_methods, True), (_plain, False)])
def test_that_the_order_of_sets_is_not_proven_is_stated(
    keep: Callable[[float], float], stated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "is_possible", lambda: False)
    with hearing_of_uneven() as heard:
        answer(query(keep), *records())
    assert bool(heard) == stated


def test_a_workspace_of_which_a_part_is_written_is_refused() -> None:
    @torch.enable_grad()  # type: ignore[untyped-decorator]
    def layer(x: torch.Tensor) -> torch.Tensor:
        weights = (torch.ones(16, 3), torch.ones(16, 4), torch.zeros(16), torch.zeros(16))
        start, size = torch.zeros(1, 4), len(x)
        made: Any = torch.mkldnn_rnn_layer(
            x[:, None], *weights, start, start, False, [1] * size, 2, 4, 1, True, False, False, True
        )
        return made[3]  # type: ignore[no-any-return]

    def keep(now: float) -> float:
        return float(layer(torch.full((4, 3), now)).nan_to_num().sum() % 97) / 9

    x, y = records()
    with pytest.raises(Refusal, match="mkldnn_rnn_layer"):
        answer(query(keep), x, y)
