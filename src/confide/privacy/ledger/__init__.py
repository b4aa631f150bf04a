"""The ledger: what was charged on which data set, append-only and hash-chained, with ceilings that refuse."""

from confide.errors import BudgetExceeded, LedgerError, StepsClaimed
from confide.privacy.ledger.entries import Entry, Limit, Steps
from confide.privacy.ledger.ledger import Ledger
from confide.privacy.ledger.store import Head, for_reading

__all__ = ["BudgetExceeded", "Entry", "Head", "Ledger", "LedgerError", "Limit", "Steps", "StepsClaimed", "for_reading"]
