"""The runs of the report's tests, which are saved and loaded here."""

from __future__ import annotations

from tests.report.conftest import class_run, open_run, real_run, seeded_run

__all__ = ["class_run", "open_run", "real_run", "seeded_run"]
