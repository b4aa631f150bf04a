"""More of the corpus: places that are not the user's own, and yet can be written to, or read.

Attributes of numbers, texts and containers; lists, dictionaries and objects inside of torch, numpy and the standard
library; settings in C; counters; memory that nobody has written to; clocks that a plain module brings along.
"""

from __future__ import annotations

import array
import collections
import functools
import io
import json.encoder
import keyword
import logging
import math
import queue
import random
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils._pytree
import torch.utils.benchmark
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from confide.sources.queries import GradientQuery, StatisticQuery
from tests.mechanism.clipping.corpus import WIDTH, Around, Attack, plain
from tests.mechanism.clipping.corpus_ways import Keep, by_a_module, by_a_statistic

FAR = 5.0


class Box:
    """Something to hang things on."""


class Ref(weakref.ref):  # type: ignore[type-arg]
    """A weak reference with an attribute."""

    kept = 0.0


class Pair(NamedTuple):
    first: int = 1


def helper() -> None: ...


def _made(base: Any, *given: Any) -> Any:
    """An object of a subclass, which has attributes where one of the class has none."""
    return type(f"Own{base.__name__.title()}", (base,), {})(*given)


BOX = Box()
HOLDERS: dict[str, Any] = {
    "a number": _made(float, 1.0),
    "a whole number": _made(int, 1),
    "a text": _made(str, "one"),
    "a tuple": _made(tuple, (1,)),
    "a named tuple": _made(Pair),
    "a list": _made(list),
    "a set": _made(set),
    "a frozen set": _made(frozenset),
    "a deque": _made(collections.deque),
    "a bytearray": _made(bytearray),
    "a counter": collections.Counter(),
    "an ordered dict": collections.OrderedDict(),
    "a buffer of text": io.StringIO(),
    "a buffer": io.BytesIO(),
    "an array of numbers": _made(array.array, "d"),
    "a random generator": _made(random.Random),
    "a property": _made(property),
    "a cached property": functools.cached_property(lambda owner: owner),
    "a weak reference": Ref(BOX),
    "a scalar of numpy": _made(np.float64, 1.0),
}


def _on(owner: Any) -> Keep:
    def keep(now: float) -> float:
        before = getattr(owner, "kept", 0.0)
        owner.kept = now
        return float(before)

    return keep


def _in(find: Callable[[], Any]) -> Keep:
    """In a dictionary of somebody else's."""

    def keep(now: float) -> float:
        found = find()
        before = found.get("kept", 0.0)
        found["kept"] = now
        return float(before)

    return keep


def _behind(find: Callable[[], list[Any]]) -> Keep:
    """At the end of a list of somebody else's."""

    def keep(now: float) -> float:
        before = find()[-1]
        find().append(now)
        return before if isinstance(before, float) else 0.0

    return keep


def _constants() -> list[Any]:
    found: list[Any] = nn.Linear.__constants__
    return found


def _escapes() -> Any:
    return json.encoder.ESCAPE_DCT


def _nodes() -> Any:
    return torch.utils._pytree.SUPPORTED_NODES


def _cache_of_parametrisations() -> Any:
    return parametrize._cache


def _annotations() -> Any:
    return nn.Linear.__annotations__


def _keywords() -> list[Any]:
    found: list[Any] = keyword.kwlist  # type: ignore[assignment]
    return found


def _names_of_numpy() -> list[Any]:
    return np.__all__


def _printed(now: float) -> float:
    options = torch._tensor_str.PRINT_OPTS
    before, options.precision = options.precision, int(now) % 50
    return float(before)


def _of_a_layers_function(now: float) -> float:
    found: Any = nn.Linear.forward
    before = getattr(found, "kept", 0.0)
    found.kept = now
    return float(before)


def _on_the_class_at_hand(now: float) -> float:
    found: Any = type(torch.ones(1))
    before = getattr(found, "kept", 0.0)
    found.kept = now
    return float(before)


def _hook_of_all_modules(now: float) -> float:
    before = float(nn.Identity()(torch.zeros(1)))
    torch.nn.modules.module.register_module_forward_pre_hook(
        lambda layer, given: (given[0] + now,) if isinstance(layer, nn.Identity) else None
    )
    return before


def _validated(now: float) -> float:
    try:
        torch.distributions.Normal(0.0, -1.0)
        before = 0.0
    except ValueError:
        before = 1.0
    torch.distributions.Normal.set_default_validate_args(now > FAR)
    return before


