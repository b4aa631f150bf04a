"""The model of a step's cost says what is in its head, and where parallel is slower."""

from __future__ import annotations

import pytest

from confide.distributed.cost import advice, step_cost
from confide.errors import Refusal


def test_work_is_divided_and_the_exchange_is_not() -> None:
    one, four = step_cost(2_400_000, 1024), step_cost(2_400_000, 1024, 4)
    assert four.compute == pytest.approx(one.compute / 4)
    assert four.noise == pytest.approx(one.noise / 4)
    assert one.sent == one.exchange == 0
    assert four.sent == pytest.approx(1.5 * 4 * 2_400_000)


def test_large_batches_are_faster_and_small_ones_are_not() -> None:
    assert "times as fast" in advice(2_400_000, 1024, 2)
    assert "no faster" in advice(7_850, 256, 2)


@pytest.mark.parametrize(("weights", "batch", "ranks"), [(0, 10, 2), (10, 0, 2), (10, 10, 0)])
def test_nonsense_is_refused(weights: int, batch: float, ranks: int) -> None:
    with pytest.raises(Refusal, match="must be"):
        step_cost(weights, batch, ranks)
