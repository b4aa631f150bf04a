"""The ledger as a file: tampering shows, and whatever is wrong with the file is said in one sentence."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from confide.errors import LedgerError
from confide.privacy.events import GaussianEvent
from confide.privacy.ledger import Head, Ledger, for_reading, sqlite, store
from tests.privacy.ledger.ledger_tools import in_a_process

STEP = GaussianEvent(1.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed ledger with a ceiling (entry 1) and four charges (entries 2 to 5)."""
    place = tmp_path / "budget.db"
    with Ledger(place) as ledger:
        ledger.limit(3.0, 1e-5)
        write_charges(ledger)
    return place


def write_charges(ledger: Ledger) -> None:
    """Written past the ceiling's arithmetic, which is not what this file is about."""
    for number in range(4):
        values = {"purpose": f"run {number}", "dataset": "", "partition": None}
        event = {"kind": "gaussian", "noise_multiplier": 1.0 + number, "count": 1}
        ledger._book.write(lambda head, said={**values, "event": event}: (ledger._book.append("charge", said, head),))


def tamper(path: Path, *statements: str) -> None:
    """What somebody with a SQLite shell can do, once the triggers are out of the way."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DROP TRIGGER IF EXISTS entries_are_never_edited")
        connection.execute("DROP TRIGGER IF EXISTS entries_are_never_deleted")
        for statement in statements:
            connection.execute(statement)
        for trigger in re.findall("CREATE TRIGGER.*?END;", sqlite.SCHEMA, re.DOTALL):
            connection.execute(trigger)  # and back in their place


def rewrite(path: Path, change: Callable[[list[Any]], None]) -> None:
    """What somebody can do who knows the format: change the entries and compute every hash anew."""
    with closing(sqlite3.connect(path)) as connection:
        bodies = [json.loads(row[0]) for row in connection.execute("SELECT body FROM entries ORDER BY position")]
        identity = connection.execute("SELECT identity FROM meta").fetchone()[0]
    change(bodies)
    tamper(path, "DELETE FROM entries")
    last = store.origin_of(identity).hash
    with closing(sqlite3.connect(path)) as connection:
        for position, values in enumerate(bodies, start=1):
            body = store.canonical(values) if isinstance(values, dict) else json.dumps(values)
            last = store.digest(f"{last}\n{body}")
            connection.execute("INSERT INTO entries VALUES (?, ?, ?)", (position, body, last))
        connection.execute("UPDATE meta SET count = ?, head = ?", (len(bodies), last))
        connection.commit()


def refused(path: Path, **options: Any) -> str:
    """Opening must fail with one sentence that names the file; the sentence without the name is returned."""
    with pytest.raises(LedgerError) as error:
        Ledger(path, **options)
    sentence = str(error.value)
    assert "\n" not in sentence
    assert str(path) in sentence
    return sentence.replace(str(path), "")


TAMPERING = {
    "an event edited": ["UPDATE entries SET body = replace(body, '2.0', '9.0') WHERE position = 3"],
    "the ceiling edited": ["UPDATE entries SET body = replace(body, '3.0', '9.0') WHERE position = 1"],
    "a purpose edited": ["UPDATE entries SET body = replace(body, 'run 1', 'run 7') WHERE position = 3"],
    "a hash edited": ["UPDATE entries SET hash = 'f' || substr(hash, 2) || 'f' WHERE position = 4"],
    "an entry turned into bytes": ["UPDATE entries SET body = CAST(body AS BLOB) WHERE position = 3"],
    "deleted in the middle": ["DELETE FROM entries WHERE position = 3"],
    "deleted and closed up": [
        "DELETE FROM entries WHERE position = 3",
        "UPDATE entries SET position = position - 1 WHERE position > 3",
        "UPDATE meta SET count = 4",
    ],
    "the ceiling deleted": ["DELETE FROM entries WHERE position = 1"],
    "the first charge deleted": ["DELETE FROM entries WHERE position = 2"],
    "the last deleted": ["DELETE FROM entries WHERE position = 5"],
    "the last deleted and the count mended": [
        "DELETE FROM entries WHERE position = 5",
        "UPDATE meta SET count = 4",
    ],
    "all deleted": ["DELETE FROM entries", "UPDATE meta SET count = 0"],
    "reordered": [
        "UPDATE entries SET position = 99 WHERE position = 3",
        "UPDATE entries SET position = 3 WHERE position = 4",
        "UPDATE entries SET position = 4 WHERE position = 99",
    ],
    "one repeated": ["INSERT INTO entries SELECT 6, body, hash FROM entries WHERE position = 5"],
    "one slipped in front": ["INSERT INTO entries SELECT 0, body, hash FROM entries WHERE position = 5"],
    "the head edited": ["UPDATE meta SET head = 'f' || head"],
    "the count edited": ["UPDATE meta SET count = 4"],
    "the head deleted": ["DELETE FROM meta"],
    "the identity edited": ["UPDATE meta SET identity = 'another'"],
}


@pytest.mark.parametrize("kind", TAMPERING)
def test_tampering_shows(path: Path, kind: str) -> None:
    Ledger(path).close()
    tamper(path, *TAMPERING[kind])
    assert re.search(r"tampered with or corrupt, .*; restore it from a trusted copy", refused(path))


def test_a_new_ceiling_without_its_predecessor_shows(path: Path) -> None:
    """The ceiling raised by replacing its entry and its hash, everything behind it left alone."""
    with closing(sqlite3.connect(path)) as connection:
        identity = connection.execute("SELECT identity FROM meta").fetchone()[0]
        body = connection.execute("SELECT body FROM entries WHERE position = 1").fetchone()[0]
    body = body.replace("3.0", "9.0")
    new = store.digest(f"{store.origin_of(identity).hash}\n{body}")
    tamper(path, f"UPDATE entries SET body = '{body}', hash = '{new}' WHERE position = 1")
    assert "entry 2 does not match its hash" in refused(path)


def test_a_chain_that_forgot_its_predecessor_would_miss_a_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken variant of the chain, to show that the tests above rest on what they should."""
    full = store.digest
    monkeypatch.setattr(store, "digest", lambda text: full(text.split("\n")[-1]))
    with Ledger(tmp_path / "weak.db") as ledger:
        write_charges(ledger)
    tamper(
        tmp_path / "weak.db",
        "UPDATE entries SET position = 99 WHERE position = 2",
        "UPDATE entries SET position = 2 WHERE position = 3",
        "UPDATE entries SET position = 3 WHERE position = 99",
    )
    purposes = [entry.purpose for entry in Ledger(tmp_path / "weak.db").entries()]
    assert purposes == ["run 0", "run 2", "run 1", "run 3"]


