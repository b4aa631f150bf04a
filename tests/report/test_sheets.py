"""Pages about a ledger and about plans: complete, escaped, rounded the safe way; where a run stands in its ledger."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path

import pytest
import torch

import confide
from confide.cli.app import main
from confide.privacy.accountants import sound_epsilon
from confide.privacy.events import GaussianEvent
from confide.privacy.ledger import Ledger
from confide.privacy.ledger.position import position_of
from confide.report import render
from confide.report.ledger_page import render_ledger
from confide.report.plan_page import render_plan
from confide.wording import epsilon, remaining
from tests.report.page_tools import Page
from tests.report.runs import HOSTILE, RECORDS, classes_schema

EVENT = GaussianEvent(8.0, "full-batch", count=3)
OTHER = GaussianEvent(20.0)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "budget.db"
    with Ledger(path, who="ada") as ledger:
        ledger.limit(3.0, 1e-5)
        ledger.charge(EVENT, "fit", "income")
    with Ledger(path, who=HOSTILE) as ledger:
        ledger.charge(OTHER, HOSTILE, "income")
        ledger.charge(OTHER, "count", "patients")
    return path


def test_ledger_page_says_what_is_spent_and_left(book: Path) -> None:
    with Ledger(book) as ledger:
        page = Page(render_ledger(ledger, "budget.db", 1e-5))
        spent, left = ledger.spent(dataset="income"), ledger.remaining("income")
        head = str(ledger.head)
    assert page.problems == []
    assert "script" not in page.tags
    for word in (
        "income",
        "patients",
        "ada",
        HOSTILE,
        epsilon(spent),
        remaining(left),
        head,
        "Charges, the latest first",
    ):
        assert word in page.text, word
    assert Decimal(remaining(left)) <= Decimal(repr(left))
    assert len(page.svgs) == 2


def test_ledger_without_ceiling_or_charge(tmp_path: Path) -> None:
    with Ledger(tmp_path / "new.db") as ledger:
        assert "Nothing has been charged yet" in Page(render_ledger(ledger, "new.db", 1e-5)).text
        ledger.charge(OTHER, "count", "")
        page = Page(render_ledger(ledger, "new.db", 1e-5))
    assert page.problems == []
    assert "nothing stops the next charge" in page.text
    assert "(unnamed)" in page.text


def test_commands_overwrite_nothing(book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "budget.html"
    assert main(["ledger", "report", str(book), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["out"] == str(out)
    assert Page(out.read_text(encoding="utf-8")).problems == []
    for wrong in (out, tmp_path / "budget.txt", tmp_path / "absent" / "budget.html"):
        assert main(["ledger", "report", str(book), "--out", str(wrong)]) == 2
    plan = ["plan", "--epsilon", "1", "--delta", "1e-5", "--records", "6000", "--batch", "256", "--epochs", "2"]
    assert main([*plan, "--report", str(tmp_path / "plan.html")]) == 0
    page = Page((tmp_path / "plan.html").read_text(encoding="utf-8"))
    assert page.problems == []
    assert len(page.svgs) == 3
    assert main([*plan, "--report", str(tmp_path / "plan.html")]) == 2
    capsys.readouterr()


@pytest.mark.parametrize("sampling", ["full-batch", "fixed-size", "shuffle"])
def test_every_kind_of_plan_is_explored(sampling: str) -> None:
    adjacency = "add-remove" if sampling == "full-batch" else "replace-one"
    sizes = {} if sampling == "full-batch" else {"batch": 100}
    plan = confide.plan(
        noise_multiplier=6.0, delta=1e-5, records=500, steps=5, sampling=sampling, adjacency=adjacency, **sizes
    )
    page = Page(render_plan(plan))
    assert page.problems == []
    assert len(page.svgs) == (2 if sampling == "full-batch" else 3)
    assert epsilon(sound_epsilon(plan.events(), 1e-5, adjacency)) in page.text


def test_more_noise_costs_less_on_the_page() -> None:
    page = render_plan(confide.plan(noise_multiplier=8.0, delta=1e-5, records=500, steps=4, sampling="full-batch"))
    rows = re.findall(r'<th scope="row">([\d.]+)[^<]*</th><td class="figure" data-name="Epsilon">([\d.]+)', page)
    values = [float(found) for _, found in rows[:5]]
    assert values == sorted(values, reverse=True)


def test_position_of_a_run_among_others(book: Path) -> None:
    with Ledger(book) as ledger:
        found = position_of(ledger, "income", [EVENT], 1e-3, "replace-one")
        assert (found.delta, found.adjacency, found.limit) == (1e-5, "add-remove", 3.0)  # the ceiling's
        assert found.run == pytest.approx(sound_epsilon([EVENT], 1e-5))
        assert found.before == pytest.approx(sound_epsilon([OTHER], 1e-5))
        assert found.total == pytest.approx(ledger.spent(dataset="income"))
        assert max(found.before, found.run) < found.total < found.before + found.run
        assert found.left == ledger.remaining("income")
        assert dict(found.by_whom) == {"ada": 1, HOSTILE: 1}
        alone = position_of(ledger, "patients", [OTHER], 1e-5, "add-remove")
        assert (alone.before, alone.total) == (0.0, alone.run)


def test_report_of_a_run_shows_its_position(tmp_path: Path) -> None:
    path = tmp_path / "budget.db"
    with Ledger(path, who="grace") as ledger:
        ledger.limit(20.0, 1e-5)
        ledger.charge(OTHER, "count", "people")
    x = torch.rand(RECORDS, 3, generator=torch.Generator().manual_seed(3))
    schema = classes_schema()
    data = confide.PrivateData(x, (x[:, 0] > 0.5).long(), schema=schema, ledger=path, name="people")
    plan = confide.plan(delta=1e-5, records=RECORDS, steps=4, noise_multiplier=8.0, sampling="full-batch")
    network = confide.networks.MLP(confide.networks.Recipe(3, 2, ()))
    run = confide.fit(confide.methods.SGLD(), network, data, plan, seed=1)
    position = run.ledger["position"]
    assert position["before"] == pytest.approx(sound_epsilon([OTHER], 1e-5))
    assert position["limit"] == 20.0
    page = Page(render(run))
    for word in ("Spent before", "This run", "Together", "Left", "grace (1)"):
        assert word in page.text, word
    assert epsilon(position["total"]) in page.text
    assert f"{remaining(position['left'])} of a ceiling of 20" in page.text


def test_what_is_left_is_rounded_down() -> None:
    assert remaining(0.8309999) == "0.8309"
    assert remaining(1.0) == "1"
    assert remaining(float("inf")) == "no ceiling"
