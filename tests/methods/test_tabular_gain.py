"""How much of a network is believed: nothing of noise, all of what columns say together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from confide.data.schema import Column, Schema
from confide.data.table import Table
from confide.methods import tabular as method
from confide.methods._tabular_gain import MadeUpDescent, believed_share
from confide.models.networks import mlp
from confide.workflow.request import Request
from confide.workflow.run import Outcome, run_request

TEST = 4000


def numbers(records: int, together: float) -> tuple[Table, np.ndarray, np.ndarray]:
    """Three columns, and a number that is noise but for a product of two of them."""
    random = np.random.default_rng(5)
    x = random.uniform(-1, 1, (records + TEST, 3))
    y = np.clip(together * x[:, 0] * x[:, 1] + random.normal(size=len(x)), -6, 6)
    columns = {name: x[:records, place] for place, name in enumerate("abc")}
    return Table(columns, target="y", labels=y[:records]), x[records:], y[records:]


def fitted(records: int, together: float) -> tuple[Outcome, float]:
    """A fit, and its error on other records over their deviation."""
    table, x, y = numbers(records, together)
    columns = tuple(Column(name, bounds=(-1, 1)) for name in "abc")
    schema = Schema(records=records, columns=columns, target="y", target_bounds=(-6, 6))
    found = run_request(Request(table, facts=schema, epsilon=8.0, seed=1, method="tabular"))
    centre = found.run.posterior.summary(torch.tensor(x, dtype=torch.float32)).centre.numpy().reshape(-1) * 6
    return found, float(np.sqrt(np.mean((centre - y) ** 2)) / y.std())


@pytest.mark.slow
def test_a_network_that_has_learnt_noise_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found, error = fitted(1000, 0.0)
    assert found.run.posterior.facts["network_believed"] < 0.7
    assert error < 1.01
    monkeypatch.setattr(method, "believed_share", lambda *_: 1.0)
    assert fitted(1000, 0.0)[1] > error + 0.005


@pytest.mark.slow
def test_a_network_that_has_learnt_something_is_believed() -> None:
    found, error = fitted(3000, 4.0)
    assert found.run.posterior.facts["network_believed"] == 1
    assert error < 0.8


def descent(**changes: float) -> MadeUpDescent:
    start = [p.detach() for p in mlp(4, 1, (16,), generator=torch.Generator().manual_seed(0)).parameters()]
    settings = {"unit": 1.0, "gain": 0.2, "deviation": 0.3, "sampling": 0.1, "rate": 0.02, "clip": 2.0, "noise": 2.0}
    return MadeUpDescent(
        start=(start[0], start[1], start[2], start[3]),
        centres=torch.tensor([0.0, 0.1, 0.5, 0.2]),
        numbers=2,
        used=torch.tensor([1.0, 1.0, 1.0, 0.0]),
        records=400,
        steps=40,
        averaged=12,
        **(settings | changes),
    )


def test_noise_takes_a_network_further_the_more_of_it_there_is() -> None:
    quiet, loud = (sum(descent(noise=noise).on_noise(seed) for seed in range(3)) for noise in (0.1, 50.0))
    assert loud > quiet > 0


def test_inputs_are_those_of_the_scale() -> None:
    z = descent().inputs(torch.Generator().manual_seed(0))
    assert z.shape == (400, 4)
    assert set(z[:, 2].tolist()) == {-0.5, 0.5}
    assert (z[:, 3] == 0).all()
    assert z[:, :2].abs().max() <= 1.1


def test_outputs_that_do_not_vary_are_not_believed_and_large_ones_are() -> None:
    made = descent()
    hidden, constants, last, constant = made.start
    assert believed_share(made, (hidden, constants, 0 * last, constant)) == 0
    assert believed_share(made, (hidden, constants, last + 5, constant)) == 1
