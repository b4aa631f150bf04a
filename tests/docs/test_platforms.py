"""Systems other than this one: what is imported when confide is loaded is there on all of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "confide"
POSIX_ONLY = {"fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
"""Modules of the standard library that Windows lacks."""


def loaded(tree: ast.Module) -> Iterator[str]:
    """What is imported when the file is: not inside functions, nor where an absence is expected."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Try):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]
        waiting += list(ast.iter_child_nodes(node))


def missing_elsewhere(text: str) -> set[str]:
    return set(loaded(ast.parse(text))) & POSIX_ONLY


@pytest.mark.parametrize("path", [SOURCE], ids=["confide"])
def test_no_file_loads_what_windows_lacks(path: Path) -> None:
    found = {
        str(one.relative_to(path)): missing_elsewhere(one.read_text(encoding="utf-8")) for one in path.rglob("*.py")
    }
    assert len(found) > 200
    assert {name: modules for name, modules in found.items() if modules} == {}


def test_such_an_import_is_caught() -> None:
    assert missing_elsewhere("import os\nif os.name:\n    import fcntl\n") == {"fcntl"}
    assert missing_elsewhere("def lock():\n    import fcntl\n") == set()
