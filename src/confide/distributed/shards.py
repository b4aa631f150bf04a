"""No record on two ranks: it would be clipped twice, and move a release by twice the bound that was charged for.

Disjoint by construction are slices of a table that every rank holds (`own_slice`) and row groups of files that every
rank sees (`confide.data.streaming.from_parquet(shard=ranks)`), which are compared with each other as well: a file may
hold rows of another (`confide.data.overlap`). Parts that users give rank by rank are compared
(`check_apart`): every record becomes a keyed code of 64 bits, all codes are exchanged, and parts that share records are
refused. The key is fresh, so codes say nothing to whoever sees them later; they stay among the ranks of one owner.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from confide.data.fingerprint import SHARED, fingerprint, record_codes
from confide.errors import DataError, Refusal

if TYPE_CHECKING:
    from confide.distributed.ranks import Ranks

MOST_COMPARED = 1 << 25
"""Records of all ranks together whose codes are exchanged: 256 MB on every rank."""


def own_slice(ranks: Ranks, x: Any, y: Any) -> tuple[Any, Any]:
    """This rank's slice of a table that is the same on every rank."""
    key = ranks.told(secrets.token_bytes(32))
    name = ranks.together(lambda: fingerprint(x, y, key))
    ranks.agree({"records (whole=True needs the same table on every rank)": name})
    x, y = np.asarray(x), np.asarray(y)
    mine = slice(len(x) * ranks.rank // ranks.size, len(x) * (ranks.rank + 1) // ranks.size)
    return x[mine], y[mine]


def check_apart(ranks: Ranks, x: Any, y: Any) -> None:
    """Refuse parts of which two share more than a few records, on every rank alike.

    Equal rows may be different people, so that a few of them are let through, and the statement says who vouches.
    """
    key = ranks.told(secrets.token_bytes(32))
    own = ranks.together(lambda: record_codes(x, y, key))
    total = sum(int(size) for size in ranks.everybody(str(len(own)).encode(), "sizes"))
    if total > MOST_COMPARED:
        raise Refusal(
            f"x: {ranks.size} ranks hold more records than are compared one by one; write them as Parquet and give "
            "confide.data.from_parquet(..., shard=ranks), whose shares are disjoint by construction"
        )
    parts = [np.frombuffer(codes, dtype=np.uint64) for codes in ranks.everybody(own.tobytes(), "codes")]
    for second in range(ranks.size):
        for first in range(second):
            if _share_records(parts[first], parts[second]):
                raise DataError(
                    f"x: ranks {first} and {second} hold the same records, and a record on two ranks would count "
                    "twice; give every rank its own. Where equal rows are different people, give the whole table to "
                    "each with whole=True, or Parquet files to from_parquet(..., shard=ranks)"
                )


def _share_records(one: NDArray[np.uint64], two: NDArray[np.uint64]) -> bool:
    """Whether more than a few rows of either are found in the other."""
    return any(np.isin(a, b).sum() > SHARED * len(a) for a, b in ((one, two), (two, one)))
