"""The report: one self-contained HTML page about a run, for everyone, for judges and for auditors."""

from confide.report.evaluation import PUBLIC, SEPARATE, Evaluation
from confide.report.render import render

__all__ = ["PUBLIC", "SEPARATE", "Evaluation", "render"]
