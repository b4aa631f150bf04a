"""Rules for layers of libraries, which are known by their names: exact, and of no use to an impostor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confide.errors import SpeedWarning
from confide.mechanism.clipping import clipped_sum
from confide.mechanism.clipping.reference import reference_clipped_sum
from confide.mechanism.clipping.rules.explicit import find_explicit
from confide.mechanism.clipping.rules.registry import find_rule

pytest.importorskip("transformers")


def transposed(inputs: int, outputs: int) -> Any:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(outputs, inputs).double()


class Twice(nn.Module):
    """One transposed layer on every position, one on their mean, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = transposed(5, 7), transposed(7, 7), transposed(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.again(torch.tanh(self.again(torch.tanh(self.first(x)))))
        return self.last(inner.mean(1))  # type: ignore[no-any-return]


class Routed(nn.Module):
    """Experts of a library model between two linear layers."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        import transformers
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        sizes: dict[str, Any] = {"num_local_experts": 3, "num_experts_per_tok": 2, "num_attention_heads": 2}
        config = transformers.MixtralConfig(hidden_size=6, intermediate_size=4, **sizes)
        config._experts_implementation = implementation
        self.first, self.block, self.last = nn.Linear(5, 6), MixtralSparseMoeBlock(config), nn.Linear(6, 2)
        for value in self.block.parameters():
            nn.init.normal_(value, std=0.5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x)).mean(1))  # type: ignore[no-any-return]


class AddedOnto(nn.Module):
    """What attention gives is written over, as residual connections often do."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.inner, self.first = nn.MultiheadAttention(6, 2, batch_first=first), first
        self.before, self.past, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        given = self.before(x if self.first else x.transpose(0, 1))
        found = self.inner(given, given, given)[0]
        found += self.past(given)
        out: Tensor = self.last(found.mean(1 if self.first else 0))
        return out


@pytest.mark.parametrize("first", [True, False])
def test_attention_that_is_written_over_is_exact_and_isolated(first: bool, recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    found, wanted = both(AddedOnto(first), 0.5)
    assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-9)
    assert not [one for one in recwarn if one.category is SpeedWarning]


@pytest.mark.parametrize("clip", [0.1, 100.0])
@pytest.mark.parametrize("implementation", ["batched_mm", "eager"])
def test_stacked_experts_are_exact(clip: float, implementation: str) -> None:
    torch.manual_seed(0)
    module = Routed(implementation)
    assert find_explicit(module.block.experts) is not None
    found, wanted = both(module, clip)
    assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-9)


def test_experts_with_a_gate_of_their_own_are_left_alone() -> None:
    module = Routed("batched_mm")
    kind = type(module.block.experts)
    other = type(kind.__name__, (kind,), {"_apply_gate": lambda self, x: x, "__module__": kind.__module__})
    module.block.experts.__class__ = other
    assert find_explicit(module.block.experts) is None


def both(module: nn.Module, clip: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(2, (6,), generator=generator)
    size = sum(value.numel() for value in module.parameters() if value.requires_grad)
    found, wanted = (torch.zeros(size, dtype=torch.float64) for _ in range(2))

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, y, reduction="none")

    clipped_sum(module, loss, x, y, clip=clip, out=found)
    reference_clipped_sum(module, loss, x, y, clip=clip, out=wanted)
    return found, wanted


@pytest.mark.parametrize("clip", [0.1, 100.0])
@pytest.mark.parametrize("frozen", ["", "bias", "weight"])
def test_transposed_layers_are_exact(clip: float, frozen: str) -> None:
    torch.manual_seed(0)
    module = Twice()
    for name, value in module.named_parameters():
        value.requires_grad_(not (frozen and name.endswith(frozen)))
    assert find_rule(module.first, frozenset(["weight", "bias"])) is not None
    found, wanted = both(module, clip)
    assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-9)


def test_an_impostor_is_found_out_on_made_up_records() -> None:
    """It has the name, and does something else with its weight: its gradients come from autograd all the same."""
    impostor = type("Conv1D", (nn.Module,), {"__module__": "transformers.pytorch_utils", "forward": _squared})

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer: Any = impostor()
            self.layer.weight = nn.Parameter(torch.randn(5, 2, dtype=torch.float64))
            self.layer.bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mean(1)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    found, wanted = both(Network(), 100.0)
    assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-9)


def _squared(self: Any, x: Tensor) -> Tensor:
    return x @ self.weight.square() + self.bias  # type: ignore[no-any-return]
