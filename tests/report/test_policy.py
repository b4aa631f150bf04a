"""Every page says to the browser that nothing runs and nothing is fetched."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from confide.auditing.game import Audit
from confide.auditing.moves import QueryAudit
from confide.auditing.page import render_audit, render_moves
from confide.report import render
from confide.running.fit import Run

PAGES = Path(__file__).parents[2] / "src" / "confide"


def policies(page: str) -> list[str]:
    head = page.partition("</head>")[0]
    return re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', head)


def check(page: str) -> None:
    (policy,) = policies(page)
    words = policy.replace("&#39;", "'")
    assert "default-src 'none'" in words
    assert "script-src" not in words
    assert "http:" not in words
    assert "<script" not in page.lower()
    assert page.index("Content-Security-Policy") < page.index("<style"), "before anything that it covers"


def test_a_report(class_run: Run) -> None:
    check(render(class_run, title="<script>alert(1)</script>").replace("&lt;script", ""))


def test_audits() -> None:
    check(render_moves(QueryAudit("net", (), (), 0)))
    check(render_audit(Audit("sgd", "white-box", 1.0, 0.5, 0.95, 1e-5, 10, 5, 3, "sum", 2, 0.5, 1.0)))


@pytest.mark.parametrize("page", sorted(PAGES.rglob("*.html")), ids=lambda path: path.name)
def test_every_template_has_one(page: Path) -> None:
    assert "Content-Security-Policy" in page.read_text(encoding="utf-8")
