"""What cannot be put back after a record, and so may not be used by code that reads records in this process.

`sealed` puts back what it finds. Some things keep what it cannot find: objects whose state lies in C (iterators,
queues, locks), settings and counters in C, tables of the standard library. Code that reaches one of these runs in a
process for each record (`apart`), or is refused where there can be none. So does code that asks for the machine (files,
clocks, the environment, numbers of processes), if such a process is cut off from it (`confined`). Refused everywhere is
what shows other records: frames, addresses, all objects, foreign functions, memory that nobody has written to; and
threads, of which such a process has none. How far a process is from others is its `level`: HERE, APART or CUT_OFF.

Only code that may run counts (`may_run`). Installed packages are not looked through: their state is theirs, and the
pages say so.
"""

from __future__ import annotations

import contextvars
import dis
import functools
import gc
import io
import operator
import random
import re
import sys
import threading
import types
from array import array
from collections import deque, namedtuple
from typing import Any

import numpy as np
import torch

from confide.mechanism.clipping.may_run import looks_into_a_copy
from confide.mechanism.clipping.origins import is_installed, is_known
from confide.mechanism.clipping.unwritten import STORAGES, gives_arrays, makes_arrays

# Standard modules without a state that a record could leave a trace in, or whose state is put back (random) or tells
# nothing back (warnings, logging).
_PLAIN_WORDS = (
    "__future__ abc array base64 binascii bisect cmath collections colorsys contextlib contextvars copy dataclasses "
    "enum fractions functools hashlib heapq itertools json keyword logging math numbers operator "
    "queue random re statistics string struct textwrap types typing unicodedata warnings zlib"
)
_PLAIN_MODULES = frozenset(_PLAIN_WORDS.split())
# Beside these: parts in C that take what they are given by where it lies (a generator that any object may seed).
_LOOSE_IN_C = frozenset({"_random"})
# Those whose state ends with a process: they neither look at other objects than they are given nor at the machine.
_ENDING_WORDS = (
    "ast bz2 calendar codecs configparser copyreg csv decimal difflib encodings fnmatch gettext graphlib html locale "
    "lzma plistlib quopri secrets shlex string stringprep token tokenize xml"
)
_ENDING_MODULES = frozenset(_ENDING_WORDS.split())
# Those that ask the machine, which says nothing to a process that is cut off from it.
_MACHINE_WORDS = (
    "argparse datetime errno genericpath getpass glob grp ntpath os pathlib platform posix posixpath pwd resource "
    "shutil stat tempfile time uuid zoneinfo"
)
_MACHINE_MODULES = frozenset(_MACHINE_WORDS.split())
HERE, APART, CUT_OFF = 0, 1, 2  # how far a process is from others
_KNOWN_MODULES = (
    _PLAIN_MODULES,
    _PLAIN_MODULES | _ENDING_MODULES,
    _PLAIN_MODULES | _ENDING_MODULES | _MACHINE_MODULES,
)
# What is harmless in the others: constants, and looking at functions.
_PLAIN_PARTS = {
    "sys": frozenset({"float_info", "maxsize", "version_info", "platform", "byteorder", "int_info"}),
    "inspect": frozenset({"signature", "isclass", "isfunction", "ismethod", "Parameter", "getfullargspec"}),
    "os": frozenset({"PathLike", "fspath", "sep", "linesep", "cpu_count"}),
    "datetime": frozenset({"timedelta", "timezone", "UTC", "MINYEAR", "MAXYEAR", "date", "datetime", "time", "tzinfo"}),
    "decimal": frozenset({"Decimal"}),
    "io": frozenset({"StringIO", "BytesIO"}),
    "pathlib": frozenset({"PurePath", "PurePosixPath", "PureWindowsPath"}),
    "pickle": frozenset({"dumps", "HIGHEST_PROTOCOL"}),
    "threading": frozenset({"local"}),
    "uuid": frozenset({"UUID", "uuid3", "uuid4", "uuid5"}),
    "weakref": frozenset(
        {"ref", "proxy", "ReferenceType", "ProxyType", "CallableProxyType", "WeakValueDictionary", "WeakMethod"}
        | {"WeakKeyDictionary", "WeakSet"}
    ),
}
# What ends with a process: locks, which nobody else holds there, and what is called when an object goes.
_LOCKS = frozenset({"Lock", "RLock", "Event", "Semaphore", "BoundedSemaphore", "Condition", "allocate_lock", "lock"})
_ENDING_PARTS = {"threading": _LOCKS, "thread": _LOCKS, "_thread": _LOCKS, "weakref": frozenset({"finalize"})}
# What is not harmless in plain ones: records of logging have the time.
_LOOSE_PARTS = {"logging": frozenset({"LogRecord", "makeLogRecord", "Formatter"})}
# (an interrupt is the curator's: a record that raised one would end the run; how far a recursion gets depends on how
# often its code has run)
_BUILTINS = frozenset(
    {"open", "exec", "eval", "compile", "__import__", "globals", "id", "hash", "input", "breakpoint", "__builtins__"}
    | {"KeyboardInterrupt", "RecursionError"}
)
_REFUSED_BUILTINS = (
    _BUILTINS,
    _BUILTINS - {"globals", "KeyboardInterrupt", "RecursionError"},
    _BUILTINS - {"globals", "KeyboardInterrupt", "RecursionError", "open", "input"},
)
# Ways around the guard of a region, counters inside tensors and generators, frames, registers of subclasses, code of
# computed names, sizes in memory, who refers to an object, clocks.
_ATTRIBUTE_WORDS = (
    "_version now utcnow today register co_names co_code CodeType loggerDict set_config set_option cache_info "
    "_sequence_nr __sizeof__ __alloc__ __weakref__ getweakrefs getweakrefcount spawn seed_seq _seed_seq datetime64 "
    "relativeCreated msecs formatTime timeit blocked_autorange fill_uninitialized_memory register_pytree_node "
    "add_safe_globals clear_safe_globals _autograd_function_id"
)
# What shows more than the record at hand: stacks of all records, frames of the engine, its hooks, addresses. These are
# not used under names that are spelt out as texts either (getattr).
_WINDOW_WORDS = (
    "_functorch get_unwrapped DisableTorchFunction DisableTorchFunctionSubclass _C _getframe f_globals f_locals f_back "
    "tb_frame gi_frame cr_frame ag_frame __subclasses__ __closure__ cell_contents _forward_hooks _forward_pre_hooks "
    "_backward_hooks data_ptr _cdata __hash__ _pop_mode _pop_mode_temporarily _push_mode _get_current_function_mode "
    "_get_current_function_mode_stack temporarily_clear_interpreter_stack __array_interface__ __array_struct__ ctypes "
    "byte_bounds buffer_info __warningregistry__"
)
_WINDOWS = frozenset(_WINDOW_WORDS.split())
_SPELT = _WINDOWS | {word for word in _ATTRIBUTE_WORDS.split() if "_" in word}  # as texts too: no word of a language
# Files that are written or mapped in C, of which nobody is told.
_FILE_WORDS = frozenset({"from_file", "memmap", "share_memory_"})
# Settings of torch that lie in C and are not among those that are put back.
_KEPT_SETTINGS = frozenset(
    {"set_default_dtype", "set_grad_enabled", "set_num_threads", "set_autocast_enabled", "set_rng_state"}
)
_SETTINGS = frozenset(name for name in dir(torch) if name.startswith(("set_", "_set_"))) - _KEPT_SETTINGS
_ATTRIBUTES = frozenset(_ATTRIBUTE_WORDS.split()) | _WINDOWS | _SETTINGS | _FILE_WORDS | STORAGES
# Of these, what ends with a process: counters inside of what a record holds, registers, settings.
_ENDING_ATTRIBUTES = _SETTINGS | frozenset(
    {"_version", "register", "loggerDict", "set_config", "set_option", "cache_info", "spawn", "seed_seq", "_seed_seq"}
    | {"register_pytree_node", "add_safe_globals", "clear_safe_globals"}
)
_CLOCK_WORDS = "now utcnow today datetime64 relativeCreated msecs formatTime timeit blocked_autorange"
_REFUSED_ATTRIBUTES = (
    _ATTRIBUTES,
    _ATTRIBUTES - _ENDING_ATTRIBUTES,
    _ATTRIBUTES - _ENDING_ATTRIBUTES - _FILE_WORDS - frozenset(_CLOCK_WORDS.split()),
)
# Of torch.backends: what sets something.
_SWITCH_WORDS = (
    "enabled benchmark deterministic allow_tf32 flags set_flags fp32_precision enable_flash_sdp enable_math_sdp"
)
_SWITCHES = frozenset(_SWITCH_WORDS.split())
# Where torch and confide keep what looks at all records at once; torch.func shows what is public of the first.
_BEHIND = ("torch._functorch", "torch._C", "torch.overrides", "torch.profiler", "torch.autograd.profiler")
_CLOCKS = "torch.utils.benchmark"
_BEHIND_OURS = ("confide.mechanism.clipping", "confide.sources")
# Functions of torch that are nobody's business (unwritten memory, axes of transforms, names that are put together) have
# names with a line in front. These are plain operations all the same.
_PLAIN_WORDS_OF_TORCH = (
    "_adaptive_avg _addmm _aminmax _assert _cast_ _check _coalesce _conj _convolution _euclidean _fake_quant _fft_ "
    "_foreach_ _fused_rms _grouped_mm _index_put _indices _int_mm _is_all_true _is_any_true _linalg_ _log_softmax "
    "_logcumsumexp _masked_softmax _native _neg_view _pack_padded _pad_packed _prelu _safe_softmax _sample_dirichlet "
    "_scaled _segment_reduce _shape_as_tensor _sobol _softmax _sparse_ _stack _standard_gamma _to_cpu _transformer "
    "_trilinear _unique _unsafe_ _values _weight_"
)
_PLAIN_OF_TORCH = tuple(_PLAIN_WORDS_OF_TORCH.split())
# What compiles: the compiler counts, in the names that it gives, what it has compiled.
_COMPILED = frozenset({"script", "trace", "trace_module", "freeze", "optimize_for_inference", "script_if_tracing"})
NAMED_FIELD: type = type(vars(namedtuple("Named", "one"))["one"])
# Python names these types; what they hold is put back, leads on to what is, or never changes.
_OPEN = frozenset(
    {object, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.CodeType}
    | {types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType, types.CellType}
    | {types.MethodWrapperType, types.GetSetDescriptorType, types.MemberDescriptorType, types.MappingProxyType}
    | {types.GenericAlias, types.SimpleNamespace, types.UnionType, type(Ellipsis), type(NotImplemented), memoryview}
    | {complex, type(None), range, slice, property, staticmethod, classmethod, super, functools.partial}
    | {threading.local, array}
    | {type(functools.lru_cache(lambda: None)), operator.itemgetter, operator.attrgetter, operator.methodcaller}
    | {re.Pattern, re.Match, contextvars.ContextVar, io.StringIO, io.BytesIO, np.ndarray, np.dtype, np.ufunc}
    | {NAMED_FIELD}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.Generator}
    | {torch.jit.ScriptFunction, torch.jit.ScriptFunction.__mro__[1], torch.jit.ScriptModule}
    | {io._io._TextIOBase, io._io._BufferedIOBase, io._io._IOBase}  # type: ignore[attr-defined]
    | {np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random}
    | set(random.Random.__mro__)
    | set(torch.Tensor.__mro__)
)
# Where the types live that lead to any memory of a process, to other processes or to threads; and those that lead to
# files and connections, which are closed in a process that is cut off, or to shared pages, which it can only read.
_OUTWARD_WORDS = (
    "_ctypes ctypes _cffi_backend _multiprocessing multiprocessing _posixshmem _sqlite3 sqlite3 _ssl ssl _asyncio "
    "asyncio subprocess concurrent"
)
_OUTWARD_MODULES = frozenset(_OUTWARD_WORDS.split())
_CLOSED_MODULES = frozenset({"_socket", "socket", "mmap", "select", "selectors"})
_OUTWARD = (threading.Thread, types.FrameType, torch.UntypedStorage, torch.TypedStorage)
_CLOSED = (
    io.FileIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair, io.TextIOWrapper
)  # fmt: skip
_CONTAINERS = (dict, list, set, deque, bytearray, tuple, frozenset, str, bytes, int, float)  # and what is made of them
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8  # flags of a type, as CPython's headers have them