@pytest.mark.parametrize("statement", ["UPDATE entries SET body = ''", "DELETE FROM entries"])
def test_a_slip_of_the_hand_is_stopped_by_the_file_itself(path: Path, statement: str) -> None:
    with (
        closing(sqlite3.connect(path)) as connection,
        pytest.raises(sqlite3.IntegrityError, match="append-only"),
    ):
        connection.execute(statement)
    assert len(Ledger(path).entries()) == 4


@pytest.mark.parametrize("kind", ["an event edited", "deleted in the middle", "the head edited"])
def test_tampering_with_an_open_ledger_shows(path: Path, kind: str) -> None:
    ledger = Ledger(path)
    tamper(path, *TAMPERING[kind])
    for look in (ledger.verify, ledger.entries, ledger.limits):
        with pytest.raises(LedgerError, match="tampered with"):
            look()


def test_a_ledger_cut_short_while_open_refuses_to_charge(path: Path) -> None:
    ledger = Ledger(path)
    with closing(sqlite3.connect(path)) as connection:
        fourth = connection.execute("SELECT hash FROM entries WHERE position = 4").fetchone()[0]
    tamper(path, "DELETE FROM entries WHERE position = 5", f"UPDATE meta SET count = 4, head = '{fourth}'")
    with pytest.raises(LedgerError, match="entry 5 is not the one that was read before"):
        ledger.charge(STEP)


def test_a_noted_head_shows_what_the_chain_alone_cannot(path: Path) -> None:
    """Who recomputes all hashes, or cuts the end off with care, passes; the head noted elsewhere tells."""
    with Ledger(path) as ledger:
        noted, earlier = ledger.head, ledger.entries()[0].head
        assert noted == Head(5, ledger.entries()[-1].hash)
        assert ledger.verify(noted) == ledger.verify(earlier) == noted
    rewrite(path, lambda bodies: bodies.pop())
    with Ledger(path) as ledger:
        assert len(ledger.entries()) == 3
        assert ledger.verify(earlier).count == 4
        with pytest.raises(LedgerError, match="entry 5 is not the one the noted head stands for"):
            ledger.verify(noted)
    rewrite(path, lambda bodies: bodies[1].update(purpose="nothing"))
    with Ledger(path) as ledger, pytest.raises(LedgerError, match="noted head"):
        ledger.verify(earlier)


def test_the_head_of_an_empty_ledger_can_be_noted(tmp_path: Path) -> None:
    with Ledger(tmp_path / "a.db") as ledger:
        noted = ledger.head
        assert noted.count == 0
        ledger.charge(STEP)
        ledger.verify(noted)
    with Ledger(tmp_path / "b.db") as another, pytest.raises(LedgerError, match="noted head"):
        another.verify(noted)


