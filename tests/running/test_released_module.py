"""Nothing that a forward wrote down while it saw records leaves with the posterior, a checkpoint or an export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import confide
from confide import methods
from confide.models.likelihoods import Categorical
from confide.running.journal import Checkpoints

SECRET = 0.123456789
RECORDS = 30


class Remembers(nn.Module):
    """Linear, and writes down what it saw in every way that a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("table", torch.arange(3.0))  # public, and stays
        self.seen: list[Tensor] = []
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last = x.detach().clone()
            self.seen.append(self.last)
            self.layer.last = self.last  # type: ignore[assignment]
            if x.ndim == 2:
                self.mean = x.detach().mean(0)  # another tensor under the old name
        return self.layer(x)  # type: ignore[no-any-return]


class Writes(Categorical):
    """A likelihood that remembers targets."""

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        object.__setattr__(self, "last", output.detach())
        return super().loss(output, y)


@pytest.fixture(autouse=True)
def _unexamined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other walls refuse or undo such a forward; here the last one stands alone."""
    from confide.sources import answers

    def plain_sum(module: nn.Module, loss: Any, x: Tensor, y: Tensor, *, out: Tensor, **_: Any) -> Tensor:
        total = loss(module(x), y).sum()
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        out += torch.cat([part.flatten() for part in torch.autograd.grad(total, parameters)]).to(out.dtype)
        return torch.zeros(len(x))

    monkeypatch.setattr(answers, "clipped_sum", plain_sum)


def everything(thing: Any, met: set[int] | None = None) -> Iterator[Tensor]:
    """All tensors that can be reached from a thing."""
    met = set() if met is None else met
    if id(thing) in met:
        return
    met.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    for member in thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple | set) else ():
        yield from everything(member, met)
    for attribute in vars(thing).values() if hasattr(thing, "__dict__") and not isinstance(thing, type) else ():
        yield from everything(attribute, met)


def holds_a_record(tensors: Iterator[Tensor]) -> bool:
    return any(
        tensor.is_floating_point() and bool((tensor.detach().double() - SECRET).abs().lt(1e-7).any())
        for tensor in tensors
    )


def fitted(module: nn.Module, **options: Any) -> confide.Run:
    x, y = torch.full((RECORDS, 3), SECRET), torch.zeros(RECORDS)
    data = confide.PrivateData(x, y, schema=confide.Schema(classes=2, records=RECORDS))
    plan = confide.plan(noise_multiplier=1.0, delta=1e-5, records=RECORDS, batch=10, steps=6)
    return confide.fit(methods.SGLD(), module, data, plan, **options)


def test_the_released_module_never_saw_a_record() -> None:
    module = Remembers()
    run = fitted(module, likelihood=Writes(2))
    assert not holds_a_record(everything(run.posterior))
    assert not holds_a_record(everything(run))
    assert not holds_a_record(everything(module))
    released = run.posterior.module
    assert torch.equal(released.table, torch.arange(3.0))
    assert released.last is None
    last = torch.cat([parameter.flatten() for parameter in released.parameters()])
    assert torch.equal(last, run.posterior.draws[-1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["MinMaxObserver", "MovingAverageMinMaxObserver", "HistogramObserver", "FakeQuantize"])
def test_an_observer_of_torch_is_released_as_it_came(kind: str) -> None:
    import torch.ao.quantization as quantization

    module = nn.Sequential(getattr(quantization, kind)(), nn.Linear(3, 2))
    run = fitted(module)
    assert not holds_a_record(everything(run.posterior))
    assert not holds_a_record(everything(module))


def test_a_posterior_with_the_working_module_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys.modules["confide.running.fit"], "_moved", lambda public, problem: problem)
    assert holds_a_record(everything(fitted(Remembers()).posterior))


def test_checkpoints_hold_no_buffer(tmp_path: Path) -> None:
    fitted(Remembers(), checkpoint=Checkpoints(tmp_path / "run", every=2))
    tensors = [load_file(path)["value"] for path in (tmp_path / "run" / "tensors").iterdir()]
    assert tensors
    assert not holds_a_record(iter(tensors))
    other = Remembers()
    other.table += 1  # type: ignore[assignment]  # what a checkpoint does not hold has to be the same
    with pytest.raises(ValueError, match="belongs to another run"):
        fitted(other, checkpoint=Checkpoints(tmp_path / "run", every=2))


def test_how_long_it_took_is_not_saved(tmp_path: Path) -> None:
    run = fitted(confide.networks.linear(3, 2))
    run.save(str(tmp_path / "run"))
    for name in ("run.json", "report.html"):
        text = (tmp_path / "run" / name).read_text()
        assert '"seconds"' not in text
        assert "Time to fit" not in text
