"""Draws that stay on disk: one safetensors file, mapped into memory, of which predictions hold a few draws at a time.

    with DrawWriter(path, module, likelihood, count=1000, dtype=torch.bfloat16) as writer:
        for draw in draws:
            writer.add(draw)
    posterior = open_draws(path)

Pages that have been read are given back to the operating system after each group of draws, so that the memory of a
prediction does not grow with their number. The file is an ordinary posterior file, which `load_posterior` reads too.
"""

from __future__ import annotations

import json
import mmap
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from confide.errors import Refusal
from confide.models.flat import trainable
from confide.models.likelihoods import Likelihood
from confide.posteriors.base import check_size
from confide.posteriors.description import (
    Damaged,
    check_outputs,
    description_of,
    likelihood_of,
    network_of,
    one_sentence,
)
from confide.posteriors.drafts import draft_of, sync
from confide.posteriors.draws import Draws
from confide.posteriors.frozen import frozen_in

STORED: dict[torch.dtype, str] = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_LARGEST_HEADER = 100_000_000  # bytes: the limit of the safetensors format itself


@dataclass(frozen=True, repr=False)
class MappedDraws(Draws):
    """Draws whose tensor is a view of a file; see `Draws`. Change neither the file nor the tensor."""

    mapping: mmap.mmap | None = field(default=None, repr=False, compare=False)
    kind: ClassVar[str] = Draws.kind

    def groups(self, size: int) -> Iterator[Tensor]:
        for group in self.draws.split(size):
            yield group.to(self.weights.dtype)
            self._forget()

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        drawn = super().sample(count, generator)
        self._forget()
        return drawn

    def _forget(self) -> None:
        """The pages stay in the system's cache of the file, but no longer count as this process's memory."""
        if self.mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)


