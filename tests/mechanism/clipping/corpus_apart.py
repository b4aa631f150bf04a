"""More of the corpus: what ends with a process, and nobody could put back inside of one.

Objects and tables in C, registers of the standard library, settings, warnings, codecs, locales, decimals.
"""

from __future__ import annotations

import abc
import bz2
import calendar
import codecs
import contextvars
import copyreg
import csv
import decimal
import functools
import gettext
import hashlib
import itertools
import locale
import queue
import string
import threading
import warnings
import weakref
import xml.etree.ElementTree
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Distribution, Normal, kl

from tests.mechanism.clipping.corpus import Attack
from tests.mechanism.clipping.corpus_ways import MANY, Keep, attacks

FAR = 5.0


# objects and tables in C ----------------------------------------------------------------------------------------------


def _echoing() -> Iterator[float]:
    before = now = 0.0
    while True:
        before, now = now, (yield before)  # type: ignore[assignment]


def _started() -> Any:
    found: Any = _echoing()
    next(found)
    return found


ECHO = _started()
CYCLE, TEES = itertools.cycle(range(MANY)), itertools.tee(itertools.count())
GROUPS = itertools.groupby(itertools.count())
WAITING, LAST_IN, FIRST = queue.Queue[float](), queue.LifoQueue[float](), queue.PriorityQueue[float]()
LOCK, RLOCK, EVENT, SEMAPHORE = threading.Lock(), threading.RLock(), threading.Event(), threading.Semaphore(MANY)
CONDITION, LOCAL = threading.Condition(), threading.local()
DIGEST, PACKER, SQUEEZED, CHECKED = hashlib.sha256(), zlib.compressobj(), bz2.BZ2Compressor(), hashlib.blake2b()
RAISED = ValueError(0.0)
FLAT, STEPS = np.arange(MANY).flat, np.nditer(np.arange(float(MANY)))
FIELDS = np.zeros(1, dtype=[("kept", "f8")])[0]
NODE: Any = (torch.ones(2, requires_grad=True) * 2).sum().grad_fn
PROMISE: Any = torch.futures.Future()
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("kept", default=0.0)
CONTEXT = contextvars.copy_context()
TREE = xml.etree.ElementTree.Element("kept", value="0")
READER = csv.reader(iter([str(number) for number in range(MANY)]))
ENCODER = codecs.getincrementalencoder("utf-8")()
DECODER = codecs.getincrementaldecoder("utf-8")()
CHAINED = itertools.chain(range(MANY))
STARRED, ZIPPED = itertools.starmap(max, [(0, number) for number in range(MANY)]), zip(range(MANY), strict=True)
REVERSED, FILTERED = reversed(range(MANY)), filter(None, range(1, MANY))


class Kind(abc.ABC):  # noqa: B024 - others say that they are of it
    """A register of kinds."""


class Other: ...


@functools.singledispatch
def shown(value: object) -> float:
    return 0.0


@functools.cache
def remembered(value: int) -> int:
    return value


def _next(found: Any) -> Keep:
    def keep(now: float) -> float:
        value = 0.0
        for _ in range(1 + int(now) % 3):
            value = next(found, 0.0)
        return float(value[0] if isinstance(value, tuple | list) else value)

    return keep


def _echoed(now: float) -> float:
    return float(ECHO.send(now))


def _put(found: Any) -> Keep:
    def keep(now: float) -> float:
        before = found.qsize()
        for _ in range(1 + int(now) % 3):
            found.put_nowait(now)
        return float(before)

    return keep


def _locked(found: Any) -> Keep:
    def keep(now: float) -> float:
        return float(found.acquire(blocking=False)) if now > FAR else float(not found.acquire(blocking=False))

    return keep


def _event(now: float) -> float:
    before = EVENT.is_set()
    if now > FAR:
        EVENT.set()
    return float(before)


def _semaphore(now: float) -> float:
    before = SEMAPHORE._value
    SEMAPHORE.acquire(blocking=False)
    return float(before)


def _local(now: float) -> float:
    before = getattr(LOCAL, "kept", 0.0)
    LOCAL.kept = now
    return float(before)


def _digested(found: Any) -> Keep:
    def keep(now: float) -> float:
        before = sum(found.digest()[:4])
        found.update(f"{now:f}".encode())
        return float(before)

    return keep


def _packed(found: Any) -> Keep:
    return lambda now: float(len(found.compress(os_free_bytes(now))) + len(found.flush(zlib.Z_SYNC_FLUSH)))


def os_free_bytes(now: float) -> bytes:
    return f"{now:f}".encode() * 9


