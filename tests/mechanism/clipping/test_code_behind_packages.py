"""The user's own code behind a package's: what a decorator holds, what a base class calls.

Each leaves a trace that nobody can put back, the interpreter's limit of recursion, where a record is far, and reads it
for the next one. It must be seen to run, wherever it stands; where nobody calls it, it is nobody's business.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import string
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from confide.errors import Refusal
from confide.evaluate.private import _Questions
from confide.mechanism.clipping import apart, sealed
from confide.mechanism.clipping.one_by_one import why_apart
from confide.mechanism.clipping.search import Search
from confide.models.likelihoods import Categorical
from confide.models.predictive import ClassPredictive
from confide.posteriors.draws import Draws
from tests.mechanism.clipping.mixers import CLASSES, Net
from tests.mechanism.clipping.test_unsealable import influence

pytestmark = [
    pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
FAR = 8.0


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    before = sys.getrecursionlimit()
    yield
    sys.setrecursionlimit(before)


def trace(x: Tensor) -> float:
    """How many records before this one were far, in steps that a sum shows."""
    before = sys.getrecursionlimit()
    if float(x.detach().abs().max()) > FAR:
        sys.setrecursionlimit(before + 1)
    return float(before % 97)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, raw: Tensor) -> Tensor:
        ctx.save_for_backward(raw)
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * trace(ctx.saved_tensors[0]), None


class Prepared(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, raw: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = trace(inputs[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None


class Written(json.JSONEncoder):
    def default(self, o: Any) -> float:
        return trace(o)


class Formatted(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return str(trace(value))


class Removed:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def _remove(self) -> None:
        trace(self.x)

    part = property(None, None, _remove)


class Keyed(dict[str, Any]):
    def keys(self) -> Any:
        return [str(trace(self["x"]))]


class Spread(torch.distributions.Distribution):
    arg_constraints: ClassVar[Any] = {}

    def __init__(self, x: Tensor) -> None:
        super().__init__(validate_args=False)
        self.x = x

    @property
    def variance(self) -> Tensor:
        return torch.tensor(trace(self.x) ** 2)


@functools.singledispatch
def by_kind(x: Any) -> float:
    return 1.0


@by_kind.register(Tensor)
def _(x: Tensor) -> float:
    return trace(x)


@contextlib.contextmanager
def region(x: Tensor) -> Iterator[float]:
    yield trace(x)


@torch.no_grad()
def limit() -> float:
    return float(sys.getrecursionlimit() % 97)


def in_a_region(x: Tensor) -> float:
    with region(x) as found:
        return found


def by_removing(x: Tensor) -> float:
    del Removed(x).part
    return limit()


without_gradients, by_arrays = torch.no_grad()(trace), np.frompyfunc(lambda _, x: trace(x), 2, 1)
BEHIND: dict[str, Callable[[Tensor], Any]] = {
    "no_grad": without_gradients,
    "inference_mode": torch.inference_mode()(trace),
    "compiler.disable": torch.compiler.disable(trace),
    "contextmanager": in_a_region,
    "singledispatch": by_kind,
    "frompyfunc": lambda x: by_arrays(0, [x])[0],
    "JSONEncoder": lambda x: float(json.dumps(x, cls=Written)),
    "Formatter": lambda x: float(Formatted().format("{0}", x)),
    "property of a base class": lambda x: float(Spread(x).stddev),
    "property to delete": by_removing,
    "keys of a dictionary": lambda x: float(next(iter({**Keyed(x=x)}))),
}
FUNCTIONS = {"once_differentiable": Backward, "setup_context": Prepared}


def network(name: str) -> Net:
    torch.manual_seed(0)
    behind = BEHIND[name]
    return Net(lambda self, x: x * behind(x) / 50, before=True).double()


class Given(Net):
    """Hands its raw input on, beside what is made of it."""

    def __init__(self, function: Any) -> None:
        super().__init__(lambda self, x: x)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function.apply(torch.tanh(self.body(x)), x.detach()))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", BEHIND)
def test_code_behind_a_package_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = network(name)
    assert "recursionlimit" in why_apart(module)
    monkeypatch.setattr(apart, "is_possible", lambda: False)
    with pytest.raises(Refusal, match="recursionlimit"):
        influence(module)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_code_of_own_functions_is_seen(function: Any) -> None:
    torch.manual_seed(0)
    assert "recursionlimit" in why_apart(Given(function).double())


def test_a_search_that_ends_at_packages_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what a package's function holds is the package's own, as it was once taken to be."""
    monkeypatch.setattr(sealed, "HeldBehind", lambda value: None)
    assert not why_apart(network("no_grad"))
    assert influence(network("no_grad")) > 1e-3


def test_a_search_that_forgets_who_calls_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: functions of a base class ask for nothing."""
    monkeypatch.setattr(Search, "_inherited", lambda self, kind: [])
    assert not why_apart(Given(Prepared).double())


class Likely(Categorical):
    """What a likelihood does beside its loss, confide asks for from code that nobody looks through."""

    def predictive(self, outputs: Tensor, weights: Tensor) -> ClassPredictive:
        return super().predictive(outputs * trace(outputs), weights)


def test_what_confide_asks_of_a_likelihood_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = Net(lambda self, x: x)
    draws = nn.utils.parameters_to_vector(module.parameters()).detach()[None]
    posterior = Draws(module, Likely(CLASSES), draws, torch.ones(1), {})
    query = _Questions(("accuracy",), 5.0, 1.0, False).query(posterior)
    assert "recursionlimit" in why_apart(query.function)
    monkeypatch.setattr(Search, "_asked_by_confide", lambda self, kind: [])  # planted
    assert not why_apart(query.function)


class Loaded(Net):
    """Decorated functions that no forward calls."""

    def __init__(self) -> None:
        super().__init__(lambda self, x: x)

    @torch.no_grad()
    def generate(self) -> float:
        return trace(torch.ones(1)) + time.time()

    @contextlib.contextmanager
    def timed(self) -> Iterator[float]:
        yield time.time()

    @classmethod
    @torch.inference_mode()
    def load(cls, path: str) -> Any:
        with open(path, "rb") as place:
            return torch.load(place)


def test_decorated_functions_that_nobody_calls_are_nobodys_business() -> None:
    torch.manual_seed(0)
    module = Loaded().double()
    assert not why_apart(module)
    assert influence(module) < 1e-12


def test_harmless_code_behind_packages_stays_fast() -> None:
    torch.manual_seed(0)
    steady = torch.no_grad()(lambda x: x.mean().tanh())
    assert not why_apart(Net(lambda self, x: x * steady(x) * next(itertools.repeat(1.0))))
