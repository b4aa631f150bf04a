"""A zoo of public architectures: which way each takes, exact against a loop over records, and nothing of it mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confide.errors import Refusal
from confide.mechanism.clipping import clipped_sum, structure
from tests.mechanism.clipping.public.libraries import Case
from tests.mechanism.clipping.public.table import ALL, FILE, known, shares, taken

pytestmark = [
    pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
TOLERANCE = 1e-9
# These reckon parts of their attention, or of their experts' choice, in float32, whatever the weights are.
IN_FLOAT32 = {"gpt_neo": 1e-6, "gptj": 1e-6, "codegen": 1e-6}
ADVERSARY = 0
ROUNDING = 1 + 1e-5
MEMBERS = [pytest.param(name, marks=pytest.mark.slow) if member.slow else name for name, member in ALL.items()]


def chosen(tree: Any, rows: Any) -> Any:
    return tuple(part[rows] for part in tree) if isinstance(tree, tuple) else tree[rows]


def by_hand(module: nn.Module, loss: Any, x: Any, y: Any) -> Tensor:
    """(records, parameters): a loop over records, each a batch of its own, and torch's autograd."""
    parameters = learnt(module)
    found = []
    for record in range(len(y)):
        one_x, one_y = chosen(x, slice(record, record + 1)), chosen(y, slice(record, record + 1))
        value = loss(module(*(one_x if isinstance(one_x, tuple) else (one_x,))), one_y).sum()
        gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        found.append(torch.cat([gradient.flatten().double() for gradient in gradients]))
    return torch.stack(found)


def learnt(module: nn.Module) -> list[nn.Parameter]:
    """Some have tables of positions that are parameters and never move."""
    return [value for value in module.parameters() if value.requires_grad]


def total(module: nn.Module, loss: Any, x: Any, y: Any, clip: float) -> Tensor:
    out = torch.zeros(sum(value.numel() for value in learnt(module)), dtype=torch.float64)
    clipped_sum(module, loss, x, y, clip=clip, out=out)
    return out


def adversarial(tree: Any) -> Any:
    """The first record as nobody has them: huge numbers, one word again and again."""

    def changed(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[ADVERSARY] = tensor[ADVERSARY] * 1e3 if tensor.is_floating_point() else tensor[ADVERSARY].max()
        return tensor

    return tuple(map(changed, tree)) if isinstance(tree, tuple) else changed(tree)


def test_the_zoo_is_large_and_its_table_is_whole() -> None:
    ways = known()
    assert ways.keys() == ALL.keys(), "write the table anew: python -m tests.mechanism.clipping.public.table"
    assert len(ways) >= 40
    assert sum(not member.slow for member in ALL.values()) >= 40
    assert FILE.read_text().startswith(f"# {len(ways)} architectures: {shares(ways)}\n")
    page = (Path(__file__).parents[3] / "docs/soundness.md").read_text()
    assert f"{len(ways)} public architectures: {shares(ways)}" in page.replace("\n", " ")


@pytest.mark.parametrize("name", MEMBERS)
def test_every_member_takes_its_way_and_is_exact(name: str) -> None:
    module, loss, x, y = ALL[name].case()
    way = known()[name]
    if way == "refused":
        with pytest.raises(Refusal, match=r"^[^\n]+$"):
            total(module, loss, x, y, 1.0)
        return
    gradients = by_hand(*ALL[name].case())  # another one: some keep what they computed last, and its history
    norms = gradients.norm(dim=1)
    clip = norms.median().item()
    found = total(module, loss, x, y, clip)
    wanted = (gradients * (clip / norms).clamp(max=1).unsqueeze(1)).sum(0)
    assert (found - wanted).norm() <= IN_FLOAT32.get(name, TOLERANCE) * wanted.norm()
    assert taken(module)[0] == way, taken(module)[1]
    assert bool(taken(module)[1]) == (way == "one by one")
    check_zeros(module, found, gradients)
    check_move(module, loss, x, y, clip)


def check_zeros(module: nn.Module, found: Tensor, gradients: Tensor) -> None:
    """Where a parameter has a gradient it has one in the sum."""
    sizes = [value.numel() for value in learnt(module)]
    names = [name for name, value in module.named_parameters() if value.requires_grad]
    largest = gradients.abs().amax(0)
    for name, ours, theirs in zip(names, found.split(sizes), largest.split(sizes), strict=True):
        assert theirs.max() < 1e-12 or ours.abs().max() > 0, name


def check_move(module: nn.Module, loss: Any, x: Any, y: Any, clip: float) -> None:
    rest = list(range(1, len(y)))
    strange = adversarial(x)
    moved = total(module, loss, strange, y, clip) - total(module, loss, chosen(strange, rest), chosen(y, rest), clip)
    assert moved.norm() <= clip * ROUNDING


def test_a_member_whose_parameters_are_missed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: nobody looks for gradients that no layer call shows."""
    monkeypatch.setattr(structure, "_missed", lambda *_: frozenset())
    monkeypatch.setattr("confide.mechanism.clipping.running.Pass.unseen", lambda run: frozenset())
    module, loss, x, y = broken()
    gradients = by_hand(module, loss, x, y)
    with pytest.raises(AssertionError, match="places"):
        check_zeros(module, total(module, loss, x, y, 1e9), gradients)


def broken() -> Case:
    """The small GPT, calling its positions by their table instead of their layer."""
    module, loss, x, y = ALL["small-gpt-with-tied-weights"].case()
    places: Any = module.get_submodule("places")
    places.__class__ = type("Table", (nn.Embedding,), {"__call__": lambda layer, index: layer.weight[index]})
    return module, loss, x, y
