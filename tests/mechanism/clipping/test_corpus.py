"""Every attack of the corpus through the door: one record moves an answer by at most C, or the attack is refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from confide.data.schema import Schema
from confide.errors import Refusal
from confide.mechanism.clipping import isolation, one_by_one, sealed
from confide.mechanism.clipping.package_parts import parts_put_back
from confide.mechanism.gaussian import SampledGaussian
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, Query
from tests.mechanism.clipping import corpus, corpus_built, corpus_kept
from tests.mechanism.clipping.corpus import CLASSES, KEEPING, LOOKING, RECORDS, WIDTH, Attack
from tests.mechanism.clipping.corpus_places import ENDING, OF_OTHERS
from tests.mechanism.clipping.corpus_rows import MIXING, OF_ROWS, PAIRED
from tests.mechanism.clipping.corpus_tools import GOING_ON, TOOLED
from tests.mechanism.clipping.corpus_windows import SEEN

pytestmark = [
    pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch speaks of its compilers
]
HUGE = 4
ROUNDING = 1 + 1e-5
IDIOMS = OF_ROWS | corpus_built.BUILT | corpus_kept.KEPT | SEEN | TOOLED | OF_OTHERS | ENDING
ATTACKS = LOOKING | KEEPING | IDIOMS
EVERY = 11  # of the attacks, in the quick run; no divisor of the numbers of looks and keepers, so that all take turns
COSTLY = ("text of a function", "tool: exported")  # seconds each: slow tests
QUICK = [name for name in list(ATTACKS)[::EVERY] if not name.endswith(COSTLY)]
PLACES = [name if at % 2 else pytest.param(name, marks=pytest.mark.slow) for at, name in enumerate(corpus.PLACES)]
PRECISIONS = (torch.float32, torch.float64)


def records() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(RECORDS, WIDTH, dtype=torch.float64), torch.arange(RECORDS) % CLASSES
    x[HUGE] *= 300
    return x, y


def answer(query: Query, x: Tensor, y: Tensor, seed: int | None = None) -> Tensor:
    data = PrivateData(x, y, schema=Schema(records=RECORDS, classes=CLASSES), seed=seed)
    torch.manual_seed(5)
    return data.answer(query, SampledGaussian(0.0, 1.0, 1.0, RECORDS, "full-batch", private=False)).sum


def moves(make: Attack) -> float:
    """How far taking out one record moves an answer; 0 where the attack is refused in one sentence."""
    corpus.forget()
    corpus_kept.forget()
    corpus_built.Dirty.before = 0.0
    query, (x, y), furthest = make(), records(), 0.0
    try:
        for removed in (HUGE, RECORDS - 1):
            keep = [record for record in range(RECORDS) if record != removed]
            whole = answer(query, x, y)
            furthest = max(furthest, (whole - answer(query, x[keep], y[keep])).norm().item())
    except Refusal as refusal:
        return 2.0 * ("\n" in str(refusal))
    return furthest


def moves_by_chance(make: Attack) -> float:
    """The same for an attack that draws random numbers: half of how far another record in the place of one moves an
    answer, everybody else drawing the same. One record less would shift what all others draw."""
    query, (x, y), furthest = make(), records(), 0.0
    for place in (0, HUGE):
        other = x.clone()
        other[place] = -0.5 * x[1]
        furthest = max(furthest, (answer(query, x, y, 3) - answer(query, other, y, 3)).norm().item() / 2)
    return furthest


def moved(name: str) -> float:
    return (moves_by_chance if name.endswith("keeps in seed") else moves)(ATTACKS[name])


def test_there_are_enough_and_of_every_kind() -> None:
    assert len(ATTACKS) >= 600
    assert len(IDIOMS) >= 200
    looking = [name for name in QUICK if name in LOOKING]
    assert {name.partition(":")[0] for name in looking} == set(corpus.PLACES)
    assert {name.partition(": ")[2] for name in looking} == set(corpus.LOOKS)


@pytest.mark.parametrize("name", QUICK)
def test_an_attack_moves_an_answer_by_at_most_the_clip(name: str) -> None:
    assert moved(name) <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in QUICK])
def test_all_attacks_move_an_answer_by_at_most_the_clip(name: str) -> None:
    assert moved(name) <= ROUNDING


def with_one_more(shape: str, extreme: str, dtype: torch.dtype) -> float:
    """How far one record at an end of arithmetic moves the sum of ordinary ones."""
    torch.manual_seed(2)
    module = corpus.SHAPES[shape]().to(dtype)
    x, y = torch.randn(RECORDS, WIDTH, dtype=dtype), torch.arange(RECORDS) % CLASSES
    last = torch.tensor([corpus.EXTREMES[extreme]], dtype=torch.float64).to(dtype)
    query = GradientQuery(module, corpus.plain)
    fewer = answer(query, x, y)
    return (answer(query, torch.cat([x, last]), torch.cat([y, y[:1]])) - fewer).norm().item()


ENDS = [(shape, extreme, dtype) for shape in corpus.SHAPES for extreme in corpus.EXTREMES for dtype in PRECISIONS]


@pytest.mark.parametrize("end", ENDS[::EVERY], ids=str)
def test_a_record_at_an_end_of_arithmetic_moves_a_sum_by_at_most_the_clip(end: tuple[str, str, torch.dtype]) -> None:
    assert with_one_more(*end) <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS, ids=str)
def test_all_ends_of_arithmetic(end: tuple[str, str, torch.dtype]) -> None:
    assert with_one_more(*end) <= ROUNDING


def believed(query: Query, x: Tensor, y: Tensor) -> Tensor:
    """What an engine would add up that believes user code: the batch as it is, every record's own gradient clipped."""
    if not isinstance(query, GradientQuery):
        rows = query.function(x, y)
        return (rows / rows.norm(dim=1, keepdim=True).clamp(min=1.0)).sum(0)
    parameters = list(query.module.parameters())
    losses = query.loss(query.module(x), y)
    total = torch.zeros(sum(value.numel() for value in parameters), dtype=x.dtype)
    for loss in losses:
        found = torch.autograd.grad(loss, parameters, retain_graph=True)
        row = torch.cat([value.flatten() for value in found])
        total += row / row.norm().clamp(min=1.0)
    return total


