"""Whether a ledger could pay for everything that is to come, asked before the first charge."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from confide.privacy.events import Event
from confide.privacy.ledger import Ledger
from confide.privacy.ledger.places import is_server


@contextmanager
def opened(ledger: Ledger | str | os.PathLike[str] | None) -> Iterator[Ledger | None]:
    """The ledger itself, one that stays as it is; None where there is none yet. Reading it makes no file."""
    if ledger is None or isinstance(ledger, Ledger):
        yield ledger
    elif is_server(ledger) or Path(ledger).exists():
        with Ledger(ledger) as book:
            yield book
    else:
        yield None


def check_room(ledger: Ledger | str | os.PathLike[str] | None, name: str, plans: Sequence[Sequence[Event]]) -> None:
    """Refuse what the ledger could not pay for in full: found out halfway, the first part would have been spent."""
    with opened(ledger) as book:
        if book is not None:
            book.check_room(plans, name)
