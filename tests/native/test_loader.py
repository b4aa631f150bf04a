"""The native library is called only if it was made of the sources beside it and gives the known answers."""

from __future__ import annotations

import ctypes
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from confide import _native
from confide._native import build, known_answers, loader
from confide._native.arithmetic import add_rows

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler here")

# One wrong constant in each kernel, the size of a slip of the pen.
FAULTS = {
    "box_muller": ("gaussian.cpp", "0.333333313f", "0.323333313f"),
    "rounded_normals": ("secure.cpp", "0.33333333333333348431", "0.33333333433333348431"),
    "add": ("secure.cpp", "const double inverse = 1.0 / spacing;", "const double inverse = 0.5 / spacing;"),
    "clip": ("clipping.cpp", "(T(1) / norm) * bound, T(1)", "(T(1.001) / norm) * bound, T(1)"),
    "squares": ("clipping.cpp", "return static_cast<T>(total + rest);", "return static_cast<T>(total);"),
    "gram": ("clipping.cpp", "return once + 2 * twice;", "return once + twice;"),
    "mean_field": ("clipping.cpp", "octaves * 0.693359375f", "octaves * 0.6933f"),
    "add_rows": ("clipping.cpp", "row = 1; row < row_count", "row = 2; row < row_count"),
    "outer": (
        "outer.cpp",
        "start < task.records; start += task.block",
        "start + task.block < task.records; start += task.block",
    ),
    "patches": ("patches.cpp", "place += task.stride[1]", "place += 1"),
    "predict": ("prediction.cpp", "0.693359375f", "0.693f"),
    "digest": ("digest.cpp", "words + 4 * at", "words"),
    "lstm": ("recurrence.cpp", "(1.0f - turned[i] * turned[i])", "(1.0f - turned[i])"),
}


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A copy of the sources, with nothing built yet, in place of the real ones."""
    for path in (*build.HEADERS, *build.SOURCES):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(build, "HEADERS", tuple(tmp_path / path.name for path in build.HEADERS))
    monkeypatch.setattr(build, "SOURCES", tuple(tmp_path / name for name in build.NAMES))
    monkeypatch.setattr(build, "LIBRARY", tmp_path / build.LIBRARY.name)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O1"))  # compiles in half the time
    monkeypatch.setattr(build.build, "__defaults__", (build.LIBRARY,))
    for cached in (loader.library, _native.kernel, _native.secure_kernels):
        cached.cache_clear()
    yield tmp_path
    for cached in (loader.library, _native.kernel, _native.secure_kernels):
        cached.cache_clear()


def change(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))


@needs_compiler
def test_a_change_of_the_sources_is_built_before_anything_is_called(sources: Path) -> None:
    assert build.build() == ""
    before = build.fingerprint_in(build.LIBRARY)
    assert before == build.fingerprint()
    change(sources, "kernels.h", "#pragma once", "#pragma once  // changed")
    assert build.fingerprint_in(build.LIBRARY) != build.fingerprint()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loader.library() is not None
    assert build.fingerprint_in(build.LIBRARY) == build.fingerprint() != before


def test_a_library_of_other_sources_is_not_called_where_it_cannot_be_built(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.LIBRARY.write_bytes(b"\x7fELF" + build.MARK.encode() + b"0" * 64)
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with pytest.warns(RuntimeWarning, match="compiled from other sources") as heard:
        assert loader.library() is None
    assert _native.kernel() is None  # and nothing more is said
    assert _native.secure_kernels() is None
    assert len(heard) == 1
    assert "\n" not in str(heard[0].message)


def test_a_damaged_library_is_not_called(sources: Path) -> None:
    build.LIBRARY.write_bytes(b"\x7fELF" + build.MARK.encode() + build.fingerprint().encode())
    with pytest.warns(RuntimeWarning, match="native library not used"):
        assert loader.library() is None


@needs_compiler
def test_every_wrong_kernel_is_found_and_none_of_it_used(sources: Path) -> None:
    for name, old, new in FAULTS.values():
        change(sources, name, old, new)
    assert build.build() == ""
    with pytest.warns(RuntimeWarning, match="wrong answers to known questions") as heard:
        assert loader.library() is None
    message = str(heard[0].message)
    assert [name for name in FAULTS if name not in message] == []


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("kernel", FAULTS)
def test_one_wrong_kernel_is_found(sources: Path, kernel: str) -> None:
    change(sources, *FAULTS[kernel])
    assert build.build() == ""
    opened: Any = ctypes.CDLL(str(build.LIBRARY))
    for name, (takes, gives) in loader.FUNCTIONS.items():
        function = getattr(opened, name)
        function.argtypes, function.restype = takes, gives
    assert kernel in known_answers.wrong_in(opened)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_sums_of_ranks_are_those_of_torch_to_the_bit(rows: int) -> None:
    """Whether a rank has the library must not show in the release: all ranks hold the same bits."""
    if loader.library() is None:
        pytest.skip("no native library here")
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1301, generator=generator) * 10.0**place for place in range(rows)]
    noise, out = torch.randn(1301, generator=generator), torch.empty(1301)
    assert add_rows(given, noise, out)
    total = given[0].double()
    for row in given[1:]:
        total = total + row.double()
    assert torch.equal(out, (total + noise.double()).float())
    assert not add_rows([row.double() for row in given], noise, out)
    assert not add_rows([row[::2] for row in given], noise[::2], out[::2])
