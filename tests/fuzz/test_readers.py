"""A replay of mutated files through every reader, the same in every run; `tests.fuzz.readers` fuzzes without end."""

from __future__ import annotations

import contextlib
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


def odd_descriptions(count: int, seed: int, directory: Path) -> int:
    """A whole file whose description, or a whole folder whose record, has one odd value; how many were refused."""
    import json

    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    import confide
    from confide.posteriors.mapped import open_draws
    from confide.running.artefacts import POSTERIOR, RECORD, load_run, save_run, sha256

    random = np.random.default_rng(seed)
    data = confide.PrivateData(torch.eye(4), torch.ones(4), schema=confide.Schema(records=4), seed=1)
    plan = confide.plan(noise_multiplier=1.0, delta=1e-5, records=4, batch=2, steps=2)
    run = confide.fit(confide.methods.SGD(), confide.networks.mlp(4, 1, (3,)), data, plan, seed=0)
    path, record_path = save_run(run, directory / "run") / POSTERIOR, directory / "run" / RECORD
    with safe_open(path, framework="pt") as archive:
        about = json.loads(archive.metadata()["confide"])
        tensors = {name: archive.get_tensor(name) for name in ("draws", "weights")}
    record, refused = json.loads(record_path.read_text()), 0
    sentences: list[str] = []
    for number in range(count):
        changed = readers.with_an_odd_value(about, random) if number % 2 else about
        try:
            text = json.dumps(changed)
        except ValueError:  # a number that Python does not write: no file says it either
            continue
        save_file(tensors, str(path), metadata={"confide": text})
        other = {**record, "sha256": {POSTERIOR: sha256(path)}}
        other = other if number % 2 else readers.with_an_odd_value(other, random)
        with contextlib.suppress(ValueError):
            record_path.write_text(json.dumps(other))
        for reader in (lambda: load_run(directory / "run"), lambda: open_draws(path)):
            try:
                reader()
            except readers.REFUSALS as refusal:
                refused += 1
                sentences.append(str(refusal))
            except Exception as error:
                raise AssertionError(f"number {number}: {type(error).__name__}: {error}") from error
    assert all(sentence and "\n" not in sentence for sentence in sentences)
    return refused


def test_odd_values_in_descriptions(tmp_path: Path) -> None:
    """Shapes that ask for terabytes, names for numbers, lists for names: one sentence each, and no memory taken."""
    assert odd_descriptions(300, 0, tmp_path) > 100


@pytest.mark.slow
def test_two_thousand_odd_values_in_descriptions(tmp_path: Path) -> None:
    assert odd_descriptions(2000, 1, tmp_path) > 700


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