def unknown(**changes: Any) -> Callable[[list[Any]], None]:
    return lambda bodies: bodies[2].update(changes)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (unknown(event={"kind": "laplace", "scale": 1.0}), "kind='laplace': unknown kind of event"),
        (unknown(event={"kind": "gaussian", "noise_multiplier": 1.0, "colour": "red"}), "colour"),
        (unknown(event={"kind": "gaussian", "noise_multiplier": -1.0}), "noise_multiplier=-1.0"),
        (unknown(event={"kind": "gaussian", "noise_multiplier": "big"}), "gaussian"),
        (unknown(event={"kind": "gaussian", "noise_multiplier": 1.0, "count": 0.5}), "count=0.5"),
        (unknown(event={"kind": "non-private", "reason": "", "count": -5}), "count=-5"),
        (unknown(event="gaussian"), "of no known form"),
        (unknown(type="refund"), "type='refund'"),
        (unknown(refund=1.0), "unknown: refund"),
        (unknown(partition=""), "partition=''"),
        (unknown(time=5), "time=5"),
        (lambda bodies: bodies[2].pop("event"), "'event'"),
        (lambda bodies: bodies[0].update(epsilon=-1.0), "epsilon=-1.0"),
        (lambda bodies: bodies[0].update(dataset="a"), "dataset"),
        (lambda bodies: bodies.insert(2, ["a", "list"]), "entry 3 is not a JSON object"),
    ],
)
def test_what_is_unknown_is_refused_and_never_guessed(
    path: Path, change: Callable[[list[Any]], None], named: str
) -> None:
    rewrite(path, change)
    sentence = refused(path)
    assert named in sentence
    assert "entry" in sentence


# -- the file itself -----------------------------------------------------------------------------------------


def test_what_is_wrong_with_the_place_is_said(tmp_path: Path) -> None:
    assert "is a directory" in refused(tmp_path)
    assert "does not exist; create it first" in refused(tmp_path / "missing" / "budget.db")
    (tmp_path / "empty.db").touch()
    assert "empty, so not a ledger" in refused(tmp_path / "empty.db")
    (tmp_path / "letter.db").write_text("Dear reader, " * 500)
    assert "neither a ledger nor a SQLite file" in refused(tmp_path / "letter.db")
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refused(tmp_path / "pipe")
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE cats (name TEXT)")
    assert "not a ledger" in refused(tmp_path / "other.db")
    assert sorted(place.name for place in tmp_path.iterdir()) == ["empty.db", "letter.db", "other.db", "pipe"]


def test_an_unknown_format_is_refused(path: Path) -> None:
    tamper(path, "UPDATE meta SET format = 2")
    assert "format 2, known is 1; install a newer confide" in refused(path)


