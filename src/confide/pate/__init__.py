"""PATE: teachers on disjoint parts of the records vote on public inputs, and a student learns from the noisy votes.

    plan = confide.pate.plan(epsilon=1, delta=1e-5, teachers=250, queries=100)
    run = confide.pate.fit(LinearTeacher(), data, public_inputs, plan, student=SemiSupervised())

What leaves the boundary is `run.answers`; the student sees them and public inputs, and nothing else.
"""

from __future__ import annotations

from confide.mechanism.votes import UNANSWERED, Teacher, Votes, VotesAnswers
from confide.pate.fitting import PateRun, fit
from confide.pate.planning import PatePlan, plan, queries_for
from confide.pate.students import SemiSupervised, Student, Supervised
from confide.pate.teachers import LinearTeacher, NetworkTeacher

__all__ = [
    "UNANSWERED",
    "LinearTeacher",
    "NetworkTeacher",
    "PatePlan",
    "PateRun",
    "SemiSupervised",
    "Student",
    "Supervised",
    "Teacher",
    "Votes",
    "VotesAnswers",
    "fit",
    "plan",
    "queries_for",
]
