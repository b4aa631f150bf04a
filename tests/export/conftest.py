"""The runs of the report's tests, which are exported here."""

from __future__ import annotations

from tests.report.conftest import class_run

__all__ = ["class_run"]
