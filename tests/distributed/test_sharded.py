"""Networks that fully_shard has spread over two ranks: the sums of one process, noise once, draws on disk."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import confide
from confide.posteriors.mapped import open_draws
from tests.distributed import problems
from tests.distributed.launch import Wanted, run

COMPARED = [
    ("SGD", "plain", "float32"),
    ("SGD", "plain", "float64"),
    ("momentum", "tied", "float32"),
    ("momentum", "tied", "float64"),
]
SAMPLED = [("SGLD", "plain"), ("SGHMC", "tied"), ("SGLD", "reaching")]
REFUSED = {
    "a parted tie": "first.weight and again.weight hold the same numbers",
    "half a network": "is whole on every rank; call fully_shard on the network itself",
    "a plain network": "use confide.fit",
    "a method of many coordinates": "method='sgnht': looks at several coordinates",
    "no folder": "does not exist",
}
LOST = "broken, and a part was lost"
OTHERS = "broken, and written by three"
WANTED: Wanted = {
    **{" ".join(one): ("sharded_fit", dict(zip(("method", "network", "kind"), one, strict=True))) for one in COMPARED},
    **{" ".join(one): ("sharded_fit", {"method": one[0], "network": one[1]}) for one in SAMPLED},
    "on a lattice": ("sharded_fit", {"method": "SGLD", "network": "tied", "secure": True}),
    "broken SGD": ("sharded_fit", {"method": "momentum", "network": "tied", "kind": "float64", "broken": 3}),
    "broken SGLD": ("sharded_fit", {"method": "SGLD", "network": "reaching", "broken": 9}),
    LOST: ("sharded_fit", {"method": "SGLD", "network": "plain", "broken": 9, "lost": True}),
    OTHERS: ("sharded_fit", {"method": "SGLD", "network": "plain", "broken": 9, "written_by": 3}),
    "noise": ("sharded_noise", {}),
    "noise on a lattice": ("sharded_noise", {"secure": True}),
    "noise on none": ("sharded_noise", {"fault": "noise on none"}),
    "noise on every rank": ("sharded_noise", {"fault": "noise on every rank"}),
    "noise a little low": ("sharded_noise", {"fault": "noise a little low"}),
    **{what: ("sharded_refusal", {"what": what}) for what in REFUSED},
}
TOLERANCE = {"float32": 2e-6, "float64": 1e-12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def said(folder: Path) -> list[dict[str, Any]]:
    """All cases, on two ranks, in one start."""
    found = run(2, WANTED, folder)
    told = [(label, each[label]) for each in found for label in WANTED if label not in (*REFUSED, LOST, OTHERS)]
    assert [(label, each) for label, each in told if isinstance(each, dict) and "error" in each] == []
    return found


def alone(method: str, network: str, kind: str) -> Any:
    dtype = getattr(torch, kind)
    data = confide.PrivateData(*problems.records(dtype), schema=problems.SCHEMA)
    plain = problems.foreign(network).to(dtype)
    return confide.fit(problems.METHODS[method], plain, data, problems.sharded_plan(method)).posterior


@pytest.mark.parametrize(("method", "network", "kind"), COMPARED)
def test_as_in_one_process(said: list[Any], folder: Path, method: str, network: str, kind: str) -> None:
    """Four steps without noise: what the steps moved, against one process."""
    label = f"{method} {network} {kind}"
    found, want = np.load(folder / label / "draws.npy")[0], alone(method, network, kind)
    start = torch.cat([p.detach().flatten() for p in problems.foreign(network).parameters() if p.requires_grad])
    moved = want.draws[0].numpy() - start.numpy()
    assert np.linalg.norm(moved) > 0.01
    end = want.draws[0].numpy()
    rounded = 4 * np.finfo(end.dtype).eps / 2 * np.linalg.norm(end)  # the position itself, once at every step
    assert np.linalg.norm(found - end) < TOLERANCE[kind] * np.linalg.norm(moved) + rounded
    x, _ = problems.records(getattr(torch, kind))
    assert np.allclose(said[0][label][2], want.predict(x[:5]).probabilities.numpy(), atol=1e-5)
    assert said[0][label][3] == dict(want.facts)


@pytest.mark.parametrize("label", [*(" ".join(one) for one in SAMPLED), "on a lattice"])
def test_one_charge_and_draws_on_disk(said: list[Any], folder: Path, label: str) -> None:
    (same, charged, probabilities, facts), other = said[0][label], said[1][label]
    assert same
    assert other == [True, []]  # rank 1 has neither ledger nor file, and its network is as it was
    assert [steps for _, steps in charged] == [12]
    own = problems.foreign("tied" if label == "on a lattice" else label.split()[1])
    posterior = open_draws(folder / label / "draws.safetensors", own)
    assert facts["draws"] == len(posterior.draws) == 6
    assert posterior.draws.shape[1] == sum(p.numel() for p in own.parameters() if p.requires_grad)
    again = posterior.predict(problems.records(torch.float32)[0][:5]).probabilities  # frozen layers are given anew
    assert np.allclose(probabilities, again.numpy(), atol=1e-6)


def test_a_run_goes_on_from_the_parts_of_all_ranks(said: list[Any], folder: Path) -> None:
    """Without noise it comes where an unbroken run comes; broken off after step 3, the last checkpoint is after 2."""
    found, want = np.load(folder / "broken SGD" / "draws.npy")[0], alone("momentum", "tied", "float64").draws[0].numpy()
    assert np.linalg.norm(found - want) < 1e-12 * np.linalg.norm(want)
    assert [steps for _, steps in said[0]["broken SGD"][1]] == [4, 2]  # steps 3 and 4 were claimed


def test_draws_that_were_written_stay(said: list[Any], folder: Path) -> None:
    (same, charged, probabilities, _), other = said[0]["broken SGLD"], said[1]["broken SGLD"]
    assert same
    assert other == [True, []]
    assert [steps for _, steps in charged] == [12, 2]  # steps 9 and 10 were claimed
    posterior = open_draws(folder / "broken SGLD" / "draws.safetensors", problems.foreign("reaching"))
    assert len(torch.unique(posterior.draws, dim=0)) == 6
    again = posterior.predict(problems.records(torch.float32)[0][:5]).probabilities
    assert np.allclose(probabilities, again.numpy(), atol=1e-6)
    left = [path.name for path in (folder / "broken SGLD").iterdir() if "unfinished" in path.name]
    assert left == []


def test_a_part_that_is_missing_is_refused_before_a_charge(said: list[Any], folder: Path) -> None:
    for told in said:
        assert told[LOST]["error"] == "Refusal"
        assert "holds no part of the checkpoint after step 8" in told[LOST]["text"]
    with confide.Ledger(folder / LOST / "budget.db") as ledger:
        assert sum(event.count for event in ledger.events("d")) == 12


def test_another_number_of_ranks_is_told_before_a_charge(said: list[Any], folder: Path) -> None:
    for told in said:
        assert told[OTHERS]["error"] == "Refusal"
        assert "was written by 3 ranks" in told[OTHERS]["text"]
        assert "and these are 2; start 3 again" in told[OTHERS]["text"]
    with confide.Ledger(folder / OTHERS / "budget.db") as ledger:
        assert sum(event.count for event in ledger.events("d")) == 12


def noise_is_right(folder: Path) -> bool:
    """Variance 1 on each rank's own numbers to 3 %, ranks and rounds that have nothing to do with each other."""
    parts = [np.load(folder / f"noise-{rank}.npy") for rank in (0, 1)]
    wide = 5 * math.sqrt(2 / min(part.size for part in parts))
    assert wide < 0.03 / 1.8
    length = min(part.shape[1] for part in parts)
    rows = np.concatenate([part[:, :length] for part in parts])
    variances = [float((part**2).mean()) for part in parts]
    if min(variances) == 0:
        return False
    apart = abs(np.corrcoef(rows) - np.eye(len(rows))).max() < 5.5 / math.sqrt(length)
    return bool(apart and max(abs(variance - 1) for variance in variances) < wide)


@pytest.mark.parametrize("label", ["noise", "noise on a lattice"])
def test_noise_once_on_every_number(said: list[Any], folder: Path, label: str) -> None:
    assert said[0][label][0] + said[1][label][0] == said[0][label][1]
    assert noise_is_right(folder / label)


@pytest.mark.parametrize("label", ["noise on none", "noise on every rank", "noise a little low"])
def test_a_fault_is_caught(said: list[Any], folder: Path, label: str) -> None:
    assert not noise_is_right(folder / label)


@pytest.mark.parametrize("label", REFUSED)
def test_refused_on_all_ranks_before_a_charge(said: list[Any], label: str) -> None:
    for told in said:
        assert told[label]["error"] == "Refusal"
    assert any(REFUSED[label] in told[label]["text"] for told in said)
