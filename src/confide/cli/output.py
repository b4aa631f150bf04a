"""What every command shares: exit codes, one-sentence errors, JSON on stdout, prose on stderr.

    0    success
    1    an error nobody foresaw: one sentence, and how to see the traceback; or a paid run that could not be saved
         as a whole, and where its posterior is
    2    bad arguments or bad input: one sentence
    3    a privacy budget would be exceeded: one sentence, and nothing was spent
    130  interrupted from the keyboard, or by SIGTERM

A `Refusal` is written for the user; a ValueError out of Python or another library is an error nobody foresaw.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shlex
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import FrameType
from typing import Any

import typer
from rich.console import Console

from confide.errors import (
    BudgetExceeded,
    CommandError,
    CuratorNote,
    NothingToLearn,
    PartyLost,
    RankLost,
    Refusal,
    Unfinished,
)
from confide.wording import json_text

# 2 is what shells use for bad usage, and 130 for an interrupt.
SUCCESS, UNFORESEEN, REFUSED, OVER_BUDGET, INTERRUPTED = 0, 1, 2, 3, 130
DEBUG_VARIABLE = "CONFIDE_DEBUG"
LONGEST_SENTENCE = 600
"""Some lines of a terminal: what quotes a file or a user's text does not run on without end."""
LONGEST_COMMAND = 20_000
"""A command that is to be copied is of use only as a whole."""

# Newer versions of typer carry their own copy of click, older ones use the package: taken from typer, it fits both.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


_words: ContextVar[tuple[str, ...]] = ContextVar("words", default=())
_lasting: ContextVar[contextlib.ExitStack] = ContextVar("lasting")


def called_as() -> str:
    """The command line as it was typed, fit to be copied."""
    return shlex.join(("confide", *_words.get()))


