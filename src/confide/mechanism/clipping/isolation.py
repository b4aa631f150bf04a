"""Records that cannot see each other: user code runs on batches of one, all of them at once.

Inside a `Region` every tensor that depends on a record is a stack over the records whose axis is hidden (torch's vmap):
code sees a batch of one record, whatever it does. Neither the number of records, nor their order, nor a neighbour can
be reached, and the derivative of such a map is block-diagonal, so the backward pass keeps records apart too. What this
trusts: torch's batching rules. What vmap leaves open is closed by `_Guard`, which sees every operation inside:

    memory       a stack kept from another pass (in an attribute, a list, a global) is refused where it is used, and
                 emptied when the step is over
    randomness   numbers come from torch's own generator, which nobody may set in between; drawn with a generator of
                 the module's own, or one at a time, they are the same for all records, in however many passes these
                 are answered (`randomness`); so no mask depends on a record's position
    windows      what shows a whole stack (repr), how it lies in memory (strides, offsets, resizing), or lets user code
                 handle one (its own vmap rules), is refused
    errors       an operation raises for all records if it raises for one, so code that goes on after an error (`try`
                 around a look-up or a Cholesky factor) would go another way for all; the error ends the pass anyway
    rounding     numbers of less than single precision, whatever makes them, are told (`places`): a statement says so

Refused means `NotIsolable`: the engine then takes the records one by one. This file and `batching` are the only ones
that speak to the private parts of torch.func.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch as functorch
from torch._C._functorch import TransformType
from torch._functorch import autograd_function
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from confide.data.trees import map_tensors
from confide.devices import generators
from confide.mechanism.clipping import randomness
from confide.mechanism.clipping.batching import INSTEAD
from confide.mechanism.clipping.intact import uncompiled
from confide.mechanism.clipping.once import at_work
from confide.mechanism.clipping.places import SHORT, tell_of_uneven
from confide.mechanism.clipping.watched import looked_after


class NotIsolable(Exception):  # noqa: N818 - a way to turn, not an error that anybody sees
    """The code cannot run on all records at once without a way to see several of them."""


INSIDE: list[Callable[[], AbstractContextManager[Any]]] = []
"""What else holds while a region lasts (`own_functions`, which needs regions itself)."""


class Region:
    """User code between `enter` and `leave` sees one record at a time, `rows` times."""

    def __init__(self, records: int, rows: int = 1) -> None:
        self.records, self.rows = records, rows
        self.level = -1
        self.pass_mark = object()
        self.stacks: list[weakref.ref[Tensor]] = []

    @contextmanager
    def entered(self) -> Iterator[Region]:
        if functorch.maybe_current_level() is not None:
            raise NotIsolable("clipping inside of torch.func transforms")
        with ExitStack() as stack:
            warn_of_loops: Any = vars(functorch)["_set_vmap_fallback_warning_enabled"]
            stack.callback(warn_of_loops, True)
            warn_of_loops(False)  # what has no batching rule is looped over: fine
            # what a forward packs away would be unpacked by its own code during the backward pass, out of this region
            stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks("saved-tensor hooks of a module"))
            self.level = functorch._vmap_increment_nesting(self.records, "different")
            stack.callback(functorch._vmap_decrement_nesting)
            stack.enter_context(looked_after())
            stack.enter_context(uncompiled())
            for held in INSIDE:
                stack.enter_context(held())
            guard = stack.enter_context(_Guard(self.pass_mark, self.stacks))
            before = _ACTIVE.guard, _ACTIVE.region
            _ACTIVE.passed.append(self.stacks)
            stack.callback(lambda: vars(_ACTIVE).update(guard=before[0], region=before[1]))
            _ACTIVE.guard, _ACTIVE.region = guard, self
            stack.callback(randomness.rewind)
            try:
                yield self
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                guard.check_errors()  # whatever code does after an error: the error decides which way records go on
                if isinstance(error, Exception):
                    raise
                # a record that ends the process (SystemExit) would tell of itself
                raise NotIsolable(f"raises {type(error).__name__}") from None
            guard.check_generator()
            guard.check_errors()

    def wrap(self, values: Tensor) -> Tensor:
        """(records, ...) as what one record has of it."""
        wrapped: Tensor = functorch._add_batch_dim(values, 0, self.level)
        wrapped._confide_pass = self.pass_mark  # type: ignore[attr-defined]
        self.stacks.append(weakref.ref(wrapped))
        return wrapped

    def one_each(self, tree: Any) -> Any:
        """Tensors (records, ...) as batches of one record, repeated for every row."""

        def batch_of_one(tensor: Tensor) -> Tensor:
            one = tensor.unsqueeze(1)
            return self.wrap(one if self.rows == 1 else one.expand(-1, self.rows, *tensor.shape[1:]))

        with unguarded():
            return map_tensors(batch_of_one, tree)

    def axis(self, values: Tensor) -> int | None:
        """Where the records are in what lies underneath; None for a tensor that depends on no record."""
        axis = functorch.maybe_get_bdim(values)
        return None if axis < 0 else axis

    def underneath(self, values: Tensor) -> Tensor:
        return values if functorch.maybe_get_bdim(values) < 0 else functorch.get_unwrapped(values)

    def stacked(self, values: Tensor) -> Tensor:
        """(records, ...): out of the region; what depends on no record is given to each."""
        axis = functorch.maybe_get_bdim(values)
        if axis < 0:
            return values.expand(self.records, *values.shape)
        raw: Tensor = functorch.get_unwrapped(values)
        if functorch.is_functorch_wrapped_tensor(raw):
            raise NotIsolable("a tensor of another vmap")
        return raw.movedim(axis, 0) if axis else raw


@contextmanager
def unguarded() -> Iterator[None]:
    """The engine's own operations inside a region."""
    with torch._C.DisableTorchFunction():
        yield


