"""Pages that are made when the documentation is built (`make docs`): the methods and the gallery.

A new file in src/confide/methods/ or docs/gallery/ is in its page with no edit.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

GALLERY = Path(__file__).parent / "gallery"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page."""
    if page.file.src_path == "methods.md":
        return f"{markdown}\n\n{methods_page()}"
    if page.file.src_path == "gallery.md":
        return f"{markdown}\n\n{gallery_page()}"
    return markdown


def methods_page() -> str:
    """Every method that is found: its name, its mathematics and papers, and its settings with their defaults."""
    from confide import methods

    parts = []
    for name, cls in methods.all_methods().items():
        settings = "\n".join(f"    {field.name} = {_default(field)}" for field in dataclasses.fields(cls))
        about = inspect.getdoc(inspect.getmodule(cls)) or ""
        parts.append(f"## {name}\n\n```text\n{about}\n```\n")
        parts.append("```text\n" + inspect.cleandoc(cls.__doc__ or "") + "\n```\n")
        parts.append(f"Settings and their defaults:\n\n{settings}\n")
    return "\n".join(parts)


def gallery_page() -> str:
    """Every script, under the first line of its docstring."""
    parts = []
    for path in sorted(GALLERY.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        title = source.split('"""')[1].strip().splitlines()[0].rstrip(".")
        parts.append(f"## {title}\n\n`docs/gallery/{path.name}`\n\n```python\n{source}```\n")
    return "\n".join(parts)


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return repr(field.default_factory()) if field.default_factory is not dataclasses.MISSING else "required"
