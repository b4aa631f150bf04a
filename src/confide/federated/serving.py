"""A party behind a Unix socket: a long-running process that its owner controls.

The socket's file can be used by its owner alone (mode 0600). Frames are bounded before they are read; a connection that
sends something else gets one sentence and is closed.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from confide.errors import Refusal
from confide.federated import wire
from confide.federated.couriers import read_frame
from confide.federated.party import Party, refused

LONGEST_PATH = 100  # bytes; the system's limit for sockets is 104 or 108
MOST_CONNECTIONS = 16  # a server has one; its owner may try another beside it
IDLE_SECONDS = 3600.0  # a connection that says nothing for so long is closed; a server simply opens another


class PartyServer:
    """Serves a party at a socket until it is closed."""

    def __init__(self, party: Party, path: str | Path) -> None:
        self._party, self.path = party, Path(path)
        self._listener = _listener(self.path)
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._closed = False

    def serve(self) -> None:
        """Accept connections until `close`; each is served by a thread."""
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or nobody came within a second
                continue
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._served, args=(connection,), daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        with suppress(OSError):
            self.path.unlink()

    def _served(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(IDLE_SECONDS)
                with suppress(OSError):
                    self._replies(connection)
        finally:
            self._room.release()

    def _replies(self, connection: socket.socket) -> None:
        while True:
            try:
                frame = read_frame(connection)
            except Refusal as error:
                connection.sendall(wire.packed(refused(str(error))))
                return
            if frame is None:
                return
            connection.sendall(self._party.respond(frame))


def _listener(path: Path) -> socket.socket:
    """A socket at the path, which nobody else may use; one that a dead process left behind is taken away."""
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise Refusal(f"socket={str(path)!r}: at most {LONGEST_PATH} bytes long; name a shorter path")
    if not path.absolute().parent.is_dir():
        raise Refusal(f"socket={str(path)!r}: the folder {path.absolute().parent} does not exist; make it first")
    if os.path.lexists(path):
        if not path.is_socket() or _alive(path):
            raise Refusal(f"socket={str(path)!r}: is in use; name another, or stop the party that is there")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise Refusal(f"socket={str(path)!r}: cannot be made ({error.strerror})") from None
    finally:
        os.umask(before)
    listener.listen(MOST_CONNECTIONS)
    listener.settimeout(1.0)
    return listener


def _alive(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as trial:
        trial.settimeout(1.0)
        try:
            trial.connect(str(path))
        except OSError:
            return False
    return True


@contextmanager
def serving(party: Party, path: str | Path) -> Iterator[PartyServer]:
    """A party at a socket, served by a thread of this process as long as the block lasts."""
    server = PartyServer(party, path)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()
