"""The statement: the JSON of `confide account`, and a paragraph that never claims more than the bounds."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import FrozenInstanceError

import pytest

from confide.errors import UnsupportedEvents
from confide.privacy.events import GaussianEvent, NonPrivateEvent, PureEvent
from confide.privacy.statement import Privacy

MNIST = GaussianEvent(1.3, "poisson", 0.0042666667, 3516)


def test_the_dictionary_of_the_command_line() -> None:
    values = json.loads(json.dumps(Privacy((MNIST,), 1e-5).to_dict(), allow_nan=False))
    assert values["delta"] == 1e-5
    assert values["adjacency"] == "add-remove"
    assert values["sampling"] == "poisson"
    assert values["epsilon"]["pld"] == pytest.approx(0.8646, abs=1e-4)
    assert values["epsilon"]["rdp"] == pytest.approx(0.9546, abs=1e-3)
    assert values["epsilon"]["gdp_clt"] == pytest.approx(0.8345, abs=1e-4)
    assert set(values["epsilon"]) == set(values["kind"])
    assert values["kind"]["pld"] == "upper bound"
    assert values["kind"]["gdp_clt"] == "approximation"
    attack = values["attacker"]
    assert attack["advantage"] == pytest.approx(0.0902, abs=1e-4)
    assert attack["accuracy"] == pytest.approx(0.5451, abs=1e-4)
    assert attack["naive_accuracy"] == pytest.approx(0.7036, abs=1e-4)
    assert attack["tpr_at_fpr_0.01"] == pytest.approx(0.0181, abs=1e-4)


def test_what_does_not_apply_is_null_with_its_reason() -> None:
    values = Privacy((MNIST,), 1e-5, "replace-one").to_dict()
    assert values["epsilon"]["rdp"] is None
    assert values["kind"]["rdp"].startswith("not applicable: ")


def test_infinity_is_null_with_its_reason_and_valid_json() -> None:
    values = Privacy((MNIST, NonPrivateEvent("loss curve")), 1e-5).to_dict()
    json.dumps(values, allow_nan=False)
    assert values["epsilon"]["pld"] is None
    assert values["kind"]["pld"].startswith("infinite: ")
    assert values["attacker"]["accuracy"] == 1.0


def test_a_statement_says_who_is_protected_how_well_and_by_which_accountant() -> None:
    text = Privacy((MNIST,), 1e-5).statement()
    for part in (
        "Adding or removing any one person's record",
        "epsilon = 0.8646",
        "delta = 1e-05",
        "privacy loss distributions (PLD), upper bound",
        "54.6%",
        "1.9%",
        "3516 sums with Gaussian noise of 1.3 times",
        "Gaussian limit (GDP, CLT) 0.8346 (approximation)",
    ):
        assert part in text
    assert "\n" not in text


@pytest.mark.parametrize("noise", [0.9, 1.3, 2.7])
def test_numbers_in_the_statement_are_rounded_up(noise: float) -> None:
    # Catches ordinary rounding, which would claim a smaller epsilon than was shown half of the time.
    privacy = Privacy((GaussianEvent(noise, "poisson", 0.01, 400),), 1e-5)
    text = privacy.statement()
    printed = float(re.search(r"epsilon = ([0-9.]+)", text)[1])  # type: ignore[index]
    accuracy = float(re.search(r"at most ([0-9.]+)% of cases", text)[1]) / 100  # type: ignore[index]
    assert privacy.epsilon() <= printed <= privacy.epsilon() * 1.001
    assert privacy.attacker().accuracy <= accuracy <= privacy.attacker().accuracy + 1e-3


def test_a_seeded_run_claims_nothing() -> None:
    privacy = Privacy((MNIST,), 1e-5, seeded=True)
    assert privacy.statement().startswith("Seeded: no privacy claim.")
    assert "would change" in privacy.statement()
    assert privacy.to_dict()["seeded"] is True
    assert "no privacy claim" not in Privacy((MNIST,), 1e-5).statement()


def test_a_lost_run_says_why() -> None:
    text = Privacy((NonPrivateEvent("the loss curve was shown"),), 1e-5).statement()
    assert "No privacy is claimed" in text
    assert "the loss curve was shown" in text


def test_nominal_protection_is_called_so() -> None:
    weak = Privacy((GaussianEvent(0.1, "poisson", 1024 / 60_000, 1160),), 1e-5).statement()
    assert "no meaningful protection" in weak
    assert "no meaningful protection" not in Privacy((MNIST,), 1e-5).statement()


def test_replacing_a_record_is_worded_as_such() -> None:
    text = Privacy((MNIST,), 1e-5, "replace-one").statement()
    assert "Replacing the content of any one person's record" in text
    assert "which of two versions" in text


def test_what_the_user_vouches_for_is_repeated() -> None:
    text = Privacy((MNIST,), 1e-5, assumptions=("the number of records is public",)).statement()
    assert "on the user's word that the number of records is public" in text


def test_epsilon_at_another_delta_and_events_counted_together() -> None:
    privacy = Privacy((MNIST, PureEvent(0.1), MNIST), 1e-5)
    assert len(privacy.events) == 2
    assert privacy.epsilon(1e-7) > privacy.epsilon() == privacy.epsilon(1e-5)
    assert privacy.sampling() == "poisson"
    mixed = Privacy((MNIST, GaussianEvent(5.0)), 1e-5)
    assert mixed.sampling() == "full-batch+poisson"
    assert mixed.epsilon() > 0


def test_it_is_frozen_hashable_and_checked() -> None:
    privacy = Privacy((MNIST,), 1e-5)
    assert hash(privacy) == hash(Privacy((MNIST,), 1e-5))
    with pytest.raises(FrozenInstanceError):
        privacy.delta = 1.0  # type: ignore[misc]
    with pytest.raises(ValueError, match="delta=1"):
        Privacy((MNIST,), 1.0)
    with pytest.raises(ValueError, match="adjacency='swap'"):
        Privacy((MNIST,), 1e-5, "swap")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedEvents):
        Privacy(("gaussian",), 1e-5)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedEvents, match="sampling='poisson'"):
        Privacy((GaussianEvent(1.0, "shuffle", 0.1, 3),), 1e-5).epsilon()


def test_asking_twice_is_free() -> None:
    privacy = Privacy((GaussianEvent(1.1, "poisson", 0.0031, 2718),), 1e-5)
    privacy.to_dict()
    start = time.process_time()
    privacy.to_dict()
    privacy.statement()
    assert time.process_time() - start < 0.05


def test_nothing_released_costs_nothing() -> None:
    privacy = Privacy((), 1e-5)
    assert privacy.epsilon() == 0
    assert privacy.sampling() is None
    assert math.isclose(privacy.attacker().accuracy, 0.5)
    assert "Released: nothing" in privacy.statement()
