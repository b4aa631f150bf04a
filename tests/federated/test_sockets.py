"""Parties in processes of their own, started by the command, over Unix sockets; one is killed and comes back."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import confide
from confide.errors import PartyLost, Refusal
from confide.federated import Federation, Sockets, serving
from confide.federated.couriers import read_frame
from confide.federated.serving import PartyServer
from confide.federated.wire import MAGIC, Message, packed, unpacked
from confide.privacy.ledger import Ledger
from tests.federated.problems import parties_of, plan_for, write_table


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: those of sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="confide-") as directory:
        yield Path(directory)


def start(folder: Path, name: str) -> subprocess.Popen[str]:
    """`confide party serve`, ready to answer."""
    data = folder / f"{name}.csv"
    words = ["party", "serve", str(data), "--bounds", str(data.with_suffix(".toml"))]
    words += ["--ledger", str(folder / f"{name}.db"), "--socket", str(folder / f"{name}.sock"), "--least-noise", "0.5"]
    process = subprocess.Popen(
        [sys.executable, "-m", "confide", *words, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    assert json.loads(line)["least_noise"] == 0.5
    return process


@contextmanager
def ended(processes: dict[str, subprocess.Popen[str]]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


@pytest.mark.slow  # three processes that load torch
def test_two_owners_one_of_whom_is_killed_and_comes_back(folder: Path) -> None:
    processes = {}
    for place, name in enumerate(("north", "south")):
        write_table(folder / f"{name}.csv", 300, seed=place)
        processes[name] = start(folder, name)
    with ended(processes):
        courier = Sockets({name: folder / f"{name}.sock" for name in processes})
        data = Federation(courier, missing=1)
        plan = confide.plan(epsilon=2, delta=1e-5, records=600, batch=60, steps=20)

        def watch(done: int, _: int) -> None:
            if done == 5:
                processes["south"].send_signal(signal.SIGKILL)
                processes["south"].communicate()
            if done == 8:
                processes["south"] = start(folder, "south")

        run = confide.fit(confide.methods.SGLD(), confide.networks.linear(2), data, plan, seed=0, progress=watch)
        courier.close()
        processes["north"].terminate()
        assert processes["north"].wait(20) == 0
        assert not (folder / "north.sock").exists()
    claimed = {name: Ledger(folder / f"{name}.db").claimed(_run_in(folder / f"{name}.db")) for name in processes}
    assert claimed == {"north": 20, "south": 20}
    books = [Ledger(folder / f"{name}.db") for name in processes]
    spent = [book.spent(delta=1e-5, dataset=book.datasets()[0]) for book in books]
    assert spent[0] == spent[1] == pytest.approx(run.privacy.epsilon()), "each has paid once"


def _run_in(path: Path) -> str:
    (entry,) = Ledger(path).entries()
    assert entry.run is not None
    return entry.run


class TestServing:
    def test_fit_over_sockets(self, folder: Path) -> None:
        parties = parties_of(2, 100)
        with serving(parties["p0"], folder / "a"), serving(parties["p1"], folder / "b"):
            courier = Sockets({"p0": folder / "a", "p1": folder / "b"}, timeout=20)
            data = Federation(courier)
            confide.fit(confide.methods.SGLD(), confide.networks.logistic(3), data, plan_for(data, 3), seed=0)
            courier.close()

    def test_a_party_that_is_started_again_goes_on(self, folder: Path) -> None:
        parties = parties_of(2, 100)
        servers = {name: serving(party, folder / name) for name, party in parties.items()}
        for server in servers.values():
            server.__enter__()

        def watch(done: int, _: int) -> None:
            if done == 2:
                servers["p1"].__exit__(None, None, None)
                parties["p1"]._runs.clear()  # what a process loses; the ledger stays
            if done == 4:
                servers["p1"] = serving(parties["p1"], folder / "p1")
                servers["p1"].__enter__()

        with Sockets({name: folder / name for name in parties}, timeout=20) as courier:
            data = Federation(courier, missing=1)
            plan = plan_for(data, 6)
            confide.fit(confide.methods.SGLD(), confide.networks.logistic(3), data, plan, seed=0, progress=watch)
        for server in servers.values():
            server.__exit__(None, None, None)
        (entry,) = parties["p1"].ledger.entries()
        assert parties["p1"].ledger.claimed(str(entry.run)) == 6

    def test_only_its_owner_can_open_the_socket(self, folder: Path) -> None:
        with serving(parties_of(1, 10)["p0"], folder / "a"):
            assert (folder / "a").stat().st_mode & 0o777 == 0o600

    def test_a_path_in_use_is_refused_and_one_left_behind_is_taken(self, folder: Path) -> None:
        party = parties_of(1, 10)["p0"]
        with serving(party, folder / "a"), pytest.raises(Refusal, match="in use"):
            PartyServer(party, folder / "a")
        left = socket.socket(socket.AF_UNIX)
        left.bind(str(folder / "a"))
        left.close()
        with serving(party, folder / "a"):
            pass
        (folder / "b").write_text("a file of somebody's")
        with pytest.raises(Refusal, match="in use"):
            PartyServer(party, folder / "b")
        with pytest.raises(Refusal, match="does not exist"):
            PartyServer(party, folder / "none" / "a")
        with pytest.raises(Refusal, match="shorter"):
            PartyServer(party, folder / ("x" * 120))

    @pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n" * 9, MAGIC + b"\xff" * 60])
    def test_what_is_no_message_gets_one_sentence(self, folder: Path, sent: bytes) -> None:
        with serving(parties_of(1, 10)["p0"], folder / "a"), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(folder / "a"))
            connection.sendall(sent)
            reply = read_frame(connection)
            assert reply is not None
            assert unpacked(reply).header["refused"].startswith("message: ")

    def test_a_connection_that_is_cut_harms_nobody(self, folder: Path) -> None:
        with serving(parties_of(1, 10)["p0"], folder / "a"):
            for sent in (b"", MAGIC, MAGIC + bytes(20)):
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(str(folder / "a"))
                    connection.sendall(sent)
            with Sockets({"p0": folder / "a"}, timeout=20) as courier:
                Federation(courier)

    def test_a_reply_that_comes_byte_by_byte_is_not_waited_for_longer(self, folder: Path) -> None:
        """Each byte is in time, and the reply is not."""
        reply = packed(Message({"facts": {}}))

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                for byte in reply:
                    connection.sendall(bytes([byte]))
                    time.sleep(0.1)

        with socket.socket(socket.AF_UNIX) as listener, Sockets({"p0": folder / "a"}, timeout=0.5) as courier:
            listener.bind(str(folder / "a"))
            listener.listen()
            threading.Thread(target=drip, daemon=True).start()
            begun = time.monotonic()
            assert courier.exchange({"p0": reply}) == {}
            assert time.monotonic() - begun < 2.5

    def test_a_party_that_is_not_there(self, folder: Path) -> None:
        with pytest.raises(PartyLost, match="p0: did not reply"):
            Federation(Sockets({"p0": folder / "nobody"}))
        with pytest.raises(Refusal, match="paths"):
            Sockets({})
        with pytest.raises(Refusal, match="timeout"):
            Sockets({"p0": "a"}, timeout=0)