# The engine's own operations on stacks of all records, where no vmap is to be seen.
outside = temporarily_clear_interpreter_stack


class _Active(threading.local):
    def __init__(self) -> None:
        self.guard: _Guard | None = None
        self.region: Region | None = None
        self.passed: list[list[weakref.ref[Tensor]]] = []


_ACTIVE = _Active()


def is_inside() -> bool:
    """Whether this thread is in a region."""
    return _ACTIVE.guard is not None


def current_region() -> Region | None:
    """The region that this thread is in, and in no transform inside of it."""
    region = _ACTIVE.region
    if region is not None and functorch.maybe_current_level() != region.level:
        raise NotIsolable("has a torch.autograd.Function inside of a transform")
    return region


def forget() -> None:
    """Empty every stack that outlived its pass, wherever user code has kept it: a list, a cache, a global."""
    passed, _ACTIVE.passed = _ACTIVE.passed, []
    for stacks in passed:
        for reference in stacks:
            below = reference()
            while below is not None and functorch.is_functorch_wrapped_tensor(below):  # transforms inside of the region
                below = functorch.get_unwrapped(below)
            if below is not None:
                below.data = below.new_empty(0)


# what every operation passes ------------------------------------------------------------------------------------

_REFUSED = {
    Tensor.__repr__: "looks at a tensor's numbers",
    Tensor.__format__: "looks at a tensor's numbers",
    Tensor.register_hook: "registers a gradient hook",
    Tensor.retain_grad: "asks for a gradient in its forward",
    Tensor.backward: "runs a backward pass of its own",
    torch.autograd.grad: "runs a backward pass of its own",
    Tensor.storage_offset: "looks at how a tensor lies in memory",
    Tensor.data_ptr: "looks at where a tensor lies in memory",
    **dict.fromkeys(
        (Tensor.resize_, Tensor.resize_as_, Tensor.resize, Tensor.resize_as, torch.resize_as_),
        "resizes a tensor, which would show the memory behind it",
    ),
}
# What these give has never been written to: whatever another record left in that memory.
UNWRITTEN: frozenset[Any] = frozenset(
    {torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted, Tensor.new_empty, Tensor.new}
    | {Tensor.new_empty_strided}
)
_UNWRITTEN_BY_NAME = ("empty", "new_empty", "resize", "_resize", "_empty")  # as torch.ops.aten has them
_UNWRITTEN_IN_TORCH = ("_empty", "empty_quantized", "_resize")  # and torch itself
_UNWRITTEN_IN_PART = ("_ctc_loss", "mkldnn_rnn_layer")
profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled  # as it was when confide was imported
_LAYOUT = frozenset({Tensor.stride, Tensor.is_contiguous})
_FRESH = (
    "rand randn randint randperm normal bernoulli poisson multinomial rand_like randn_like randint_like dropout "
    "dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout "
    "feature_alpha_dropout_ native_dropout rrelu rrelu_ binomial _standard_gamma _sample_dirichlet "
    "lstm gru rnn_tanh rnn_relu"
)
_IN_PLACE = "normal_ uniform_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_ random_ bernoulli multinomial"
_COMPOSED = (
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu rrelu_ gumbel_softmax "
    "scaled_dot_product_attention multi_head_attention_forward fractional_max_pool2d fractional_max_pool3d "
    "fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices"
)
RANDOM: frozenset[Any] = frozenset(
    getattr(owner, name)
    for owner, names in ((torch, _FRESH), (Tensor, _IN_PLACE), (F, _COMPOSED))
    for name in names.split()
    if hasattr(owner, name)
)


