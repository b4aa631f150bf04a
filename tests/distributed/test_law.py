"""What several ranks release is what one process would: the same sums, noise once, batches apart, one charge."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from confide.sources.private_data import PrivateData
from tests.distributed import problems
from tests.distributed.launch import Wanted, run

SIZE = 2
WANTED: Wanted = {
    "sums": ("sums", {}),
    "sums, an empty shard": ("sums", {"empty": True}),
    "divided": ("sums", {"fault": "divided by a local batch"}),
    "noise": ("noise", {}),
    "noise on a lattice": ("noise", {"secure": True}),
    "noise with a seed": ("noise", {"seed": 5}),
    **{f"noise: {fault}": ("noise", {"fault": fault}) for fault in ("noise on every rank", "noise on none")},
    "noise: a little low": ("noise", {"fault": "noise a little low"}),
    "noise: one key": ("noise", {"fault": "one noise key", "seed": 5}),
    "ways": ("ways", {}),
    "batches": ("batches", {}),
    "batches: one key": ("batches", {"fault": "one sampling key"}),
    "fit SGLD": ("fit", {"method": "SGLD"}),
    "fit SEP": ("fit", {"method": "SEP"}),
    "fit SGD on a lattice": ("fit", {"method": "SGD", "secure": True}),
    "fit: every rank charges": ("fit", {"method": "SGD", "fault": "every rank charges"}),
    **{f"drifting {method}": ("drifting", {"method": method}) for method in ("SEP", "SGLD")},
    "drifting: nobody looks": ("drifting", {"method": "SEP", "fault": "nobody looks at states"}),
    "renamed": ("renamed", {}),
    "renamed: one rank is sketched": ("renamed", {"fault": "one rank is sketched"}),
    "chains": ("chains", {}),
    "resumed": ("resumed", {}),
    "closed": ("closed", {}),
    "forked": ("forked", {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def said(folder: Path) -> list[dict[str, Any]]:
    """All cases, on two ranks, in one start."""
    found = run(SIZE, WANTED, folder)
    told = [(label, each[label]) for each in found for label in WANTED]
    assert [(label, each) for label, each in told if isinstance(each, dict) and "error" in each] == []
    return found


def one_process(kind: str) -> NDArray[Any]:
    dtype = getattr(torch, kind)
    data = PrivateData(*problems.records(dtype), schema=problems.SCHEMA)
    return data.answer(problems.gradient(dtype), problems.OFF).sum.numpy()


def off(path: Path, kind: str) -> float:
    """How far a sum over ranks is from that of one process, relative to its length."""
    want = one_process(kind)
    return float(np.linalg.norm(np.load(path / f"{kind}.npy") - want) / np.linalg.norm(want))


TOLERANCE = {"float32": 2e-6, "float64": 1e-12}


class TestSums:
    @pytest.mark.parametrize("kind", TOLERANCE)
    @pytest.mark.parametrize("label", ["sums", "sums, an empty shard"])
    def test_as_in_one_process(self, said: list[Any], folder: Path, label: str, kind: str) -> None:
        assert off(folder / label, kind) < TOLERANCE[kind]
        assert said[0][label] == said[1][label]  # the same bits
        assert said[0][label][f"{kind}, count"] == pytest.approx([problems.RECORDS])  # clipping aims a little below 1

    @pytest.mark.parametrize("kind", TOLERANCE)
    def test_division_by_a_local_batch_is_caught(self, said: list[Any], folder: Path, kind: str) -> None:
        assert off(folder / "divided", kind) > 100 * TOLERANCE[kind]

    def test_through_memory_in_common_as_over_the_wire(self, said: list[Any]) -> None:
        found = said[0]["ways"]
        assert found == said[1]["ways"]
        bits = [found[way][0] for way in ("memory", "wire", "one is apart")]
        assert bits[0] == bits[1] == bits[2]
        assert bits[0][0] == bits[0][2] != bits[0][1]
        assert [found[way][1] for way in ("memory", "wire", "one is apart")] == [True, False, False]
        assert found["left"] == 0, "the memory is gone with the last who has it"

    @pytest.mark.slow  # four processes on two cores take a minute; two ranks are held above
    def test_four_ranks_and_one(self, tmp_path: Path) -> None:
        for size in (1, 4):
            told = run(size, {"sums": ("sums", {})}, tmp_path / str(size), joined=size == 4)
            assert all(each == told[0] for each in told)
            assert all(off(tmp_path / str(size) / "sums", kind) < bound for kind, bound in TOLERANCE.items())


def noise_is_right(values: NDArray[Any]) -> bool:
    """Variance 1 in every part of the vector, to 3 %; parts and rounds that have nothing to do with each other."""
    parts = values.reshape(problems.ROUNDS, SIZE, -1)
    of_each = (parts**2).mean(axis=(0, 2))
    # Five standard deviations of a variance over so many normals; 3 % is more than twice as much.
    wide = 5 * math.sqrt(2 / (values.size / SIZE))
    assert wide < 0.03 / 1.8
    rows = parts.reshape(problems.ROUNDS * SIZE, -1)
    correlation = np.corrcoef(rows) - np.eye(len(rows)) if (rows.std(axis=1) > 0).all() else np.ones((1, 1))
    return bool((abs(of_each - 1) < wide).all() and abs(correlation).max() < 5.5 / math.sqrt(rows.shape[1]))


class TestNoise:
    @pytest.mark.parametrize("label", ["noise", "noise on a lattice", "noise with a seed"])
    def test_once_in_every_coordinate(self, said: list[Any], folder: Path, label: str) -> None:
        assert noise_is_right(np.load(folder / label / "noise.npy"))
        assert said[0][label] == said[1][label]

    @pytest.mark.parametrize("label", [label for label in WANTED if label.startswith("noise:")])
    def test_a_fault_is_caught(self, said: list[Any], folder: Path, label: str) -> None:
        assert not noise_is_right(np.load(folder / label / "noise.npy"))


def batches_are_right(counts: NDArray[Any]) -> bool:
    """Each rank's counts are binomial, and those of two ranks are independent."""
    size = problems.RECORDS / SIZE
    mean, variance = size * problems.RATE, size * problems.RATE * (1 - problems.RATE)
    means = (counts.mean(axis=0) - mean) / math.sqrt(variance / len(counts))
    variances = (counts.var(axis=0) / variance - 1) / math.sqrt(2 / len(counts))
    correlation = np.corrcoef(counts.T)[0, 1] * math.sqrt(len(counts))
    return bool(max(abs(means).max(), abs(variances).max(), abs(correlation)) < 5)