def run(command: Any, arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; every error becomes one sentence on stderr."""
    debug = "--debug" in arguments or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    words = [word for word in arguments if word != "--debug"]
    _words.set(tuple(words))
    try:
        with _quiet(debug), _ended_gently():
            _invoke(command, words)
        sys.stdout.flush()
    except typer.Exit as stop:
        return int(stop.exit_code)
    except BrokenPipeError:
        # Whoever read our output has gone (`confide ... | head`); Python must not complain once more at its exit.
        with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNFORESEEN
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        code, sentence = _explain(error)
        whole = isinstance(error, KeyboardInterrupt | Unfinished)  # they may name the command that goes on
        _complain(command, words, sentence, LONGEST_COMMAND if whole else LONGEST_SENTENCE)
        return code
    return SUCCESS


@contextlib.contextmanager
def _ended_gently() -> Iterator[None]:
    """What a scheduler sends before it kills (SIGTERM) ends a command as Ctrl-C does: what was paid for is kept.

    A rank of several is left alone: it may be waiting for another, where nothing of Python runs.
    """
    alone = threading.current_thread() is threading.main_thread() and "RANK" not in os.environ
    if not alone or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """As the keyboard would, also where nobody listens to it: a shell starts what runs behind with SIGINT ignored."""
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(number, frame)
    else:
        raise KeyboardInterrupt


def _invoke(command: Any, arguments: list[str]) -> None:
    """The parsing and calling half of click's `main`, without its own handling of errors."""
    with contextlib.ExitStack() as lasting, command.make_context("confide", arguments) as context:
        _lasting.set(lasting)
        command.invoke(context)


def for_this_command(what: contextlib.AbstractContextManager[None]) -> None:
    """Enter a context that is left when the command ends, however it does."""
    _lasting.get().enter_context(what)


def _explain(error: BaseException) -> tuple[int, str]:

    if isinstance(error, KeyboardInterrupt):
        told = "interrupted; what was charged to a ledger stays charged, and no result was written"
        return INTERRUPTED, str(error) or told
    if isinstance(error, _UsageError):
        return REFUSED, _usage_sentence(error)
    if isinstance(error, BudgetExceeded):
        return OVER_BUDGET, str(error)
    if isinstance(error, Unfinished | RankLost | PartyLost):
        return UNFORESEEN, str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return REFUSED, f"{error.filename}: {_lowered(error.strerror or str(error))}"
    if isinstance(error, Refusal):
        return REFUSED, str(error)
    kind = type(error).__name__
    return UNFORESEEN, f"unexpected {kind} ({error}); set {DEBUG_VARIABLE}=1 or add --debug to see the traceback"


def _usage_sentence(error: Any) -> str:
    """Click's message as one sentence that begins with the option."""
    parameter = getattr(error, "param", None)
    name = _option_name(parameter) if parameter is not None else ""
    if type(error).__name__ == "MissingParameter" and name:
        return f"{name}: missing{_what_for(parameter)}; --help explains every option"
    if name:
        return f"{name}{_typed(name)}: {_plainly(str(error.message))}"
    sentence = _lowered(str(error.format_message())).rstrip(".")
    names = getattr(getattr(error.ctx, "command", None), "commands", {})
    return f"{sentence}; choose from {', '.join(names)}" if sentence == "missing command" and names else sentence


def _typed(name: str) -> str:
    """ "=abc" where an option was given that value."""
    words = (*_words.get(), "")
    pairs = (
        word.split("=", 1) if word.startswith(f"{name}=") else (word, words[place + 1])
        for place, word in enumerate(words[:-1])
    )
    return next((f"={value}" for option, value in reversed(list(pairs)) if option == name), "")


def _plainly(message: str) -> str:
    """What is wrong with a value, whichever library says it."""
    if "integer" in message or "int" in message.split():
        return "must be a whole number"
    return "must be a number" if "number" in message or "float" in message else _lowered(message).rstrip(".")


def _option_name(parameter: Any) -> str:
    options = [option for option in parameter.opts if option.startswith("--")]
    return options[0] if options else str(parameter.metavar or parameter.name).upper()


def _what_for(parameter: Any) -> str:
    """The first clause of an option's help, in brackets."""
    first = str(getattr(parameter, "help", "") or "").split(";")[0].split(". ")[0].strip().rstrip(".")
    return f" ({_lowered(first)})" if first and "[" not in first else ""


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def _complain(command: Any, words: Sequence[str], sentence: str, limit: int) -> None:
    names = getattr(command, "commands", {})
    called = next((word for word in words if not word.startswith("-")), "")
    place = f"confide {called}" if called in names else "confide"
    sys.stderr.write(f"{place}: {one_line(sentence, limit)}\n")
    sys.stderr.flush()


def one_line(text: str, limit: int = LONGEST_SENTENCE) -> str:
    """Text fit for one line of a terminal: no line breaks, no control characters, not endless."""
    line = " ".join(str(text).split())
    line = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in line)
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _show_note(message: Warning | str, *_: Any, **__: Any) -> None:
    """The only warning that is let through: what whoever may see the records should know of them."""
    sys.stderr.write(f"for the curator alone: {one_line(str(message))}\n")
    if isinstance(message, NothingToLearn) and sys.stdin.isatty() and sys.stderr.isatty():
        sys.stderr.write("Nothing is charged yet. Go on all the same? [y/N] ")
        sys.stderr.flush()
        if not sys.stdin.readline().strip().lower().startswith("y"):
            raise CommandError("stopped, and nothing was charged")


@contextlib.contextmanager
def _quiet(debug: bool) -> Iterator[None]:
    """Keep other libraries' warnings and log lines off the terminal: refusals are errors here, never warnings."""
    if debug:
        yield
        return
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", CuratorNote)
        warnings.showwarning = _show_note
        try:
            yield
        finally:
            logger.setLevel(level)


def emit_json(values: Mapping[str, Any]) -> None:
    """One strict JSON object on stdout. What JSON cannot say (infinity, not a number) is null."""
    sys.stdout.write(json_text(values) + "\n")


def output() -> Console:
    """The console for results."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=False)


def remarks() -> Console:
    """The console for prose and progress, so that results can be piped."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=False)


@contextlib.contextmanager
def progress_bar(what: str, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A function for `progress(done, total)`: a bar with the time left on stderr, only where that is a terminal."""
    console = remarks()
    if not (shown and sys.stderr.isatty()):  # not `console.is_terminal`, which FORCE_COLOR can turn on for a file
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
