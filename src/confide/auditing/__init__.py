"""Auditing: attack a method through the real boundary, and see whether the claim survives.

    confide.auditing.audit(confide.methods.SGLD(), epsilon=1.0, canaries=1000)

plays the game of `confide.auditing.lower_bound` with canaries among made-up records, and runs the checks.

    confide.auditing.audit_module(module, x, y, classes=10)
    confide.auditing.audit_query(query, x, y)

put hostile records into a network or query of one's own, and see how far the sum moves.
"""

from confide.auditing.game import Audit, audit
from confide.auditing.moves import QueryAudit, audit_module, audit_query
from confide.auditing.results import Check
from confide.auditing.self_test import Caught, self_test

__all__ = ["Audit", "Caught", "Check", "QueryAudit", "audit", "audit_module", "audit_query", "self_test"]