def open_draws(
    path: str | Path, module: nn.Module | None = None, *, likelihood: Likelihood | None = None
) -> MappedDraws:
    """A posterior of draws whose numbers stay on disk. A network or likelihood of one's own must be given."""
    complaint = f"path={str(path)!r}: not a readable file of draws"
    try:
        with open(path, "rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(mapping[:8], "little")
        header: dict[str, Any] = json.loads(mapping[8 : 8 + min(length, _LARGEST_HEADER)])
        about = json.loads(header["__metadata__"]["confide"])
        draws, weights = (_view(mapping, header[name], 8 + length) for name in ("draws", "weights"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refusal(f"{complaint} ({one_sentence(error)})") from None
    if not isinstance(about, dict) or about.get("kind") != Draws.kind or len(draws) != len(weights):
        raise Refusal(f"{complaint}; its posterior is of another kind")
    if draws.dim() != 2:
        raise Refusal(f"{complaint}; its draws are no vectors")
    try:
        beside = {} if module is None else frozen_in(path)
        network, known = network_of(about, module, {"draws": draws, **beside}), likelihood_of(about, likelihood)
        check_outputs(network, known)
        check_size(network, draws.shape[1])
        return MappedDraws(network, known, draws, weights.clone(), dict(about["facts"]), mapping)
    except Damaged as error:
        raise Refusal(f"{complaint}; {error}") from None
    except Refusal:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError, OverflowError):
        raise Refusal(f"{complaint}; it is damaged or incomplete") from None


def _view(mapping: mmap.mmap, entry: Mapping[str, Any], start: int) -> Tensor:
    kinds = {name: kind for kind, name in STORED.items()}
    kind, shape = kinds[entry["dtype"]], tuple(entry["shape"])
    first, last = entry["data_offsets"]
    count = int(torch.Size(shape).numel())
    if last - first != count * kind.itemsize or start + last > len(mapping):
        raise Refusal("its offsets do not fit its shape")
    with warnings.catch_warnings():
        # torch warns that the memory is read-only, and nothing here writes to it.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(mapping, dtype=kind, count=count, offset=start + first).view(shape)


class DrawWriter:
    """Writes draws to a posterior file one by one, so that they never stand in memory together.

    count   how many draws there will be; leaving the `with` block with fewer, or by an error, leaves no file
    dtype   torch.float32, or torch.bfloat16 for half the size at three significant digits per weight; torch.float64 for
            a network in double precision
    draft   where draws stay when the block is left by an error, so that a writer with the same draft goes on; None:
            they are thrown away
    """

    def __init__(
        self,
        path: str | Path,
        module: nn.Module,
        likelihood: Likelihood,
        count: int,
        *,
        dtype: torch.dtype = torch.float32,
        facts: Mapping[str, Any] | None = None,
        draft: Path | None = None,
    ) -> None:
        if count < 1:
            raise Refusal(f"count={count}: must be at least 1")
        if dtype not in STORED:
            raise Refusal(f"dtype={dtype}: must be one of {', '.join(map(str, STORED))}")
        self.path, self.count, self.dtype = Path(path), count, dtype
        self._type_of_weights = torch.float64 if dtype == torch.float64 else torch.float32
        self.parameters = sum(parameter.numel() for parameter in trainable(module))
        shell = Draws(module, likelihood, torch.empty(0), torch.empty(0), dict(facts or {}))
        self._header = self._header_of(description_of(shell))
        self._draft, self._stays = (draft_of(self.path), False) if draft is None else (draft, True)
        self._weights: list[float] = []

    def _header_of(self, description: str) -> bytes:
        size = self.count * self.parameters * self.dtype.itemsize
        header = {
            "__metadata__": {"confide": description},
            "draws": {
                "dtype": STORED[self.dtype],
                "shape": [self.count, self.parameters],
                "data_offsets": [0, size],
            },
            "weights": {
                "dtype": STORED[self._type_of_weights],
                "shape": [self.count],
                "data_offsets": [size, size + self.count * self._type_of_weights.itemsize],
            },
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def __enter__(self) -> Self:
        there = self._stays and self._draft.exists()
        self._file = self._draft.open("r+b" if there else "x+b")
        if self._file.read(len(self._header)) != self._header:  # new, or cut off before it was whole
            self._file.seek(0)
            self._file.truncate()
            self._file.write(self._header)
        return self

    def go_on(self, weights: Sequence[float]) -> None:
        """Keep the first draws of those that an earlier writer left in the draft, one for each weight, and no more."""
        end = len(self._header) + len(weights) * self.parameters * self.dtype.itemsize
        self._file.flush()
        if self._draft.stat().st_size < end:
            raise Refusal(f"draws={str(self._draft)!r}: holds fewer than {len(weights)} draws; start anew")
        self._file.seek(end)
        self._file.truncate()
        self._weights = list(weights)

    def flush(self) -> None:
        """What was written is on the disk when this returns."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def add(self, draw: Tensor, weight: float = 1.0) -> None:
        """Append one parameter vector; weights need not add up to one."""
        if draw.shape != (self.parameters,):
            raise Refusal(f"draw of shape {tuple(draw.shape)}: must hold the network's {self.parameters} parameters")
        self.add_pieces([draw], weight)

    def add_pieces(self, pieces: Iterable[Tensor], weight: float = 1.0) -> None:
        """The same for a vector that comes in pieces, one after the other, and never stands in memory as a whole."""
        if len(self._weights) >= self.count:
            raise Refusal(f"count={self.count}: all draws are written already")
        if not weight >= 0:
            raise Refusal(f"weight={weight}: must be at least 0")
        written = 0
        for piece in pieces:
            self._file.write(_bytes(piece.detach().to(self.dtype)))
            written += len(piece)
        if written != self.parameters:
            raise Refusal(f"pieces of {written} numbers: must hold the network's {self.parameters} parameters")
        self._weights.append(weight)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()
            if kind is None or not self._stays:
                self._draft.unlink(missing_ok=True)

    def _finish(self) -> None:
        if len(self._weights) != self.count or not sum(self._weights) > 0:
            raise Refusal(
                f"count={self.count}: {len(self._weights)} draws were written; add them all, not all of weight 0"
            )
        weights = torch.tensor(self._weights, dtype=torch.float64)
        self._file.write(_bytes((weights / weights.sum()).to(self._type_of_weights)))
        self.flush()
        os.replace(self._draft, self.path)
        sync(self.path.absolute().parent)


def _bytes(values: Tensor) -> bytes:
    raw: bytes = values.contiguous().view(torch.uint8).numpy().tobytes()
    return raw
