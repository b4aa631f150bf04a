"""`account` and `plan`: the documented lines give the documented numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from confide.privacy.accountants import sound_epsilon
from confide.privacy.events import GaussianEvent
from tests.cli.conftest import Result, is_refusal

Run = Callable[..., Result]
ACCOUNT = ["account", "--rate", "0.0042666667", "--noise-multiplier", "1.3", "--steps", "3516", "--delta", "1e-5"]
PLAN = ["plan", "--epsilon", "1", "--delta", "1e-5", "--records", "60000", "--batch", "256", "--epochs", "15"]


def test_account_prints_the_documented_object(run: Run) -> None:
    """Catches a wrong event, a changed key and a number from the wrong accountant."""
    result = run(*ACCOUNT, "--json")
    values = result.json
    assert (result.code, result.err) == (0, "")
    assert (values["delta"], values["adjacency"], values["sampling"]) == (1e-5, "add-remove", "poisson")
    assert values["epsilon"]["pld"] == pytest.approx(0.8646, abs=2e-4)
    assert values["epsilon"]["rdp"] == pytest.approx(0.9546, abs=2e-3)
    assert values["epsilon"]["gdp_clt"] == pytest.approx(0.8345, abs=1e-4)
    assert {"zcdp", "advanced_composition"} <= set(values["epsilon"])
    assert values["kind"]["pld"] == values["kind"]["rdp"] == "upper bound"
    assert values["kind"]["gdp_clt"] == "approximation"
    attacker = values["attacker"]
    assert attacker["advantage"] == pytest.approx(0.0902, abs=2e-4)
    assert attacker["accuracy"] == pytest.approx(0.5451, abs=2e-4)
    assert attacker["naive_accuracy"] == pytest.approx(0.7036, abs=2e-4)
    assert attacker["tpr_at_fpr_0.01"] == pytest.approx(0.0181, abs=2e-4)


def test_account_for_people_puts_the_sound_number_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a table that leads with an approximation, drops a kind, or is wider than 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    result = run(*ACCOUNT)
    lines = result.out.splitlines()
    assert result.code == 0
    assert lines[0].startswith("epsilon 0.8646 at delta 1e-05")
    assert result.out.index("(PLD)") < result.out.index("(RDP") < result.out.index("(GDP, CLT)")
    assert "approximation" in result.out
    assert "upper bound" in result.out
    assert max(len(line) for line in lines) <= 80


@pytest.mark.parametrize(
    ("extra", "event", "adjacency"),
    [
        (["--adjacency", "replace-one"], GaussianEvent(2.0, "poisson", 0.1, 30), "replace-one"),
        (
            ["--adjacency", "replace-one", "--sampling", "fixed-size", "--records", "500"],
            GaussianEvent(2.0, "fixed-size", 0.1, 30, 500),
            "replace-one",
        ),
        # 30 steps of a tenth of the records are three passes.
        (
            ["--adjacency", "replace-one", "--sampling", "shuffle"],
            GaussianEvent(2.0, "shuffle", 0.1, 3),
            "replace-one",
        ),
    ],
)
def test_account_prices_what_was_typed(run: Run, extra: list[str], event: GaussianEvent, adjacency: str) -> None:
    """Catches a sampler or an adjacency that is dropped on the way, and steps taken for passes."""
    values = run(
        "account", "--rate", 0.1, "--noise-multiplier", 2, "--steps", 30, "--delta", 1e-5, *extra, "--json"
    ).json
    assert values["epsilon"]["pld"] == sound_epsilon([event], 1e-5, adjacency)  # type: ignore[arg-type]
    assert values["adjacency"] == adjacency
    assert values["sampling"] == event.sampling


def test_full_batch_needs_no_rate(run: Run) -> None:
    values = run(
        "account", "--noise-multiplier", 10, "--steps", 200, "--delta", 0.004, "--sampling", "full-batch", "--json"
    )
    assert values.json["epsilon"]["pld"] == pytest.approx(4.1944, abs=1e-3)


def test_passes_are_never_counted_too_few(run: Run) -> None:
    """A rate of a third typed with few digits still makes three batches a pass: 9 steps are 3 passes, not 2."""
    words = [
        "account",
        "--noise-multiplier",
        "2",
        "--delta",
        "1e-5",
        "--steps",
        "9",
        "--sampling",
        "shuffle",
        "--adjacency",
        "replace-one",
        "--json",
    ]
    typed, exact = run(*words, "--rate", "0.33333333"), run(*words, "--rate", repr(1 / 3))
    assert typed.json["epsilon"] == exact.json["epsilon"]


@pytest.mark.parametrize("sampling", ["fixed-size", "shuffle"])
@pytest.mark.parametrize("command", ["account", "plan"])
def test_a_combination_without_a_sound_bound_is_refused_with_the_way_out(run: Run, command: str, sampling: str) -> None:
    words = [*(ACCOUNT if command == "account" else PLAN), "--sampling", sampling]
    result = run(*words, *([] if command == "plan" else ["--records", 60000, "--rate", repr(256 / 60000)]))
    assert is_refusal(result)
    assert "--adjacency replace-one" in result.err
    assert "--sampling poisson" in result.err


@pytest.mark.parametrize(
    "words",
    [
        "account --rate 0.1 --steps 10 --delta 1e-5 --noise-multiplier 1e-9",
        "account --rate 0.1 --steps 1000 --delta 1e-5 --noise-multiplier 0.001",
        "account --rate 0.1 --steps 1000000000000 --delta 1e-5 --noise-multiplier 1",
        "account --rate 0.1 --steps 100000000 --delta 1e-5 --noise-multiplier 1",
        "plan --epsilon 1000000 --delta 1e-5 --records 1000 --batch 100 --steps 5",
        "plan --epsilon 1 --delta 1e-5 --records 1000000 --batch 1 --epochs 1000",
    ],
)
def test_numbers_beyond_all_use_are_refused(run: Run, words: str) -> None:
    """No accountant can put them into a number; catches an overflow that reaches the user as a bug."""
    assert is_refusal(run(*words.split()))


def test_plan_prints_the_documented_object(run: Run) -> None:
    """Catches noise calibrated by the wrong accountant and steps rounded the wrong way."""
    values = run(*PLAN, "--json").json
    assert values["noise_multiplier"] == pytest.approx(1.1851, abs=1e-3)
    assert values["rate"] == 256 / 60000
    assert values["steps"] == 3516
    assert 0.999 < values["epsilon"]["pld"] <= 1.0
    assert 0 < values["attacker"]["advantage"] < 1
    assert "step_size" not in values


def test_plan_and_account_agree(run: Run) -> None:
    plan = run(*PLAN, "--json").json
    words = (
        "--rate",
        repr(plan["rate"]),
        "--noise-multiplier",
        repr(plan["noise_multiplier"]),
        "--steps",
        plan["steps"],
    )
    account = run("account", *words, "--delta", 1e-5, "--json").json
    assert account["epsilon"] == plan["epsilon"]


def test_plan_takes_steps_instead_of_epochs(run: Run) -> None:
    words = ["plan", "--epsilon", 1, "--delta", 1e-5, "--records", 1000, "--batch", 100]
    assert run(*words, "--steps", 20, "--json").json["noise_multiplier"] == pytest.approx(
        run(*words, "--epochs", 2, "--json").json["noise_multiplier"]
    )


def test_plan_gives_step_sizes_of_samplers(run: Run) -> None:
    """The published setting n = 50000, T = 10000, C = 1: catches a wrong convention (a factor of 2 or of n)."""
    words = [
        "plan",
        "--epsilon",
        "0.1",
        "--delta",
        "1e-5",
        "--records",
        "50000",
        "--batch",
        "128",
        "--steps",
        "10000",
        "--clip",
        "1",
        "--json",
        "--method",
    ]
    sgld = run(*words, "sgld").json["step_size"]
    assert sgld["fixed"] == pytest.approx(5.2225e-3, rel=2e-3)
    assert sgld["decreasing_first"] == pytest.approx(7.35e-2, rel=1e-2)
    assert sgld["wang2015"] == pytest.approx(1.479e-6, rel=1e-3)
    sghmc = run(*words, "sghmc", "--friction", 0.1).json["step_size"]
    assert sghmc["fixed"] == pytest.approx(0.2 * sgld["fixed"], rel=1e-6)


def test_plan_for_people_fits_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run(
        "plan", "--epsilon", 1, "--delta", 1e-4, "--records", 1000, "--batch", 100, "--steps", 5, "--method", "sgnht"
    )
    assert result.code == 0
    assert result.out.startswith("noise multiplier ")
    assert "largest fixed step size" in result.out
    assert max(len(line) for line in result.out.splitlines()) <= 80