def _squeezed(now: float) -> float:
    return float(len(SQUEEZED.compress(os_free_bytes(now) * 20_000)))


def _noted(now: float) -> float:
    before = getattr(RAISED, "__notes__", ["0"])[-1]
    RAISED.add_note(f"{now:f}")
    return float(before)


def _raised(now: float) -> float:
    before = RAISED.args[0]
    RAISED.args = (now,)
    return float(before)


def _because(now: float) -> float:
    before = RAISED.__cause__
    RAISED.__cause__ = ValueError(now)
    return float(before.args[0]) if before is not None else 0.0


def _of_a_node(now: float) -> float:
    before = NODE.metadata.get("kept", 0.0)
    NODE.metadata["kept"] = now
    return float(before)


def _hooked(now: float) -> float:
    NODE.register_hook(lambda *given: None)
    return float(len(str(NODE)))


def _promised(now: float) -> float:
    if PROMISE.done():
        return float(PROMISE.value())
    PROMISE.set_result(now)
    return 0.0


def _of_a_context(now: float) -> float:
    before = CONTEXT.get(VARIABLE, 0.0)
    CONTEXT.run(VARIABLE.set, now)
    return float(before)


def _of_a_tree(now: float) -> float:
    before = TREE.get("value") or "0"
    TREE.set("value", f"{now:f}")
    return float(before)


def _encoded(now: float) -> float:
    before = DECODER.getstate()[0]
    DECODER.decode(b"\xc3" if not before else b"\xa4", False)
    return float(len(before))


def _fields(now: float) -> float:
    before = float(FIELDS["kept"])
    FIELDS["kept"] = now
    return before


def _registered(now: float) -> float:
    before = issubclass(Other, Kind)
    if now > FAR:
        Kind.register(Other)
    return float(before)


def _dispatched(now: float) -> float:
    before = shown(1)
    shown.register(int, lambda value: now)
    return float(before)


def _cached(now: float) -> float:
    before = remembered.cache_info().currsize
    for number in range(int(now) % MANY):
        remembered(number)
    return float(before)


def _finalised(now: float) -> float:
    before = len(weakref.finalize._registry)  # type: ignore[attr-defined]
    weakref.finalize(Other(), print)
    weakref.finalize(KEPT_ALIVE, print)
    return float(before)


KEPT_ALIVE = Other()


# registers and settings -----------------------------------------------------------------------------------------------


def _precision(now: float) -> float:
    before = decimal.getcontext().prec
    decimal.getcontext().prec = 1 + int(now) % MANY
    return float(before)


def _rounding(now: float) -> float:
    before = len(decimal.getcontext().rounding)
    decimal.setcontext(decimal.Context(rounding=decimal.ROUND_CEILING if now > FAR else decimal.ROUND_DOWN))
    return float(before)


def _trapped(now: float) -> float:
    before = decimal.getcontext().flags[decimal.Inexact]
    decimal.Decimal(now) / decimal.Decimal(3)
    return float(before)


def _locale(now: float) -> float:
    before = locale.setlocale(locale.LC_NUMERIC)
    locale.setlocale(locale.LC_NUMERIC, "C.UTF-8" if now > FAR else "C")
    return float(len(before))


def _codec(now: float) -> float:
    try:
        before = codecs.lookup_error("confide-kept")(UnicodeError())[1]
    except LookupError:
        before = 0
    codecs.register_error("confide-kept", lambda error: ("", int(now)))
    return float(before)


def _dialect(now: float) -> float:
    before = csv.field_size_limit()
    csv.field_size_limit(1000 + int(now))
    return float(before)


def _dialects(now: float) -> float:
    before = len(csv.list_dialects())
    csv.register_dialect(f"kept {now:.0f}", delimiter=";")
    return float(before)


def _reduced(now: float) -> float:
    before = copyreg.dispatch_table.get(Other, lambda value: (None, 0.0))(None)  # type: ignore[arg-type]
    copyreg.pickle(Other, lambda value: (None, now))  # type: ignore[arg-type, return-value]
    return float(before[1])  # type: ignore[index]


def _weekday(now: float) -> float:
    before = calendar.firstweekday()
    calendar.setfirstweekday(int(now) % 7)
    return float(before)


def _domain(now: float) -> float:
    before = gettext.textdomain()
    gettext.textdomain(f"{now:.0f}")
    return float(before) if before.isdigit() else 0.0


def _template(now: float) -> float:
    before = string.Template.delimiter
    string.Template.delimiter = chr(33 + int(now) % 40)
    return float(ord(before))


def _buffers_of_numpy(now: float) -> float:
    before = np.setbufsize(16 * (1 + int(now) % 50))
    return float(before)


