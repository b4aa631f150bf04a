"""Accountants over the same events, and the one number that confide stands by.

sound_epsilon(events, delta)   the PLD bound: what is claimed
epsilons(events, delta)        every accountant's answer, each saying what it is worth
"""

from __future__ import annotations

from collections.abc import Iterable

from confide.errors import UnsupportedEvents
from confide.privacy.accountants.bound import (
    APPROXIMATION,
    DATA_DEPENDENT,
    EXACT,
    UPPER_BOUND,
    Accountant,
    Bound,
    known,
    not_applicable,
)
from confide.privacy.accountants.classic import GDP, ZCDP, AdvancedComposition, clt_mu, zcdp_epsilon
from confide.privacy.accountants.pld import PLD
from confide.privacy.accountants.rdp import RDP
from confide.privacy.events import Adjacency, Event

__all__ = [
    "APPROXIMATION",
    "DATA_DEPENDENT",
    "EXACT",
    "GDP",
    "PLD",
    "RDP",
    "UPPER_BOUND",
    "ZCDP",
    "Accountant",
    "AdvancedComposition",
    "Bound",
    "UnsupportedEvents",
    "accountants",
    "clt_mu",
    "epsilons",
    "sound_delta",
    "sound_epsilon",
    "zcdp_epsilon",
]


def accountants() -> tuple[Accountant, ...]:
    """Every accountant, the sound and tight one first."""
    return (PLD(), RDP(), GDP(), ZCDP(), AdvancedComposition())


def epsilons(events: Iterable[Event], delta: float, adjacency: Adjacency = "add-remove") -> dict[str, Bound]:
    """Each accountant's answer by its name; one that does not apply says why.

    Raises UnsupportedEvents where it is the sound bound, the first one, that is missing.
    """
    listed = known(events)
    sound, *others = accountants()
    answers = {sound.name: sound.epsilon(listed, delta, adjacency)}
    for accountant in others:
        try:
            answers[accountant.name] = accountant.epsilon(listed, delta, adjacency)
        except UnsupportedEvents as error:
            answers[accountant.name] = not_applicable(str(error))
    return answers


def sound_epsilon(events: Iterable[Event], delta: float, adjacency: Adjacency = "add-remove") -> float:
    """The epsilon that is claimed: a true upper bound, infinity for a release without protection.

    Raises UnsupportedEvents where no sound bound is known.
    """
    epsilon = PLD().epsilon(events, delta, adjacency).epsilon
    assert epsilon is not None
    return epsilon


def sound_delta(events: Iterable[Event], epsilon: float, adjacency: Adjacency = "add-remove") -> float:
    """An upper bound on delta(epsilon); at epsilon = 0 the advantage of the best membership attack."""
    return PLD().delta(events, epsilon, adjacency)
