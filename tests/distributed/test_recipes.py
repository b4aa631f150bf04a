"""The recipe of docs/scaling.md for Slurm, word for word, with stand-ins for Slurm's two programs on one machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import confide
from tests.distributed.launch import ROOT, environment, free_port

SRUN = """#!/bin/sh
# One task a node, all at once; each is told its number, as Slurm does. The options come before the command.
[ "$1 $2" = "--ntasks-per-node 1" ] || { echo "srun: $1 $2"; exit 2; }
shift 2
SLURM_PROCID=0 "$@" & first=$!
SLURM_PROCID=1 "$@" & second=$!
wait $first && wait $second
"""
SCONTROL = """#!/bin/sh
[ "$1 $2" = "show hostnames" ] || exit 2
echo localhost
echo localhost
"""
TRAIN = """
import torch, confide
from tests.distributed import problems

torch.set_num_threads(1)
with confide.distributed.start(timeout=60) as ranks:
    x, y = problems.records(torch.float32)
    data = ranks.private(x, y, whole=True, schema=problems.SCHEMA, ledger="budget.db", name="d")
    run = confide.fit(confide.methods.SGLD(), confide.networks.linear(problems.FEATURES, 3), data, problems.plan())
    open(f"size-{ranks.rank}.txt", "w").write(str(ranks.size))
"""


def recipe() -> str:
    """The command as it stands on the page."""
    page = (ROOT / "docs" / "scaling.md").read_text()
    found = re.search(r"^    (srun .*?train\.py)$", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_page_has_it() -> None:
    words = recipe()
    assert "--nproc-per-node 8" in words
    assert ":29500" in words


@pytest.mark.slow  # two launchers and two ranks load torch
def test_slurm(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", "")):
        program = tmp_path / name
        program.write_text(text or f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
        program.chmod(0o755)
    words = recipe().replace("--nproc-per-node 8", "--nproc-per-node 1").replace(":29500", f":{free_port()}")
    own = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_NNODES": "2", "SLURM_JOB_ID": "17"}
    ended = subprocess.run(
        ["sh", "-c", words], env=environment(**own), cwd=tmp_path, capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert [(tmp_path / f"size-{rank}.txt").read_text() for rank in (0, 1)] == ["2", "2"]
    with confide.Ledger(tmp_path / "budget.db") as ledger:
        assert sum(event.count for event in ledger.events("d")) == 12  # one run, one charge
