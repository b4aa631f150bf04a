"""The files of a checkpoint: written whole or not at all, named or sealed by their hash, locked against a second run.

Every file is written beside its final name, flushed to the disk and renamed. JSON files carry their own SHA-256,
tensors are named by theirs: what does not match is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from confide.devices import HOST
from confide.errors import Refusal
from confide.posteriors.drafts import make_folder

TENSORS, LOCK = "tensors", "lock"


@dataclass(frozen=True)
class Kept:
    """The whole state of a run after some step: what `tell` returned, and what it changed in place."""

    step: int
    state: Any
    position: Tensor
    generator: Tensor


class Tensors:
    """Tensors of one directory by the hash of their files, and values that hold tensors, as JSON."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._known: dict[int, tuple[Tensor, str]] = {}

    def write(self, tensor: Tensor) -> str:
        """Write a tensor, unless it is there already; its name is the hash of its file."""
        from safetensors.torch import save

        content = save({"value": tensor.detach().contiguous().cpu()})
        name = hashlib.sha256(content).hexdigest()
        path = self.directory / TENSORS / name
        if not path.exists() or path.read_bytes() != content:
            write(path, content)
        return name

    def read(self, name: str) -> Tensor:
        from safetensors.torch import load

        content = (self.directory / TENSORS / name).read_bytes()
        if hashlib.sha256(content).hexdigest() != name:
            raise Refusal(f"checkpoint={str(self.directory)!r}: tensor {name} is damaged")
        tensor: Tensor = load(content)["value"]
        return tensor

    def packed(self, state: Any) -> dict[str, Any]:
        """The state of a method; its tensors are written."""
        if not is_dataclass(state) or isinstance(state, type):
            raise TypeError(f"state={type(state).__name__}: the state of a method must be a dataclass to be kept")
        inside = self.packed_fields({field.name: getattr(state, field.name) for field in fields(state)})
        return {"type": type(state).__qualname__, "fields": inside}

    def packed_fields(self, values: dict[str, Any]) -> dict[str, Any]:
        """Some or all fields of a state, by their names."""
        known, self._known = self._known, {}
        return {name: self._packed(value, name, known) for name, value in values.items()}

    def _packed(self, value: Any, where: str, known: dict[int, tuple[Tensor, str]], inside: bool = False) -> Any:
        """A value as JSON, tensors by the names of their files."""
        if isinstance(value, Tensor):
            # Members of tuples (draws) are never changed, so one that was written before is not written again.
            same, name = known.get(id(value), (None, "")) if inside else (None, "")
            name = name if same is value else self.write(value)
            if inside:
                self._known[id(value)] = (value, name)
            place = {} if value.device == HOST else {"moved": True}
            return {"tensor": name, "stride": list(value.stride()), **place}
        if isinstance(value, tuple):
            return {"tuple": [self._packed(member, where, known, True) for member in value]}
        if isinstance(value, float):
            return {"float": value.hex()}
        if value is None or isinstance(value, bool | int | str):
            return value
        if is_dataclass(value) and not isinstance(value, type):
            members = [(one.name, getattr(value, one.name)) for one in fields(value)]
            return {"state": {name: self._packed(member, f"{where}.{name}", known) for name, member in members}}
        raise TypeError(
            f"state.{where}: {type(value).__name__} cannot be kept; use tensors, numbers, strings or tuples"
        )


def names_in(value: Any) -> Iterator[str]:
    """The tensors that a packed value refers to."""
    if isinstance(value, dict) and "tensor" in value:
        yield value["tensor"]
    inside: Iterable[Any] = value if isinstance(value, list) else ()
    if isinstance(value, dict):
        inside = (*value.get("tuple", ()), *value.get("state", {}).values())
    for member in inside:
        yield from names_in(member)


