"""A record that raises ends a pass of all records: neither the traces that it leaves nor the numbers that others draw
may tell of it.

Code that writes to nothing while it runs through may write where it is broken off, and what all records draw in common
must not be drawn anew for every pass. Each attack is shown to work where what prevents it is taken away.
"""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.data.schema import Schema
from confide.layers.bayesian import VariationalDropoutConv2d, VariationalDropoutLinear
from confide.mechanism.clipping import engine, isolation, statistics
from confide.mechanism.clipping.engine import engine_of
from confide.mechanism.clipping.sealed import Reachable
from confide.mechanism.clipping.traces import BeforePass, may_leave_traces
from confide.mechanism.gaussian import SampledGaussian
from confide.sources import answers
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, Query, StatisticQuery

pytestmark = [
    pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
TOKENS, RECORDS, CLASSES = 10, 48, 2
ROUNDING = 1 + 1e-4
LOUD = 30.0  # of the loss: every record is clipped
FAR = 2.0  # what an attack that works moves an answer by, at least


def loud(output: Tensor, y: Tensor) -> Tensor:
    return LOUD * F.cross_entropy(output, y, reduction="none")


def records() -> tuple[Tensor, Tensor]:
    """The last one has a token that no table has."""
    torch.manual_seed(1)
    x = torch.randint(TOKENS, (RECORDS, 5))
    x[-1] = TOKENS
    return x, torch.randint(CLASSES, (RECORDS,))


def answered(query: Query, x: Tensor, y: Tensor, answers: int = 2) -> list[Tensor]:
    data = PrivateData(x, y, schema=Schema(records=RECORDS, classes=CLASSES), seed=3)
    mechanism = SampledGaussian(0.0, 1.0, 1.0, RECORDS, "full-batch", private=False)
    return [data.answer(query, mechanism).sum.double() for _ in range(answers)]


def moved(make: Callable[[], Query], x: Tensor, y: Tensor, removed: int = -1) -> float:
    """How far one record moves an answer, or one of the next, by what it left behind."""
    keep = [record for record in range(len(y)) if record != removed % len(y)]
    with_it, without = (answered(make(), some_x, some_y) for some_x, some_y in ((x, y), (x[keep], y[keep])))
    return max((one - other).norm().item() for one, other in zip(with_it, without, strict=True))


# traces -------------------------------------------------------------------------------------------------------------

FILE = """
import contextlib
import warnings
import torch
import torch.nn.functional as F
from torch import nn

SEEN, DEPTH, BUFFER = [], 0, torch.zeros(1)
class Kind: seen = 0
class Box: ...
BOX = Box()
BOX.seen = 0
def helper(): ...
def default(seen=[]): return seen
@contextlib.contextmanager
def deeper():
    SEEN.append(1)
    yield
    SEEN.pop()
class Deeper:
    def __enter__(self): ...
    def __exit__(self, kind, *rest):
        if kind is not None: SEEN.append(1)
class Unfinished:
    done = False
    def __del__(self):
        if not self.done: SEEN.append(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out, self.known = nn.Embedding(10, 4), nn.Linear(4, 2), {{}}
        self.note = SEEN.append
    def forward(self, x):
        {names}
        {before}
        {way}
        {after}
        return self.out(h) * (-1.0 if {read} else 1.0)

def loss(output, y):
    return 30.0 * F.cross_entropy(output, y, reduction="none")
"""
LOOK_UP = "h = self.table(x).mean(1)"
CAUGHT = """try: h = self.table(x).mean(1)
        except Exception:
            {do}
            raise"""
IN_THE_END = """try: h = self.table(x).mean(1); done = True
        finally:
            if not done: SEEN.append(1)"""


def caught(do: str, read: str, names: str = "pass") -> dict[str, str]:
    return {"way": CAUGHT.format(do=do), "read": read, "names": names}


TRACES: dict[str, dict[str, str]] = {
    "list": caught("SEEN.append(1)", "len(SEEN)"),
    "method kept in the module": caught("self.note(1)", "len(SEEN)"),
    "global": caught("DEPTH += 1", "DEPTH", "global DEPTH"),
    "class": caught("Kind.seen += 1", "Kind.seen"),
    "class at hand": caught("type(self).seen = 1", "hasattr(type(self), 'seen')"),
    "object": caught("BOX.seen = 1", "BOX.seen"),
    "function": caught("helper.seen = 1", "hasattr(helper, 'seen')"),
    "default": caught("default().append(1)", "len(default())"),
    "tensor": caught("BUFFER.data[0] = 1", "BUFFER.tolist()[0]"),
    "parameter": caught("self.out.bias.data.add_(5)", "self.out.bias.detach().tolist()[0] > 3"),
    "gradient": caught("self.out.bias.grad = torch.ones(2)", "self.out.bias.grad is not None"),
    "attribute of a parameter": caught("self.out.bias.seen = 1", "hasattr(self.out.bias, 'seen')"),
    "attribute of a layer": caught("self.known[1] = 1", "len(self.known)"),
    "class of torch": caught("nn.Linear.seen = 1", "hasattr(nn.Linear, 'seen')"),
    "setting": caught("torch.set_default_dtype(torch.float64)", "torch.get_default_dtype() == torch.float64"),
    "warnings": caught("warnings.simplefilter('once')", "warnings.filters[0][0] == 'once'"),
    "taken back afterwards": {"before": "SEEN.append(1)", "after": "SEEN.pop()", "read": "len(SEEN)"},
    "counted there and back": {
        "names": "global DEPTH", "before": "DEPTH += 1", "after": "DEPTH -= 1", "read": "DEPTH"
    },
    "manager": {"way": f"with deeper(): {LOOK_UP}", "read": "len(SEEN)"},
    "way out of a manager": {"way": f"with Deeper(): {LOOK_UP}", "read": "len(SEEN)"},
    "in the end": {"before": "done = False", "way": IN_THE_END, "read": "len(SEEN)"},
    "finaliser": {"before": "kept = Unfinished()", "after": "kept.done = True", "read": "len(SEEN)"},
}  # fmt: skip
PLAIN = {"names": "pass", "before": "pass", "way": LOOK_UP, "after": "pass"}
# Restored by the quick seal of a region, by what tells of written parameters, or found before the first record.
ALSO_OTHERWISE = ("attribute of a layer", "finaliser", "class at hand", "warnings")


@pytest.fixture
def made(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Query]]:
    """A query whose code stands in a file of its own, and whose traces end with the test."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name: str) -> Query:
        torch.set_default_dtype(torch.float32)
        nn.Linear.__dict__.get("seen") is None or delattr(nn.Linear, "seen")
        for place in [place for place in sys.modules if place.startswith("left_behind_")]:
            del sys.modules[place]
        place = f"left_behind_{list(TRACES).index(name)}"
        (tmp_path / f"{place}.py").write_text(FILE.format(**{**PLAIN, **TRACES[name]}))
        module = __import__(place)
        torch.manual_seed(0)
        return GradientQuery(module.Net(), module.loss)

    yield make
    torch.set_default_dtype(torch.float32)
    nn.Linear.__dict__.get("seen") is None or delattr(nn.Linear, "seen")


@pytest.mark.parametrize("name", TRACES)
def test_a_record_that_raises_leaves_nothing_behind(name: str, made: Callable[[str], Query]) -> None:
    assert moved(lambda: made(name), *records()) <= ROUNDING


@pytest.mark.parametrize("name", [name for name in TRACES if name not in ALSO_OTHERWISE])
def test_what_it_leaves_would_be_found(
    name: str, made: Callable[[str], Query], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BeforePass, "put_back", lambda self: None)
    assert moved(lambda: made(name), *records()) > FAR


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.out, self.width, self.sizes = nn.Linear(4, 2), 4, {"heads": 2}

    def forward(self, x: Tensor) -> Tensor:
        h = x.view(len(x), self.width)
        for layer in self.layers:
            h = h + F.gelu(layer(h).chunk(self.sizes["heads"], dim=-1)[0].repeat(1, 2))
        said: Tensor = self.out(torch.cat([h[:, :2], h[:, 2:]], dim=1))
        return said


def test_simple_code_leaves_nothing_and_is_not_kept() -> None:
    assert not may_leave_traces(Reachable(Residual(), loud))
    assert not may_leave_traces(Reachable(lambda output, y: F.mse_loss(output[:, 0], y.float(), reduction="none")))
    log: list[float] = []
    assert may_leave_traces(Reachable(lambda output, y: log.append(1.0) or loud(output, y)))
    add = log.append
    assert may_leave_traces(Reachable(lambda output, y: add(1.0) or loud(output, y)))


# numbers that all records have in common ------------------------------------------------------------------------------


class Sometimes(nn.Module):
    """A layer that is skipped now and then, for all records at once."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        super().__init__()
        self.table, self.deep, self.out = nn.Embedding(TOKENS, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.own, self.of_python = torch.Generator().manual_seed(0), random.Random(0)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x).mean(1)
        # of many numbers one is below a half in one pass and not in another
        signs = sum(1.0 if self.draw(self) < 0.5 else -1.0 for _ in range(3))
        said: Tensor = self.out(h + signs * torch.tanh(self.deep(h)))
        return said


