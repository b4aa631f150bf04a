"""The linear classifier on scattering features: a quick run on embedded digits, and the public centre."""

from __future__ import annotations

import pytest
import torch

from confide import papers
from confide.papers import base
from confide.papers.base import Context, PaperMeasure
from confide.papers.scattering_features import centred, public_centre, scattered

CONTEXT = Context(quick=True, seeds=(0,), noise_seed=1)


def test_a_quick_run_learns_and_says_that_it_is_a_stand_in() -> None:
    """Catches features that carry no label, and public digits used as the centre of the very same digits."""
    (finished,) = base.run(papers.get("mnist-best"), CONTEXT)
    (table,) = finished.outcome.tables
    (row,) = table.rows
    assert row[0] == "scattering"
    assert isinstance(row[3], PaperMeasure)
    assert row[3].mean > 0.8
    assert isinstance(row[4], float)
    assert 0.99 < row[4] <= 1
    assert any(note.startswith("Stand-in") for note in table.notes)


def test_centred_features_have_length_one_and_lose_what_they_share() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(6, 1, 28, 28, generator=generator) * 2 - 1
    features = scattered(images, CONTEXT)
    centre = public_centre()
    assert centre.shape == (3969,)
    before = features.clone()
    after = centred(features, centre)
    torch.testing.assert_close(after.norm(dim=1), torch.ones(6), atol=1e-5, rtol=0)
    expected = before[0] - centre
    torch.testing.assert_close(after[0], expected / expected.norm(), atol=1e-6, rtol=1e-4)


def test_a_record_that_is_the_centre_itself_stays_finite() -> None:
    centre = torch.ones(5)
    assert torch.equal(centred(torch.ones(1, 5), centre), torch.zeros(1, 5))


@pytest.mark.parametrize("rows", [1, 5])
def test_features_depend_on_their_own_record_alone(rows: int) -> None:
    images = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
    torch.testing.assert_close(scattered(images[:rows], CONTEXT)[0], scattered(images, CONTEXT)[0])
