"""What leaves the boundary: a record moves a release by at most what was charged, and no sum is without its noise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import confide
from confide.errors import Refusal
from confide.mechanism.clipping.rounding import LARGEST_BATCH, SHARE
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.noise import NoiseStream
from confide.mechanism.secure import LatticeNoise
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, StatisticQuery
from tests.mechanism.clipping.zoo_networks import Rating

MODES = (False, True)


def mechanism_for(records: int, secure: bool) -> SampledGaussian:
    return SampledGaussian(4.0, 1.0, 1.0, records, "full-batch", secure=secure)


class TwoTypes(nn.Module):
    """Its first parameter is in double precision, and its rounding that of single."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2).double(), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x.double()).float())
        return found.squeeze(1)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "rating": Rating,
    "double": lambda: Rating().double(),
    "two types": TwoTypes,
}


def squared_error(output: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (output - y).square()


def bare_sum(patch: pytest.MonkeyPatch, module: nn.Module, x: Any, y: Any, secure: bool) -> Tensor:
    """What a release holds beside its noise, taken where noise would be added."""
    seen: list[Tensor] = []
    with patch.context() as quiet:
        quiet.setattr(NoiseStream, "normal_", lambda self, out, std: out.zero_())

        def watching(self: LatticeNoise, total: Tensor, mechanism: SampledGaussian) -> float:
            seen.append(total.clone())
            return mechanism.noise_std

        quiet.setattr(LatticeNoise, "add_", watching)
        data = PrivateData(x, y, schema=confide.Schema(records=max(2, len(x))), seed=1)
        release = data.answer(GradientQuery(module, squared_error), mechanism_for(len(x), secure))
    assert bool(seen) is secure
    return (seen[0] if secure else release.sum).double()


@pytest.mark.parametrize("secure", MODES)
@pytest.mark.parametrize("records", [1, 7, 4096])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("target", [3e9, -3e9, 3e38])
def test_a_record_moves_a_release_by_at_most_the_clip(
    name: str, records: int, secure: bool, target: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module, generator = NETWORKS[name](), np.random.default_rng(0)
    x = generator.integers(0, 50, (records, 2)).astype("f4")
    y = generator.normal(size=records).astype("f8" if name == "double" else "f4")
    for attacker in ([7.0, 7.0], [7.0, 8.0]):  # one that cancels, and one that is only large
        more_x, more_y = np.concatenate([x, [attacker]]).astype("f4"), np.append(y, np.array(target, y.dtype))
        moved = bare_sum(monkeypatch, module, more_x, more_y, secure) - bare_sum(monkeypatch, module, x, y, secure)
        assert moved.norm() <= 1.0


def test_two_types_leave_the_room_of_the_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault is the type of the first parameter: it leaves 2^-16 where 2^-6 may be lost."""
    torch.manual_seed(0)
    alone = bare_sum(monkeypatch, TwoTypes(), np.ones((1, 2), "f4"), np.full(1, 1e6, "f4"), False)
    assert 0.98 < alone.norm() <= 1 - SHARE[torch.float32]


def test_batches_beyond_what_is_proven_are_refused_before_anything_is_paid() -> None:
    data, query = private()
    mechanism = SampledGaussian(1.0, 1.0, 1.0, LARGEST_BATCH + 1, "full-batch")
    with pytest.raises(Refusal, match="expected_batch"):
        data.answer(query, mechanism)
    assert not data.ledger.events()


def test_a_lattice_holds_sums_of_any_number_of_records() -> None:
    """Far more records than were declared: the sum stays where noise can still be added to it."""
    x = np.ones((20_000, 1))
    data = PrivateData(x, np.zeros(20_000), schema=confide.Schema(records=2), seed=1)
    release = data.answer(
        StatisticQuery(lambda x, y: x, 1), SampledGaussian(1.0, 1.0, 1.0, 2, "full-batch", secure=True)
    )
    assert release.sum.item() == pytest.approx(20_000, abs=10 + 20_000 * SHARE[torch.float64])


# nobody holds a sum without its noise -----------------------------------------------------------------------------


def private() -> tuple[PrivateData, GradientQuery]:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(40, 3)).astype("f4"), generator.normal(size=40).astype("f4")
    data = PrivateData(x, y, schema=confide.Schema(records=40), seed=1)
    return data, GradientQuery(nn.Linear(3, 1), confide.likelihoods.Gaussian(1.0).loss)


HOME = str(Path(confide.__file__).parent)


class Watch:
    """Looks at the buffer that will be released before every line of confide while a sum is added to it."""

    def __init__(self, stop: int = 0) -> None:
        self.stop, self.lines = stop, 0  # an interrupt comes before the line of that number, if any
        self.given: set[int] = set()
        self.seen: list[Tensor] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        if event == "line":
            self._look(frame)
            self.lines += bool(self.seen)  # from the first that knows of a sum
            if self.seen and self.lines == self.stop:
                raise KeyboardInterrupt
        return self

    def _look(self, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_name != "add_answers":
            frame = frame.f_back
        if frame is not None:
            self.given.add(frame.f_locals["total"].data_ptr())
            self.seen.append(frame.f_locals["total"].clone())


def watched(data: PrivateData, query: GradientQuery, secure: bool, stop: int = 0) -> tuple[Watch, Tensor | None]:
    watch, found = Watch(stop), None
    sys.settrace(watch)
    try:
        found = data.answer(query, mechanism_for(40, secure)).sum
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return watch, found


def without_noise(watch: Watch) -> bool:
    """Whether the buffer held nothing at some line: then the sum came onto nothing."""
    return any(bool((values == 0).any()) for values in watch.seen)


def test_the_released_buffer_holds_noise_before_the_sum_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    data, query = private()
    data.answer(query, mechanism_for(40, False))  # the network is examined
    watch, found = watched(data, query, False)
    assert found is not None
    assert watch.given == {found.data_ptr()}
    assert len(watch.seen) > 50
    assert not without_noise(watch)
    noise, last = watch.seen[0], watch.seen[-1]
    assert (noise - last).norm() > 0.1  # the sum did come in between
    # the planted fault: noise that comes later
    monkeypatch.setattr(NoiseStream, "normal_", lambda self, out, std: out.zero_())
    assert without_noise(watched(data, query, False)[0])


def test_a_sum_for_the_lattice_is_made_in_a_buffer_that_nobody_gets() -> None:
    data, query = private()
    watch, found = watched(data, query, True)
    assert found is not None
    assert without_noise(watch)  # in there it has none
    assert found.data_ptr() not in watch.given


@pytest.mark.parametrize("secure", MODES)
def test_an_interrupt_at_any_line_leaves_earlier_releases_alone(secure: bool) -> None:
    data, query = private()
    held = data.answer(query, mechanism_for(40, secure)).sum
    before = held.clone()
    for stop in range(1, 300, 7):
        watch, found = watched(data, query, secure, stop)
        assert found is None or watch.lines < stop
        assert (held == before).all()
        assert held.data_ptr() not in watch.given
        if not secure:
            assert not without_noise(watch)


def test_a_lattice_that_breaks_off_hands_out_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data, query = private()
    release = data.answer(query, mechanism_for(40, True)).sum
    before = release.clone()

    def broken(*_: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(LatticeNoise, "add_", broken)
    with pytest.raises(KeyboardInterrupt):
        data.answer(query, mechanism_for(40, True))
    assert (release == before).all()
