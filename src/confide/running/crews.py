"""A run that several processes make together: they start alike, and the first one alone keeps the journal.

All members hold the same public state and move it by the same releases, so one copy of a checkpoint is enough. The
first member reads and writes the directory and asks the ledger. Whenever it is about to pay it says so, and the others
make the same charge beside it (which writes nothing, and gives each its receipt); then it says what came of it.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from confide.distributed.spread import is_spread
from confide.errors import RankLost, Refusal
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.methods.base import Method, Problem
from confide.privacy.events import event_from_dict, event_to_dict
from confide.privacy.ledger.book import VERSION
from confide.running.checkpoint_files import Tensors, locked, unpacked_fields
from confide.running.closing import closing_from_dict, closing_to_dict
from confide.running.journal import Attempt, CheckpointPlace, Checkpoints, Journal, KeptJournal, fingerprint_of, journal
from confide.sources.base import Part, Source, Stretch
from confide.sources.crew import Crew, error_from_dict, error_to_dict
from confide.sources.queries import GradientQuery, Query, Release

DRAWN = ("draws",)
"""Fields of states that hold what was drawn so far, and that no question is made of."""
SELDOM = 16
"""Steps between two looks at large states that drift by their last bits; a look at 2.4 million numbers takes 0.7 ms."""
ACROSS = 512  # numbers of 8 bytes in a row: the sums of a large state are a few kilobytes
Leader = TypeVar("Leader", bound="LeadingJournal")
Follower = TypeVar("Follower", bound="FollowingJournal")


def check_whole(module: nn.Module) -> None:
    """Refuse a network that was spread over processes by other means: ranks divide the records, not the weights."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.parallel.DistributedDataParallel | nn.SyncBatchNorm):
            where = f" at {name!r}" if name else ""
            raise Refusal(
                f"module: holds {type(layer).__name__}{where}, which lets processes see each other's records; give the "
                "plain network, and let ranks.private(...) share the records out"
            )
    if is_spread(module):
        raise Refusal(
            "module: its weights are sharded over processes (fully_shard); use confide.fit_sharded, which keeps them "
            "so, or give the plain network"
        )


def start_alike(method: Method, problem: Problem, source: Source) -> None:
    """Refuse members that differ, before anything is charged; all start from the first one's position and generator."""
    crew, module = source.crew, problem.module
    if crew.size == 1:
        return
    frozen = [(name, value) for name, value in module.named_parameters() if not value.requires_grad]
    crew.agree(
        {
            "method": repr(method),
            "plan": repr(problem.plan),
            "schema": repr(source.schema),
            "likelihood": repr(problem.likelihood),
            "network": repr(module),
            "frozen weights": " ".join(f"{name} {digest_of(value)}" for name, value in frozen),
            "run": fingerprint_of(method, problem, source),
            "versions": versions_here(),
        }
    )
    problem.position.copy_(crew.share_(problem.position.cpu()))
    problem.generator.set_state(crew.share_(problem.generator.get_state()))


def steps_between_looks(query: Query) -> int:
    """After how many steps members look whether they are in one state.

    A gradient moves as little as what it is asked at, so that last bits may wait; what a statistic is made of (axes,
    say, which have two directions each) may not.
    """
    return SELDOM if isinstance(query, GradientQuery) else 1


