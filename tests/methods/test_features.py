"""`features`: what the first release tells, and what other records take back of a record's pull on its own odds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from confide.methods import _sketch
from confide.methods.features import SKETCHED, _first_heard, _first_told
from confide.models.likelihoods import Categorical
from confide.posteriors.draws import Draws
from confide.sources.queries import Release
from confide.workflow import recalibrate

FEATURES, RECORDS = 300, 4000


def _alike_along(directions: int, seed: int) -> Tensor:
    """Features of length 8 about a mean, which differ along so many directions alike."""
    generator = torch.Generator().manual_seed(seed)
    axes = torch.linalg.qr(torch.randn(FEATURES, directions + 1, generator=generator))[0]
    off = torch.nn.functional.normalize(torch.randn(RECORDS, directions, generator=generator))
    return 8 * (0.6 * axes[:, 0] + 0.8 * off @ axes[:, 1:].mT)


def _heard(x: Tensor, noise: float, seed: int = 5, clip: float = 2.0) -> tuple[Tensor, float]:
    rows = _first_told(_sketch.signs(FEATURES), clip, x, torch.zeros(len(x)))
    total = (
        rows.sum(0) + clip * noise * torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(seed)).double()
    )
    event: Any = None
    return _first_heard(Release(total, clip * noise, event, float(len(x))), clip, FEATURES)


@pytest.mark.parametrize("directions", [2, 8, 60])
def test_the_first_release_tells_the_mean_and_along_how_many_directions_features_differ(directions: int) -> None:
    """Caught: a sketch whose own spread stays in it (at least 1 / 12), one that is not centred (at least .36)."""
    x = _alike_along(directions, directions)
    centre, concentration = _heard(x, 1.0)
    assert float((centre - x.mean(0)).norm()) < 0.1
    assert concentration == pytest.approx(1 / directions, rel=0.45)


def test_noise_is_not_taken_for_directions() -> None:
    """Caught: the noise of the sketch left in (its square is twice what is looked for)."""
    x = _alike_along(60, 1)
    little = sum(_heard(x, 10.0, seed)[1] for seed in range(16)) / 16
    _, nothing = _heard(0 * x, 1000.0)
    assert little == pytest.approx(1 / 60, rel=0.4)
    assert nothing == pytest.approx(_sketch.USUAL, rel=0.2)


def test_a_record_tells_no_more_than_the_clip() -> None:
    x = torch.cat([_alike_along(3, 2), 1e6 * torch.ones(1, FEATURES), torch.zeros(1, FEATURES)])
    rows = _first_told(_sketch.signs(FEATURES), 2.0, x, torch.zeros(len(x)))
    assert float(rows[:-2].norm(dim=1).max()) <= 2.0 + 1e-5
    assert float(rows[:, FEATURES:].norm(dim=1).max()) <= 2.0 * math.sqrt(SKETCHED) + 1e-9
    assert bool(torch.isfinite(rows).all())


@pytest.mark.parametrize("fall", [0.0, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("length", [50.0, 1000.0])
def test_what_others_take_back_is_that_of_gradient_descent(fall: float, length: float) -> None:
    """By how much a record's own gradients move its outputs on average, for eigenvalues that fall as those of pictures
    do. Caught: nothing taken back (up to 10 times too much), and the same share whatever the features (.4 once)."""
    shares = torch.arange(1, 1001).double() ** -fall
    shares = shares / shares.sum()
    curvature = 0.5  # of two even classes
    exact = float((1 - torch.exp(-length * curvature * shares)).sum()) / (length * curvature)
    facts = {"own_pull": 1.0, "pulled_back": length * float(shares.square().sum())}
    posterior = Draws(torch.nn.Linear(2, 2), Categorical(2), torch.zeros(1, 6), torch.ones(1), facts)
    told = float(recalibrate._own_pull(posterior, torch.zeros(1, 2, dtype=torch.float64)))
    assert told == pytest.approx(exact, rel=0.3)
