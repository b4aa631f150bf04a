"""Couriers: they carry frames to parties and bring back replies. They see bytes and are trusted with nothing.

A party that does not reply in time is left out of what comes back: the federation decides what that means.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from confide.errors import Refusal
from confide.federated.party import Party
from confide.federated.wire import PREFIX_BYTES, lengths


class Courier(Protocol):
    """Carries one frame to each of several parties."""

    @property
    def parties(self) -> tuple[str, ...]:
        """The names of all parties that it knows the way to."""

    def exchange(self, frames: Mapping[str, bytes]) -> dict[str, bytes]:
        """The replies by party; who did not reply is left out."""


class InProcess:
    """Parties in this process, for tests and for trying things out."""

    def __init__(self, parties: Mapping[str, Party]) -> None:
        self._parties = dict(parties)

    @property
    def parties(self) -> tuple[str, ...]:
        return tuple(self._parties)

    def exchange(self, frames: Mapping[str, bytes]) -> dict[str, bytes]:
        return {name: self._parties[name].respond(frame) for name, frame in frames.items()}


class Sockets:
    """Parties behind Unix sockets on this machine, all asked at once.

    paths     of the sockets, by the names of the parties
    timeout   seconds within which a party must have replied
    """

    def __init__(self, paths: Mapping[str, str | Path], timeout: float = 60.0) -> None:
        if not paths:
            raise Refusal("paths={}: name the socket of at least one party")
        if not timeout > 0:
            raise Refusal(f"timeout={timeout}: must be > 0 seconds")
        self._paths = {name: str(path) for name, path in paths.items()}
        self._timeout = timeout
        self._open: dict[str, socket.socket] = {}
        self._lock = threading.Lock()

    @property
    def parties(self) -> tuple[str, ...]:
        return tuple(self._paths)

    def exchange(self, frames: Mapping[str, bytes]) -> dict[str, bytes]:
        with self._lock, ThreadPoolExecutor(max_workers=max(1, len(frames))) as pool:
            replies = dict(zip(frames, pool.map(self._exchange, frames, frames.values()), strict=True))
        return {name: reply for name, reply in replies.items() if reply is not None}

    def __enter__(self) -> Sockets:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            for connection in self._open.values():
                connection.close()
            self._open.clear()

    def _exchange(self, name: str, frame: bytes) -> bytes | None:
        """The reply over the connection that is open; where the party has restarted since, over a new one.

        A frame that was sent whole is not sent again: the party may have answered it, and answers a step once.
        """
        until = time.monotonic() + self._timeout
        connection = self._sent(name, frame)
        if connection is None:
            return None
        try:
            reply = read_frame(connection, until)
        except (OSError, Refusal):
            reply = None
        if reply is None:
            connection.close()
        else:
            self._open[name] = connection
        return reply

    def _sent(self, name: str, frame: bytes) -> socket.socket | None:
        """The connection over which a frame went out as a whole; None where nobody is there."""
        kept = self._open.pop(name, None)
        for known in [kept, None] if kept is not None else [None]:
            try:
                connection = known or self._connected(name)
            except OSError:
                continue
            try:
                connection.settimeout(self._timeout)
                connection.sendall(frame)
            except OSError:
                connection.close()
                continue
            return connection
        return None

    def _connected(self, name: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(self._timeout)
        try:
            connection.connect(self._paths[name])
        except OSError:
            connection.close()
            raise
        return connection


def read_frame(connection: socket.socket, until: float = math.inf) -> bytes | None:
    """A whole frame, bounded before it is read; None where the other side has closed before its first byte.

    until   by the monotonic clock; a frame that comes byte by byte must be there in time, too
    """
    prefix = _read(connection, PREFIX_BYTES, until)
    if not prefix:
        return None
    if len(prefix) < PREFIX_BYTES:
        raise ConnectionError
    rest = sum(lengths(prefix))
    body = _read(connection, rest, until)
    if len(body) < rest:
        raise ConnectionError
    return prefix + body


def _read(connection: socket.socket, size: int, until: float) -> bytes:
    """So many bytes, or fewer where the other side has closed."""
    parts, left = [], size
    while left:
        if math.isfinite(until):
            connection.settimeout(max(1e-3, until - time.monotonic()))
        part = connection.recv(min(left, 1 << 20))
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
