"""What may be seen of a run while it lasts, and what becomes of a run that is interrupted."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import confide
from confide import callbacks, methods
from confide.cli.app import main
from confide.errors import CallbackWarning, Refusal
from confide.privacy.ledger import Ledger
from confide.running.callbacks import EarlyStopping, JsonLines, Moment, TensorBoard
from confide.running.journal import Checkpoints
from confide.running.live import sparkline
from tests.conformance.conftest import Case, classification, regression, small_plan

STEPS = 12


def fitted(case: Case, method: Any = None, ledger: Ledger | None = None, **options: Any) -> confide.Run:
    data = case.data(ledger=ledger)
    return confide.fit(method or methods.get("sgld")(), case.module, data, small_plan(case), seed=0, **options)


def validation(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return case.x[:20], case.y[:20]


class TestMoments:
    @pytest.mark.parametrize("name", methods.for_task("classification"))
    def test_looking_changes_nothing(self, name: str) -> None:
        case, seen = classification(), []

        def look(moment: Moment) -> None:
            seen.append((moment.step, moment.posterior.summary(case.x[:3]).centre.shape[0], len(moment.metrics)))

        plain = fitted(case, methods.get(name)())
        watched = fitted(case, methods.get(name)(), callbacks=[look], validation=validation(case))
        assert torch.equal(plain.posterior.mean(), watched.posterior.mean())
        assert [step for step, *_ in seen] == list(range(1, STEPS + 1))
        assert all(inputs == 3 and metrics > 3 for _, inputs, metrics in seen)

    def test_the_last_moment_is_the_result(self) -> None:
        case, last = regression(), []
        run = fitted(case, callbacks=[last.append], validation=validation(case))
        assert torch.equal(last[-1].posterior.mean(), run.posterior.mean())
        assert (last[-1].step, last[-1].steps) == (STEPS, STEPS)

    def test_without_a_validation_set_there_are_no_metrics(self) -> None:
        seen: list[Moment] = []
        fitted(classification(), callbacks=[seen.append])
        assert seen[0].predictive is None
        assert seen[0].metrics == {}

    def test_every_is_kept_to(self, tmp_path: Path) -> None:
        case = classification()
        fitted(case, callbacks=[JsonLines(tmp_path / "run.jsonl", every=5)], validation=validation(case))
        lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [5, 10, 12]
        assert {"accuracy", "nll"} <= set(lines[0]["metrics"])

    def test_tensorboard(self, tmp_path: Path) -> None:
        pytest.importorskip("tensorboard")
        case = classification()
        fitted(case, callbacks=[TensorBoard(tmp_path / "board")], validation=validation(case))
        assert list((tmp_path / "board").iterdir())


class TestStopping:
    @pytest.mark.parametrize("name", ["sgld", "sgd", "bbp", "sghmc"])
    def test_a_run_ends_where_a_callback_says(self, name: str) -> None:
        case, ledger = classification(), Ledger()
        run = fitted(case, methods.get(name)(), ledger, callbacks=[lambda moment: moment.step >= 9])
        assert run.posterior.facts["stopped_after"] == 9
        charged = sum(event.count for event in ledger.events(""))
        assert charged == STEPS, "all steps stay paid for"
        assert sum(event.count for event in run.privacy.events) == STEPS, "and are stated"
        run.posterior.predict(case.x)

    def test_not_before_there_is_a_draw(self) -> None:
        """Half of a chain is thrown away: a posterior of no draws would be worth nothing."""
        run = fitted(classification(), callbacks=[lambda moment: True])
        assert run.posterior.facts["stopped_after"] == 7

    def test_early_stopping_waits_for_its_patience(self) -> None:
        stop = EarlyStopping("nll", patience=2)

        def at(step: int, nll: float) -> bool:
            moment = Moment(step, 100, None)  # type: ignore[arg-type]
            vars(moment)["metrics"] = {"nll": nll}
            return stop(moment)

        assert [at(1, 1.0), at(2, 0.5), at(3, 0.6), at(4, 0.4), at(5, 0.4), at(6, 0.9)] == [False] * 5 + [True]

    def test_larger_is_better_for_accuracy(self) -> None:
        stop = EarlyStopping("accuracy", patience=1)
        moments = [Moment(step, 9, None) for step in range(3)]  # type: ignore[arg-type]
        for moment, value in zip(moments, (0.5, 0.6, 0.55), strict=True):
            vars(moment)["metrics"] = {"accuracy": value}
        assert [stop(moment) for moment in moments] == [False, False, True]

    @pytest.mark.parametrize("name", ["additive", "noise-aware", "sep"])
    def test_a_method_whose_posterior_needs_all_steps_does_not_stop(self, name: str) -> None:
        case, ledger = classification(), Ledger()
        with pytest.raises(Refusal, match="cannot stop early"):
            fitted(case, methods.get(name)(), ledger, callbacks=[EarlyStopping()], validation=validation(case))
        assert not ledger.entries()


class TestRefusals:
    def test_private_records_are_no_validation_set(self) -> None:
        case = classification()
        for given in (case.data(), (case.data(), case.y)):
            with pytest.raises(TypeError, match="validation"):
                fitted(case, callbacks=[print], validation=given)

    def test_early_stopping_needs_public_records(self) -> None:
        with pytest.raises(Refusal, match="give validation="):
            fitted(classification(), callbacks=[EarlyStopping()])

    def test_what_cannot_be_called_is_refused(self) -> None:
        ledger = Ledger()
        with pytest.raises(TypeError, match="must be a function"):
            fitted(classification(), ledger=ledger, callbacks=["verbose"])
        assert not ledger.entries()

    @pytest.mark.parametrize(("metric", "patience"), [("speed", 1), ("nll", 0)])
    def test_settings(self, metric: str, patience: int) -> None:
        with pytest.raises(Refusal):
            EarlyStopping(metric, patience)

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(Refusal, match="does not exist"):
            JsonLines(tmp_path / "none" / "run.jsonl")


def test_an_estimator_shows_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.rand(60, 2, generator=torch.Generator().manual_seed(0)).numpy()
    model = confide.PrivateBayesClassifier(
        "sgd", bounds=(0, 1), classes=2, records=60, steps=20, batch=30, delta=1e-3, hidden=(), seed=0, verbose=True
    )
    model.fit(x, (x[:, 0] > 0.5).astype(int))
    assert capsys.readouterr().err.endswith("\rstep 20 of 20 (100%)\n")


class Broken(Exception):  # noqa: N818
    """Of a user's callback."""