_SINGLE = frozenset({torch.rand, torch.randn, torch.randint})
_NEEDS_GRADIENT: frozenset[Any] = frozenset({vars(torch._C.TensorBase)["requires_grad"].__get__})  # equal, not the same


def _needs_gradient(values: Tensor) -> bool:
    """As one record alone would have it: a stack's own answer is no, so that code would leave its hooks out."""
    while functorch.is_functorch_wrapped_tensor(values):
        values = functorch.get_unwrapped(values)
    return bool(values.requires_grad)


def _lies_as_alone(values: Tensor) -> bool:
    """Whether its strides are those of one record's tensor, whatever the number of records."""
    if not functorch.is_batchedtensor(values):
        return True
    return bool(functorch.maybe_get_bdim(values) == 0 and functorch.get_unwrapped(values).is_contiguous())


def clear(function: Any, args: Sequence[Any], result: Any) -> None:
    """Zero what a function gave that nobody has written to."""
    if function in UNWRITTEN and (function is not Tensor.new or all(isinstance(one, int | tuple) for one in args[1:])):
        with torch.no_grad():
            result.zero_()


def shows_memory(function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function gives memory that it has not written to, in a way that cannot be cleared afterwards.

    torch pads in circles by copying from its own result, which for a negative number reads what is not yet written;
    writes nothing for a mode of sampling on a grid that it does not know; beside a CTC loss gives a table of which it
    fills a part, and beside a recurrent layer a workspace.
    """
    by_name = isinstance(function, OpOverload | OpOverloadPacket) and name.startswith(_UNWRITTEN_BY_NAME)
    if by_name or name.startswith(_UNWRITTEN_IN_TORCH) or any(word in name for word in _UNWRITTEN_IN_PART):
        return True
    if "pad" not in name and "grid_sampler" not in name:
        return False
    given = [*args, *kwargs.values()]
    if "grid_sampler" in name:
        return any(type(one) is not bool and isinstance(one, int) and one not in (0, 1, 2) for one in given)
    numbers = [number for one in given if isinstance(one, tuple | list) for number in one]
    constant = name in ("pad", "constant_pad_nd") and not any(
        isinstance(one, str) and one != "constant" for one in given
    )
    return not constant and any(isinstance(number, int) and number < 0 for number in numbers)


def _check_normalised(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """What is normalised over is a record's own: vmap would count the axis of the records among the last ones."""
    if "layer_norm" not in name and "rms_norm" not in name:
        return
    given = dict(zip(("input", "normalized_shape"), args, strict=False)) | kwargs
    values, last = given.get("input"), tuple(given.get("normalized_shape") or ())
    fits = isinstance(values, Tensor) and 0 < len(last) <= values.dim() and values.shape[-len(last) :] == last
    if not fits or "backward" in name:
        raise NotIsolable("normalises over something else than the last axes of a record")


def _states() -> list[Tensor]:
    return [generator.get_state() for generator in generators()]


class _Guard(TorchFunctionMode):
    """Looks at every operation inside a region; see above."""

    def __init__(self, pass_mark: object, stacks: list[weakref.ref[Tensor]]) -> None:
        super().__init__()
        self.pass_mark, self.stacks = pass_mark, stacks
        self.state, self.profiled = _states(), profiled()
        self.error: Exception | None = None  # the first one, whether or not user code goes on after it

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return self._passed(function, args, kwargs)
        except Exception as error:
            self.error = self.error or error
            raise

    def _passed(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        self._check_arguments(function, args)
        if torch._C._len_torch_dispatch_stack() != at_work() or profiled() is not self.profiled:
            raise NotIsolable("enters a mode that sees whole stacks")
        if kwargs is None:
            kwargs = {}
        elif kwargs:
            self._check_arguments(function, kwargs.values())
            if kwargs.get("generator") is not None:
                return self._same_for_all(function, args, kwargs)
        if function in _REFUSED:
            raise NotIsolable(_REFUSED[function])
        if function in _NEEDS_GRADIENT:
            return _needs_gradient(args[0])
        if function in _LAYOUT and not _lies_as_alone(args[0]):
            raise NotIsolable("looks at how a tensor lies in memory")
        if isinstance(function, OpOverload | OpOverloadPacket) and not str(function).startswith("aten."):
            raise NotIsolable(f"calls {function}, an operator that may have a vmap rule of its own")
        name = getattr(function, "__name__", "")
        if "_norm" in name:
            _check_normalised(name, args, kwargs)
        if shows_memory(function, name, args, kwargs):
            raise NotIsolable(f"calls {name} so that it shows memory which nobody has written to")
        if function in RANDOM:
            self.check_generator()
            result = self._draw(function, args, kwargs)
            self.state = _states()
        else:
            result = INSTEAD.get(function, function)(*args, **kwargs)
            clear(function, args, result)
        self.mark(result)
        return result

    def _check_arguments(self, function: Any, values: Any) -> None:
        for value in values:
            if isinstance(value, Tensor):
                if functorch.is_batchedtensor(value) and value.__dict__.get("_confide_pass") is not self.pass_mark:
                    raise NotIsolable("uses a tensor that another pass, or an inner transform, left behind")
            elif isinstance(value, tuple | list):
                self._check_arguments(function, value)
            elif isinstance(value, dict):
                self._check_arguments(function, value.values())
            elif type(value) is FunctionType and type(function) is FunctionType:
                raise NotIsolable(f"gives a function to {function.__name__}")

    def mark(self, result: Any) -> None:
        if isinstance(result, Tensor):
            if result.dtype in SHORT:
                tell_of_uneven()
            if functorch.is_functorch_wrapped_tensor(result):
                result.__dict__["_confide_pass"] = self.pass_mark
                self.stacks.append(weakref.ref(result))
        elif isinstance(result, tuple | list):
            for part in result:
                self.mark(part)

    def check_generator(self) -> None:
        """Nobody has set or used the generator in a way that was not seen: its numbers stay free of any position."""
        if not all(map(torch.equal, _states(), self.state)):
            raise NotIsolable("sets torch's random numbers in its forward")

    def check_errors(self) -> None:
        """Whether an operation raises depends on all records at once, so no code may go on after it."""
        if self.error is not None:
            raise self.error

    def _draw(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A single number (which layers to skip in this pass) is drawn once for all records, as in any batch."""
        if function in _SINGLE and (args[-1:] or (kwargs.get("size"),))[0] in ((), [], torch.Size([])):
            return self._same_for_all(function, args, kwargs)
        return INSTEAD.get(function, function)(*args, **kwargs)

    def _same_for_all(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Numbers from a generator of the module's own: as one record alone would have drawn them."""
        if function not in RANDOM or any(
            functorch.is_batchedtensor(value) for value in args if isinstance(value, Tensor)
        ):
            raise NotIsolable("draws random numbers for its records with a generator of its own")
        with temporarily_clear_interpreter_stack(), randomness.common_to_all(kwargs.get("generator")):
            return function(*args, **kwargs)


# functions of the user's own ------------------------------------------------------------------------------------


def _refused_inside(rule: Callable[..., Any]) -> Callable[..., Any]:
    """No vmap rule of a function's own runs: it would see all records. `own_functions` has what runs instead."""

    def watched(*arguments: Any, **options: Any) -> Any:
        if _ACTIVE.guard is not None:
            raise NotIsolable("has a torch.autograd.Function of its own")
        return rule(*arguments, **options)

    return watched


def _install() -> None:
    """Once for the process; outside of a region nothing is changed."""
    table = autograd_function.custom_function_call.functorch_table
    table[TransformType.Vmap] = _refused_inside(table[TransformType.Vmap])


_install()