def unpacked(value: Any, tensors: dict[str, Tensor], like: Any = None, device: torch.device = HOST) -> Any:
    """The inverse of packing one value; `like` is the value at the start of a run, which says what states are in it, or
    the class of the state where there was none.

    device   of the run, which may be another one than it was begun on: what was not on the host goes there
    """
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        found = _laid_out(tensors[value["tensor"]], value["stride"])
        return found.to(like.device) if isinstance(like, Tensor) else found.to(device) if "moved" in value else found
    if "float" in value:
        return float.fromhex(value["float"])
    if "state" in value:
        return unpacked_fields(value["state"], tensors, like, device, whole=True)
    return tuple(unpacked(member, tensors, None, device) for member in value["tuple"])


def unpacked_fields(
    values: dict[str, Any], tensors: dict[str, Tensor], like: Any, device: torch.device = HOST, *, whole: bool = False
) -> Any:
    """Some fields of a state that is `like` this one, or of this class, by their names; or, `whole`, the state."""
    kind = like if isinstance(like, type) else type(like)
    found = {}
    for name, value in values.items():
        before = None if like is kind else getattr(like, name)
        if before is None and isinstance(value, dict) and "state" in value:  # it came to be during the run
            before = _class_of_state(kind, name)
        found[name] = unpacked(value, tensors, before, device)
    if not whole:
        return found
    return kind(**found) if like is kind else replace(like, **found)


def _class_of_state(kind: type, name: str) -> type:
    """The one class of states that a field may hold, by its annotation."""
    hint = get_type_hints(kind)[name]
    (found,) = (one for one in (hint, *get_args(hint)) if isinstance(one, type) and is_dataclass(one))
    return found


def name_of(step: int) -> str:
    """The file of the checkpoint after a step; they are in order."""
    return f"step-{step:012d}.json"


def packed_state(tensors: Tensors, kept: Kept) -> dict[str, Any]:
    """As JSON, with the names of the tensors that were written for it."""
    return {
        "step": kept.step,
        "state": tensors.packed(kept.state),
        "position": tensors.write(kept.position),
        "generator": tensors.write(kept.generator),
    }


def unpacked_state(body: dict[str, Any], tensors: dict[str, Tensor], like: Any, device: torch.device) -> Kept:
    """The inverse; `like` is the state at the start of a run."""
    values = unpacked_fields(body["state"]["fields"], tensors, like, device)
    return Kept(int(body["step"]), type(like)(**values), tensors[body["position"]], tensors[body["generator"]])


def tensors_of(body: dict[str, Any] | None) -> Iterator[str]:
    """The tensors that a checkpoint refers to."""
    if body is not None:
        yield body["position"]
        yield body["generator"]
        yield from names_in(list(body["state"]["fields"].values()))


def _laid_out(tensor: Tensor, stride: list[int]) -> Tensor:
    """A copy in the memory order the tensor had: sums in another order would differ in their last bits."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=True))
    if 0 in stride or span != tensor.numel():  # parts of the memory are shared or left out; any order is as good
        return tensor.clone()
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)


def sealed(body: dict[str, Any]) -> bytes:
    """The body with the hash of its text."""
    text = json.dumps(body, sort_keys=True)
    return json.dumps({"body": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()


def unsealed(path: Path) -> dict[str, Any] | None:
    """The body, or None if the file is missing or not as it was written."""
    try:
        outer = json.loads(path.read_bytes())
        text = outer["body"]
        if hashlib.sha256(text.encode()).hexdigest() != outer["sha256"]:
            return None
        body: dict[str, Any] = json.loads(text)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return body


def write(path: Path, content: bytes) -> None:
    """Whole or not at all, and on the disk when this returns."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    if os.name == "posix":  # elsewhere a directory cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Held as long as the run lives; the operating system lets go of it when the process dies."""
    try:
        make_folder(directory / TENSORS)
    except OSError as error:
        raise Refusal(f"checkpoint={str(directory)!r}: cannot be written ({error.strerror})") from None
    if os.name != "posix":
        yield
        return
    import fcntl

    with (directory / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Refusal(
                f"checkpoint={str(directory)!r}: another process is using it; wait for it, or name a new directory"
            ) from None
        yield
