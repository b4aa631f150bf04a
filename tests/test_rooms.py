"""The order of rooms (docs/rooms.toml) holds for every import of src/confide, and the documents show it as it is."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "src" / "confide"
DATA = tomllib.loads((ROOT / "docs" / "rooms.toml").read_text(encoding="utf-8"))
ORDER = [room["name"] for room in DATA["room"]]
TYPES_ONLY = {tuple(pair) for pair in DATA["types_only"]}


class Edge(NamedTuple):
    """One import of another room: `importer` and `imported` are rooms, `place` is file and line."""

    importer: str
    imported: str
    place: str
    types_only: bool


def room_of(path: Path, house: Path) -> str:
    return path.relative_to(house).parts[0].removesuffix(".py")


def edges(house: Path) -> Iterator[Edge]:
    """Every import of one room by another, wherever in a file it stands."""
    for path in sorted(house.rglob("*.py")):
        room = room_of(path, house)
        for module, line, types_only in _imports(ast.parse(path.read_text(encoding="utf-8")), False):
            imported = _room_named(module, path, house)
            if imported not in (None, room):
                yield Edge(room, str(imported), f"{path.relative_to(house)}:{line}", types_only)


def _imports(node: ast.AST, types_only: bool) -> Iterator[tuple[str, int, bool]]:
    """Names of modules with their lines; `from a import b` may name the module a.b, or something in a."""
    if isinstance(node, ast.Import):
        yield from ((name.name, node.lineno, types_only) for name in node.names)
    elif isinstance(node, ast.ImportFrom):
        start = "." * node.level + (node.module or "")
        yield from ((f"{start}.{name.name}", node.lineno, types_only) for name in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        named = [word.value for word in node.args[:1] if isinstance(word, ast.Constant)]
        yield from ((str(name), node.lineno, types_only) for name in named)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _imports(child, True)
        for child in node.orelse:
            yield from _imports(child, types_only)
        return
    for child in ast.iter_child_nodes(node):  # type: ignore[assignment]
        yield from _imports(child, types_only)


def _room_named(module: str, path: Path, house: Path) -> str | None:
    if module.startswith("."):
        above = len(module) - len(module.lstrip("."))
        folder = path.parents[above - 1].relative_to(house.parent).parts
        module = ".".join([*folder, module.lstrip(".")])
    first, *rest = module.split(".")
    if first != "confide":
        return None
    if rest and ((house / rest[0]).is_dir() or (house / f"{rest[0]}.py").is_file()):
        return rest[0]
    return "__init__"


def against(found: Iterator[Edge]) -> list[Edge]:
    """The edges that the order forbids."""
    return [
        edge
        for edge in found
        if ORDER.index(edge.imported) > ORDER.index(edge.importer)
        and not (edge.types_only and (edge.importer, edge.imported) in TYPES_ONLY)
    ]


def test_every_room_is_in_the_order() -> None:
    rooms = {room_of(path, HOUSE) for path in HOUSE.rglob("*.py")}
    assert rooms - set(ORDER) == set(), "add them to docs/rooms.toml"
    assert set(ORDER) - rooms == set(), "docs/rooms.toml names rooms that are not there"
    assert len(set(ORDER)) == len(ORDER)


def test_no_room_imports_from_a_later_one() -> None:
    found = against(edges(HOUSE))
    assert not found, "\n".join(f"{edge.place}: {edge.importer} imports {edge.imported}" for edge in found)


@pytest.mark.parametrize(
    "line",
    [
        "from confide.cli import app",
        "import confide",
        "import confide.running.fit",
        "from confide import methods",
        "from ..methods import base",
        "def late():\n    from confide.running.fit import fit",
        "class A:\n    def late(self):\n        import confide.methods.sgld as s",
        "if True:\n    try:\n        from confide.sources.replay import Replay\n    except ImportError:\n        pass",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from confide.running.fit import Run",
        "import importlib\nimportlib.import_module('confide.running.fit')",
    ],
)
def test_a_planted_edge_is_caught(line: str, tmp_path: Path) -> None:
    house = tmp_path / "confide"
    for room in ("privacy", "methods", "running", "sources", "cli"):
        (house / room).mkdir(parents=True)
        (house / room / "__init__.py").touch()
    (house / "__init__.py").touch()
    (house / "privacy" / "planted.py").write_text(f"{line}\n", encoding="utf-8")
    assert against(edges(house))


def test_edges_along_the_order_are_let_through(tmp_path: Path) -> None:
    house = tmp_path / "confide"
    for room in ("privacy", "report", "running"):
        (house / room).mkdir(parents=True)
    (house / "__init__.py").write_text("from confide.running import fit\n", encoding="utf-8")
    (house / "running" / "fit.py").write_text("import confide.privacy.events\nimport json\n", encoding="utf-8")
    named = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from confide.running.fit import Run\n"
    (house / "report" / "page.py").write_text(named, encoding="utf-8")
    assert not against(edges(house))


def test_the_document_shows_the_rooms_as_they_are() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("\n## Rooms\n")[1].split("\n## ")[0]
    shown = [line for line in section.splitlines() if line.startswith("| `")]
    wanted = [f"| `{written(room['name'])}` | {room['holds']} |" for room in DATA["room"]]
    assert shown == wanted, "the table of docs/architecture.md should be:\n" + "\n".join(wanted)


def written(room: str) -> str:
    """As the document writes it: a folder with a stroke, a file with its ending."""
    return f"{room}/" if (HOUSE / room).is_dir() else f"{room}.py"
