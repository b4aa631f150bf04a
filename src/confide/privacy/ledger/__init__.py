"""The ledger: what was charged on which data set, append-only and hash-chained, with ceilings that refuse."""

from confide.errors import BudgetExceeded, LedgerError, StepsClaimed
from confide.privacy.ledger.entries import Entry, Limit, Steps
from confide.privacy.ledger.ledger import Ledger
from confide.privacy.ledger.places import for_reading
from confide.privacy.ledger.store import Head, LedgerStore

__all__ = [
    "BudgetExceeded",
    "Entry",
    "Head",
    "Ledger",
    "LedgerError",
    "LedgerStore",
    "Limit",
    "Steps",
    "StepsClaimed",
    "for_reading",
]
