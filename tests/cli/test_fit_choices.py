"""Priors, styles of clipping and a clip that follows the records, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from confide.cli import fit_options
from confide.cli.app import main
from confide.mechanism.gaussian import ClippingStyle

WORDS = ["fit", "digits", "--epsilon", "3", "--delta", "1e-4", "--hidden", "", "--steps", "5", "--json"]


def fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str, method: str = "sgld") -> dict[str, Any]:
    assert main([*WORDS, "--method", method, *more, "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    capsys.readouterr()
    found: dict[str, Any] = json.loads((tmp_path / "out" / "run.json").read_text())
    return found


@pytest.mark.parametrize(
    ("words", "prior"),
    [
        (["--prior", "laplace", "--prior-scale", "0.5"], {"scale": 0.5}),
        (["--prior", "scale-mixture", "--prior-scale", "2"], {"share": 0.5, "wide": 2.0, "narrow": 0.2}),
        (["--prior", "flat"], {}),
        (["--prior-scale", "3"], {"scale": 3.0}),
    ],
)
def test_priors(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], prior: dict[str, float]) -> None:
    written = fitted(tmp_path, capsys, *words)["method"]["parameters"]["prior"]
    assert all(str(value) in json.dumps(written) for value in prior.values())
    name = words[words.index("--prior") + 1].replace("-", "") if "--prior" in words else "gaussian"
    assert name in json.dumps(written).lower().replace("-", "").replace("_", "")


@pytest.mark.parametrize("style", ["per-layer", "automatic"])
def test_styles_of_clipping(tmp_path: Path, capsys: pytest.CaptureFixture[str], style: str) -> None:
    found = fitted(tmp_path, capsys, "--clipping", style)
    assert {block["clipping"] for block in found["plan"]["blocks"]} == {style}
    assert found["epsilon"]["pld"] <= 3


def test_a_clip_that_follows_is_paid_for_within_the_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches counts that are asked for and not charged: they are events of their own, inside the target."""
    found = fitted(tmp_path, capsys, "--adaptive-clip", "0.5")
    assert len(found["events"]) == 2
    assert 2.9 < found["epsilon"]["pld"] <= 3
    ended = found["posterior"]["facts"]["adapted_clip"]
    assert ended > 0
    assert ended != found["plan"]["blocks"][0]["clip"], "where it ended is told, not its start alone"


@pytest.mark.parametrize("more", [[], ["--chains", "2", "--steps", "12"]])
def test_clips_that_change_over_time(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    """Noise goes with the clip: a block whose noise stayed would be cheaper or dearer, and the total not the target."""
    found = fitted(tmp_path, capsys, "--clip-schedule", "3,1.5,0.75", *more)
    blocks = found["plan"]["blocks"]
    assert [block["clip"] for block in blocks] == [3.0, 1.5, 0.75]
    assert len({block["noise_multiplier"] for block in blocks}) == 1
    assert 2.9 < found["epsilon"]["pld"] <= 3


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--clip-schedule", "3,no"], "--clip-schedule=3,no: must be numbers"),
        (["--clip-schedule", "3,0"], "--clip-schedule=3,0: every clip must be greater than 0"),
        (["--clip-schedule", "3,1", "--clip", "2"], "give one of the two"),
        (["--clip-schedule", "3,1", "--adaptive-clip", "0.5"], "give one of the two"),
        (["--clip-schedule", "3,1", "--method", "sep"], "--clip-schedule=[3.0, 1.0]: sep has one unit for all steps"),
        (["--clip-schedule", "3,1", "--method", "tabular"], "--clip-schedule=[3.0, 1.0]: tabular has one unit"),
        (["--prior", "round"], "--prior=round: must be one of gaussian, laplace, scale-mixture, flat"),
        (["--prior", "flat", "--prior-scale", "2"], "a flat prior has no scale"),
        (["--method", "sep", "--prior", "laplace"], "--prior=laplace: prior="),
        (["--method", "additive", "--prior", "laplace"], "additive has no prior of its own"),
        (["--clipping", "round"], "--clipping=round"),
        (["--adaptive-clip", "1.5"], "--adaptive-clip=1.5"),
        (["--adaptive-clip", "0.5", "--chains", "2"], "needs declared records and classes, one chain and"),
    ],
)
def test_bad_choices_get_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    method = [] if "--method" in words else ["--method", "sgld"]
    assert main([*WORDS, *method, *words, "--out", str(tmp_path / "out")]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_noise_of_a_target_is_not_learnt_beside_such_a_clip(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fit", "diabetes", "--epsilon", "3", "--delta", "1e-3", "--method", "sgld", "--steps", "5"]
    words += ["--adaptive-clip", "0.5", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert "noise" in capsys.readouterr().err
    assert main([*words, "--noise-scale", "0.5"]) == 0


def test_the_help_knows_the_styles() -> None:
    assert get_args(ClippingStyle) == fit_options.CLIPPING_STYLES


class TestHoldOut:
    """`--bayesian-holdout`: what a run costs records drawn like public ones, beside the DP number."""

    def files(self, tmp_path: Path) -> tuple[Path, Path]:
        rows = [f"{place % 7 / 7:.3f},{place % 5 / 5:.3f},{'yes' if place % 7 > 3 else 'no'}" for place in range(400)]
        for name, some in (("train", rows[:300]), ("fresh", rows[300:])):
            (tmp_path / f"{name}.csv").write_text("\n".join(["a,b,kind", *some]) + "\n")
        return tmp_path / "train.csv", tmp_path / "fresh.csv"

    def words(self, tmp_path: Path, fresh: Path, *more: str) -> list[str]:
        start = ["fit", str(tmp_path / "train.csv"), "--target", "kind", "--assume-public", "--method", "sgld"]
        start += ["--hidden", "", "--steps", "20", "--batch", "60", "--epsilon", "2", "--delta", "1e-3"]
        return [*start, "--bayesian-holdout", str(fresh), "--out", str(tmp_path / "out"), *more]

    def test_both_numbers_are_told(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        _, fresh = self.files(tmp_path)
        assert main(self.words(tmp_path, fresh, "--json")) == 0, capsys.readouterr().err
        found = json.loads(capsys.readouterr().out)
        assert found["bayesian"]["rule"] == "averaged"
        assert "the hold-out records are public" in json.dumps(found["bayesian"])
        written = json.loads((tmp_path / "out" / "run.json").read_text())
        assert written["config"]["bayesian"] == found["bayesian"]
        assert written["epsilon"]["pld"] <= 2, "the DP number is what was paid, whatever the other one says"

    @pytest.mark.parametrize(("more", "complaint"), [(["--chains", "2"], "hold_out: what fresh records meet")])
    def test_what_cannot_be_followed_is_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], complaint: str
    ) -> None:
        train, fresh = self.files(tmp_path)
        assert main(self.words(tmp_path, fresh, *more)) == 2
        assert complaint in capsys.readouterr().err
        assert main(self.words(tmp_path, train)) == 2
        assert "is the training file" in capsys.readouterr().err


@pytest.mark.parametrize(("method", "way_out"), [("ep", "sep is its private form"), ("adf", "papers run dp-sep")])
def test_methods_that_cannot_be_private_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, way_out: str
) -> None:
    assert main([*WORDS, "--method", method, "--out", str(tmp_path / "out")]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"--method={method}: keeps a factor for every record" in told
    assert way_out in told


def test_a_mixture_has_a_command_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--method", "em", "--out", str(tmp_path / "out")]) == 2
    assert "`confide mixture`" in " ".join(capsys.readouterr().err.split())
