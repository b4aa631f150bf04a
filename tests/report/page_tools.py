"""Reads a page the way a browser and a screen reader do, and lists what is wrong with it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise

VOID = {"meta", "link", "br", "img", "input", "hr", "col", "source", "path", "use", "rect"}


class Page(HTMLParser):
    """headings: (level, text) in order; text: everything a reader sees; problems: what is wrong."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.raw = page
        self.problems: list[str] = []
        self.headings: list[tuple[int, str]] = []
        self.words: list[str] = []
        self.tags: list[str] = []
        self.svgs: list[str] = []
        self._open: list[str] = []
        self._ids: set[str] = set()
        self.feed(page)
        self.close()
        self._check_headings()
        if not page.startswith("<!doctype html>"):
            self.problems.append("no doctype at the very start")
        if re.search(r"@import|url\((?!#)", page):
            self.problems.append("a style that loads something")

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = {name: value or "" for name, value in attrs}
        if tag not in VOID:
            self._open.append(tag)
        if tag in ("script", "iframe", "object", "embed", "link", "img"):
            self.problems.append(f"<{tag}> in the page")
        for name, value in values.items():
            if name.startswith("on"):
                self.problems.append(f"a handler: {name}")
            if name in ("href", "src", "xlink:href", "action") and not value.startswith("#"):
                self.problems.append(f"reference outside the page: {value}")
        if "id" in values:
            if values["id"] in self._ids:
                self.problems.append(f"identifier twice: {values['id']}")
            self._ids.add(values["id"])
        if tag == "html" and not values.get("lang"):
            self.problems.append("no language")
        if tag == "svg":
            self.svgs.append(values.get("aria-label", ""))
            if len(values.get("aria-label", "")) < 20 or values.get("role") != "img":
                self.problems.append("a drawing without a label")
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append((int(tag[1]), ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self._open or self._open.pop() != tag:
            self.problems.append(f"tags are not nested well at </{tag}>")

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.words.append(data)
        if self._open and re.fullmatch(r"h[1-6]", self._open[-1]):
            level, text = self.headings[-1]
            self.headings[-1] = (level, text + data)

    def _check_headings(self) -> None:
        levels = [level for level, _ in self.headings]
        if levels.count(1) != 1 or (levels and levels[0] != 1):
            self.problems.append("there must be one h1, and it comes first")
        for above, below in pairwise(levels):
            if below > above + 1:
                self.problems.append(f"heading jumps from h{above} to h{below}")
        for _, text in self.headings:
            if not text.strip():
                self.problems.append("an empty heading")
