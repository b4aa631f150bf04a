"""Auditing: attack a method through the real boundary, and see whether the claim survives.

    confide.auditing.audit(confide.methods.SGLD(), epsilon=1.0, canaries=1000)

plays the game of `confide.auditing.lower_bound` with canaries among made-up records, and runs the deterministic checks.
"""

from confide.auditing.checks import Check
from confide.auditing.game import Audit, audit
from confide.auditing.self_test import Caught, self_test

__all__ = ["Audit", "Caught", "Check", "audit", "self_test"]
