"""The report as a page: complete, escaped, accessible, and free of anything from outside."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

import pytest

from confide.privacy.events import GaussianEvent, NonPrivateEvent, PureEvent
from confide.privacy.statement import Privacy
from confide.report import PUBLIC, SEPARATE, Evaluation, render
from confide.report.trail import assumptions
from confide.running.fit import Run
from confide.wording import share_up
from tests.report.page_tools import Page
from tests.report.runs import HOSTILE, class_evaluation, classes_schema, real_evaluation

TEMPLATE = files("confide.report").joinpath("template.html").read_text(encoding="utf-8")
LOOK = TEMPLATE + files("confide.report").joinpath("style.css").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def class_page(class_run: Run) -> Page:
    return Page(render(class_run, evaluation=class_evaluation(), config={"train": HOSTILE}))


@pytest.fixture(scope="module")
def real_page(real_run: Run) -> Page:
    return Page(render(real_run, evaluation=real_evaluation(PUBLIC)))


class TestPageIsWellMade:
    def test_pages_have_no_problems(self, class_page: Page, real_page: Page, open_run: Run) -> None:
        assert class_page.problems == []
        assert real_page.problems == []
        assert Page(render(open_run)).problems == []

    def test_three_layers_in_order(self, class_page: Page) -> None:
        titles = [text for level, text in class_page.headings if level == 2]
        assert titles == ["1. In plain words", "2. The evidence", "3. The audit trail"]

    @pytest.mark.parametrize(
        ("broken", "problem"),
        [
            ("<svg role='img'></svg>", "a drawing without a label"),
            ("<h4>too deep</h4>", "heading jumps from h1 to h4"),
            ("<img src='https://example.org/x.png'>", "reference outside the page: https://example.org/x.png"),
            ("<script></script>", "<script> in the page"),
            ("<p id='a'></p><p id='a'></p>", "identifier twice: a"),
            ("<p onclick='x'></p>", "a handler: onclick"),
            ("<div><p></div>", "tags are not nested well at </div>"),
            ("<style>a { background: url(x.png) }</style>", "a style that loads something"),
        ],
    )
    def test_the_checker_finds_what_is_wrong(self, broken: str, problem: str) -> None:
        page = f"<!doctype html><html lang='en'><h1>title</h1>{broken}</html>"
        assert problem in Page(page).problems

    def test_no_address_of_the_web_is_loaded(self, class_page: Page) -> None:
        """The only addresses allowed are the names of the SVG language, which no browser fetches."""
        assert set(re.findall(r"https?://[^\s\"'<)]+", class_page.raw)) <= {
            "http://www.w3.org/2000/svg",
            "http://www.w3.org/1999/xlink",
        }

    def test_same_run_same_page(self, class_run: Run) -> None:
        moment = datetime(2030, 1, 2, 3, 4, tzinfo=UTC)
        pages = {render(class_run, created=moment) for _ in range(2)}
        assert len(pages) == 1
        assert "2 January 2030, 03:04 UTC" in pages.pop()


class TestEscaping:
    def test_hostile_names_stay_text(self, class_page: Page, real_page: Page) -> None:
        """A column, class, target or setting called <script> must reach the reader's eye, not the browser."""
        for page in (class_page, real_page):
            assert "script" not in page.tags
            assert "<script>alert('x')</script>" in page.text

    def test_autoescape_is_what_protects(self, class_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same page without escaping is caught by the same check, so the check can fail."""
        from jinja2 import Environment

        raw = Environment(autoescape=False, trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)
        monkeypatch.setattr(sys.modules["confide.report.render"], "template", lambda _: raw)
        assert "<script> in the page" in Page(render(class_run)).problems


class TestContent:
    def test_statement_and_numbers_come_first(self, class_page: Page, class_run: Run) -> None:
        text = class_page.text
        statement = re.sub(r"\s+", " ", class_run.privacy.statement())
        assert statement in text
        assert text.index(statement) < text.index("2. The evidence", text.index(statement))
        assert "2-class classifier was learnt from about 40 private records" in text

    def test_every_event_assumption_and_fact_is_listed(self, class_run: Run) -> None:
        events = (
            GaussianEvent(7.25, count=3),
            GaussianEvent(9.5, "full-batch", count=11),
            PureEvent(0.125, "add-remove", 2),
        )
        privacy = Privacy(events, 1e-5, assumptions=("the bounds of every column are public",))
        page = Page(render(replace(class_run, privacy=privacy)))
        for detail in ("noise multiplier 7.25", "noise multiplier 9.5", "epsilon 0.125 each"):
            assert detail in page.text, detail
        for assumption in assumptions(replace(class_run, privacy=privacy), None):
            assert re.sub(r"\s+", " ", assumption) in page.text, assumption
        assert "the bounds of every column are public" in page.text
        for fact in class_run.schema.public_facts():
            assert fact.fact in page.text
            assert fact.value in page.text

    def test_sound_accountant_is_first_and_every_kind_is_named(self, class_page: Page, class_run: Run) -> None:
        text = class_page.text
        rows = text[text.index("How, and what it assumes") :]
        places = [rows.index(name) for name in ("(PLD)", "(RDP)", "(GDP, CLT)", "(zCDP)", "Advanced composition")]
        assert places == sorted(places)
        for bound in class_run.privacy.bounds().values():
            assert bound.kind in rows

    def test_epsilon_is_rounded_up_never_down(self, class_page: Page, class_run: Run) -> None:
        text = class_page.text
        shown = float(text[text.index("Privacy loss ε, at δ = 1e-05") :].split()[7])
        assert class_run.privacy.epsilon() <= shown <= class_run.privacy.epsilon() + 1e-3

    def test_attacker_tight_beside_naive(self, class_page: Page, class_run: Run) -> None:
        best = class_run.privacy.attacker()
        assert f"{share_up(best.accuracy, 2)} {share_up(best.naive_accuracy, 2)} 50.00%" in class_page.text

    def test_metrics_plan_method_and_versions(self, class_page: Page) -> None:
        import torch

        for needed in (
            "Expected calibration error",
            "Noise multiplier",
            "full-batch, rate 1",
            "GaussianPrior (scale = 1)",
            "Temperature",
            "Burn in steps",
            torch.__version__,
            "dp-accounting",
        ):
            assert needed in class_page.text, needed

    def test_accuracy_comes_with_what_so_few_inputs_can_say(self, class_page: Page) -> None:
        assert re.search(r"between \d+\.\d% and \d+\.\d% \(95% interval\)", class_page.text)

    def test_source_of_the_test_set(self, class_run: Run, real_page: Page, class_page: Page) -> None:
        assert f"90 test inputs that were {PUBLIC}" in real_page.text
        assert SEPARATE in class_page.text
        assert "not the people in this test set" in class_page.text
        assert "No test set was declared" in Page(render(class_run)).text
        assert "was not stated" in Page(render(class_run, {"accuracy": 0.5})).text

    def test_assumed_facts_are_a_caution(self, real_page: Page) -> None:
        assert "assumed to be public: records" in real_page.text

    def test_single_records_are_drawn_only_from_public_test_sets(self, real_run: Run, real_page: Page) -> None:
        separate = Page(render(real_run, evaluation=real_evaluation(SEPARATE)))
        assert any("90 inputs shown" in label for label in real_page.svgs)
        assert any("groups of similar predictions shown" in label for label in separate.svgs)

    def test_events_without_a_sound_bound(self, class_run: Run) -> None:
        """Shuffled batches have no sound bound for adding a record: the page must say so and claim nothing."""
        events = (GaussianEvent(2.0, "shuffle", 0.5, 3, 40),)
        page = Page(render(replace(class_run, privacy=Privacy(events, 1e-5))))
        assert "No privacy is claimed" in page.text
        assert "no sound bound is known" in page.text
        assert page.problems == []


class TestStamps:
    def test_seeded_run(self, seeded_run: Run, class_page: Page) -> None:
        page = Page(render(seeded_run, evaluation=class_evaluation()))
        assert "seeded: no privacy claim" in page.text
        assert "No privacy is claimed for this run." in page.text
        assert page.text.index("seeded: no privacy claim") < page.text.index("1. In plain words")
        assert "seeded: no privacy claim" not in class_page.text

    def test_run_without_protection(self, open_run: Run) -> None:
        page = Page(render(open_run))
        assert "not private" in page.text
        assert "no bound" in page.text
        assert "Nothing limits an attacker" in page.text
        assert "Tight bound" not in page.text
        assert "The guarantee holds" not in page.text
        assert "Proven" not in page.text

    def test_one_open_release_among_private_ones(self, class_run: Run) -> None:
        events = (*class_run.privacy.events, NonPrivateEvent("the mean was printed"))
        page = Page(render(replace(class_run, privacy=Privacy(events, 1e-5))))
        assert "Something was released without protection: the mean was printed." in page.text

    def test_weak_protection_and_large_delta_are_said(self, class_run: Run) -> None:
        page = Page(render(replace(class_run, privacy=Privacy((GaussianEvent(0.2),), 0.1))))
        assert "Weak protection." in page.text
        assert "Large delta." in page.text


class TestEvaluation:
    def test_refuses_other_sources_and_other_lengths(self) -> None:
        good = class_evaluation()
        with pytest.raises(ValueError, match="source='training data'"):
            Evaluation(good.predictive, good.y, "training data")
        with pytest.raises(ValueError, match="each of 80 predictions"):
            Evaluation(good.predictive, good.y[:-1], SEPARATE)

    def test_metrics_are_those_of_the_metrics_room(self) -> None:
        from confide.evaluate.metrics import evaluate

        good = real_evaluation()
        assert good.metrics() == evaluate(good.predictive, good.y)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


class TestLook:
    @pytest.mark.parametrize("scheme", [0, 1, 2], ids=["light", "dark", "print"])
    def test_contrast(self, scheme: int) -> None:
        """Every pair of text and ground that the style uses, at 4.5 : 1 or better (WCAG 2, level AA)."""
        block = re.findall(r":root \{(.*?)\}", LOOK, flags=re.DOTALL)[scheme]
        colour = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        pairs = [(text, ground) for text in ("ink", "soft", "accent") for ground in ("paper", "card", "wash")]
        pairs += [("red", "red-wash"), ("red", "card"), ("amber", "amber-wash")]
        for text, ground in pairs:
            assert contrast(colour[text], colour[ground]) >= 4.5, (text, ground)

    def test_contrast_can_fail(self) -> None:
        assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)

    def test_phone_dark_and_print_are_cared_for(self) -> None:
        for needed in ("prefers-color-scheme: dark", "@media print", "max-width: 34rem", "width=device-width"):
            assert needed in LOOK

    def test_the_template_ships_with_the_package(self) -> None:
        import confide.report

        assert (Path(confide.report.__file__).parent / "template.html").is_file()


def test_class_schema_is_hostile_enough() -> None:
    assert HOSTILE in {fact.value for fact in classes_schema().public_facts()}
