"""predict.py: the modules of `export/predictor` as one file that needs nothing of confide."""

from __future__ import annotations

import ast
from pathlib import Path

PARTS = ("rows", "pictures", "outcomes", "back_ends", "main")
"""In the order in which one uses another; the last one's documentation is that of the file."""


def predictor_source() -> str:
    """The text of predict.py: imports once, without those between the parts, then what every part defines."""
    texts = [(Path(__file__).parent / "predictor" / f"{part}.py").read_text(encoding="utf-8") for part in PARTS]
    plain: set[str] = set()
    named: set[str] = set()
    bodies = []
    for text in texts:
        found = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in found:
            line = ast.unparse(node)
            if line.startswith(("from confide.", "from __future__")):
                continue
            (named if line.startswith("from ") else plain).add(line)
        last = max(node.end_lineno or 0 for node in found)
        bodies.append("\n".join(text.splitlines()[last:]).strip())
    about = ast.get_docstring(ast.parse(texts[-1]), clean=False)
    imports = "\n".join(["from __future__ import annotations", "", *sorted(plain), *sorted(named)])
    return "\n\n\n".join([f'"""{about}"""\n\n{imports}', *bodies]) + "\n"
