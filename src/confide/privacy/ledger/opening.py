"""Where a ledger is kept, and who opens it."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

from confide.privacy.ledger.entries import check_who
from confide.privacy.ledger.places import is_server
from confide.privacy.ledger.sqlite import SqliteStore
from confide.privacy.ledger.store import LedgerStore
from confide.wording import WHO_VARIABLE


def open_store(path: str | os.PathLike[str] | None, timeout: float) -> LedgerStore:
    if path is not None and is_server(path):
        from confide.privacy.ledger.postgres import PostgresStore

        return PostgresStore(os.fspath(path), timeout)
    return SqliteStore(None if path is None else Path(os.path.realpath(path)), timeout)


def system_user() -> str:
    """The name that the environment gives, or by which the system knows the user; empty where it knows none."""
    given = os.environ.get(WHO_VARIABLE)
    if given:
        return check_who(given)
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no entry in the password file, no variable set
        return ""
