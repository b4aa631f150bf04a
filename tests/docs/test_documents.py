"""The documents work as written: every Python block of a tutorial, every script of the gallery, and the built site."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

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
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NEEDS_DATA = {"adult.py"}
GALLERY = [path for path in sorted((ROOT / "docs" / "gallery").glob("*.py")) if path.name not in NEEDS_DATA]
# Every script starts torch anew; what a reader tries first is run every time, the others with the long tests.
ALWAYS = {"README", "quickstart"}


def cases(paths: list[Path]) -> list[Any]:
    """Scripts as cases of a test; all but a few are long ones."""
    return [
        pytest.param(path, id=path.stem, marks=() if path.stem in ALWAYS else (pytest.mark.slow,)) for path in paths
    ]


def run(script: Path, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::DeprecationWarning:confide"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", cases(TUTORIALS))
def test_the_blocks_of_a_tutorial_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    assert blocks, f"{page.name} shows no Python"
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    run(script, tmp_path)


@pytest.mark.parametrize("script", cases(GALLERY))
def test_a_script_of_the_gallery_runs(script: Path, tmp_path: Path) -> None:
    assert run(script, tmp_path).strip(), f"{script.name} prints nothing"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """A dead link, a page outside the navigation or a reference to nothing is a warning, and strict makes it fatal."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    methods = (tmp_path / "site" / "methods.html").read_text(encoding="utf-8")
    assert 'id="sgld"' in methods
    assert "Any torch module" in (tmp_path / "site" / "gallery.html").read_text(encoding="utf-8")
    for page in (tmp_path / "site").rglob("*.html"):  # nothing that runs comes from elsewhere
        assert not re.search(r'<script[^>]*src="https?:', page.read_text(encoding="utf-8")), page.name


SEARCHING = """<script>addEventListener("load", () => setTimeout(() => {
  const field = document.querySelector("[data-md-component=search-query]");
  field.focus();
  field.value = "zylinder";
  for (const kind of ["keyup", "input"]) field.dispatchEvent(new Event(kind, { bubbles: true }));
  setTimeout(() => {
    document.title = "probe " + document.querySelectorAll(".md-search-result__item").length;
  }, 20000);
}, 3000));</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium binary")
@pytest.mark.parametrize("own", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_search_works_from_a_disk_without_a_network(own: bool, tmp_path: Path) -> None:
    """Seen: the theme fetches what it needs for that from a server. Without the script of our own nothing is found."""
    docs = tmp_path / "docs"
    (docs / "deep").mkdir(parents=True)
    (docs / "index.md").write_text("# Home\n\nNothing here.\n", encoding="utf-8")
    (docs / "deep" / "page.md").write_text("# A page\n\nHere is a Zylinder.\n", encoding="utf-8")
    (docs / "offline_search.js").write_bytes((ROOT / "docs" / "offline_search.js").read_bytes() if own else b"")
    (tmp_path / "mkdocs.yml").write_text(
        "site_name: t\nuse_directory_urls: false\ntheme: {name: material, font: false}\nplugins: [search, offline]\n"
        f"hooks: ['{ROOT / 'docs' / 'pages.py'}']\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q"], cwd=tmp_path, env=environment, check=True, timeout=120
    )
    page = tmp_path / "site" / "deep" / "page.html"
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", SEARCHING), encoding="utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=60000")
    command = [str(CHROMIUM), *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"<title>probe (\d+)", shown.stdout)
    assert found is not None
    assert (int(found[1]) >= 1) == own


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


def _covered(thing: Any, listed: set[str]) -> bool:
    """Whether a line of the reference shows it: by itself, or with all of its module."""
    parts = thing.__module__.split(".")
    places = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return thing.__module__ in listed or any(f"{place}.{thing.__qualname__}" in listed for place in places)


def test_every_public_name_has_its_place_in_the_reference() -> None:
    """Seen: half of the modules that `import confide` names were not looked up anywhere."""
    import inspect

    import confide

    page = Path(__file__).parents[2] / "docs" / "reference" / "python.md"
    listed = set(re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), flags=re.M))
    absent = []
    for name in confide.__all__:
        found = getattr(confide, name)
        inside = getattr(found, "__all__", ()) if inspect.ismodule(found) else (name,)
        owner = found if inspect.ismodule(found) else confide
        for inner in inside:
            thing = getattr(owner, inner)
            ours = str(getattr(thing, "__module__", "")).startswith("confide")
            if (inspect.isclass(thing) or inspect.isfunction(thing)) and ours and not _covered(thing, listed):
                absent.append(f"{name}: {inner} of {thing.__module__}")
    assert absent == []
