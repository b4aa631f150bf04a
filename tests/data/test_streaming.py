"""Records mapped from Parquet: the answers of records in memory, no name on the disk, no error because of a record."""

from __future__ import annotations

import copy
import errno
import math
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

import confide
from confide.data import streaming
from confide.data.streaming import MappedRecords, from_parquet
from confide.errors import Refusal
from confide.mechanism.gaussian import SampledGaussian
from confide.sources.queries import StatisticQuery

ROWS = 1000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    columns = {name: random.normal(size=ROWS) for name in ("a", "b", "c")}
    table = pa.table({**columns, "label": random.integers(0, 3, ROWS), "value": random.normal(size=ROWS)})
    parquet.write_table(table, tmp_path / "train.parquet", row_group_size=130)
    return tmp_path / "train.parquet"


def schema(classes: int | None = None) -> confide.Schema:
    return confide.Schema(classes=classes, records=ROWS)


@pytest.fixture(params=[64, 1 << 17])
def rows_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "ROWS_AT_ONCE", request.param)


@pytest.mark.usefixtures("rows_at_once")
@pytest.mark.parametrize(("target", "classes"), [("label", 3), ("value", None)])
def test_a_run_is_the_one_from_memory_bit_for_bit(file: Path, target: str, classes: int | None) -> None:
    """Catches rows out of order, a shifted column, targets of another type."""
    found = parquet.read_table(file).to_pandas()
    x = torch.tensor(found[["c", "a"]].to_numpy().copy(), dtype=torch.float32)
    y = torch.tensor(found[target].to_numpy()).to(torch.int64 if classes else torch.float32)
    records = from_parquet(file, target=target, features=["c", "a"], schema=schema(classes))
    plan = confide.plan(noise_multiplier=1.0, delta=1e-5, records=ROWS, batch=50, steps=6)
    runs = []
    for given in ((records, None), (x, y)):
        data = confide.PrivateData(*given, schema=schema(classes), seed=1)
        module = confide.networks.mlp(2, classes or 1, hidden=(4,), generator=torch.Generator().manual_seed(0))
        runs.append(confide.fit(confide.methods.SGD(), module, data, plan, seed=0).posterior.draws)  # type: ignore[attr-defined]
    assert torch.equal(*runs)


def test_records_that_cannot_answer_count_as_zero(tmp_path: Path) -> None:
    """Missing, infinite, too large for single precision, a class that does not exist: each once, among good ones."""
    x = [1.0, None, math.inf, 1e300, math.nan, 1.0, 1.0, 1.0, 1.0]
    label = [0.0, 0.0, 0.0, 0.0, 0.0, 2.0, -1.0, 0.5, None]
    parquet.write_table(pa.table({"x": x, "label": label}), tmp_path / "odd.parquet")
    records = from_parquet(tmp_path / "odd.parquet", target="label", schema=schema(2))
    assert records.usable.tolist() == [True] + [False] * 8
    assert torch.isfinite(records.features).all()
    data = confide.PrivateData(records, None, schema=confide.Schema(classes=2, records=9), seed=1)
    silent = SampledGaussian(0.0, 1.0, 1.0, 9, "full-batch", private=False)
    assert data.answer(StatisticQuery(lambda x, y: x.double(), 1), silent).sum.item() == pytest.approx(1.0)


def test_integers_and_booleans_are_numbers(tmp_path: Path) -> None:
    table = pa.table({"i": pa.array([1, 2**62, None]), "b": [True, False, True], "y": [0.5, 1.5, 2.5]})
    parquet.write_table(table, tmp_path / "kinds.parquet")
    records = from_parquet(tmp_path / "kinds.parquet", target="y", schema=schema())
    assert records.usable.tolist() == [True, True, False]
    assert records.features[:2].tolist() == [[1.0, 1.0], [2.0**62, 0.0]]


