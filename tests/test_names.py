"""A class name says one thing: it stands once in src/confide, private helpers included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

HOUSE = Path(__file__).parents[1] / "src" / "confide"


def classes(house: Path) -> Iterator[tuple[str, str]]:
    """Every class with its place; underscores in front do not make another name."""
    for path in sorted(house.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield node.name.lstrip("_"), f"{path.relative_to(house)}:{node.lineno}"


def standing_twice(house: Path) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for name, place in classes(house):
        places.setdefault(name, []).append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_every_class_name_stands_once() -> None:
    assert not standing_twice(HOUSE)


def test_a_name_that_stands_twice_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class Plan: ...\n")
    (tmp_path / "two.py").write_text("def inner():\n    class _Plan: ...\n")
    assert standing_twice(tmp_path) == {"Plan": ["one.py:1", "two.py:2"]}
