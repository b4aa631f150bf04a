"""The model of a step's cost says what is in its head, and where parallel is slower."""

from __future__ import annotations

from pathlib import Path

import pytest

from confide.distributed import cost
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


def test_the_page_says_what_the_model_says() -> None:
    """docs/scaling.md: constants, and the column "by the model"."""
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    for words in (f"{cost.COMPUTE:.0e} s per record and weight", f"{cost.NOISE:.0e} s per number"):
        assert words.replace("e-0", "e-") in page
    assert f"about {cost.BANDWIDTH / 1e9:g} GB/s" in page
    assert f"{1000 * cost.FIXED:g} ms a step, and {1000 * cost.MEETING:g} ms for the exchange of hashes" in page
    dense = 784 * 1200 + 1200 * 1200 + 1200 * 10 + 2410
    for weights, batch, row in ((dense, 1024, "10, 1024"), (dense, 256, "10, 256"), (7850, 1024, "logistic, 1024")):
        ratio = step_cost(weights, batch).seconds / step_cost(weights, batch, 2).seconds
        (line,) = [line for line in page.splitlines() if line.startswith("|") and f"{row} |" in line]
        assert line.endswith(f"| {ratio:.2f} |"), (line, ratio)
