"""What the package does is what it did when the golden files were made; see `tests.frozen.cases`."""

from __future__ import annotations

import pytest

from tests.frozen.cases import SECTIONS, frozen, now
from tests.frozen.tools import NOTHING, differences

EVERY = [(section, name) for section in SECTIONS for name in frozen(section)]


@pytest.mark.parametrize(("section", "name"), EVERY, ids=lambda value: str(value))
def test_nothing_has_changed(section: str, name: str) -> None:
    changes = list(differences(frozen(section)[name], now(section).get(name, NOTHING)))
    assert not changes, "\n".join(changes[:20])


@pytest.mark.parametrize("section", SECTIONS)
def test_every_case_is_frozen(section: str) -> None:
    """A new method needs a golden posterior too."""
    assert set(now(section)) == set(frozen(section))