@functools.cache
def has_hidden_state(kind: type) -> bool:
    """Whether instances keep something that was written in C and that nobody puts back."""
    if _behind(kind) or issubclass(kind, torch.TypedStorage):
        return True
    return any(_is_of_c(base) and not _is_open(base) for base in kind.__mro__)


@functools.cache
def leads_out(kind: type, level: int) -> bool:
    """Whether instances lead to what is not the record's own, in a process that is so far from others."""
    homes = {str(base.__module__).partition(".")[0] for base in kind.__mro__}
    if _behind(kind) or issubclass(kind, _OUTWARD) or homes & _OUTWARD_MODULES:
        return True
    return level < CUT_OFF and (issubclass(kind, _CLOSED) or bool(homes & _CLOSED_MODULES))


def _is_of_c(kind: type) -> bool:
    if not kind.__flags__ & _HEAP or kind.__flags__ & _IMMUTABLE or type(kind).__name__ == "pybind11_type":
        return True
    home = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return home.endswith((".so", ".pyd"))


def held_in_c(value: Any) -> list[Any]:
    """What an object that is made in C refers to: a slice, a method of a list, a variable of a context."""
    if not _is_of_c(type(value)):
        return []
    held = [one for one in gc.get_referents(value) if one is not type(value)]
    return [*held, value.get(None)] if isinstance(value, contextvars.ContextVar) else held


