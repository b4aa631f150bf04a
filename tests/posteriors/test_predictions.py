"""Predictions of many draws at once: equal to the plain loop, in memory that does not grow with the draws."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confide.layers.conversion import with_shared_dropout
from confide.layers.dropout import SharedDropout
from confide.models.flat import flatten_
from confide.models.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from confide.models.networks import mlp
from confide.models.predictive import ClassPredictive
from confide.posteriors.draws import Draws, outputs_of_draws
from confide.posteriors.files import load_posterior
from confide.posteriors.mapped import DrawWriter, MappedDraws, open_draws
from confide.posteriors.prediction import native, stacked
from confide.posteriors.prediction.stacked import chain_of
from confide.posteriors.prediction.summary import Summary, summary_of_predictive
from confide.posteriors.variational import DiagonalGaussian, DropoutNetwork


@pytest.fixture(params=["native where it is built", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(native, "_kernel", lambda: None)
    return str(request.param)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def by_loop(module: nn.Module, draws: Tensor, x: Tensor) -> Tensor:
    network = copy.deepcopy(module).eval()
    position = flatten_(network)
    outputs = []
    for draw in draws:
        position.copy_(draw)
        with torch.no_grad():
            outputs.append(network(x))
    return torch.stack(outputs)


def size_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


class Doubled(nn.Sequential):
    """A subclass that does more than its layers: it must not be taken for a chain."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def frozen() -> nn.Sequential:
    network = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    network[0].weight.requires_grad_(False)
    return network


def tied() -> nn.Sequential:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer)


NETWORKS: dict[str, tuple[nn.Module, tuple[int, ...], bool]] = {
    "linear": (mlp(6, 3, ()), (6,), True),
    "one hidden layer": (mlp(6, 3, (5,)), (6,), True),
    "three, tanh": (mlp(6, 2, (5, 4, 7), "tanh"), (6,), True),
    "gelu": (mlp(6, 1, (5,), "gelu"), (6,), True),
    "images, flattened": (mlp(12, 3, (5,)), (3, 4), True),
    "flatten first": (nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), (3, 4), True),
    "no bias": (nn.Sequential(nn.Linear(6, 5, bias=False), nn.SiLU(), nn.Linear(5, 3, bias=False)), (6,), True),
    "nested, dropout": (nn.Sequential(nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5)), nn.Linear(5, 3)), (6,), True),
    "tied": (tied(), (6,), True),
    "double precision": (mlp(6, 3, (5,)).double(), (6,), True),
    "frozen": (frozen(), (6,), False),
    "subclass": (Doubled(nn.Linear(6, 3)), (6,), False),
    "linear on the last axis": (nn.Sequential(nn.Linear(4, 3)), (3, 4), True),
    "convolution": (nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(12, 3)), (1, 3, 4), False),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_equal_to_the_plain_loop(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that draws and inputs are both split, and neither evenly: an offset by one would show."""
    monkeypatch.setattr(stacked, "INPUTS_AT_ONCE", 4)
    monkeypatch.setattr(stacked, "ACTIVATIONS_AT_ONCE", 60)
    module, shape, is_chain = NETWORKS[name]
    assert (chain_of(module) is not None) is is_chain
    draws = randn(7, size_of(module)).to(next(module.parameters()).dtype)
    x = randn(11, *shape)
    expected = by_loop(module, draws, x.to(draws.dtype))
    torch.testing.assert_close(outputs_of_draws(module, draws, x), expected, rtol=1e-5, atol=1e-5)


def test_a_hook_is_not_passed_over() -> None:
    module = nn.Sequential(nn.Linear(6, 3))
    module[0].register_forward_hook(lambda _, __, output: output + 1)
    draws, x = randn(2, size_of(module)), randn(3, 6)
    torch.testing.assert_close(outputs_of_draws(module, draws, x), by_loop(module, draws, x))


LIKELIHOODS: dict[str, tuple[Any, int]] = {
    "categorical": (Categorical(3), 3),
    "bernoulli": (Bernoulli(), 1),
    "gaussian": (Gaussian(0.3), 1),
    "heteroscedastic": (HeteroscedasticGaussian(), 2),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_summary_is_that_of_the_whole_distribution(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws of unequal weight in uneven blocks: forgotten weights or a wrong entropy identity would show."""
    monkeypatch.setattr(stacked, "INPUTS_AT_ONCE", 4)
    monkeypatch.setattr(stacked, "ACTIVATIONS_AT_ONCE", 60)
    likelihood, outputs = LIKELIHOODS[name]
    module = mlp(6, outputs, (5,))
    weights = torch.arange(1.0, 8.0) / 28
    posterior = Draws(module, likelihood, randn(7, size_of(module)), weights)
    x = randn(11, 6)
    expect_same(posterior.summary(x), posterior.predict(x))


def expect_same(found: Summary, whole: Any) -> None:
    centre = whole.probabilities if isinstance(whole, ClassPredictive) else whole.mean
    for one, other in ((found.centre, centre), (found.aleatoric, whole.aleatoric), (found.epistemic, whole.epistemic)):
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-4, atol=1e-5)


