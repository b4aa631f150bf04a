"""The kernels of `recurrence.cpp`: all steps of an LSTM in one call, records shared out among threads.

None where the library is missing or the tensors are not single precision on the host: then torch does the same work.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from confide._native.known_answers import PANEL
from confide._native.loader import library
from confide._native.threads import share

THREAD_PRODUCTS = 1 << 22  # so many multiply-adds are worth a thread


def lstm_fits(*tensors: Tensor | None) -> bool:
    given = [one for one in tensors if one is not None]
    kind = all(one.dtype == torch.float32 and one.device.type == "cpu" and one.layout == torch.strided for one in given)
    return kind and library() is not None


def lstm(gates: Tensor, weight: Tensor, bias: Tensor | None, backwards: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, cells and their tanh, each (records, steps, size); `gates`, maps of the inputs, become the gates."""
    records, steps, width = gates.shape
    outputs, cells, bent = (gates.new_empty(records, steps, width // 4) for _ in range(3))
    _run("confide_lstm", backwards, (_panels(weight), bias), (gates, cells, bent, outputs))
    return outputs, cells, bent


def lstm_back(
    kept: tuple[Tensor, ...],
    weight: Tensor,
    backwards: bool,
    of_outputs: Tensor | None,
    state: Tensor,
    cell: Tensor,
) -> Tensor:
    """The gradient at the maps, of what is kept: gates, cells and their tanh; those at the last states are
    overwritten."""
    found = torch.empty_like(kept[0])
    of_outputs = None if of_outputs is None else of_outputs.contiguous()
    _run("confide_lstm_back", backwards, (_panels(weight.t()),), (*kept, of_outputs, state, cell, found))
    return found


def _panels(matrix: Tensor) -> Tensor:
    """(columns, depth) as (panels, depth, columns of a panel), the last filled up with zeros."""
    filled = F.pad(matrix, (0, 0, 0, -len(matrix) % PANEL))
    return filled.view(-1, PANEL, matrix.shape[1]).transpose(1, 2).contiguous()


def _run(name: str, backwards: bool, shared: tuple[Tensor | None, ...], each: tuple[Tensor | None, ...]) -> None:
    """With tensors that all records share, and such as have the records first, the gates first of all."""
    gates = each[0]
    assert gates is not None
    records, steps, width = gates.shape
    workers = max(1, min(torch.get_num_threads(), records * steps * width * width // 4 // THREAD_PRODUCTS, records))
    bounds = [records * part // workers for part in range(workers + 1)]
    kernel = getattr(library(), name)

    def fill(part: int) -> None:
        first, count = bounds[part], bounds[part + 1] - bounds[part]
        common = (None if one is None else one.data_ptr() for one in shared)
        places = (None if one is None else one.data_ptr() + 4 * first * one.stride(0) for one in each)
        kernel(count, steps, width // 4, backwards, *common, *places)

    share(fill, workers)
