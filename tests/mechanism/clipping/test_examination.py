"""Large networks are examined by less work, and what is wrong with them is found all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from confide.errors import UnclippableError
from confide.mechanism.clipping import clipped_sum, coverage, engine, even_networks, once, structure
from confide.mechanism.clipping.coverage import Coverage
from confide.mechanism.clipping.once import ProductsOnce
from confide.mechanism.clipping.places import hearing_of_uneven
from confide.mechanism.clipping.reference import reference_clipped_sum
from confide.mechanism.clipping.rules.linear import OuterProduct
from confide.models.likelihoods import Categorical

WIDTH, LAYERS, COPIES = 16, 6, 4


class Blocks(nn.Module):
    """Layers of one kind, run by code of the user's; `past` uses the weight of a late one outside of its call."""

    def __init__(self, past: bool = False, mixed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.past, self.mixed = past, mixed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if self.past:
            x = x + x @ self.layers[4].weight
        return x - x.mean(0) if self.mixed else x


@pytest.fixture
def as_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "LARGE", -1)
    monkeypatch.setattr(coverage, "WORTH_IT", -1)
    monkeypatch.setattr(even_networks, "WORTH_IT", -1)


def error(module: nn.Module) -> float:
    x, y = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)), torch.arange(5)
    found, wanted = torch.zeros(2, sum(value.numel() for value in module.parameters()))
    clipped_sum(module, Categorical(WIDTH).loss, x, y, clip=0.5, out=found)
    reference_clipped_sum(module, Categorical(WIDTH).loss, x, y, clip=0.5, out=wanted)
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.usefixtures("as_if_large")
@pytest.mark.parametrize("past", [False, True])
def test_the_sum_is_exact(past: bool) -> None:
    assert error(Blocks(past)) < 1e-4


@pytest.mark.usefixtures("as_if_large")
def test_one_of_each_kind_is_compared_and_every_use_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[set[int]] = []
    begun = Coverage.__init__

    def noted(self: Coverage, *given: Any) -> None:
        begun(self, *given)
        compared.append(set(self.parameters))

    monkeypatch.setattr(Coverage, "__init__", noted)
    assert error(Blocks()) < 1e-4
    assert compared == [{0, 1}]
    monkeypatch.setattr("confide.mechanism.clipping.running.Pass.unseen", lambda run: frozenset())  # the broken variant
    assert error(Blocks(past=True)) > 1e-3


@pytest.mark.usefixtures("as_if_large")
def test_layers_that_differ_are_each_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their settings, by what listens to them and by the shapes that they are given."""
    module = nn.Sequential(nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, eps=0.5), nn.LayerNorm(WIDTH))
    module.append(nn.LayerNorm(WIDTH)).append(nn.Linear(WIDTH, WIDTH))
    module[3].register_forward_hook(lambda layer, given, output: 2 * output)
    kinds: list[int] = []
    begun = Coverage.__init__

    def noted(self: Coverage, *given: Any) -> None:
        begun(self, *given)
        kinds.append(len(self.groups))

    monkeypatch.setattr(Coverage, "__init__", noted)
    assert error(module) < 1e-4
    assert kinds == [4]


@pytest.mark.usefixtures("as_if_large")
def test_a_rule_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer of that kind then has its parameters copied, whichever of them was compared."""
    honest = OuterProduct.weighted
    monkeypatch.setattr(OuterProduct, "add_onto", lambda *_: False)
    monkeypatch.setattr(OuterProduct, "in_blocks", lambda *_: None)
    monkeypatch.setattr(
        OuterProduct, "weighted", lambda self, factors: {n: 2 * v for n, v in honest(self, factors).items()}
    )
    module = Blocks()
    assert error(module) < 1e-4
    anatomy = engine.engine_of(module).anatomy
    assert anatomy is not None
    assert anatomy.escaped == frozenset(range(2 * LAYERS))


@pytest.mark.usefixtures("as_if_large")
def test_records_that_are_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnclippableError, match="mixed"):
        error(Blocks(mixed=True))
    monkeypatch.setattr(structure, "_means_the_same", lambda asked: True)  # the broken variant
    assert error(Blocks(mixed=True)) > 1e-3


# products that are made once --------------------------------------------------------------------------------------


class Made(TorchDispatchMode):
    """Counts products, and spoils the last row of one of them."""

    def __init__(self, spoilt: int = -1) -> None:
        super().__init__()
        self.count, self.spoilt = 0, spoilt

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in once.PRODUCTS:
            if self.count == self.spoilt:
                found[-1] *= 1 + 2**-20
            self.count += 1
        return found


def through(module: nn.Module, x: Tensor, made: Made, *records: list[int]) -> Tensor:
    """What comes of the last of several passes of these records."""
    products = ProductsOnce(list(module.parameters()))
    for index in records or ([0] * len(x),):
        with made, products.passing(torch.tensor(index)):
            found: Tensor = module(x[index] if records else x)
    return found


def alike(rows: Tensor) -> bool:
    return all(torch.equal(one, rows[0]) for one in rows)


@pytest.fixture
def copies() -> Tensor:
    return torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1)).repeat(COPIES, 1)


def test_the_same_product_is_made_once(copies: Tensor) -> None:
    made = Made()
    assert alike(through(Blocks(), copies, made))
    assert made.count == 1


def test_a_product_that_rounds_by_place_is_seen(copies: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is of those that are made; all that follow are made then."""
    made = Made(spoilt=0)
    assert not alike(through(Blocks(), copies, made))
    assert made.count == LAYERS
    wide = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH))
    for spoilt in range(3):
        assert not alike(through(wide, copies, Made(spoilt)))
    honest = ProductsOnce._given_alike  # the broken variant: nobody looks
    monkeypatch.setattr(ProductsOnce, "_given_alike", lambda self, *given: honest(self, *given) or True)
    monkeypatch.setattr(ProductsOnce, "_as_before", lambda self, given: True)
    assert alike(through(nn.Sequential(wide[0], wide[3]), copies, Made(0)))


def test_other_records_in_another_order() -> None:
    module, x = Blocks(), torch.randn(COPIES, WIDTH, generator=torch.Generator().manual_seed(2))
    order, other = [0, 1, 2, 3], [3, 1, 0, 0]
    known, made = through(module, x, Made(), order), Made()
    assert torch.equal(through(module, x, made, order, other), known[other])
    assert made.count == 2
    assert not torch.equal(through(module, x, Made(spoilt=1), order, other), known[other])


def test_what_is_no_copy_is_made(copies: Tensor) -> None:
    module, made = Blocks(), Made()
    copies[2, 5] *= 1 + 2**-20
    assert torch.equal(through(module, copies, made), module(copies))
    assert made.count == LAYERS


@pytest.mark.usefixtures("as_if_large")
def test_networks_with_products_made_once_are_found_even() -> None:
    with hearing_of_uneven() as uneven:
        error(Blocks())
    assert uneven == []
