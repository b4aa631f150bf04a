"""What travels between a server and a party: a JSON object and tensors by name, never pickle and never code.

    8 bytes     the protocol and its version
    4 + 8 bytes lengths of the header and of the body, bounded before anything is read
    32 bytes    the seal: HMAC-SHA256 under the key that both sides hold, over what the frame answers, header and body
    header      JSON: strict, an object
    body        tensors as safetensors, or nothing

Without a key the seal is a checksum: it finds what was damaged on the way, not what was changed by somebody who knows
how. A reply is sealed together with the digest of the request it answers, so that a reply to another step, to another
request or to a request that was changed on the way is found out.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from confide.errors import Refusal

MAGIC = b"confide1"
_LENGTHS = struct.Struct(">IQ")
SEAL_BYTES = 32  # of SHA-256
PREFIX_BYTES = len(MAGIC) + _LENGTHS.size + SEAL_BYTES
LARGEST_HEADER = 1 << 20  # a schema of thousands of columns is some hundred kilobytes
LARGEST_BODY = 1 << 28  # 64 million parameters in single precision
_TYPES = (torch.float32, torch.float64, torch.int64)
"""Types of tensors that are spoken of here."""


@dataclass(frozen=True)
class Message:
    """A JSON object and tensors by name."""

    header: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def text(self, name: str, longest: int = 200) -> str:
        value = self.header.get(name)
        if not isinstance(value, str) or not 0 < len(value) <= longest:
            raise Refusal(f"message: {name} must be a text of at most {longest} signs")
        return value

    def whole(self, name: str, least: int, most: int) -> int:
        value = self.header.get(name)
        if type(value) is not int or not least <= value <= most:
            raise Refusal(f"message: {name} must be a whole number from {least} to {most}")
        return value

    def table(self, name: str) -> dict[str, Any]:
        value = self.header.get(name)
        if not isinstance(value, dict):
            raise Refusal(f"message: {name} must be an object")
        return value

    def tensor(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        value = self.tensors.get(name)
        if value is None or value.shape != (size,) or value.dtype != dtype:
            raise Refusal(f"message: tensor {name} must hold {size} numbers of type {str(dtype)[6:]}")
        return value


def digest(frame: bytes) -> bytes:
    return hashlib.sha256(frame).digest()


def asked_alike(*parts: Any) -> str:
    """A digest of values in JSON and of tensors: the same for all who were told the same, and for nobody else."""
    told = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            words = f"{part.dtype} {tuple(part.shape)}".encode() + part.detach().contiguous().numpy().tobytes()
        else:
            words = json.dumps(part, sort_keys=True).encode()
        told.update(struct.pack(">Q", len(words)) + words)
    return told.hexdigest()


def packed(message: Message, key: bytes = b"", answers: bytes = b"") -> bytes:
    """The frame of a message; `answers` is the digest of the request, for a reply."""
    from safetensors.torch import save

    header = json.dumps(message.header, allow_nan=False).encode()
    flat = {name: value.detach().contiguous().cpu() for name, value in message.tensors.items()}
    body = save(flat) if flat else b""
    _check_lengths(len(header), len(body))
    return MAGIC + _LENGTHS.pack(len(header), len(body)) + _seal(key, answers, header, body) + header + body


def unpacked(frame: bytes, key: bytes = b"", answers: bytes = b"") -> Message:
    """The message of a frame, in full or not at all; what cannot be read is refused in one sentence."""
    header_length, body_length = lengths(frame[:PREFIX_BYTES])
    if len(frame) != PREFIX_BYTES + header_length + body_length:
        raise Refusal(f"message: has {len(frame)} bytes, and its beginning says otherwise; send it again")
    seal = frame[PREFIX_BYTES - SEAL_BYTES : PREFIX_BYTES]
    header, body = frame[PREFIX_BYTES : PREFIX_BYTES + header_length], frame[PREFIX_BYTES + header_length :]
    if not hmac.compare_digest(seal, _seal(key, answers, header, body)):
        raise Refusal(
            "message: its seal does not fit; it was changed on the way, answers something else, or the two sides hold "
            "different keys"
        )
    return Message(_header(header), _body(body))


def lengths(prefix: bytes) -> tuple[int, int]:
    """Of header and body, from the first bytes of a frame."""
    if len(prefix) < PREFIX_BYTES or not prefix.startswith(MAGIC):
        raise Refusal("message: does not begin like one of this protocol, version 1")
    header, body = _LENGTHS.unpack(prefix[len(MAGIC) : len(MAGIC) + _LENGTHS.size])
    _check_lengths(header, body)
    return header, body


def _check_lengths(header: int, body: int) -> None:
    if header > LARGEST_HEADER or body > LARGEST_BODY:
        raise Refusal(
            f"message: {header} + {body} bytes; at most {LARGEST_HEADER} of JSON and {LARGEST_BODY} of tensors are read"
        )


def _seal(key: bytes, answers: bytes, header: bytes, body: bytes) -> bytes:
    told = hmac.new(key, digestmod="sha256")
    for part in (answers, header, body):
        told.update(struct.pack(">Q", len(part)))
        told.update(part)
    return told.digest()


def _no_constant(_: str) -> NoReturn:
    raise ValueError


def _header(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Refusal("message: its header is not a JSON object of finite numbers")
    return found


def _body(content: bytes) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    if not content:
        return {}
    try:
        found: dict[str, Tensor] = load(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError):
        raise Refusal("message: its body is not a safetensors file") from None
    if any(value.dtype not in _TYPES for value in found.values()):
        raise Refusal(f"message: tensors must be of type {', '.join(str(kind)[6:] for kind in _TYPES)}")
    return found


# -- the state of a method ---------------------------------------------------------------------------------------


def state_to_message(state: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state of a method, a dataclass of numbers and tensors, as JSON and tensors."""
    if not is_dataclass(state) or isinstance(state, type):
        raise Refusal(f"state={type(state).__name__}: only a dataclass can be sent to a party")
    plain: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for one in fields(state):
        value = getattr(state, one.name)
        if isinstance(value, Tensor):
            plain[one.name], tensors[f"state.{one.name}"] = {"tensor": True}, value
        elif value is None or isinstance(value, bool | int | float | str):
            plain[one.name] = value
        else:
            raise Refusal(
                f"state.{one.name}: {type(value).__name__} cannot be sent to a party; tensors and numbers can"
            )
    return plain, tensors


