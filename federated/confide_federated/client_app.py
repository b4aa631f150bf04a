"""The node's side: a frame goes to the socket of the owner's party, and the reply goes back.

Flower starts this anew for every message, and whoever submits a run decides what is in it. So nothing is decided here:
records, noise, ledger and refusals are in the party, a process of its own that the owner started.
"""

from __future__ import annotations

import socket
import struct
from typing import BinaryIO

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

PREFIX, LENGTHS = 52, slice(8, 20)  # of a frame, as confide.federated.wire has it: magic, two lengths, seal
LARGEST = (1 << 28) + (1 << 20)  # of header and body

app = ClientApp()


@app.query()
def relay(message: Message, context: Context) -> Message:
    """The node's name for an empty frame; for any other the party's reply, nothing where the party is gone."""
    frame = message.content["frame"]["bytes"]
    content = {"name": str(context.node_config["name"])}
    if frame:
        content["bytes"] = exchanged(str(context.node_config["socket"]), frame, float(context.run_config["timeout"]))
    return Message(RecordDict({"frame": ConfigRecord(content)}), reply_to=message)


def exchanged(path: str, frame: bytes, seconds: float) -> bytes:
    try:
        with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rb") as stream:
            connection.settimeout(seconds)  # a party that stands still does not hold its node up for ever
            connection.connect(path)
            connection.sendall(frame)
            return read_frame(stream)
    except OSError:
        return b""


def read_frame(stream: BinaryIO) -> bytes:
    """A whole frame, or nothing."""
    prefix = stream.read(PREFIX)
    size = sum(struct.unpack(">IQ", prefix[LENGTHS])) if len(prefix) == PREFIX else LARGEST + 1
    body = stream.read(size) if size <= LARGEST else b""
    return prefix + body if len(body) == size else b""