def kept_alike(crew: Crew, problem: Problem, state: Any, last: bool = False) -> Any:
    """The state after a step, which is the first member's where processors or numbers of threads made others differ.

    Members that are in different states ask their records different questions, and the sum is an answer to none: a
    basis of eigenvectors that one of them has turned over is enough. Draws come from positions that were alike, and
    are compared once they are all there (`last`).
    """
    if crew.size == 1:
        return state
    left_out = () if last else DRAWN
    compared = {field.name: getattr(state, field.name) for field in fields(state) if field.name not in left_out}
    code = hashlib.sha256()
    for value in (problem.position, problem.generator.get_state(), *compared.values()):
        _add_code(code, value, left_out)
    if crew.alike(code.digest()):
        return state
    carried = _Carried(Path())
    told: dict[str, Any] = {}
    if crew.leads:
        told = {"position": carried.write(problem.position), "generator": carried.write(problem.generator.get_state())}
        told["state"] = carried.packed_fields(compared)
    told, tensors = _unpacked(crew.told(_packed(told, carried.held)))
    problem.position.copy_(tensors[told["position"]])
    problem.generator.set_state(tensors[told["generator"]])
    device = problem.position.device
    return replace(state, **unpacked_fields(told["state"], tensors, state, device))


def _add_code(code: Any, value: Any, left_out: Sequence[str]) -> None:
    """What tells one state from another, without a second copy of it: sums over the rows and columns of its bits."""
    if isinstance(value, Tensor):
        words = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        code.update(f"{value.dtype} {tuple(value.shape)}".encode())
        whole = len(words) // (8 * ACROSS) * 8 * ACROSS
        table = words[:whole].view(np.uint64).reshape(-1, ACROSS)
        for part in (table.sum(0), table.sum(1), words[whole:]):
            code.update(part.tobytes())
    elif is_dataclass(value):
        for field in fields(value):
            if field.name not in left_out:
                _add_code(code, getattr(value, field.name), left_out)
    elif isinstance(value, tuple):
        code.update(f"{len(value)}".encode())
        for member in value:
            _add_code(code, member, left_out)
    else:
        code.update(repr(value).encode())


@contextmanager
def shared_journal(place: CheckpointPlace, attempt: Attempt) -> Iterator[Journal]:
    """The journal of a run that several processes make; without checkpoints each has its own, which needs no files."""
    if place is None:
        with journal(None, attempt) as book:
            yield book
        return
    settings = Checkpoints.at(place)
    source = attempt.source
    source.crew.together(source.check_resumable)
    if source.crew.leads:
        with leading(settings, source, lambda: LeadingJournal(settings, attempt)) as book:
            yield book
        return
    with following(FollowingJournal(attempt)) as follower:
        yield follower


@contextmanager
def following(follower: Follower) -> Iterator[Follower]:
    follower.listen()  # whether the directory can be used
    try:
        yield follower
    finally:
        follower.close()


@contextmanager
def leading(settings: Checkpoints, source: Source, made: Callable[[], Leader]) -> Iterator[Leader]:
    """The journal that is made once the directory is this process's own."""
    lock = locked(Path(settings.directory))
    with _told(source):
        lock.__enter__()
    try:
        with _told(source):
            book = made()
        source.crew.told(_packed({"word": "done"}))
        try:
            yield book
        finally:
            book.close()
    finally:
        lock.__exit__(None, None, None)


@contextmanager
def _told(source: Source) -> Iterator[None]:
    """What fails for the first member is told to the others before it is raised."""
    try:
        yield
    except RankLost:
        raise
    except Exception as error:
        source.crew.told(_packed({"word": "failed", "error": error_to_dict(error)}))
        raise