def test_small_spread_beside_a_large_mean_keeps_its_digits(path: str) -> None:
    """The difference of two large sums of squares would have none left in float32."""
    module = mlp(1, 1, ())
    draws = torch.tensor([[0.0, 1000.0], [0.0, 1000.5], [0.0, 1001.0]])
    posterior = Draws(module, Gaussian(1.0), draws, torch.full((3,), 1 / 3))
    found = posterior.summary(torch.zeros(2, 1))
    torch.testing.assert_close(found.epistemic, torch.full((2,), 1 / 6, dtype=torch.float64), rtol=1e-5, atol=0)
    assert found.rescaled(2.0, 1.0).centre.tolist() == pytest.approx([2002.0] * 2)


def test_variational_posteriors_predict_by_the_draws_they_show(path: str) -> None:
    module = mlp(6, 3, (5,))
    size = size_of(module)
    gaussian = DiagonalGaussian(module, Categorical(3), randn(size), torch.full((size,), 0.2), passes=9)
    network, _ = with_shared_dropout(copy.deepcopy(module), 0.3)
    dropout = DropoutNetwork(network, Categorical(3), randn(size), passes=9, rate=0.3)
    x = randn(11, 6)
    for posterior in (gaussian, dropout):
        draws = torch.cat(list(posterior.groups(4)))
        assert torch.equal(draws, torch.cat(list(posterior.groups(9))))
        expected = by_loop(module, draws, x).softmax(-1)
        whole = posterior.predict(x)
        torch.testing.assert_close(whole.draws, expected, rtol=1e-5, atol=1e-5)
        expect_same(posterior.summary(x), whole)
        shape = posterior.to_arviz()["posterior"]["0.weight"].shape if posterior is gaussian else (1, 9, 5, 6)
        assert shape == (1, 9, 5, 6)


def test_masks_that_are_no_weights_are_drawn_all_the_same() -> None:
    """Dropout before an activation cannot be written into the weights of a linear layer."""
    network = nn.Sequential(nn.Linear(6, 5), SharedDropout(0.5), nn.Tanh(), nn.Linear(5, 3))
    posterior = DropoutNetwork(network, Categorical(3), randn(size_of(network)), passes=20)
    x = randn(4, 6)
    whole = posterior.predict(x)
    assert float(whole.draws.std(0).max()) > 0.01
    expect_same(posterior.summary(x), whole)


def test_posterior_without_a_quick_way_is_summarised() -> None:
    whole = ClassPredictive(randn(3, 4, 2).softmax(-1), torch.full((3,), 1 / 3))
    expect_same(summary_of_predictive(whole), whole)


# -- draws on disk -------------------------------------------------------------------------------------------


def write(path: Path, draws: Tensor, module: nn.Module, **options: Any) -> None:
    with DrawWriter(path, module, Categorical(3), len(draws), **options) as writer:
        for place, draw in enumerate(draws):
            writer.add(draw, weight=1.0 + place)


def test_draws_on_disk_predict_as_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = mlp(6, 3, (5,))
    draws, x = randn(7, size_of(module)), randn(11, 6)
    weights = torch.arange(1.0, 8.0) / 28
    write(tmp_path / "d.safetensors", draws, module, facts={"temperature": 1.0})
    mapped, whole = open_draws(tmp_path / "d.safetensors"), load_posterior(tmp_path / "d.safetensors")
    assert type(mapped) is MappedDraws
    assert type(whole) is Draws
    assert mapped.facts == {"temperature": 1.0}
    expected = Draws(module, Categorical(3), draws, weights)
    for found in (mapped, whole):
        torch.testing.assert_close(found.predict(x).draws, expected.predict(x).draws)
        torch.testing.assert_close(found.mean(), expected.mean())
        torch.testing.assert_close(found.covariance(), expected.covariance())
        torch.testing.assert_close(found.weights, weights)
        assert found.sample(5).shape == (5, size_of(module))
    monkeypatch.setattr("confide.posteriors.files.MAPPED_ABOVE", 10)
    assert type(load_posterior(tmp_path / "d.safetensors")) is MappedDraws


