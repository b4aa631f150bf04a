"""The machine is no memory either: files, environment, loggers, held modules; and what strangers write is not refused.

Every attack reads what the record before it left and leaves something for the next.
"""

from __future__ import annotations

import logging
import math
import os
import random
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.data.schema import Schema
from confide.errors import Refusal
from confide.mechanism.clipping import apart, clipped_sum, one_by_one, watched
from confide.mechanism.clipping.engine import engine_of
from confide.mechanism.gaussian import SampledGaussian
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery

pytestmark = pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning")
CLIP, ROUNDING = 0.01, 1 + 1e-4
PLACE: dict[str, Any] = {"path": Path("nowhere")}


class Net(nn.Module):
    """`remembers` gives back what earlier records have left, and leaves what this one is."""

    def __init__(self, remembers: Callable[[Any, float], float], **held: Any) -> None:
        super().__init__()
        self.layer, self.remembers = nn.Linear(3, 2), remembers
        self.__dict__.update(held)

    def forward(self, x: Tensor) -> Tensor:
        said: Tensor = self.layer(x * math.cos(self.remembers(self, float(x.detach().abs().sum()))))
        return said


def loss(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output * 0.01, y, reduction="none")


def records() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(8, 3)
    x[0] *= 30
    return x, torch.arange(8) % 2


def moved(module: nn.Module) -> float:
    """How far the first record moves the sum, in units of the clip."""
    x, y = records()

    def total(x: Tensor, y: Tensor) -> Tensor:
        out = torch.zeros(sum(value.numel() for value in module.parameters()))
        clipped_sum(module, loss, x, y, clip=CLIP, out=out)
        return out

    return float((total(x, y) - total(x[1:], y[1:])).norm()) / CLIP


def a_path(self: Any, now: float) -> float:
    before = float(self.path.read_text() or 0)
    self.path.write_text(str(before + now))
    return before


def a_path_of_bytes(self: Any, now: float) -> float:
    before = float(self.path.stat().st_size)
    with self.path.open("a") as file:
        file.write("x" * int(now))
    return before


def numpy_files(self: Any, now: float) -> float:
    before = float(np.fromfile(self.path).sum())
    np.full(1, before + now).tofile(self.path)
    return before


def torch_files(self: Any, now: float) -> float:
    torch.save(torch.tensor(now), self.path)
    return float(torch.load(self.path))


def a_mapped_file(self: Any, now: float) -> float:
    kept = torch.from_file(str(self.path), shared=True, size=1)
    before = float(kept)
    kept += now
    return before


def a_held_module(self: Any, now: float) -> float:
    before = float(self.held.environ.get("CONFIDE_TEST", "0"))
    self.held.environ["CONFIDE_TEST"] = str(before + now)
    return before


def a_held_setting(self: Any, now: float) -> float:
    before = self.held.getrecursionlimit()
    self.held.setrecursionlimit(before + int(now))
    return float(before)


def a_level(self: Any, now: float) -> float:
    logger = logging.getLogger("confide.tests.level")
    before = logger.level
    logger.setLevel(before + int(now))
    return float(before)


def an_attribute_of_a_logger(self: Any, now: float) -> float:
    logger: Any = logging.getLogger("confide.tests.attribute")
    before = getattr(logger, "kept", 0.0)
    logger.kept = before + now
    return float(before)


def handlers(self: Any, now: float) -> float:
    logger = logging.getLogger("confide.tests.handlers")
    before = len(logger.handlers)
    for _ in range(int(now) % 3 + 1):
        logger.addHandler(logging.NullHandler())
    return float(before)


def settings_of_a_package(self: Any, now: float) -> float:
    before = float(self.held.get_config()["working_memory"])
    self.held.set_config(working_memory=int(before + now))
    return before


ATTACKS = [
    a_path, a_path_of_bytes, numpy_files, torch_files, a_mapped_file, a_held_module, a_held_setting, a_level,
    an_attribute_of_a_logger, handlers, settings_of_a_package,
]  # fmt: skip


def made(attack: Any, folder: Path) -> nn.Module:
    import sklearn

    path = folder / "kept"
    path.write_text("0")
    if attack in (numpy_files, a_mapped_file):
        np.zeros(1, dtype=np.float32 if attack is a_mapped_file else np.float64).tofile(path)
    held = {a_held_module: os, a_held_setting: sys, settings_of_a_package: sklearn}.get(attack)
    return Net(attack, path=path, held=held)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_the_machine_keeps_nothing(attack: Any, tmp_path: Path) -> None:
    try:
        assert moved(made(attack, tmp_path)) <= ROUNDING
    except Refusal as refusal:
        assert "\n" not in str(refusal)  # noqa: PT017 - a sentence is as good as not moving


