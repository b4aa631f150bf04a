"""The Flower app: a pipe and nothing else. Quickly with a stand-in for Flower, slowly over its real transport."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import confide
from confide.federated import Federation, Sockets, serving, wire
from confide.privacy.ledger import Ledger
from tests.federated.problems import parties_of, plan_for, write_table
from tests.federated.test_sockets import start

ROOT = Path(__file__).parents[2]
APP = ROOT / "federated"


class Letter:
    """A message of the stand-in."""

    def __init__(self, content: Any, dst_node_id: int = 0, message_type: str = "", reply_to: Any = None) -> None:
        self.content, self.node = content, dst_node_id

    def has_error(self) -> bool:
        return False


class App:
    """A decorator that changes nothing."""

    def query(self) -> Any:
        return lambda function: function

    main = query


class Post:
    """A grid whose nodes are functions; a node that is down never replies."""

    def __init__(self, relay: Any, sockets: dict[str, Path]) -> None:
        self.relay = relay
        self.nodes = {
            number: types.SimpleNamespace(node_config={"name": name, "socket": str(path)}, run_config={"timeout": 20.0})
            for number, (name, path) in enumerate(sockets.items(), start=1)
        }
        self.replies: dict[str, Letter] = {}
        self.down: set[int] = set()

    def get_node_ids(self) -> list[int]:
        return [node for node in self.nodes if node not in self.down]

    def push_messages(self, messages: list[Letter]) -> list[str]:
        (message,) = messages
        number = f"m{len(self.replies)}"
        self.replies[number] = self.relay(message, self.nodes[message.node])
        return [number]

    def pull_messages(self, numbers: list[str]) -> list[Letter]:
        return [self.replies[number] for number in numbers]


@pytest.fixture
def apps(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """Both sides of the app, over the stand-in."""
    parts = {"Message": Letter, "RecordDict": dict, "ConfigRecord": dict, "Context": object}
    for name, content in (
        ("flwr", {}),
        ("flwr.app", parts),
        ("flwr.clientapp", {"ClientApp": App}),
        ("flwr.serverapp", {"ServerApp": App, "Grid": object}),
    ):
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(APP))
    names = ("confide_federated", "confide_federated.client_app", "confide_federated.server_app")
    try:
        yield importlib.import_module(names[1]), importlib.import_module(names[2])
    finally:
        for name in names:
            sys.modules.pop(name, None)


def test_it_is_short_and_knows_the_frames(apps: tuple[Any, Any]) -> None:
    client, _ = apps
    assert sum(len(path.read_text().splitlines()) for path in (APP / "confide_federated").glob("*.py")) < 150
    assert client.PREFIX == wire.PREFIX_BYTES
    assert client.LARGEST == wire.LARGEST_HEADER + wire.LARGEST_BODY
    assert slice(len(wire.MAGIC), len(wire.MAGIC) + 12) == client.LENGTHS


def test_a_fit_goes_through_it(apps: tuple[Any, Any]) -> None:
    client, server = apps
    import socket

    parties = parties_of(2, 100)
    with tempfile.TemporaryDirectory(prefix="confide-") as directory:
        folder = Path(directory)
        places = {name: folder / f"{name}.sock" for name in parties}
        with serving(parties["p0"], places["p0"]), serving(parties["p1"], places["p1"]):
            post = Post(client.relay, places)
            nodes = server.Nodes(post, timeout=20.0)
            listeners = {name: socket.socket(socket.AF_UNIX) for name in places}
            for name, listener in listeners.items():
                listener.bind(str(folder / name))
                listener.listen()
                threading.Thread(target=server.served, args=(nodes, name, listener), daemon=True).start()

            def watch(done: int, _: int) -> None:
                post.down = {2} if done in (2, 3) else set()

            with Sockets({name: folder / name for name in places}, timeout=20) as courier:
                data = Federation(courier, missing=1)
                plan = plan_for(data, 6)
                confide.fit(confide.methods.SGLD(), confide.networks.logistic(3), data, plan, seed=0, progress=watch)
            for listener in listeners.values():
                listener.shutdown(socket.SHUT_RDWR)
                listener.close()
    claimed = [party.ledger.claimed(str(party.ledger.entries()[0].run)) for party in parties.values()]
    assert claimed == [6, 6]


@pytest.mark.slow
@pytest.mark.skipif("CONFIDE_FLOWER" not in os.environ, reason="CONFIDE_FLOWER names no environment with Flower")
def test_two_nodes_one_of_which_drops_out_and_comes_back() -> None:
    """CONFIDE_FLOWER: the folder of Flower's own environment, made from federated/requirements.txt."""
    binaries = Path(os.environ["CONFIDE_FLOWER"]) / "bin"
    steps = int(os.environ.get("CONFIDE_FLOWER_STEPS", "8"))
    with tempfile.TemporaryDirectory(prefix="confide-") as directory:
        folder = Path(directory)
        home = folder / "home"
        home.mkdir()
        here = '[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:18100"\ninsecure = true\n'
        (home / "config.toml").write_text(here)
        away = {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"}
        environment = {**os.environ, **away, "PATH": f"{binaries}:{os.environ['PATH']}"}
        running: list[subprocess.Popen[Any]] = []

        def run(*words: str) -> subprocess.Popen[bytes]:
            log = (folder / "flower.log").open("ab")
            running.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True))
            log.close()
            return running[-1]

        def node(name: str, port: int) -> subprocess.Popen[bytes]:
            config = f'name="{name}" socket="{folder / name}.sock"'
            where = ("--superlink", "127.0.0.1:18100", "--port", str(port))
            return run("flower-supernode", "--insecure", *where, "--node-config", config)

        try:
            for place, name in enumerate(("north", "south")):
                write_table(folder / f"{name}.csv", 300, seed=place)
                running.append(start(folder, name))
            run("flower-superlink", "--insecure", "--disable-runtime-dependency-installation", "--port", "18100")
            time.sleep(8)
            node("north", 18101)
            south = node("south", 18102)
            words = f"{sys.executable} -m confide"
            config = f"confide='{words}' steps={steps} epsilon=2.0 missing=1 out='{folder / 'run'}' timeout=90.0"
            fit = run("flwr", "run", str(APP), "here", "--run-config", config, "--stream")
            _wait(lambda: _claimed(folder / "north.db") >= 2, 900)
            os.killpg(south.pid, signal.SIGKILL)
            _wait(lambda: _claimed(folder / "north.db") >= 4, 900)
            node("south", 18103)
            assert fit.wait(1200) == 0
            _wait((folder / "run" / "run.json").exists, 60)
        finally:
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL) if process.pid == os.getpgid(process.pid) else process.kill()
                process.communicate()
        books = {name: Ledger(folder / f"{name}.db") for name in ("north", "south")}
        taken = {name: [entry for entry in book.entries() if entry.run] for name, book in books.items()}
        assert {name: len(found) for name, found in taken.items()} == {"north": 1, "south": 1}, "each has paid once"
        assert _claimed(folder / "north.db") == steps
        assert _claimed(folder / "south.db") == steps, "it came back before the last step"


def _claimed(path: Path) -> int:
    if not path.exists():
        return 0
    with Ledger(path) as book:
        runs = [entry.run for entry in book.entries() if entry.run]
        return max((book.claimed(run) for run in runs), default=0)


def _wait(condition: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "took too long"
        time.sleep(0.5)