def broken_at(step: int) -> Any:
    def broken(moment: Moment) -> None:
        if moment.step == step:
            raise Broken("no more disk")

    return broken


class TestInterruptions:
    def test_without_a_checkpoint_the_run_goes_on(self) -> None:
        case = classification()
        with pytest.warns(CallbackWarning, match="no more disk"):
            run = fitted(case, callbacks=[broken_at(4)])
        assert torch.equal(run.posterior.mean(), fitted(case).posterior.mean())

    def test_a_terminal_that_is_gone_or_an_error_without_words_loses_nothing(self) -> None:
        """What raises beside a paid run, and whatever that says of itself, does not end it."""

        class WordlessError(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no words")

        def gone(done: int, total: int) -> None:
            raise BrokenPipeError("gone")

        def wordless(moment: Moment) -> None:
            raise WordlessError

        case = classification()
        with pytest.warns(CallbackWarning, match="gone"), pytest.warns(CallbackWarning, match="WordlessError"):
            run = fitted(case, progress=gone, callbacks=[wordless])
        assert torch.equal(run.posterior.mean(), fitted(case).posterior.mean())

    @pytest.mark.parametrize("kind", ["callback", "progress"])
    def test_with_a_checkpoint_the_last_step_is_kept(self, kind: str, tmp_path: Path) -> None:
        case, ledger = classification(), Ledger()

        def progress(done: int, total: int) -> None:
            if done == 8:
                raise Broken("no more disk")

        options: dict[str, Any] = {"callbacks": [broken_at(8)]} if kind == "callback" else {"progress": progress}
        checkpoint = Checkpoints(tmp_path / "kept", every=5)
        with pytest.raises(Broken) as caught:
            fitted(case, ledger=ledger, checkpoint=checkpoint, **options)
        assert "up to step 8 of 12; the same call goes on" in caught.value.__notes__[0]
        steps: list[int] = []
        fitted(case, ledger=ledger, checkpoint=checkpoint, progress=lambda done, _: steps.append(done))
        assert steps == [9, 10, 11, 12], "the steps that were made are not made again"

    def test_a_state_within_a_step_is_not_kept(self, tmp_path: Path) -> None:
        """A method that raises half way has moved the position: the checkpoint before it is the one that counts."""
        from confide.methods.sgd import SGD

        calls = []

        class Half(SGD):
            def tell(self, problem: Any, state: Any, release: Any) -> Any:
                calls.append(1)
                if len(calls) == 10:  # two of them are rehearsed
                    problem.position.add_(1e6)
                    raise Broken("half way")
                return super().tell(problem, state, release)

        case = classification()
        checkpoint = Checkpoints(tmp_path / "kept", every=5)
        with pytest.raises(Broken) as caught:
            fitted(case, Half(), checkpoint=checkpoint)
        assert "up to step 5 of 12" in caught.value.__notes__[0]
        run = fitted(case, Half(), checkpoint=checkpoint)
        assert float(run.posterior.mean().abs().max()) < 1e5


SCRIPT = """
import os, signal, sys
import torch, confide
from confide.running.journal import Checkpoints
from tests.conformance.conftest import classification, small_plan

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
case = classification()
made = []
def progress(done, total):
    made.append(done)
    if len(sys.argv) > 2 and done == 7:
        os.kill(os.getpid(), signal.SIGINT)
try:
    confide.fit(confide.methods.SGD(), case.module, case.data(), small_plan(case), seed=0, progress=progress,
                checkpoint=Checkpoints(sys.argv[1], every=100))
    print("finished", made)
except KeyboardInterrupt as error:
    print("interrupted", made, error.__notes__[0])
"""


def test_ctrl_c_keeps_the_step_that_is_over(tmp_path: Path) -> None:
    where = str(tmp_path / "kept")
    said = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT, where, *more],
            capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2],
        ).stdout
        for more in (["interrupt"], [])
    ]  # fmt: skip
    assert said[0].startswith("interrupted [1, 2, 3, 4, 5, 6, 7]"), said[0]
    assert "up to step 7 of 12" in said[0]
    assert said[1].startswith("finished [8, 9, 10, 11, 12]")


