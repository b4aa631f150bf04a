"""Whether the copy of a network that a fit moves is all there is of it, on made-up records and before any charge.

A function, closure or hook that holds a layer of the network that was given goes on calling that layer from within the
copy: its weights stay where they are, whatever is learnt, and nothing would say so. A parameter that is made while the
network runs is not among those that are learnt. A tensor that was computed from parameters once, and is not computed
anew, would hide them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from confide.data.trees import called, in_type, size_of, tensors_in
from confide.devices import HOST, device_of
from confide.errors import Refusal
from confide.mechanism.clipping import Recordwise
from confide.models.flat import computed, trainable, training_, uncompiled
from confide.models.likelihoods import Likelihood
from confide.models.programs import Program
from confide.models.tokens import logits_of
from confide.sources.base import Source
from confide.sources.queries import StatisticQuery


def check_copy(module: nn.Module, data: Source, likelihood: Likelihood | None) -> bool:
    """Refuse a network whose copy is not one. What else is wrong with it, whoever asks it next will say; whether it
    ran is returned."""
    if isinstance(module, Program) or device_of(module) != HOST:
        return False
    own = training_(uncompiled(module))
    mode = ReadsOfOthers(trainable(module))

    def run(x: Any, y: Any) -> Tensor:
        _run(own, mode, x, y, likelihood)
        return torch.zeros(size_of(x), 1, dtype=torch.float64)

    before, kept = _names(own), _computed(module, own)
    with torch.random.fork_rng(devices=[]):
        data.rehearse(StatisticQuery(Recordwise(run), 1))
    if mode.read:
        raise Refusal(
            "module: a copy of it runs with the parameters of the one that was given, where what is learnt would never "
            "arrive: a function, closure, hook or likelihood holds a layer of it; let a method reach it through self"
        )
    made = [name for name in _names(own) if name not in before]
    if made:
        raise Refusal(
            f"module: {made[0]} is made while it runs, too late to be learnt; call the module once on made-up records "
            "of the right shape first, or make it in __init__"
        )
    for name, layer, attribute, value in kept:
        if mode.ran and vars(layer).get(attribute) is value:
            raise Refusal(
                f"module: {name} was computed from other tensors once, and is not computed anew when the module runs, "
                "so that nothing of it would be learnt; compute it in the forward, or detach it"
            )
    return mode.ran


@contextmanager
def about_converted(method: str, given: nn.Module, converted: nn.Module) -> Iterator[None]:
    """A network that runs, and does not run in the form that the method gives it, is told about that form."""
    try:
        yield
    except Refusal as error:
        other = [name for name, _ in converted.named_parameters() if name not in dict(given.named_parameters())]
        if not other or not isinstance(error.__cause__, Exception):
            raise
        raise Refusal(
            f"{error} (it runs as it was given: under {method} its parameters have other names, such as {other[0]}, "
            "and are more; reach them as layer.weight, or use a sampler)"
        ) from error.__cause__


def _run(own: nn.Module, mode: ReadsOfOthers, x: Any, y: Any, likelihood: Likelihood | None) -> None:
    dtype = next(iter(trainable(own))).dtype
    try:
        with torch.no_grad(), mode:
            output = called(own, in_type(x, dtype))
            mode.ran = True
            if likelihood is not None:
                likelihood.loss(logits_of(output), in_type(y, dtype))
    except Exception:  # whoever asks it next will say so
        return


def _names(module: nn.Module) -> list[str]:
    return [name for name, value in module.named_parameters() if value.requires_grad]


def _computed(module: nn.Module, own: nn.Module) -> list[tuple[str, nn.Module, str, Tensor]]:
    """What the copy has for the attributes that were computed in the module."""
    layers = dict(own.named_modules())
    found = []
    for name, _, _ in computed(module):
        prefix, _, attribute = name.rpartition(".")
        found.append((name, layers[prefix], attribute, vars(layers[prefix])[attribute]))
    return found


class ReadsOfOthers(TorchFunctionMode):
    """Whether any operation makes a tensor of one of these, or of a view of one; of its numbers, not of its form."""

    def __init__(self, watched: list[nn.Parameter]) -> None:
        super().__init__()
        self.watched = {one.untyped_storage().data_ptr() for one in watched} - {0}
        self.read = self.ran = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if tensors_in(found) and not name.startswith("new_") and not name.endswith("_like"):
            self.read |= any(map(self._is_watched, tensors_in(args[:1] if name in _LIKE_ANOTHER else (args, kwargs))))
        return found

    def _is_watched(self, one: Tensor) -> bool:
        return one.layout == torch.strided and one.untyped_storage().data_ptr() in self.watched


_LIKE_ANOTHER = frozenset({"to", "type_as", "view_as", "expand_as", "reshape_as"})
"""Of whose further arguments nothing but the form is asked."""
