"""The native kernel of predictions: equal to the network in double precision, and only where it is due."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confide.models.flat import flatten_
from confide.models.likelihoods import Bernoulli, Categorical, Gaussian
from confide.models.networks import mlp
from confide.models.predictive import ClassPredictive, RealPredictive
from confide.posteriors.draws import Draws, outputs_of_draws
from confide.posteriors.prediction import native, stacked
from confide.posteriors.prediction.stacked import chain_of
from confide.posteriors.prediction.summary import summary_of_draws

BUILT = native._kernel() is not None
PATHS = ["native", "torch"] if BUILT else ["torch"]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test below holds with the kernel and without it."""
    if request.param == "torch":
        monkeypatch.setattr(native, "_kernel", lambda: None)
    return str(request.param)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def chain(activation: type[nn.Module], *widths: int, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width_in, width_out in itertools.pairwise(widths):
        layers += [nn.Linear(width_in, width_out, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


def likelihood_for(outputs: int) -> Any:
    return Gaussian(0.3) if outputs == 1 else Categorical(outputs)


def posterior_of(module: nn.Module, likelihood: Any, count: int = 5, scale: float = 0.4) -> Draws:
    size = sum(parameter.numel() for parameter in module.parameters())
    weights = torch.arange(1.0, count + 1)
    return Draws(module, likelihood, scale * randn(count, size), weights / weights.sum())


def exact(posterior: Draws, x: Tensor) -> Tensor:
    """The outputs of all draws in double precision, by the plain loop."""
    network = copy.deepcopy(posterior.module).double()
    position = flatten_(network)
    outputs = []
    for draw in posterior.draws:
        position.copy_(draw)
        outputs.append(network(x.double()).detach())
    return torch.stack(outputs)


def expect_exact(posterior: Draws, x: Tensor) -> None:
    """Outputs, what predict says and what summary says, against the same in double precision."""
    outputs = exact(posterior, x)
    close = {"rtol": 2e-5, "atol": 2e-5 * max(1.0, float(outputs.abs().max()))}
    found = outputs_of_draws(posterior.module, posterior.draws, x)
    torch.testing.assert_close(found.double(), outputs, **close)
    expected = posterior.likelihood.predictive(outputs, posterior.weights.double())
    predicted, summary = posterior.predict(x), posterior.summary(x)
    if isinstance(expected, ClassPredictive):
        assert isinstance(predicted, ClassPredictive)
        torch.testing.assert_close(predicted.draws.double(), expected.draws, **close)
        centres = predicted.probabilities, summary.centre, expected.probabilities
    else:
        assert isinstance(predicted, RealPredictive)
        torch.testing.assert_close(predicted.means.double(), expected.means, **close)
        centres = predicted.mean, summary.centre, expected.mean
    for part in (
        centres,
        (predicted.aleatoric, summary.aleatoric, expected.aleatoric),
        (predicted.epistemic, summary.epistemic, expected.epistemic),
    ):
        for one in part[:2]:
            torch.testing.assert_close(one.double(), part[2], **close)


WIDTHS = [(1, 1), (3, 2), (8, 50, 1), (17, 7, 3), (20, 50, 2), (33, 13, 5, 10), (130, 9, 4), (300, 64, 11)]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_widths(widths: tuple[int, ...], path: str) -> None:
    """No multiples of a vector, one layer or three, products deeper than a block: a row left out would show."""
    expect_exact(posterior_of(chain(nn.ReLU, *widths), likelihood_for(widths[-1]), scale=0.2), randn(37, widths[0]))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.Identity, nn.GELU])
@pytest.mark.parametrize("bias", [True, False])
def test_activations(activation: type[nn.Module], bias: bool, path: str) -> None:
    module = chain(activation, 6, 10, 7, 3, bias=bias)
    expect_exact(posterior_of(module, Categorical(3)), 3 * randn(40, 6))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.SiLU])
def test_activation_behind_the_last_layer(activation: type[nn.Module], path: str) -> None:
    expect_exact(posterior_of(nn.Sequential(nn.Linear(6, 3), activation()), Categorical(3)), randn(9, 6))


