"""What all commands share: exit codes, sentences, help, progress, and what is imported."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import confide
from confide import errors, methods
from confide.cli import app as application
from confide.cli import method_list, output, settings
from confide.cli.app import main
from confide.cli.records import Records
from confide.methods.sgld import SGLD
from confide.models import networks
from confide.privacy.accountants import sound_epsilon
from confide.privacy.ledger import Ledger
from tests.cli.conftest import Result, is_refusal

Run = Callable[..., Result]
COMMANDS = (["account"], ["plan"], ["fit"], ["predict"], ["ledger", "show"], ["ledger", "limit"])


def test_version(run: Run) -> None:
    assert run("--version") == Result(0, f"confide {confide.__version__}\n", "")


def test_the_door_opens_without_torch() -> None:
    """A second of waiting for every look at the help; `import confide` is part of it."""
    groups = {"ledger": ["show", "limit"], "papers": ["list", "run"], "party": ["serve", "fit"]}
    asked = [["--version"], ["--help"], *([name, "--help"] for name in application.COMMANDS)]
    asked += [[group, name, "--help"] for group, names in groups.items() for name in names]
    script = (
        "import sys; import confide; from confide.cli.app import main\n"
        f"for words in {asked!r}:\n"
        "    code = main(words)\n"
        "    heavy = {'torch', 'numpy', 'scipy', 'rich.markdown', 'pydantic', 'confide.methods'} & set(sys.modules)\n"
        "    if heavy or code:\n"
        "        sys.exit(f'{words}: {code}, loaded {heavy}')\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_list_of_methods_in_the_help_is_that_of_the_methods_themselves() -> None:
    """It is read off their files, without running them."""
    found = {}
    for name, cls in methods.all_methods().items():
        about = (inspect.getdoc(sys.modules[cls.__module__]) or "").split("\n")[0].rstrip(".")
        found[name] = f"{about} ({settings._known(cls)})"
    assert dict(method_list.listed()) == found
    assert method_list.names() == methods.names()


@pytest.mark.parametrize("name", list(application.COMMANDS))
def test_the_list_says_what_each_command_says_of_itself(name: str) -> None:
    about = application.command(name).help.split("\n\n")[0]
    assert about == application.COMMANDS[name]


def test_a_shell_can_complete() -> None:
    for words, place, wanted in (("confide eva", 1, "evaluate"), ("confide fit --check", 2, "--checkpoint")):
        asked = {application.COMPLETION: "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(place)}
        found = subprocess.run(
            [sys.executable, "-m", "confide"], capture_output=True, text=True, env={**os.environ, **asked}
        )
        assert (found.stdout.split(), found.stderr) == ([wanted], "")


def test_no_words_at_all_show_the_help(run: Run) -> None:
    result = run()
    assert (result.code, result.err) == (0, "")
    for name in ("account", "plan", "fit", "predict", "ledger"):
        assert name in result.out


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_teaches_within_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    """Every command explains itself, shows a line to copy, and takes --json."""
    monkeypatch.setenv("COLUMNS", "80")
    result = run(*command, "--help")
    assert (result.code, result.err) == (0, "")
    assert f"confide {' '.join(command)} " in result.out.split("Example")[1]
    assert "--json" in result.out
    assert max(len(line) for line in result.out.splitlines()) <= 80


def every_command() -> list[list[str]]:
    found: list[list[str]] = []
    for name in application.COMMANDS:
        inner = getattr(application.command(name), "commands", {})
        found += [[name, *([one] if one else [])] for one in ["", *inner]]
    return found


@pytest.mark.parametrize("command", every_command(), ids=" ".join)
def test_no_help_is_wider_than_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    """Examples too: a line that the terminal breaks is copied broken."""
    monkeypatch.setenv("COLUMNS", "80")
    result = run(*command, "--help")
    assert result.code == 0
    assert [line for line in result.out.splitlines() if len(line) > 80] == []


def test_examples_of_the_help_are_right(run: Run) -> None:
    """An example that does not parse teaches something wrong."""
    for command in ("account", "plan"):
        text = re.sub(r"\\\s*\n", " ", run(command, "--help").out.split("Example")[1])
        lines = [line.split()[1:] for line in text.splitlines() if line.strip().startswith("confide ")]
        assert lines
        for line in lines:
            assert run(*line, "--json").code == 0


def test_an_unforeseen_error_is_one_sentence_with_the_way_to_see_more(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("inner\nworkings")

    monkeypatch.setattr(Records, "load", broken)
    monkeypatch.delenv(output.DEBUG_VARIABLE, raising=False)
    words = ("fit", "digits", "--epsilon", 1, "--out", tmp_path / "run")
    result = run(*words)
    assert is_refusal(result, code=1)
    assert "KeyError" in result.err
    assert "--debug" in result.err
    assert "Traceback" in run(*words, "--debug").err
    monkeypatch.setenv(output.DEBUG_VARIABLE, "1")
    assert "Traceback" in run(*words).err


def test_a_value_error_of_a_library_is_not_taken_for_a_refusal(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit 2 says "your input is wrong"; a bug must not say that, even where it surfaces in confide's own lines."""
    words = ("fit", "digits", "--epsilon", 1, "--out", tmp_path / "run")
    monkeypatch.setattr(Records, "load", lambda _: int("not a number"))
    assert run(*words).code == 1
    monkeypatch.setattr(Records, "load", lambda _: networks.Recipe.from_dict(None))  # fails in a confide line
    assert run(*words).code == 1


