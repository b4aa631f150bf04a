"""A data set's keyed hash: the same records meet the same budget, and nothing else follows from it."""

from __future__ import annotations

import numpy as np
import pytest

import confide
from confide.data import fingerprint

KEY, OTHER = b"k" * 32, b"o" * 32
X, Y = np.arange(12.0).reshape(6, 2), np.array([0, 1, 0, 1, 0, 1])


def test_follows_the_records_and_the_key() -> None:
    """A hash of the shape, of the first rows or without the key would repeat itself here."""
    changed, labels = X.copy(), Y.copy()
    changed[-1, -1] += 1e-12
    labels[-1] = 0
    names = [
        fingerprint(X, Y, KEY),
        fingerprint(changed, Y, KEY),
        fingerprint(X, labels, KEY),
        fingerprint(X, Y, OTHER),
    ]
    assert len(set(names)) == 4
    assert fingerprint(X.copy(order="F"), Y, KEY) == names[0]
    assert fingerprint(X.reshape(3, 4), Y, KEY) != names[0]


def test_the_same_records_meet_the_same_ceiling() -> None:
    schema = confide.Schema(classes=2, records=6)
    ledger = confide.Ledger()
    ledger.limit(epsilon=1.0, delta=1e-5)
    plan = confide.plan(epsilon=0.9, delta=1e-5, records=6, batch=3, steps=2)
    for name in (fingerprint(X, Y, KEY), fingerprint(X + 1, Y, KEY)):
        data = confide.PrivateData(X, Y, schema=schema, ledger=ledger, name=name)
        data.charge(plan.blocks)
    again = confide.PrivateData(X, Y, schema=schema, ledger=ledger, name=fingerprint(X, Y, KEY))
    with pytest.raises(confide.BudgetExceeded):
        again.charge(plan.blocks)


@pytest.mark.parametrize(
    ("x", "key", "complaint"), [(X, b"short", "5 bytes"), (X, "k" * 32, "str"), (["a", None], KEY, "object")]
)
def test_unusable_arguments_are_refused(x: object, key: bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        fingerprint(x, Y, key)
