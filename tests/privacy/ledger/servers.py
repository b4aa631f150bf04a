"""A PostgreSQL server of the tests' own: on a private socket, without a port, gone when they are done."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

_FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def binary(name: str) -> str | None:
    """The path of one of PostgreSQL's programs; distributions keep some of them out of the usual path."""
    found = shutil.which(name, path=os.pathsep.join([*map(str, _FOLDERS), os.environ.get("PATH", "")]))
    return found


class Server:
    """One server with its data in a folder of its own. The superuser may not run it, so `postgres` does."""

    SETTINGS = (
        "listen_addresses=",
        "max_connections=100",
        "shared_buffers=16MB",
        "wal_level=minimal",
        "max_wal_senders=0",
    )

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="confide-pg-", dir="/tmp"))
        self.data = self.folder / "data"
        self.user = "postgres" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name
        if os.getuid() == 0:
            shutil.chown(self.folder, "postgres")
        self._run("initdb", "-D", str(self.data), "-U", "confide", "--auth=trust", "--no-sync", "--encoding=UTF8")
        self.start()

    def start(self, *settings: str) -> None:
        chosen = [f"-c {setting}" for setting in (*self.SETTINGS, f"unix_socket_directories={self.folder}", *settings)]
        log = str(self.folder / "log")
        self._run("pg_ctl", "-D", str(self.data), "-w", "-t", "60", "-l", log, "-o", " ".join(chosen), "start")

    def start_again(self) -> None:
        """After a kill: the helpers of the old server need a moment to notice that it is gone."""
        for _ in range(40):
            try:
                return self.start()
            except AssertionError:
                time.sleep(0.25)
        return self.start()

    @property
    def address(self) -> str:
        return f"postgresql://confide@/postgres?host={self.folder}"

    def kill(self) -> None:
        """kill -9 of the server itself; its helpers notice and go."""
        process = int((self.data / "postmaster.pid").read_text().split()[0])
        os.kill(process, signal.SIGKILL)

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self.data), "-m", "immediate", "stop", check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str, check: bool = True) -> None:
        words = [str(binary(program)), *arguments]
        if os.getuid() == 0:
            words = ["runuser", "-u", self.user, "--", *words]
        done = subprocess.run(words, cwd="/", capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0 or not check, f"{program}: {done.stdout}{done.stderr}"


def missing() -> str | None:
    """Why there is no server to be had here; None where there is."""
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "psycopg is not installed"
    if binary("initdb") is None or binary("pg_ctl") is None:
        return "PostgreSQL is not installed"
    if os.getuid() == 0 and (shutil.which("runuser") is None or not _known("postgres")):
        return "PostgreSQL does not run as root, and there is no user postgres"
    return None


def _known(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


def emptied(address: str) -> str:
    """The address, its ledger taken away."""
    import psycopg

    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("SET client_min_messages = error")
        connection.execute("DROP SCHEMA IF EXISTS confide_ledger CASCADE")
    return address