def _is_open(kind: type) -> bool:
    import datetime
    import decimal
    import weakref

    never_change = (
        datetime.date,
        datetime.datetime,
        datetime.time,
        datetime.timedelta,
        datetime.tzinfo,
        decimal.Decimal,
    )
    if kind in _OPEN or kind in never_change or issubclass(kind, (type, weakref.ref, *_CONTAINERS)):
        return True
    if issubclass(kind, np.generic):
        return not issubclass(kind, np.void)
    return kind in (weakref.ProxyType, weakref.CallableProxyType) or kind.__module__ in ("typing", "_abc", "_typing")


@functools.cache
def _uses(code: types.CodeType) -> tuple[frozenset[str], frozenset[tuple[str, ...]], frozenset[str]]:
    """Of a function and those inside it: names from outside it, chains name.attribute.attribute, all attributes."""
    names: set[str] = set()
    chains: set[tuple[str, ...]] = set()
    attributes: set[str] = set()
    before: tuple[str, ...] = ()
    last = ""
    for step in dis.get_instructions(code):
        named = str(step.argval)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME", "STORE_GLOBAL", "LOAD_DEREF"):
            names.add(named)
            before = (named,)
            if step.opname == "IMPORT_NAME":
                chains.add((named, ""))
                attributes.update(_SPELT.intersection(named.split(".")))
        elif step.opname == "LOAD_FAST":  # a module that was imported inside
            before = (named,)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM", "STORE_ATTR"):
            if named == "_nn" and last == "_C":  # kernels, which torch.nn.functional calls by these names too
                attributes.discard("_C")
            attributes.add(named)
            before, last = (*before, named) if before else (), named
            if before:
                chains.add(before)
        elif step.opname not in ("PRECALL", "CACHE", "PUSH_NULL"):
            before = ()
    for constant in code.co_consts:
        if isinstance(constant, str):
            attributes |= _SPELT.intersection(constant.split("."))
        elif isinstance(constant, types.CodeType):
            inner = _uses(constant)
            names, chains, attributes = names | inner[0], chains | inner[1], attributes | inner[2]
    return frozenset(names), frozenset(chains), frozenset(attributes)


