"""Files that hold the same rows: found however they were written, and told from equal rows of different people."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from confide.data.fingerprint import record_codes
from confide.data.loaders import load_parts
from confide.data.overlap import KEPT, RowSample, SampledFiles, kept_for, merged, sampled, sharing_pair
from confide.data.schema import Schema
from confide.data.streaming import from_parquet
from confide.errors import Refusal

KEY = bytes(range(32))


def table(rows: int, seed: int, values: int | None = None, columns: int = 4) -> np.ndarray:
    """Rows of numbers that nobody shares, or of a few values that many do."""
    random = np.random.default_rng(seed)
    return random.normal(size=(rows, columns)) if values is None else random.integers(0, values, (rows, columns))


def shared(*parts: np.ndarray) -> tuple[int, int] | None:
    kept = kept_for(len(parts))
    codes = [record_codes(part[:, :-1], part[:, -1], KEY) for part in parts]
    return sharing_pair([sampled(each, kept) for each in codes], kept)


@pytest.mark.parametrize("values", [None, 40, 3, 2], ids=["numbers", "few doubles", "81 rows", "16 rows"])
@pytest.mark.parametrize("rows", [300, 20_000])
def test_a_shuffled_copy_is_found_and_other_people_are_not(rows: int, values: int | None) -> None:
    random, whole = np.random.default_rng(1), table(2 * rows, 0, values)
    one, two = whole[:rows], whole[rows:]
    assert shared(one, two) is None
    assert shared(one, random.permutation(one)) == (0, 1)
    assert shared(two, one, random.permutation(two)) == (0, 2)


@pytest.mark.parametrize("doubles", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "part"), [(20_000, 0.05), (2_000, 0.1), (20_000, 0.5)])
def test_a_part_of_another_file_is_found(rows: int, part: float, doubles: float) -> None:
    random, count = np.random.default_rng(2), int(part * rows)
    whole = table(2 * rows, 3)
    whole = random.permutation(np.concatenate([whole, whole[: int(doubles * rows)]]))
    one, two = whole[:rows], whole[rows:]
    assert shared(one, two) is None
    assert shared(one, np.concatenate([two, one[:count]])) == (0, 1)
    assert shared(one, one[:count]) == (0, 1)
    assert shared(one, np.concatenate([one, one])) == (0, 1)


def test_many_files_that_share_nothing_are_taken() -> None:
    """Equal rows in all of them, by the dozen; and a rule that counts what two files share would refuse each."""
    parts = np.split(table(20_000, 4, values=5), 20)
    assert shared(*parts) is None
    one, two = (set(map(tuple, part)) for part in parts[:2])
    assert len(one & two) > 0.5 * len(one)
    assert shared(*parts, parts[7]) == (7, 20)


def test_rows_of_sorted_files_are_taken() -> None:
    whole = table(20_000, 5, values=12)
    whole = whole[np.lexsort(whole.T)]
    assert shared(*np.split(whole, 4)) is None


def test_parts_of_a_file_make_its_sample() -> None:
    codes = np.random.default_rng(0).integers(0, 9000, 20_000).astype(np.uint64)
    whole = sampled(codes)
    found = merged([sampled(part) for part in np.array_split(codes, 7)])
    assert len(whole.codes) == KEPT
    for one, two in zip(whole, found, strict=True):
        assert np.array_equal(one, two)
    files = [Path("a"), Path("b")]
    ranks = [SampledFiles(files, KEY) for _ in range(3)]
    rows = table(999, 6)
    for place, part in enumerate(np.array_split(rows, 3)):
        ranks[place].add(files[0], part[:, :3], part[:, 3])
        ranks[(place + 1) % 3].add(files[1], part[::-1, :3], part[::-1, 3])
    for rank in ranks:
        rank.check()  # no rank sees that the files are one; all together do
        with pytest.raises(Refusal, match="'b': holds records that are in 'a' too"):
            rank.joined([other.to_bytes() for other in ranks]).check()


def test_nothing_is_shared_by_nothing() -> None:
    empty = RowSample(np.zeros(0, np.uint64), np.zeros(0, np.int64))
    assert sharing_pair([empty, empty, sampled(np.arange(9, dtype=np.uint64))]) is None
    assert sharing_pair([]) is None
    assert sharing_pair([empty]) is None


def test_a_copy_that_was_written_otherwise_is_refused_by_every_reader(tmp_path: Path) -> None:
    frame = pd.DataFrame(table(400, 7), columns=["a", "b", "c", "y"]).astype(np.float32)
    frame.iloc[:200].to_parquet(tmp_path / "one.parquet", row_group_size=40)
    frame.iloc[200:].reset_index(drop=True).to_parquet(tmp_path / "two.parquet")
    parts = [tmp_path / "one.parquet", tmp_path / "two.parquet"]
    schema = Schema(records=400)
    assert len(from_parquet(parts, target="y", schema=schema).usable) == 400
    assert load_parts(parts, "y").rows == 400
    other = tmp_path / "other.parquet"
    shuffled = frame.iloc[:200].sample(frac=1, random_state=0, ignore_index=True)
    shuffled.to_parquet(other, compression="gzip", row_group_size=7)
    with pytest.raises(Refusal, match="parquet': holds records"):
        from_parquet([*parts, other], target="y", schema=schema)
    with pytest.raises(Refusal, match="parquet': holds records"):
        load_parts([*parts, other], "y")
    shuffled[["y", "c", "a", "b"]].astype(float).to_parquet(other)  # other columns first, another type
    with pytest.raises(Refusal, match="parquet': holds records"):
        from_parquet([*parts, other], target="y", features=["a", "b", "c"], schema=schema)