@pytest.mark.parametrize("place", PLACES)
def test_the_attacks_are_attacks(place: str) -> None:
    """An engine that believes them is moved by more than the clip."""
    x, y = records()
    keep = [record for record in range(RECORDS) if record != HUGE]
    found = {}
    for look in corpus.LOOKS:
        query = LOOKING[f"{place}: {look}"]()
        found[look] = (believed(query, x, y) - believed(query, x[keep], y[keep])).norm().item()
    assert sum(distance > ROUNDING for distance in found.values()) >= 5, found


def test_code_that_goes_on_after_an_error_is_an_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a region whose errors end with the operation, a record that raises sends all others another way."""
    kept = [name for name in GOING_ON if "look-up" in name]
    assert [moves(GOING_ON[name]) <= ROUNDING for name in kept] == [True] * 4
    monkeypatch.setattr(isolation._Guard, "check_errors", lambda guard: None)
    assert [moves(GOING_ON[name]) <= ROUNDING for name in kept] == [False] * 4


def test_places_of_others_are_attacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody puts them back, one record turns another."""
    kept = ["a list", "a number", "an ordered dict"]
    written = ["constants of a layer", "escapes of json"]
    with monkeypatch.context() as patch:
        patch.setattr(sealed.Reachable, "_keep_beside", lambda seal, value: [])
        found = [moves(OF_OTHERS[f"module turns by attributes of {name}"]) for name in kept]
    assert all(distance > ROUNDING for distance in found)
    afterwards: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(sealed, "parts_put_back", lambda *of: afterwards.extend(parts_put_back(*of)) or [])
        found = [max(moves(OF_OTHERS[f"{of} turns by {name}"]) for of in ("module", "statistic")) for name in written]
    for undo in reversed(afterwards):  # the first that was kept comes last: nothing stays for the tests that follow
        undo()
    assert all(distance > ROUNDING for distance in found), found


def test_memory_that_nobody_has_written_to_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = OF_OTHERS["module turns by a tensor of old"]
    assert moves(asked) <= ROUNDING
    monkeypatch.setattr(one_by_one, "filled", nullcontext)
    assert max(moves(asked) for _ in range(3)) > 1e-9


@pytest.mark.parametrize("kind", ["mixes by", "loss by"])
def test_idioms_are_attacks(kind: str) -> None:
    """Most of them move an engine that believes them; each of the others is a neighbour of one that does."""
    x, y = records()
    keep = [record for record in range(RECORDS) if record != HUGE]
    found = {}
    for name in MIXING if kind == "mixes by" else PAIRED:
        query = OF_ROWS[f"{kind} {name}"]()
        torch.manual_seed(3)
        found[name] = (believed(query, x, y) - believed(query, x[keep], y[keep])).norm().item()
    assert sum(distance > ROUNDING for distance in found.values()) >= 0.6 * len(found), found
