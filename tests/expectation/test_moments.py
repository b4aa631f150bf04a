"""Moment propagation against sampling, autograd and the module's own order of weights."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from confide.expectation.moments import WeightLayout, jacobians, output_moments, relu_moments, slopes
from confide.models import networks
from confide.models.flat import flatten_

GENERATOR_SEED = 3


def law(layout: WeightLayout, scale: float = 0.5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(GENERATOR_SEED)
    mean = torch.randn(layout.size, generator=generator, dtype=torch.float64)
    return mean, scale * torch.rand(layout.size, generator=generator, dtype=torch.float64)


def points(count: int, features: int = 3) -> Tensor:
    return torch.randn(count, features, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def forward(layout: WeightLayout, weights: Tensor, x: Tensor) -> Tensor:
    """Outputs (draws, inputs, outputs) of a plain network."""
    hidden = x.expand(len(weights), *x.shape)
    matrices = layout.split(weights)
    for number, matrix in enumerate(matrices):
        hidden = hidden @ matrix[..., :-1].mT + matrix[..., None, :, -1]
        hidden = hidden.relu() if number + 1 < len(matrices) else hidden
    return hidden


def test_relu_moments_against_quadrature() -> None:
    mean = torch.tensor([-3.0, -0.4, 0.0, 0.7, 5.0], dtype=torch.float64)
    variance = torch.tensor([0.5, 2.0, 1.0, 0.1, 3.0], dtype=torch.float64)
    grid = torch.linspace(-14, 14, 200_001, dtype=torch.float64)
    density = torch.exp(-0.5 * grid**2) / (2 * torch.pi) ** 0.5
    values = (mean[:, None] + variance.sqrt()[:, None] * grid).relu()
    first = torch.trapezoid(values * density, grid)
    second = torch.trapezoid(values**2 * density, grid)
    found_mean, found_variance = relu_moments(mean, variance)
    assert torch.allclose(found_mean, first, atol=1e-8)
    assert torch.allclose(found_variance, second - first**2, atol=1e-7)


@pytest.mark.parametrize("widths", [(3, 2), (3, 400, 2), (3, 60, 60, 1)])
def test_output_moments_against_sampling(widths: tuple[int, ...]) -> None:
    """Exact for a linear model and one hidden layer; for more, up to the covariances between units that are dropped."""
    layout = WeightLayout(widths)
    mean, variance = law(layout, 0.02 if len(widths) > 3 else 0.5)
    mean = mean / layout.fan_in().sqrt()
    variance = variance / layout.fan_in()
    noise = torch.randn(8000, layout.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = points(4)
    outputs = torch.cat([forward(layout, mean + variance.sqrt() * part, x) for part in noise.split(500)])
    found_mean, found_variance = output_moments(layout, mean, variance, x)
    spread = outputs.std(0)
    assert torch.allclose(found_mean, outputs.mean(0), atol=5 * float(spread.max()) / 8000**0.5)
    assert torch.allclose(found_variance.sqrt(), spread, rtol=0.1 if len(widths) > 3 else 0.04)


def test_leaving_out_the_variance_of_hidden_units_is_caught() -> None:
    """V z^2 alone, without (M^2 + V) Var[z], would understate the variance by far more than the tolerance above."""
    layout = WeightLayout((3, 400, 2))
    mean, variance = law(layout)
    x = points(4)
    _, found = output_moments(layout, mean / 20, variance / 400, x)
    last = layout.split(torch.arange(layout.size))[-1].flatten()
    only_last = torch.zeros_like(variance)
    only_last[last] = variance[last] / 400
    _, broken = output_moments(layout, mean / 20, only_last, x)
    assert (broken.sqrt() < 0.9 * found.sqrt()).any()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("widths", [(3, 1), (3, 4, 2), (3, 4, 5, 1)])
def test_slopes_are_those_of_autograd(widths: tuple[int, ...], shared: bool) -> None:
    layout, x = WeightLayout(widths), points(5)
    mean, variance = law(layout)
    rows = (len(x), layout.size)
    if not shared:
        mean = mean + 0.1 * torch.randn(rows, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        variance = variance.expand(rows) + 0.1

    def log_normaliser(output: Tensor, spread: Tensor) -> Tensor:
        return (output.sin() - 0.3 * output**2 / (1 + spread)).sum(-1)

    found = slopes(layout, mean, variance, x, log_normaliser)
    for record in range(len(x)):
        one_mean = (mean if shared else mean[record]).clone().requires_grad_()
        one_variance = (variance if shared else variance[record]).clone().requires_grad_()
        value = log_normaliser(*output_moments(layout, one_mean, one_variance, x[record : record + 1])).sum()
        by_mean, by_variance = torch.autograd.grad(value, (one_mean, one_variance))
        assert torch.allclose(found.mean[record], by_mean, atol=1e-10)
        assert torch.allclose(found.variance[record], by_variance, atol=1e-10)


def test_jacobians_are_those_of_the_mean_output() -> None:
    layout, x = WeightLayout((3, 4, 2)), points(5)
    mean, variance = law(layout)
    output, found = jacobians(layout, mean, variance, x)
    exact = torch.autograd.functional.jacobian(lambda m: output_moments(layout, m, variance, x)[0], mean)
    assert torch.allclose(found, exact)
    assert torch.allclose(output, output_moments(layout, mean, variance, x)[0])


def test_order_of_the_module() -> None:
    module = networks.mlp(3, 2, hidden=(4, 5), generator=torch.Generator().manual_seed(0)).double()
    layout = WeightLayout.of(module.recipe)
    position = flatten_(module)
    working = torch.randn(layout.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    position.copy_(layout.to_module(working))
    x = points(6)
    assert torch.allclose(module(x), forward(layout, working[None], x)[0])
    assert torch.equal(layout.from_module(layout.to_module(working)), working)
    assert layout.size == sum((a + 1) * b for a, b in itertools.pairwise((3, 4, 5, 2)))


def test_other_activations_are_refused() -> None:
    recipe = networks.mlp(3, 1, hidden=(4,), activation="tanh").recipe
    with pytest.raises(ValueError, match=r"activation='tanh': moments are known for relu"):
        WeightLayout.of(recipe)