def test_the_copy_has_no_name_and_nobody_else_may_read_it(file: Path, tmp_path: Path) -> None:
    place = tmp_path / "room"
    place.mkdir()
    records = from_parquet(file, target="value", schema=schema(), directory=place)
    assert list(place.iterdir()) == []
    assert len(records.features) == ROWS
    with streaming._nameless(place) as kept:
        assert os.fstat(kept.fileno()).st_mode & 0o077 == 0
    assert "hidden" not in repr(records)
    assert repr(records) == "MappedRecords()"
    for duplicate in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="cannot be pickled"):
            duplicate(records)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "none"}, "needs exactly one column 'none'"),
        ({"target": "value", "features": ["a", "x"]}, "needs exactly one column 'x'"),
        ({"target": "value", "features": ["value"]}, "must not hold the target"),
        ({"target": "value", "features": []}, "no column but the target"),
        ({"target": "value", "directory": "/nowhere"}, "directory='/nowhere': cannot be written"),
    ],
)
def test_refusals_name_columns_only(file: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_parquet(file, schema=schema(), **options)


def test_what_is_no_parquet_or_holds_no_numbers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_bytes(b"PAR1 not at all")
    with pytest.raises(ValueError, match="not a readable Parquet file"):
        from_parquet(tmp_path / "text.parquet", target="y", schema=schema())
    parquet.write_table(pa.table({"name": ["Ada"], "y": [1.0]}), tmp_path / "names.parquet")
    with pytest.raises(ValueError, match="column 'name' holds string, not numbers") as refusal:
        from_parquet(tmp_path / "names.parquet", target="y", schema=schema())
    assert "Ada" not in str(refusal.value)


def test_no_records_at_all(tmp_path: Path) -> None:
    """An empty file is a data set like any other: noise alone."""
    empty = pa.table({"x": pa.array([], pa.float64()), "y": pa.array([], pa.float64())})
    parquet.write_table(empty, tmp_path / "empty.parquet")
    records = from_parquet(tmp_path / "empty.parquet", target="y", schema=schema())
    assert isinstance(records, MappedRecords)
    data = confide.PrivateData(records, None, schema=schema(), seed=1)
    release = data.answer(StatisticQuery(lambda x, y: x.double(), 1), SampledGaussian(1.0, 1.0, 0.1, ROWS))
    assert release.sum.item() != 0


def test_records_stay_on_the_disk(tmp_path: Path) -> None:
    """13 MB of rows in a child that maps them and answers. The planted fault reads all of them into memory."""
    numbers = np.random.default_rng(0).normal(size=(160_000, 21)).astype(np.float32)
    columns = {f"c{place}": numbers[:, place] for place in range(21)}
    parquet.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=20_000, use_dictionary=False)
    assert private_memory(tmp_path / "rows.parquet", True) - private_memory(tmp_path / "rows.parquet", False) > 11e6


def private_memory(path: Path, fault: bool) -> float:
    """What the process holds of its own after mapping the file and answering, in bytes."""
    import subprocess
    import sys

    code = f"""
import confide, pyarrow as pa, torch
from confide.data import streaming
streaming.ROWS_AT_ONCE = 10_000
records = streaming.from_parquet({str(path)!r}, target="c0", schema=confide.Schema(records=1000))
if {fault}: records = streaming.MappedRecords(records.features.clone(), records.targets.clone(), records.usable)
data = confide.PrivateData(records, None, schema=confide.Schema(records=1000))
query = confide.sources.private_data.GradientQuery(confide.networks.linear(20), confide.likelihoods.Gaussian(1.0).loss)
for _ in range(20): data.answer(query, confide.sources.private_data.SampledGaussian(1.0, 1.0, 0.0005, 1000))
pa.default_memory_pool().release_unused()
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon")))
"""
    return 1024 * float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)


def test_a_disk_that_is_full_when_a_file_is_closed_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system did not take at once is written then, past the place where writing is watched."""

    def closed(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(streaming, "_copied", closed)
    with pytest.raises(Refusal, match=r"directory='/some': cannot hold the records \(No space left"):
        from_parquet(file, target="label", features=["a", "b"], schema=schema(3), directory="/some")