def state_from_message(
    like: Any,
    shapes: Mapping[str, Sequence[tuple[int, ...] | None]],
    plain: Mapping[str, Any],
    tensor: Callable[[str], Tensor | None],
) -> Any:
    """The inverse, of what somebody says who is not trusted.

    like    the state at the start, which has the same fields with values of the same types
    shapes  that tensors may have, by their fields, as of `Method.shapes_of_state`
    """
    known = {one.name: getattr(like, one.name) for one in fields(like)}
    if set(plain) != set(known):
        raise Refusal(f"message: state must have the fields {', '.join(sorted(known))}")
    values: dict[str, Any] = {}
    for name, value in plain.items():
        start = known[name]
        if name not in shapes:
            if type(value) is not type(start):
                raise Refusal(f"message: state.{name} must be of type {type(start).__name__}")
        else:
            value = None if value is None else tensor(f"state.{name}")
            if (None if value is None else tuple(value.shape)) not in shapes[name]:
                raise Refusal(f"message: tensor state.{name} must be of one of the shapes {list(shapes[name])}")
            kind = start.dtype if isinstance(start, Tensor) else torch.float64
            if value is not None and value.dtype != kind:
                raise Refusal(f"message: tensor state.{name} must be of type {str(kind)[6:]}")
        values[name] = value
    return replace(like, **values)
