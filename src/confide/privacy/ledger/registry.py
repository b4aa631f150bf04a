"""Records that a ledger knows by keyed sketches, so that a copy under another name has no second budget."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from pathlib import Path

from confide.privacy.ledger.book import Book
from confide.privacy.ledger.entries import Entry, check_names
from confide.privacy.ledger.names import key_of
from confide.privacy.ledger.places import key_place
from confide.privacy.ledger.state import Known
from confide.privacy.ledger.store import Head, LedgerStore


class Registry:
    """The sketches of one ledger. What opens them, and compares them, is `confide.data.fingerprint`.

    key   the curator's key that the ledger was opened with, if it was
    """

    def __init__(self, book: Book, store: LedgerStore, key: bytes | None) -> None:
        self._book, self._store, self.key = book, store, key

    @property
    def ledger(self) -> str:
        """As errors call it."""
        return self._store.name

    @property
    def key_place(self) -> Path:
        """Where the curator's key is looked for: beside a file, and for a server in the user's own settings."""
        return key_place(self._store.place, self._store.identity)

    @property
    def limit_key_place(self) -> Path:
        """Where the key of a ceiling is kept that was set without a passphrase: beside the other."""
        return self.key_place.with_suffix(".limit-key")

    def key_ids(self) -> frozenset[str]:
        """Of the keys that sketches were made with."""
        self._book.refresh()
        return frozenset(one.key_id for one in self._book.state.known)

    def find(self, key_id: str, same: Callable[[bytes], bool]) -> str | None:
        """The name of the records, if they are known.

        key_id   of the key
        same     whether a sketch made with this key is of the same records
        """
        self._book.refresh()
        return self._find(key_id, same)

    def register(
        self,
        dataset: str,
        key_id: str,
        sketch: bytes,
        same: Callable[[bytes], bool],
        tells_more: Callable[[Sequence[bytes]], bool],
    ) -> str:
        """The name under which these records are to be charged: the one they are known by, or else `dataset`.

        tells_more   whether `sketch` is worth keeping beside those by which they were recognised
        """
        check_names("", dataset, None)
        found = dataset

        def look_up(head: Head) -> tuple[Entry, ...]:
            nonlocal found
            known = self._find(key_id, same)
            if known is None:
                self._book.state.check_names(dataset, None)
            else:
                found = known
                if not tells_more([one.sketch for one in self._of(key_id) if key_of(one.dataset) == key_of(known)]):
                    return ()
            values = {"dataset": found, "key_id": key_id, "sketch": base64.b64encode(sketch).decode()}
            return (self._book.append("dataset", values, head),)

        self._book.write(look_up)
        return found

    def _find(self, key_id: str, same: Callable[[bytes], bool]) -> str | None:
        return next((one.dataset for one in self._of(key_id) if same(one.sketch)), None)

    def _of(self, key_id: str) -> list[Known]:
        return [one for one in self._book.state.known if one.key_id == key_id]
