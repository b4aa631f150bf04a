"""Plots: valid drawings that say their numbers, keep apart on one page, and touch nothing global."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import cache

import pytest
import torch

from confide.evaluate import drawing, metrics, plots, plots_budget, plots_draws
from confide.evaluate.drawing import Plot
from confide.models.predictive import ClassPredictive, RealPredictive
from confide.privacy.accountants.bound import APPROXIMATION, UPPER_BOUND, Bound, not_applicable

SVG = "{http://www.w3.org/2000/svg}"
BOUNDS = {
    "pld": Bound(0.86461, UPPER_BOUND),
    "gdp_clt": Bound(0.8345, APPROXIMATION),
    "advanced_composition": not_applicable("too wide"),
    "<odd> & $name$": Bound(1.25, UPPER_BOUND),
}


def classes(inputs: int = 60) -> tuple[ClassPredictive, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    draws = (2 * torch.randn(5, inputs, 3, generator=generator)).softmax(-1)
    return ClassPredictive(draws, torch.full((5,), 0.2)), torch.randint(0, 3, (inputs,), generator=generator)


def reals(inputs: int = 120) -> tuple[RealPredictive, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    means = torch.randn(5, inputs, generator=generator)
    predictive = RealPredictive(means, torch.full((5, inputs), 0.4), torch.full((5,), 0.2))
    return predictive, torch.randn(inputs, generator=generator)


@cache
def all_plots() -> dict[str, Plot]:
    (labels, y), (numbers, targets) = classes(), reals()
    return {
        "reliability": plots.reliability_diagram(labels.probabilities, y),
        "confidence": plots.confidence_histogram(labels.probabilities, y),
        "uncertainty": plots.uncertainty_of_classes(labels, y),
        "predicted": plots.predicted_against_actual(numbers, targets),
        "groups": plots.predicted_against_actual(numbers, targets, individuals=False),
        "coverage": plots.coverage_curve(numbers, targets),
        "variance": plots.uncertainty_of_reals(numbers, targets),
        "epsilon": plots.epsilon_bars(BOUNDS, 1e-5),
        "attacker": plots.attacker_curve({0.001: 0.002, 0.01: 0.018, 0.1: 0.146, 1.0: 1.0}),
        "class draws": plots_draws.draw_distribution(labels, 3),
        "real draws": plots_draws.draw_distribution(numbers, 3),
        "bands": plots_draws.uncertainty_bands(torch.linspace(-1, 1, 120), numbers, targets, "age"),
        "trace": plots_draws.trace(numbers.means.T[:4], "weight"),
        "autocorrelation": plots_draws.autocorrelations(numbers.means.reshape(-1), "weight"),
        "utility": plots_budget.privacy_utility(
            [3.0, 1.0, 0.3], [0.93, 0.9, 0.7], [0.01, 0.01, 0.02], without_privacy=0.96, baseline=0.12
        ),
        "budget": plots_budget.budget_over_time(["Monday", "Tuesday", "Friday"], [0.5, 0.9, 1.2], limit=3.0),
        "methods": plots_budget.method_points(
            ["sgld", "sgd"], [0.93, 0.9], [0.01, None], name="Share right", title="?", reading="r", best="sgld"
        ),
    }


NAMES = sorted(all_plots())


@pytest.mark.parametrize("name", NAMES)
def test_drawing_is_valid_and_labelled(name: str) -> None:
    plot = all_plots()[name]
    root = ET.fromstring(plot.svg)
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    assert root.get("aria-label") == plot.alt
    assert root.get("width") is None, "the page sets the width; a fixed one would overflow a phone"
    assert (root.get("viewBox") or "").startswith(f"0 0 {drawing.WIDTH} ")
    assert any(character.isdigit() for character in plot.alt)
    assert plot.title
    assert plot.reading


@pytest.mark.parametrize("name", NAMES)
def test_text_stays_text(name: str) -> None:
    texts = [node.text for node in ET.fromstring(all_plots()[name].svg).iter(f"{SVG}text")]
    assert len(texts) >= 5


def test_identifiers_do_not_clash_on_one_page() -> None:
    shown = ("reliability", "confidence", "uncertainty", "epsilon", "attacker")
    seen = [node.get("id") for name in shown for node in ET.fromstring(all_plots()[name].svg).iter() if node.get("id")]
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("name", NAMES)
def test_references_point_into_the_drawing(name: str) -> None:
    """Prefixing identifiers but not the references to them would lose every clip path and hatch."""
    svg = all_plots()[name].svg
    known = {node.get("id") for node in ET.fromstring(svg).iter()}
    used = {part.split(")")[0].split('"')[0] for part in svg.replace('href="#', "url(#").split("url(#")[1:]}
    assert used <= known
    assert used


def test_drawing_is_repeatable() -> None:
    assert plots.epsilon_bars(BOUNDS, 1e-5).svg == all_plots()["epsilon"].svg


def test_reliability_says_the_metrics() -> None:
    predictive, y = classes()
    alt = all_plots()["reliability"].alt
    assert f"{metrics.ece(predictive.probabilities, y):.3f}" in alt
    assert f"{metrics.mce(predictive.probabilities, y):.3f}" in alt


def test_confidence_counts_right_and_wrong() -> None:
    predictive, y = classes()
    right = int((predictive.labels == y).sum())
    assert f"{right} right and {60 - right} wrong" in all_plots()["confidence"].alt


def test_only_right_answers() -> None:
    """A perfect model has no wrong answers to average over: the bar is left out, not drawn as NaN."""
    predictive, _ = classes()
    alt = plots.uncertainty_of_classes(predictive, predictive.labels).alt
    assert "wrong" not in alt
    assert "nan" not in alt


def test_one_input() -> None:
    """The smallest test set there is draws all plots."""
    (labels, y), (numbers, targets) = classes(1), reals(1)
    for plot in (
        plots.reliability_diagram(labels.probabilities, y),
        plots.confidence_histogram(labels.probabilities, y),
        plots.uncertainty_of_classes(labels, y),
        plots.predicted_against_actual(numbers, targets),
        plots.predicted_against_actual(numbers, targets, individuals=False),
        plots.coverage_curve(numbers, targets),
        plots.uncertainty_of_reals(numbers, targets),
    ):
        ET.fromstring(plot.svg)
        assert "nan" not in plot.alt


def test_epsilons_are_rounded_up_and_kinds_named() -> None:
    plot = all_plots()["epsilon"]
    assert "0.8647 (upper bound)" in plot.alt
    assert "0.8345 (approximation)" in plot.alt
    assert "advanced" not in plot.alt.lower()


def test_approximations_look_different_from_guarantees() -> None:
    """One hatched pattern for the approximation; without one there must be none beyond the key's."""
    sound = {name: bound for name, bound in BOUNDS.items() if bound.kind == UPPER_BOUND}
    hatched = all_plots()["epsilon"].svg.count("fill: url(#")
    assert hatched == plots.epsilon_bars(sound, 1e-5).svg.count("fill: url(#") + 1


