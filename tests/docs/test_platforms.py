"""Other systems and versions of Python: what is imported when confide is loaded is there on all of them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "confide"
POSIX_ONLY = {"fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
"""Modules of the standard library that Windows lacks."""

REMOVED = {
    "aifc", "asynchat", "asyncore", "audioop", "cgi", "cgitb", "chunk", "crypt", "distutils", "imghdr", "imp",
    "lib2to3", "mailcap", "msilib", "nis", "nntplib", "ossaudiodev", "pipes", "smtpd", "sndhdr", "spwd", "sunau",
    "telnetlib", "uu", "xdrlib",
}  # fmt: skip
"""Modules that Python 3.12 and 3.13 no longer have."""
ELSEWHERE = """
import importlib, pkgutil, sys
import joblib, matplotlib.pyplot, pyarrow, scipy.stats, sklearn.utils.validation, torch, typer.main, rich.table

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ABSENT:
            raise ModuleNotFoundError(name)

for name in ABSENT:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Absent())
import confide
left_out = (".__main__", ".libconfide")
names = [one.name for one in pkgutil.walk_packages(confide.__path__, "confide.") if not one.name.endswith(left_out)]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


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


def test_no_file_loads_what_later_versions_removed() -> None:
    found = {one: set(loaded(ast.parse(one.read_text(encoding="utf-8")))) & REMOVED for one in SOURCE.rglob("*.py")}
    assert {str(name): modules for name, modules in found.items() if modules} == {}


@pytest.mark.slow
@pytest.mark.parametrize("planted", [False, True])
def test_every_module_loads_where_they_are_absent(planted: bool, tmp_path: Path) -> None:
    """As Windows would: they are taken away after the libraries, which have their own ways there, were loaded."""
    script = f"ABSENT = {sorted(POSIX_ONLY | REMOVED)!r}\n{ELSEWHERE}"
    if planted:
        script += "import fcntl\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode == 0) is not planted, done.stderr[-2000:]
    assert int(done.stdout) > 200


def test_such_an_import_is_caught() -> None:
    assert missing_elsewhere("import os\nif os.name:\n    import fcntl\n") == {"fcntl"}
    assert missing_elsewhere("def lock():\n    import fcntl\n") == set()
