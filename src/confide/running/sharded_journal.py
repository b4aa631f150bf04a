"""The journal of a run whose weights are spread over the ranks: each keeps its own part of every checkpoint.

The first rank keeps the journal as for any run, with its own part of position and state. The others write theirs into
a folder of their own of the same directory, which may be on another disk, before the first one's checkpoint counts; a
mark that is drawn for each checkpoint says which parts belong together. No rank ever holds the state of another.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confide.distributed.spread import SpreadNetwork
from confide.errors import Refusal
from confide.posteriors.drafts import make_folder
from confide.running.checkpoint_files import (
    TENSORS,
    Kept,
    Tensors,
    name_of,
    packed_state,
    sealed,
    tensors_of,
    unpacked_state,
    unsealed,
    write,
)
from confide.running.crews import FollowingJournal, LeadingJournal, following, leading
from confide.running.journal import KEPT, Attempt, CheckpointPlace, Checkpoints, Journal, fingerprint_of, journal


@contextmanager
def spread_journal(
    place: CheckpointPlace, attempt: Attempt, network: SpreadNetwork, flush: Callable[[], None]
) -> Iterator[Journal]:
    """The journal of a run on weights that are spread; `flush` puts the draws so far on the disk."""
    if place is None:
        with journal(None, attempt) as book:
            yield book
        return
    settings, crew = Checkpoints.at(place), attempt.source.crew
    crew.together(attempt.source.check_resumable)
    what = _what(attempt, network)
    if crew.leads:
        with leading(settings, attempt.source, lambda: SpreadLeading(settings, attempt, what, flush)) as first:
            crew.told(json.dumps([first.done, first.mark]).encode())
            crew.together(lambda: None)  # whether everybody has a part of that checkpoint
            yield first
        return
    folder = Path(settings.directory) / f"rank-{crew.rank}"
    with following(SpreadFollowing(attempt, what, folder)) as other:
        done, mark = json.loads(crew.told(b""))
        crew.together(lambda: other.go_on(done, mark))
        yield other


def _what(attempt: Attempt, network: SpreadNetwork) -> str:
    """What makes a run this run: with the frozen weights, and how all are spread. A collective."""
    with network.whole(attempt.problem.position):
        alike = fingerprint_of(attempt.method, attempt.problem, attempt.source)
    return hashlib.sha256(f"{alike} {network.parts!r}".encode()).hexdigest()


class SpreadLeading(LeadingJournal):
    """The first rank's. `mark`: of the checkpoint that is being written, or was read."""

    def __init__(self, settings: Checkpoints, attempt: Attempt, what: str, flush: Callable[[], None]) -> None:
        self._given, self._flush = what, flush
        super().__init__(settings, attempt)
        body = unsealed(self.directory / name_of(self.done))
        self.mark = "" if body is None else body["mark"]

    def _what(self, attempt: Attempt) -> str:
        return self._given

    def _of_this_run(self, body: dict[str, Any] | None) -> dict[str, Any] | None:
        size = self.source.crew.size
        written = size if body is None else body.get("ranks", size)
        if written != size:
            raise Refusal(
                f"checkpoint={str(self.directory)!r}: was written by {written} ranks, each of which keeps its own part "
                f"of the weights, and these are {size}; start {written} again, or name a new directory, which starts "
                "and pays from the beginning"
            )
        return super()._of_this_run(body)

    def keep(self, step: int, state: Any) -> None:
        if step >= self.next:
            self.mark = secrets.token_hex(16)
            self.source.crew.told(self.mark.encode())
            self.source.crew.together(self._flush)  # the others write their parts
        super().keep(step, state)

    def _body(self, kept: Kept) -> dict[str, Any]:
        return {**super()._body(kept), "mark": self.mark}

    def _handed(self, carried: Tensors) -> dict[str, Any]:
        return {}  # everybody has put back a part of its own


class SpreadFollowing(FollowingJournal):
    """Another rank's, which keeps the files of its part."""

    def __init__(self, attempt: Attempt, what: str, folder: Path) -> None:
        super().__init__(attempt)
        self.what, self.folder, self.tensors = what, folder, Tensors(folder)

    def keep(self, step: int, state: Any) -> None:
        if step >= self.next:
            mark = self.source.crew.told(b"").decode()
            kept = Kept(step, state, self.problem.position, self.problem.generator.get_state())
            self.source.crew.together(lambda: self._write(kept, mark))
        super().keep(step, state)

    def _write(self, kept: Kept, mark: str) -> None:
        make_folder(self.folder / TENSORS)
        write(
            self.folder / name_of(kept.step),
            sealed({"what": self.what, "mark": mark, **packed_state(self.tensors, kept)}),
        )
        parts = sorted(self.folder.glob("step-*.json"), reverse=True)
        for path in parts[KEPT:]:
            path.unlink(missing_ok=True)
        needed = {name for path in parts[:KEPT] for name in tensors_of(unsealed(path))}
        for path in (self.folder / TENSORS).iterdir():
            if path.name not in needed:
                path.unlink(missing_ok=True)

    def go_on(self, done: int, mark: str) -> None:
        """Put this rank's part of the first one's checkpoint back; refused before anything is charged."""
        if not done:
            return
        body = unsealed(self.folder / name_of(done))
        if body is None or body["mark"] != mark or body["what"] != self.what:
            raise Refusal(
                f"checkpoint={str(self.folder)!r}: holds no part of the checkpoint after step {done}; bring this "
                "rank's folder back, or name a new directory, which starts and pays from the beginning"
            )
        tensors = {name: self.tensors.read(name) for name in tensors_of(body)}
        self._put_back(unpacked_state(body, tensors, self.state, self.problem.position.device))
