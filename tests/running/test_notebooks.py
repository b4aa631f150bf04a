"""What a notebook shows of runs, posteriors, predictions, plans and ledgers: short, and escaped."""

from __future__ import annotations

import importlib
import io
import sys
from html.parser import HTMLParser
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import confide
from confide import methods
from confide.models.heavy_tails import Laplace
from confide.models.several import MultiGaussian, MultiLabel
from confide.posteriors.draws import Draws
from confide.running.callbacks import progress_line
from confide.wording import epsilon, html_table
from tests.conformance.conftest import classification, regression, small_plan


class Cells(HTMLParser):
    """The text of a table, and what stands open at its end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.found.append(data)


def shown(thing: Any) -> str:
    text: str = thing._repr_html_()
    cells = Cells(text)
    assert not cells.open
    assert len(text) < 5000, "short"
    return " | ".join(cells.found)


@pytest.mark.parametrize("name", ["sgld", "bbp", "mc-dropout", "sep", "additive"])
def test_runs_and_posteriors(name: str) -> None:
    case = classification()
    run = confide.fit(methods.get(name)(), case.module, case.data(), small_plan(case), seed=0)
    assert name in shown(run)
    assert "epsilon" in shown(run)
    assert run.posterior.kind in shown(run.posterior)
    assert "class" in shown(run.posterior.predict(case.x))
    assert "records" in shown(run.plan)


def test_predictions_of_every_kind() -> None:
    case = regression()
    for likelihood in (Laplace(), MultiGaussian(2), MultiLabel(3)):
        module = confide.networks.linear(4) if likelihood.outputs == 1 else confide.networks.mlp(4, likelihood.outputs)
        size = sum(value.numel() for value in module.parameters())
        law = Draws(module, likelihood, torch.zeros(2, size), torch.full((2,), 0.5))
        assert "60 inputs, 2 draws" in shown(law.predict(case.x))


def test_a_ledger_with_a_ceiling() -> None:
    case = classification()
    ledger = confide.Ledger()
    ledger.limit(100.0, 1e-3)
    data = confide.PrivateData(case.x, case.y, schema=case.schema, ledger=ledger, name="<script>")
    assert "100" in shown(ledger)
    confide.fit(methods.get("sgd")(), case.module, data, small_plan(case), seed=0)
    assert "<script>" not in ledger._repr_html_()
    assert "<script>" in shown(ledger), "as text"


def test_a_ledger_says_what_was_spent_and_what_remains() -> None:
    case = classification()
    ledger = confide.Ledger()
    data = confide.PrivateData(case.x, case.y, schema=case.schema, ledger=ledger)
    run = confide.fit(methods.get("sgd")(), case.module, data, small_plan(case))
    assert f"(unnamed) | 1 | {epsilon(run.privacy.epsilon(1e-5))} | -" in shown(ledger)
    assert epsilon(run.privacy.epsilon()) in shown(run.privacy)


def test_progress_in_a_notebook_is_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of a notebook is simulated: a display that counts what is shown anew and what is updated."""
    display = ModuleType("IPython.display")
    shown_first: list[str] = []
    updates: list[str] = []
    display.HTML = str  # type: ignore[attr-defined]
    handle = SimpleNamespace(update=updates.append)
    display.display = lambda what, display_id: shown_first.append(what) or handle  # type: ignore[attr-defined]
    shell = ModuleType("IPython")
    shell.get_ipython = type("ZMQInteractiveShell", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    progress = progress_line(io.StringIO())
    for done in range(1, 251):
        progress(done, 250)
    assert len(shown_first) == 1
    assert 50 <= len(updates) <= 130
    assert "step 250 of 250 (100%)" in updates[-1]


def test_public_modules_are_imported_as_they_are_named() -> None:
    from confide.callbacks import LiveCurves
    from confide.priors import GaussianPrior

    assert (LiveCurves, GaussianPrior) == (confide.callbacks.LiveCurves, confide.priors.GaussianPrior)
    for name in ("callbacks", "likelihoods", "networks", "priors"):
        assert importlib.import_module(f"confide.{name}") is getattr(confide, name)


def test_cells_are_escaped() -> None:
    assert "<b>" not in html_table("<b>", [("<b>", "&")], ("<b>",))