def unsealable_in(function: types.FunctionType, level: int = HERE) -> str:
    """What the function uses that may not be used in a process so far from others; nothing: an empty text."""
    names, chains, attributes = _uses(function.__code__)
    builtin = _REFUSED_BUILTINS[level]
    space = function.__globals__
    closed = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    if "__warningregistry__" in names:  # counts how often filters of warnings were set, by anybody
        return "__warningregistry__"
    if looks_into_a_copy(function):
        return "the numbers by which copy.deepcopy knows objects, which are addresses"
    for name in sorted(names):
        value = closed[name].cell_contents if _is_filled(closed.get(name)) else space.get(name, _ABSENT)
        if value is _ABSENT and name in builtin and not (name == "hash" == function.__name__.strip("_")):
            return name  # (a class's own __hash__ may ask for others: nobody can ask for it)
        imported = sys.modules.get(name) if value is _ABSENT and (name, "") in chains else value
        if isinstance(imported, types.ModuleType):
            onwards = {chain[1:] for chain in chains if chain[0] == name}
            found = _in_module(imported, {chain[0] for chain in onwards}, attributes, level)
            found = found or next(
                filter(None, (_behind_module(imported, chain, level) for chain in sorted(onwards))), ""
            )
            if not found and imported.__name__.partition(".")[0] == "numpy":
                found = makes_arrays(function.__code__, {part for chain in onwards for part in chain})
            if not found and value is _ABSENT:  # it may have another name here
                found = next(filter(None, (_behind_module(imported, (one,), level) for one in sorted(attributes))), "")
        else:
            found = loose_part(value, level)
        if found:
            return found
    return next(iter(sorted(attributes & _REFUSED_ATTRIBUTES[level])), "")


