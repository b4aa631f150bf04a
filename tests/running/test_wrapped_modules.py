"""Modules that are wrapped, traced, lazy or checkpointed: right, or one sentence before anything is spent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import confide
from confide.errors import Refusal
from confide.mechanism.clipping import clipped_sum
from confide.models.flat import copied
from tests.conformance.conftest import classification, small_plan


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner[2](checkpoint(self.inner[:2], x, use_reentrant=False))
        return out


def initialised() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))
    module(torch.zeros(1, 4))
    return module


def in_place() -> nn.Module:
    module = network()
    module.compile()
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "compiled": lambda: torch.compile(network()),  # type: ignore[dict-item, return-value]
    "compiled in place": in_place,
    "a part compiled": lambda: nn.Sequential(torch.compile(network()[:2]), network()[2]),  # type: ignore[call-overload]
    "checkpointed": Checkpointed,
    "lazy, called once": initialised,
}


def said(module: nn.Module) -> Tensor:
    case = classification()
    run = confide.fit(confide.methods.SGLD(), module, case.data(), small_plan(case, steps=3), seed=5)
    return run.posterior.summary(case.x).centre


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile imports
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning")
def test_a_wrapped_network_is_the_network(kind: str) -> None:
    module = MODULES[kind]()
    expected = network()
    if kind == "lazy, called once":
        expected.load_state_dict(module.state_dict())
    torch.testing.assert_close(said(module), said(expected), atol=1e-3, rtol=1e-3)


def test_a_lazy_network_is_refused_before_anything_is_spent() -> None:
    case = classification()
    data = case.data(name="d")
    with pytest.raises(Refusal, match=r"0\.weight, 0\.bias has no shape yet; call the module once"):
        confide.fit(confide.methods.BBP(), nn.Sequential(nn.LazyLinear(3)), data, small_plan(case))
    assert not data.ledger.entries()


@pytest.mark.parametrize(
    "norm", [lambda: nn.GroupNorm(2, 8), lambda: nn.BatchNorm1d(8).eval()], ids=["group", "frozen"]
)
def test_normalised_features_without_positions(norm: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), norm(), nn.Linear(8, 3)).eval()
    x, y, values = torch.randn(5, 4), torch.randint(3, (5,)), list(module.parameters())
    found, expected = (torch.zeros(sum(value.numel() for value in values)) for _ in range(2))
    clipped_sum(module, own_loss, x, y, clip=0.5, out=found)
    for one in range(5):
        parts = torch.autograd.grad(own_loss(module(x[one : one + 1]), y[one : one + 1]).sum(), values)
        row = torch.cat([part.flatten() for part in parts])
        expected += row * min(1.0, 0.5 / float(row.norm()))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning")  # spectral norms run one by one
@pytest.mark.parametrize("norm", [spectral_norm, weight_norm], ids=["spectral", "weight"])
def test_parametrised_layers_from_fit_to_file(norm: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 3))

    case = classification()
    run = confide.fit(confide.methods.SGLD(), make(), case.data(), small_plan(case, steps=3), seed=5)
    run.posterior.save(tmp_path / "a.safetensors")
    again = confide.load_posterior(tmp_path / "a.safetensors", module=make())
    torch.testing.assert_close(again.summary(case.x).centre, run.posterior.summary(case.x).centre)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch calls both of them old
@pytest.mark.parametrize("made", [torch.jit.script, lambda module: torch.jit.trace(module, torch.zeros(2, 4))])
def test_scripted_and_traced_networks_are_refused_in_one_sentence(made: Callable[[nn.Module], nn.Module]) -> None:
    """torch's copies of them have no parameters to move."""
    case = classification()
    for module in (made(network()), nn.Sequential(made(network()[:2]), network()[2])):
        data = case.data()
        with pytest.raises(Refusal, match=r"scripted or traced.*give the module that it was made from"):
            confide.fit(confide.methods.SGLD(), module, data, small_plan(case, steps=3))
        assert not data.ledger.entries()


