"""The emulated device is as strict as a real one: what would fail there fails on it."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import nn

from tests.devices import pretend

pytestmark = pytest.mark.gpu


def test_tensors_do_not_mix_with_the_hosts(device: torch.device) -> None:
    there = torch.ones(3, 4, device=device)
    for mixed in (
        lambda: there + torch.ones(4),
        lambda: there @ torch.ones(4),
        lambda: nn.Linear(4, 2)(there),
        lambda: torch.cat([there, torch.ones(1, 4)]),
        lambda: torch.randn(2, device=device, generator=torch.Generator()),
    ):
        with pytest.raises(RuntimeError, match=r"device"):
            mixed()
    assert (there * torch.tensor(2.0)).sum().item() == 24  # a single number may come from the host
    assert there[torch.tensor([0, 1])].shape == (2, 4)  # and so may indices


def test_nothing_of_it_reaches_code_of_the_host(device: torch.device) -> None:
    there = torch.ones(3, device=device)
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    if device.type == pretend.NAME:
        with pytest.raises(RuntimeError, match="address"):
            ctypes.c_void_p(there.data_ptr())


def test_views_gradients_and_transforms_are_torchs_own(device: torch.device) -> None:
    there = torch.arange(12.0, device=device).view(3, 4)
    there.t()[1].mul_(2)
    assert there.cpu().tolist() == [[0, 2, 2, 3], [4, 10, 6, 7], [8, 18, 10, 11]]
    weight = torch.ones(4, device=device, requires_grad=True)
    (there @ weight).square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.device == device
    each = torch.func.vmap(torch.func.grad(lambda w, x: (x @ w).square()), (None, 0))(weight.detach(), there)
    torch.testing.assert_close(each.sum(0).cpu(), weight.grad.cpu())
