"""Files of posteriors that ask for more than they hold: refused in one sentence before anything is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import confide
from confide.errors import Refusal
from confide.models import networks
from confide.posteriors import description, files
from confide.posteriors.draws import Draws
from confide.posteriors.mapped import DrawWriter, open_draws

RECIPE = {"features": 3, "outputs": 2, "hidden": [], "activation": "relu"}


def written(path: Path, recipe: Any = None, **changes: Any) -> Path:
    about: dict[str, Any] = {
        "kind": "draws",
        "likelihood": {"name": "categorical", "classes": 2},
        "network": {"type": "mlp", "recipe": {**RECIPE, **(recipe or {})}, "numbers": "float32"},
        "facts": {},
        **changes,
    }
    tensors = {"draws": torch.zeros(2, 8), "weights": torch.full((2,), 0.5)}
    save_file(tensors, str(path), metadata={"confide": json.dumps(about)})
    return path


HOSTILE: dict[str, Any] = {
    "four terabytes": {"features": 10**12},
    "wide": {"hidden": [2**20, 2**20]},
    "a hundred thousand layers": {"hidden": [1] * 100_000},
    "no whole number": {"features": 3.0},
    "a truth value": {"outputs": True},
    "a text": {"features": "3"},
    "a list": {"outputs": [2]},
    "not a number": {"features": None},
    "negative": {"features": -3},
    "hidden is a number": {"hidden": 7},
    "one output too many": {"features": 1, "outputs": 3},
    "an unknown key": {"more": 1},
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("mapped", [False, True])
def test_a_recipe_beyond_its_file_is_refused_unbuilt(
    case: str, mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case != "one output too many":  # the one that fits the file, so that only its likelihood tells
        monkeypatch.setattr(description, "_built", lambda *_: pytest.fail("was built"))
    path = written(tmp_path / "p.safetensors", HOSTILE[case])
    with pytest.raises(Refusal) as caught:
        open_draws(path) if mapped else files.load_posterior(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_sound_file_is_read(tmp_path: Path) -> None:
    """Otherwise nothing above would have reached its recipe."""
    path = written(tmp_path / "p.safetensors")
    for found in (files.load_posterior(path), open_draws(path)):
        assert isinstance(found, Draws)
        assert found.predict(torch.zeros(1, 3)).probabilities.shape == (1, 2)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": 5},
        {"facts": None},
        {"network": {"type": "mlp"}},
        {"network": 5},
        {"likelihood": 5},
        {"likelihood": {"name": "magic"}},
        {"network": {"type": "mlp", "recipe": RECIPE, "numbers": "complex64"}},
    ],
)
def test_a_damaged_description_is_one_sentence(changes: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path / "p.safetensors", **changes)
    for reader in (files.load_posterior, open_draws):
        with pytest.raises(Refusal) as caught:
            reader(path)
        assert "\n" not in str(caught.value)


def test_weights_that_do_not_belong_to_the_draws(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    about = json.dumps(
        {
            "kind": "draws",
            "likelihood": {"name": "categorical", "classes": 2},
            "network": {"type": "mlp", "recipe": RECIPE, "numbers": "float32"},
            "facts": {},
        }
    )
    for draws, weights in ((torch.zeros(2, 8), torch.ones(3)), (torch.zeros(8), torch.ones(8))):
        save_file({"draws": draws, "weights": weights}, str(path), metadata={"confide": about})
        with pytest.raises(Refusal):
            files.load_posterior(path)


def test_lists_in_lists_without_end(tmp_path: Path) -> None:
    deep = "[" * 50_000 + "]" * 50_000
    save_file({"draws": torch.zeros(1, 8)}, str(tmp_path / "p"), metadata={"confide": deep})
    with pytest.raises(Refusal, match="not a readable posterior file"):
        files.load_posterior(tmp_path / "p")


class TestDrafts:
    def writer(self, path: Path) -> DrawWriter:
        return DrawWriter(path, networks.linear(2), confide.likelihoods.Gaussian(1.0), count=1)

    def test_what_a_killed_writer_left_is_cleaned(self, tmp_path: Path) -> None:
        import os

        old, young, other = (tmp_path / f".{name}.{'0a' * 6}.partial" for name in ("p", "p", "q"))
        young = tmp_path / f".p.{'0b' * 6}.partial"
        for draft in (old, young, other):
            draft.write_text("half")
        for draft in (old, other):
            os.utime(draft, (0, 0))
        with self.writer(tmp_path / "p") as writer:
            writer.add(torch.zeros(3))
        assert not old.exists()
        assert young.exists(), "somebody may be at work on it"
        assert other.exists(), "belongs to another file"
        assert (tmp_path / "p").exists()

    def test_directories_are_synced(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from confide.posteriors import mapped

        seen: list[Path] = []
        monkeypatch.setattr(mapped, "sync", seen.append)
        with self.writer(tmp_path / "p") as writer:
            writer.add(torch.zeros(3))
        assert seen == [tmp_path]
