"""Pages that are made when the documentation is built (`make docs`): the methods and the gallery.

A new file in src/confide/methods/ or docs/gallery/ is in its page with no edit.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads this file by its path

import docstrings
import reference_pages

GALLERY = Path(__file__).parent / "gallery"
REMOTE_SEARCH, OWN_SEARCH = "https://unpkg.com/iframe-worker/shim", "offline_search.js"
PICTURES = Path(__file__).parent / "images" / "methods"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page."""
    made = {
        "methods.md": methods_page,
        "gallery.md": gallery_page,
        "reference/command_line.md": reference_pages.command_page,
        "reference/facts.md": reference_pages.facts_page,
        "reference/run_json.md": reference_pages.run_page,
    }.get(page.file.src_path)
    return markdown if made is None else f"{markdown}\n\n{made()}"


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Search from a disk needs no network: the theme would fetch a script for it from one."""
    from mkdocs.utils import get_relative_url

    return output.replace(REMOTE_SEARCH, get_relative_url(OWN_SEARCH, page.url))


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """The page for what is not found is no page to mkdocs."""
    return output_content.replace(REMOTE_SEARCH, OWN_SEARCH)


def methods_page() -> str:
    """Every method that is found: its name, its mathematics and papers, and its settings with their defaults."""
    from confide import methods

    parts = []
    for name, cls in methods.all_methods().items():
        rows = [f"| `{field.name}` | `{_default(field)}` |" for field in dataclasses.fields(cls)]
        about = inspect.getdoc(inspect.getmodule(cls)) or ""
        parts.append(f"## {name}\n")
        if (PICTURES / f"{name}.png").exists():
            parts.append(
                f"![{name} on made-up records: what it predicts, and how sure it is](images/methods/{name}.png)\n"
            )
        parts.append(f"```text\n{about}\n```\n")
        parts.append(docstrings.as_markdown(cls.__doc__ or "") + "\n")
        parts.append("\n".join(["| setting | default |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def gallery_page() -> str:
    """Every script, under the first line of its docstring."""
    parts = []
    for path in sorted(GALLERY.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        title = source.split('"""')[1].strip().splitlines()[0].rstrip(".")
        parts.append(f"## {title}\n\n`docs/gallery/{path.name}`\n\n```python\n{source}```\n")
        output = GALLERY / "output" / f"{path.stem}.txt"
        if output.exists():
            parts.append(f"What it printed:\n\n```text\n{output.read_text(encoding='utf-8').rstrip()}\n```\n")
        if output.with_suffix(".png").exists():
            parts.append(f"![What it drew](gallery/output/{path.stem}.png)\n")
    return "\n".join(parts)


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return repr(field.default_factory()) if field.default_factory is not dataclasses.MISSING else "required"
