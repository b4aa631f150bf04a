"""Every error that confide raises on purpose, and its warning.

A `Refusal` is one sentence for the user: it names the argument, its value and the way out, and nothing was spent. The
command line exits with 2 on any of them and with 3 on `BudgetExceeded`; what is neither was not foreseen.
"""

from __future__ import annotations

from pathlib import Path


class Refusal(ValueError):  # noqa: N818 (the name says what happened)
    """What was asked for cannot be done, told in one sentence."""


class CommandError(Refusal):
    """Bad arguments or bad input of the command line; the sentence names the option."""


class DataError(Refusal):
    """Bad input, told in one sentence to the data curator, before anything is charged or released.

    Training records are not refused one by one: what does not fit counts for nothing, by a public rule. Where it may
    depend on records all the same (a file that is no table, facts that were to be read off the data), the message is
    for the curator's own eyes. It names the argument or the column and the way out, and never the value of a cell.
    """


class UnclippableError(Refusal):
    """A module whose per-record gradients do not exist or cannot be found."""


class UnsupportedEvents(Refusal):
    """No sound bound is known for these events under this adjacency; the message names the way out."""


class RanksDisagree(Refusal):
    """Processes that make one run together were not started alike; nothing is charged for what they differ in."""


class LedgerError(Refusal):
    """The ledger cannot be opened, read or written, or its entries were tampered with."""


class StepsClaimed(LedgerError):  # noqa: N818 (the name says what happened)
    """Another attempt has claimed these steps of a run; pay for them again. `highest`: the last one claimed."""

    def __init__(self, message: str, highest: int) -> None:
        super().__init__(message, highest)
        self.highest = highest

    def __str__(self) -> str:
        return str(self.args[0])


class BudgetExceeded(RuntimeError):  # noqa: N818 (the name says what happened)
    """The charge would exceed the ceiling; nothing was written and nothing may be read."""

    def __init__(self, message: str, epsilon_after: float, limit: float, delta: float) -> None:
        super().__init__(message, epsilon_after, limit, delta)  # all of them, so that it survives pickling
        self.epsilon_after = epsilon_after
        self.limit = limit
        self.delta = delta

    def __str__(self) -> str:
        return str(self.args[0])


class BudgetExceededInSearch(BaseException):
    """The budget ran out within scikit-learn's cross-validation, which makes a NaN score of every Exception.

    This is none, so that it reaches the user. Its cause is the BudgetExceeded itself.
    """


class RankLost(RuntimeError):  # noqa: N818 (the name says what happened)
    """Another process of the run is gone or does not answer; what was charged stays charged."""


class PartyLost(RuntimeError):  # noqa: N818 (the name says what happened)
    """Too few parties of a federation replied; nothing was released, and what they charged stays charged."""


class Unfinished(RuntimeError):  # noqa: N818 (the name says what happened)
    """Saving failed after the posterior was written; `kept` is the directory that holds it."""

    def __init__(self, message: str, kept: Path) -> None:
        super().__init__(message)
        self.kept = kept


class PrivacyWarning(UserWarning):
    """Something beside the boundary reads records, or weakens what a statement would suggest."""


class ColumnsLeftOut(UserWarning):
    """A frame has columns that nobody declared; the fit does without them."""


class MisplacedMethod(UserWarning):
    """A method was named for data that it is not made for; the fit goes on, and another would be better."""


class CallbackWarning(UserWarning):
    """A callback of the user's raised; the run is paid for and goes on without it."""


class CuratorNote(UserWarning):
    """What somebody who may see the records should know of them. It decides nothing and stands in no artefact."""


class NothingToLearn(CuratorNote):
    """The note that no record can answer: a fit would be paid for and be noise.

    Whoever may see the records can have it stopped, `warnings.simplefilter("error", NothingToLearn)`. confide does not
    stop it by itself: whether a run exists would tell of a record.
    """


class SpeedWarning(UserWarning):
    """Something runs in a way that is right and slow; the message says what made it so."""
