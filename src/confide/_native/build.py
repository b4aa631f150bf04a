"""Compile the native kernel: at installation through `hatch_build.py`, by hand as a module of that name.

Uses the standard library alone, because the build runs where neither confide nor torch is importable.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("gaussian.cpp", "secure.cpp", "clipping.cpp", "prediction.cpp")
SOURCES = tuple(Path(__file__).with_name(name) for name in NAMES)
LIBRARY = Path(__file__).with_name("libconfide_gaussian.so")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")


def compiler() -> str | None:
    """The C++ compiler named by CXX, or the first of the usual ones on the path."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((found for found in map(shutil.which, names) if found), None)


def build(target: Path = LIBRARY) -> str:
    """Compile the kernel to `target`; return "" or the reason why there is none, which is no failure."""
    target.unlink(missing_ok=True)  # a library of another version must not survive a build that fails
    command = compiler()
    if command is None:
        return "no C++ compiler found"
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # Compiled aside and moved, so that a process which has the old library loaded keeps it intact.
        fresh = Path(folder) / target.name
        try:
            subprocess.run([command, *FLAGS, "-o", str(fresh), *map(str, SOURCES)], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as failure:
            return f"{command} failed: {failure}"
        os.replace(fresh, target)
    return ""


if __name__ == "__main__":
    reason = build()
    sys.stderr.write(f"no native kernel: {reason}\n" if reason else f"built {LIBRARY}\n")
