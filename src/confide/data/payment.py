"""Payment: what facts that were learnt privately have cost, kept with them wherever they go."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from confide.errors import DataError
from confide.privacy.events import ADJACENCIES


@dataclass(frozen=True)
class Payment:
    """The price of learning facts from the same records, beside whatever is learnt with these facts later.

    entry   hash of the ledger's last entry behind the charge, where it can be looked up; "" without a ledger
    """

    epsilon: float
    delta: float
    adjacency: str = "add-remove"
    entry: str = ""

    def __post_init__(self) -> None:
        for name, most in (("epsilon", math.inf), ("delta", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < most:
                raise DataError(
                    f"learnt: {name}={value!r}: must be a number above 0{'' if most > 1 else ' and below 1'}"
                )
        if self.adjacency not in ADJACENCIES:
            raise DataError(f"learnt: adjacency={self.adjacency!r}: must be one of {', '.join(ADJACENCIES)}")
        if not isinstance(self.entry, str) or not all(sign in "0123456789abcdef" for sign in self.entry):
            raise DataError("learnt: entry: must be the hash of an entry of the ledger, in hexadecimal digits")

    @classmethod
    def of(cls, values: Any) -> Payment:
        """From what a file says."""
        if isinstance(values, cls):
            return values
        known = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or not {"epsilon", "delta"} <= set(values) <= known:
            raise DataError(f"learnt: must be a table of {', '.join(sorted(known))}; epsilon and delta are needed")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def words(self) -> str:
        """As a clause of a privacy statement."""
        where = f", ledger entry {self.entry[:16]}" if self.entry else ""
        return (
            f"facts learnt privately from the same records before this run cost epsilon {self.epsilon:g} at delta "
            f"{self.delta:g} ({self.adjacency}{where}), which comes on top of this number"
        )
