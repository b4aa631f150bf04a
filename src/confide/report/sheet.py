"""A page of tables and drawings about something other than one run, in the style of all pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from confide.evaluate.drawing import Plot
from confide.report.judging import Cell, PageTable
from confide.report.render import POLICY, figures, style, template
from confide.report.trail import versions
from confide.report.verdict import Card


@dataclass(frozen=True)
class SheetTable(PageTable):
    """A table of which only some columns are figures.

    figures   places of the columns of figures
    hash      whether the other columns are hashes, which may break anywhere
    """

    figures: tuple[int, ...] = ()
    hash: bool = False


@dataclass(frozen=True)
class SheetSection:
    """A chapter: text, drawings, tables."""

    title: str
    text: str = ""
    plots: Sequence[Plot] = ()
    tables: Sequence[SheetTable] = ()


@dataclass(frozen=True)
class Sheet:
    """Everything that such a page says."""

    kicker: str
    title: str
    about: str
    lead: str
    cards: Sequence[Card]
    sections: Sequence[SheetSection]
    remarks: Sequence[str] = field(default=())

    def html(self) -> str:
        """The page as text. It stands alone: no network, no script, and every text from outside is escaped."""
        moment = datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0")
        page: str = template("sheet.html").render(
            style=style(),
            policy=POLICY,
            kicker=self.kicker,
            title=self.title,
            subtitle=f"{self.about} Written on {moment}.",
            lead=self.lead,
            cards=self.cards,
            remarks=self.remarks,
            sections=[_section(section) for section in self.sections],
            version=versions()["confide"],
            created=moment,
        )
        return page


def cells(*texts: str) -> tuple[Cell, ...]:
    """A row of plain texts."""
    return tuple(Cell(text) for text in texts)


def _section(section: SheetSection) -> dict[str, Any]:
    return {
        "title": section.title,
        "text": section.text,
        "plots": figures(section.plots),
        "tables": section.tables,
    }
