"""The page of an audit: it says what was found, stands alone, and escapes what comes from outside."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from confide.auditing.game import Audit
from confide.auditing.page import render_audit
from confide.auditing.results import Check
from confide.auditing.self_test import Caught
from tests.cli.conftest import is_refusal, run

__all__ = ["run"]  # the fixture

FOUND = Audit(
    method="sgld",
    attack="white-box",
    epsilon_claimed=4.0,
    epsilon_lower=1.234,
    confidence=0.95,
    delta=1e-5,
    canaries=1000,
    guesses=60,
    correct=51,
    score="sum",
    steps=16,
    rate=0.25,
    noise_multiplier=1.75,
    checks=(Check("noise", True, "1.001", "1 within 0.02", 1e-7, 0.25), Check("ledger", True, "4 of 4", "4")),
)


def test_a_claim_that_survives() -> None:
    page = render_audit(FOUND)
    for words in ("The claim of 4 survives", "at least 1.234", "51 (85.0%", "1 within 0.02", "proves nothing"):
        assert words in page
    assert "<td>1e-07</td><td>0.25</td>" in page, "a check shows its level and its chance"
    assert "<td>exact</td>" in page
    assert "The audit failed" not in page


def test_a_claim_that_falls_is_stamped() -> None:
    """Catches a page that looks the same whatever was found."""
    page = render_audit(replace(FOUND, epsilon_lower=5.5))
    assert "The audit failed" in page
    assert "lower bound" in page
    assert "survives" not in page
    broken = render_audit(replace(FOUND, checks=(Check("noise", False, "0.5", "1"),)))
    assert "FAILED" in broken
    assert "By: noise." in broken


def test_faults_are_listed_and_everything_is_escaped() -> None:
    rows = [Caught(None, 4.0, 1.2, ()), Caught("noise <halved>", 4.0, 9.9, ("lower bound",))]
    page = render_audit(replace(FOUND, method="<script>alert(1)</script>"), rows)
    assert "noise &lt;halved&gt;" in page
    assert "<script" not in page
    assert not re.search(r"https?:", page)


def test_the_command_writes_a_new_page_only(run: Any, tmp_path: Path) -> None:
    words = ("audit", "--method", "sgd", "--epsilon", 4, "--canaries", 20, "--steps", 2, "--rate", 1)
    target = tmp_path / "audit.html"
    assert run(*words, "--page", target).code == 0
    assert "Audit of sgd at epsilon 4" in target.read_text()
    before = target.read_bytes()
    assert is_refusal(run(*words, "--page", target))
    assert is_refusal(run(*words, "--page", tmp_path / "none" / "audit.html"))
    assert target.read_bytes() == before
