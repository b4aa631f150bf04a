"""Counts of two classes by bins and groups: what they estimate, with which noise, and how likely probabilities are."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from confide.models.calibrated import Calibrated
from confide.workflow import odds


def _told(counts: torch.Tensor) -> torch.Tensor:
    parts = [math.sqrt(1 - odds.GROUPED) * counts, math.sqrt(odds.GROUPED) * counts @ odds.GROUPS]
    return torch.cat([part.flatten() for part in parts])


def _covariance(counts: odds.Counts) -> torch.Tensor:
    shared = odds.GROUPS @ torch.diag(counts.shared) @ odds.GROUPS.mT
    return counts.variance * (torch.eye(len(odds.MIDDLES), dtype=torch.float64) - shared)


def test_bins_and_groups_tell_the_same_counts_and_noise_is_as_stated() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = 100 * torch.rand(2, len(odds.MIDDLES), generator=generator, dtype=torch.float64)
    torch.testing.assert_close(odds.Counts.of(_told(exact), 3.0).counts, exact)
    size = len(_told(exact))
    found = [
        odds.Counts.of(3.0 * torch.randn(size, generator=generator, dtype=torch.float64), 3.0) for _ in range(1500)
    ]
    rows = torch.cat([one.counts for one in found])
    expected = _covariance(found[0])
    assert float((rows.mT @ rows / len(rows) - expected).abs().max()) < 0.12 * float(expected.diagonal().max())
    # a stretch of nine bins is known better than by bins that have all of a record's norm, whose variance is 9 * 9
    middle = odds.GROUPS[:, 3]
    assert middle.sum() == 9
    assert float(middle @ expected @ middle) < 0.25 * 9 * 3.0**2


def test_evidence_is_that_of_a_gaussian_with_the_stated_covariance() -> None:
    generator = torch.Generator().manual_seed(1)
    exact = 100 * torch.rand(2, len(odds.MIDDLES), generator=generator, dtype=torch.float64)
    stated = torch.sigmoid(odds.MIDDLES)
    bins = odds.Bins.of(odds.Counts.of(_told(exact), 5.0), 3000, stated, stated)
    likely = []
    for slope in (0.5, 1.0, 2.0):
        q = torch.sigmoid(slope * odds.MIDDLES + 0.2)
        law = MultivariateNormal(torch.zeros_like(q), bins.covariance(q))
        likely.append((float(bins.evidence(q)), float(law.log_prob(bins.left(q)))))
    constant = len(odds.MIDDLES) / 2 * math.log(2 * math.pi)
    for found, expected in likely:
        assert math.isclose(found, expected + constant, rel_tol=1e-9, abs_tol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_curve_adds_what_it_says_and_leaves_a_part_of_every_probability(dtype: torch.dtype) -> None:
    """Places closer than half precision tells apart, odds beyond all of them, and heights that would pass 0 and 1."""
    curve = ((-2.0, -3.0), (3.0, 0.0), (3.001, 0.02), (8.0, 0.02), (9.0, 3.0))
    likelihood = Calibrated(2, 1.0, (0.0, 0.0), one_logit=True, curve=curve)
    z = torch.tensor([-50.0, -2.0, 3.0, 5.0, 9.0, 50.0], dtype=dtype)
    one = z.double().sigmoid()
    wanted = torch.stack([0.05 * one[0], 0.05 * one[1], one[2], one[3], one[4], one[5]])
    wanted[3] = min(float(one[3]) + 0.02, 1 - 0.05 * (1 - float(one[3])))
    wanted[4:] = 1 - 0.05 * (1 - one[4:])
    found = likelihood.predictive(z[None, :, None], torch.ones(1)).draws[0]
    torch.testing.assert_close(found[:, 1].double(), wanted, atol=1e-2 if dtype == torch.bfloat16 else 1e-6, rtol=0)
    torch.testing.assert_close(found.sum(1), torch.ones(6, dtype=dtype))
    loss = likelihood.loss(z[:, None].double(), torch.ones(6))
    torch.testing.assert_close(loss, -wanted.log(), atol=1e-2, rtol=1e-2)