def test_a_second_interrupt_does_not_wait() -> None:
    from confide.running.interrupts import held_back

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
    with held_back():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


class TestLiveCurves:
    """Curves of public records while a run lasts: on a terminal, in a file, in a notebook."""

    def run(self, curves: Any, steps: int = 20) -> None:
        case = classification()
        confide.fit(
            methods.SGLD(), case.module, case.data(), small_plan(case, steps=steps), seed=1,
            validation=(case.x, case.y), callbacks=[curves],
        )  # fmt: skip

    @pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
    def test_a_terminal_sees_them_grow_in_place(self, encoding: str) -> None:
        file = Screen(encoding)
        self.run(callbacks.LiveCurves(["nll", "accuracy"], every=5, file=file))
        looks = file.getvalue().split("step ")[1:]
        assert len([look for look in looks if " of 20" in look]) == 4
        assert file.getvalue().count("\x1b[3A") == 3  # back to the first of three lines, but for the first look
        last = file.getvalue().rsplit("\x1b[3A", 1)[1]
        assert all(len(line) < 80 for line in last.splitlines())
        assert ("▁" in last) == (encoding == "utf-8")
        last.encode(encoding)

    def test_a_file_gets_a_line_for_every_look(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.run(callbacks.LiveCurves(every=10))
        lines = capsys.readouterr().err.splitlines()
        assert [line.partition(":")[0] for line in lines] == ["step 10 of 20", "step 20 of 20"]
        assert "nll" in lines[0]
        assert "accuracy" in lines[0]

    def test_a_notebook_sees_one_picture_that_is_drawn_anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shown: list[str] = []

        class Handle:
            def update(self, picture: str) -> None:
                shown.append(picture)

        def display(picture: str, display_id: bool) -> Handle:
            assert display_id
            shown.append(picture)
            return Handle()

        shell = types.ModuleType("IPython")
        vars(shell)["get_ipython"] = type("ZMQInteractiveShell", (), {})
        screen = types.ModuleType("IPython.display")
        vars(screen).update(HTML=str, display=display)
        monkeypatch.setitem(sys.modules, "IPython", shell)
        monkeypatch.setitem(sys.modules, "IPython.display", screen)
        self.run(callbacks.LiveCurves(every=5))
        assert len(shown) == 4
        assert "<polyline" in shown[-1]
        assert "nll" in shown[-1]
        assert "<script" not in shown[-1]

    def test_they_need_public_records_and_known_metrics(self) -> None:
        case = classification()
        with pytest.raises(ValueError, match="LiveCurves needs public records"):
            confide.fit(methods.SGLD(), case.module, case.data(), small_plan(case), callbacks=[callbacks.LiveCurves()])
        with pytest.raises(ValueError, match="metrics='loss'"):
            callbacks.LiveCurves(["loss"])

    def test_values_that_are_no_numbers_are_blanks(self) -> None:
        assert sparkline([1.0, float("nan"), 2.0]) == "▁ █"
        assert sparkline([3.0, 3.0]) == "▁▁"
        assert sparkline([]) == ""


def test_estimators_and_the_command_show_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = np.random.default_rng(0)
    x = generator.uniform(0, 1, (300, 2))
    y = (x[:, 0] > 0.5).astype(int)
    seen: list[float] = []
    model = confide.PrivateBayesClassifier(
        "sgld", epsilon=5, bounds=(0, 1), classes=2, records=300, steps=20, hidden=(),
        callbacks=[lambda moment: seen.append(moment.metrics["accuracy"]), callbacks.LiveCurves(every=10)],
    )  # fmt: skip
    model.fit(x[:250], y[:250], validation=(x[250:], y[250:]))
    assert len(seen) == 20
    assert "step 20 of 20: nll" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"validation=ndarray: must be a pair"):
        model.fit(x, y, validation=x)
    for name, rows in (("train", slice(0, 250)), ("public", slice(250, 300))):
        lines = [f"{a},{b},{c}" for (a, b), c in zip(x[rows].tolist(), y[rows].tolist(), strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["a,b,ill", *lines]) + "\n")
    (tmp_path / "facts.toml").write_text('records = 250\ntarget = "ill"\nclasses = 2\nbounds = [0, 1]\n')
    words = ["fit", str(tmp_path / "train.csv"), "--facts", str(tmp_path / "facts.toml"), "--epsilon", "5"]
    words += ["--validation", str(tmp_path / "public.csv"), "--steps", "20", "--method", "sgld"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    assert "step 20 of 20: nll" in capsys.readouterr().err


class Screen(io.StringIO):
    """A terminal."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return True
