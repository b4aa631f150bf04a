"""Releases that are private only up to a slack in delta: counted by every accountant, never forgotten."""

from __future__ import annotations

import itertools
import math

import pytest

from confide.errors import UnsupportedEvents
from confide.privacy.accountants import PLD, RDP, ZCDP, AdvancedComposition, accountants, sound_delta, sound_epsilon
from confide.privacy.accountants.bound import slack
from confide.privacy.events import GaussianEvent, PureEvent, event_from_dict, event_to_dict
from confide.privacy.interpretation import attacker
from confide.privacy.selection import Repetitions, selection_epsilon
from confide.privacy.statement import Privacy

STEPS = GaussianEvent(2.0, "poisson", 0.01, 100)


def exact_delta(releases: list[tuple[float, float]], epsilon: float) -> float:
    """Of the worst (e, s)-private releases: randomised response, and with probability s the truth itself."""
    outcomes = []
    for one, missed in releases:
        likely, unlikely = (1 - missed) / (1 + math.exp(-one)), (1 - missed) / (1 + math.exp(one))
        outcomes.append([(missed, 0.0), (0.0, missed), (likely, unlikely), (unlikely, likely)])
    both = ((math.prod(p for p, _ in way), math.prod(q for _, q in way)) for way in itertools.product(*outcomes))
    return sum(max(0.0, p - math.exp(epsilon) * q) for p, q in both)


@pytest.mark.parametrize("releases", [[(0.5, 1e-4)], [(0.5, 1e-4)] * 3, [(0.2, 1e-3), (1.0, 0.0), (0.3, 1e-5)]])
def test_slack_adds_up_and_covers_the_worst_releases(releases: list[tuple[float, float]]) -> None:
    """A slack that is left out, or counted once for several releases, would fall below the exact delta."""
    events = [PureEvent(one, slack=missed) for one, missed in releases]
    total = sum(missed for _, missed in releases)
    for epsilon in (0.0, 0.4, 1.2, 5.0):
        exact = exact_delta(releases, epsilon)
        assert exact * (1 - 1e-9) <= sound_delta(events, epsilon) <= exact * (1.001 + total) + 1e-6
    assert slack(events, "add-remove") == pytest.approx(total)


@pytest.mark.parametrize("accountant", [PLD(), RDP(), ZCDP(), AdvancedComposition()])
def test_every_accountant_takes_the_slack_off_delta(accountant: PLD | RDP | ZCDP | AdvancedComposition) -> None:
    loose, pure = PureEvent(0.5, count=4, slack=1e-6), PureEvent(0.5, count=4)
    found = accountant.epsilon([loose, STEPS], 1e-5).epsilon
    assert found == accountant.epsilon([pure, STEPS], 1e-5 - 4e-6).epsilon
    assert found is not None
    assert found > (accountant.epsilon([pure, STEPS], 1e-5).epsilon or math.inf)


def test_below_the_slack_nothing_is_claimed() -> None:
    loose = [PureEvent(0.5, slack=1e-6)]
    for accountant in accountants():
        assert accountant.epsilon(loose, 1e-7).epsilon == math.inf
        assert accountant.epsilon(loose, 0.0).epsilon == math.inf
    assert "No privacy is claimed at delta = 1e-07: it is below" in Privacy(tuple(loose), 1e-7).statement()
    assert sound_epsilon(loose, 1e-6) == 0.5


def test_replacing_a_record_is_two_changes_and_more_slack() -> None:
    """P <= e^e (e^e Q + s) + s."""
    loose = [PureEvent(0.5, slack=1e-6)]
    missed = 1e-6 * (1 + math.exp(0.5))
    assert math.isinf(sound_epsilon(loose, 0.999 * missed, "replace-one"))
    assert sound_epsilon(loose, 1.001 * missed, "replace-one") == pytest.approx(1.0)
    same = [PureEvent(0.5, "replace-one", slack=1e-6)]
    assert sound_epsilon(same, 1e-6, "replace-one") == 0.5
    with pytest.raises(UnsupportedEvents, match="replace-one"):
        slack(same, "add-remove")


def test_the_attacker_is_given_the_slack() -> None:
    pure, loose = attacker([PureEvent(0.5)], 0.5), attacker([PureEvent(0.5, slack=1e-3)], 0.5)
    assert loose.advantage == pytest.approx(pure.advantage + 1e-3, abs=1e-6)
    assert loose.tpr_at_fpr[0.01] > pure.tpr_at_fpr[0.01]
    assert attacker([PureEvent(0.5, count=2000, slack=1e-3)], 0.5).advantage == 1.0


def test_the_best_of_several_runs_with_slack_is_refused() -> None:
    with pytest.raises(UnsupportedEvents, match="slack"):
        selection_epsilon([[PureEvent(0.5, slack=1e-9)]], 1e-5, Repetitions(3.0))


def test_slack_is_kept_and_checked() -> None:
    loose = PureEvent(0.5, slack=1e-9)
    assert event_from_dict(event_to_dict(loose)) == loose
    assert event_from_dict({"kind": "pure", "epsilon": 0.5, "adjacency": "add-remove", "count": 1}) == PureEvent(0.5)
    for wrong in (-1e-9, 1.0, math.nan):
        with pytest.raises(ValueError, match="slack="):
            PureEvent(0.5, slack=wrong)
