"""The file of a ledger: making it whole or not at all, and refusing a place where locks do not hold."""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from confide.errors import LedgerError

READ_ONLY = "read-only; a charge must be written down, so make the file and its folder writable"
_NO_LOCKS = "its ceiling would not hold there; keep it on a local disk, or in PostgreSQL: Ledger('postgresql://...')"
# SQLite's write-ahead log needs memory shared by all its users, so these are wrong whatever their locks do.
_NETWORK = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "ncpfs",
        "afs",
        "ceph",
        "glusterfs",
        "lustre",
        "gpfs",
        "beegfs",
        "orangefs",
        "davfs",
        "fuse.sshfs",
        "fuse.ceph",
        "fuse.glusterfs",
        "fuse.s3fs",
        "fuse.gcsfuse",
        "fuse.rclone",
        "fuse.davfs",
    }
)
# What another process does to the lock test: exit 1 if the lock can be had although it is taken.
_RIVAL = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit(0)
sys.exit(1)
"""
_tested: set[int] = set()


def check_place(path: Path) -> None:
    """Refuses what is not, or cannot become, the file of a ledger."""
    name = f"ledger {str(path)!r}"
    if path.is_dir():
        raise LedgerError(f"{name}: is a directory; give the path of a file")
    if not path.parent.is_dir():
        raise LedgerError(f"{name}: the folder {str(path.parent)!r} does not exist; create it first")
    if not path.exists():
        return
    if not path.is_file():
        raise LedgerError(f"{name}: not a regular file; give the path of a file")
    if path.stat().st_size == 0:
        # SQLite takes an empty file for a new database: a ledger cut to nothing would begin a new budget.
        raise LedgerError(f"{name}: empty, so not a ledger; restore it from a trusted copy or give a new name")
    if not os.access(path, os.R_OK | os.W_OK):
        raise LedgerError(f"{name}: {READ_ONLY}")


def check_locks(path: Path) -> None:
    """Refuses a file system on which two processes can hold the same lock; tried once for each, in each process."""
    device = path.parent.stat().st_dev
    if device in _tested:
        return
    kind = file_system(device)
    if kind in _NETWORK:
        raise LedgerError(f"ledger {str(path)!r}: on a network file system ({kind}), so {_NO_LOCKS}")
    if not locks_hold(path):
        raise LedgerError(f"ledger {str(path)!r}: locks do not hold on this file system, so {_NO_LOCKS}")
    _tested.add(device)


def file_system(device: int) -> str:
    """The kind of file system behind a device number; empty where the system does not tell."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        mount, _, rest = line.partition(" - ")
        if mount.split()[2] == wanted:
            return rest.split()[0]
    return ""


def locks_hold(path: Path) -> bool:
    """Takes a lock on a file beside the ledger, and lets another process try to take it too."""
    try:
        import fcntl
    except ImportError:  # Windows: its locks are compulsory
        return True
    try:
        handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".lock", dir=path.parent)
    except OSError:
        return True  # not writable, which is said with its own words when it is opened
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return not _rival_gets(scratch)
    except OSError:  # the file system knows no locks
        return False
    finally:
        os.close(handle)
        with suppress(OSError):
            os.unlink(scratch)


def _rival_gets(scratch: str) -> bool:
    """Whether another process can take the lock too; no where none can be started to try it."""
    if not sys.executable:
        return False
    words = [sys.executable, "-I", "-S", "-c", _RIVAL, scratch]
    try:
        return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 1
    except OSError:
        return False


def create_file(path: Path, fill: Callable[[sqlite3.Connection], None]) -> None:
    """Makes a complete ledger under another name, then gives it its own: nobody ever sees half of one.

    A name that is taken cannot be linked again: of many processes creating the same ledger one wins and the
    others open it.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        connection = sqlite3.connect(draft, isolation_level=None)
        try:
            fill(connection)
        finally:
            connection.close()
        _synced(draft)
        with suppress(FileExistsError):
            _link(draft, path)
        _synced(path.parent)
    finally:
        for leftover in ("", "-wal", "-shm", "-journal"):
            Path(f"{draft}{leftover}").unlink(missing_ok=True)


def _link(draft: Path, path: Path) -> None:
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: claim the name, then fill it in one move
        path.touch(exist_ok=False)
        os.replace(draft, path)


def _synced(place: Path) -> None:
    """Flushes a file, or the names in a folder: a new name is lost in a crash until its folder is on the disk."""
    if os.name == "nt" and place.is_dir():  # Windows cannot open folders, and writes names through
        return
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def for_reading(path: str | os.PathLike[str]) -> Iterator[Path | str]:
    """A ledger that may only be read, as a copy that SQLite can open; one that may be written, as itself.

    SQLite writes beside a file even to read it. A copy caught in the middle of somebody's charge breaks the chain, so
    it is refused when opened and never shown wrong.
    """
    if is_server(path):
        yield str(path)
        return
    place = Path(os.path.realpath(path))
    if os.access(place, os.W_OK) and os.access(place.parent, os.W_OK):
        yield place
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / place.name
        try:
            for beside in ("-wal", ""):
                if beside == "" or Path(f"{place}{beside}").exists():
                    shutil.copyfile(f"{place}{beside}", f"{copy}{beside}")
        except OSError as error:
            raise LedgerError(f"ledger {str(path)!r}: cannot be read ({error.strerror})") from None
        yield copy


def key_place(place: str | None, identity: str) -> Path:
    """Where the curator's key of a ledger is kept unless somebody says otherwise."""
    if place is not None and not is_server(place):
        return Path(f"{place}.key")
    settings = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(settings) / "confide" / f"{identity}.key"


def is_server(place: object) -> bool:
    """Whether this is the address of a PostgreSQL server and not the path of a file.

    A `Path` folds the two slashes of an address into one; that is recognised too, so that the command line may give
    whatever it was given.
    """
    return isinstance(place, str | os.PathLike) and os.fspath(place).startswith(("postgresql:/", "postgres:/"))
