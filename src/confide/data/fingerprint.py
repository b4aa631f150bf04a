"""Fingerprint: a name for the ledger that follows from the records and tells nothing about them.

    data = confide.PrivateData(x, y, schema=schema, ledger=ledger, name=confide.data.fingerprint(x, y, key))

The same records under two names are two budgets; under their fingerprint they are one. It is HMAC-SHA-256 under a key
that the curator keeps: whoever lacks the key can neither test a guess about the records nor tell it from random digits,
as long as SHA-256 holds. It does show whether two entries of a ledger are about the very same records, in one order.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import numpy as np

from confide.errors import Refusal

SHORTEST_KEY = 16


def fingerprint(x: Any, y: Any, key: bytes) -> str:
    """A name of 32 hexadecimal digits. `key`: at least 16 secret random bytes, such as `secrets.token_bytes(32)`."""
    if not isinstance(key, bytes) or len(key) < SHORTEST_KEY:
        size = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise Refusal(f"key: is {size}; needs at least {SHORTEST_KEY} secret bytes, such as secrets.token_bytes(32)")
    code = hmac.new(key, digestmod=hashlib.sha256)
    for part in (np.asarray(x), np.asarray(y)):
        if part.dtype.hasobject:
            raise Refusal(f"x, y: hold {part.dtype} values; encode them first (confide.data.prepare)")
        # The layout goes in front, so that no two different pairs of arrays give the same bytes.
        code.update(f"{part.dtype.str}{part.shape}".encode())
        code.update(np.ascontiguousarray(part).tobytes())
    return f"records:{code.hexdigest()[:32]}"
