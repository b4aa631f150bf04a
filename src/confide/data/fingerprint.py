"""What the ledger may know of records: a name that follows from them, and a sketch by which copies are recognised.

    name = confide.data.registered_name(ledger, x, y, key=key, name="patients")
    data = confide.PrivateData(x, y, schema=schema, ledger=ledger, name=name)

The same records under two names are two budgets. `fingerprint` gives the very same records the very same name.
`registered_name` goes further: it keeps a sketch of the records in the ledger and finds the name under which they, or a
good part of them, are known already, whatever the order of rows and columns, the type of the numbers or the file. Given
the table as it was read, it finds them whatever facts they were encoded by, and with a column more or less too.

`PrivateData` does that by itself, with the key that `key_for` finds, for every ledger that outlives the process.

Both need a key that the curator keeps. A fingerprint is HMAC-SHA-256; a sketch is encrypted (AES-256-GCM, one size for
all tables), so whoever lacks the key learns nothing from the ledger, not even how many records there are. What a sketch
cannot know: records that were changed (scaled, noise added), and tables registered with another key.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from confide.data.cell_words import number_words, pieces_of
from confide.data.table import Table
from confide.data.trees import arrays_in
from confide.errors import Refusal
from confide.privacy.ledger.keys import SHORTEST_KEY, check_key
from confide.wording import KEY_VARIABLE

if TYPE_CHECKING:
    from confide.privacy.ledger import Ledger

Codes: TypeAlias = NDArray[np.uint64]

# So many of the smallest codes are kept: two tables that share one record in fifty agree in 20 of them, give or take 5.
KEPT = 1024
# Tables that share this part of their records are one data set: those records would be charged to two budgets.
SHARED = 0.02
# Of the columns so many codes are kept. A table with two columns of three in common has all its rows in common, too:
# a column counts if it holds three values or more, and then another table has the very same ones in it by design only.
KEPT_COLUMNS, SHARED_COLUMNS = 256, 2 / 3
# Records are worked on in pieces of so many numbers, 32 MB as codes.
_PIECE = 1 << 22
_ABOUT = b"confide sketch 1"
# A key is 32 bytes as confide makes it; what people would name by mistake is longer, or begins like these: pictures
# and packed files, whose bytes are as good as random.
LONGEST_KEY = 256
_PACKED = (
    b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"PK\x03\x04", b"\x1f\x8b\x08", b"BZh", b"\xfd7zXZ", b"(\xb5/\xfd", b"PAR1",
)  # fmt: skip
# A key that is written out, of 32 signs or more in base 16 or 64, has half of the sixteen digits at least.
_WRITTEN_OUT, LEAST_SIGNS = re.compile(rb"[0-9A-Za-z+/_-]{32,}={0,2}"), 8
_MAKE_ONE = "`confide ledger key FILE` makes one"
_NONE: Codes = np.zeros(0, dtype=np.uint64)


def fingerprint(x: Any, y: Any, key: bytes) -> str:
    """A name of 32 hexadecimal digits. `key`: at least 16 secret random bytes, such as `secrets.token_bytes(32)`."""
    code = hmac.new(check_key(key), digestmod=hashlib.sha256)
    for part in (*arrays_in(x), *arrays_in(y)):
        if part.dtype.hasobject:
            raise Refusal(f"x, y: hold {part.dtype} values; encode them first (confide.data.prepare)")
        # The layout goes in front, so that no two different pairs of arrays give the same bytes.
        code.update(f"{part.dtype.str}{part.shape}".encode())
        code.update(np.ascontiguousarray(part).tobytes())
    return f"records:{code.hexdigest()[:32]}"


def registered_name(ledger: Ledger, x: Any, y: Any, *, key: bytes, name: str, read: Table | None = None) -> str:
    """The name to charge these records under: the one they are known by, or else `name`, theirs from now on.

    read   the table that x and y were encoded from, if there is one
    """
    return register_sketch(ledger, Sketch.of(x, y, key, read), key, name)


def register_sketch(ledger: Ledger, mine: Sketch, key: bytes, name: str) -> str:
    """As `registered_name`, of records that were sketched before."""

    def tells_more(known: Sequence[bytes]) -> bool:
        return mine.tells_more([Sketch.unsealed(one, key) for one in known])

    return ledger.records.register(name, key_id(key), mine.sealed(key), _recogniser(mine, key), tells_more)


def known_name(ledger: Ledger, mine: Sketch, key: bytes) -> str | None:
    """The name that these records are known by; nothing is written."""
    return ledger.records.find(key_id(key), _recogniser(mine, key))


def _recogniser(mine: Sketch, key: bytes) -> Callable[[bytes], bool]:
    return lambda sealed: mine.is_of_the_same(Sketch.unsealed(sealed, key))


def key_for(ledger: Ledger, make: bool = True) -> bytes | None:
    """The curator's key for a ledger; `make`: a new one, if the ledger knows no records yet.

    That is the key it was opened with, the one in the file that $CONFIDE_KEY names, or the one at its usual place. A
    ledger that knows records by another key is refused: with a new one every copy would get a new budget.
    """
    records = ledger.records
    if records.key is not None:
        return records.key
    named = os.environ.get(KEY_VARIABLE)
    place, known = Path(named) if named else records.key_place, records.key_ids()
    if not (named or known or place.exists()):
        if not make:
            return None
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            make_key(place)
        except Refusal:
            if not place.exists():  # or another process was quicker
                raise
    if named or place.exists():
        key = read_key(place)
        if not known or key_id(key) in known:
            return key
    raise Refusal(
        f"key={str(place)!r}: not the one that {records.ledger} knows its data sets by; put that one there, or name it "
        f"by {KEY_VARIABLE}"
    )


def read_key(path: str | os.PathLike[str]) -> bytes:
    """The curator's key from its file, which must hold what nobody could guess and nothing that anybody else has."""
    where = f"key={str(path)!r}"
    try:
        with Path(path).open("rb") as file:
            content = file.read(LONGEST_KEY + 1)
    except OSError as error:
        raise Refusal(f"{where}: cannot be read ({error.strerror}); {_MAKE_ONE}") from None
    if not SHORTEST_KEY <= len(content) <= LONGEST_KEY:
        size = f"more than {LONGEST_KEY}" if len(content) > LONGEST_KEY else str(len(content))
        raise Refusal(f"{where}: is {size} bytes long, where a key has {SHORTEST_KEY} to {LONGEST_KEY}; {_MAKE_ONE}")
    if not _could_be_secret(content):
        raise Refusal(f"{where}: holds a text, a table or a picture, not random bytes, so it is no key; {_MAKE_ONE}")
    return content


