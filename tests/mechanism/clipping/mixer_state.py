"""What a mixer may write to in a file of its own."""

from __future__ import annotations

from typing import Any

SEEN: list[Any] = []
TOTAL = 0.0
