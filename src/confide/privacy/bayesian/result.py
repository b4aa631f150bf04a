"""What a Bayesian accountant hands out: both numbers of a run, and nothing before the user has said so.

An estimate is computed from records without protection, so it stays on the trusted side: `Confidential` shows,
prints, copies and serialises nothing. `release` hands it out on the user's word, `noisy` against payment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from confide.errors import Refusal
from confide.privacy.accountants.bound import DATA_DEPENDENT, Bound
from confide.privacy.events import PureEvent
from confide.wording import Withheld


class Trusted(Withheld):
    """Holds what was computed from records: hidden from print, copy, pickle and JSON."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(hidden: computed from private records)"

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: computed from private records, so it cannot be written, copied or pickled; "
            "release(acknowledge=...) or noisy(...) of the estimate hands out what may leave"
        )

    __reduce_ex__ = __copy__ = __deepcopy__ = __iter__ = __float__ = _refuse


@dataclass(frozen=True)
class Attack:
    """Right guesses, at even odds, of whether a record was used.

    naive  1 / (1 + e^-epsilon), called P(A) by the paper
    tight  from the whole profile, (1 + delta(0)) / 2; None where the rule has no profile

    For Bayesian numbers `tight` is the mean over records drawn like these. `naive` then holds only outside an event
    of probability delta, over records as well as noise, and is not comparable with the DP one.
    """

    naive: float
    tight: float | None


@dataclass(frozen=True)
class BayesianEstimate:
    """A data-dependent epsilon beside the DP epsilon of the same run; neither stands without the other.

    rule        "product", "hoelder", "averaged" or "free variational inference"
    bayesian    the estimate; its kind is "data-dependent", its note says what it assumes
    dp          the sound number for any record whatever, at the same delta
    attack      "dp" and "bayesian"
    disclosure  how the estimate came to leave the trusted side
    """

    rule: str
    bayesian: Bound
    dp: Bound
    delta: float
    attack: dict[str, Attack] = field(hash=False)
    disclosure: str = "trusted side only"

    def __post_init__(self) -> None:
        if self.bayesian.kind != DATA_DEPENDENT:
            raise Refusal(f"kind={self.bayesian.kind!r}: a Bayesian number is {DATA_DEPENDENT!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; an infinite epsilon is None."""
        bounds = {"pld": self.dp, "bayesian": self.bayesian}
        return {
            "rule": self.rule,
            "delta": self.delta,
            "epsilon": {name: _finite(bound.epsilon) for name, bound in bounds.items()},
            "kind": {name: bound.kind for name, bound in bounds.items()},
            "note": {name: bound.note for name, bound in bounds.items()},
            "attacker": {
                name: {"naive_accuracy": attack.naive, "accuracy": attack.tight} for name, attack in self.attack.items()
            },
            "disclosure": self.disclosure,
        }


Charge = Callable[[PureEvent], object]
Payer = Callable[[float, float, Charge], BayesianEstimate]


class Confidential(Trusted):
    """A Bayesian estimate on the trusted side."""

    def __init__(self, estimate: BayesianEstimate, payer: Payer | None = None) -> None:
        self.__estimate = estimate
        self.__payer = payer

    @property
    def dp(self) -> Bound:
        """The DP number of the run, which depends on no record."""
        return self.__estimate.dp

    def release(self, acknowledge: str) -> BayesianEstimate:
        """The estimate as it is, unprotected: `acknowledge` is the user's reason, and stays with it."""
        if not (isinstance(acknowledge, str) and acknowledge.strip()):
            raise Refusal(
                f"acknowledge={acknowledge!r}: say in a sentence why a number computed from records may leave"
            )
        found = self.__estimate
        disclosure = f"released without protection on the user's word: {acknowledge.strip()}"
        return BayesianEstimate(found.rule, found.bayesian, found.dp, found.delta, found.attack, disclosure)

    def noisy(self, epsilon: float, charge: Charge, failure: float = 1e-6) -> BayesianEstimate:
        """An estimate paid for with noise: pure `epsilon`-DP for every record that it was computed from.

        The number of those records is public, so this holds for replace-one adjacency, and the event says so.

        charge   called with the event before anything is released, such as
                 `lambda event: ledger.charge(event, "Bayesian estimate", "hold-out")`
        failure  probability that noise or chance make the released number too small; counted in delta
        """
        if not (math.isfinite(epsilon) and epsilon > 0):
            raise Refusal(f"epsilon={epsilon}: must be a finite number > 0")
        if self.__payer is None:
            raise Refusal(
                f"rule={self.__estimate.rule!r}: one record can change this estimate without bound, so no noise covers "
                "it; use averaged, or release(acknowledge=...)"
            )
        return self.__payer(epsilon, failure, charge)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
