"""Checks of paths, before any file is opened and long before anything is charged."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confide.errors import CommandError


def same_file(one: Path, other: str) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def check_new_directory(option: str, path: Path) -> None:
    """The results overwrite nothing, and can be written once the budget is spent."""
    if not path.name or path.name == "..":
        raise CommandError(f"{option}={path}: must name a new directory")
    if os.path.lexists(path):
        raise CommandError(f"{option}={path}: exists already; name a new directory")
    check_writable(option, path)


def usual_directory(train: str) -> Path:
    """Where results go if nobody says so: out/ with the name of the records, and a number where that is taken."""
    name = Path(train).name.split(".")[0] or "run"
    tried = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(place for place in (Path("out", one) for one in tried) if not os.path.lexists(place))


def check_page(option: str, path: Path) -> None:
    """A new HTML file."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise CommandError(f"{option}={path}: a page is an .html file; name one")
    if os.path.lexists(path):
        raise CommandError(f"{option}={path}: exists already; name a new file")
    if not path.absolute().parent.is_dir():
        raise CommandError(f"{option}={path}: {path.absolute().parent} is not a directory; make it first")
    check_writable(option, path)


def check_writable(option: str, path: Path) -> None:
    """Whether something can be made at this path."""
    parent = path.absolute().parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir() or not _takes_files(parent):
        raise CommandError(f"{option}={path}: {parent} is not a directory that can be written to")


def _takes_files(directory: Path) -> bool:
    """Whether a file can be written there. Permissions alone do not tell: disks are full, or mounted read-only."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".confide-", dir=directory) as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError:
        return False
    return True


def check_ledger(path: Path | None) -> None:
    """An existing ledger must be sound; a new one is made only when it is charged."""
    from confide.privacy.ledger import Ledger
    from confide.privacy.ledger.places import is_server

    if path is None:
        return
    if is_server(path) or path.exists():
        Ledger(path).close()
    elif not path.absolute().parent.is_dir():
        raise CommandError(f"--ledger={path}: the folder {path.absolute().parent} does not exist; create it first")
    else:
        check_writable("--ledger", path)


@contextmanager
def ledger_by(path: Path | None, key: Path | None, who: str | None) -> Iterator[None]:
    """Every ledger that is opened within knows this key and this name, in other processes of the command too."""
    from confide.privacy.ledger.entries import check_who
    from confide.wording import KEY_VARIABLE, WHO_VARIABLE

    if path is None and (key is not None or who is not None):
        option = f"--key={key}" if key is not None else f"--who={who}"
        raise CommandError(f"{option}: is for a ledger; name one with --ledger FILE, or leave it out")
    if key is not None:
        from confide.data.fingerprint import read_key

        read_key(key)
    given = {KEY_VARIABLE: None if key is None else str(key.absolute()), WHO_VARIABLE: who and check_who(who)}
    before = {name: os.environ.get(name) for name in given}
    try:
        os.environ.update({name: value for name, value in given.items() if value is not None})
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def check_checkpoint(path: Path | None, resume: Path | None = None) -> Path | None:
    """A directory that exists already is that of an interrupted run, which knows itself whether this is the same.

    resume   the same directory, where a run must have been kept: a name that is misspelt does not start a new one
    """
    if resume is not None:
        from confide.running.journal import JOURNAL

        if path is not None and path != resume:
            raise CommandError(f"--resume={resume}: --checkpoint names another directory; give one of the two")
        if not (resume / JOURNAL).is_file():
            raise CommandError(f"--resume={resume}: no run is kept there; start one with --checkpoint {resume}")
        path = resume
    if path is None:
        return None
    if os.path.lexists(path) and not path.is_dir():
        raise CommandError(f"--checkpoint={path}: is a file; name a directory")
    check_writable("--checkpoint", path / "run")
    return path