def loose_part(value: Any, level: int = HERE) -> str:
    """The name of a function or a class of the standard library that cannot be put back; else an empty text."""
    if not isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        return ""
    if value is KeyboardInterrupt:
        return "" if level else "KeyboardInterrupt"
    if _behind(value) or gives_arrays(value):
        return f"{value.__module__}.{value.__name__}"
    if value.__name__[:1] == "_" and _is_hidden_in_torch(value.__name__, value):
        return f"torch.{value.__name__}"
    home = value.__self__ if isinstance(value, types.BuiltinFunctionType) else sys.modules.get(value.__module__ or "")
    if isinstance(value, types.BuiltinFunctionType) and not isinstance(home, types.ModuleType):
        return ""
    name, module = value.__name__, getattr(home, "__name__", "")
    if (
        isinstance(value, types.BuiltinFunctionType)
        and name in _REFUSED_BUILTINS[level]
        and (module in ("builtins", "io", "_io"))
    ):
        return name
    loose = module != "builtins" and is_loose(home, level) and name not in _plain_parts(module.lstrip("_"), level)
    loose = loose or name in _LOOSE_PARTS.get(module, ())
    return f"{module}.{name}" if loose else ""


def _plain_parts(module: str, level: int) -> frozenset[str]:
    plain = _PLAIN_PARTS.get(module, frozenset())
    return plain | _ENDING_PARTS.get(module, frozenset()) if level else plain


def _behind(value: Any) -> bool:
    """Whether this part of torch or of confide shows more than one record."""
    home, name = str(getattr(value, "__module__", "")), getattr(value, "__name__", "")
    if home.startswith(_BEHIND_OURS):
        # what a source asks of one record is made inside a function of its own; nobody else can name it
        # (its name can be written to, that of its code cannot; a wrapper has the name of what it wraps)
        code = getattr(value, "__code__", None)
        names = (getattr(value, "__qualname__", ""), getattr(code, "co_qualname", ""))
        asked = home.startswith("confide.sources") and all("<locals>" in name for name in names)
        return not isinstance(value, type) and not asked
    if home.startswith(_CLOCKS):
        return True
    if not home.startswith(_BEHIND) or getattr(torch.func, name, None) is value:
        return False
    if home.startswith("torch.overrides"):
        return name.startswith("_")
    if home.startswith(("torch.profiler", "torch.autograd.profiler")):
        return name != "record_function"
    return home.startswith(("torch._functorch", "torch._C._functorch"))