def test_without_the_watch_files_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: nobody hears what is opened, and no process is cut off from the machine."""
    monkeypatch.setattr(apart, "is_possible", lambda: False)
    monkeypatch.setattr(one_by_one, "watched", nullcontext)
    module = made(a_path, tmp_path)
    assert max(moved(module) for _ in range(6)) > ROUNDING


def test_a_record_that_opens_a_file_counts_as_zero(tmp_path: Path) -> None:
    """One that made-up records do not open: no error, no file, and no trace."""

    def touches(self: Any, now: float) -> float:
        before = float(self.path.exists())
        if now > 20:
            self.path.touch()
        return 3.0 * before

    assert moved(Net(touches, path=tmp_path / "flag")) <= ROUNDING
    assert not (tmp_path / "flag").exists()


def test_others_may_write_meanwhile(tmp_path: Path) -> None:
    with watched.watched():
        pass
    (tmp_path / "file").write_text("anything")
    with watched.watched(), pytest.raises(Refusal, match="open"):
        (tmp_path / "file").write_text("other")
    assert (tmp_path / "file").read_text() == "anything"


# randomness -----------------------------------------------------------------------------------------------------------


def test_a_script_that_sets_torchs_generator_does_not_know_the_masks() -> None:
    """Masks that follow the place in a batch would move all later records when one is taken out."""
    x, y = records()
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2))

    def answer(seed: int | None) -> Tensor:
        torch.manual_seed(5)
        data = PrivateData(x, y, schema=Schema(records=8, classes=2), seed=seed)
        found = data.answer(
            GradientQuery(module, loss), SampledGaussian(0.0, CLIP, 1.0, 8, "full-batch", private=False)
        )
        assert torch.initial_seed() == 5
        return found.sum

    assert not torch.equal(answer(None), answer(None))
    assert torch.equal(answer(3), answer(3))  # a seeded run, which is booked as not private, can be repeated


# what strangers write -------------------------------------------------------------------------------------------------

LOG = logging.getLogger(__name__)
Said = namedtuple("Said", "logits hidden")


@dataclass
class Options:
    width: int = 3
    folder: Path = Path("runs")
    started: datetime = datetime(2026, 1, 1)


class Registry:
    kinds: dict[str, Any] = {}  # noqa: RUF012 - as people write it

    @classmethod
    def register(cls, name: str) -> Callable[[Any], Any]:
        def kept(kind: Any) -> Any:
            cls.kinds[name] = kind
            return kind

        return kept


@Registry.register("block")
class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.inner(self.norm(x)))


class Trained(nn.Module):
    """Settings with paths and times, files that it would write elsewhere, a clock, a registry, logs, a named tuple."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options, self.started, self.seconds = options, datetime.now(), time.time()
        self.blocks = nn.ModuleList([Registry.kinds["block"](options.width) for _ in range(2)])
        self.head = nn.Linear(options.width, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2:
            LOG.warning("%s axes in %s", x.dim(), self.options.folder)
        for block in self.blocks:
            x = block(x)
        return Said(torch._C._nn.gelu(self.head(x)), x).logits

    def save(self) -> None:
        os.makedirs(self.options.folder, exist_ok=True)
        torch.save(self.state_dict(), self.options.folder / "weights.pt")
        with open(self.options.folder / "log.txt", "a") as file:
            file.write(f"{time.time() - self.seconds} {random.random()} {os.environ.get('HOME')}")


class ByNumber(nn.Module):
    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.count = count
        for number in range(count):
            setattr(self, f"layer{number}", nn.Linear(3, 3))
        self.head, self.config = nn.Linear(3, 2), Path(__file__)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(self.count):
            x = torch.tanh(getattr(self, f"layer{number}")(x))
        said: Tensor = self.head(x)
        return said if self.config.suffix == ".py" else -said


@pytest.mark.parametrize("make", [lambda: Trained(Options()), ByNumber], ids=["trained", "by number"])
def test_ordinary_modules_run_on_all_records_at_once(make: Callable[[], nn.Module]) -> None:
    module = make()
    assert moved(module) <= ROUNDING
    anatomy = engine_of(module).anatomy
    assert anatomy is not None
    assert {examined.way for examined in anatomy.examined.values()} == {"isolated"}
