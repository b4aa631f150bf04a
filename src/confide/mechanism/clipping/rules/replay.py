"""The fallback: any layer, run again by torch.func for its own parameters alone.

For a layer f with parameters p, input a_i and output gradient g_i the gradient of record i is the vector-Jacobian
product of f(., a_i) with g_i. Norms come from vmap over micro-batches of records and are squared and summed at
once; the clipped sum is ONE ordinary vector-Jacobian product with the g_i scaled by the clip factors. Nothing of
size records x parameters is kept. Layers that vmap cannot run go record by record.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from confide.mechanism.clipping.layout import CallLayout, Layout, map_tensors, tensors_in
from confide.mechanism.clipping.rules.randomness import Returning
from confide.mechanism.clipping.rules.registry import Contribution, Weighted
from confide.mechanism.clipping.rules.squares import chunks, squared_norms_of
from confide.mechanism.clipping.workspace import Workspace

# Activations of a micro-batch live beside its gradients; more records than this gain nothing.
LARGEST_CHUNK = 128
# Layers that vmap was seen to fail on.
_ONE_BY_ONE: WeakSet[nn.Module] = WeakSet()


class Replayed(Contribution):
    """A layer's call, ready to be run again for any of its records."""

    def __init__(
        self,
        layer: nn.Module,
        names: Sequence[str],
        given: tuple[tuple[Any, ...], dict[str, Any]],
        gradients: Sequence[Tensor | None],
        draws: Sequence[Tensor],
        layout: CallLayout,
        records: int,
        space: Workspace,
    ) -> None:
        self.layer, self.records, self.space = layer, records, space
        self.parameters = {name: layer.get_parameter(name).detach() for name in names}
        self.given = map_tensors(lambda tensor: tensor.detach(), given)
        self.known = [gradient is not None for gradient in gradients]
        inputs = tensors_in(self.given)
        outputs = [gradient for gradient in gradients if gradient is not None]
        # inputs, then gradients, then draws: one flat list, with the layout of each
        self.tensors = [*inputs, *outputs, *draws]
        used = [place for place, known in zip(layout.outputs, self.known, strict=True) if known]
        self.places: list[Layout | None] = [*layout.inputs, *used, *layout.draws]
        self.cuts = len(inputs), len(inputs) + len(outputs)

    def _outputs(self, parameters: dict[str, Tensor], inputs: list[Tensor], draws: list[Tensor]) -> list[Tensor]:
        """Run the layer; keep the outputs whose gradient is known."""
        arguments, keywords = map_tensors(lambda _, tensor: tensor, self.given, inputs)
        with Returning(draws):
            output = functional_call(self.layer, parameters, arguments, keywords)
        return [tensor for tensor, known in zip(tensors_in(output), self.known, strict=True) if known]

    def _split(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        first, second = self.cuts
        return tensors[:first], tensors[first:second], tensors[second:]

    def _one_record(self, rows: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """One record's rows put back where the layer expects them, beside what all records share."""
        waiting = iter(rows)
        return self._split(
            [
                shared if place is None else place.restored(next(waiting))
                for shared, place in zip(self.tensors, self.places, strict=True)
            ]
        )

    def _by_vjp(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        inputs, gradients, draws = self._one_record(rows)
        found: Any = vjp(lambda parameters: self._outputs(parameters, inputs, draws), self.parameters)
        return dict(found[1](gradients)[0])

    def _by_autograd(self, inputs: list[Tensor], gradients: list[Tensor], draws: list[Tensor]) -> dict[str, Tensor]:
        with torch.enable_grad():
            leaves = {name: value.clone().requires_grad_() for name, value in self.parameters.items()}
            outputs = self._outputs(leaves, inputs, draws)
            found = torch.autograd.grad(outputs, list(leaves.values()), gradients, allow_unused=True)
        return {
            name: torch.zeros_like(leaf) if gradient is None else gradient
            for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
        }

    def _per_record(self, reduce: Callable[[dict[str, Tensor]], Any], start: int, stop: int) -> Any:
        """reduce(gradients) of every record of a micro-batch, stacked."""
        rows = [
            place.rows_first(tensor)[start:stop]
            for tensor, place in zip(self.tensors, self.places, strict=True)
            if place is not None
        ]
        if self.layer not in _ONE_BY_ONE:
            try:
                return self._together(reduce, rows)
            except Exception:  # whatever vmap cannot do; an error of the layer itself comes up again below
                _ONE_BY_ONE.add(self.layer)
        return self._one_by_one(reduce, rows)

    def _together(self, reduce: Callable[[dict[str, Tensor]], Any], rows: list[Tensor]) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            return vmap(lambda one: reduce(self._by_vjp(one)))(rows)

    def _one_by_one(self, reduce: Callable[[dict[str, Tensor]], Any], rows: list[Tensor]) -> Any:
        results = [reduce(self._by_autograd(*self._one_record(one))) for one in zip(*rows, strict=True)]
        return map_tensors(lambda _, *values: torch.stack(values), results[0], *map(tensors_in, results))

    def squared_norms(self) -> Tensor:
        size = sum(value.numel() * value.element_size() for value in self.parameters.values())
        parts = chunks(self.records, size, min(self.space.budget, LARGEST_CHUNK * size))
        return torch.cat([self._per_record(_squared_norm, start, stop) for start, stop in parts])

    def add_weighted(self, factors: Tensor, into: Weighted) -> None:
        inputs, gradients, draws = self._split(self.tensors)
        _, places, _ = self._split(self.places)  # type: ignore[arg-type]
        scaled = [
            gradient * _along(factors, place, gradient.dim())  # type: ignore[arg-type]
            for gradient, place in zip(gradients, places, strict=True)
        ]
        for name, value in self._by_autograd(inputs, scaled, draws).items():
            into[name].add_(value)

    def dense(self, start: int, stop: int) -> dict[str, Tensor]:
        result: dict[str, Tensor] = self._per_record(lambda gradients: gradients, start, stop)
        return result


def _squared_norm(gradients: dict[str, Tensor]) -> Tensor:
    return torch.stack([squared_norms_of(value.reshape(1, -1))[0] for value in gradients.values()]).sum()


def _along(factors: Tensor, layout: Layout, dimensions: int) -> Tensor:
    """Factors of the records laid along the axis that carries them."""
    rows = factors.repeat(layout.fold) if layout.outer else factors.repeat_interleave(layout.fold)
    shape = [1] * dimensions
    shape[layout.axis] = -1
    return rows.view(shape)
