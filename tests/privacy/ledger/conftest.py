"""Every test of the ledger that does not look at a file runs against both stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from confide.privacy import accountants
from confide.privacy.ledger import Ledger
from tests.privacy.ledger.ledger_tools import CountingPrice
from tests.privacy.ledger.servers import Server, emptied, missing


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    running = Server()
    yield running
    running.stop()


@pytest.fixture(params=["file", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a ledger of several processes can be: a file, or a server. Empty."""
    if request.param == "file":
        return str(tmp_path / "budget.db")
    return emptied(request.getfixturevalue("server").address)


@pytest.fixture(params=["memory", "file", "postgres"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    if request.param == "memory":
        yield Ledger()
        return
    shared = (
        str(tmp_path / "budget.db") if request.param == "file" else emptied(request.getfixturevalue("server").address)
    )
    with Ledger(shared) as opened:
        yield opened


@pytest.fixture
def price(monkeypatch: pytest.MonkeyPatch) -> CountingPrice:
    counting = CountingPrice()
    monkeypatch.setattr(accountants, "sound_epsilon", counting)
    return counting
