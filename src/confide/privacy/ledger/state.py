"""What the entries of a ledger add up to: accounts by data set, runs, the ceiling in force, known records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from confide.errors import Refusal
from confide.privacy.events import Event, merged
from confide.privacy.filters import falls_short
from confide.privacy.ledger.budget import Account
from confide.privacy.ledger.entries import Entry, Limit, Steps
from confide.privacy.ledger.keys import Seal
from confide.privacy.ledger.names import check_name, key_of, looks_like


@dataclass
class PaidRun:
    """What one run has paid, and the steps that attempts of it have claimed.

    used     what those steps release; never more of anything than was paid for
    taken    stretches of steps, in order and apart: one from step 1 on, but where several processes share what was
             paid for by one charge, and the second of them came first
    """

    paid: Account = field(default_factory=Account)
    taken: list[tuple[int, int]] = field(default_factory=list)
    used: tuple[Event, ...] = ()

    @property
    def claimed(self) -> int:
        """The highest step that an attempt has claimed, 0 if none."""
        return self.taken[-1][1] if self.taken else 0

    def is_taken(self, steps: Steps) -> bool:
        """Whether one of the steps was claimed before."""
        return any(first <= steps.last and steps.first <= last for first, last in self.taken)

    def take(self, entry: Entry) -> None:
        if entry.event is not None:
            self.paid.add(entry.event, None, entry.plan)
        if entry.steps is not None:
            self._join(entry.steps.first, entry.steps.last)
        if entry.uses:
            self.used = merged((*self.used, *entry.uses))

    def shortfall(self, events: Sequence[Event], paid_now: Sequence[Event]) -> str:
        """Which of the events would be released more often than they were paid for; empty where none."""
        paid = _counts((*self.paid.events(), *paid_now))
        used, wanted = _counts(self.used), _counts(events)
        for event, count in wanted.items():
            if used.get(event, 0) + count > paid.get(event, 0):
                return f"{count} x {event} ({paid.get(event, 0)} paid, {used.get(event, 0)} used before)"
        return ""

    def _join(self, first: int, last: int) -> None:
        touching = [one for one in self.taken if one[0] <= last + 1 and first <= one[1] + 1]
        whole = (min([first, *(one[0] for one in touching)]), max([last, *(one[1] for one in touching)]))
        self.taken = sorted([*(one for one in self.taken if one not in touching), whole])


@dataclass(frozen=True)
class Known:
    """Records that the ledger has seen before: the data set's name, and their sketch, which only its key opens."""

    dataset: str
    key_id: str
    sketch: bytes


@dataclass
class State:
    """The sum of the entries taken so far."""

    limit: Limit | None = None
    seal: Seal | None = None
    known: list[Known] = field(default_factory=list)
    _accounts: dict[str, Account] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)
    _parts: dict[str, dict[str, str]] = field(default_factory=dict)
    _runs: dict[str, PaidRun] = field(default_factory=dict)

    def take(self, entry: Entry) -> None:
        """One entry more, in the order of the chain."""
        if entry.limit is not None:
            self._take_limit(entry, entry.limit)
        if entry.event is not None:
            self._named(entry.dataset)
            self._accounts.setdefault(key_of(entry.dataset), Account()).add(
                entry.event, self.part(entry.dataset, entry.partition), entry.plan
            )
        if entry.sum is not None:
            self.account(entry.dataset).note(self.part(entry.dataset, entry.partition), entry.sum)
        if entry.run is not None:
            self._runs.setdefault(entry.run, PaidRun()).take(entry)
        if entry.sketch is not None:
            self._named(entry.dataset)
            self.known.append(Known(entry.dataset, entry.key_id, entry.sketch))

    def _take_limit(self, entry: Entry, limit: Limit) -> None:
        if self.needs_key(limit, entry.seal is not None):
            assert self.seal is not None
            if not self.seal.signed(entry.signature, limit.text_to_sign(entry.before)):
                raise Refusal(f"entry {entry.position} loosens the ceiling without the key it was set with")
        if limit != self.limit:  # a tighter one too: its figure may have been chosen by what was released
            for account in self._accounts.values():
                account.before_ceiling = account.plans
        self.limit = limit
        self.seal = entry.seal or self.seal

    def needs_key(self, limit: Limit, new_seal: bool = False) -> bool:
        """Whether only the key of the ceiling in force may put this one in its place."""
        return self.seal is not None and (new_seal or self.limit is None or not limit.within(self.limit))

    # -- names -----------------------------------------------------------------------------------------------

    def check_names(self, dataset: str, partition: str | None) -> None:
        """Refuses a name that is new here and could be taken for one that is not."""
        self._check("dataset", dataset, self._names)
        if partition is not None:
            self._check("partition", partition, self._parts.get(key_of(dataset), {}))

    @staticmethod
    def _check(argument: str, name: str, known: dict[str, str]) -> None:
        if key_of(name) in known:
            return
        check_name(argument, name)
        other = looks_like(name, known.values())
        if other is not None:
            raise Refusal(
                f"{argument}={name!r}: looks like {other!r}, which the ledger knows and which has its own budget; use "
                "that name, or one that cannot be taken for it"
            )

    def _named(self, dataset: str) -> None:
        self._names.setdefault(key_of(dataset), dataset)

    def part(self, dataset: str, partition: str | None) -> str | None:
        """The key of a partition's name, which is known from now on."""
        if partition is None:
            return None
        key = key_of(partition)
        self._parts.setdefault(key_of(dataset), {}).setdefault(key, partition)
        return key

    def datasets(self) -> tuple[str, ...]:
        """As they were first written, those that were charged."""
        return tuple(self._names[key] for key in self._accounts)

    def account(self, dataset: str) -> Account:
        return self._accounts.get(key_of(dataset), Account())

    def check_sums(self) -> None:
        """Works out every sum that was written down again, and refuses one that is too small. Takes its time."""
        for account in self._accounts.values():
            for part in account.parts.values():
                if any(falls_short(part.log, found) for found in part.log.noted):
                    raise Refusal("a sum was written down that is less than what its charges come to")

    def run(self, identity: str) -> PaidRun | None:
        return self._runs.get(identity)


def _counts(events: Sequence[Event]) -> dict[Event, int]:
    return {replace(event, count=1): event.count for event in merged(events)}
