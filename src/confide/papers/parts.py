"""Finished parts of experiments: a run of hours that was stopped goes on from them.

A part is one fit or one row, as plain values. Its file is named by a hash of what it is and of everything that made it:
the sources of confide (and of a paper of one's own), torch's version, the data directory, whether the run is quick or
seeded. So nothing that other sources found is taken for a part of this run; it is made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")


@dataclass(eq=False)
class Parts:
    """The folder with the files, and what made them.

    seconds   of processor time that parts took which were found finished
    """

    folder: Path
    sources: str
    seconds: float = field(default=0.0)

    @classmethod
    def at(cls, folder: Path, source: Path | None = None) -> Parts:
        """The folder, made if need be; `source` is the file or folder of a paper of one's own."""
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, _fingerprint([Path(__file__).parent.parent, *([] if source is None else [source])]))

    def get(self, made: Callable[..., Value], what: tuple[Any, ...], compute: Callable[[], Value]) -> Value:
        """The value of a part: read where it is finished, else computed and written. `made` builds it from fields."""
        path = self.folder / f"{hashlib.sha256(repr((self.sources, what)).encode()).hexdigest()[:32]}.json"
        found = _read(path)
        if found is not None:
            self.seconds += found["processor_seconds"]
            return made(**found["value"]) if isinstance(found["value"], dict) else made(found["value"])
        before = time.process_time()
        value: Any = compute()
        kept = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        about = {"what": repr(what), "processor_seconds": time.process_time() - before, "value": kept}
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        draft.replace(path)  # whole or not at all, whenever the run is stopped
        return value  # type: ignore[no-any-return]


def _read(path: Path) -> dict[str, Any] | None:
    """None for a part that is not there, or not readable: it is made anew."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"value", "processor_seconds"} <= found.keys() else None


def _fingerprint(roots: list[Path]) -> str:
    import torch

    found = hashlib.sha256(torch.__version__.encode())
    for root in roots:
        files = sorted(root.rglob("*.py")) if root.is_dir() else [root]
        for file in files:
            found.update(f"{file.relative_to(root.parent)}\0".encode())
            found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()
