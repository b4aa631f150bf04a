"""A replay of mutated files through every reader, the same in every run; `tests.fuzz.readers` fuzzes without end."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fuzz import readers


@pytest.fixture(scope="module")
def seeds() -> dict[str, bytes]:
    return readers.seeds()


@pytest.mark.parametrize("name", readers.NAMES)
def test_sound_files_are_read(name: str, seeds: dict[str, bytes]) -> None:
    """Otherwise nothing below would reach past the first line of a reader. A run needs its own posterior."""
    found = readers.read(seeds[name])
    assert found is None if name == "run" else found is not None


def replay(seeds: dict[str, bytes], name: str, count: int) -> None:
    random = np.random.default_rng(readers.NAMES.index(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numbers that overflow, say
        for number in range(count):
            data = readers.mutated(seeds[name], random)
            try:
                readers.read(data)
            except Exception as error:
                raise AssertionError(f"{name}, mutation {number}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("name", readers.NAMES)
def test_mutated_files_are_refused_or_read(name: str, seeds: dict[str, bytes]) -> None:
    replay(seeds, name, 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", readers.NAMES)
def test_two_thousand_mutated_files(name: str, seeds: dict[str, bytes]) -> None:
    replay(seeds, name, 2000)


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Bomb.mark),)

    mark = Path()


@pytest.mark.parametrize("name", readers.NAMES)
def test_a_pickle_is_never_executed(name: str, tmp_path: Path) -> None:
    """As the file itself, and inside an archive of arrays. That the bomb works is shown first."""
    import io

    Bomb.mark = tmp_path / "executed"
    bomb = pickle.dumps(Bomb())
    pickle.loads(bomb)
    assert Bomb.mark.exists()
    Bomb.mark.rmdir()
    archive = io.BytesIO()
    np.savez(archive, x_train=np.array([Bomb()], dtype=object), y_train=np.zeros(1))
    for body in (bomb, archive.getvalue()):
        readers.read(bytes([readers.NAMES.index(name)]) + body)
    assert not Bomb.mark.exists()


def test_the_replay_can_fail(monkeypatch: pytest.MonkeyPatch, seeds: dict[str, bytes]) -> None:
    """A reader that lets another error through is found."""

    def careless(path: Path) -> Any:
        return path.read_bytes().decode("utf-8")[10**9]

    monkeypatch.setitem(readers.READERS, "csv", careless)
    with pytest.raises(AssertionError, match="csv, mutation 0: IndexError"):
        replay(seeds, "csv", 1)
