"""Compile the native library: at installation through `hatch_build.py`, by the loader when the sources have changed, by
hand as a module of that name.

Uses the standard library alone, because the build runs where neither confide nor torch is importable.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = (
    "gaussian.cpp",
    "secure.cpp",
    "clipping.cpp",
    "outer.cpp",
    "patches.cpp",
    "prediction.cpp",
    "recurrence.cpp",
    "digest.cpp",
)
SOURCES = tuple(Path(__file__).with_name(name) for name in NAMES)
HEADERS = tuple(Path(__file__).with_name(name) for name in ("kernels.h", "tiles.h"))
LIBRARY = Path(__file__).with_name("libconfide.so")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
MARK = "confide sources "
"""Stands in the library before the fingerprint of what it was compiled from."""


def fingerprint() -> str:
    """The hash of the sources as they lie here, and of the flags: a library is called if it was made of just these."""
    parts = [" ".join(FLAGS).encode(), *(path.read_bytes() for path in (*HEADERS, *SOURCES))]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def fingerprint_in(library: Path) -> str:
    """What a library says it was compiled from, read without running it; "" if it says nothing."""
    content = library.read_bytes()
    place = content.find(MARK.encode())
    return "" if place < 0 else content[place + len(MARK) :][:64].decode("ascii", "replace")


def compiler() -> str | None:
    """The C++ compiler named by CXX, or the first of the usual ones on the path."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((found for found in map(shutil.which, names) if found), None)


def build(target: Path = LIBRARY) -> str:
    """Compile the kernels to `target`; return "" or the reason why there are none, which is no failure."""
    target.unlink(missing_ok=True)  # a library of another version must not survive a build that fails
    command = compiler()
    if command is None:
        return "no C++ compiler found"
    made_of = f'-DCONFIDE_SOURCES="{fingerprint()}"'
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # Compiled aside and moved, so that a process which has the old library loaded keeps it intact.
        fresh = Path(folder) / target.name
        arguments = [command, *FLAGS, made_of, "-o", str(fresh), *map(str, SOURCES)]
        try:
            subprocess.run(arguments, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as failure:
            return f"{command} failed: {failure}"
        os.replace(fresh, target)
    return ""


if __name__ == "__main__":
    reason = build()
    sys.stderr.write(f"no native library: {reason}\n" if reason else f"built {LIBRARY}\n")
