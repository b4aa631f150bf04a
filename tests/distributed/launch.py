"""Start a few ranks of a worker as torchrun would, and never leave one behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).parents[2]
Wanted: TypeAlias = Mapping[str, tuple[str, dict[str, Any]]]
"""Cases of the worker by label, each with its options."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    """One thread each, the loopback device, and this tree."""
    return {
        **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **more,
    }


class Ranks:
    """Processes of one worker. Use by `with`: whatever happens, all are gone and waited for at the end."""

    def __init__(
        self,
        size: int,
        wanted: Wanted,
        folder: Path,
        timeout: float = 30.0,
        joined: bool = False,
        late: float = 0.0,
    ) -> None:
        self.folder, self.size = folder, size
        folder.mkdir(parents=True, exist_ok=True)
        port, cases = str(free_port()), json.dumps([[label, name, more] for label, (name, more) in wanted.items()])
        command = [sys.executable, "-m", "tests.distributed.worker", str(folder), str(timeout), cases]
        self.processes = []
        for rank in range(size):
            own = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            own |= {"TESTS_JOINED": "1"} if joined else {}
            own |= {"TESTS_LATE": str(late * rank)}
            log = (folder / f"log-{rank}.txt").open("w")
            started = subprocess.Popen(command, env=environment(**own), cwd=ROOT, stdout=log, stderr=log)
            self.processes.append(started)
            log.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
        for process in self.processes:
            process.wait()

    def wait(self, seconds: float = 120.0) -> list[int]:
        """How the ranks ended."""
        end = time.monotonic() + seconds
        return [process.wait(max(0.1, end - time.monotonic())) for process in self.processes]

    def said(self) -> list[Any]:
        """What each rank wrote at its end; the logs where one did not."""
        found = []
        for rank in range(self.size):
            answer = self.folder / f"said-{rank}.json"
            assert answer.exists(), (self.folder / f"log-{rank}.txt").read_text()[-3000:]
            found.append(json.loads(answer.read_text()))
        return found


def run(
    size: int,
    wanted: Wanted,
    folder: Path,
    seconds: float = 300.0,
    timeout: float = 30.0,
    joined: bool = False,
    late: float = 0.0,
) -> list[Any]:
    """What every rank has to say of the cases, once all ended well.

    joined   in a group that exists already
    late     seconds by which each rank comes later than the one before it
    """
    with Ranks(size, wanted, folder, timeout, joined, late) as ranks:
        ended = ranks.wait(seconds)
        logs = [(folder / f"log-{rank}.txt").read_text()[-3000:] for rank in range(size)]
        assert ended == [0] * size, "\n".join(logs)
        return ranks.said()