def test_half_the_bytes_and_nearly_the_same_predictions(tmp_path: Path) -> None:
    module = mlp(60, 3, (50,))
    draws, x = 0.2 * randn(9, size_of(module)), randn(50, 60)
    write(tmp_path / "full", draws, module)
    write(tmp_path / "half", draws, module, dtype=torch.bfloat16)
    Draws(module, Categorical(3), draws, torch.full((9,), 1 / 9)).save(tmp_path / "saved", dtype=torch.bfloat16)
    sizes = {name: (tmp_path / name).stat().st_size for name in ("full", "half", "saved")}
    assert sizes["half"] < 0.55 * sizes["full"]
    assert sizes["saved"] < 0.55 * sizes["full"]
    full, half = (open_draws(tmp_path / name) for name in ("full", "half"))
    assert half.summary(x).centre.dtype == torch.float64
    torch.testing.assert_close(half.summary(x).centre, full.summary(x).centre, rtol=0, atol=5e-3)
    assert load_posterior(tmp_path / "saved").predict(x).draws.dtype == torch.float32


def test_unfinished_and_wrong_draws_leave_no_file(tmp_path: Path) -> None:
    module = mlp(6, 3, (5,))
    with pytest.raises(ValueError, match="count=2: 1 draws were written"), _writer(tmp_path, module) as writer:
        writer.add(randn(size_of(module)))
    with pytest.raises(ValueError, match="must hold the network's"), _writer(tmp_path, module) as writer:
        writer.add(randn(3))
    with pytest.raises(ValueError, match=r"weight=-1\.0"), _writer(tmp_path, module) as writer:
        writer.add(randn(size_of(module)), -1.0)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="count=0"):
        DrawWriter(tmp_path / "d", module, Categorical(3), 0)
    with pytest.raises(ValueError, match=r"dtype=torch\.int8"):
        DrawWriter(tmp_path / "d", module, Categorical(3), 2, dtype=torch.int8)


def _writer(folder: Path, module: nn.Module) -> DrawWriter:
    return DrawWriter(folder / "d", module, Categorical(3), 2)


@pytest.mark.parametrize("damage", [b"", b"12345678", b'\x10\0\0\0\0\0\0\0{"draws": 12345}', b"\xff" * 64])
def test_damaged_files_are_refused(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "d").write_bytes(damage)
    with pytest.raises(ValueError, match="not a readable file of draws"):
        open_draws(tmp_path / "d")


def test_cut_file_is_refused(tmp_path: Path) -> None:
    module = mlp(6, 3, (5,))
    write(tmp_path / "d", randn(7, size_of(module)), module)
    whole = (tmp_path / "d").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-40])
    with pytest.raises(ValueError, match="do not fit"):
        open_draws(tmp_path / "cut")


MEASURE = """
import resource, sys, torch
from confide.posteriors.mapped import open_draws
posterior = open_draws(sys.argv[1])
x = torch.zeros(64, 256)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert bool(torch.isfinite(posterior.summary(x).centre).all())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back by a call of Linux")
def test_memory_does_not_grow_with_the_draws(tmp_path: Path) -> None:
    """200 MB of draws: kept pages, or all draws in float32, would show as 200 or 400 MB."""
    module = mlp(256, 10, (1000,))
    draw = 0.01 * randn(size_of(module))
    path = tmp_path / "draws"
    with DrawWriter(path, module, Categorical(10), 380, dtype=torch.bfloat16) as writer:
        for _ in range(380):
            writer.add(draw)
    assert path.stat().st_size > 200e6
    grown = subprocess.run([sys.executable, "-c", MEASURE, str(path)], check=True, capture_output=True, text=True)
    assert float(grown.stdout) * 1024 < 170e6, "kilobytes: " + grown.stdout


@pytest.mark.parametrize("network", [nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)), mlp(3, 2)])
def test_arrays_are_tensors(network: nn.Module) -> None:
    """Networks that no kernel knows raised a bare IndexError for numpy's arrays."""
    size, x = size_of(network), randn(6, 3).double()
    draws = Draws(network, Categorical(2), randn(5, size), torch.full((5,), 0.2))
    gaussian = DiagonalGaussian(network, Categorical(2), randn(size), torch.ones(size), 5)
    for posterior in (draws, gaussian):
        assert torch.equal(posterior.summary(x.numpy()).centre, posterior.summary(x).centre)
        assert torch.equal(posterior.predict(x.numpy()).probabilities, posterior.predict(x).probabilities)