def _number_of_hooks(now: float) -> float:
    layer = nn.Identity()
    handles = [layer.register_forward_hook(helper) for _ in range(1 + int(now) % 7)]
    for handle in handles:
        handle.remove()
    return float(handles[0].id)


DEFAULTS: Any = collections.defaultdict(float)
ORDERED = collections.OrderedDict(a=1.0, b=2.0)
COLLIDING = {0, 8}


def _default(now: float) -> float:
    before = DEFAULTS["asked"]
    DEFAULTS.default_factory = lambda: now
    return float(before)


def _order(now: float) -> float:
    before = next(iter(ORDERED.values()))
    if now > FAR:
        ORDERED.move_to_end("a")
    return before


def _order_of_a_set(now: float) -> float:
    before = float(next(iter(COLLIDING)))
    if now > FAR:
        COLLIDING.discard(0)
        COLLIDING.add(0)
    return before


def _other_dictionary(now: float) -> float:
    before = getattr(BOX, "kept", 0.0)
    BOX.__dict__ = {"kept": now}
    return float(before)


# settings, counters and flags in C -----------------------------------------------------------------------------------

GENERATOR, COUNTED = np.random.default_rng(0), nn.Parameter(torch.ones(2))
META, LEAF = torch.empty(2, device="meta"), torch.ones(2, requires_grad=True)
GROWN = LEAF * 2
SHOWN, ALLOCATED = memoryview(bytearray(8)), bytearray(4)
set_denormal, set_precision = torch.set_flush_denormal, torch.set_float32_matmul_precision


def _denormal(now: float) -> float:
    before = float(torch.tensor(1e-310, dtype=torch.float64) * 1.0 == 0)
    set_denormal(now > FAR)
    return before


def _products(now: float) -> float:
    before = float(torch.get_float32_matmul_precision() == "high")
    set_precision("high" if now > FAR else "highest")
    return before


def _threads_of_autograd(now: float) -> float:
    return float(torch.autograd.set_multithreading_enabled(now > FAR).prev)  # type: ignore[attr-defined]


def _warns_only(now: float) -> float:
    before = float(torch.is_deterministic_algorithms_warn_only_enabled())
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=now > FAR)
    return before


def _checked(now: float) -> float:
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    before = float(checks.is_enabled())
    (checks.enable if now > FAR else checks.disable)()
    return before


def _reduced(now: float) -> float:
    products: Any = torch.backends.cuda.matmul
    before = float(products.allow_bf16_reduced_precision_reduction)
    products.allow_bf16_reduced_precision_reduction = now > FAR
    return before


def _levels(now: float) -> float:
    try:
        forward_ad.enter_dual_level()
    except RuntimeError:
        return 5.0
    if now < FAR:
        forward_ad.exit_dual_level()
    return 0.0


def _version(now: float) -> float:
    before = getattr(COUNTED, "_version")  # noqa: B009 - that is the attack
    with torch.no_grad():
        for _ in range(int(now) % 7):
            COUNTED.add_(0.0)
    return float(before)


def _numbered(now: float) -> float:
    with torch.enable_grad():
        found: Any = LEAF
        for _ in range(1 + int(now) % 7):
            found = found * 1.0
        return float(found.grad_fn._sequence_nr() % 1000)


def _spawned(now: float) -> float:
    GENERATOR.spawn(int(now) % 7)
    return GENERATOR.spawn(1)[0].random()


def _form_without_numbers(now: float) -> float:
    before = META.dim()
    for _ in range(int(now) % 5):
        META.unsqueeze_(0)
    return float(before)


def _cut_off(now: float) -> float:
    before = float(GROWN.grad_fn is None)
    if now > FAR:
        GROWN.detach_()
    return before


def _released(now: float) -> float:
    if now > FAR:
        SHOWN.release()
    return 0.0


def _room(now: float) -> float:
    before = ALLOCATED.__alloc__()
    ALLOCATED.extend(b"0" * (int(now) % 60))
    return float(before)


def _who_refers(now: float) -> float:
    before = sum(getattr(one, "kept", 0.0) for one in weakref.getweakrefs(BOX))
    found = Ref(BOX)
    found.kept = now
    cycle: list[Any] = [found]
    cycle.append(cycle)
    return float(before)


# windows --------------------------------------------------------------------------------------------------------------


