"""A connection to PostgreSQL that does not wait for ever: a server that stands still, or a cut network, is an error.

The server's own time limits end with the server. So this side gives up when nothing has come for a while, between two
machines with the help of the system (keep-alives), and looks whether a connection that stood idle was ended meanwhile,
as poolers, firewalls and restarts do.
"""

from __future__ import annotations

import select
import time
from collections.abc import Generator
from typing import Any

import psycopg

PATIENCE = 15.0
"""Seconds beyond the wait for a lock after which a server that says nothing counts as gone: its disks may be busy."""


class TimedConnection(psycopg.Connection[Any]):
    """Gives up when the server has said nothing for `patience` seconds."""

    patience = PATIENCE

    def wait(self, gen: Any, *settings: Any, **named: Any) -> Any:
        return super().wait(_timed(gen, self.patience), *settings, **named)

    def was_ended(self) -> bool:
        """Whether the other side has spoken while nothing was asked: nearly always its last words."""
        poll = select.poll()
        poll.register(self.pgconn.socket, select.POLLIN)
        return bool(poll.poll(0))


def _timed(gen: Generator[Any, Any, Any], patience: float) -> Generator[Any, Any, Any]:
    """The same steps of an exchange, which may be none; `wait` says regularly that there is nothing new."""
    heard, ready = time.monotonic(), None
    while True:
        try:
            wanted = gen.send(ready)
        except StopIteration as end:
            return end.value
        ready = yield wanted
        if ready:
            heard = time.monotonic()
        elif time.monotonic() - heard > patience:
            gen.close()
            raise psycopg.OperationalError(
                f"nothing for {patience:g} s; whether what was asked is done shows when it is back"
            )


def connect(address: str, timeout: float) -> TimedConnection:
    """`timeout`: seconds that others may hold a lock, and within which the server must be reached."""
    seconds = max(1, round(timeout + PATIENCE))
    found: TimedConnection = TimedConnection.connect(
        address,
        autocommit=True,
        client_encoding="UTF8",
        connect_timeout=max(1, round(timeout)),
        keepalives_idle=seconds,
        keepalives_interval=max(1, seconds // 4),
        keepalives_count=3,
        tcp_user_timeout=1000 * seconds,
    )
    found.patience = timeout + PATIENCE
    if found.execute("SELECT pg_catalog.pg_backend_pid()").fetchone() != (found.info.backend_pid,):
        # Somebody is between, a pooler, who may give every transaction to another process: what was prepared is not
        # known there.
        found.prepare_threshold = None
    return found
