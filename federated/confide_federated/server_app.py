"""The server's side: a socket for every party, on which `confide party fit` finds it as if it were on this machine.

confide runs in an environment of its own, since Flower's pins conflict with it. What comes in at a socket goes to the
node of that name and its reply comes back; a node that is gone closes the connection, and counts as missing.
"""

from __future__ import annotations

import socket
import subprocess
import tempfile
import threading
import time

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from confide_federated.client_app import read_frame

app = ServerApp()


class Nodes:
    """The parties' nodes by name. A node that was started again has another number, so names are asked for anew."""

    def __init__(self, grid: Grid, timeout: float) -> None:
        self.grid, self.timeout = grid, timeout
        self.names: dict[int, str] = {}
        self.lock = threading.Lock()

    def sent(self, node: int, frame: bytes) -> ConfigRecord | None:
        """The reply of a node; None where there is none in time, or the node is gone."""
        content = RecordDict({"frame": ConfigRecord({"bytes": frame})})
        with self.lock:
            (number,) = self.grid.push_messages([Message(content, dst_node_id=node, message_type="query")])
        until = time.monotonic() + self.timeout
        while time.monotonic() < until:
            with self.lock:
                replies = list(self.grid.pull_messages([number])) if number else []
            if replies:
                return None if replies[0].has_error() else replies[0].content["frame"]
            time.sleep(0.1)
        return None

    def find(self, name: str) -> int | None:
        """The number of the node of that name, among those that are there now."""
        with self.lock:
            there = set(self.grid.get_node_ids())
            self.names = {node: known for node, known in self.names.items() if node in there}
            unknown = there - set(self.names)
        for node in unknown:
            reply = self.sent(node, b"")
            if reply is not None:
                self.names[node] = str(reply["name"])
        return next((node for node in reversed(self.names) if self.names[node] == name), None)  # the newest

    def carried(self, name: str, frame: bytes) -> bytes:
        node = self.find(name)
        reply = None if node is None else self.sent(node, frame)
        return b"" if reply is None else reply.get("bytes", b"")


def served(nodes: Nodes, name: str, listener: socket.socket) -> None:
    """Carry frames for one party, one connection after the other."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, connection.makefile("rb") as stream:
            while (frame := read_frame(stream)) and (reply := nodes.carried(name, frame)):
                connection.sendall(reply)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Open a socket for every party, and fit over them."""
    given = context.run_config
    names = [name.strip() for name in str(given["parties"]).split(",") if name.strip()]
    nodes = Nodes(grid, float(given["timeout"]))
    until = time.monotonic() + nodes.timeout
    while any(nodes.find(name) is None for name in names) and time.monotonic() < until:
        time.sleep(1)
    with tempfile.TemporaryDirectory(prefix="confide-") as folder:
        listeners = []
        for name in names:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"{folder}/{name}")
            listener.listen()
            listeners.append(listener)
            threading.Thread(target=served, args=(nodes, name, listener), daemon=True).start()
        words = [f"{name}={folder}/{name}" for name in names]
        options = ["method", "epsilon", "delta", "trust", "level", "spare", "local", "steps", "hidden", "out"]
        for option in ["timeout", *options] + ["missing"] * (given["trust"] == "nobody"):  # else the peers file says it
            words += [f"--{option}", str(given[option])]
        done = subprocess.run([*str(given["confide"]).split(), "party", "fit", *words], check=False)
        for listener in listeners:
            listener.close()
    if done.returncode:
        raise SystemExit(f"confide party fit ended with {done.returncode}")