def _could_be_secret(content: bytes) -> bool:
    """Random bytes, or one word of them in hexadecimal digits or base 64: what other files are made of is neither.

    Of random bytes, 16 read as text with a chance of 3 in a million and 32 never; half of them differ from all others.
    """
    if content.startswith(_PACKED):
        return False
    word = content.strip()
    if _WRITTEN_OUT.fullmatch(word):
        return len(set(word)) >= LEAST_SIGNS
    try:
        if all(sign.isprintable() or sign in "\t\r\n" for sign in content.decode("utf-8")):
            return False
    except UnicodeDecodeError:
        pass
    return 2 * len(set(content)) >= min(len(content), 256)


def make_key(path: str | os.PathLike[str]) -> None:
    """A new key in a new file that only its owner can read."""
    draft = f"{os.fspath(path)}.{secrets.token_hex(8)}.partial"
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)  # whole or not at all, and never over another
        finally:
            os.unlink(draft)
    except OSError as error:
        raise Refusal(f"key={str(path)!r}: cannot be made ({error.strerror}); give the path of a new file") from None


def key_id(key: bytes) -> str:
    """Tells sketches of one key from those of another, and nothing about the key."""
    return hmac.new(check_key(key), b"confide key id", hashlib.sha256).hexdigest()[:16]


