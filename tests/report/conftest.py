"""The runs of `runs.py`, made once."""

from __future__ import annotations

import pytest

from confide.running.fit import Run
from tests.report.runs import classes_schema, make_run, reals_schema


@pytest.fixture(scope="session")
def class_run() -> Run:
    return make_run(classes_schema())


@pytest.fixture(scope="session")
def real_run() -> Run:
    return make_run(reals_schema())


@pytest.fixture(scope="session")
def seeded_run() -> Run:
    return make_run(classes_schema(), seed=11)


@pytest.fixture(scope="session")
def open_run() -> Run:
    return make_run(classes_schema(), private=False)
