"""Predictions of a whole test part, in pieces."""

from __future__ import annotations

import torch
from torch import Tensor

from confide.models.predictive import of_classes
from confide.posteriors.base import Posterior

ROWS_AT_ONCE, WEIGHTS_PER_ROW = 500, 100
"""Rows of a piece, so that it stays in the processor's cache; every piece draws all weights anew, so that many weights
ask for longer ones."""


def class_probabilities(posterior: Posterior, x: Tensor) -> Tensor:
    """Of every row, averaged over the posterior."""
    rows = max(ROWS_AT_ONCE, posterior.mean().numel() // WEIGHTS_PER_ROW)
    with torch.no_grad():
        return torch.cat([of_classes(posterior.predict(part)).probabilities for part in x.split(rows)])
