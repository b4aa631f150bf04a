"""Frames: what comes back is what was sent, and anything else is refused in one sentence."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

from confide.errors import Refusal
from confide.federated import wire
from confide.federated.wire import Message

KEY = b"k" * 32


def frame() -> bytes:
    message = Message({"ask": "answer", "step": 3, "rate": 0.1}, {"position": torch.arange(5.0)})
    return wire.packed(message, KEY, b"request")


def test_a_message_comes_back_as_it_was() -> None:
    found = wire.unpacked(frame(), KEY, b"request")
    assert found.header == {"ask": "answer", "step": 3, "rate": 0.1}
    assert torch.equal(found.tensors["position"], torch.arange(5.0))


def test_every_changed_byte_is_found() -> None:
    good = frame()
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1
        with pytest.raises(Refusal, match="message: "):
            wire.unpacked(bytes(bad), KEY, b"request")


def test_a_reply_to_another_request_or_under_another_key_is_found() -> None:
    with pytest.raises(Refusal, match="seal"):
        wire.unpacked(frame(), KEY, b"another request")
    with pytest.raises(Refusal, match="seal"):
        wire.unpacked(frame(), b"", b"request")


def test_what_is_cut_off_or_goes_on_is_found() -> None:
    good = frame()
    for bad in (b"", good[:10], good[:-1], good + b"\0", b"GET / HTTP/1.1\r\n" * 10):
        with pytest.raises(Refusal, match="message: "):
            wire.unpacked(bad, KEY, b"request")


def test_lengths_are_bounded_before_anything_is_read() -> None:
    prefix = wire.MAGIC + (5).to_bytes(4) + (1 << 40).to_bytes(8) + bytes(32)
    with pytest.raises(Refusal, match="at most"):
        wire.lengths(prefix)
    with pytest.raises(Refusal, match="at most"):
        wire.packed(Message({"long": "x" * (wire.LARGEST_HEADER + 1)}))


@pytest.mark.parametrize(
    "header", [b"[1]", b"{", b'{"a": NaN}', b'{"a": Infinity}', b"[" * 100_000, b'"text"', b"\xff\xfe", b"1" * 5000]
)
def test_bad_headers_are_one_sentence(header: bytes) -> None:
    sealed = wire.MAGIC + wire._LENGTHS.pack(len(header), 0) + wire._seal(b"", b"", header, b"") + header
    with pytest.raises(Refusal, match="JSON object"):
        wire.unpacked(sealed)


def test_bad_bodies_are_one_sentence() -> None:
    generator = random.Random(0)
    good = frame()[wire.PREFIX_BYTES :]
    body = good[good.index(b"}") + 1 :]
    for _ in range(200):
        bad = bytearray(body)
        for _ in range(generator.randrange(1, 5)):
            bad[generator.randrange(len(bad))] = generator.randrange(256)
        sealed = wire.MAGIC + wire._LENGTHS.pack(2, len(bad)) + wire._seal(b"", b"", b"{}", bytes(bad)) + b"{}" + bad
        with contextlib.suppress(Refusal):  # anything else would come through
            wire.unpacked(sealed)


def test_other_types_of_tensors_are_refused() -> None:
    with pytest.raises(Refusal, match="type"):
        wire.unpacked(wire.packed(Message({}, {"mask": torch.ones(2, dtype=torch.bool)})))