def _errors_of_numpy(now: float) -> float:
    before = np.geterrcall()
    np.seterrcall(lambda *given: now)
    return float(before()) if before is not None else 0.0  # type: ignore[call-arg]


def _printing_of_numpy(now: float) -> float:
    before = np.get_printoptions()["precision"]
    np.set_printoptions(precision=1 + int(now) % 9)
    return float(before)


def _divergences(now: float) -> float:
    before = kl._KL_REGISTRY.get((Distribution, Other), lambda *of: 0.0)()  # type: ignore[call-overload]
    kl.register_kl(Distribution, type("Law", (Distribution,), {}))(lambda *of: now)
    return float(before) + len(kl._KL_REGISTRY)


def _warned_once(now: float) -> float:
    before = len(globals().get("__warning" + "registry__", ()))
    warnings.warn(f"{now:f}", RuntimeWarning, stacklevel=1)
    return float(before)


def _warning_shown(now: float) -> float:
    before = getattr(warnings.showwarning, "kept", 0.0)
    setattr(warnings.showwarning, "ke" + "pt", now)
    return float(before)


def _precision_of_products(now: float) -> float:
    before = len(torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("medium" if now > FAR else "highest")
    return float(before)


def _printing_of_torch(now: float) -> float:
    before = len(f"{torch.tensor([1 / 3])}")
    torch.set_printoptions(precision=1 + int(now) % 9)
    return float(before)


def _held_by(owner: Any) -> Keep:
    """An iterator as an attribute of an object of torch's or numpy's own types."""
    owner.kept = itertools.count()
    return lambda now: float(sum(next(owner.kept) for _ in range(1 + int(now) % 3)))


def _held_in(array: Any) -> Keep:
    array[0] = itertools.count()
    return lambda now: float(sum(next(array[0]) for _ in range(1 + int(now) % 3)))


HOLDERS: dict[str, Any] = {
    "a tensor": torch.zeros(1), "a parameter": nn.Parameter(torch.zeros(1)), "a layer": nn.Linear(2, 2),
    "a list of layers": nn.ModuleList(), "a law": Normal(0.0, 1.0),
    "an optimiser": torch.optim.SGD([torch.ones(1)], 1.0),
    "a data set of torch": torch.utils.data.TensorDataset(torch.ones(1)),
}  # fmt: skip
PLACES_APART: dict[str, Keep] = {
    **{f"what {name} holds": _held_by(owner) for name, owner in HOLDERS.items()},
    "what an array holds": _held_in(np.zeros(1, dtype=object)),
    **{
        f"an iterator ({name})": _next(found)
        for name, found in {
            "cycle": CYCLE, "tee": TEES[0], "groups": GROUPS, "flat": FLAT, "steps of numpy": STEPS, "rows": READER,
            "chain": CHAINED, "starmap": STARRED, "zip": ZIPPED, "reversed": REVERSED, "filter": FILTERED,
        }.items()
    },
    **{f"a queue ({type(found).__name__})": _put(found) for found in (WAITING, LAST_IN, FIRST)},
    **{f"a lock ({type(found).__name__})": _locked(found) for found in (LOCK, RLOCK, CONDITION)},
    "a generator": _echoed, "an event": _event, "a semaphore": _semaphore, "a local": _local,
    "a digest": _digested(DIGEST), "another digest": _digested(CHECKED), "a packer": _packed(PACKER),
    "a squeezer": _squeezed, "notes of an error": _noted, "an error": _raised, "the cause of an error": _because,
    "a node": _of_a_node, "hooks of a node": _hooked, "a promise": _promised, "a context": _of_a_context,
    "a tree": _of_a_tree, "a decoder": _encoded, "fields": _fields, "kinds": _registered,
    "a dispatched function": _dispatched, "a cache": _cached, "finalisers": _finalised,
    "digits of decimals": _precision, "rounding of decimals": _rounding, "flags of decimals": _trapped,
    "the locale": _locale, "a codec": _codec, "sizes of csv": _dialect, "dialects of csv": _dialects,
    "how objects are copied": _reduced, "the first weekday": _weekday, "a domain of texts": _domain,
    "templates": _template, "buffers of numpy": _buffers_of_numpy, "errors of numpy": _errors_of_numpy,
    "printing of numpy": _printing_of_numpy, "divergences": _divergences, "warnings given once": _warned_once,
    "how warnings are shown": _warning_shown, "precision of products": _precision_of_products,
    "printing of torch": _printing_of_torch,
}  # fmt: skip
APART: dict[str, Attack] = attacks(PLACES_APART)
