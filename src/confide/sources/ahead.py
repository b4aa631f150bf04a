"""Runs of several sources on the same records, paid for by one charge before the first of them starts.

    purse = pay_ahead(data, parts_of_all_runs, purpose="compare sgld, sgd")
    fit(method, module, PaidAhead(data, purse), plan)

All runs are one run in the ledger, and its steps are numbered through: whoever charges takes up the next steps under
that name. A budget that does not suffice for all of them refuses all of them.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from confide._native.process import mark
from confide.errors import Refusal
from confide.privacy.events import Event
from confide.sources.base import Part, Receipt, Source, Stretch, Wrapper, priced


class Purse:
    """What was paid ahead under one name in the ledger, and how much of it is left; in a fork of the process, nothing.

    run      the name
    claimed  number of the last step under that name that is somebody else's; steps after it are this purse's
    """

    def __init__(self, run: str, parts: Sequence[Part], claimed: int = 0) -> None:
        self.run = run
        self._left = _units(parts)
        self._claimed = claimed
        self._mark = mark()

    def take(self, parts: Sequence[Part]) -> bool:
        """Use up what these parts cost; false, and nothing is used, where not all of it was paid for."""
        if self._mark != mark():
            return False
        wanted = _units(parts)
        if any(self._left[event] < count for event, count in wanted.items()):
            return False
        self._left -= wanted
        return True

    def next_steps(self, parts: Sequence[Part]) -> tuple[int, int]:
        """The numbers of the steps that answer these parts, after all that were claimed before."""
        first = self._claimed + 1
        self._claimed += sum(answers for _, answers in parts)
        return first, self._claimed


def _units(parts: Sequence[Part]) -> Counter[Event]:
    """How often each event is paid for, or asked: a mechanism of the same price is as good as the one named."""
    counted: Counter[Event] = Counter()
    for event in priced(parts):
        counted[replace(event, count=1)] += event.count
    return counted


def pay_ahead(source: Source, parts: Sequence[Part], purpose: str) -> Purse:
    """Charge for all parts, or for none of them; they can be had through `PaidAhead`."""
    run = secrets.token_hex(16)
    source.charge(parts, purpose, Stretch(run, None, ()))
    return Purse(run, parts)


class PaidAhead(Wrapper):
    """A source that charges nothing for what the purse holds; anything else it charges as usual.

    It stands right around the source that holds the records, or around another of the same price: wrappers that charge
    something beside go around it.
    """

    def __init__(self, source: Source, purse: Purse) -> None:
        super().__init__(source)
        self._purse = purse

    def charge(self, parts: Sequence[Part], purpose: str = "", stretch: Stretch | None = None) -> Receipt:
        if stretch is None or not self._purse.take(parts):
            return self._source.charge(parts, purpose, stretch)
        steps = self._purse.next_steps((*stretch.parts, *stretch.beside))
        claimed = Stretch(self._purse.run, steps, stretch.parts, stretch.beside)
        return self._source.charge((), purpose, claimed).stating(self._source.price(parts))

    def take_up(self, parts: Sequence[Part], purpose: str = "") -> Receipt:
        """A receipt for some of what the purse holds, outside of a run."""
        return self.charge(parts, purpose, Stretch(self._purse.run, None, tuple(parts)))

    def check_resumable(self) -> None:
        raise Refusal("checkpoint: a run that was paid for with others cannot be taken up alone; fit it without one")
