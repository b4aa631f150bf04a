"""What the ledger may know of records: a name that follows from them, and a sketch by which copies are recognised.

    name = confide.data.registered_name(ledger, x, y, key=key, name="patients")
    data = confide.PrivateData(x, y, schema=schema, ledger=ledger, name=name)

The same records under two names are two budgets. `fingerprint` gives the very same records the very same name.
`registered_name` goes further: it keeps a sketch of the records in the ledger and finds the name under which they, or a
good part of them, are known already, whatever the order of rows and columns, the type of the numbers or the file.

`PrivateData` does that by itself, with the key that `key_for` finds, for every ledger that outlives the process.

Both need a key that the curator keeps. A fingerprint is HMAC-SHA-256; a sketch is encrypted (AES-256-GCM, one size for
all tables), so whoever lacks the key learns nothing from the ledger, not even how many records there are. What a sketch
cannot know: records that were changed (scaled, noise added, encoded otherwise), and tables registered with another key.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from confide.data.trees import arrays_in
from confide.errors import Refusal
from confide.privacy.ledger.keys import check_key

if TYPE_CHECKING:
    from confide.privacy.ledger import Ledger

Codes: TypeAlias = NDArray[np.uint64]

# So many of the smallest codes are kept: two tables that share one record in fifty agree in 20 of them, give or take 5.
KEPT = 1024
# Tables that share this part of their records are one data set: those records would be charged to two budgets.
SHARED = 0.02
# Records are worked on in pieces of so many numbers, 32 MB as codes.
_PIECE = 1 << 22
_ABOUT = b"confide sketch 1"
# Names the file of the curator's key; for a team whose ledger is kept by a server.
KEY_VARIABLE = "CONFIDE_KEY"


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


def registered_name(ledger: Ledger, x: Any, y: Any, *, key: bytes, name: str) -> str:
    """The name to charge these records under: the one they are known by, or else `name`, theirs from now on."""
    mine = sketch(x, y, key)

    def same(sealed: bytes) -> bool:
        return resemblance(mine, unsealed(sealed, key)) >= SHARED

    return ledger.records.register(name, key_id(key), sealed(mine, key), same)


def known_name(ledger: Ledger, x: Any, y: Any, *, key: bytes) -> str | None:
    """The name that these records are known by; nothing is written."""
    mine = sketch(x, y, key)
    return ledger.records.find(key_id(key), lambda sealed: resemblance(mine, unsealed(sealed, key)) >= SHARED)


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
    """The curator's key from its file."""
    try:
        return check_key(Path(path).read_bytes())
    except OSError as error:
        raise Refusal(
            f"key={str(path)!r}: cannot be read ({error.strerror}); `confide ledger key FILE` makes one"
        ) from None


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


def sketch(x: Any, y: Any, key: bytes) -> Codes:
    """The smallest codes of the records, in order: a uniform sample of them that every other copy draws alike."""
    secret = _secret(key)
    codes = np.zeros(_length(x, y), dtype=np.uint64)
    for part in _tables(x, y):
        rows = max(1, _PIECE // max(1, part.shape[1]))
        for start in range(0, len(codes), rows):
            words = _words(part[start : start + rows])
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
            words = _words(part[start : start + rows])
            codes[start : start + rows] += _mixed(_mixed(words ^ places) ^ secret[1]).sum(axis=1, dtype=np.uint64)
        first += part.shape[1]
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


def _words(rows: NDArray[Any]) -> Codes:
    """Numbers as words. `sketch` adds up their codes, so that the order of columns does not matter.

    Numbers are compared in single precision, in which a copy in double precision or in whole numbers reads the same.
    """
    with np.errstate(over="ignore"):
        single = rows.astype(np.float32) + np.float32(0)  # minus zero becomes zero
    single[np.isnan(single)] = np.nan  # one of the many
    words: Codes = single.view(np.uint32).astype(np.uint64)
    return words


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


def resemblance(one: Codes, two: Codes) -> float:
    """An estimate of the number of records in both, as a part of those in either (Broder 1997)."""
    smallest = np.union1d(one, two)[:KEPT]
    if len(smallest) == 0:
        return 0.0
    shared = np.intersect1d(one, two, assume_unique=True)
    return float(np.isin(smallest, shared).sum() / len(smallest))


def sealed(codes: Codes, key: bytes) -> bytes:
    """Encrypted, and of one size for tables of every size."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    padded = np.full(KEPT + 1, len(codes), dtype="<u8")
    padded[1 : len(codes) + 1] = codes
    nonce = secrets.token_bytes(12)
    return nonce + AESGCM(_encryption_key(key)).encrypt(nonce, padded.tobytes(), _ABOUT)


def unsealed(text: bytes, key: bytes) -> Codes:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        plain = np.frombuffer(AESGCM(_encryption_key(key)).decrypt(text[:12], text[12:], _ABOUT), dtype="<u8")
    except (InvalidTag, ValueError):
        raise Refusal("key: does not open a sketch that names it; the ledger was tampered with") from None
    return plain[1 : int(plain[0]) + 1].astype(np.uint64)


def _encryption_key(key: bytes) -> bytes:
    return hmac.new(check_key(key), b"confide sketch encryption", hashlib.sha256).digest()
