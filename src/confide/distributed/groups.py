"""The process group of torch.distributed that ranks speak through: how they find each other, and how it ends."""

from __future__ import annotations

import ctypes
import os
import re
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from confide.errors import RankLost, Refusal

START = 600.0
"""Seconds that ranks wait for each other at the start: machines load Python and torch at very different times."""
TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Where srun and mpirun say how many copies of a program they have started."""


def is_alone() -> bool:
    """Whether this process was started by itself; one of several that were not told of each other is refused."""
    if "WORLD_SIZE" not in os.environ:
        for name in TASKS:
            if os.environ.get(name, "1") != "1":
                raise Refusal(
                    f"{name}={os.environ[name]}: so many processes were started and not told where the others are, so "
                    "each would make a fit of its own with all records; let the launcher start torchrun, and torchrun "
                    "the script (docs/scaling.md)"
                )
    return os.environ.get("WORLD_SIZE", "1") == "1"


def found_group(joined: bool, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of all processes; beside the one that exists, where a launcher has made one."""
    try:
        if joined:
            group = dist.new_group(backend="gloo", timeout=timeout)
        else:
            patience = max(timeout, timedelta(seconds=START))
            store, rank, size = next(rendezvous("env://", timeout=patience))
            # torchrun's store outlives a restart, with the addresses of ranks that are gone; every attempt has its own.
            own = PrefixStore(f"confide/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            own.set(f"here/{rank}", "")
            own.wait([f"here/{one}" for one in range(size)], patience)
            dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timeout)
            group = dist.group.WORLD
    except (RuntimeError, ValueError) as error:
        raise RankLost(
            f"WORLD_SIZE={os.environ.get('WORLD_SIZE')}: the ranks did not find each other ({first_words(error)})"
        ) from None
    assert isinstance(group, dist.ProcessGroup)
    return group


def let_be(group: dist.ProcessGroup | None) -> None:
    """In a child of a fork, whose copy of the group has no threads: to end it would be to wait for them for ever.

    torch ends what nobody holds, also as Python ends; so somebody holds it.
    """
    for one in () if group is None else (group, group._get_backend(torch.device("cpu"))):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def first_words(error: Exception) -> str:
    """What gloo or torch says, without the place in their sources."""
    return re.sub(r"^\[[^]]*\.(cc|cpp):\d+\]\s*", "", (str(error).splitlines() or [""])[0])[:160]
