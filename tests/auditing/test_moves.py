"""One record more: hostile records find what mixes records, and leave alone what does not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from confide.auditing import audit_module, audit_query
from confide.auditing.as_written import check_as_written
from confide.auditing.hostile_records import RECORDS
from confide.auditing.moves import Move, MovesBench, _examples
from confide.cli.audit import FAILED
from confide.errors import Refusal
from confide.mechanism.clipping import apart
from confide.mechanism.clipping.rounding import SHARE
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, StatisticQuery
from tests.auditing.mixers import CLASSES, MIXERS, SOUND, WIDTH, Believing
from tests.cli.conftest import Result, is_refusal, run

__all__ = ["run"]  # the fixture

QUICK = (4, 1, 17)
# The quick run takes every fourth mixer and one sound query; all of them are among the slow tests.
SOME = (list(MIXERS)[::4], pytest.param(list(MIXERS), marks=pytest.mark.slow))
SOUND_ONES = [name if name == "network" else pytest.param(name, marks=pytest.mark.slow) for name in SOUND]


def examples(classes: int | None = CLASSES) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.arange(8) % CLASSES if classes else torch.randn(8, generator=generator, dtype=torch.float64)


def first_breach(query: Any, sizes: tuple[int, ...] = QUICK) -> Move | str | None:
    """The first move beyond the claim, or what speaks against the query besides."""
    bench = MovesBench(query, _examples(*examples(), CLASSES), Believing, 0)
    assert bench.refusal() == ""
    for check in bench.memory(0):
        if not check.passed:
            return check.name
    for size in sizes:
        for move in bench.all_moves([(size, 0)], None):
            if not move.passed:
                return move
    return None


COUNTED = itertools.count()


def counting(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.full((len(y), 1), float(next(COUNTED)))


@pytest.mark.skipif(not apart.is_cut_off(), reason="no process here can be cut off from the machine")
def test_it_is_said_where_records_run_in_processes_of_their_own() -> None:
    asked = (StatisticQuery(counting, 1), StatisticQuery(lambda x, y: x[:, :1], 1))
    said = [MovesBench(query, _examples(*examples(), CLASSES), PrivateData, 0).slow() for query in asked]
    assert "each in a process of its own since it reaches" in said[0]
    assert said[1] == ""


@pytest.mark.parametrize("names", SOME, ids=len)
def test_planted_mixers_are_found(names: list[str]) -> None:
    """The source believes the query, so that the audit alone stands between a mixer and its claim."""
    missed = []
    for name in names:
        torch.manual_seed(0)
        if first_breach(MIXERS[name]()) is None:
            missed.append(name)
    assert len(MIXERS) >= 20
    assert missed == []


@pytest.mark.parametrize("names", SOME, ids=len)
def test_mixers_are_found_as_they_are_written(names: list[str]) -> None:
    """Where the boundary keeps records apart, the audit still says that the module by itself does not."""
    missed = []
    for name in names:
        torch.manual_seed(0)
        if check_as_written(MIXERS[name](), _examples(*examples(), CLASSES), 0).passed:
            missed.append(name)
    assert missed == []


class _Together(torch.autograd.Function):
    """Scales gradients by their length over the whole batch: rows that are asked for one by one do not show it."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient / (gradient.norm() + 1e-6)


class _Carries(nn.Linear):
    """Adds what the batch before left to every row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x) + vars(self).get("left", 0.0)
        self.left = found.detach().mean(0)
        return found


class _Counts(nn.Linear):
    """Keeps something that no record has a part in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = vars(self).get("calls", 0) + 1
        return super().forward(x) / self.calls


