"""A head noted elsewhere shows what the chain alone cannot: older copies, cut ends, rewritten chains, forks."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from confide.errors import LedgerError, Refusal
from confide.privacy.events import GaussianEvent
from confide.privacy.ledger import Head, Ledger
from confide.privacy.ledger.keys import head_is_signed
from tests.privacy.ledger.test_file import rewrite, tamper

STEP = GaussianEvent(1.0)
KEY = bytes(range(32))


def charged(path: Path, witness: Path | None, times: int) -> None:
    with Ledger(path, witness=witness) as ledger:
        for _ in range(times):
            ledger.charge(STEP)


def restore_an_old_copy(path: Path, witness: Path) -> None:
    shutil.copy(path, path.with_suffix(".old"))
    charged(path, witness, 2)
    shutil.copy(path.with_suffix(".old"), path)


def cut_the_tail(path: Path, witness: Path) -> None:
    charged(path, witness, 2)
    with closing(sqlite3.connect(path)) as connection:
        kept = connection.execute("SELECT hash FROM entries WHERE position = 3").fetchone()[0]
    tamper(path, "DELETE FROM entries WHERE position > 3", f"UPDATE meta SET count = 3, head = '{kept}'")


def rewrite_the_chain(path: Path, witness: Path) -> None:
    rewrite(path, lambda bodies: bodies[0].update(purpose="nothing"))


def go_on_with_a_fork(path: Path, witness: Path) -> None:
    shutil.copy(path, path.with_suffix(".fork"))
    charged(path, witness, 2)
    charged(path.with_suffix(".fork"), None, 5)
    shutil.copy(path.with_suffix(".fork"), path)


def back_up_without_the_log(path: Path, witness: Path) -> None:
    ledger = Ledger(path, witness=witness)
    for _ in range(5):
        ledger.charge(STEP)
    copy = path.with_suffix(".backup").read_bytes() if path.with_suffix(".backup").exists() else path.read_bytes()
    ledger.close()
    path.write_bytes(copy)


def begin_anew(path: Path, witness: Path) -> None:
    path.unlink()
    charged(path, None, 9)


ATTACKS: list[Callable[[Path, Path], None]] = [
    restore_an_old_copy,
    cut_the_tail,
    rewrite_the_chain,
    go_on_with_a_fork,
    back_up_without_the_log,
    begin_anew,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_witness_sees_what_the_chain_cannot(tmp_path: Path, attack: Callable[[Path, Path], None]) -> None:
    path, witness = tmp_path / "budget.db", tmp_path / "elsewhere" / "witness"
    witness.parent.mkdir()
    charged(path, witness, 3)
    with Ledger(path) as before:
        noted = before.head
    attack(path, witness)
    with Ledger(path) as unseeing:  # by itself it is a consistent ledger
        unseeing.verify()
    with pytest.raises(LedgerError, match="witness"):
        Ledger(path, witness=witness)
    if attack in (rewrite_the_chain, begin_anew):
        with Ledger(path) as ledger, pytest.raises(LedgerError, match="noted head"):
            ledger.verify(noted)


def test_an_open_ledger_asks_its_witness_before_it_charges(tmp_path: Path) -> None:
    """Two copies of one ledger that share a witness: the second to charge is refused, and writes nothing."""
    path, fork, witness = tmp_path / "budget.db", tmp_path / "fork.db", tmp_path / "witness"
    charged(path, witness, 2)
    shutil.copy(path, fork)
    ours, theirs = Ledger(path, witness=witness), Ledger(fork, witness=witness)
    ours.charge(STEP)
    with pytest.raises(LedgerError, match="has seen 3 entries that this ledger does not hold"):
        theirs.charge(STEP)
    ours.charge(STEP)
    theirs.close()
    assert len(Ledger(fork).entries()) == 2


def test_a_ledger_and_its_witness_go_on_together(place: str, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    for _ in range(2):
        with Ledger(place, witness=witness) as one, Ledger(place, witness=witness) as two:
            one.limit(50.0, 1e-5)
            two.charge(STEP)
            one.charge(STEP)
    with Ledger(place, witness=witness) as ledger:
        ledger.verify()
        assert len(witness.read_text().splitlines()) == ledger.head.count == 6


def test_a_crash_in_the_middle_of_a_line_is_no_fault(tmp_path: Path) -> None:
    path, witness = tmp_path / "budget.db", tmp_path / "witness"
    charged(path, witness, 3)
    witness.write_text(witness.read_text()[:-30])
    charged(path, witness, 2)
    charged(path, witness, 1)
    with Ledger(path, witness=witness) as ledger:
        assert ledger.verify().count == 6


def test_a_witness_cut_short_while_in_use_is_refused(tmp_path: Path) -> None:
    path, witness = tmp_path / "budget.db", tmp_path / "witness"
    ledger = Ledger(path, witness=witness)
    ledger.charge(STEP)
    ledger.charge(STEP)
    witness.write_text(witness.read_text().splitlines(keepends=True)[0])
    with pytest.raises(LedgerError, match="cut short"):
        ledger.charge(STEP)
    witness.unlink()
    with pytest.raises(LedgerError, match="vanished"):
        ledger.charge(STEP)


def test_what_is_no_witness_is_refused(tmp_path: Path) -> None:
    charged(tmp_path / "a.db", tmp_path / "a", 1)
    with pytest.raises(LedgerError, match="about another ledger"):
        Ledger(tmp_path / "b.db", witness=tmp_path / "a")
    (tmp_path / "letter").write_text("Dear reader,\n")
    with pytest.raises(LedgerError, match="no witness wrote"):
        Ledger(tmp_path / "c.db", witness=tmp_path / "letter")
    with (
        Ledger(tmp_path / "d.db", witness=tmp_path / "missing" / "w") as ledger,
        pytest.raises(LedgerError, match="not to be used"),
    ):
        ledger.charge(STEP)


def test_heads_are_signed_with_the_curators_key(tmp_path: Path) -> None:
    path, witness = tmp_path / "budget.db", tmp_path / "witness"
    with Ledger(path, witness=witness, key=KEY) as ledger:
        ledger.charge(STEP)
        record = ledger.head_record()
        head = Head(record["count"], record["hash"])
        assert head == ledger.head
        assert head_is_signed(KEY, record["identity"], head, record["signature"])
        assert not head_is_signed(KEY, record["identity"], Head(2, head.hash), record["signature"])
        assert not head_is_signed(KEY[::-1], record["identity"], head, record["signature"])
        with pytest.raises(TypeError, match="key would travel"):
            ledger.__reduce__()
    charged(path, witness, 1)  # somebody without the key
    with pytest.raises(LedgerError, match="not signed with this key"):
        Ledger(path, witness=witness, key=KEY)
    with Ledger(path) as unsigned:
        assert unsigned.head_record()["signature"] is None


def test_a_head_is_printed_and_read(tmp_path: Path) -> None:
    head = Head(3, "0f" * 32)
    assert Head.read(f" {head}\n") == head
    for wrong in ("", "3", "x:" + "0f" * 32, "3:0f", f"-1:{'0f' * 32}", f"3:{'0F' * 32}"):
        with pytest.raises(Refusal, match="head="):
            Head.read(wrong)