@pytest.mark.parametrize("method", [confide.methods.SGLD(), confide.methods.BBP(), confide.methods.MCDropout()])
def test_batch_normalisation_given_in_evaluation_stays_frozen_through_a_fit(method: Any, tmp_path: Path) -> None:
    """In training it would mix records, and is refused; a fit puts everything else in training."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8)
    norm.running_mean.copy_(torch.randn(8))
    module = nn.Sequential(nn.Linear(4, 8), norm, nn.Dropout(0.2), nn.Linear(8, 3))
    case = classification()
    with pytest.raises(Refusal, match="group_normed"):
        confide.fit(method, module, case.data(), small_plan(case, steps=3))
    norm.eval()
    before = norm.running_mean.clone()
    posterior = confide.fit(method, module, case.data(), small_plan(case, steps=3)).posterior
    kept = [values for name, values in posterior.module.named_buffers() if name.endswith("running_mean")]
    assert torch.equal(kept[0], before)
    together, alone = posterior.summary(case.x[:6]).centre, posterior.summary(case.x[:1]).centre
    torch.testing.assert_close(together[:1], alone, atol=1e-4, rtol=1e-4)
    posterior.save(tmp_path / "frozen.safetensors")
    again = confide.load_posterior(tmp_path / "frozen.safetensors", module)
    torch.testing.assert_close(again.summary(case.x[:6]).centre, together)


class Rare(nn.Module):
    """Numbers of rare kinds that are no weights, and others in every network that is built."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.register_buffer("waves", torch.randn(4, 5, dtype=torch.complex64))
        self.register_buffer("passing", torch.randn(5, dtype=torch.complex64), persistent=False)
        self.register_buffer("edges", (torch.rand(4, 4) > 0.5).float().to_sparse(layout=layout))
        self.shift = nn.Parameter(torch.randn(5, dtype=torch.complex64), requires_grad=False)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        edges, waves, passing = (self.get_buffer(name) for name in ("edges", "waves", "passing"))
        found: Tensor = self.last(((edges @ x.mT).mT.to(waves.dtype) @ waves + passing + self.shift).abs())
        return found


@pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning", "ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
def test_complex_and_sparse_numbers_come_back_into_a_network_built_anew(layout: torch.layout, tmp_path: Path) -> None:
    case = classification()
    torch.manual_seed(0)
    run = confide.fit(confide.methods.SGLD(), Rare(layout), case.data(), small_plan(case, steps=3), seed=5)
    run.posterior.save(tmp_path / "a.safetensors")
    torch.manual_seed(1)
    again = confide.load_posterior(tmp_path / "a.safetensors", module=Rare(layout))
    assert torch.equal(again.summary(case.x).centre, run.posterior.summary(case.x).centre)


class Recurrent(nn.Module):
    """Its recurrent layer keeps the weights, one of them made anew at every call, in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = weight_norm(nn.LSTM(2, 4, batch_first=True), "weight_hh_l0"), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.inner(x.unflatten(1, (2, 2)))[0].mean(1))
        return found


def test_a_recurrent_layer_with_a_normalised_weight_is_copied() -> None:
    given, x = Recurrent(), torch.ones(2, 4)
    before = given(x)
    own = copied(given)  # torch's own copy is an error after a call
    torch.testing.assert_close(own(x), before)
    with torch.no_grad():
        own.get_parameter("inner.parametrizations.weight_hh_l0.original1").mul_(-1)
    assert not torch.allclose(own(x), before)
    torch.testing.assert_close(given(x), before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_masks_of_a_loaded_network_are_not_compiled(tmp_path: Path) -> None:
    """A mask is a seed, for each of which torch would compile the network again."""

    def make() -> Any:
        torch.manual_seed(0)
        return torch.compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)))

    case = classification()
    run = confide.fit(confide.methods.MCDropout(), make(), case.data(), small_plan(case, steps=3), seed=5)
    run.posterior.save(tmp_path / "a.safetensors")
    again = confide.load_posterior(tmp_path / "a.safetensors", module=make())
    assert isinstance(again.module, nn.Sequential)
    assert torch.equal(again.summary(case.x).centre, run.posterior.summary(case.x).centre)
