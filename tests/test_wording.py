"""A claim as printed is never below the number it stands for; JSON has neither infinity nor NaN."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from confide import wording
from confide.privacy.accountants import accountants
from confide.privacy.bayesian.result import Trusted

claims = st.floats(min_value=0, allow_nan=False, allow_infinity=False)


@given(claims, st.integers(0, 12))
def test_decimals_are_never_below(value: float, decimals: int) -> None:
    text = wording.up(value, decimals=decimals)
    assert float(text) >= value
    assert "e" not in text
    assert len(text.partition(".")[2]) == decimals


@given(claims, st.integers(1, 12))
def test_digits_are_never_below_and_not_far_above(value: float, digits: int) -> None:
    shown = float(wording.up(value, digits=digits))
    assert shown >= value
    assert shown <= value * (1 + 10.0 ** (1 - digits) * 1.0001) + 5e-324


@given(st.floats(0, 1))
def test_shares_of_an_attacker_are_never_below(value: float) -> None:
    text = wording.share_up(value)
    assert text.endswith("%")
    assert value <= float(text[:-1]) / 100 * (1 + 1e-15)
    assert float(text[:-1]) <= 100


@pytest.mark.parametrize("value", [1.0000000004, 0.1230000000001, 3.0000000000000004])
def test_what_binary_rounding_let_through(value: float) -> None:
    """Forgiving a millionth of a unit, as a rounding up by doubles has to, came out below the bound."""
    assert math.ceil(value * 1000 - 1e-6) / 1000 < value
    assert float(wording.epsilon(value)) >= value
    assert float(wording.up(value)) >= value


def test_round_numbers_stay_as_they_are() -> None:
    assert [wording.up(value) for value in (1.0, 0.1, 3.0, 0.25, 0.0, 1234.0)] == ["1", "0.1", "3", "0.25", "0", "1234"]
    assert wording.up(0.1, decimals=4) == "0.1000"
    assert wording.up(1.00001) == "1.001"
    assert wording.up(999.91) == "1000"
    assert wording.epsilon(0.1) == "0.1"
    assert wording.epsilon(107.6029) == wording.up(107.6029) == "107.7"
    assert wording.epsilon(math.inf) == "∞"
    assert wording.epsilon(None) == "none"
    assert wording.share_up(0.5) == "50.0%"
    assert wording.share_up(0.50001) == "50.1%"
    assert wording.share_up(1.0) == "100.0%"
    assert wording.up(math.inf) == "infinite"


def test_every_accountant_has_a_title() -> None:
    assert {one.name for one in accountants()} == set(wording.ACCOUNTANTS)
    assert wording.accountant("my_own").heading == "My own"


def test_json_is_strict() -> None:
    @dataclass
    class Settings:
        rate: float
        hidden: Trusted

    values = {
        "a": math.inf,
        "b": [math.nan, 1.5, np.float32(2.0), np.arange(2)],
        "c": (True, None, "é"),
        1: Settings(-math.inf, Trusted()),
    }
    found = json.loads(wording.json_text(values), parse_constant=_refuse)
    assert found == {
        "a": None,
        "b": [None, 1.5, 2.0, [0, 1]],
        "c": [True, None, "é"],
        "1": {"type": "Settings", "rate": None, "hidden": wording.WITHHELD},
    }
    text = wording.json_text(values, pretty=True, infinity_as_text=True)
    assert text.endswith("}\n")
    assert "é" in text
    assert json.loads(text, parse_constant=_refuse)["1"]["rate"] == "-Infinity"


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_a_suggestion_is_a_slip_of_the_fingers_and_no_other_word() -> None:
    from confide.wording import meant

    known = ("sgld", "sghmc", "bbp", "mc-dropout", "traced", "laplace", "noise-aware")
    for typed, wanted in (("bpp", "bbp"), ("hmc", "sghmc"), ("laplcae", "laplace"), ("noise", "noise-aware")):
        assert meant(typed, known) == f"; did you mean {wanted}?"
    assert [meant(word, known) for word in ("oracle", "adam", "foo", "")] == [""] * 4
