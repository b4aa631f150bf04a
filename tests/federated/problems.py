"""Made-up records of several owners, and parties that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import confide
from confide.federated import Federation, InProcess, Party
from confide.privacy.ledger import Ledger

FEATURES = 3
WEIGHTS = torch.tensor([1.5, -2.0, 1.0])
FACTS = """
records = {records}
target = "height"
target_bounds = [-4, 4]
[columns.a]
bounds = [-1, 1]
[columns.b]
bounds = [-1, 1]
"""


def records_of(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """A logistic problem, the same law for every owner."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, FEATURES, generator=generator) * 2 - 1
    y = (torch.rand(rows, generator=generator) < torch.sigmoid(x @ WEIGHTS * 3)).long()
    return x, y


def parties_of(
    count: int, rows: int, *, ledgers: Mapping[str, Any] | None = None, seed: int | None = None, **options: Any
) -> dict[str, Party]:
    found = {}
    for place in range(count):
        name = f"p{place}"
        x, y = records_of(rows, seed=place)
        settings = {"least_noise": 0.3, **options}
        found[name] = Party(
            x,
            y,
            schema=confide.Schema(classes=2, records=rows),
            ledger=(ledgers or {}).get(name) or Ledger(),
            name=name,
            seed=None if seed is None else seed + place,
            **settings,
        )
    return found


def federation_of(parties: Mapping[str, Party], **options: Any) -> Federation:
    return Federation(InProcess(parties), **options)


def plan_for(data: Any, steps: int = 30, noise: float | None = 1.0, **options: Any) -> confide.Plan:
    goal = {"noise_multiplier": noise} if noise is not None else {}
    return confide.plan(
        **{"delta": 1e-5, "records": data.schema.records, "batch": 100, "steps": steps, **goal, **options}
    )


def write_table(path: Path, rows: int, seed: int) -> Path:
    """A table of a linear problem, and its facts beside it."""
    generator = np.random.default_rng(seed)
    x = generator.uniform(-1, 1, (rows, 2))
    y = 2 * x[:, 0] - x[:, 1] + 0.1 * generator.normal(size=rows)
    lines = [
        "a,b,height",
        *(",".join(f"{value:.6f}" for value in (*row, target)) for row, target in zip(x, y, strict=True)),
    ]
    path.write_text("\n".join(lines) + "\n")
    path.with_suffix(".toml").write_text(FACTS.format(records=rows))
    return path
