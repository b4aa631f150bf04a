"""Scattering features of digits, and a public vector that they are centred by."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from confide.papers.base import Context

GROUPS = 27


def scattered(images: Tensor, context: Context) -> Tensor:
    """Features of length 1 for images of one channel in [-1, 1]."""
    from confide.data.scattering import Scattering

    transform, out = Scattering(images.shape[-1]), []
    for start in range(0, len(images), 4096):
        context.progress("scattering", start, len(images))
        out.append(transform.features((images[start : start + 4096] + 1) / 2, GROUPS))
    return torch.cat(out)


def public_centre() -> Tensor:
    """Mean feature of scikit-learn's digits, enlarged to 20 x 20 pixels within 28 x 28, as MNIST's digits are."""
    from sklearn.datasets import load_digits

    from confide.data.scattering import Scattering

    small = torch.as_tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    images = F.pad(F.interpolate(small, size=20, mode="bilinear", align_corners=False), [4] * 4)
    return Scattering(28).features(images, GROUPS).mean(0)


def centred(features: Tensor, centre: Tensor) -> Tensor:
    """Features less a public vector, each brought back to length 1; in place, since they are large."""
    features.sub_(centre)
    return features.div_(features.norm(dim=1, keepdim=True).clamp_(min=1e-6))
