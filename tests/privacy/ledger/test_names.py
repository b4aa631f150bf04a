"""Names that look alike get one budget or a refusal; records that are known get their own name."""

from __future__ import annotations

import base64
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from confide.data.fingerprint import KEPT, key_id, make_key, read_key, registered_name, resemblance, sealed, sketch
from confide.data.table import Table
from confide.errors import BudgetExceeded, LedgerError, Refusal
from confide.privacy.events import GaussianEvent
from confide.privacy.ledger import Ledger, names

STEP = GaussianEvent(10.0)
KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))

# Ways in which "Patients-2024 Oslo" was written by somebody who wanted another budget.
LOOKALIKES = [
    "patients-2024 oslo",
    "PATIENTS-2024 OSLO",
    " Patients-2024  Oslo ",
    "Patients-2024\u00a0Oslo",
    "Patients\u20112024 Oslo",
    "Patients\u22122024 Oslo",
    "P\u200batients-2024 Oslo",
    "Patients-2024 Oslo\u2060",
    "Patients-2024 \u00adOslo",
    "P\u0430tients-2024 Oslo",  # Cyrillic a
    "Patients-2024 \u039fslo",  # Greek capital O
    "\uff30atients-2024 Oslo",  # full width
    "Patients-2O24 Osl0",
    "Patlents-2024 Oslo",
    "Patients_2024.Oslo",
    "Pat\u0131ents-2024 Oslo",  # dotless i
    "Patients-2024 O\u0455lo",  # Cyrillic dze
    "Pati\u0435nts-2024 Oslo",  # Cyrillic ie
    "P\u00e1tients-2024 Oslo",
    "Patients-\uff12\uff10\uff12\uff14 Oslo",
    "\u202ePatients-2024 Oslo",
    "Patients-2024 Oslo\ufe0f",
    "Patients-2024\u3000Oslo",
    "Patients-2024 Os1o",
    "Patients-2024\tOslo",
]


@pytest.mark.parametrize("lookalike", LOOKALIKES)
@pytest.mark.parametrize("what", ["dataset", "partition"])
def test_a_lookalike_is_the_same_name_or_refused(lookalike: str, what: str) -> None:
    """As the name of a partition it would turn a sum into a maximum."""
    ledger = Ledger()
    ledger.charge(STEP, count=20, **{what: "Patients-2024 Oslo"})  # type: ignore[arg-type]
    name = "Patients-2024 Oslo" if what == "dataset" else ""
    before = ledger.spent(1e-5, name)
    with suppress(Refusal):
        ledger.charge(STEP, count=20, **{what: lookalike})  # type: ignore[arg-type]
        assert ledger.spent(1e-5, name) > 1.2 * before
    assert ledger.datasets() == (name,)