class TestBatches:
    def test_apart_on_every_rank(self, said: list[Any], folder: Path) -> None:
        counts = np.load(folder / "batches" / "counts.npy")
        assert batches_are_right(counts)
        assert (counts == 0).any()  # some batches were empty, and took part
        assert said[0]["batches"] == said[1]["batches"]

    def test_one_sampling_key_is_caught(self, said: list[Any], folder: Path) -> None:
        assert not batches_are_right(np.load(folder / "batches: one key" / "counts.npy"))


class TestRuns:
    @pytest.mark.parametrize("label", [label for label in WANTED if label.startswith("fit ")])
    def test_one_run_and_one_charge(self, said: list[Any], label: str) -> None:
        (bits, epsilon, charged, assumptions), other = said[0][label], said[1][label]
        assert [bits, epsilon] == other[:2]
        assert [steps for _, steps in charged] == [12]
        assert other[2:] == [[], assumptions]  # rank 1 has no ledger, and states the same
        assert "ranks" not in " ".join(assumptions)  # slices of one table are disjoint: nobody has to vouch

    def test_a_charge_by_every_rank_is_caught(self, said: list[Any]) -> None:
        assert [steps for _, steps in said[0]["fit: every rank charges"][2]] == [12, 12]

    @pytest.mark.parametrize("method", ["SEP", "SGLD"])
    def test_ranks_that_compute_otherwise_end_in_the_same_bits(self, said: list[Any], method: str) -> None:
        """Else each would ask its records something else, and their sum would be the answer to nothing."""
        assert said[0][f"drifting {method}"] == said[1][f"drifting {method}"]
        assert said[0]["drifting: nobody looks"] != said[1]["drifting: nobody looks"]

    def test_records_are_known_by_the_parts_of_all_ranks(self, said: list[Any]) -> None:
        """Whichever rank holds which of them: a copy under another name has no second budget."""
        assert [each["renamed"] for each in said] == [["before", "before"]] * 2
        assert said[0]["renamed: one rank is sketched"] == ["before", "again"], "the fault is seen"

    def test_chains_are_paid_for_together(self, said: list[Any]) -> None:
        assert said[0]["chains"][0] == said[1]["chains"][0]
        assert sum(steps for _, steps in said[0]["chains"][1]) == 40

    def test_a_child_of_a_rank_may_end(self, said: list[Any]) -> None:
        """Its copy of the group has no threads, and torch would wait for them."""
        assert [each["forked"] for each in said] == [SIZE, SIZE]

    def test_a_closing_question_is_asked_once_by_all(self, said: list[Any]) -> None:
        (answers, charged), other = said[0]["closed"], said[1]["closed"][0]
        assert answers == other
        assert answers[0] == answers[1]  # kept by rank 0 alone, and told
        assert sorted(steps for _, steps in charged) == [1, 12]

    def test_a_run_goes_on_from_rank_0s_checkpoint(self, said: list[Any]) -> None:
        (bits, before, after, stated, kept), other = said[0]["resumed"], said[1]["resumed"]
        assert bits == other[0]
        assert sum(steps for _, steps in before) == 12
        assert sum(steps for _, steps in after) == 12 + 3 == stated == other[3]  # 7 to 9 were claimed, and made again
        assert kept
        assert not other[4]