def test_interrupted_from_the_keyboard(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("confide.workflow.run.carry_out", interrupted)
    words = ("fit", "digits", "--epsilon", 1, "--out", tmp_path / "run", "--steps", 2)
    result = run(*words)
    assert is_refusal(result, code=130)
    assert "interrupted" in result.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("keyboard", [signal.default_int_handler, signal.SIG_IGN], ids=["heard", "ignored"])
def test_a_schedulers_signal_ends_a_command_as_the_keyboard_does(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, keyboard: Any
) -> None:
    def ended(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    before, heard = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, keyboard)
    monkeypatch.setattr("confide.workflow.run.carry_out", ended)
    try:
        result = run("fit", "digits", "--epsilon", 1, "--out", tmp_path / "run", "--steps", 2)
    finally:
        signal.signal(signal.SIGINT, heard)
    assert is_refusal(result, code=130)
    assert "interrupted" in result.err
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (MemoryError, 1)])
def test_an_interrupted_run_says_which_command_goes_on(
    run: Run, files: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], code: int
) -> None:
    """Catches a hint that does not work: the command it prints is run as it stands."""
    out, kept = files / "a run", files / "kept"
    words = ("fit", files / "train.csv", "--facts", files / "facts.toml", "--epsilon", 5, "--delta", 1e-3)
    words = (*words, "--steps", 40, "--checkpoint", kept, "--ledger", files / "b.db", "--out", out)  # type: ignore[assignment]
    tell, steps = SGLD.tell, iter(range(100))

    def interrupted(*arguments: Any) -> Any:
        if next(steps) == 25:
            raise error
        return tell(*arguments)

    monkeypatch.setattr(SGLD, "tell", interrupted)
    result = run(*words)
    assert is_refusal(result, code=code)
    assert not out.exists()
    monkeypatch.undo()
    (line,) = result.err.splitlines()
    again = shlex.split(line.partition("goes on: ")[2])
    assert again[0] == "confide"
    for elsewhere in (files / "nowhere", kept.parent):  # a misspelt directory neither starts nor pays for a new run
        wrong = run(*(elsewhere if word == str(kept) else word for word in again[1:]), "--resume", elsewhere)
        assert is_refusal(wrong)
        assert "no run is kept there" in wrong.err
    again[again.index("--checkpoint")] = "--resume"
    finished = run(*again[1:], "--json").json
    assert finished["steps"] == 40
    with Ledger(files / "b.db") as book:
        assert sound_epsilon(book.events("train.csv"), 1e-3) == pytest.approx(finished["epsilon"]["pld"])
    assert finished["epsilon"]["pld"] > 5  # what may have been done twice is paid twice, and stated


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_a_progress_bar_only_on_a_terminal(files: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """And never on stdout. FORCE_COLOR must not put a bar into a log file."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    out, err = io.StringIO(), Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    words = ("fit", files / "train.csv", "--facts", files / "facts.toml", "--epsilon", 3, "--delta", 1e-3)
    rest = ("--steps", 3, "--out", files / "run", "--json")
    assert main([str(word) for word in (*words, *rest)]) == 0
    assert json.loads(out.getvalue())["method"] == "sgld"
    assert ("train.csv" in err.getvalue()) == terminal
    assert ("3/3" in err.getvalue()) == terminal


@pytest.mark.parametrize("answer", ["n", "y", None])
def test_where_nothing_can_be_learnt_a_terminal_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str | None
) -> None:
    """Text where numbers are declared was paid for. A refusal would tell of cells: without a terminal a run exists."""
    (tmp_path / "a.csv").write_text("a,b,price\n" + "0.1,0.2,cheap\n0.3,0.9,dear\n" * 40)
    (tmp_path / "f.toml").write_text('records = 80\ntarget = "price"\ntarget_bounds = [0, 9]\nbounds = [0, 1]\n')
    err = Terminal() if answer else io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n") if answer else io.StringIO())
    words = ("fit", tmp_path / "a.csv", "--facts", tmp_path / "f.toml", "--method", "sgd", "--steps", 2, "--epsilon", 1)
    code = main([str(word) for word in (*words, "--ledger", tmp_path / "b.db", "--out", tmp_path / "run")])
    assert "target 'price' has no number in any record" in err.getvalue()
    assert ("Go on all the same?" in err.getvalue()) == bool(answer)
    assert (code == 0) == (tmp_path / "run").exists() == (tmp_path / "b.db").exists() == (answer != "n")


def test_bad_words_give_the_nearest_command(run: Run) -> None:
    assert is_refusal(run("acount"))
    assert "account" in run("acount").err
    assert is_refusal(run("ledger"))
    assert "show, limit" in run("ledger").err


def test_one_line_hides_what_a_terminal_would_obey() -> None:
    """A file name may hold escape codes; printed raw they would write to the terminal."""
    assert output.one_line("a\n b\x1b[31m\u202e") == "a b\\x1b[31m\\u202e"
    assert len(output.one_line("x" * 10_000)) <= 600


def test_as_a_program(tmp_path: Path) -> None:
    """`python -m confide` prices a run without loading what only a fit needs; a closed pipe is no traceback."""
    script = (
        "import sys; from confide.cli.app import main; code = main(sys.argv[1:]); "
        "heavy = {'sklearn', 'matplotlib', 'pyarrow', 'pandas', 'jinja2'} & set(sys.modules); "
        "sys.exit(f'loaded {heavy}' if heavy else code)"
    )
    words = ["account", "--rate", "0.1", "--noise-multiplier", "2", "--steps", "10", "--delta", "1e-5", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["sampling"] == "poisson"
    closed = subprocess.Popen(
        [sys.executable, "-m", "confide", *words[:-1]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert closed.stdout is not None
    closed.stdout.close()
    assert closed.stderr is not None
    assert closed.stderr.read() == b""
    closed.stderr.close()
    assert closed.wait() != 0


def test_own_errors_are_one_sentence_and_not_unexpected() -> None:
    """Whatever confide raises by itself: a rank or a party that is lost is no fault of the program."""
    own = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    plain = [kind for kind in own if not issubclass(kind, Warning) and "__init__" not in vars(kind)]
    assert {errors.RankLost, errors.PartyLost, errors.RanksDisagree} <= set(plain)
    for kind in plain:
        assert output._explain(kind("one sentence"))[1] == "one sentence", kind
