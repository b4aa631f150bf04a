"""Networks whose first part is frozen: which parts are kept, and that the answers are those of the whole network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import confide
from confide.data.schema import Schema
from confide.methods import BBP, SGLD
from confide.sources import features, prefix
from confide.sources.private_data import PrivateData

RECORDS = 40


class Head(nn.Module):
    """A frozen body under a trainable head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 32))
        self.body.requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(32, 2), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))


class Skipping(Head):
    """What comes behind sees the record as well."""

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x)) + x[:, :2]


class Named(nn.Module):
    """Gives several tensors by name, and something that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 32)

    def forward(self, x: Tensor) -> Any:
        inner = self.layer(x)
        return {"states": [inner.tanh(), inner[:, :3]], "attentions": None}


class OfNames(Head):
    def __init__(self) -> None:
        super().__init__()
        self.body = Named().requires_grad_(False)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:
        found = self.body(x)
        return self.head(found["states"][0] + found["states"][1].sum(1, keepdim=True))


class Prompted(Head):
    """What the body sees is trained; no gradient says so."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x + self.prompt.detach())) + self.prompt.sum()


class Deciding(Prompted):
    """Trained weights decide what the body sees, as a number of Python."""

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(-x if self.prompt.sum().item() > 0 else x)) + self.prompt.sum()


class Twice(Head):
    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x)) - self.head(self.body(-x))


class Branching(Prompted):
    """Whether the body knows what is trained depends on the record."""

    def forward(self, x: Tensor) -> Any:
        if bool(x.abs().sum() > 7):
            return self.head(self.body(x + self.prompt))
        return self.head(self.body(x))


class Random(Head):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), Wobbling(), nn.Linear(32, 32)).requires_grad_(False)


class Wobbling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.01)


def chain() -> nn.Module:
    layers = [nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)]
    for layer in layers[:3]:
        layer.requires_grad_(False)
    return nn.Sequential(*layers)


def listened_to() -> nn.Module:
    module = Head()
    module.body[0].register_forward_hook(lambda *_: None)
    return module


def records() -> tuple[Tensor, Tensor]:
    x = torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    return x, (x[:, 0] > 0).long()


def mean(make: Any, method: Any = None, look: Any = prefix.prefix_of) -> tuple[Tensor, prefix.Prefix | None]:
    """The posterior mean, and what was kept by the last of the rehearsals."""
    torch.manual_seed(0)
    seen: list[prefix.Prefix | None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "prefix_of", lambda query, x: seen.append(look(query, x)) or seen[-1])
        data = PrivateData(*records(), schema=Schema(classes=2, records=RECORDS, bounds=(-2, 2)), seed=3)
        plan = confide.plan(records=RECORDS, steps=6, batch=20, clip=1.0, epsilon=20.0, delta=1e-3)
        run = confide.fit(method or SGLD(), make(), data, plan, seed=1)
    return run.posterior.mean(), seen[-1]


@pytest.fixture(autouse=True)
def anything_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "WORTH", 1.0)


@pytest.mark.parametrize("method", [SGLD(), BBP(predictive_draws=2)])
@pytest.mark.parametrize("make", [Head, Skipping, OfNames, chain])
def test_answers_are_those_of_the_whole_network(make: Any, method: Any) -> None:
    kept, found = mean(make, method)
    assert found is not None
    assert list(found.places) == (["2"] if make is chain else ["body"])
    whole, _ = mean(make, method, lambda query, x: None)
    assert torch.allclose(kept, whole, atol=1e-4)


@pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning")
@pytest.mark.parametrize(
    "make", [Prompted, Deciding, Twice, Branching, Random, listened_to, lambda: Head(0.1), lambda: nn.Linear(4, 2)]
)
def test_what_cannot_be_shown_runs_whole(make: Any) -> None:
    assert mean(make)[1] is None


def test_a_part_that_knows_trained_weights_would_answer_otherwise() -> None:
    """What the look for such parts is there for: taken apart all the same, the network gives other numbers."""
    torch.manual_seed(0)
    module, (x, _) = Prompted(), records()
    shape = prefix.Shape.of(module.body(x), RECORDS, torch.float32)
    assert shape is not None
    apart = prefix.Prefix(module.eval(), {"body": shape}, x)
    kept = apart.rows(x)
    assert torch.equal(apart.suffix(kept, x), module(x))
    module.prompt.data += 1.0
    assert not torch.allclose(apart.suffix(kept, x), module(x), atol=1e-2)


def test_what_changes_is_not_kept_any_longer() -> None:
    from confide.sources.queries import GradientQuery

    torch.manual_seed(0)
    module, (x, _) = Head(), records()
    shape = prefix.Shape.of(module.body(x), RECORDS, torch.float32)
    assert shape is not None
    query = GradientQuery(module, nn.functional.cross_entropy)
    apart = prefix.Prefix(module, {"body": shape}, x)
    assert apart.holds(query)
    module.eval()
    assert not apart.holds(query)
    module.train()
    assert apart.holds(query)
    with torch.no_grad():
        next(module.body.parameters()).mul_(2)
    assert not apart.holds(query)


def test_little_is_not_worth_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "WORTH", 2e10)
    assert mean(Head)[1] is None
