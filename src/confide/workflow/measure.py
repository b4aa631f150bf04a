"""A posterior on test records that its user declared to be public or separate."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from confide.data.preprocessing import Encoder
from confide.data.roles import arranged
from confide.data.table import Table
from confide.data.trees import tree_of
from confide.errors import DataError
from confide.models.predictive import RealPredictive, VectorPredictive
from confide.posteriors.base import Posterior
from confide.report.evaluation import SEPARATE, Evaluation


def check_test(table: Table, encoder: Encoder) -> None:
    """Refuse test records that nothing can be measured on, before anything is charged."""
    table = arranged(table, encoder.schema)
    if table.labels is None:
        raise DataError("test: has no target column, so nothing can be measured on it; leave it out")
    if encoder.schema.classes is not None and (encoder.targets(table.labels) < 0).any():
        raise DataError("test: some labels are not among the declared classes; declare them, or remove those records")
    if table.labels.ndim == 2:
        encoder.targets(table.labels)
    encoder.features(table)


def measured(posterior: Posterior, encoder: Encoder, table: Table, source: str = SEPARATE) -> Evaluation:
    """Predictions beside the truth, in the units of the target."""
    table = arranged(table, encoder.schema)
    assert table.labels is not None  # `check_test` refuses records without a target
    predictive = posterior.predict(tree_of(encoder.features(table)))
    if isinstance(predictive, VectorPredictive):
        return Evaluation(numbers_in_units(predictive, encoder), torch.as_tensor(table.labels), source)
    if not isinstance(predictive, RealPredictive):
        return Evaluation(predictive, torch.as_tensor(encoder.targets(table.labels)), source)
    # The encoder clamps targets to their declared bounds; predictions are judged against the values as they are.
    truth = torch.as_tensor(table.labels.astype("float64"))
    return Evaluation(in_units(predictive, encoder), truth, source)


def numbers_in_units(predictive: VectorPredictive, encoder: Encoder) -> VectorPredictive:
    """Several numbers, each in the units of its target, in double precision."""
    bounds = torch.tensor([pair for _, pair in encoder.schema.targets], dtype=torch.float64)
    middle, half = (bounds[:, 0] + bounds[:, 1]) / 2, (bounds[:, 1] - bounds[:, 0]) / 2
    means, variances = predictive.means.double() * half + middle, predictive.variances.double() * half.square()
    return VectorPredictive(means, variances, predictive.weights.double())


def in_units(predictive: RealPredictive, encoder: Encoder) -> RealPredictive:
    """A predictive distribution in the units of the target, in double precision."""
    # Every field, for a kind of predictive of its own may keep more than means and variances.
    exact = replace(predictive, **{part.name: getattr(predictive, part.name).double() for part in fields(predictive)})
    return exact.rescaled(encoder.target_scale, encoder.target_centre)