def held_part(module: types.ModuleType, function: types.FunctionType, level: int = HERE) -> str:
    """What a function may ask of a standard module that it holds under a name of its own, in an attribute or a list."""
    if not is_loose(module, level):
        return ""
    harmless = _plain_parts(module.__name__, level)
    used = _uses(function.__code__)[2].difference(harmless).intersection(vars(module))
    return f"{module.__name__}.{min(used)}" if used else ""


def _is_hidden_in_torch(name: str, value: Any) -> bool:
    """A function that torch keeps for itself, and not a plain operation."""
    if name[:1] != "_" or name[:2] == "__" or name.startswith(_PLAIN_OF_TORCH):
        return False
    return isinstance(value, types.FunctionType | types.BuiltinFunctionType) and vars(torch).get(name) is value


def _is_filled(cell: Any) -> bool:
    try:
        return cell is not None and cell.cell_contents is not _ABSENT
    except ValueError:
        return False


def _in_module(module: types.ModuleType, parts: set[str], attributes: frozenset[str], level: int) -> str:
    name = module.__name__
    if name == "torch" and "ops" in parts and "aten" not in attributes and not level:
        return "torch.ops, an operator that may keep something"
    if name == "torch" and "save" in attributes:
        return "torch.save"
    hidden = sorted(part for part in parts if name == "torch" and _is_hidden_in_torch(part, vars(module).get(part)))
    if hidden:
        return f"torch.{hidden[0]}"
    if name == "torch" and "jit" in parts and attributes & _COMPILED and not level:
        return "torch.jit, which counts what it compiles"
    if name.partition(".")[0] == "torch" and {"profiler", "profile"} <= attributes:
        return "torch.profiler"
    if name.startswith(_BEHIND_OURS) and parts - {""}:
        return f"{name}.{min(parts - {''})}"
    if name == "torch" and "backends" in parts and attributes & _SWITCHES and not level:
        return "torch.backends"
    wrong = sorted(parts & _LOOSE_PARTS.get(name, frozenset()))
    if wrong:
        return f"{name}.{wrong[0]}"
    if not is_loose(module, level):
        private = [] if level else sorted(part for part in parts if part[:1] == "_" and part[:2] != "__")
        standard = name.partition(".")[0] in sys.stdlib_module_names and is_known(module)
        return f"{name}.{private[0]}" if private and standard else ""
    wrong = sorted(part for part in parts - {""} if part not in _plain_parts(name, level))
    return f"{name}.{wrong[0]}" if wrong else ("" if parts - {""} else name)


def _behind_module(module: types.ModuleType, chain: tuple[str, ...], level: int) -> str:
    """What a chain of attributes reaches by way of a module that another one holds for itself (logging.sys)."""
    for place, part in enumerate(chain):
        value = vars(module).get(part)
        if not isinstance(value, types.ModuleType):
            return loose_part(value, level) if is_installed(module) else ""
        if is_loose(value, level):
            then = chain[place + 1] if place + 1 < len(chain) else ""
            return "" if then in _plain_parts(value.__name__, level) else f"{module.__name__}.{value.__name__}"
        module = value
    return ""


def is_loose(module: Any, level: int = HERE) -> bool:
    """A standard module whose state is the interpreter's or the machine's."""
    if not isinstance(module, types.ModuleType):
        return False
    first = module.__name__.partition(".")[0]
    known = _KNOWN_MODULES[level]
    plain = first not in _LOOSE_IN_C and (first in known or first.lstrip("_") in known)
    return first in sys.stdlib_module_names and not plain and is_known(module)


_ABSENT = object()
