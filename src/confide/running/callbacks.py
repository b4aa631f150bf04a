"""Callbacks: what may be seen of a run while it lasts. All of it is public: functions of releases, and of data that the
user declares to be public.

    confide.fit(method, module, data, plan, validation=(x, y),
                callbacks=[JsonLines("run.jsonl"), EarlyStopping("nll", patience=3)])

A callback is called with a `Moment` about twenty times in a run, or every `every` steps, and after the last. One that
returns True ends the run there: what it had left is paid for and not used. One that raises ends it too where there is a
checkpoint, from which it goes on; without one the run goes on without the callback, for what is paid for is not lost.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, TextIO, TypeAlias

import torch
from torch import Tensor

from confide.errors import CallbackWarning, Refusal
from confide.evaluate.metrics import LARGER_IS_BETTER, SMALLER_IS_BETTER, evaluate, refuse_private
from confide.methods.base import Method, Problem
from confide.models.predictive import Predictive
from confide.posteriors.base import Posterior
from confide.posteriors.draws import Draws
from confide.running.live import LiveCurves, in_notebook, progress_in_notebook
from confide.wording import plain

__all__ = ["Callback", "EarlyStopping", "JsonLines", "LiveCurves", "Moment", "TensorBoard", "Validation"]

USUAL_LOOKS = 20  # in a run: as often as checkpoints are written

Validation: TypeAlias = tuple[Any, Tensor]


@dataclass(frozen=True)
class Moment:
    """The public state of a run after a step.

    step, steps   how many are done, and how many there are
    posterior     what has been learnt so far; a sampler that has kept no draw yet shows where it stands
    """

    step: int
    steps: int
    posterior: Posterior = field(repr=False)
    validation: Validation | None = field(default=None, repr=False)

    @cached_property
    def predictive(self) -> Predictive | None:
        """What it predicts on the public validation inputs; None without them."""
        return None if self.validation is None else self.posterior.predict(self.validation[0])

    @cached_property
    def metrics(self) -> dict[str, float]:
        """How good that is; empty without a validation set."""
        if self.validation is None or self.predictive is None:
            return {}
        return evaluate(self.predictive, self.validation[1])


class Callback(Protocol):
    """Anything that can be called with a moment; True ends the run."""

    def __call__(self, moment: Moment) -> bool | None: ...


@dataclass(frozen=True)
class JsonLines:
    """One line of JSON for every look: step, steps and metrics. A line is on the disk before the next step."""

    path: str | os.PathLike[str]
    every: int | None = None

    def __post_init__(self) -> None:
        if not Path(self.path).absolute().parent.is_dir():
            raise Refusal(f"path={str(self.path)!r}: its folder does not exist; create it first")

    def __call__(self, moment: Moment) -> None:
        line = json.dumps(plain({"step": moment.step, "steps": moment.steps, "metrics": moment.metrics}))
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


class TensorBoard:
    """The metrics as curves for TensorBoard, in a directory; needs the extra confide[tensorboard]."""

    def __init__(self, directory: str | os.PathLike[str], every: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ImportError("tensorboard: not installed; pip install 'confide[tensorboard]'") from None
        self.every = every
        make: Any = SummaryWriter
        self._writer = make(str(directory))

    def __call__(self, moment: Moment) -> None:
        for name, value in moment.metrics.items():
            self._writer.add_scalar(f"validation/{name}", value, moment.step)
        self._writer.flush()


@dataclass
class EarlyStopping:
    """End a run whose metric on the public validation set has not improved for `patience` looks.

    The stopped posterior is the last one. Nothing of the budget comes back: all steps were paid for before the first.
    """

    metric: str = "nll"
    patience: int = 3
    every: int | None = None
    needs_validation: ClassVar[bool] = True
    best: float = field(default=math.inf, init=False)
    waited: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.metric not in (*SMALLER_IS_BETTER, *LARGER_IS_BETTER):
            raise Refusal(
                f"metric={self.metric!r}: must be one of {', '.join((*SMALLER_IS_BETTER, *LARGER_IS_BETTER))}"
            )
        if self.patience < 1:
            raise Refusal(f"patience={self.patience}: must be at least 1")

    def __call__(self, moment: Moment) -> bool:
        if self.metric not in moment.metrics:
            raise Refusal(f"metric={self.metric!r}: is not measured here; choose from {', '.join(moment.metrics)}")
        value = moment.metrics[self.metric] * (-1 if self.metric in LARGER_IS_BETTER else 1)
        if value < self.best:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.waited >= self.patience


class CallbackWatch:
    """Calls the callbacks of one run; `after` says whether one of them wants it to end."""

    def __init__(
        self,
        callbacks: Sequence[Callable[[Moment], Any]],
        validation: Validation | None,
        method: Method,
        kept: bool,
        look: Callable[[Any], tuple[Posterior, bool]],
        steps: int,
    ) -> None:
        self.left, self.validation, self.kept = list(callbacks), validation, kept
        self.look, self.steps = look, steps
        self.may_stop = method.may_stop
        self.ended = 0

    def after(self, step: int, state: Any) -> bool:
        due = [one for one in self.left if step == self.steps or step % _every(one, self.steps) == 0]
        if not due:
            return False
        posterior, whole = self.look(state)
        moment = Moment(step, self.steps, posterior, self.validation)
        wanted = [self._called(one, moment) for one in due]
        if any(wanted) and whole and self.may_stop and step < self.steps:
            self.ended = step
        return bool(self.ended)

    def _called(self, callback: Callable[[Moment], Any], moment: Moment) -> bool:
        try:
            return callback(moment) is True
        except Exception as error:
            if self.kept:
                raise
            self.left = [one for one in self.left if one is not callback]
            _tell_of("callbacks", callback, error)
            return False


def check_callbacks(callbacks: Sequence[Any], validation: Any, method: Method, alone: bool) -> None:
    """Refuse what could not be called, before anything is charged."""
    for one in callbacks:
        if not callable(one):
            raise TypeError(f"callbacks: {one!r} must be a function of a confide.callbacks.Moment")
        if getattr(one, "needs_validation", False) and validation is None:  # a plain function has no such word
            raise Refusal(f"callbacks: {_name(one)} needs public records to look at; give validation=(x, y)")
        if isinstance(one, EarlyStopping) and not method.may_stop:
            raise Refusal(
                f"method={method.name!r}: its posterior belongs to all of its steps, so it cannot stop early; leave "
                "EarlyStopping out"
            )
    if callbacks and not alone:
        raise Refusal("callbacks: are for runs of one process; leave them out under torchrun")
    if validation is None:
        return
    if not (isinstance(validation, tuple) and len(validation) == 2):
        refuse_private("validation", validation)
        raise TypeError("validation: must be (x, y), records that you declare to be public")
    for part in validation:
        refuse_private("validation", part)
    if not isinstance(validation[1], Tensor):
        raise TypeError(f"validation: must hold tensors, not {type(validation[1]).__name__}")


def progress_line(file: TextIO) -> Callable[[int, int], None]:
    """A function for `progress=` that keeps one line of a terminal up to date, or a bar of a notebook."""
    if in_notebook():
        return progress_in_notebook()

    def progress(done: int, total: int) -> None:
        if done == total or done % max(1, total // 100) == 0:
            file.write(f"\rstep {done:,} of {total:,} ({done / total:.0%})" + ("\n" if done == total else ""))
            file.flush()

    return progress


def guarded(progress: Callable[[int, int], None] | None, kept: bool) -> Callable[[int, int], None]:
    """`progress` as a fit calls it: like a callback, it cannot lose what is paid for where nothing is kept.

    A terminal that has gone away is enough to make it raise.
    """
    left = [] if progress is None else [progress]

    def called(done: int, total: int) -> None:
        try:
            for one in left:
                one(done, total)
        except Exception as error:
            if kept:
                raise
            _tell_of("progress", left.pop(), error)

    return called


def _tell_of(argument: str, function: Any, error: Exception) -> None:
    warnings.warn(
        f"{argument}: {_said(lambda: _name(function))} raised {type(error).__name__} ({_said(lambda: str(error))}) and "
        "is not called again; the run is paid for and goes on",
        CallbackWarning,
        stacklevel=5,
    )


def _said(text: Callable[[], str]) -> str:
    """What somebody else's object says of itself, which may raise as well."""
    try:
        return text()
    except Exception:
        return "without a name"


def so_far(method: Method, problem: Problem, state: Any) -> tuple[Posterior, bool]:
    """What a run that is not over has learnt, and whether the run could end with it.

    `problem` is a copy, on which nothing else rests.
    """
    generator = torch.Generator()
    generator.set_state(problem.generator.get_state())
    try:
        return method.posterior(replace(problem, generator=generator), state), True
    except Exception:  # a sampler before its first draw
        here = problem.position.clone()[None]
        return Draws(problem.module, problem.likelihood, here, torch.ones(1, dtype=here.dtype)), False


def _every(callback: Any, steps: int) -> int:
    every = getattr(callback, "every", None)  # a plain function has none
    return every if isinstance(every, int) and every > 0 else max(1, math.ceil(steps / USUAL_LOOKS))


def _name(callback: Any) -> str:
    return str(getattr(callback, "__name__", type(callback).__name__))
