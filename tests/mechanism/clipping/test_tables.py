"""Tables that are looked up: only their rows are touched, each once; a table that is a weight too meets noise once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confide._native.loader import library
from confide.mechanism.clipping import calls, clipped_sum
from confide.mechanism.clipping.rules.embedding import MeanFieldRows, Rows

INDEX = torch.tensor([[1, 4, 1], [4, 4, 0], [2, 1, 1], [1, 1, 4], [0, 2, 2]])


def rows(features: int = 3) -> Rows:
    values = torch.randn(*INDEX.shape, features, generator=torch.Generator().manual_seed(0))
    return Rows(INDEX, values, 6)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_sums_are_those_of_dense_gradients(size: int) -> None:
    table, factors = rows(), torch.linspace(0.1, 1.0, 5)
    wanted = torch.einsum("n,nrf->rf", factors, table.dense(0, 5)["weight"])
    torch.testing.assert_close(table.in_blocks(factors, size)["weight"], wanted)
    noise = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    found = noise.clone()
    assert table.add_onto({"weight": found}, factors, size)
    torch.testing.assert_close(found, noise + wanted)
    untouched = [row for row in range(6) if row not in INDEX]
    assert torch.equal(found[untouched], noise[untouched])


def test_several_tables_side_by_side() -> None:
    table = MeanFieldRows(INDEX, rows(6).values, 6, ("weight_mean", "weight_rho"))
    factors = torch.linspace(0.1, 1.0, 5)
    found = {name: torch.zeros(6, 3) for name in table.names}
    assert table.add_onto(found, factors, 2)
    for name, wanted in table.weighted(factors).items():
        torch.testing.assert_close(found[name], wanted)


@pytest.mark.parametrize(("size", "wanted"), [(4, 2.0**24), (2, 2.0**24 + 2)], ids=["one block", "two"])
def test_records_are_added_up_in_blocks_and_meet_what_is_there_once(size: int, wanted: float) -> None:
    """2^24 + 1 is no number of single precision: a one that comes alone is lost, two that meet first are not."""
    values = torch.tensor([2.0**24, 1.0, 1.0, 1.0]).view(4, 1, 1)
    table = Rows(torch.zeros(4, 1, dtype=torch.long), values, 1)
    noise = torch.full((1, 1), -(2.0**24))
    assert table.add_onto({"weight": noise}, torch.ones(4), size)
    assert float(noise) == wanted - 2.0**24


def test_double_precision_onto_single_is_rounded_by_the_other_way() -> None:
    assert not rows().widened().add_onto({"weight": torch.zeros(6, 3)}, torch.ones(5).double(), 5)


class Tied(nn.Module):
    """Words read by a table and told by the same."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(words, 8), nn.Linear(8, words)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.table(x)))
        return found


def told(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.mT, y, reduction="none").sum(1)


def test_a_table_that_is_a_weight_too_is_added_in_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, x = Tied(40), torch.randint(40, (6, 5))
    taken: list[bool] = []
    before = calls.Cluster._added_tied

    def seen(self: Any, *given: Any) -> bool:
        taken.append(before(self, *given))
        return taken[-1]

    noise, sums = torch.randn(40 * 9), []
    for way in (seen, lambda *_: False):
        monkeypatch.setattr(calls.Cluster, "_added_tied", way)
        sums.append(noise.clone())
        clipped_sum(module, told, x, x.roll(1, 1), clip=0.5, out=sums[-1])
    torch.testing.assert_close(*sums, rtol=0, atol=2e-6)
    assert taken[-1] == (library() is not None)