class LeadingJournal(KeptJournal):
    """The first member's: keeps the checkpoints, and tells the others what it pays and how that went."""

    def charge(self, plan: Plan) -> None:
        self._tell(lambda: KeptJournal.charge(self, plan), start=True)

    def keep(self, step: int, state: Any) -> None:
        if step >= self.next:
            self._tell(lambda: KeptJournal.keep(self, step, state))

    def _pay(self, parts: Sequence[Part], stretch: Stretch) -> None:
        message = {
            "word": "pay",
            "parts": _written(parts),
            "claim": stretch.claim,
            "answers": _written(stretch.parts),
        }
        self.source.crew.told(_packed(message))
        super()._pay(parts, stretch)

    def _closed_before(self) -> Release | None:
        with _told(self.source):
            kept = super()._closed_before()
        self._say_done({"closed": None if kept is None else closing_to_dict(kept)})
        return kept

    def _say_done(self, more: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> None:
        where = {"done": self.done, "next": self.next, "events": [event_to_dict(event) for event in self.events]}
        self.source.crew.told(_packed({"word": "done", **where, **more}, tensors))

    def _tell(self, work: Callable[[], None], start: bool = False) -> None:
        with _told(self.source):
            work()
        carried = _Carried(self.directory)
        self._say_done(self._handed(carried) if start and self.done else {}, carried.held)

    def _handed(self, carried: Tensors) -> dict[str, Any]:
        """What the others need to go on from a checkpoint: all are in one state, so that it is the first one's."""
        return {
            "state": carried.packed(self.state)["fields"],
            "position": carried.write(self.problem.position),
            "generator": carried.write(self.problem.generator.get_state()),
        }


class FollowingJournal(Journal):
    """Another member's: no files; it pays when the first one does, and goes on from where that one says."""

    next = 0
    kept: Release | None = None  # what the first member was answered in an earlier attempt

    def charge(self, plan: Plan) -> None:
        self.listen()

    def keep(self, step: int, state: Any) -> None:
        if step >= self.next:
            self.listen()

    def closed(self, ask: Callable[[], Release]) -> Release:
        self.listen()
        return ask() if self.kept is None else self.kept

    def listen(self) -> None:
        """Do as the first member says, until it is done."""
        while True:
            message, tensors = _unpacked(self.source.crew.told(b""))
            if message["word"] == "failed":
                raise error_from_dict(message["error"], rank=0)
            if message["word"] == "done":
                return self._take_over(message, tensors)
            claim = None if message["claim"] is None else (message["claim"][0], message["claim"][1])
            stretch = Stretch(self.run, claim, _read(message["answers"]))
            try:
                self._pay(_read(message["parts"]), stretch)
            except RankLost:
                raise
            except Exception:  # (the first member met the same, and will say what follows from it)
                continue

    def _take_over(self, message: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if "next" not in message:
            return
        self.done, self.next = message["done"], message["next"]
        self.events = tuple(event_from_dict(event) for event in message["events"])
        if message.get("closed") is not None:
            self.kept = closing_from_dict(message["closed"], self.closing[0][0])
        if "state" in message:
            values = unpacked_fields(message["state"], tensors, self.state, self.problem.position.device)
            self.state = type(self.state)(**values)
            self.problem.position.copy_(tensors[message["position"]])
            self.problem.generator.set_state(tensors[message["generator"]])


class _Carried(Tensors):
    """Tensors that travel instead of being written."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.held: dict[str, Tensor] = {}

    def write(self, tensor: Tensor) -> str:
        name = str(len(self.held))
        self.held[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        return name


def _packed(message: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> bytes:
    from safetensors.torch import save

    text = json.dumps(message).encode()
    return len(text).to_bytes(8, "big") + text + (save(tensors) if tensors else b"")


def _unpacked(content: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors.torch import load

    end = 8 + int.from_bytes(content[:8], "big")
    message: dict[str, Any] = json.loads(content[8:end])
    return message, load(content[end:]) if len(content) > end else {}


def _written(parts: Sequence[Part]) -> list[Any]:
    return [[asdict(mechanism), answers] for mechanism, answers in parts]


def _read(parts: list[Any]) -> tuple[Part, ...]:
    return tuple((SampledGaussian(**mechanism), int(answers)) for mechanism, answers in parts)


def versions_here() -> str:
    """Of what the members must have in common; numbers without a type of their own are of torch's default one."""
    versions = f"confide {VERSION} python {platform.python_version()} torch {torch.__version__} numpy {np.__version__}"
    return f"{versions} {torch.get_default_dtype()}"


def digest_of(tensor: Tensor) -> str:
    from safetensors.torch import save

    return hashlib.sha256(save({"value": tensor.detach().contiguous().cpu()})).hexdigest()
