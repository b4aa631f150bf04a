"""Any layer with drawn parameters: it is of its old type, reads what was drawn, and becomes again what it was."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.layers.bayesian import draw_, use_mean_
from confide.layers.conversion import distributions, mean_field, plain
from confide.layers.drawn import DrawnParameters
from confide.mechanism.clipping import clipped_sum
from confide.mechanism.clipping.engine import engine_of
from confide.mechanism.clipping.rules.drawn import DrawnGradients
from tests.mechanism.clipping.zoo import ZOO

LAYERS: dict[str, Any] = {
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, batch_first=True),
    "gru": lambda: nn.GRU(3, 4, bidirectional=True, batch_first=True),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 5, 0.0, batch_first=True),
    "conv1d": lambda: nn.Conv1d(3, 4, 2),
    "conv3d": lambda: nn.Conv3d(1, 2, 2),
    "transposed": lambda: nn.ConvTranspose2d(2, 3, 2),
    "list": lambda: nn.ParameterList([torch.ones(2, 2), torch.zeros(3)]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_there_and_back(name: str) -> None:
    given = LAYERS[name]()
    before = {key: value.clone() for key, value in given.state_dict().items()}
    converted = mean_field(nn.Sequential(copy.deepcopy(given)), 0.1)
    assert isinstance(converted[0], type(given))  # type: ignore[index]
    found, mean, deviation = plain(converted)
    layer = found[0]  # type: ignore[index]
    assert [type(one) for one in layer.modules()] == [type(one) for one in given.modules()]
    assert list(layer.state_dict()) == list(before), "in the old order: a vector of weights is read by it"
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())
    assert torch.equal(mean, torch.cat([value.flatten() for value in given.parameters()]))
    learnt = sum(value.numel() for key, value in given.named_parameters() if "norm" not in key)
    assert int((deviation > 0).sum()) == learnt


@pytest.mark.parametrize("name", ["lstm", "gru", "attention"])
def test_what_is_drawn_is_what_its_own_forward_reads(name: str) -> None:
    """The forward of torch with the drawn values put into an ordinary layer."""
    given = LAYERS[name]()
    converted: Any = mean_field(nn.Sequential(copy.deepcopy(given)), 0.5)[0]  # type: ignore[index]
    x = torch.randn(2, 5, 4 if name == "attention" else 3)

    def output(layer: nn.Module) -> Tensor:
        found: Any = layer(x)
        return found[0] if isinstance(found, tuple) else found

    use_mean_(converted)
    assert torch.allclose(output(converted), output(given))
    draw_(converted, torch.Generator().manual_seed(1))
    with torch.no_grad():
        for key, value in given.named_parameters():
            value.copy_(operator_value(converted, key))
    assert torch.allclose(output(converted), output(given), atol=1e-6)
    assert not torch.allclose(output(converted), output(LAYERS[name]()), atol=1e-3)


def operator_value(module: Any, path: str) -> Tensor:
    for part in path.split("."):
        module = getattr(module, part)
    found: Tensor = module
    return found


def test_draws_have_the_law_that_means_and_rhos_say() -> None:
    layer: Any = mean_field(nn.Sequential(nn.Conv1d(40, 50, 5)), 0.3)[0]  # type: ignore[index]
    draw_(layer, torch.Generator().manual_seed(0))
    noise = ((layer.weight - layer.weight_mean) / F.softplus(layer.weight_rho)).detach()
    assert abs(float(noise.mean())) < 0.05
    assert abs(float(noise.std()) - 1) < 0.05
    assert torch.equal(layer.weight, layer.weight), "the same until the next draw"


def test_copies_and_pickles_draw_on() -> None:
    layer: Any = mean_field(nn.Sequential(nn.LSTM(3, 4)), 0.3)
    draw_(layer, torch.Generator().manual_seed(0))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other[0]) is type(layer[0])
        assert torch.equal(other[0].weight_hh_l0, layer[0].weight_hh_l0)
        draw_(other, torch.Generator().manual_seed(1))
        assert not torch.equal(other[0].weight_hh_l0, layer[0].weight_hh_l0)


def test_normalisations_by_choice_and_names_that_are_taken() -> None:
    class Taken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.draws = nn.Parameter(torch.ones(2, 2)), 3

    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), Taken())
    names = {one.mean for one in distributions(mean_field(copy.deepcopy(module), 0.1))}
    assert names == {"0.weight_mean", "0.bias_mean"}
    more = {one.mean for one in distributions(mean_field(module, 0.1, normalisations=True))}
    assert more == names | {"1.weight_mean", "1.bias_mean"}


def test_parameters_that_are_frozen_beside_others_stay_as_they_are() -> None:
    layer = nn.Linear(3, 4)
    layer.bias.requires_grad_(False)
    converted: Any = mean_field(nn.Sequential(layer), 0.1)
    assert isinstance(converted[0], DrawnParameters)
    assert converted[0].bias is layer.bias
    assert list(dict(plain(converted)[0].named_parameters())) == ["0.weight", "0.bias"]


def copied(name: str) -> int:
    """How many parameters every record has a copy of."""
    module, loss, x, y = ZOO[name].case()
    room = torch.zeros(sum(value.numel() for value in module.parameters()), dtype=torch.float64)
    clipped_sum(module, loss, x, y, clip=1.0, out=room)
    anatomy = engine_of(module).anatomy
    assert anatomy is not None
    return len(anatomy.copied)


def test_layers_go_by_their_rules_and_a_wrong_slope_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the examination: what a wrong rule would answer for is given to every record as a copy."""
    assert copied("lstm_drawn_1_draws") == 0
    assert copied("transformer_drawn_1_draws") == 0
    assert copied("convolution_over_time_drawn_1_draws") == 0

    def dense(self: DrawnGradients, start: int, stop: int) -> dict[str, Tensor]:
        found = self.base.dense(start, stop)
        return {name: found[name.rsplit("_", 1)[0]] for name in self.wanted}

    monkeypatch.setattr(DrawnGradients, "dense", dense)
    assert copied("lstm_drawn_1_draws") >= 4
