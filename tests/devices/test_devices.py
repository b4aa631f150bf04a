"""Where a module is, what is refused, and shapes on a device that nobody has (FakeTensor)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import confide
from confide import devices
from confide.devices import stream
from confide.errors import Refusal
from tests.conformance.conftest import classification, small_plan

THERE = torch.device("cuda", 0)


def test_a_module_on_meta_is_refused_before_anything_is_spent() -> None:
    case = classification()
    data = case.data(name="d")
    with pytest.raises(Refusal, match="'meta', which holds no numbers"):
        confide.fit(confide.methods.SGLD(), nn.Linear(4, 3, device="meta"), data, small_plan(case))
    assert not data.ledger.entries()


def test_a_module_in_two_places_is_refused() -> None:
    with FakeTensorMode(), torch.no_grad():
        module = nn.Linear(4, 3)
        module.register_parameter("weight", nn.Parameter(torch.empty(3, 4, device=THERE)))
        with pytest.raises(Refusal, match="cpu, cuda:0; move it to one device"):
            devices.device_of(module)
        module.register_parameter("bias", nn.Parameter(torch.empty(3, device=THERE)))
        assert devices.device_of(module) == THERE
    assert devices.device_of(nn.ReLU()) == devices.HOST


@pytest.mark.parametrize("name", ["meta", "cuda:77", "no such thing", 3.5])
def test_a_device_that_is_not_there_is_refused_in_one_sentence(name: Any) -> None:
    with pytest.raises(Refusal, match=r"device='.*': there is no such device here .*; use 'cpu'") as caught:
        devices.named(name)
    assert "\n" not in str(caught.value)
    assert devices.or_host(name) == devices.HOST


def test_what_a_method_keeps_comes_to_the_host_as_it_was() -> None:
    @dataclass(frozen=True)
    class Inner:
        value: Tensor

    @dataclass(frozen=True)
    class Outer:
        inner: Inner
        draws: tuple[Tensor, ...]
        step: int

    state = Outer(Inner(torch.ones(2)), (torch.zeros(1), torch.ones(1)), 3)
    assert devices.on_host(state) is state  # nothing is copied where nothing has to move


def test_the_stream_stays_on_its_device() -> None:
    """Every operation of the cipher and of the transform has its operands in one place."""
    with FakeTensorMode(), torch.no_grad():
        out = stream.normal_(torch.empty(3 * stream.BLOCKS_AT_ONCE, device=THERE), 2.0, bytes(32))
        assert out.device == THERE
        assert stream.words(bytes(32), 0, 5, THERE).shape == (16, 5)