class _Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Together.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize(
    ("layer", "told"), [(_Scaled, "not the sum"), (_Carries, "batch before"), (nn.Linear, "0 C"), (_Counts, "0 C")]
)
def test_what_mixes_in_backward_or_from_batch_to_batch_is_told(layer: type[nn.Linear], told: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(layer(WIDTH, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    query = GradientQuery(module, lambda out, y: F.cross_entropy(out, y, reduction="none"))
    assert told in check_as_written(query, _examples(*examples(), CLASSES), 0).measured


@pytest.mark.parametrize("name", SOUND_ONES)
def test_what_keeps_records_apart_is_left_alone_as_written(name: str) -> None:
    torch.manual_seed(0)
    found = check_as_written(SOUND[name](), _examples(*examples(), CLASSES), 0)
    assert found.passed, found.measured
    assert found.measured == "a record moves the answers of others by 0 C"


def test_the_boundary_holds_and_the_mixer_is_told() -> None:
    torch.manual_seed(0)
    query = MIXERS["divides by the batch"]()
    found = audit_query(query, *examples(), classes=CLASSES, sizes=(3,), seeds=1)
    assert found.caught_by == ("as written",)
    assert "it mixes records of a batch" in found.verdict


def test_examples_that_the_query_cannot_take_are_no_audit() -> None:
    """Nothing was tried, so nothing may pass."""
    x, y = examples()
    with pytest.raises(ValueError, match=r"x, y: ordinary records get no answer, but \w+"):
        audit_query(SOUND["network"](), x[:, :2], y, classes=CLASSES, make_data=Believing)


def test_what_the_boundary_refuses_is_said_to_be_refused() -> None:
    class Refusing(Believing):
        def answer(self, query: Any, mechanism: Any) -> Any:
            raise Refusal("module: not this one")

    found = audit_query(SOUND["network"](), *examples(), classes=CLASSES, make_data=Refusing)
    assert found.refused == "module: not this one"
    assert found.verdict == "refused, so that nothing is released"
    assert found.tried == 0


@pytest.mark.parametrize("name", SOUND_ONES)
def test_what_keeps_records_apart_survives(name: str) -> None:
    torch.manual_seed(0)
    assert first_breach(SOUND[name](), (1, 5)) is None


@pytest.mark.slow
def test_the_boundary_keeps_its_claim() -> None:
    """Every record and table through PrivateData; an audit that always passes would not survive the mixers above."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    x, y = examples()
    found = audit_module(module, x.float(), y, classes=CLASSES, sizes=(3,), seeds=1)
    assert found.passed, found.caught_by
    assert [check.name for check in found.checks] == ["moves", "memory", "left state", "errors", "as written"]
    assert {move.record for move in found.largest} == set(RECORDS)
    assert 1 - SHARE[torch.float32] - 1e-3 < found.largest[0].size <= 1, "an audit that moves nothing proves nothing"


def test_a_slow_query_ends_with_a_verdict_and_says_what_was_left_out() -> None:
    query = MIXERS["divides by the batch"]()
    found = audit_query(query, *examples(), classes=CLASSES, sizes=(2, 3), seeds=1, seconds=0.0)
    assert (found.tried > 0, found.left, found.tables) == (True, 15, 16)
    assert found.caught_by == ("as written",)


@pytest.mark.slow
def test_a_real_target_and_a_statistic() -> None:
    x, y = examples(None)
    found = audit_query(StatisticQuery(lambda x, y: x * y[:, None], WIDTH), x, y, sizes=(3,), seeds=1)
    assert found.passed, found.caught_by


def test_errors_of_one_record_are_a_fault() -> None:
    class Fragile(Believing):
        def answer(self, query: Any, mechanism: Any) -> Any:
            if (self.x.abs() > 100).any():
                raise ValueError("too far")
            return super().answer(query, mechanism)

    x, y = examples()
    found = audit_query(SOUND["network"](), x, y, classes=CLASSES, sizes=(2,), seeds=1, make_data=Fragile)
    assert "errors" in found.caught_by
    assert found.largest[0].error == "raises ValueError"


OWN = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seen = None

    def forward(self, x):
        return self.layer(x)


def loss(output, y):
    return nn.functional.cross_entropy(output, y, reduction="none")


number = 3
"""


@pytest.mark.slow
def test_the_command_takes_a_file(run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confide.auditing.moves.SIZES", (2,))
    (tmp_path / "own.py").write_text(OWN)
    page = tmp_path / "page.html"
    words = ("audit", "--module", f"{tmp_path}/own.py:Net", "--features", "3", "--classes", "2")
    found = run(*words, "--loss", f"{tmp_path}/own.py:loss", "--page", page, "--json")
    assert found.code == 0
    values = json.loads(found.out)
    assert values["passed"]
    assert values["largest"][0]["record"] in RECORDS
    assert "Largest moves by kind of record" in page.read_text()


def test_the_command_fails_with_its_own_code(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from confide import auditing

    (tmp_path / "own.py").write_text(OWN)
    right = auditing.audit_module
    planted = {"make_data": Believing, "sizes": (4,), "seeds": 1, "loss": lambda o, y: o[:, 0] * (-1) ** len(y)}
    monkeypatch.setattr(auditing, "audit_module", lambda *given, **options: right(*given, **{**options, **planted}))
    found = run("audit", "--module", f"{tmp_path}/own.py:Net", "--classes", "2")
    assert found.code == FAILED
    assert "moves by" in found.out


@pytest.mark.parametrize(
    "words",
    [
        ("--module", "nowhere.py:Net"),
        ("--module", "own.py"),
        ("--module", "own.py:Missing"),
        ("--module", "own.py:number"),
        ("--features", "3"),
        ("--classes", "-1"),
    ],
)
def test_refusals(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    found = run("audit", *words)
    assert is_refusal(found)
    assert words[0] in found.err
