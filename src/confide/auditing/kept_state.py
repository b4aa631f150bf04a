"""What a module holds, kept to be put back and to be compared with; and the same start for every answer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from confide.devices import generators
from confide.mechanism.clipping.structure import kept_generators

_INTERNAL = set(vars(nn.Module()))


class KeptState:
    """Buffers, parameters and attributes of a module as they were, to be put back and to be compared with."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tensors = {name: tensor.detach().clone() for name, tensor in self._all()}
        self._attributes = [_copied(_own(part)) for part in module.modules()]

    def _all(self) -> list[tuple[str, Tensor]]:
        return [*self._module.named_parameters(), *self._module.named_buffers()]

    def put_back(self) -> None:
        with torch.no_grad():
            for name, tensor in self._all():
                tensor.copy_(self._tensors[name])
        for part, kept in zip(self._module.modules(), self._attributes, strict=True):
            for name in _own(part).keys() - kept.keys():
                delattr(part, name)
            for name, value in _copied(kept).items():
                vars(part)[name] = value

    def now(self) -> dict[str, Any]:
        """Everything the module holds, in a form that can be compared."""
        found: dict[str, Any] = {name: _plain(tensor) for name, tensor in self._all()}
        for path, part in self._module.named_modules():
            for name, value in _own(part).items():
                found[f"{path}.{name}".lstrip(".")] = _plain(value)
        return found


def _own(part: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if name not in _INTERNAL}


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """Deep copies of what can be copied; functions and generators stay what they are."""
    found = {}
    for name, value in values.items():
        try:
            found[name] = value if isinstance(value, nn.Module | torch.Generator) else copy.deepcopy(value)
        except Exception:  # whatever refuses to be copied
            found[name] = value
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.detach().cpu().contiguous().flatten().double().numpy().tobytes())
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    return repr(value) if isinstance(value, int | float | complex | str | bytes | bool | None) else type(value).__name__


@contextmanager
def same_start(module: nn.Module | None, seed: int) -> Iterator[None]:
    """Whatever is drawn inside, it is the same for the same seed; nothing of it is left outside."""
    with torch.random.fork_rng(devices=[]), kept_generators(nn.Module() if module is None else module):
        for generator in generators():  # torch.manual_seed writes the stack down each time, which takes a millisecond
            generator.manual_seed(seed)
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """For thousands of answers about a few records, over which threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def evaluation(module: nn.Module) -> Iterator[None]:
    """In evaluation mode, where most modules draw nothing."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
