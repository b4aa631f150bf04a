"""Features of a frozen network: computed once per record, by itself, and the answers of the whole network."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import confide
from confide.data.schema import Schema
from confide.errors import Refusal
from confide.methods import SGLD, LastLayer
from confide.models.networks import last_layer
from confide.sources import features as module_of_features
from confide.sources.private_data import PrivateData

RECORDS = 60


class Counting(nn.Module):
    """Cannot count in Python, where everything is put back: counts by how often it was run at all."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Mixing(Counting):
    """Takes something of the other records, where it sees any."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean(0).sum()


class Raising(Counting):
    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 3).any()):
            raise ValueError("too large")
        return super().forward(x)


def records() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, 4, generator=generator).clamp(-2, 2)
    return x, (x[:, 0] > 0).long()


def mean(backbone: nn.Module, x: Tensor, y: Tensor, method: Any = None, **options: Any) -> Tensor:
    data = PrivateData(x, y, schema=Schema(classes=2, records=RECORDS), seed=3)
    settings: dict[str, Any] = {"records": RECORDS, "steps": 4, "sampling": "full-batch", "clip": 1.0, **options}
    plan = confide.plan(epsilon=5.0, delta=1e-3, **settings)
    run = confide.fit(method or SGLD(), last_layer(backbone, 2, 6), data, plan, seed=1)
    return run.posterior.mean()


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing is kept: the whole network runs at every step."""
    monkeypatch.setattr(module_of_features.LastPart, "of", classmethod(lambda cls, query: None))
    return monkeypatch


@pytest.mark.parametrize("method", [SGLD(), LastLayer()])
@pytest.mark.parametrize("sampling", ["full-batch", "poisson"])
def test_answers_are_those_of_the_whole_network(method: Any, sampling: str, request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    backbone, options = Counting(), {"sampling": sampling} | ({"batch": 20} if sampling == "poisson" else {})
    kept = mean(backbone, *records(), method, **options)
    request.getfixturevalue("whole")
    # Norms near the clip are rounded up, and less so for a layer that is proven to treat records alone.
    assert torch.allclose(kept, mean(backbone, *records(), method, **options), atol=2e-3)


def test_every_record_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    from confide.mechanism.clipping import isolated_rows as isolated

    def counted(function: Any, x: Any, y: Tensor, size: int, rehearsal: bool = False) -> Tensor:
        if not rehearsal:
            seen.append(len(y))
        return isolated(function, x, y, size, rehearsal)

    monkeypatch.setattr(module_of_features, "isolated_rows", counted)
    mean(Counting(), *records(), steps=6, sampling="poisson", batch=30)
    assert RECORDS / 2 < sum(seen) <= RECORDS
    seen.clear()
    monkeypatch.setattr(module_of_features, "MOST_BYTES", RECORDS * 6 * 4 - 1)
    mean(Counting(), *records(), steps=2)
    assert not seen, "too much room: the whole network runs at every step"


def test_no_record_sees_another() -> None:
    """One record more changes a release of full batches by what that record answers; a mixing backbone is given
    records alone, so that the features of the others stay as they were."""
    torch.manual_seed(0)
    x, _ = records()
    network, stores = last_layer(Mixing(), 2, 6), []
    from confide.sources.queries import GradientQuery, Origin

    problem = SimpleNamespace(plan=SimpleNamespace(records=RECORDS))
    query = GradientQuery(network, nn.functional.cross_entropy, origin=Origin(None, problem, None))
    for count in (RECORDS, RECORDS // 2):
        part = module_of_features.LastPart.of(query)
        assert part is not None
        stores.append(module_of_features.FeatureStore().rows(part, x[:count], torch.arange(RECORDS // 2)))
    assert torch.equal(stores[0], stores[1])


def test_the_declared_number_of_records_says_whether_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as much room as the declared records need: one record more, and all would go through the whole network,
    whose numbers round in another way."""
    seen = []
    before = module_of_features.FeatureStore.rows

    def looked(self: Any, *given: Any) -> Any:
        seen.append(found := before(self, *given))
        return found

    monkeypatch.setattr(module_of_features.FeatureStore, "rows", looked)
    monkeypatch.setattr(module_of_features, "MOST_BYTES", RECORDS * 6 * 4)
    (x, y) = records()
    for more in (0, 1):
        mean(Counting(), torch.cat([x, x[:more]]), torch.cat([y, y[:more]]), steps=2)
    assert len(seen) == 4
    assert all(found is not None for found in seen)


def test_a_record_that_raises_counts_as_zero() -> None:
    torch.manual_seed(0)
    (x, y), backbone = records(), Raising()
    broken, silent = x.clone(), y.clone()
    broken[7, 0] = 5.0
    silent[7] = -1  # the same record, taken out by its label
    with pytest.warns(confide.errors.SpeedWarning):
        found = mean(backbone, broken, y, steps=2)
    with pytest.warns(confide.errors.SpeedWarning):
        without = mean(backbone, x, silent, steps=2)
    assert torch.allclose(found, without, atol=1e-6)
    with pytest.warns(confide.errors.SpeedWarning):
        assert not torch.allclose(found, mean(backbone, x, y, steps=2), atol=1e-3)


def test_a_network_that_may_change_between_answers_is_run_as_it_is() -> None:
    from confide.sources.queries import GradientQuery, Origin

    network = last_layer(Counting(), 2, 6)
    query = GradientQuery(network, nn.functional.cross_entropy)
    assert module_of_features.LastPart.of(query) is None, "outside of a run nobody promises that it stays"
    query = replace(query, origin=Origin(None, None, None))
    assert module_of_features.LastPart.of(query) is not None
    network.register_forward_hook(lambda *_: None)
    assert module_of_features.LastPart.of(query) is None


def test_a_wrong_number_of_features_is_told_before_a_charge() -> None:
    """The number is guessed from the last layer that has a width, which pooling and flattening can change."""
    backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten()).eval()
    facts, ledger = Schema(records=20, classes=2, bounds=(0, 1)), confide.Ledger()
    data = PrivateData(torch.rand(20, 1, 6, 6), torch.arange(20) % 2, schema=facts, ledger=ledger, name="d")
    plan = confide.plan(records=20, epsilon=8, delta=1e-3, steps=4, sampling="full-batch")
    with pytest.raises(Refusal, match=r"features=4: the backbone gives 16 .* features=16\)$"):
        confide.fit(LastLayer(), last_layer(backbone, 2), data, plan)
    assert ledger.spent(1e-3, dataset="d") == 0
