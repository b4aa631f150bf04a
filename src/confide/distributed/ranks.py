"""Ranks: a crew over torch.distributed, with collectives that cannot be mistaken for one another.

Every call begins with a meeting: all ranks exchange a hash of what they are about to do and of how many calls they have
made. Ranks that are about to do different things (another plan, another order of threads) find out there, all of them,
before anything is charged or a sum is handed out. What travels is numbers, JSON and safetensors, never code.

A release. Every rank sums over its own batch and has a part of the coordinates. It sends the others their parts of its
sum, adds up what it gets, adds the noise to its own part, and sends that to all: reduce, noise, gather. So noise enters
once in every coordinate, after all sums and in one addition; its cost is divided by the ranks; every coordinate is made
by one rank, so that all hold the same bits; and a rank sends 2 (R - 1) / R times the vector, as in the best all-reduce.
gloo works on the processors' memory, where the noise is made; its own reduce-scatter is an all-reduce inside, so the
sums go by an all-to-all. Ranks on one machine have memory in common (`memory`): what would be sent is read
there, after a meeting by which all have written, and the result after another.

What goes over the wire, or stands in that memory, are sums without noise: the network between ranks is inside the
boundary, like the memory of one machine. All ranks belong to one owner.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from confide._native.arithmetic import add_rows
from confide._native.process import mark
from confide.data.schema import Schema
from confide.data.streaming import MappedRecords
from confide.data.table import Table
from confide.distributed import memory
from confide.distributed.groups import first_words, found_group, is_alone, let_be
from confide.distributed.memory import CommonMemory
from confide.distributed.shards import check_apart, own_slice
from confide.errors import RankLost, RanksDisagree, Refusal
from confide.privacy.ledger import Ledger
from confide.sources.crew import Crew, Parts, error_from_dict, error_to_dict
from confide.sources.private_data import PrivateData

T = TypeVar("T")
PIECE = 1 << 16
"""Numbers that are added up at a time: half a megabyte in double precision."""
# The newer name of the same thing; the older one warns where both are known.
_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Ranks(Crew):
    """The processes of one run; made by `start`. Several threads may use it if they do so alike on every rank.

    rank     number of this process, from 0; rank 0 charges the ledger and writes checkpoints
    size     how many there are
    timeout  seconds after which a rank that does not answer counts as lost
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.timeout = timeout
        self._group = group
        self._calls = 0
        self._lost = ""
        self._over = False
        self._common: CommonMemory | None = None
        self._apart = False  # whether the ranks were found to have no memory in common
        self._lock = threading.RLock()
        self._mark = mark()

    def private(
        self,
        x: Any,
        y: Any = None,
        *,
        schema: Schema,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        name: str = "",
        whole: bool = False,
        seed: int | None = None,
        read: Table | None = None,
        weights: Any = None,
    ) -> PrivateData:
        """This rank's part of a data set, as a source for `confide.fit`: the same call on every rank.

        x, y    this rank's own records, which no other rank may hold; or, from `confide.data.from_parquet(...,
                shard=ranks)`, the part that was dealt to it, and y=None
        whole   x and y are the whole table, the same one on every rank, and each takes its own slice of it
        ledger  used by rank 0 alone; a path need not exist for the others
        seed    for tests only, as for PrivateData; sampling and noise of the ranks are apart all the same
        read    the table that x and y were encoded from, by which rank 0's ledger recognises copies
        weights  what each of these records counts for, between 0 and 1, as for PrivateData
        """
        self.agree({"schema": repr(schema), "name": name, "seed": str(seed), "whole": str(whole)})
        vouched: tuple[str, ...] = ()
        if isinstance(x, MappedRecords):
            self._check_dealt(x)
        elif whole:
            weights = None if weights is None else own_slice(self, weights, y)[0]
            x, y = own_slice(self, x, y)
        elif self.size > 1:
            check_apart(self, x, y)
            vouched = ("no record is held by two of the ranks, which were compared by keyed codes",)
        options: dict[str, Any] = {"schema": schema, "name": name, "seed": seed, "crew": self, "vouched": vouched}
        options.update(read=read, weights=weights)
        data = self.together(lambda: PrivateData(x, y, ledger=ledger if self.leads else None, **options))
        data.find_name_together()
        return data

    def _check_dealt(self, records: MappedRecords) -> None:
        """Records from files: every rank must have been dealt its own share of the same files."""
        whose = records.dealt
        if self.size > 1 and (whose is None or (whose.rank, whose.size) != (self.rank, self.size)):
            raise Refusal("x: holds whole files, or another rank's share; give from_parquet(..., shard=ranks)")
        self.agree({"files": "" if whose is None else whose.deck})

    # -- what a crew does ------------------------------------------------------------------------------------------

    def agree(self, facts: Mapping[str, str]) -> None:
        hashed = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in facts.items()}
        found = [json.loads(text) for text in self.everybody(json.dumps(hashed).encode(), "agree")]
        for rank, theirs in enumerate(found):
            odd = [name for name in {**found[0], **theirs} if found[0].get(name) != theirs.get(name)]
            if odd:
                raise RanksDisagree(
                    f"rank {rank}: differs from rank 0 in {', '.join(odd)}; nothing was charged. Start all ranks with "
                    "the same script, settings and versions"
                )

    def together(self, work: Callable[[], T]) -> T:
        own: Exception | None = None
        try:
            value = work()
        except Exception as error:
            own = error
        said = [json.loads(text) for text in self.everybody(_told_of(own), "together")]
        if own is not None:
            raise own
        for rank, told in enumerate(said):
            if told is not None:
                raise error_from_dict(told, rank)
        return value

    def led(self, what: str, work: Callable[[], Any]) -> Any:
        with self._lock:
            self._meet(what)
            own: Exception | None = None
            message = b""
            if self.leads:
                try:
                    message = json.dumps([None, work()]).encode()
                except Exception as error:
                    own = error
                    message = json.dumps([error_to_dict(error), None]).encode()
            told, value = json.loads(self._told(message))
        if own is not None:
            raise own
        if told is not None:
            raise error_from_dict(told, rank=0)
        return value

    def told(self, message: bytes) -> bytes:
        with self._lock:
            self._meet("told")
            return self._told(message)

    def share_(self, tensor: Tensor) -> Tensor:
        with self._lock:
            self._meet(f"share {tensor.dtype} {tuple(tensor.shape)}")
            with self._wire() as group:
                if group is not None:
                    dist.broadcast(tensor, 0, group)
        return tensor

    def blank(self, size: int, dtype: torch.dtype) -> Tensor:
        with self._lock:
            common = self._memory_for(size * dtype.itemsize)
            if common is None:
                return torch.zeros(size, dtype=dtype)
            return common.stretch(self.rank, dtype, size).zero_()

    def add_up(self, own: Tensor, what: str, noise: Callable[[int], Tensor], parts: Parts | None = None) -> Tensor:
        if parts is not None:
            return self._add_up_apart(own, what, noise, parts)
        wanted = len(own)
        if wanted <= self.size**2:  # so short that a rank could be left without a part
            own = torch.cat([own, own.new_zeros(-wanted % self.size)])
        length = -(-len(own) // self.size)  # of a part; the last one may be shorter
        lengths = [max(0, min(length, len(own) - rank * length)) for rank in range(self.size)]
        with self._lock:
            if (common := self._memory_for(own.nbytes)) is not None:
                return self._add_up_in(common, own, what, noise, length)
            self._meet(f"{what} {tuple(own.shape)}")
            mine = own.new_zeros(length)
            self._add(self._theirs(own, lengths), mine[: lengths[self.rank]], noise)
            total = own.new_empty(length * self.size)
            with self._wire() as group:
                if group is None:
                    return mine
                _gather(total, mine, group)
        return total[:wanted]

    def _add_up_in(
        self, common: CommonMemory, own: Tensor, what: str, noise: Callable[[int], Tensor], length: int
    ) -> Tensor:
        """The same, in memory that all have in common."""
        # Nobody reads a stretch after the second meeting of a sum, or the result after the first of the next one.
        mine = common.stretch(self.rank, own.dtype, len(own))
        if mine.data_ptr() != own.data_ptr():  # else it was given out by `blank`
            mine.copy_(own)
        self._meet(f"{what} {tuple(own.shape)} in common")
        part = slice(self.rank * length, min(len(own), (self.rank + 1) * length))
        rows = [common.stretch(rank, own.dtype, len(own))[part] for rank in range(self.size)]
        total = common.stretch(self.size, own.dtype, len(own))
        self._add(rows, total[part], noise)
        self._meet("added up")
        return total.clone()

    def _memory_for(self, wanted: int) -> CommonMemory | None:
        """Memory that all ranks reach, once there is a vector that is worth it; None: what there is to say is sent."""
        if self.size == 1 or self._apart or not memory.SMALLEST <= wanted <= memory.LARGEST:
            return None
        with self._wire():  # not after the end, nor in a fork
            pass
        if self._common is None or self._common.capacity < wanted:
            self._common, capacity = None, memory.capacity_for(wanted)
            offer = memory.Offer(self.size, capacity) if self.leads else None
            try:
                name = self.told(b"" if offer is None else offer.name.encode()).decode()
                found = memory.opened(name, self.size, capacity)
                self._apart = b"no" in self.everybody(b"no" if found is None else b"here", "memory")
            finally:
                if offer is not None:
                    offer.close()
            self._common = None if self._apart else found
        return self._common

    def _add_up_apart(self, own: Tensor, what: str, noise: Callable[[int], Tensor], parts: Parts) -> Tensor:
        """Stretch by stretch, so that no second vector of that length is needed; this rank keeps its own numbers."""
        if sum(map(sum, parts)) != len(own) or any(len(part) != self.size for part in parts):
            raise Refusal(f"parts: must share {len(own)} numbers out to {self.size} ranks")
        mine = own.new_zeros(sum(part[self.rank] for part in parts))
        start = place = 0
        with self._lock:
            self._meet(f"{what} {tuple(own.shape)} apart {parts}")
            for part in parts:
                length = part[self.rank]
                rows = self._theirs(own[start : start + sum(part)], list(part))
                self._add(rows, mine[place : place + length], noise)
                start, place = start + sum(part), place + length
        return mine

    def put_together(self, own: Tensor, part: Sequence[int]) -> Tensor:
        """The numbers of all ranks: each has as many as `part` says, as many as the first, or at last fewer."""
        with self._lock:
            self._meet(f"put together {own.dtype} {tuple(part)}")
            padded = own.new_zeros(part[0])
            padded[: len(own)] = own
            total = own.new_empty(part[0] * self.size)
            with self._wire() as group:
                if group is None:
                    return own
                _gather(total, padded, group)
        return total[: sum(part)]

    def alike(self, code: bytes) -> bool:
        with self._lock:
            return self._meet("alike", code)

    def everybody(self, message: bytes, what: str) -> list[bytes]:
        with self._lock:
            self._meet(what)
            sizes = self._gathered(torch.tensor([len(message)]))[:, 0].tolist()
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else padded[:0]
            rows = self._gathered(padded)
        return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def close(self) -> None:
        """Let go of the group. Its threads end with the last who holds it, and must do so before Python does.

        One that is still putting tensors away while Python ends is stopped in the middle, and takes the process down.
        """
        with self._lock:
            self._group, self._common, self._over = None, None, True

    @property
    def of_a_fork(self) -> bool:
        """Whether this is a copy in a child of the process that has started."""
        return self._mark != mark()

    # -- the wire --------------------------------------------------------------------------------------------------

    def _meet(self, what: str, code: bytes = b"") -> bool:
        """All ranks are about to do the same, or all of them refuse; whether they come with the same code."""
        self._calls += 1
        digest = hashlib.sha256(f"{self._calls} {what}".encode()).digest()
        found = self._gathered(torch.frombuffer(bytearray(digest + code.ljust(32, b"\0")), dtype=torch.uint8))
        differs = found != found[0]
        odd = differs[:, : len(digest)].any(1).nonzero().flatten().tolist()
        if odd:
            raise RanksDisagree(
                f"rank {odd[0]}: asks for something else than rank 0 at call {self._calls}; nothing was released. Run "
                "the same script on every rank, and use threads alike or not at all"
            )
        return not bool(differs.any())

    def _theirs(self, own: Tensor, lengths: list[int]) -> Tensor:
        """All ranks' sums on this rank's coordinates, a row for each."""
        length = lengths[self.rank]
        rows = own.new_empty(self.size * length)
        with self._wire() as group:
            if group is None:
                return own[None]
            dist.all_to_all_single(rows, own, [length] * self.size, lengths, group)
        return rows.view(self.size, length)

    def _add(self, rows: Sequence[Tensor] | Tensor, out: Tensor, noise: Callable[[int], Tensor]) -> None:
        """Their sum in double precision and its noise, in pieces that stay in the cache; the noise is drawn at once.

        Where the native library is missing torch does it, in the same order and so with the same bits.
        """
        drawn = noise(len(out))
        if add_rows(list(rows), drawn, out):
            return
        for start in range(0, len(out), PIECE):
            piece = slice(start, start + PIECE)
            total = rows[0][piece].double()
            for row in rows[1:]:
                total.add_(row[piece].double())  # of one type: adding single to double precision takes longer
            out[piece] = total.add_(drawn[piece].double())

    def _told(self, message: bytes) -> bytes:
        size = torch.tensor([len(message)])
        with self._wire() as group:
            if group is None:
                return message
            dist.broadcast(size, 0, group)
            content = torch.zeros(int(size), dtype=torch.uint8)
            if self.leads:
                content.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
            dist.broadcast(content, 0, group)
        return content.numpy().tobytes()

    def _gathered(self, row: Tensor) -> Tensor:
        rows = row.new_empty((self.size, *row.shape))
        with self._wire() as group:
            if group is None:
                return row[None]
            dist.all_gather(list(rows), row, group)
        return rows

    @contextmanager
    def _wire(self) -> Iterator[dist.ProcessGroup | None]:
        """Every use of the group: what goes wrong on it is a lost rank, now and from then on."""
        if self.of_a_fork:
            raise Refusal(f"ranks: belong to the process that started them, not to a fork of rank {self.rank}")
        if self._over:
            raise Refusal("ranks: are over, for the block of confide.distributed.start has ended; ask within it")
        if self._lost:
            raise RankLost(self._lost)
        try:
            yield self._group
        except RuntimeError as error:
            said = first_words(error)
            self._lost = (
                f"rank {self.rank}: another rank is gone, or did not answer for {self.timeout:g} s ({said}); what was "
                "charged stays charged. Start all ranks again; with a checkpoint they go on from it"
            )
            raise RankLost(self._lost) from None


def _told_of(error: Exception | None) -> bytes:
    return json.dumps(None if error is None else error_to_dict(error)).encode()


@contextmanager
def start(timeout: float = 60.0) -> Iterator[Ranks]:
    """The ranks of this run, as torchrun (or whatever started the processes) has set them up; one if nothing has.

    timeout   seconds within which every rank must come to each meeting: longer than the slowest step. At the start,
              where one machine may need minutes longer than another, ranks wait for ten minutes at least
    """
    if not timeout > 0:
        raise Refusal(f"timeout={timeout}: must be > 0 seconds")
    joined = dist.is_initialized()
    group = None if not joined and is_alone() else found_group(joined, timedelta(seconds=timeout))
    ranks = Ranks(group, timeout)
    try:
        yield ranks
        ranks.agree({})  # nobody leaves while another still needs an answer
    finally:
        if ranks.of_a_fork:
            let_be(group)
        else:
            ranks.close()
            if group is not None:
                dist.destroy_process_group(group if joined else None)
            del group
            gc.collect()  # a mesh that fully_shard has made refers to itself, and to the group


@contextmanager
def started_together() -> Iterator[Ranks | None]:
    """For the command line: the ranks where torchrun has started several processes, else None."""
    if not dist.is_initialized() and os.environ.get("WORLD_SIZE", "1") == "1":
        yield None
        return
    with start() as ranks:
        yield ranks