# -- sketches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False, eq=False)
class Sketch:
    """What copies of a table are recognised by. The smallest codes, in order, of:

    encoded   its records as the method sees them
    read      its records as they were read, which no fact has touched; none where only arrays are there
    columns   its columns as they were read
    """

    encoded: Codes
    read: Codes
    columns: Codes

    @classmethod
    def of(cls, x: Any, y: Any, key: bytes, table: Table | None = None) -> Sketch:
        if table is None:
            return cls(sketch(x, y, key), _NONE, _NONE)
        return cls(sketch(x, y, key), *_as_read(table, key))

    @classmethod
    def as_read(cls, table: Table, key: bytes) -> Sketch:
        """Of a table that nothing has encoded yet."""
        return cls(_NONE, *_as_read(table, key))

    @classmethod
    def of_all(cls, parts: Sequence[Sketch]) -> Sketch:
        """Of a table whose parts were sketched one by one. Equal rows of two parts count as one."""
        encoded, read, columns = (
            np.unique(np.concatenate(codes)) for codes in zip(*(astuple(part) for part in parts), strict=True)
        )
        return cls(encoded[:KEPT], read[:KEPT], columns[:KEPT_COLUMNS])

    def is_of_the_same(self, other: Sketch) -> bool:
        """Whether the two tables share records, or all the rows of most of their columns."""
        if any(self._shares(rows, other) for rows in (self.encoded, self.read)):
            return True
        shared = len(np.intersect1d(self.columns, other.columns, assume_unique=True))
        return shared > 1 and resemblance(self.columns, other.columns, KEPT_COLUMNS) >= SHARED_COLUMNS

    def tells_more(self, others: Sequence[Sketch]) -> bool:
        """Whether these rows, as they were read, are in none of the others: next time they would be missed."""
        return len(self.read) > 0 and not any(self._shares(self.read, other) for other in others)

    @staticmethod
    def _shares(rows: Codes, other: Sketch) -> bool:
        # What was read here may have been given as arrays there.
        return any(resemblance(rows, theirs) >= SHARED for theirs in (other.encoded, other.read))

    def sealed(self, key: bytes) -> bytes:
        return sealed(self.encoded, key, self.read, self.columns)

    @classmethod
    def unsealed(cls, text: bytes, key: bytes) -> Sketch:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        try:
            plain = np.frombuffer(AESGCM(_encryption_key(key)).decrypt(text[:12], text[12:], _ABOUT), dtype="<u8")
        except (InvalidTag, ValueError):
            raise Refusal("key: does not open a sketch that names it; the ledger was tampered with") from None
        # A ledger of an earlier version holds the first of the three parts.
        starts = (0, KEPT + 1, 2 * (KEPT + 1))
        parts = [plain[start:] if start < len(plain) else np.zeros(1, dtype="<u8") for start in starts]
        return cls(*(part[1 : int(part[0]) + 1].astype(np.uint64) for part in parts))


