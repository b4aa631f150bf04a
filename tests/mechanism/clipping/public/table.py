"""Which way every architecture takes, as a table; `python -m tests.mechanism.clipping.public.table` writes it."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from confide.errors import Refusal
from confide.mechanism.clipping import clipped_sum
from confide.mechanism.clipping.engine import engine_of
from tests.mechanism.clipping.public.libraries import MEMBERS
from tests.mechanism.clipping.public.plain_more import PLAIN

ALL = PLAIN | MEMBERS
FILE = Path(__file__).parent / "ways.txt"
WAYS = ("proven", "isolated", "one by one", "refused")


def taken(module: nn.Module) -> tuple[str, str]:
    """The way, and why it is not a quick one."""
    anatomy = engine_of(module).anatomy
    assert anatomy is not None
    (examined,) = anatomy.examined.values()
    return examined.way, examined.why


def known() -> dict[str, str]:
    """The way of every member, from the file."""
    lines = FILE.read_text().splitlines()
    return {line[:30].strip(): line[30:42].strip() for line in lines if line and not line.startswith("#")}


def shares(ways: dict[str, str]) -> str:
    counts = Counter(ways.values())
    return ", ".join(f"{counts[way]} {way}" for way in WAYS)


def write() -> None:
    lines, ways = [], {}
    for name, member in ALL.items():
        module, loss, x, y = member.case()
        size = sum(value.numel() for value in module.parameters())
        try:
            clipped_sum(module, loss, x, y, clip=1.0, out=torch.zeros(size, dtype=torch.float64))
            way, why = taken(module)
        except Refusal as refusal:
            way, why = "refused", str(refusal)
        ways[name] = way
        lines.append(f"{name:30s}{way:12s}{why[:150]}".rstrip())
    head = f"# {len(ways)} architectures: {shares(ways)}"
    FILE.write_text("\n".join([head, "# name, way, and why it is not a quick one", *lines]) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    write()
