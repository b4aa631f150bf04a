"""`confide audit` on the command line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from confide import auditing
from confide.auditing.self_test import Caught
from confide.cli.audit import FAILED
from tests.cli.conftest import Result, is_refusal, run

__all__ = ["run"]  # the fixture


def test_json(run: Callable[..., Result]) -> None:
    values = run("audit", "--method", "sgld", "--epsilon", 1, "--canaries", 200, "--steps", 4, "--json").json
    assert values["epsilon_claimed"] == 1.0
    assert 0 <= values["epsilon_lower"] < 1
    assert values["confidence"] == 0.95
    assert values["passed"]
    assert len(values["checks"]) == 9
    assert {check["level"] for check in values["checks"]} == {0.0, 1e-7}


@pytest.mark.slow
def test_prose(run: Callable[..., Result]) -> None:
    found = run("audit", "--method", "sgd", "--canaries", 100, "--steps", 2, "--rate", 1)
    assert found.code == 0
    assert "the claim survives" in found.out
    assert "fresh noise" in found.out


def test_an_audit_that_fails_says_so_and_exits_with_its_own_code(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = auditing.audit
    monkeypatch.setattr(auditing, "audit", lambda method, **options: right(method, fault="no clip", **options))
    found = run("audit", "--method", "sgd", "--canaries", 200, "--steps", 2, "--rate", 1)
    assert found.code == FAILED
    assert "FAILED by lower bound, sensitivity" in found.out


def test_the_self_test_is_a_table(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Caught(None, 2.0, 0.9, ()), Caught("no clip", 2.0, 3.9, ("lower bound", "sensitivity"))]
    monkeypatch.setattr(auditing, "self_test", lambda method, **options: rows)
    found = run("audit", "--method", "sgd", "--self-test")
    assert found.code == 0
    assert "lower bound, sensitivity" in found.out
    missed = [Caught("no clip", 2.0, 0.1, ())]
    monkeypatch.setattr(auditing, "self_test", lambda method, **options: missed)
    assert run("audit", "--method", "sgd", "--self-test", "--json").code == FAILED


@pytest.mark.parametrize(
    "words",
    [
        ("--method", "sgdx"),
        ("--epsilon", "0"),
        ("--steps", "3"),
        ("--rate", "0"),
        ("--canaries", "1"),
        ("--attack", "grey-box"),
        ("--set", "nonsense"),
    ],
)
def test_refusals(run: Callable[..., Result], words: tuple[str, ...]) -> None:
    found = run("audit", *words)
    assert is_refusal(found)
    assert words[0] in found.err