def test_names_taken_literally_would_be_many_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken variant, as it was: every way of writing it has a budget of its own."""
    monkeypatch.setattr("confide.privacy.ledger.state.key_of", lambda name: name)
    monkeypatch.setattr("confide.privacy.ledger.state.check_name", lambda argument, name: None)
    monkeypatch.setattr("confide.privacy.ledger.state.looks_like", lambda name, known: None)
    ledger = Ledger()
    for name in ("Patients-2024 Oslo", *LOOKALIKES):
        ledger.charge(STEP, dataset=name)
    assert len(ledger.datasets()) == 1 + len(LOOKALIKES)


@pytest.mark.parametrize(
    "name", ["", "train.csv", "données", "患者データ", "пациенты", "ασθενείς", "환자 자료", "records:0f3a", "a b-c_d"]
)
def test_an_honest_name_is_taken(name: str) -> None:
    ledger = Ledger()
    for other in ("visits 2023", "visits 2024", "adult", "digits", "north", "site 7"):
        ledger.charge(STEP, dataset=other)
    ledger.charge(STEP, dataset=name)
    assert name in ledger.datasets()


def test_what_an_old_ledger_holds_is_read_whatever_its_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as before, Ledger(tmp_path / "old.db") as old:
        before.setattr("confide.privacy.ledger.state.check_name", lambda argument, name: None)
        before.setattr("confide.privacy.ledger.state.looks_like", lambda name, known: None)
        for name in LOOKALIKES:
            old.charge(STEP, dataset=name)
    with Ledger(tmp_path / "old.db") as ledger:
        assert len(ledger.entries()) == len(LOOKALIKES)
        assert len(ledger.datasets()) < len(LOOKALIKES)
        ledger.charge(STEP, dataset=ledger.datasets()[0])


def test_a_refusal_names_the_name_it_was_taken_for() -> None:
    ledger = Ledger()
    ledger.charge(STEP, dataset="modern")
    with pytest.raises(Refusal, match=r"dataset='modem': looks like 'modern', which the ledger knows"):
        ledger.charge(STEP, dataset="modem")
    with pytest.raises(Refusal, match="mixes cyrillic and latin letters"):
        names.check_name("dataset", "p\u0430tients")
    with pytest.raises(Refusal, match=r"U\+200B, which cannot be seen"):
        names.check_name("dataset", "pati\u200bents")


# -- ceilings under a passphrase -----------------------------------------------------------------------------


def test_only_its_passphrase_raises_a_ceiling(place: str) -> None:
    with Ledger(place) as ledger:
        ledger.limit(1.0, 1e-5, passphrase="correct horse")
        for looser in ((2.0, 1e-5), (1.0, 1e-4), (0.5, 1e-5, "replace-one")):
            with pytest.raises(LedgerError, match="with its passphrase only"):
                ledger.limit(*looser)  # type: ignore[arg-type]
            with pytest.raises(Refusal, match="not the one this ceiling was set with"):
                ledger.limit(*looser, passphrase="battery staple")  # type: ignore[arg-type, misc]
        ledger.limit(0.5, 1e-5)  # tightening needs none, and the key stays
        with pytest.raises(LedgerError, match="with its passphrase only"):
            ledger.limit(1.0, 1e-5)
        ledger.limit(3.0, 1e-5, passphrase="correct horse")
    with Ledger(place) as again:
        assert again.ceiling is not None
        assert again.ceiling.epsilon == 3.0
        with pytest.raises(LedgerError, match="with its passphrase only"):
            again.limit(4.0, 1e-5)
        again.verify()


@pytest.mark.parametrize("forged", [{}, {"signature": "00" * 64}, {"signature": "an old one"}, {"seal": "their own"}])
def test_a_ceiling_raised_by_hand_is_found_out(place: str, forged: dict[str, str]) -> None:
    """Appended with the right hashes by somebody who can write: every reader sees that the key did not sign it."""
    from confide.privacy.ledger.keys import Seal

    with Ledger(place) as ledger:
        ledger.limit(1.0, 1e-5, passphrase="correct horse")
        ledger.limit(2.0, 1e-5, passphrase="correct horse")
        old = ledger.limits()[-1].signature
        values: dict[str, object] = {"epsilon": 9.0, "delta": 1e-5, "adjacency": "add-remove"}
        if "seal" in forged:
            theirs = Seal.made_from("battery staple")
            values["seal"] = [theirs.salt, theirs.public]
        elif forged:
            values["signature"] = old if "old" in forged["signature"] else forged["signature"]
        ledger._book.write(lambda head: (ledger._book.append("limit", values, head),))
        with pytest.raises(LedgerError, match="loosens the ceiling without the key"):
            ledger.charge(STEP)
    with pytest.raises(LedgerError, match="loosens the ceiling without the key"):
        Ledger(place)


# -- known records -------------------------------------------------------------------------------------------


def table(rows: int = 3000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(seed)
    return chance.normal(size=(rows, 6)).astype(np.float32), chance.integers(0, 3, rows)


X, Y = table()
ORDER = np.random.default_rng(1).permutation(len(X))
COPIES = {
    "in another order": (X[ORDER], Y[ORDER]),
    "in double precision": (X.astype(np.float64), Y.astype(np.float64)),
    "with other whole numbers": (X, Y.astype(np.int8)),
    "with dropped rows": (X[: len(X) // 2], Y[: len(X) // 2]),
    "with nine of ten rows dropped": (X[::10], Y[::10]),
    "with more rows": (np.vstack([X, table(3000, 5)[0]]), np.concatenate([Y, table(3000, 5)[1]])),
    "with columns in another order": (X[:, ::-1], Y),
    "with the target among the columns": (np.column_stack([Y, X]), None),
    "in another layout": (np.asfortranarray(X), Y),
    "as lists": (X.tolist(), Y.tolist()),
    "with every row twice": (np.vstack([X, X]), np.concatenate([Y, Y])),
    "with minus zeros": (np.where(X == 0, -0.0, X), Y),
}


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_is_charged_under_its_own_name(copy: str, place: str) -> None:
    with Ledger(place) as ledger:
        ledger.limit(1.0, 1e-5)
        first = registered_name(ledger, X, Y, key=KEY, name="patients")
        ledger.charge(GaussianEvent(4.0), dataset=first)
        x, y = COPIES[copy]
        again = registered_name(ledger, x, y, key=KEY, name="something else")
        assert (first, again) == ("patients", "patients")
        with pytest.raises(BudgetExceeded):
            ledger.charge(GaussianEvent(4.0), dataset=again, count=20)


def test_a_table_is_recognised_in_a_file_and_on_a_server_by_another_process(place: str) -> None:
    """As it was read, whatever the facts: the second ledger knows what the first has written."""
    read = Table(columns={"a": X[:, 0], "b": X[:, 1]}, target="y", labels=Y.astype(float))
    with Ledger(place) as ledger:
        assert registered_name(ledger, X, Y, key=KEY, name="patients", read=read) == "patients"
    turned = Table(columns={"q": X[::-1, 1], "p": X[::-1, 0]}, target="z", labels=Y[::-1].astype(float))
    with Ledger(place) as ledger:
        assert registered_name(ledger, X / 9, Y, key=KEY, name="visits", read=turned) == "patients"
        assert ledger.records.find(key_id(OTHER_KEY), lambda sketch: True) is None


def test_other_records_keep_their_own_name() -> None:
    ledger = Ledger()
    assert registered_name(ledger, X, Y, key=KEY, name="patients") == "patients"
    assert registered_name(ledger, *table(3000, 9), key=KEY, name="visits") == "visits"
    assert registered_name(ledger, X, Y, key=OTHER_KEY, name="another curator's") == "another curator's"
    with pytest.raises(Refusal, match="looks like 'visits'"):
        registered_name(ledger, *table(3000, 10), key=KEY, name="vislts")
    assert [row["kind"] for row in ledger.to_rows()] == ["dataset"] * 3


def test_a_sketch_tells_nothing_without_its_key() -> None:
    """One size for tables of every size, other bytes every time, and no code of a record in them."""
    small, large = sketch(X[:5], Y[:5], KEY), sketch(X, Y, KEY)
    assert (len(small), len(large)) == (5, KEPT)
    texts = [sealed(small, KEY), sealed(large, KEY), sealed(large, KEY)]
    assert len({len(text) for text in texts}) == 1
    assert len(set(texts)) == 3
    assert not any(code.tobytes() in texts[1] for code in large)
    assert resemblance(large, sketch(X, Y, OTHER_KEY)) == 0


def test_the_estimate_is_that_of_minhash() -> None:
    for part in (0.1, 0.5, 0.9):
        rows = int(part * len(X))
        assert resemblance(sketch(X, Y, KEY), sketch(X[:rows], Y[:rows], KEY)) == pytest.approx(part, abs=0.06)


def test_a_key_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    assert len(read_key(tmp_path / "key")) == 32
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    with pytest.raises(Refusal, match="cannot be made"):
        make_key(tmp_path / "key")
    with pytest.raises(Refusal, match="cannot be read"):
        read_key(tmp_path / "none")
    with pytest.raises(Refusal, match="encode them first"):
        sketch(np.array([["a"]]), None, KEY)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"secret",
        b"age,income\n20,1000\n30,2000\n40,3000\n",
        "Größe;Ort\n1,5;Köln\n1,7;Łódź\n".encode(),
        b"correct horse battery staple, and more of it",
        b"0" * 64,
        b"\x89PNG" + bytes(range(100, 140)),
        bytes(64),
        bytes(range(256)) * 2,
    ],
)
def test_what_anybody_has_is_no_key(content: bytes, tmp_path: Path) -> None:
    """A table, a text, a picture or a pattern in the place of a key would hide nothing."""
    place = tmp_path / "key"
    place.write_bytes(content)
    with pytest.raises(Refusal, match=r"^key=.*`confide ledger key FILE` makes one$"):
        read_key(place)


def test_random_bytes_are_a_key_however_they_are_written(tmp_path: Path) -> None:
    source = np.random.default_rng(5)
    for size in (24, 32, 64, 256):
        for _ in range(50):
            secret = source.bytes(size)
            forms = (secret, secret.hex().encode(), base64.b64encode(secret) + b"\n") if size == 32 else (secret,)
            for form in forms:
                (tmp_path / "key").write_bytes(form)
                assert read_key(tmp_path / "key") == form
