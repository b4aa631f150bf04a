"""The device that these tests run on: the one in CONFIDE_DEVICE, "pretend" for the emulated one, or else the machine's.

On a machine without any, and without the variable, there is nothing to collect; tests/devices/test_pretended.py runs
all of this on the emulated device in a process of its own, for a backend has to be there before torch's first backward.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.devices import pretend

WANTED = os.environ.get("CONFIDE_DEVICE", "")
_THERE = WANTED or torch.accelerator.is_available()
collect_ignore_glob = [] if _THERE else ["test_*.py"]
DEVICE: torch.device | None = pretend.start() if WANTED == pretend.NAME else None


@pytest.fixture(scope="session")
def device() -> torch.device:
    if DEVICE is not None:
        return DEVICE
    found = torch.device(WANTED) if WANTED else torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, found.index or 0)
