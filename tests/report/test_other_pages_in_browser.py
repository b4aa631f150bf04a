"""Pages of a plan, a ledger, an audit and a comparison in a real browser, as wide as a phone and on paper."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import confide
from confide.auditing.page import render_audit
from confide.data.loaders import load_dataset
from confide.privacy.events import GaussianEvent
from confide.privacy.ledger import Ledger
from confide.report.ledger_page import render_ledger
from confide.report.plan_page import render_plan
from tests.auditing.test_page import FOUND
from tests.report.test_browser import POLICY, browse, pytestmark

__all__ = ["pytestmark"]
PROBE = """<script>addEventListener("load", () => {
  const linear = (one) => (one <= 10 ? one / 3294.6 : ((one / 255 + 0.055) / 1.055) ** 2.4);
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => { const [r, g, b] = parts(text).map(linear); return 0.2126*r + 0.7152*g + 0.0722*b; };
  const paper = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const found = getComputedStyle(at).backgroundColor;
      if (parts(found).length < 4) return light(found);
    }
    return 1;
  };
  let least = 99, texts = 0;
  for (const one of document.querySelectorAll("body *")) {
    const box = one.getBoundingClientRect();
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !box.width || !box.height) continue;
    const style = getComputedStyle(one), drawn = one.closest("svg") && style.fill !== "none";
    const [a, b] = [light(drawn ? style.fill : style.color), paper(one)];
    least = Math.min(least, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
    texts += 1;
  }
  const wide = document.documentElement.scrollWidth;
  document.title = "probe " + JSON.stringify({texts, least, wide, window: innerWidth});
});</script></body>"""
FRAME = """<!doctype html><html><head><title>none</title></head><body><iframe id="f" src="inner.html" width="390"
height="900"></iframe><script>addEventListener("load", () => setTimeout(() => {
  document.title = document.getElementById("f").contentDocument.title; }, 300));</script></body></html>"""


def plan_page(_: Path) -> str:
    return render_plan(confide.plan(epsilon=1.0, delta=1e-5, records=2000, batch=100, steps=40))


def ledger_page(_: Path) -> str:
    ledger = Ledger(who="Grace")
    ledger.limit(3.0, 1e-5)
    for name in ("ärzte und ein sehr langer Name ohne Umbruch_" * 2, "b"):
        ledger.charge(GaussianEvent(3.0, "poisson", 0.01, 100), "fit sgld", name)
    return render_ledger(ledger, "budget.db", 1e-5)


def audit_page(_: Path) -> str:
    return render_audit(FOUND)


def comparison_page(folder: Path) -> str:
    digits = load_dataset("digits")
    assert digits.schema is not None
    assert digits.test is not None
    request = confide.Request(digits.train, epsilon=3.0, delta=1e-4, steps=4, facts=digits.schema, hidden=())
    confide.compare(request, digits.test, ["sgld", "sgd"], out=folder / "out")
    return (folder / "out" / "report.html").read_text(encoding="utf-8")


PAGES: dict[str, Callable[[Path], str]] = {
    "ledger": ledger_page, "plan": plan_page, "audit": audit_page, "comparison": comparison_page,
}  # fmt: skip
EVERY = [name if name == "ledger" else pytest.param(name, marks=pytest.mark.slow) for name in PAGES]


def on_a_phone(page: str, folder: Path) -> tuple[dict[str, Any], str]:
    """What a probe sees where the page is 390 pixels wide, and what the browser complained of."""
    assert len(POLICY.findall(page)) == 1
    (folder / "inner.html").write_text(POLICY.sub("", page).replace("</body>", PROBE), encoding="utf-8")
    options = ("--dump-dom", "--enable-logging=stderr", "--allow-file-access-from-files", "--virtual-time-budget=4000")
    shown = browse(folder, FRAME, *options)
    found = re.search(r"<title>probe (\{.*?\})</title>", shown.stdout)
    assert found is not None, shown.stdout[:300]
    return json.loads(found[1]), shown.stderr


@pytest.mark.parametrize("name", EVERY)
def test_a_phone_shows_it_whole_and_legibly(name: str, tmp_path: Path) -> None:
    """4.5 is the contrast that WCAG asks for."""
    found, complaints = on_a_phone(PAGES[name](tmp_path), tmp_path)
    assert "CONSOLE" not in complaints
    assert found["window"] == 390
    assert found["wide"] <= 391
    assert found["texts"] > 20
    assert found["least"] >= 4.5


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_it_prints(name: str, tmp_path: Path) -> None:
    browse(tmp_path, PAGES[name](tmp_path), f"--print-to-pdf={tmp_path / 'page.pdf'}", "--no-pdf-header-footer")
    content = (tmp_path / "page.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 9


@pytest.mark.slow
def test_a_wide_table_and_pale_ink_would_be_seen(tmp_path: Path) -> None:
    page = ledger_page(tmp_path)
    wide, _ = on_a_phone(page.replace("</body>", '<div style="width:900px">x</div></body>'), tmp_path)
    assert wide["wide"] >= 900
    pale, _ = on_a_phone(page.replace("</body>", '<p style="color:#aaa">pale</p></body>'), tmp_path)
    assert pale["least"] < 4.5