@pytest.mark.parametrize("records", [1, 2, 31, 32, 33, 64, 1025, 2500])
@pytest.mark.parametrize("threads", [1, 2])
def test_numbers_of_records(records: int, threads: int, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels, tiles and pieces that end in the middle: the last records of each would be missing or doubled."""
    monkeypatch.setattr(native, "_WORTH_THREADS", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expect_exact(posterior_of(mlp(6, 3, (5,)), Categorical(3)), randn(records, 6))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("outputs", [1, 3])
def test_groups_of_draws(outputs: int, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two draws at a time, the last alone: weights or origins taken from the wrong draw would show."""
    posterior = posterior_of(mlp(6, outputs, (5,)), likelihood_for(outputs))
    monkeypatch.setattr(stacked, "WEIGHTS_AT_ONCE", 4 * 2 * posterior.draws.shape[1])
    expect_exact(posterior, randn(40, 6))


def test_few_weights_are_held_at_once(path: str) -> None:
    """Draws from a file or a generator are asked for in groups; all at once they might not fit into memory."""
    posterior, asked = posterior_of(mlp(300, 3, (200,)), Categorical(3), count=400), []

    def groups(size: int) -> Iterator[Tensor]:
        asked.append(size)
        return posterior.groups(size)

    found = summary_of_draws(posterior.module, groups, randn(3, 300), posterior.likelihood, posterior.weights)
    assert asked[0] * posterior.draws.shape[1] <= stacked.WEIGHTS_AT_ONCE
    assert asked[0] < 400, "the draws come in several groups"
    expected = posterior.likelihood.predictive(exact(posterior, randn(3, 300)), posterior.weights.double())
    torch.testing.assert_close(found.centre, expected.probabilities, rtol=1e-4, atol=1e-4)


def test_one_logit_is_two_classes(path: str) -> None:
    expect_exact(posterior_of(mlp(6, 1, (5,)), Bernoulli()), randn(40, 6))


@pytest.mark.parametrize("outputs", [1, 2, 10])
def test_extreme_logits(outputs: int, path: str) -> None:
    """Logits of tens of thousands: exp overflows, and 0 times infinity is no number."""
    likelihood = Bernoulli() if outputs == 1 else Categorical(outputs)
    posterior = posterior_of(mlp(6, outputs, (5,)), likelihood, scale=100.0)
    x = randn(40, 6)
    assert exact(posterior, x).abs().max() > 1e4
    predicted, summary = posterior.predict(x), posterior.summary(x)
    expected = likelihood.predictive(exact(posterior, x), posterior.weights.double())
    assert float(predicted.draws.min()) < 1e-37
    torch.testing.assert_close(predicted.draws.double(), expected.draws, rtol=2e-2, atol=1e-6)
    torch.testing.assert_close(summary.centre, expected.probabilities, rtol=0, atol=1e-2)
    torch.testing.assert_close(summary.aleatoric, expected.aleatoric, rtol=0, atol=1e-2)
    assert bool((summary.aleatoric >= 0).all())


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_with_its_record(activation: str, outputs: int, bad: float, path: str) -> None:
    """A maximum that prefers numbers would turn a missing value into a confident prediction."""
    posterior = posterior_of(mlp(6, outputs, (5,), activation), likelihood_for(outputs))
    x = randn(40, 6)
    clean = posterior.summary(x)
    x[7, 2] = bad
    found = posterior.summary(x)
    others = torch.arange(40) != 7
    for name in ("centre", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(found, name)[others], getattr(clean, name)[others])
    if bad != bad:
        assert bool(found.centre[7].isnan().all())
        assert bool(posterior.predict(x).epistemic[7].isnan())
    else:
        expected = posterior.likelihood.predictive(exact(posterior, x), posterior.weights.double())
        centre = expected.probabilities if outputs > 1 else expected.mean
        assert bool((found.centre[7].isfinite() == centre[7].isfinite()).all())


def test_small_values_keep_their_digits(path: str) -> None:
    """tanh(x) from exp(2 x) - 1 would lose all digits of small x."""
    posterior = posterior_of(chain(nn.Tanh, 6, 10, 3, bias=False), Categorical(3))
    x = 1e-6 * randn(40, 6)
    expected = exact(posterior, x)
    found = outputs_of_draws(posterior.module, posterior.draws, x).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


def test_predict_knows_the_averages_of_its_draws(path: str) -> None:
    x = randn(40, 6)
    for likelihood, outputs in ((Categorical(3), 3), (Bernoulli(), 1), (Gaussian(0.3), 1)):
        found = posterior_of(mlp(6, outputs, (5,)), likelihood).predict(x)
        plain: Any = type(found)(**{name: getattr(found, name) for name in found.__dataclass_fields__})
        names = ["mean" if isinstance(found, RealPredictive) else "probabilities", "epistemic", "aleatoric", "total"]
        for name in names:
            taken, given = getattr(plain, name), getattr(found, name)
            assert given.dtype == taken.dtype
            torch.testing.assert_close(given, taken, rtol=1e-5, atol=1e-6)


def test_inputs_and_draws_of_any_layout(path: str) -> None:
    """Columns first, every other draw, integers: the kernel reads plain rows of float32."""
    posterior = posterior_of(mlp(6, 3, (5,)), Categorical(3), count=6)
    x = randn(6, 40).t()
    torch.testing.assert_close(posterior.predict(x).draws, posterior.predict(x.contiguous()).draws)
    halved = outputs_of_draws(posterior.module, posterior.draws[::2], x)
    torch.testing.assert_close(halved, outputs_of_draws(posterior.module, posterior.draws, x)[::2])
    whole = torch.arange(240).reshape(40, 6) % 7
    torch.testing.assert_close(posterior.summary(whole).centre, posterior.summary(whole.float()).centre)


COVERED = {
    "relu": (mlp(6, 3, (5,)), True),
    "identity": (nn.Sequential(nn.Linear(6, 5), nn.Identity(), nn.Linear(5, 3)), True),
    "double precision": (mlp(6, 3, (5,)).double(), False),
    "gelu": (mlp(6, 3, (5,), "gelu"), False),
    "two activations": (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Tanh(), nn.Linear(5, 3)), False),
    "large": (mlp(6, 3, (600, 600)), False),
}


@pytest.mark.parametrize("name", COVERED)
def test_only_what_the_kernel_covers_goes_to_it(name: str) -> None:
    module, covered = COVERED[name]
    layers = chain_of(module)
    assert layers is not None
    x = randn(4, 6).to(next(module.parameters()).dtype)
    assert (native.network_of(layers, x) is not None) is (covered and BUILT)
    assert native.network_of(layers, x[:, :5]) is None, "one feature too few: torch says so"
    assert native.network_of(layers, x[:0]) is None


def test_no_inputs_and_wrong_ones_are_refused(path: str) -> None:
    """The kernel would read past the end of what it is given."""
    posterior = posterior_of(mlp(6, 3, (5,)), Categorical(3))
    with pytest.raises(ValueError, match="must hold at least one input"):
        posterior.summary(torch.zeros(0, 6))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        posterior.summary(torch.zeros(4, 5))
    for draws, weights in ((posterior.draws[:, :-1], posterior.weights), (posterior.draws, posterior.weights[:-1])):
        with pytest.raises((ValueError, RuntimeError)):
            Draws(posterior.module, posterior.likelihood, draws, weights).summary(torch.zeros(4, 6))
