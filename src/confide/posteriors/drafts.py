"""Drafts: everything is written under another name beside its target first, and renamed when it is whole."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

LEFT_OVER = 3600.0
"""Seconds after which nobody is still at work on a draft; a file of draws grows all the time."""


def draft_of(target: Path) -> Path:
    """A name beside the target that nobody else has. Drafts that a killed writer left there are removed."""
    clean_up(target)
    return target.with_name(f".{target.name}.{secrets.token_hex(6)}.partial")


def clean_up(target: Path, keep: Callable[[Path], bool] = lambda draft: False) -> None:
    """Remove the target's drafts that nobody has touched for an hour, but for those that are worth keeping."""
    name = re.compile(re.escape(f".{target.name}.") + r"[0-9a-f]{12}\.partial\Z")
    with contextlib.suppress(OSError):
        for draft in target.parent.iterdir():
            if name.match(draft.name) and time.time() - _last_touched(draft) > LEFT_OVER and not keep(draft):
                if draft.is_dir() and not draft.is_symlink():
                    shutil.rmtree(draft, ignore_errors=True)
                else:
                    draft.unlink(missing_ok=True)


def _last_touched(draft: Path) -> float:
    inside = list(draft.iterdir()) if draft.is_dir() and not draft.is_symlink() else []
    return max(path.lstat().st_mtime for path in (draft, *inside))


def make_folder(folder: Path) -> None:
    """With all its parents, and their names on the disk: a power cut takes a new folder with all that is in it."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync(made.absolute().parent)


def sync(path: Path) -> None:
    """A file's bytes, or a directory's names, on the disk: a power cut after this leaves what was written."""
    flags = os.O_RDONLY | (getattr(os, "O_DIRECTORY", 0) if path.is_dir() else 0)
    try:
        handle = os.open(path, flags)
    except OSError:  # some systems open no directories
        if path.is_dir():
            return
        raise
    try:
        os.fsync(handle)
    except OSError:  # some file systems know no sync of a directory
        if not path.is_dir():
            raise
    finally:
        os.close(handle)
