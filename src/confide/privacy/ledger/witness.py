"""A witness: a file elsewhere that remembers every head it was shown, and knows a ledger that forgot one.

The chain cannot tell an older copy of itself, a copy that went on by itself, or a chain that somebody computed anew.
A file on another disk, or one that its users can only append to, can: each line holds a head, and the highest of them
must still stand in the ledger. One line for each transaction, flushed before the charge returns:

    COUNT:HASH IDENTITY TIME SIGNATURE        the signature by the curator's key, or "-" where there is none
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from confide.errors import LedgerError, Refusal
from confide.privacy.ledger.keys import check_key, head_is_signed, sign_head
from confide.privacy.ledger.store import Head

UNSIGNED = "-"
# Put behind a line that a crash has cut short.
_TORN = " torn\n"


class Witness:
    """The witness file of one ledger, and the key that its lines are signed with, if there is one."""

    def __init__(self, path: str | os.PathLike[str], identity: str, key: bytes | None = None) -> None:
        self.path = Path(os.path.realpath(path))
        self.identity = identity
        self.key = None if key is None else check_key(key)
        self._read = 0  # bytes that were looked at
        self._size = 0  # bytes that it had at least
        self._highest: Head | None = None

    def highest(self) -> Head | None:
        """The highest head it was shown, None while it is new. A line that it cannot have written is refused."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._size:
                    raise self._refusal("was cut short while it was in use; restore it")
                file.seek(self._read)
                # What stands behind the last end of a line was cut short by a crash, or is being written.
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            if self._size:
                raise self._refusal("has vanished; restore it") from None
            return None
        except OSError as error:
            raise self._refusal(f"cannot be read ({error.strerror})") from None
        for line in whole.decode("ascii", "replace").split("\n") if whole else []:
            if not line.endswith(_TORN.rstrip()):
                head = self._head(line)
                self._highest = head if self._highest is None or head.count > self._highest.count else self._highest
        self._read += len(whole) + 1 if whole else 0
        self._size = max(self._size, self._read)
        return self._highest

    def check(self, stands: Callable[[Head], None]) -> Head | None:
        """Refuses a ledger in which the highest head does not stand; `stands` raises LedgerError then."""
        highest = self.highest()
        if highest is not None:
            try:
                stands(highest)
            except LedgerError as error:
                raise self._refusal(
                    f"has seen {highest.count} entries that this ledger does not hold: it was cut short, forked, "
                    "rewritten or replaced by an older copy; restore the one that holds them"
                ) from error
        return highest

    def note(self, head: Head) -> None:
        """One more line, on the disk when this returns."""
        signature = UNSIGNED if self.key is None else sign_head(self.key, self.identity, head)
        line = f"{head} {self.identity} {datetime.now(UTC).isoformat(timespec='seconds')} {signature}\n"
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(handle).st_size
                torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
                os.write(handle, f"{_TORN if torn else ''}{line}".encode())
                os.fsync(handle)
                self._size = os.fstat(handle).st_size
            finally:
                os.close(handle)
        except OSError as error:
            raise self._refusal(f"cannot be written ({error.strerror}), so the charge is not to be used") from None

    def _head(self, line: str) -> Head:
        try:
            shown, identity, _, signature = line.split(" ")
            head = Head.read(shown)
        except (ValueError, Refusal):
            raise self._refusal(
                "holds a line that no witness wrote; give the path of a witness, or a new name"
            ) from None
        if identity != self.identity:
            raise self._refusal("is about another ledger; give each ledger a witness of its own")
        if self.key is not None and not head_is_signed(self.key, identity, head, signature):
            raise self._refusal("holds a line that is not signed with this key")
        return head

    def _refusal(self, what: str) -> LedgerError:
        return LedgerError(f"witness {str(self.path)!r}: {what}")
