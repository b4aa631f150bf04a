"""Checkpoints: a run that is killed at any moment goes on where it was, and pays for what it may have done twice.

    confide.fit(method, module, data, plan, checkpoint="DIR")

What is kept is the state of the method, the position and the method's own random generator: functions of releases, so
keeping them costs nothing. Records, batches and the noise stream are never written; noise keys come from the operating
system at every start, so no noise is used twice.

Charging. The first start charges the whole plan. `journal.json` says, before any record is read, up to which step the
present attempt can get until it writes the next checkpoint. A later start goes on from checkpoint k, and charges steps
k+1, ..., reached once more, since the attempt before may have made them. Every release is so paid for at least
once, whether or not anybody saw it. A ledger that does not hold the charges of the earlier starts (one in memory, say)
is charged for all of them.

Files. Every file is written beside its final name, flushed to the disk and renamed, so it is there whole or not at all.
Manifests and the journal carry their own SHA-256, tensors are named by theirs; the last two checkpoints are kept.
What does not match is not used: the last good checkpoint is, or the run starts, and is charged, from the beginning.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from confide.errors import LedgerError, Refusal
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.methods.base import Problem
from confide.privacy.events import Event
from confide.privacy.ledger import Head, Ledger

FORMAT = 1
KEPT = 2
USUAL_CHECKPOINTS = 20
JOURNAL, TENSORS, LOCK = "journal.json", "tensors", "lock"


@dataclass(frozen=True)
class Checkpoints:
    """Where checkpoints go, and after how many steps; None: so that a run writes about twenty."""

    directory: str | os.PathLike[str]
    every: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise Refusal(f"every={self.every}: must be at least 1")


class Journey:
    """A run from its first to its last step: charges, and the steps that are left."""

    def __init__(self, method: Any, problem: Problem, data: Any, state: Any) -> None:
        self.method, self.problem, self.data, self.state = method, problem, data, state
        self.purpose = f"fit {method.name}"
        self.charged: list[tuple[int, int]] = []
        self._beside_before = len(self._beside())

    @property
    def plan(self) -> Plan:
        return self.problem.plan

    def start(self) -> int:
        """Pay for the whole plan, before a record is read; the number of steps that are done already."""
        self.charge(list(enumerate(steps for _, steps in self.plan.blocks)))
        return 0

    def charge(self, parts: list[tuple[int, int]]) -> None:
        """Pay for steps, given as (number of the block, steps): for all of them or, if that is refused, for none."""
        wanted = [(self.plan.blocks[block][0], steps) for block, steps in parts]
        if hasattr(self.data, "charge_all"):
            self.data.charge_all(wanted, purpose=self.purpose)
        else:
            for mechanism, steps in wanted:
                self.data.charge(mechanism, steps, purpose=self.purpose)
        self.charged += parts

    def steps(self) -> Iterator[tuple[int, SampledGaussian]]:
        """What is left: the number of every step with its mechanism. Nothing is read before this has charged."""
        done = self.start()
        left = itertools.islice(self.plan.mechanisms(), done, None)
        yield from enumerate(left, start=done + 1)

    def keep(self, done: int, state: Any) -> None:
        """Called after every step."""

    def events(self) -> tuple[Event, ...]:
        """What was paid for, repeated steps included, and what the source charged beside the plan."""
        blocks = self.plan.blocks
        planned = (blocks[block][0].event(steps) for block, steps in self.charged)
        return (*planned, *self._beside()[self._beside_before :])

    def _beside(self) -> tuple[Event, ...]:
        """What the source has charged beside plans so far, in this run and in earlier ones."""
        found: tuple[Event, ...] = getattr(self.data, "events_beside", tuple)()
        return found


@contextmanager
def begin(
    checkpoint: str | os.PathLike[str] | Checkpoints | None, method: Any, problem: Problem, data: Any, state: Any
) -> Iterator[Journey]:
    """The journey of a run, with or without checkpoints. Two processes cannot share a directory of checkpoints."""
    if checkpoint is None:
        yield Journey(method, problem, data, state)
        return
    settings = checkpoint if isinstance(checkpoint, Checkpoints) else Checkpoints(checkpoint)
    directory = Path(settings.directory)
    try:
        (directory / TENSORS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal(f"checkpoint={str(directory)!r}: cannot be written ({error.strerror})") from None
    with _locked(directory):
        yield KeptJourney(settings, method, problem, data, state)


class KeptJourney(Journey):
    """A run with checkpoints. The state of an earlier attempt is put back when this object is made."""

    def __init__(self, settings: Checkpoints, method: Any, problem: Problem, data: Any, state: Any) -> None:
        super().__init__(method, problem, data, state)
        if hasattr(data, "events_beside"):
            raise Refusal("checkpoint: a source that adapts itself has a state of its own, which is not kept")
        self.directory = Path(settings.directory)
        self.every = settings.every or math.ceil(self.plan.steps / USUAL_CHECKPOINTS)
        self.run = run_of(method, problem, data)
        self.known: dict[int, tuple[Tensor, str]] = {}
        self.journal = self._read_journal()
        self.done = self._restore()
        self.next = min(self.done + self.every, self.plan.steps)
        self._packed_state(self.state, {})  # a state that cannot be kept is refused before anything is charged

    # -- charging --------------------------------------------------------------------------------------------------

    def start(self) -> int:
        if self.journal is None:
            super().start()
            if self.done:
                # The journal is gone, so nothing is known about the attempts before; one more plan is charged for them.
                super().start()
        else:
            self._charge_again(self.journal)
        self._write_journal()
        return self.done

    def _charge_again(self, journal: dict[str, Any]) -> None:
        """Steps after the checkpoint that the last attempt may have made; all charges, if the ledger is another."""
        before = [(int(block), int(steps)) for block, steps in journal["charged"]]
        repeated = self._parts(self.done, journal["reached"])
        if any(mechanism.sampling == "shuffle" for mechanism, _ in self.plan.blocks):
            # A new start begins a new pass, so what is left of the old one cannot be used.
            repeated = self._parts(self.done, self.plan.steps)
        if self._in_ledger(journal["head"]):
            self.charged = before
            self.charge(repeated)
            self._recall(self.done + sum(steps for _, steps in repeated), self.plan.steps)
        else:
            self.charge(before + repeated)

    def _parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Steps start+1, ..., stop by block."""
        blocks = (block for block, (_, steps) in enumerate(self.plan.blocks) for _ in range(steps))
        chosen = itertools.islice(blocks, start, stop)
        return [(block, len(list(group))) for block, group in itertools.groupby(chosen)]

    def _in_ledger(self, noted: list[Any] | None) -> bool:
        """Whether the ledger holds what earlier attempts were charged."""
        ledger = getattr(self.data, "ledger", None)
        if noted is None or not isinstance(ledger, Ledger):
            return False
        try:
            ledger.verify(Head(int(noted[0]), str(noted[1])))
        except LedgerError:
            return False
        return True

    def _recall(self, start: int, stop: int) -> None:
        """Let the boundary answer steps that the ledger holds already."""
        ledger = getattr(self.data, "ledger", None)
        if ledger is None:
            return
        self.data.ledger = _PaidBefore()
        try:
            for block, steps in self._parts(start, stop):
                self.data.charge(self.plan.blocks[block][0], steps, purpose=self.purpose)
        finally:
            self.data.ledger = ledger

    # -- keeping ---------------------------------------------------------------------------------------------------

    def keep(self, done: int, state: Any) -> None:
        if done < self.next:
            return
        self._write_manifest(done, state)
        self.done, self.next = done, min(done + self.every, self.plan.steps)
        self._write_journal()
        self._sweep()

    def _write_journal(self) -> None:
        ledger = getattr(self.data, "ledger", None)
        head = ledger.head if isinstance(ledger, Ledger) else None
        body = {
            "run": self.run,
            "charged": self.charged,
            "reached": self.next,
            "head": None if head is None else [head.count, head.hash],
        }
        _write(self.directory / JOURNAL, _sealed(body))

    def _read_journal(self) -> dict[str, Any] | None:
        return self._of_this_run(_unsealed(self.directory / JOURNAL))

    def _of_this_run(self, body: dict[str, Any] | None) -> dict[str, Any] | None:
        if body is not None and body["run"] != self.run:
            raise Refusal(
                f"checkpoint={str(self.directory)!r}: belongs to another run (method, settings, plan, data set name or "
                "network differ); name a new directory"
            )
        return body

    def _write_manifest(self, done: int, state: Any) -> None:
        problem = self.problem
        known, self.known = self.known, {}
        body = {
            "run": self.run,
            "step": done,
            "state": self._packed_state(state, known),
            "position": self._blob(problem.position),
            "generator": self._blob(problem.generator.get_state()),
            "buffers": {name: self._blob(buffer) for name, buffer in problem.module.named_buffers()},
        }
        _write(self._manifest(done), _sealed(body))

    def _packed_state(self, state: Any, known: dict[int, tuple[Tensor, str]]) -> dict[str, Any]:
        if not is_dataclass(state) or isinstance(state, type):
            raise TypeError(f"state={type(state).__name__}: the state of a method must be a dataclass to be kept")
        packed = {field.name: self._packed(getattr(state, field.name), field.name, known) for field in fields(state)}
        return {"type": type(state).__qualname__, "fields": packed}

    def _packed(self, value: Any, where: str, known: dict[int, tuple[Tensor, str]], inside: bool = False) -> Any:
        """A value as JSON, tensors by the names of their files."""
        if isinstance(value, Tensor):
            # Members of tuples (draws) are never changed, so one that was written before is not written again.
            same, name = known.get(id(value), (None, "")) if inside else (None, "")
            name = name if same is value else self._blob(value)
            if inside:
                self.known[id(value)] = (value, name)
            return {"tensor": name, "stride": list(value.stride())}
        if isinstance(value, tuple):
            return {"tuple": [self._packed(member, where, known, True) for member in value]}
        if isinstance(value, float):
            return {"float": value.hex()}
        if value is None or isinstance(value, bool | int | str):
            return value
        raise TypeError(
            f"state.{where}: {type(value).__name__} cannot be kept; use tensors, numbers, strings or tuples"
        )

    def _blob(self, tensor: Tensor) -> str:
        """Write a tensor, unless it is there already; its name is the hash of its file."""
        from safetensors.torch import save

        content = save({"value": tensor.detach().contiguous().cpu()})
        name = hashlib.sha256(content).hexdigest()
        path = self.directory / TENSORS / name
        if not path.exists() or path.read_bytes() != content:
            _write(path, content)
        return name

    def _sweep(self) -> None:
        """Remove what no kept checkpoint needs."""
        manifests = self._manifests()
        for path in manifests[KEPT:]:
            path.unlink(missing_ok=True)
        needed = {name for path in manifests[:KEPT] for name in _names(_unsealed(path))}
        for path in (self.directory / TENSORS).iterdir():
            if path.name not in needed:
                path.unlink(missing_ok=True)
        for path in self.directory.glob("*.partial"):
            path.unlink(missing_ok=True)

    # -- putting back ----------------------------------------------------------------------------------------------

    def _restore(self) -> int:
        """Put the last good checkpoint back; the number of steps it holds."""
        for path in self._manifests():
            body = self._of_this_run(_unsealed(path))
            if body is None or body["state"]["type"] != type(self.state).__qualname__:
                continue
            try:
                tensors = {name: self._tensor(name) for name in _names(body)}
            except (OSError, ValueError):
                continue
            values = {name: _unpacked(value, tensors) for name, value in body["state"]["fields"].items()}
            self.state = type(self.state)(**values)
            self.problem.position.copy_(tensors[body["position"]])
            self.problem.generator.set_state(tensors[body["generator"]])
            for name, buffer in self.problem.module.named_buffers():
                buffer.copy_(tensors[body["buffers"][name]])
            return int(body["step"])
        return 0

    def _tensor(self, name: str) -> Tensor:
        from safetensors.torch import load

        content = (self.directory / TENSORS / name).read_bytes()
        if hashlib.sha256(content).hexdigest() != name:
            raise Refusal(f"checkpoint={str(self.directory)!r}: tensor {name} is damaged")
        tensor: Tensor = load(content)["value"]
        return tensor

    def _manifest(self, step: int) -> Path:
        return self.directory / f"step-{step:012d}.json"

    def _manifests(self) -> list[Path]:
        """Newest first."""
        return sorted(self.directory.glob("step-*.json"), reverse=True)