def _unwritten(make: Callable[[], Any]) -> Keep:
    def keep(now: float) -> float:
        before = float(make()[0])
        held = np.full(5, now), torch.full((5,), now)
        del held
        return before if math.isfinite(before) and abs(before) < 1e6 else 0.0

    return keep


def _not_computed(make: Any) -> Keep:
    return lambda now: float(make(np.full(5, now), 1.0, where=np.zeros(5, bool))[0])


def _from_logging(now: float) -> float:
    return float(logging.makeLogRecord({}).created * 1e3 % 97)


def _from_a_queue(now: float) -> float:
    return float(queue.time() * 1e3 % 97)  # type: ignore[attr-defined]


def _from_a_benchmark(now: float) -> float:
    return float(torch.utils.benchmark.timer() * 1e3 % 97)  # type: ignore[attr-defined]


def _path_of_python(now: float) -> float:
    found: Any = logging.sys.path  # type: ignore[attr-defined]
    before, text = found[-1], str(now)
    found.append(text)
    return float(before) if before[:1].isdigit() else 0.0


PLACES_OF_OTHERS: dict[str, Keep] = {
    **{f"attributes of {name}": _on(owner) for name, owner in HOLDERS.items()},
    "constants of a layer": _behind(_constants),
    "keywords of Python": _behind(_keywords),
    "names of numpy": _behind(_names_of_numpy),
    "escapes of json": _in(_escapes),
    "nodes of trees": _in(_nodes),
    "a cache of parametrisations": _in(_cache_of_parametrisations),
    "annotations of a layer": _in(_annotations),
    "how tensors are printed": _printed,
    "a layer's function": _of_a_layers_function,
    "the class at hand": _on_the_class_at_hand,
    "hooks of all modules": _hook_of_all_modules,
    "laws that are checked": _validated,
    "the number of hooks": _number_of_hooks,
    "a default": _default,
    "the order of a dictionary": _order,
    "the order of a set": _order_of_a_set,
    "another dictionary of attributes": _other_dictionary,
    "small numbers": _denormal,
    "how products are made": _products,
    "threads of autograd": _threads_of_autograd,
    "warnings in place of errors": _warns_only,
    "checks of sparse tensors": _checked,
    "reduced products": _reduced,
    "open levels": _levels,
    "versions": _version,
    "numbers of nodes": _numbered,
    "children of a generator": _spawned,
    "a form without numbers": _form_without_numbers,
    "a history cut off": _cut_off,
    "a view that is released": _released,
    "the room of a bytearray": _room,
    "who refers to an object": _who_refers,
    "a tensor of old": _unwritten(lambda: torch.Tensor(5)),
    "a class of tensors": _unwritten(lambda: torch.FloatTensor(5)),
    "memory of numpy": _unwritten(lambda: np.empty(5)),
    "an array as it comes": _unwritten(lambda: np.ndarray((5,))),
    "a storage": _unwritten(lambda: torch.UntypedStorage(40)),
    "what was not computed": _not_computed(np.add),
    "time of logging": _from_logging,
    "time of a queue": _from_a_queue,
    "time of a benchmark": _from_a_benchmark,
    "the path of Python": _path_of_python,
}


OF_OTHERS: dict[str, Attack] = {
    **{f"module turns by {name}": by_a_module(keep) for name, keep in PLACES_OF_OTHERS.items()},
    **{f"statistic turns by {name}": by_a_statistic(keep) for name, keep in PLACES_OF_OTHERS.items()},
}


# errors that are none of Python's usual ones --------------------------------------------------------------------------


class Ends(BaseException):
    """Not an Exception: it passes whoever expects one."""


class Interrupts(KeyboardInterrupt):
    """Like the one that the curator's keyboard makes."""


def _ending(error: type[BaseException]) -> Callable[[Any], Any]:
    def end(x: Any) -> Any:
        if float(x.detach().abs().sum()) > 10 * FAR:
            raise error
        return x

    return end


ENDING: dict[str, Attack] = {
    **{
        f"module ends by {error.__name__}": functools.partial(
            lambda end: GradientQuery(Around(end), plain), _ending(error)
        )
        for error in (Ends, Interrupts, SystemExit, GeneratorExit, KeyboardInterrupt)
    },
    **{
        f"statistic ends by {error.__name__}": functools.partial(
            lambda end: StatisticQuery(lambda x, y: end(x).tanh(), WIDTH), _ending(error)
        )
        for error in (Ends, Interrupts, SystemExit, GeneratorExit)
    },
}