def test_names_from_outside_are_escaped_and_not_read_as_formulas() -> None:
    root = ET.fromstring(all_plots()["epsilon"].svg)
    assert "<odd> & $name$" in {node.text for node in root.iter(f"{SVG}text")}
    assert "<odd>" not in all_plots()["epsilon"].svg


def test_epsilons_far_apart_go_on_a_logarithmic_scale() -> None:
    far = {"pld": Bound(0.5, UPPER_BOUND), "zcdp": Bound(1500.0, UPPER_BOUND)}
    texts = " ".join(node.text or "" for node in ET.fromstring(plots.epsilon_bars(far, 1e-5).svg).iter(f"{SVG}text"))
    assert "logarithmic" in texts
    assert "1500" in texts


def test_groups_hide_single_records() -> None:
    assert "6 groups of similar predictions" in all_plots()["groups"].alt
    assert "120 inputs shown" in all_plots()["predicted"].alt
    many = plots.predicted_against_actual(*reals(1000)).alt
    assert f"{plots.MOST_POINTS} inputs shown. Over all 1000" in many


def test_coverage_says_the_metric() -> None:
    predictive, y = reals()
    assert f"at 90% it is {metrics.coverage(predictive, y, 0.9):.1%}" in all_plots()["coverage"].alt


def test_attacker_says_the_bounds_in_per_cent() -> None:
    assert "at 1% false alarms at most 1.80% of the members" in all_plots()["attacker"].alt


def test_global_settings_stay_as_they_were() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    plots.epsilon_bars(BOUNDS, 1e-5)
    assert dict(matplotlib.rcParams) == before


def test_neither_pyplot_nor_an_early_import_of_matplotlib() -> None:
    """Importing the room must not pay for matplotlib, and drawing must not open pyplot's list of figures."""
    code = (
        "import sys; from confide.evaluate import plots; assert 'matplotlib' not in sys.modules; "
        "from confide.privacy.accountants.bound import Bound; "
        "plots.epsilon_bars({'pld': Bound(1.0, 'upper bound')}, 1e-5); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_new_drawings_say_their_numbers() -> None:
    found = all_plots()
    assert "0.7 at epsilon 0.3, 0.9 at epsilon 1, 0.93 at epsilon 3" in found["utility"].alt
    assert "from 0.5 to 1.2. The ceiling is 3." in found["budget"].alt
    assert "sgld 0.93 ± 0.01, sgd 0.9" in found["methods"].alt
    (labels, _), (numbers, _) = classes(), reals()
    assert f"{float(labels.probabilities[3].max()):.3g} on average" in found["class draws"].alt
    assert f"standard deviation of {float(numbers.epistemic[3].sqrt()):.2g}" in found["real draws"].alt


@pytest.mark.parametrize(
    ("draw", "complaint"),
    [
        (lambda: plots_draws.trace(torch.zeros(1)), "two draws at least"),
        (lambda: plots_draws.uncertainty_bands(torch.zeros(3), reals()[0]), "need one place"),
        (lambda: plots_budget.privacy_utility([0.0], [1.0]), "need one above 0"),
        (lambda: plots_budget.budget_over_time([], []), "at least one"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw: Callable[[], Plot], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        draw()
