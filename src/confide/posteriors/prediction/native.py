"""The door to `prediction.cpp`: a small fully connected network under many draws, layer after layer in the cache.

    network = network_of(chain, x)             None where torch has to do the work
    network.run(draws, x, CLASSES, out=..., sums=..., weights=...)

Covered are float32 on the processor and the activations named below, where the library is built.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from confide._native.known_answers import PredictionLayer, PredictionTask
from confide._native.loader import library
from confide._native.threads import threads
from confide.errors import Refusal
from confide.mechanism.clipping.watched import is_watched

if TYPE_CHECKING:
    from confide.posteriors.prediction.stacked import Layer

OUTPUTS, CLASSES, TWO_CLASSES, REALS = range(4)
"""What is made of the outputs: nothing, softmax, the sigmoid of one logit and what is left of 1, a mean."""

ROWS_OF_REALS = 3  # Of the sums of a real prediction: origin, mean, squares.
_PLAIN = 0  # The code of no activation in the kernel.
_ACTIVATIONS: dict[type[nn.Module], int] = {nn.ReLU: 1, nn.Tanh: 2, nn.Sigmoid: 3, nn.SiLU: 4}
_LARGEST_NETWORK = 1 << 18  # weights of a draw; beyond the processor's cache torch's products are as quick
_PANEL = 32  # records that go through the layers together
_RECORDS_AT_ONCE = (128, 1024)  # of one call, the fewest and the most; a thread that is done takes the next ones
_WORTH_THREADS = 1 << 22  # multiplications
_WORTH_A_CALL = 1 << 24  # Multiplications in one call: some milliseconds, beside which the call itself is nothing.


@cache
def _kernel() -> Callable[[Any], None] | None:
    opened = library()
    if opened is None:
        return None
    function: Callable[[Any], None] = opened.confide_predict
    return function


@dataclass(frozen=True)
class Network:
    """A chain that the kernel knows. `parameters` is where its last weight ends in a draw."""

    kernel: Callable[[Any], None]
    layers: Any
    features: int
    outputs: int
    parameters: int

    def run(
        self,
        draws: Tensor,
        x: Tensor,
        kind: int,
        *,
        out: Tensor | None = None,
        sums: Tensor | None = None,
        weights: Tensor | None = None,
        first: int = 0,
    ) -> None:
        """Write the results of every draw to `out` (draws, inputs, outputs), and add their weighted sums to `sums`.

        Sums are float64, (classes + 1, inputs) of probabilities and entropies, or (3, inputs) of reals: the values of
        the very first draw, differences from it, and their squares. `first` is the number of the first of `draws`.
        """
        draws, x = draws.to(torch.float32).contiguous(), x.contiguous()
        share = torch.zeros(0) if weights is None else weights.to(torch.float32).contiguous()
        if draws.ndim != 2 or draws.shape[1] < self.parameters:
            raise Refusal(f"draws of shape {tuple(draws.shape)}: must hold {self.parameters} parameters each")
        if sums is not None and len(share) != len(draws):
            raise Refusal(f"weights: {len(share)} for {len(draws)} draws; give one for each")
        width = 2 if kind == TWO_CLASSES else self.outputs
        if out is not None and (out.shape != (len(draws), len(x), width) or not out.is_contiguous()):
            raise Refusal(f"out of shape {tuple(out.shape)}: must be {(len(draws), len(x), width)} and contiguous")

        def work(start: int, count: int) -> None:
            task = PredictionTask(
                ctypes.addressof(self.layers),
                len(self.layers),
                draws.data_ptr(),
                len(draws),
                draws.shape[1],
                _at(x, start * self.features),
                count,
                len(x),
                kind,
                _at(out, start * width),
                _at(sums, start),
                _at(share, 0),
                first,
            )
            self.kernel(ctypes.byref(task))

        _divide(work, len(x), len(draws) * self.parameters)


def network_of(chain: tuple[Layer, ...], x: Tensor) -> Network | None:
    """The chain for inputs `x` of shape (inputs, features), or None where torch has to do the work."""
    kernel, layers = _kernel(), _described(chain)
    if kernel is None or not layers or len(x) == 0 or is_watched():
        return None
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.requires_grad:
        return None
    widths = [(layer.outputs, layer.inputs) for layer in layers]
    fitting = all(before[0] == after[1] for before, after in itertools.pairwise(widths))
    if not fitting or x.shape[1] != widths[0][1] or sum(a * b for a, b in widths) > _LARGEST_NETWORK:
        return None
    slices = [part for layer in chain for part in (layer.weight, layer.bias) if part is not None]
    end = max(part.stop for part in slices)
    return Network(kernel, (PredictionLayer * len(layers))(*layers), widths[0][1], widths[-1][0], end)


def _described(chain: tuple[Layer, ...]) -> list[PredictionLayer]:
    """One entry per linear layer and the activation behind it; none where the kernel lacks one."""
    found: list[PredictionLayer] = []
    for layer in chain:
        if layer.weight is not None:
            bias = -1 if layer.bias is None else layer.bias.start
            found.append(PredictionLayer(*layer.shape, layer.weight.start, bias, _PLAIN))
        elif type(layer.activation) is not nn.Identity:
            code = None if layer.activation is None else _ACTIVATIONS.get(type(layer.activation))
            if code is None or found[-1].activation != _PLAIN:
                return []
            found[-1].activation = code
    return found


def _at(values: Tensor | None, place: int) -> int | None:
    return None if values is None else values.data_ptr() + place * values.element_size()


def _divide(work: Callable[[int, int], None], records: int, multiplications: int) -> None:
    """Work on all records of so many multiplications each, piece by piece on several threads where that pays."""
    workers = torch.get_num_threads() if records * multiplications > _WORTH_THREADS else 1
    if workers == 1:
        work(0, records)
        return
    fewest, most = _RECORDS_AT_ONCE
    even = min(max(_WORTH_A_CALL // multiplications, fewest), most, -(-records // workers))
    size = -(-even // _PANEL) * _PANEL
    places = iter(range(0, records, size))  # one step of it cannot be interrupted, so threads may share it

    def some(places: Iterator[int]) -> None:
        for start in places:
            work(start, min(size, records - start))

    waiting = [threads().submit(some, places) for _ in range(workers - 1)]
    some(places)
    for one in waiting:
        one.result()