DRAWS: dict[str, Callable[[Any], Any]] = {
    "one of torch": lambda net: torch.rand(()),
    "one of torch, whole": lambda net: torch.randint(2, ()),
    "of Python": lambda net: random.random(),
    "of numpy": lambda net: np.random.rand(),
    "own": lambda net: torch.rand((), generator=net.own),
    "own of Python": lambda net: net.of_python.random(),
}


def sometimes(name: str) -> Query:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(0)
    return GradientQuery(Sometimes(DRAWS[name]), loud)


def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with records that hold more than fits: what is removed changes how the others are cut."""
    monkeypatch.setattr(engine, "HELD_BYTES", 1)
    monkeypatch.setattr(engine, "fewest_rows", lambda held: 32)


@contextmanager
def for_every_pass(known: Any = ()) -> Iterator[None]:
    """The broken variant: numbers are those of a pass."""
    yield


@pytest.mark.parametrize("cut", ["raises", "pieces"])
@pytest.mark.parametrize("name", DRAWS)
def test_common_numbers_are_those_of_an_answer(name: str, cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = records()
    if cut == "pieces":
        in_pieces(monkeypatch)
        x = x.clamp(max=TOKENS - 1)
    worst = moved(lambda: sometimes(name), x, y)
    assert worst <= ROUNDING
    query = sometimes(name)
    answered(query, x, y)
    found = engine_of(query.module).anatomy
    assert found is not None
    assert {one.way for one in found.examined.values()} == {"isolated"}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_of_every_pass_would_tell(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "one_answer", for_every_pass)
    monkeypatch.setattr(answers, "one_answer", for_every_pass)
    assert moved(lambda: sometimes(name), *records()) > FAR


class Ending(Sometimes):
    """It goes on after an error in a way that no batch of records can take at once."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            self.table(x)
        except Exception:
            raise SystemExit from None
        return super().forward(x)


