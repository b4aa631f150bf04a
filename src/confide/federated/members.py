"""What parties say of themselves, all of it public, and what they must say alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from confide.data.schema import Schema
from confide.errors import BudgetExceeded, Refusal
from confide.federated.party import LONGEST_COMPLAINT, PROTOCOL
from confide.federated.question import MOST_PARAMETERS
from confide.federated.wire import Message
from confide.mechanism.secure_sum import Shares

LONGEST_WORD = 200  # signs of what a party vouches for; a statement repeats it


@dataclass(frozen=True)
class Member:
    """The public facts of one party.

    own     its name among its peers; None where it has none
    peers   the parties of its secure sum, and how many of them may be missing or collude
    """

    schema: Schema
    shape: tuple[int, ...]
    least_noise: float
    vouched: tuple[str, ...]
    seeded: bool
    own: str | None = None
    peers: Mapping[str, Any] | None = None

    @property
    def records(self) -> int:
        return self.schema.records or 0


def member_of(name: str, reply: Message) -> Member:
    """From a party's own words."""
    try:
        facts = reply.table("facts")
        if facts["protocol"] != PROTOCOL:
            raise Refusal(f"speaks version {_in_words(facts['protocol'], 20)}; this is {PROTOCOL}")
        schema, shape = Schema.from_dict(facts["schema"]), _shape(facts["shape"])
        vouched = tuple(_in_words(said, LONGEST_WORD) for said in facts["vouched"])
        peers = dict(facts["peers"]) if facts["peers"] is not None else None
        own = None if peers is None else str(peers.pop("own"))
        found = Member(schema, shape, float(facts["least_noise"]), vouched, bool(facts["seeded"]), own, peers)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        said = _in_words(error, LONGEST_COMPLAINT) if isinstance(error, Refusal) else "its facts cannot be read"
        raise Refusal(f"party {name}: {said}") from None
    if not found.records:
        raise Refusal(f"party {name}: declares no number of records")
    return found


def _shape(given: Any) -> tuple[int, ...]:
    if not all(type(size) is int and size > 0 for size in given) or math.prod(given) > MOST_PARAMETERS:
        raise Refusal(f"shape: must be sizes of at most {MOST_PARAMETERS} numbers in all")
    return tuple(given)


def _in_words(said: Any, longest: int) -> str:
    """What a party says, as it can be shown: nobody else's terminal is told what to do."""
    return "".join(sign if sign.isprintable() else " " for sign in str(said)[:longest])


def agreed_facts(members: Mapping[str, Member]) -> Schema:
    """The facts that all parties declare alike, with the records of all of them."""
    (first, one), *others = members.items()
    for name, other in others:
        odd = [key for key, value in _told(one).items() if _told(other)[key] != value]
        if odd:
            raise Refusal(f"party {name}: declares other facts than {first} ({', '.join(odd)}); use one facts file")
    return replace(one.schema, records=sum(member.records for member in members.values()), sources=())


def _told(member: Member) -> dict[str, Any]:
    """Facts that must be the same everywhere, for they decide how a record is encoded."""
    facts = {key: value for key, value in member.schema.to_dict().items() if key not in ("records", "sources")}
    columns = [{key: value for key, value in column.items() if key != "source"} for column in facts["columns"]]
    return {**facts, "columns": columns, "shape of a record": list(member.shape)}


def shares_of(members: Mapping[str, Member]) -> Shares:
    """How the parties share noise out, once all of them say it alike and are the ones that are asked."""
    for name, member in members.items():
        if member.peers is None:
            raise Refusal(f"party {name}: was given no peers, and so answers under trust='nobody' alone")
        if member.own != name:
            raise Refusal(f"party {name}: is {member.own!r} among its peers; call it by that name")
        if member.peers != next(iter(members.values())).peers or sorted(members) != member.peers["parties"]:
            raise Refusal(f"party {name}: knows other peers than these, or other numbers; use one peers file")
    agreed = next(iter(members.values())).peers
    assert agreed is not None
    return Shares(len(members), agreed["missing"], agreed["colluding"])


def raise_refusal(name: str, reply: Message) -> None:
    """What a party refuses is an error of the one who asked, with the party's name."""
    said = reply.header.get("refused")
    if said is None:
        return
    words = f"party {name}: {_in_words(said, LONGEST_COMPLAINT)}"
    budget = reply.header.get("budget")
    if isinstance(budget, list) and len(budget) == 3 and all(_is_number(value) for value in budget):
        after, limit, delta = (math.inf if value is None else float(value) for value in budget)
        raise BudgetExceeded(words, after, limit, delta)
    raise Refusal(words)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, float) or (type(value) is int and abs(value) < 1e18)
