"""The documents work as written: every Python block of a tutorial, every script of the gallery, and the built site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = [
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
    ROOT / "docs" / "quickstart.md",
    ROOT / "docs" / "networks.md",
    ROOT / "docs" / "federated.md",
    ROOT / "docs" / "programs.md",
    ROOT / "docs" / "coming_from.md",
    ROOT / "README.md",
]
NEEDS_DATA = {"adult.py"}
GALLERY = [path for path in sorted((ROOT / "docs" / "gallery").glob("*.py")) if path.name not in NEEDS_DATA]


def run(script: Path, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::DeprecationWarning:confide"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_blocks_of_a_tutorial_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    assert blocks, f"{page.name} shows no Python"
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    run(script, tmp_path)


@pytest.mark.parametrize("script", GALLERY, ids=lambda script: script.stem)
def test_a_script_of_the_gallery_runs(script: Path, tmp_path: Path) -> None:
    assert run(script, tmp_path).strip(), f"{script.name} prints nothing"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """A dead link, a page outside the navigation or a reference to nothing is a warning, and strict makes it fatal."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    methods = (tmp_path / "site" / "methods.html").read_text(encoding="utf-8")
    assert 'id="sgld"' in methods
    assert "Any torch module" in (tmp_path / "site" / "gallery.html").read_text(encoding="utf-8")


def test_a_dead_link_is_caught(tmp_path: Path) -> None:
    """The planted fault: a page that points to nowhere."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[nowhere](nowhere.md)\n", encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text("site_name: t\nstrict: true\nplugins: []\n", encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0


def test_lists_of_parameters_become_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen before: the reference showed them as one paragraph, and none of the estimators'."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from docstrings import as_markdown  # type: ignore[import-not-found]

    from confide import PrivateBayesClassifier, PrivateData

    estimator = as_markdown(PrivateBayesClassifier.__doc__ or "")
    for name in ("epsilon", "bounds", "class_weight", "largest_weight", "posterior_"):
        assert f"| `{name}` |" in estimator
    boundary = as_markdown(PrivateData.__doc__ or "")
    assert "| `schema` | the public facts" in boundary
    assert "| `weights` |" in boundary


def test_every_command_and_every_key_of_a_run_is_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import reference_pages  # type: ignore[import-not-found]

    from confide.cli.app import COMMANDS

    page = reference_pages.command_page()
    for name in COMMANDS:
        assert f"## confide {name}\n" in page
    assert "| `--epsilon E` |" in page
    assert "| `weight` |" in reference_pages.facts_page()


def test_every_method_of_classes_has_its_picture() -> None:
    from confide import methods

    shown = {path.stem for path in (ROOT / "docs" / "images" / "methods").glob("*.png")}
    assert set(methods.for_task("classification")) - {"features"} == shown
