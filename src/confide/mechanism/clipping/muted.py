"""What code says while it reads private records is not heard: prints, warnings, logging. Prints of other threads are.

Only what goes through Python's own streams is dropped. Code that writes to files or to the machine's streams by number
is refused before (`unsealable`).
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Silent(threading.local):
    depth = 0


class _LoggingOff:
    """Logging is switched for the whole process: the first who is silent switches it off, the last one on again."""

    def __init__(self) -> None:
        self.lock, self.silent, self.level = threading.Lock(), 0, logging.NOTSET

    def begin(self) -> None:
        with self.lock:
            if not self.silent:
                self.level = logging.root.manager.disable
                logging.disable(_NOBODY)
            self.silent += 1

    def end(self) -> None:
        with self.lock:
            self.silent -= 1
            if not self.silent:
                logging.disable(self.level)


_SILENT, _LOGGING = _Silent(), _LoggingOff()
_NOBODY = logging.CRITICAL + 1  # above every level that is in use


class _MutedStream:
    """A stream that drops what a silent thread writes; everything else is the stream's behind it."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    def write(self, text: Any) -> int:
        return len(text) if _SILENT.depth else self._behind.write(text)

    def writelines(self, lines: Any) -> None:
        if not _SILENT.depth:
            self._behind.writelines(lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)


@contextmanager
def muted() -> Iterator[None]:
    """This thread prints, warns and logs nothing inside."""
    streams = sys.stdout, sys.stderr
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.stdout, sys.stderr = _MutedStream(streams[0]), _MutedStream(streams[1])
        _LOGGING.begin()
        _SILENT.depth += 1
        try:
            yield
        finally:
            _SILENT.depth -= 1
            _LOGGING.end()
            sys.stdout, sys.stderr = streams