def test_a_wrong_timeout_is_refused(tmp_path: Path) -> None:
    for timeout in (-1, float("nan"), "5", True):
        with pytest.raises(ValueError, match="timeout="):
            Ledger(tmp_path / "budget.db", timeout=timeout)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_locked_ledger_can_be_read_but_not_charged(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        ledger = Ledger(path, timeout=0.2)
        assert len(ledger.entries()) == 4
        with pytest.raises(LedgerError, match=r"locked by another process; wait .* \(waited 0\.2 s\)"):
            ledger.charge(STEP)
        other.execute("ROLLBACK")
        assert ledger.limit(9.0, 1e-5).epsilon == 9.0


def test_a_ledger_locked_for_reading_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        assert "locked by another process; wait" in refused(path, timeout=0.2)


def test_a_ledger_moved_away_while_open_is_not_written_to(path: Path) -> None:
    """SQLite would go on writing into the file without a name, and the charge would be lost."""
    ledger = Ledger(path)
    shutil.move(path, path.with_name("elsewhere.db"))
    with pytest.raises(LedgerError, match="moved or replaced while open"):
        ledger.charge(STEP)
    shutil.copy(path.with_name("elsewhere.db"), path)
    with pytest.raises(LedgerError, match="moved or replaced while open"):
        ledger.charge(STEP)


def test_a_deleted_ledger_does_not_begin_anew(path: Path) -> None:
    ledger = Ledger(path)
    ledger.close()
    for name in ("budget.db", "budget.db-wal", "budget.db-shm"):
        path.with_name(name).unlink(missing_ok=True)
    with pytest.raises(LedgerError, match="cannot be opened"):
        ledger.charge(STEP)
    assert not path.exists()


def test_a_new_ledger_in_the_place_of_the_old_one_shows(path: Path) -> None:
    """A fresh budget slipped in while the file was closed."""
    ledger = Ledger(path)
    ledger.close()
    path.unlink()
    Ledger(path).close()
    with pytest.raises(LedgerError, match="another ledger stands in its place"):
        ledger.charge(STEP)


def test_the_path_may_be_odd_relative_or_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = "bud get?#%41ü&mode=memory.db"
    with Ledger(tmp_path / odd) as ledger:
        ledger.charge(STEP)
    assert [place.name for place in tmp_path.iterdir()] == [odd]
    (tmp_path / "link.db").symlink_to(odd)
    monkeypatch.chdir(tmp_path)
    relative = Ledger("link.db")
    monkeypatch.chdir("/")
    relative.charge(STEP)
    assert len(Ledger(tmp_path / odd).entries()) == 2
    assert repr(relative) == f"Ledger({str(tmp_path / odd)!r})"


def test_no_draft_is_left_behind(path: Path) -> None:
    assert [place.name for place in path.parent.iterdir()] == ["budget.db"]


def test_the_log_is_written_ahead_and_flushed(path: Path) -> None:
    ledger = Ledger(path)
    store = ledger._store
    assert isinstance(store, sqlite.SqliteStore)
    connection = store._connected()
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # 2 is FULL


def damaged_copies(original: bytes) -> Iterator[bytes]:
    size = len(original)
    for length in (1, 15, 100, 1000, 4096, 5000, size // 2, size - 4096, size - 1):
        yield original[:length]
    chance = random.Random(20)
    for _ in range(150):
        place = chance.randrange(size)
        yield original[:place] + bytes([original[place] ^ (1 << chance.randrange(8))]) + original[place + 1 :]


def test_a_damaged_file_is_refused_or_unharmed(path: Path) -> None:
    """A bit of padding may flip unnoticed; no entry may change or vanish, and no other error may come out."""
    original, whole, refusals = path.read_bytes(), Ledger(path).entries(), list[str]()
    for number, damaged in enumerate(damaged_copies(original)):
        place = path.with_name(f"damaged{number}.db")
        place.write_bytes(damaged)
        try:
            with Ledger(place, timeout=0) as ledger:
                assert ledger.entries() == whole
                assert ledger.ceiling is not None
                assert ledger.ceiling.epsilon == 3.0
        except LedgerError as error:
            refusals.append(str(error))
    assert len(refusals) > 9
    assert not any("\n" in refusal for refusal in refusals)


def charge_as_nobody(path: str) -> str:
    if os.getuid() == 0:
        os.setuid(65534)  # a mode does not stop the superuser
    try:
        Ledger(path).charge(STEP)
    except LedgerError as error:
        return str(error)
    return "charged"


@pytest.mark.parametrize(
    ("file_mode", "folder_mode", "said"),
    [
        (0o444, 0o777, "read-only; a charge must be written down"),
        (0o000, 0o777, "read-only; a charge must be written down"),
        (0o666, 0o555, "must"),
        (None, 0o555, "cannot be opened; the file and its folder must exist and be writable"),
    ],
)
def test_without_the_right_to_write_there_is_no_ledger(file_mode: int | None, folder_mode: int, said: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "budget.db"
        if file_mode is not None:
            Ledger(path).close()
            path.chmod(file_mode)
        os.chmod(folder, folder_mode)
        said_so = in_a_process(charge_as_nobody, str(path))
        os.chmod(folder, 0o777)
    assert said in said_so
    assert "\n" not in said_so


def read_as_nobody(path: str) -> int | str:
    if os.getuid() == 0:
        os.setuid(65534)
    try:
        with for_reading(Path(path)) as readable, Ledger(readable) as ledger:
            return len(ledger.entries())
    except LedgerError as error:
        return str(error)


@pytest.mark.parametrize("closed", [True, False])
def test_reading_needs_no_right_to_write(closed: bool) -> None:
    """Open or not, so with entries in the write-ahead file too. Catches a copy that leaves that file behind."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "budget.db"
        ledger = Ledger(path)
        for _ in range(3):
            ledger.charge(STEP)
        if closed:
            ledger.close()
        for file in Path(folder).iterdir():
            file.chmod(0o444)
        os.chmod(folder, 0o555)
        before = sorted(Path(folder).iterdir())
        assert in_a_process(read_as_nobody, str(path)) == 3
        assert sorted(Path(folder).iterdir()) == before
        path.chmod(0o000)
        assert "cannot be read" in str(in_a_process(read_as_nobody, str(path)))
        os.chmod(folder, 0o777)
        ledger.close()