class _PaidBefore:
    """Stands in for a ledger that holds the charge already."""

    def charge(self, event: Event, purpose: str = "", dataset: str = "") -> None:
        """Nothing new to write down."""


def run_of(method: Any, problem: Problem, data: Any) -> str:
    """A hash of everything public that makes a run this run and not another."""
    plan = problem.plan
    facts = {
        "format": FORMAT,
        "method": [method.name, repr(method)],
        "blocks": [[asdict(mechanism), steps] for mechanism, steps in plan.blocks],
        "delta": [plan.delta, plan.adjacency],
        "likelihood": repr(problem.likelihood),
        "parameters": [
            [name, list(value.shape), str(value.dtype)] for name, value in problem.module.named_parameters()
        ],
        "buffers": [[name, list(value.shape), str(value.dtype)] for name, value in problem.module.named_buffers()],
        "data": [getattr(data, "name", ""), data.seeded],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _shapes(named: Iterator[tuple[str, Tensor]]) -> list[list[Any]]:
    return [[name, list(value.shape), str(value.dtype)] for name, value in named]


def _names(body: Any) -> Iterator[str]:
    """The tensors that a manifest refers to."""
    if body is None:
        return
    yield body["position"]
    yield body["generator"]
    yield from body["buffers"].values()
    yield from _leaves(list(body["state"]["fields"].values()))


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and "tensor" in value:
        yield value["tensor"]
    for member in value if isinstance(value, list) else value.get("tuple", ()) if isinstance(value, dict) else ():
        yield from _leaves(member)


def _unpacked(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return _laid_out(tensors[value["tensor"]], value["stride"])
    if "float" in value:
        return float.fromhex(value["float"])
    return tuple(_unpacked(member, tensors) for member in value["tuple"])


def _laid_out(tensor: Tensor, stride: list[int]) -> Tensor:
    """A copy in the memory order the tensor had: sums in another order would differ in their last bits."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=True))
    if 0 in stride or span != tensor.numel():  # parts of the memory are shared or left out; any order is as good
        return tensor.clone()
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)


def _sealed(body: dict[str, Any]) -> bytes:
    """The body with the hash of its text."""
    text = json.dumps(body, sort_keys=True)
    return json.dumps({"body": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()


def _unsealed(path: Path) -> dict[str, Any] | None:
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


def _write(path: Path, content: bytes) -> None:
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
def _locked(directory: Path) -> Iterator[None]:
    """Held as long as the run lives; the operating system lets go of it when the process dies."""
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