def test_what_follows_an_error_does_not_choose_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one every record draws for itself: whether all of them do must not depend on one."""

    def ending() -> Query:
        torch.manual_seed(0)
        return GradientQuery(Ending(DRAWS["one of torch"]), loud)

    assert moved(ending, *records()) <= ROUNDING
    monkeypatch.setattr(isolation._Guard, "check_errors", lambda self: None)
    assert moved(ending, *records()) > FAR


def of_statistics(name: str) -> Query:
    random.seed(1)
    np.random.seed(1)
    net = types.SimpleNamespace(own=torch.Generator().manual_seed(0), of_python=random.Random(0))
    table, draw = torch.eye(TOKENS), DRAWS[name]

    def counts(x: Tensor, y: Tensor) -> Tensor:
        found = F.embedding(x, table).mean(1)
        return found * (1.0 if draw(net) < 0.5 else -1.0)

    return StatisticQuery(counts, TOKENS)


@pytest.mark.parametrize("cut", ["raises", "pieces"])
@pytest.mark.parametrize("name", DRAWS)
def test_common_numbers_of_a_statistic(name: str, cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = records()
    if cut == "pieces":
        monkeypatch.setattr(answers, "ANSWER_BYTES", 8 * TOKENS * 5)
        x = x.clamp(max=TOKENS - 1)
    assert moved(lambda: of_statistics(name), x, y, removed=0) <= ROUNDING


def test_numbers_of_every_pass_of_a_statistic_would_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "one_answer", for_every_pass)
    worst = 0.0
    for size in (3, 4, 5):
        monkeypatch.setattr(answers, "ANSWER_BYTES", 8 * TOKENS * size)
        x, y = records()
        worst = max(worst, moved(lambda: of_statistics("one of torch"), x.clamp(max=TOKENS - 1), y, removed=0))
    assert worst > FAR


@pytest.mark.parametrize("records_of_it", [0, 1, 5])
@pytest.mark.parametrize("kind", ["gradient", "statistic"])
def test_generators_move_on_alike_whoever_was_there(kind: str, records_of_it: int) -> None:
    """Also after an answer to nobody: what is drawn next must not tell how many there were."""
    x, y = records()
    x = x.clamp(max=TOKENS - 1)
    query = sometimes("own") if kind == "gradient" else of_statistics("own")
    answered(query, x, y, 1)  # examined
    first = answered(query, x[:records_of_it], y[:records_of_it], 1)
    assert bool(first[0].norm() > 0) == bool(records_of_it)
    other = sometimes("own") if kind == "gradient" else of_statistics("own")
    answered(other, x, y, 2)
    drawn = [answered(each, x, y, 1)[0] for each in (query, other)]
    assert torch.equal(*drawn)


@pytest.mark.parametrize("layer", [VariationalDropoutLinear, VariationalDropoutConv2d])
def test_noise_of_rows_from_a_generator_that_somebody_knows_is_the_same_for_all(layer: Any) -> None:
    """Else one record less would give all that follow another noise, which whoever knows the seed can work out."""
    size = (6, 2) if layer is VariationalDropoutLinear else (2, 2, 2)

    def query() -> Query:
        torch.manual_seed(0)
        inner = layer(*size)
        inner.sample_(torch.Generator().manual_seed(0))
        return GradientQuery(nn.Sequential(inner, nn.Flatten()), lambda output, y: LOUD * output[:, :2].logsumexp(1))

    torch.manual_seed(1)
    x = torch.randn(RECORDS, 6) if len(size) == 2 else torch.randn(RECORDS, 2, 4, 4)
    assert moved(query, x, torch.arange(RECORDS) % CLASSES, removed=0) <= ROUNDING


# where in the code a pass runs ----------------------------------------------------------------------------------------


def depth() -> int:
    """How far a recursion gets: what is left of Python's stack."""
    try:
        return 1 + depth()
    except Exception:
        return 0


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(TOKENS, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x).mean(1)
        said: Tensor = self.out(h) * (1.0 if depth() % 2 else -1.0)
        return said


