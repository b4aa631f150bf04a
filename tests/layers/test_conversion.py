"""Networks with distributions and masks, and back: nothing is lost on the way, and nothing is converted by accident."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from confide.errors import Refusal
from confide.layers.bayesian import draw_, use_mean_
from confide.layers.conversion import (
    distributions,
    inverse_softplus,
    local_noise,
    mean_field,
    plain,
    with_shared_dropout,
)
from confide.layers.dropout import SharedDropout
from confide.models import networks
from confide.models.flat import trainable


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 2, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 2)
    )


@pytest.mark.parametrize("convert", [mean_field, local_noise])
def test_there_and_back(convert: object) -> None:
    assert callable(convert)
    given = network()
    flat = torch.cat([parameter.detach().flatten() for parameter in trainable(given)])
    converted = convert(copy.deepcopy(given), 0.05)
    assert len(list(distributions(converted))) == (5 if convert is mean_field else 3), "biases have none in the second"
    back, mean, deviation = plain(converted)
    assert [type(layer) for layer in back] == [type(layer) for layer in given]  # type: ignore[attr-defined]
    assert torch.equal(mean, flat)
    assert sorted({round(float(value), 6) for value in deviation}) in ([0.05], [0.0, 0.05])
    x = torch.randn(4, 1, 3, 3)
    assert torch.equal(back(x), given(x))


def test_frozen_and_shared_parameters_stay_points() -> None:
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 2))
    tied[1].weight = tied[0].weight
    converted = mean_field(tied, 0.1)
    assert type(converted[0]) is nn.Linear, "two layers that share a weight would each draw their own"  # type: ignore[index]
    assert len(list(distributions(converted))) == 2
    frozen = networks.mlp(3, 2, hidden=(4,))
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(Refusal, match="no trainable layer"):
        mean_field(frozen, 0.1)


def test_masks_are_put_where_there_are_none_and_only_there() -> None:
    made, inserted = with_shared_dropout(networks.mlp(3, 2, hidden=(4, 5)), 0.3)
    assert inserted
    assert [layer.rate for layer in made.modules() if isinstance(layer, SharedDropout)] == [0.3, 0.3]
    own, inserted = with_shared_dropout(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 2)), 0.3)
    assert not inserted
    assert [layer.rate for layer in own.modules() if isinstance(layer, SharedDropout)] == [0.1]
    with pytest.raises(Refusal, match="has no dropout layer"):
        with_shared_dropout(nn.Sequential(nn.Linear(3, 2)), 0.3)


@pytest.mark.parametrize("value", [1e-6, 0.01, 1.0, 30.0])
def test_inverse_softplus(value: float) -> None:
    rho = torch.tensor(inverse_softplus(value), dtype=torch.float64)
    assert float(nn.functional.softplus(rho)) == pytest.approx(value, rel=1e-9)


def test_tables_and_transposed_layers_there_and_back() -> None:
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    given = nn.Sequential(nn.Embedding(7, 4, padding_idx=2), pytorch_utils.Conv1D(3, 4), nn.Linear(3, 2))
    flat = torch.cat([parameter.detach().flatten() for parameter in trainable(given)])
    converted = mean_field(copy.deepcopy(given), 0.05)
    assert isinstance(converted[0], nn.Embedding)  # type: ignore[index]
    assert converted[1].weight.shape == given[1].weight.shape  # type: ignore[index]
    back, mean, deviation = plain(converted)
    assert [type(layer) for layer in back] == [type(layer) for layer in given]  # type: ignore[attr-defined]
    assert torch.equal(mean, flat)
    assert (deviation == 0).sum() == 4, "the row of the padding is a point, and nothing else"
    ids = torch.tensor([[0, 2, 6]])
    assert torch.allclose(back(ids), given(ids))
    use_mean_(converted)
    assert torch.allclose(converted(ids), given(ids), atol=1e-6)
    with torch.no_grad():  # deviations stand where their weights do
        converted[1].weight_rho[0, 3] = 3.0  # type: ignore[index]
    _, _, moved = plain(converted)
    assert moved[7 * 4 :][: 4 * 3].reshape(4, 3)[3, 0] > 3


def test_a_converted_layer_keeps_what_it_stands_for() -> None:
    linear, convolution = mean_field(nn.Sequential(nn.Linear(3, 2), nn.Conv2d(2, 4, 3, padding=1)), 0.1).children()
    assert isinstance(linear, nn.Linear)
    assert isinstance(convolution, nn.Conv2d)
    assert linear.weight.shape == (2, 3)
    assert convolution.weight.shape == (4, 2, 3, 3)
    assert (convolution.in_channels, convolution.out_channels, convolution.padding) == (2, 4, (1, 1))
    draw_(linear, torch.Generator().manual_seed(0))
    x = torch.randn(5, 3)
    assert torch.allclose(torch.nn.functional.linear(x, linear.weight, linear.bias), linear(x), atol=1e-6)
    dropout, _ = with_shared_dropout(nn.Sequential(nn.Dropout(0.3)), 0.1)
    assert isinstance(dropout[0], nn.Dropout)  # type: ignore[index]
    assert dropout[0].p == 0.3  # type: ignore[index]
