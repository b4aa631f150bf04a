"""How far an export may differ from confide: it averages over draws where confide may integrate over the whole law.

Measured on made-up rows anywhere within the public facts, so that it costs nothing and tells of no record.
"""

from __future__ import annotations

import torch
from torch import Tensor

from confide.data.preprocessing import Encoder
from confide.export.stacked_draws import stacked_draws
from confide.export.torch_program import AveragedDraws
from confide.models.likelihoods import likelihood_to_dict
from confide.posteriors.base import Posterior
from confide.wording import number, share

ROWS = 500  # the largest difference of so many rows is exceeded by one row in five hundred
_ROUNDING = 1e-5  # of single precision, over some hundred draws


def agreement(posterior: Posterior, encoder: Encoder | None) -> str:
    """What the files hold and how far their numbers may be from confide's, as a sentence or two."""
    draws = stacked_draws(posterior)
    values = likelihood_to_dict(draws.likelihood)
    if posterior.noise_scale is not None:
        values["noise_scale"] = float(posterior.noise_scale)
    inputs = made_up_inputs(draws.features, encoder)
    with torch.no_grad():
        exported, doubt, _ = AveragedDraws(draws, {"likelihood": values}).eval()(inputs)
        own = posterior.summary(inputs)
    apart = (exported.double() - own.centre.double()).abs()
    doubts = (doubt.double() - own.epistemic.double()).abs().mean() / own.epistemic.double().mean().clamp(min=1e-12)
    holds = f"The files hold {len(draws.weights)} draws of the posterior, and predictions are averages over them."
    if float(apart.max()) < _ROUNDING * max(1.0, float(own.centre.abs().max())):
        return f"{holds} confide itself averages over the same draws."
    unit = "" if encoder is None or encoder.schema.classes is not None else f" {_in_units(encoder)}"
    return (
        f"{holds} confide itself integrates over the whole law: on {ROWS} made-up rows anywhere within the facts the "
        f"two differ by {number(float(apart.mean()))} on average and {number(float(apart.max()))} at most{unit}, and "
        f"in epistemic uncertainty by {share(float(doubts))} on average."
    )


def _in_units(encoder: Encoder) -> str:
    if encoder.scaling == "plain":
        return "in the target's units"
    return "of half the target's declared range"


def made_up_inputs(features: int, encoder: Encoder | None) -> Tensor:
    """Encoded rows that nobody has: numbers anywhere within their bounds, one category of each column."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(ROWS, features, generator=generator) * 2 - 1
    start = 0
    for column in () if encoder is None else encoder.schema.columns:
        part = inputs[:, start : start + column.width]
        start += column.width
        if column.kind == "categorical":
            part.zero_()
            chosen = torch.randint(column.width, (ROWS, 1), generator=generator)
            part.scatter_(1, chosen, 1.0)
        else:
            part[:, 1:] = 0.0  # present, where a flag says whether it is missing
    return inputs
