"""Facts about the project that stand once: its version, its dependencies and their licences."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import confide

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = {re.split(r"[<>=\[]", need)[0] for need in PROJECT["dependencies"]}
IMPORTED_AS = {"dp-accounting": "dp_accounting", "scikit-learn": "sklearn"}


def test_one_version_number() -> None:
    assert confide.__version__ == version("confide")
    for path in (ROOT / "src").rglob("*.py"):
        assert "__version__ =" not in path.read_text(encoding="utf-8"), path
    released = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert PROJECT["version"].split(".dev")[0] == released[0]


def test_every_dependency_is_imported_and_its_licence_listed() -> None:
    imported = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(str(node.module).split(".")[0])
    assert {name for name in NEEDED if IMPORTED_AS.get(name, name) not in imported} == set()
    listed = re.findall(r"^\| ([a-z0-9-]+) \|", (ROOT / "docs" / "licences.md").read_text(encoding="utf-8"), flags=re.M)
    assert set(listed) - {"package"} == NEEDED


def test_what_builds_is_pinned() -> None:
    pinned = set((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines())
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    assert build
    assert set(build) <= pinned


def test_every_pinned_package_but_torch_has_its_hash() -> None:
    """torch's build is chosen by the machine, so that no one file is right; see docs/reliability.md."""
    pinned = {line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line}
    lines = [line for line in (ROOT / "hashes.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    found = {re.fullmatch(r"(\S+==\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines}
    assert None not in found
    named = {match[1].lower().replace("_", "-") for match in found if match is not None}
    assert named == {line.lower().replace("_", "-") for line in pinned if not line.startswith("torch==")}
    assert "--require-hashes --no-deps -r hashes.txt" in (ROOT / "docs/reliability.md").read_text(encoding="utf-8")


def test_every_folder_of_tests_has_its_line_and_mirrors_a_room() -> None:
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \|", text, flags=re.M))
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert listed == folders
    rooms = {path.stem.lstrip("_") for path in (ROOT / "src" / "confide").iterdir() if path.name != "__pycache__"}
    apart = {"conformance", "docs", "frozen", "fuzz", "hostile", "reference", "statistical"}
    assert folders - rooms == apart, "a folder of tests is named after a room, or belongs to none"


def promised_tests(text: str) -> list[tuple[str, str]]:
    """The files, and tests in them, that the table of promises names."""
    table = text.partition("## Which test holds which promise")[2]
    return re.findall(r"`(?:[\w/]+/)?(test_\w+\.py)(?:::(\w+))?`", table)


def absent(named: list[tuple[str, str]]) -> set[str]:
    found: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        found[path.name] = found.get(path.name, "") + path.read_text(encoding="utf-8")
    return {f"{file}::{test}" for file, test in named if f"def {test}(" not in found.get(file, "") or file not in found}


def test_the_tests_that_hold_a_promise_are_there() -> None:
    named = promised_tests((ROOT / "tests" / "README.md").read_text(encoding="utf-8"))
    files = {file for file, test in named if not test}
    assert len(named) > 40
    assert absent([one for one in named if one[1]]) == set()
    assert files <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}


def test_a_promise_without_its_test_is_found() -> None:
    text = "## Which test holds which promise\n| a promise | `running/test_nothing.py::test_is_there` |"
    assert absent(promised_tests(text)) == {"test_nothing.py::test_is_there"}
