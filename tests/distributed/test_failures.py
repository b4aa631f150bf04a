"""Ranks that die or stand still: the others say so soon, and a restart goes on from the checkpoint, paid for."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import confide
from tests.distributed.launch import ROOT, Ranks, environment, free_port


def survivors(folder: Path, signal: str, timeout: float, size: int = 2) -> list[Any]:
    """What the ranks say that were left when the last one got the signal."""
    with Ranks(size, {"lost": ("lost", {"signal": signal})}, folder, timeout) as ranks:
        for process in ranks.processes[:-1]:
            process.wait(180)  # a busy machine takes a minute to load torch; they say themselves how long they waited
        return [json.loads((folder / f"said-{rank}.json").read_text())["lost"] for rank in range(size - 1)]


@pytest.mark.parametrize(
    ("signal", "timeout", "within"),
    [("SIGKILL", 30.0, 2.0), pytest.param("SIGSTOP", 3.0, 4.0, marks=pytest.mark.slow)],
)
def test_a_lost_rank_is_an_error_on_the_others(tmp_path: Path, signal: str, timeout: float, within: float) -> None:
    ((text, waited, charged),) = survivors(tmp_path, signal, timeout)
    assert "another rank is gone, or did not answer" in text
    assert "checkpoint" in text
    assert waited < within
    assert [steps for _, steps in charged] == [50]


SCRIPT = """
import os, signal, sys, torch, confide
from confide.mechanism.noise import NoiseStream
from confide.models import networks
from confide.running.journal import Checkpoints
from tests.distributed import problems

folder, attempt = sys.argv[1], int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
torch.set_num_threads(1)
kills = [int(step) for step in sys.argv[2].split(",")]

normal = NoiseStream.normal_

def seen(self, out, std):
    drawn = normal(self, out, std)
    with open(f"{folder}/noise-{attempt}-{os.environ['RANK']}.txt", "a") as file:
        file.write(drawn.flatten()[:4].numpy().tobytes().hex() + "\\n")
    return drawn

NoiseStream.normal_ = seen

def progress(done, total):
    rank = int(os.environ["RANK"])
    with open(f"{folder}/steps-{attempt}-{rank}.txt", "a") as file:
        file.write(f"{done}\\n")
    if attempt < len(kills) and done >= kills[attempt] and rank == attempt % 2:
        os.kill(os.getpid(), signal.SIGKILL)

with confide.distributed.start(timeout=20) as ranks:
    x, y = problems.records(torch.float32)
    data = ranks.private(x, y, whole=True, schema=problems.SCHEMA, ledger=f"{folder}/budget.db", name="d")
    plan = problems.plan(steps=30)
    checkpoint = Checkpoints(f"{folder}/checkpoints", every=5)
    network = networks.linear(problems.FEATURES, 3)
    run = confide.fit(confide.methods.SGLD(), network, data, plan, checkpoint=checkpoint, progress=progress)
    stated = sum(event.count for event in run.privacy.events)
    open(f"{folder}/stated-{ranks.rank}.txt", "w").write(str(stated))
"""


def torchrun(folder: Path, kills: list[int]) -> None:
    """Two ranks that are killed at these steps in turn, started again by torchrun each time."""
    (folder / "script.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--monitor-interval", "0.2"]
    meet = ["--max-restarts", str(len(kills)), "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = [*launcher, *meet, str(folder / "script.py"), str(folder), ",".join(map(str, kills))]
    with (folder / "log.txt").open("w") as log:
        started = subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=log, stderr=log)
    try:
        ended = started.wait(180 + 60 * len(kills))  # a busy machine takes a minute to load torch
    finally:
        started.terminate()  # its ranks end with it
        started.wait(30)
    assert ended == 0, (folder / "log.txt").read_text()[-3000:]


def check_paid(folder: Path, attempts: int) -> None:
    """Every release that any attempt made was paid for, and the run states all that was charged."""
    made = 0
    for attempt in range(attempts):
        # A rank may be ended with the other one before it has told of a step.
        made += max(len(path.read_text().split()) for path in folder.glob(f"steps-{attempt}-?.txt"))
    with confide.Ledger(folder / "budget.db") as ledger:
        charged = sum(event.count for event in ledger.events("d"))
    assert charged >= made
    assert charged <= 30 + 10 * (attempts - 1)  # an attempt has claimed ten steps at most when it dies
    assert {(folder / f"stated-{rank}.txt").read_text() for rank in (0, 1)} == {str(charged)}


@pytest.mark.slow
def test_torchrun_starts_again_from_the_checkpoint(tmp_path: Path) -> None:
    torchrun(tmp_path, [13])
    check_paid(tmp_path, 2)
    check_noise(tmp_path)
    assert (tmp_path / "steps-1-0.txt").read_text().split()[0] == "11"


def check_noise(folder: Path) -> None:
    """No attempt and no rank ever drew what another had drawn."""
    drawn = [line for path in folder.glob("noise-*.txt") for line in path.read_text().split()]
    assert len(drawn) >= 60  # two ranks, thirty steps
    assert len(set(drawn)) == len(drawn)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # ten starts of torch on two ranks, on a machine that does other things too
@pytest.mark.parametrize("part", range(5))
def test_fifty_kills(tmp_path: Path, part: int) -> None:
    """Ten at a time, at steps drawn at random, of either rank: every release is charged at least once."""
    draw = random.Random(40 + part)
    torchrun(tmp_path, sorted(draw.randrange(1, 30) for _ in range(10)))
    check_paid(tmp_path, 11)
    check_noise(tmp_path)
