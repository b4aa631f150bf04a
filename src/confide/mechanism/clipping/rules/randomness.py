"""Random draws inside a layer that is run again: kept the first time, handed back after that.

The fallback needs the forward of a layer twice or thrice with the same dropout masks and the same noise. While
`Keeping` is active every draw made through torch's functions is kept in order; `Returning` hands the same values,
or one record's rows of them, back in that order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FRESH = {
    torch.rand,
    torch.randn,
    torch.rand_like,
    torch.randn_like,
    torch.randint,
    torch.randint_like,
    torch.randperm,
    torch.bernoulli,
    torch.normal,
    torch.poisson,
    torch.multinomial,
    Tensor.bernoulli,
    Tensor.multinomial,
}
_IN_PLACE = {
    Tensor.normal_,
    Tensor.uniform_,
    Tensor.bernoulli_,
    Tensor.exponential_,
    Tensor.log_normal_,
    Tensor.cauchy_,
    Tensor.geometric_,
    Tensor.random_,
}
_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}


@dataclass
class KeptRandomness:
    """The draws of one forward pass, in order."""

    values: list[Tensor] = field(default_factory=list)


class _Intercepting(TorchFunctionMode):
    """Sends every random function of torch to `draw(make)`, where `make()` would draw a fresh value."""

    def draw(self, make: Callable[[], Tensor]) -> Tensor:
        raise AssertionError("one of the two modes below")

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if function in _FRESH:
            return self.draw(lambda: function(*args, **options))
        if function in _IN_PLACE:
            target = args[0]
            return target.copy_(self.draw(lambda: function(torch.empty_like(target), *args[1:], **options)))
        if function in _DROPOUTS:
            return self._dropout(function, args, options)
        if function is F.scaled_dot_product_attention:
            return self._attention(args, options)
        return function(*args, **options)

    def _dropout(self, function: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        given = inspect.signature(function).bind(*args, **options)
        given.apply_defaults()
        values, training = given.arguments["input"], given.arguments["training"]
        if not training or given.arguments["p"] == 0:
            return function(*args, **options)
        given.arguments["inplace"] = False
        given.arguments["input"] = torch.ones_like(values, requires_grad=False)
        return values * self.draw(lambda: function(*given.args, **given.kwargs))

    def _attention(self, args: Sequence[Any], options: dict[str, Any]) -> Any:
        given = _ATTENTION.bind(*args, **options)
        given.apply_defaults()
        rate = given.arguments["dropout_p"]
        if rate == 0:
            return F.scaled_dot_product_attention(*args, **options)
        given.arguments["dropout_p"] = 0.0
        query, value = given.arguments["query"], given.arguments["value"]
        # attention over unit vectors returns the attention weights themselves, whatever the masks
        unit = torch.eye(value.shape[-2], dtype=value.dtype, device=value.device)
        given.arguments["value"] = unit.expand(*value.shape[:-2], *unit.shape)
        weights = F.scaled_dot_product_attention(*given.args, **given.kwargs)
        mask = self.draw(lambda: F.dropout(torch.ones_like(weights, requires_grad=False), rate))
        return torch.matmul(weights * mask, value).to(query.dtype)


class Keeping(_Intercepting):
    def __init__(self, draws: KeptRandomness) -> None:
        super().__init__()
        self.draws = draws

    def draw(self, make: Callable[[], Tensor]) -> Tensor:
        value = make()
        self.draws.values.append(value.detach())
        return value


class Returning(_Intercepting):
    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__()
        self.remaining = list(values)

    def draw(self, make: Callable[[], Tensor]) -> Tensor:
        return self.remaining.pop(0) if self.remaining else make()


def _attention_signature(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> None:
    """The arguments of scaled_dot_product_attention, which has no readable signature of its own."""


_ATTENTION = inspect.signature(_attention_signature)