def sealed(encoded: Codes, key: bytes, read: Codes = _NONE, columns: Codes = _NONE) -> bytes:
    """Encrypted, and of one size for tables of every size."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    parts = ((encoded, KEPT), (read, KEPT), (columns, KEPT_COLUMNS))
    padded = np.concatenate([_padded(codes, size) for codes, size in parts])
    nonce = secrets.token_bytes(12)
    return nonce + AESGCM(_encryption_key(key)).encrypt(nonce, padded.tobytes(), _ABOUT)


def _padded(codes: Codes, size: int) -> Codes:
    padded = np.full(size + 1, len(codes), dtype="<u8")
    padded[1 : len(codes) + 1] = codes
    return padded


def _as_read(table: Table, key: bytes) -> tuple[Codes, Codes]:
    """Codes of the records and of the columns as they were read; each cell is coded as in `sketch`."""
    secret = _secret(key)
    rows = np.zeros(table.rows, dtype=np.uint64)
    columns: list[Codes] = []
    for start, words in pieces_of(table, key):
        codes = _mixed(_mixed(words ^ secret[0]) ^ secret[1])
        rows[start : start + len(codes)] += codes.sum(axis=1, dtype=np.uint64)
        sums, least, most = codes.sum(axis=0, dtype=np.uint64), codes.min(axis=0), codes.max(axis=0)
        telling = ((codes != least) & (codes != most)).any(axis=0)
        # Of a block in several pieces, the columns are known piece by piece: in the same order of rows only.
        columns.append(_mixed(sums[telling] ^ np.uint64(start) ^ secret[3]))
    return (
        np.sort(_told_apart(_mixed(rows ^ secret[2])))[:KEPT],
        np.unique(np.concatenate([_NONE, *columns]))[:KEPT_COLUMNS],
    )


def sketch(x: Any, y: Any, key: bytes) -> Codes:
    """The smallest codes of the records, in order: a uniform sample of them that every other copy draws alike."""
    secret = _secret(key)
    codes = np.zeros(_length(x, y), dtype=np.uint64)
    for part in _tables(x, y):
        rows = max(1, _PIECE // max(1, part.shape[1]))
        for start in range(0, len(codes), rows):
            words = number_words(part[start : start + rows])
            codes[start : start + rows] += _mixed(_mixed(words ^ secret[0]) ^ secret[1]).sum(axis=1, dtype=np.uint64)
    return np.sort(_told_apart(_mixed(codes ^ secret[2])))[:KEPT]


def record_codes(x: Any, y: Any, key: bytes) -> Codes:
    """A keyed code of every record, in their order: equal for equal rows of the same columns, else equal by chance."""
    secret = _secret(key)
    codes = np.zeros(_length(x, y), dtype=np.uint64)
    first = 0
    for part in _tables(x, y):
        places = _mixed(np.arange(first, first + part.shape[1], dtype=np.uint64) ^ secret[0])
        rows = max(1, _PIECE // max(1, part.shape[1]))
        for start in range(0, len(codes), rows):
            words = number_words(part[start : start + rows])
            codes[start : start + rows] += _mixed(_mixed(words ^ places) ^ secret[1]).sum(axis=1, dtype=np.uint64)
        first += part.shape[1]
    return _mixed(codes ^ secret[2])


def table_codes(table: Table, key: bytes) -> Codes:
    """As `record_codes`, of the records of a table as they were read."""
    secret = _secret(key)
    codes = np.zeros(table.rows, dtype=np.uint64)
    first = width = 0
    for start, words in pieces_of(table, key):
        if start == 0:  # else these are further rows of the same columns
            first, width = first + width, words.shape[1]
        places = _mixed(np.arange(first, first + width, dtype=np.uint64) ^ secret[0])
        codes[start : start + len(words)] += _mixed(_mixed(words ^ places) ^ secret[1]).sum(axis=1, dtype=np.uint64)
    return _mixed(codes ^ secret[2])


def _secret(key: bytes) -> Codes:
    digest = hmac.new(check_key(key), b"confide record codes", hashlib.sha256).digest()
    return np.frombuffer(digest, dtype=np.uint64)


def _tables(x: Any, y: Any) -> list[NDArray[Any]]:
    """One for each tensor of a record, and the targets'."""
    return [_numbers(array) for part in (x, y) if part is not None for array in arrays_in(part)]


def _length(x: Any, y: Any) -> int:
    """How many records there are, in x as in y."""
    lengths = [len(part) for part in _tables(x, y)]
    if len(set(lengths)) > 1:
        raise Refusal(f"x, y: hold {' and '.join(str(length) for length in lengths)} records; must be as many")
    return lengths[0]


def _numbers(array: NDArray[Any]) -> NDArray[Any]:
    """A table of numbers, one row for each record."""
    if array.ndim == 0 or array.dtype.kind not in "biuf":
        raise Refusal(f"x, y: hold {array.dtype} values; encode them first (confide.data.prepare)")
    return array.reshape(len(array), math.prod(array.shape[1:]))


def _mixed(codes: Codes) -> Codes:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every bit of the result depends on every bit."""
    mixed = codes + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Codes = mixed ^ (mixed >> np.uint64(31))
    return result


def _told_apart(codes: Codes) -> Codes:
    """Equal records get different codes, the first, second, ... of them the same ones in every copy."""
    ordered = np.sort(codes)
    first = np.searchsorted(ordered, ordered, side="left")
    which = np.arange(len(ordered), dtype=np.uint64) - first.astype(np.uint64)
    return _mixed(ordered ^ (which * np.uint64(0xD1B54A32D192ED03)))


def resemblance(one: Codes, two: Codes, kept: int = KEPT) -> float:
    """An estimate of the number of records in both, as a part of those in either (Broder 1997)."""
    smallest = np.union1d(one, two)[:kept]
    if len(smallest) == 0:
        return 0.0
    shared = np.intersect1d(one, two, assume_unique=True)
    return float(np.isin(smallest, shared).sum() / len(smallest))


def _encryption_key(key: bytes) -> bytes:
    return hmac.new(check_key(key), b"confide sketch encryption", hashlib.sha256).digest()
