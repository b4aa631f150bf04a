"""Whether two files hold the same rows. A copy that was written otherwise has other bytes, and the same records.

Of every file a sample is kept: the rows with the smallest keyed codes, and how often each is there, so that two files
have the same rows in their samples. Samples of one size are compared, whatever the size of the files, and nothing is
said of how much they share.

Equal rows may be different people, and a table of few columns is full of them. What tells a copy from that is where
they are. Rows that were dealt to two files as it came are found c times in both together, and as evenly in the two as c
allows with a chance that is known and largest if the files are equally long: one half for two rows, three quarters
for three. In a copy all of them are evenly there. So a file is refused if rows of two files are more evenly
shared than they would be once in a million (Chernoff's bound, Hoeffding 1956), and are more than a few of its rows.

Out of reach are fewer rows than a sample shows, rows that were changed, parts of a table that has hardly a row of its
own, and what is twice in one file: that a record is one row is the owner's word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from confide.data.fingerprint import SHARED, Codes, record_codes
from confide.errors import Refusal

KEPT = 4096
"""Rows in the sample of a file, where there are not thousands of files."""
KEPT_IN_ALL = 1 << 22  # 64 MB
BY_CHANCE = 1e-6
"""How often files that share nothing may be refused, all pairs of them together."""


class RowSample(NamedTuple):
    """The smallest codes of a file's rows, in order, and how often each row is there."""

    codes: Codes
    counts: NDArray[np.int64]


NO_ROWS = RowSample(np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64))


def sampled(codes: Codes, kept: int = KEPT) -> RowSample:
    found, counts = np.unique(codes, return_counts=True)
    return RowSample(found[:kept], counts[:kept].astype(np.int64))


def merged(parts: Sequence[RowSample], kept: int = KEPT) -> RowSample:
    """Of a file whose parts were sampled: no code among the smallest of all is left out by a part that has it."""
    codes, place = np.unique(np.concatenate([part.codes for part in parts]), return_inverse=True)
    counts = np.zeros(len(codes), dtype=np.int64)
    np.add.at(counts, place, np.concatenate([part.counts for part in parts]))
    return RowSample(codes[:kept], counts[:kept])


def kept_for(files: int) -> int:
    return min(KEPT, max(1, KEPT_IN_ALL // max(1, files)))


def sharing_pair(samples: Sequence[RowSample], kept: int = KEPT) -> tuple[int, int] | None:
    """Two of the files that share records, more than equal rows of different people would explain; None if none do."""
    pairs = len(samples) * (len(samples) - 1) // 2
    for first, second in _candidates(samples):
        if _share_records(samples[first], samples[second], kept, BY_CHANCE / pairs):
            return first, second
    return None


class SampledFiles:
    """Samples of files that are read piece by piece, and maybe by several processes."""

    def __init__(self, files: Sequence[Path], key: bytes) -> None:
        self.files, self.key, self.kept = list(files), key, kept_for(len(files))
        self.samples = dict.fromkeys(files, NO_ROWS)

    def add(self, file: Path, x: Any, y: Any) -> None:
        found = sampled(record_codes(x, y, self.key), self.kept)
        self.samples[file] = merged([self.samples[file], found], self.kept)

    def to_bytes(self) -> bytes:
        """For others who read parts of the same files: how many rows of each, their codes and how often they are."""
        own = [self.samples[file] for file in self.files]
        lengths = np.array([len(sample.codes) for sample in own], dtype=np.uint64)
        parts = [part.astype(np.uint64) for sample in own for part in sample]
        return np.concatenate([lengths, *parts]).tobytes()

    def joined(self, messages: Sequence[bytes]) -> SampledFiles:
        """The samples of all who have sent theirs."""
        found = SampledFiles(self.files, self.key)
        for message in messages:
            numbers = np.frombuffer(message, dtype=np.uint64)
            place = len(self.files)
            for file, length in zip(self.files, numbers[:place].astype(int).tolist(), strict=True):
                codes, counts = numbers[place : place + length], numbers[place + length : place + 2 * length]
                theirs = RowSample(codes, counts.astype(np.int64))
                found.samples[file] = merged([found.samples[file], theirs], self.kept)
                place += 2 * length
        return found

    def check(self) -> None:
        """Refuse files of which two share records; both are named, and nothing is said of how many."""
        pair = sharing_pair([self.samples[file] for file in self.files], self.kept)
        if pair is not None:
            raise Refusal(shared_rows(str(self.files[pair[1]]), str(self.files[pair[0]]), "path"))


def shared_rows(file: str, other: str, argument: str) -> str:
    return (
        f"{argument}={file!r}: holds records that are in {other!r} too, though it was written otherwise, and they "
        "would count twice; leave one of the two out. If equal rows are different people, write both into one file"
    )


def _candidates(samples: Sequence[RowSample]) -> list[tuple[int, int]]:
    """Pairs of files with a row in common, without a look at each of the others: of a thousand files half a million."""
    codes = np.concatenate([NO_ROWS.codes, *(sample.codes for sample in samples)])
    files = np.repeat(np.arange(len(samples)), [len(sample.codes) for sample in samples])
    order = np.argsort(codes, kind="stable")
    codes, files = codes[order], files[order]
    again = np.zeros(len(codes) + 1, dtype=bool)  # whether a code is that before it
    again[1:-1] = codes[1:] == codes[:-1]
    several = again[:-1] | again[1:]
    starts = np.flatnonzero(~again[:-1][several])
    runs = np.split(files[several], starts[1:])
    together = {tuple(run.tolist()) for run in runs if len(run) > 1}
    return sorted({(one, two) for run in together for place, two in enumerate(run) for one in run[:place]})


def _share_records(one: RowSample, two: RowSample, kept: int, chance: float) -> bool:
    # Beyond its largest code a sample that is full tells nothing.
    limits = [sample.codes[-1] for sample in (one, two) if len(sample.codes) == kept]
    limit = min(limits, default=np.uint64(2**64 - 1))
    one, two = (RowSample(codes[codes <= limit], counts[codes <= limit]) for codes, counts in (one, two))
    both, here, there = np.intersect1d(one.codes, two.codes, assume_unique=True, return_indices=True)
    even = np.abs(one.counts[here] - two.counts[there]) <= 1
    if even.sum() <= SHARED * min(len(one.codes), len(two.codes)):
        return False
    alone = [counts[~np.isin(codes, both)] for codes, counts in (one, two)]
    totals = np.concatenate([one.counts[here] + two.counts[there], *(counts[counts > 1] for counts in alone)])
    return _tail(int(even.sum()), len(totals), float(np.mean([_even_chance(total) for total in totals]))) < chance


def _even_chance(total: int) -> float:
    """That so many equal rows fall to two files as evenly as they can, where each goes to either alike."""
    half = total // 2
    log = math.lgamma(total + 1) - math.lgamma(half + 1) - math.lgamma(total - half + 1) - total * math.log(2)
    return math.exp(log) * (1 + total % 2)


def _tail(seen: int, trials: int, mean: float) -> float:
    """At most how probable so many successes are, or more, in independent trials with such a mean chance."""
    share = seen / trials
    if share <= mean:
        return 1.0
    rest = 0.0 if seen == trials else (1 - share) * math.log((1 - share) / (1 - mean))
    return math.exp(-trials * (share * math.log(share / mean) + rest))
