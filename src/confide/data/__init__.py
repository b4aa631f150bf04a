"""What enters: the public facts a user declares, loaders, and the encoding of records by those facts."""

from __future__ import annotations

from confide.data import catalogue
from confide.data.fingerprint import fingerprint, registered_name
from confide.data.loaders import from_frame, from_pairs, load_dataset, load_table
from confide.data.preprocessing import Encoder, Prepared, curator_notes, prepare
from confide.data.schema import Column, Fact, Input, Schema
from confide.data.statistics import (
    ColumnMoments,
    RecordStatistic,
    bounds_from_moments,
    histogram_statistic,
    moment_statistic,
    narrowed,
    numeric_features,
    private_bounds,
    private_mean_and_scale,
)
from confide.data.streaming import from_parquet
from confide.data.table import DataSet, Table
from confide.errors import DataError

__all__ = [
    "Column",
    "ColumnMoments",
    "DataError",
    "DataSet",
    "Encoder",
    "Fact",
    "Input",
    "Prepared",
    "RecordStatistic",
    "Schema",
    "Table",
    "bounds_from_moments",
    "catalogue",
    "curator_notes",
    "fingerprint",
    "from_frame",
    "from_pairs",
    "from_parquet",
    "histogram_statistic",
    "load_dataset",
    "load_table",
    "moment_statistic",
    "narrowed",
    "numeric_features",
    "prepare",
    "private_bounds",
    "private_mean_and_scale",
    "registered_name",
]