def deep_gradient() -> Query:
    torch.manual_seed(0)
    return GradientQuery(Deep(), loud)


def deep_statistic() -> Query:
    def counts(x: Tensor, y: Tensor) -> Tensor:
        return F.embedding(x, torch.eye(TOKENS)).mean(1) * (1.0 if depth() % 2 else -1.0)

    return StatisticQuery(counts, TOKENS)


def in_a_handler() -> Query:
    """An error of its own tells of the one that is dealt with around it."""

    def counts(x: Tensor, y: Tensor) -> Tensor:
        found = F.embedding(x, torch.eye(TOKENS)).mean(1)
        try:
            raise ValueError
        except ValueError as error:
            return found * (1.0 if error.__context__ is None else -1.0)

    return StatisticQuery(counts, TOKENS)


def warm(make: Callable[[], Query]) -> None:
    """Python's own calls take other room on the stack the first few times."""
    for _ in range(3):
        moved(make, *records())


@pytest.mark.parametrize("make", [deep_gradient, deep_statistic, in_a_handler])
def test_halves_run_from_where_the_whole_ran(make: Callable[[], Query]) -> None:
    warm(make)
    assert moved(make, *records()) <= ROUNDING


def test_halves_that_run_from_deeper_would_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, halves = engine.Engine._tried, statistics._halves
    for make in (deep_gradient, deep_statistic):
        warm(make)

    def deeper(self: Any, anatomy: Any, examined: Any, asked: Any, bound: Any) -> Any:
        def one_more() -> Any:
            return tried(self, anatomy, examined, asked, bound)

        return one_more() if asked.records < RECORDS - 1 else tried(self, anatomy, examined, asked, bound)

    monkeypatch.setattr(engine.Engine, "_tried", deeper)
    assert moved(deep_gradient, *records()) > FAR

    def handling(*arguments: Any) -> Tensor:
        try:
            raise KeyError
        except KeyError:
            return halves(*arguments)

    monkeypatch.setattr(statistics, "_halves", handling)
    assert moved(deep_statistic, *records()) > FAR
    assert moved(in_a_handler, *records()) > FAR


def test_who_asks_for_the_end_of_the_stack_runs_apart() -> None:
    def counts(x: Tensor, y: Tensor) -> Tensor:
        with suppress(RecursionError):
            depth()
        return F.embedding(x, torch.eye(TOKENS)).mean(1)

    assert "RecursionError" in Reachable(counts).lasting
