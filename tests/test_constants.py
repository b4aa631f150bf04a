"""A number with a name has its reason beside it: in the same line, above it, or below it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HOUSE = Path(__file__).parents[1] / "src" / "confide"
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")


def unexplained(house: Path) -> Iterator[str]:
    """Constants made of literal numbers at the top of a file. One comment may stand above several of them.

    The settings of a published experiment are those of its paper.
    """
    for path in sorted(path for path in house.rglob("*.py") if "papers" not in path.parts):
        text = path.read_text(encoding="utf-8")
        lines, body = text.splitlines(), ast.parse(text).body
        for node, behind in zip(body, [*body[1:], ast.Pass()], strict=False):
            if not _is_number_with_a_name(node) or _is_text(behind):
                continue
            first = node.lineno - 1
            while first > 0 and CONSTANT.match(lines[first - 1]):
                first -= 1
            above = lines[first - 1].lstrip().startswith("#") if first else False
            if not above and not any("#" in line for line in lines[node.lineno - 1 : node.end_lineno]):
                yield f"{path.relative_to(house)}:{node.lineno}: {lines[node.lineno - 1]}"


def _is_number_with_a_name(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return all(CONSTANT.fullmatch(name.id) for name in names) and _has_number(node.value)


def _has_number(value: ast.expr) -> bool:
    """A literal number, arithmetic with one, or several of them; what is computed otherwise speaks for itself."""
    if isinstance(value, ast.Tuple):
        return any(_has_number(part) for part in value.elts)
    if isinstance(value, ast.BinOp):
        return _has_number(value.left) and _has_number(value.right)
    if isinstance(value, ast.UnaryOp):
        return _has_number(value.operand)
    return isinstance(value, ast.Constant) and type(value.value) in (int, float)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_every_constant_has_a_reason() -> None:
    assert list(unexplained(HOUSE)) == []


def test_one_without_a_reason_is_found(tmp_path: Path) -> None:
    good = "B = 2  # for a reason\n# and this\nC, D = 3, 2 << 4\n_E = 5\nF = 6\n'''said'''\n"
    (tmp_path / "one.py").write_text(f"A = 1\n\n{good}G: float = -7.5\nH = len('x')\n")
    assert [found.split(": ", 1)[1] for found in unexplained(tmp_path)] == ["A = 1", "G: float = -7.5"]
