"""Ranks that were not started alike, parts that are not disjoint, budgets that do not suffice: refused on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from confide.sources.private_data import PrivateData
from tests.distributed import problems
from tests.distributed.launch import Wanted, run

REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "another plan": (
        "fit",
        {"method": "SGD", "noise": [1.0, 2.0]},
        "RanksDisagree",
        "differs from rank 0 in plan",
    ),
    "another table": ("other_table", {}, "RanksDisagree", "the same table on every rank"),
    "another schema": ("other_schema", {}, "RanksDisagree", "schema"),
    "another version": ("other_version", {}, "RanksDisagree", "versions"),
    "another default type": ("other_type", {}, "RanksDisagree", "versions"),
    "another answer": ("other_answer", {}, "RanksDisagree", "asks for something else"),
    "the same shard twice": ("same_shard", {"shared": 1.0}, "DataError", "ranks 0 and 1 hold the same records"),
    "a tenth of a shard": ("same_shard", {"shared": 0.1}, "DataError", "whole=True"),
    "fixed size": ("other_sampling", {"sampling": "fixed-size"}, "Refusal", "use poisson or full-batch"),
    "shuffle": ("other_sampling", {"sampling": "shuffle"}, "Refusal", "use poisson or full-batch"),
    "plain": ("plain", {}, "Refusal", "confide.distributed.start"),
    "one rank fails": ("failing_rank", {}, "", "rank 1"),
    "no network": ("no_module", {}, "", "module=None: must be a torch.nn.Module"),
    "no plan": ("no_module", {"plan": None}, "", "plan=None: must be a plan"),
    "ddp": ("sharded_network", {"by": "ddp"}, "Refusal", "DistributedDataParallel"),
    "batch norm": ("sharded_network", {"by": "norm"}, "Refusal", "SyncBatchNorm at '1'"),
    "sharded weights": ("sharded_network", {"by": "fully_shard"}, "Refusal", "fully_shard"),
    "other files": ("parquet", {"apart": True}, "RanksDisagree", "files"),
    "written otherwise": ("parquet", {}, "Refusal", "holds records that are in"),
}
WANTED: Wanted = {
    **{label: (name, options) for label, (name, options, _, _) in REFUSED.items()},
    "own shards": ("same_shard", {"shared": 0.0}),
    "parquet": ("parquet", {}),
    "a damaged row group": ("parquet", {}),
    "in step after it": ("parquet", {}),
    "overspent": ("overspent", {}),
    "empty batch skipped": ("batches", {"fault": "empty batch skipped"}),
}


def write(folder: Path, sizes: list[int]) -> None:
    """The records in files of so many rows, each in row groups of 150."""
    folder.mkdir()
    x, y = problems.records(torch.float32)
    start = 0
    for number, size in enumerate(sizes):
        rows = {f"x{column}": x[start : start + size, column].numpy() for column in range(problems.FEATURES)}
        table = pa.table({**rows, "y": y[start : start + size].numpy()})
        parquet.write_table(table, folder / f"{number}.parquet", row_group_size=150)
        start += size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    write(made / "parquet", [1300, 500, 200])
    write(made / "other files", [1000, 1000])
    write(made / "a damaged row group", [1850, 150])
    damaged = made / "a damaged row group" / "1.parquet"  # one row group, which is one rank's alone
    damaged.write_bytes(b"PAR1" + bytes(2000) + damaged.read_bytes()[2004:])
    write(made / "in step after it", [1000, 0, 1000, 0])
    write(made / "written otherwise", [1000, 1000])
    again = parquet.read_table(made / "written otherwise" / "0.parquet")
    again = again.take(np.random.default_rng(0).permutation(1000)).slice(0, 400)
    parquet.write_table(again, made / "written otherwise" / "again.parquet", row_group_size=70, compression="gzip")
    return made


@pytest.fixture(scope="module")
def said(folder: Path) -> list[dict[str, Any]]:
    return run(2, WANTED, folder)


@pytest.mark.parametrize("label", REFUSED)
def test_refused_on_all_ranks(said: list[Any], label: str) -> None:
    _, _, kind, words = REFUSED[label]
    for told in said:
        assert told[label]["error"] == kind or not kind
        assert words in told[label]["text"] or (label == "one rank fails" and told is said[1])


def test_shards_of_ones_own_are_let_through(said: list[Any]) -> None:
    for told in said:
        (assumption,) = told["own shards"]
        assert "no record is held by two of the ranks" in assumption  # equal rows may be two people: the user vouches


def test_a_budget_refuses_on_all_ranks_and_nothing_is_spent(said: list[Any]) -> None:
    for told in said:
        refusals, charged = told["overspent"]
        assert len(refusals) == 2
        assert charged == []


def test_ranks_that_lose_step_find_out(said: list[Any]) -> None:
    """A skipped step makes one rank a call ahead: both learn it, at the latest when they next do something else."""
    assert [told["empty batch skipped"]["error"] for told in said] == ["RanksDisagree"] * 2


def test_files_that_one_rank_cannot_read_are_refused_on_all(said: list[Any], folder: Path) -> None:
    """Only one of them has met what is damaged; all say so, and go on together. Two files without a row are no copy."""
    texts = [told["a damaged row group"]["text"] for told in said]
    assert all("not a readable Parquet file" in text for text in texts)
    assert sum(text.startswith("rank ") for text in texts) == 1
    assert sum(told["in step after it"][1] for told in said) == problems.RECORDS


def test_row_groups_are_dealt_out_once(said: list[Any], folder: Path) -> None:
    (bits, first, assumed), (other, second, _) = (told["parquet"] for told in said)
    assert bits == other
    assert first + second == problems.RECORDS
    assert abs(first - second) <= 150
    assert assumed == []
    data = PrivateData(*problems.records(torch.float32), schema=problems.SCHEMA)
    want = data.answer(problems.gradient(torch.float32), problems.OFF).sum.numpy()
    assert np.linalg.norm(np.load(folder / "parquet" / "sum.npy") - want) < 2e-6 * np.linalg.norm(want)
