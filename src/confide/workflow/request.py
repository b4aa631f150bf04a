"""Request: one fit, asked for in full. The command line, the estimators and Python each make one and hand it on.

What is None is filled in by a public rule (`confide.rules`), the same one whoever asks. Checking a request
needs no record: `check` refuses what cannot be done before a file is read or a record looked at.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from confide import methods, rules
from confide.data.pictures import is_picture
from confide.data.roles import check_class_weight
from confide.data.schema import Schema, Task
from confide.data.table import Table
from confide.devices import named
from confide.distributed import Ranks
from confide.errors import DataError, Refusal
from confide.mechanism.gaussian import CLIPPING_STYLES, ClippingStyle
from confide.methods.base import Method, check_method
from confide.models.likelihoods import Likelihood
from confide.models.priors import Prior
from confide.privacy.calibration import check_target
from confide.privacy.events import ADJACENCIES, SAMPLINGS, Adjacency, Sampling
from confide.privacy.ledger import Ledger
from confide.running.callbacks import Moment
from confide.running.journal import CheckpointPlace, Checkpoints
from confide.wording import hyphened, is_real, is_whole
from confide.workflow.named_likelihood import check_name

LABELS = 256
"""Whole numbers of one byte, from 0: what labels of pictures may be where nobody declared the classes."""


@dataclass(frozen=True, eq=False)
class Request:
    """Everything that a fit needs.

    Parameters
    ----------
    data : Table
        The private records with their labels.
    epsilon, delta : float
        The budget of everything that this fit releases, all chains and side questions together.
    facts : Schema
        The public facts: bounds, categories, classes, the nominal number of records.
    assume_public : bool
        Read facts that are left open off the data; the privacy statement then says so.
    task : "classification", "regression" or None
        None: what the facts say, or with `assume_public` what the target looks like.
    method : str or Method
        A name from `confide.methods.names()`, "auto" for the rule's choice, or a method with its settings.
    prior : Prior or None
        Of the weights, for a method given by name; None: the method's own.
    module : Module or None
        The network; None: one of confide's own, of the widths `hidden`.
    hidden : tuple of int or None
        Widths of the hidden layers; () for a linear model, None for the public rule.
    likelihood : Likelihood, str or None
        One of `confide.likelihoods`, or the name of one that needs no more than the facts: "poisson" and
        "negative-binomial" for counts, "laplace" and "student-t" for numbers with outliers (around the model by
        `noise_scale`), "ordinal" for classes in the declared order. None: the usual one of the task.
    noise_scale : float or None
        Regression: the standard deviation of the target around the model, where its bounds are scaled to [-1, 1].
        None: learnt from a private histogram of residuals, within epsilon.
    batch, epochs, steps, clip
        The plan; None: the public rule. Give `epochs` or `steps`.
    clipping : "flat", "per-layer" or "automatic"
        How an answer is cut to the clip.
    adaptive_clip : float or None
        Share of the answers that the clip should leave alone: it then follows their norms, by counts that are paid for
        within epsilon. None: the clip stays.
    clip_schedule : tuple of float
        In place of `clip`: clips that change over time, each for an equal part of the steps. Noise goes with the clip.
    sampling, adjacency
        How batches are drawn, and what one person changes.
    secure : bool
        Noise on a lattice, against attacks on the low-order bits of floating-point numbers.
    device : str, torch.device or None
        Where the network is, such as "cuda"; None: where `module` is, or else on the host.
    chains : int
        Independent chains of a sampler within the one budget.
    checkpoint : path, Checkpoints or None
        Where the run is kept, so that the same request goes on after it was killed.
    ledger : Ledger, path or None
        Where the fit is charged; None: an account in memory, which ends with the process.
    name : str
        The data set's name in the ledger.
    class_weight : mapping of labels to numbers or None
        Public weights of classes; the largest counts as 1. Weights of records come with the data (`Table.weights`,
        or the column that the facts name), from 0 to the public `largest_weight` of the facts.
    callbacks : sequence of functions
        Called with the public state of the run now and then, see `confide.callbacks`; for one chain in one process.
    validation : Table or None
        Records with labels that you declare to be public, for the callbacks: predictions on them and how good they are.
    hold_out : Table or None
        Fresh records like these, that the user declares to be public: how far they would have moved every answer gives
        a Bayesian epsilon beside the DP one, for records drawn like them. They are not learnt from.
    seed : int or None
        For tests only: noise that can be reproduced protects nothing, and the statement claims nothing.
    ranks : Ranks or None
        The processes that make the fit together, from `confide.distributed.start`; each has the same request.
    """

    data: Table
    epsilon: float = rules.EPSILON
    delta: float = rules.DELTA
    facts: Schema = field(default_factory=Schema)
    assume_public: bool = False
    task: Task | None = None
    method: str | Method = "auto"
    prior: Prior | None = None
    module: nn.Module | None = None
    hidden: tuple[int, ...] | None = None
    likelihood: Likelihood | str | None = None
    noise_scale: float | None = None
    batch: int | None = None
    epochs: float | None = None
    steps: int | None = None
    clip: float | None = None
    clipping: ClippingStyle = "flat"
    adaptive_clip: float | None = None
    clip_schedule: tuple[float, ...] = ()
    sampling: Sampling = rules.SAMPLING
    adjacency: Adjacency = rules.ADJACENCY
    secure: bool = False
    device: str | torch.device | None = None
    chains: int = 1
    checkpoint: CheckpointPlace = None
    ledger: Ledger | str | os.PathLike[str] | None = None
    name: str = ""
    class_weight: Mapping[Any, float] | None = None
    hold_out: Table | None = None
    seed: int | None = None
    ranks: Ranks | None = None
    callbacks: Sequence[Callable[[Moment], Any]] = ()
    validation: Table | None = None

    def __post_init__(self) -> None:
        for name in ("sampling", "adjacency", "clipping"):
            object.__setattr__(self, name, hyphened(getattr(self, name)))

    def with_method(self, method: str | Method, seed: int | None) -> Request:
        """The same request for another method."""
        return replace(self, method=method, seed=seed)

    @property
    def counted(self) -> bool:
        """Whether the number of records has to be learnt privately."""
        return self.facts.records is None and not self.assume_public

    @property
    def learns_classes(self) -> bool:
        """Whether the classes have to be learnt privately: of pictures whose labels are whole numbers by their type.

        Only for the method of pictures, whose price does not follow from the number of classes.
        """
        block, facts = self.data.block, self.facts
        known = facts.classes is not None or facts.target_bounds is not None or bool(facts.targets)
        if block is None or known or self.assume_public or self.task == "regression":
            return False
        name = self.method if isinstance(self.method, str) else self.method.name
        plain = self.module is None and self.prior is None and self.likelihood is None and self.chains == 1
        pictures = is_picture(facts.shape or block.shape[1:]) and self.data.whole_labels
        return plain and pictures and name in ("auto", rules.PICTURES)

    @property
    def counts_first(self) -> bool:
        """Whether something is learnt privately before the model is known: the number of records, or the classes."""
        return self.counted or self.learns_classes

    def check(self) -> None:
        """Refuse everything that can be refused without looking at a record."""
        check_target(self.epsilon, self.delta)
        _check_plan(self)
        _check_facts(self)
        _check_model(self)
        _check_run(self)


def _check_schedule(request: Request) -> None:
    clips = request.clip_schedule
    if not clips:
        return
    if not all(is_real(clip) and clip > 0 and math.isfinite(clip) for clip in clips):
        raise Refusal(f"clip_schedule={list(clips)}: every clip must be greater than 0")
    other = next((name for name in ("clip", "adaptive_clip") if getattr(request, name) is not None), None)
    if other is not None:
        raise Refusal(f"clip_schedule={list(clips)}, {other}={getattr(request, other)}: give one of the two")


def _check_plan(request: Request) -> None:
    for name in ("batch", "steps", "epochs", "clip", "noise_scale"):
        value: Any = getattr(request, name)
        if value is None:
            continue
        if not (is_real(value) and value > 0 and math.isfinite(value)):
            raise Refusal(f"{name}={value!r}: must be greater than 0, or None for the public rule")
        if name in ("batch", "steps") and not is_whole(value):
            raise Refusal(f"{name}={value!r}: must be a whole number")
    if request.epochs is not None and request.steps is not None:
        raise Refusal(f"epochs={request.epochs}, steps={request.steps}: give one of the two")
    if request.clipping not in CLIPPING_STYLES:
        raise Refusal(f"clipping={request.clipping!r}: must be one of {', '.join(CLIPPING_STYLES)}")
    if request.adaptive_clip is not None and not 0 < request.adaptive_clip < 1:
        raise Refusal(
            f"adaptive_clip={request.adaptive_clip}: must be a share in (0, 1), or None for a clip that stays"
        )
    counts_first = request.counts_first
    if request.adaptive_clip is not None and (counts_first or request.chains > 1 or request.checkpoint is not None):
        raise Refusal(
            f"adaptive_clip={request.adaptive_clip}: needs declared records and classes, one chain and no checkpoint, "
            "since its counts go with every step; give these, or leave it out"
        )
    _check_schedule(request)
    if request.hold_out is not None and (counts_first or request.chains > 1 or request.checkpoint is not None):
        raise Refusal(
            "hold_out: what fresh records meet is followed through one run from its first step; declare records and "
            "classes, and leave chains and checkpoint out"
        )
    if request.sampling not in SAMPLINGS:
        raise Refusal(f"sampling={request.sampling!r}: must be one of {', '.join(SAMPLINGS)}")
    if request.adjacency not in ADJACENCIES:
        raise Refusal(f"adjacency={request.adjacency!r}: must be one of {', '.join(ADJACENCIES)}")


def _check_facts(request: Request) -> None:
    facts = request.facts
    if not isinstance(facts, Schema):
        raise TypeError(f"facts={facts!r}: must be a confide.Schema")
    if request.task == "classification" and facts.target_bounds is not None:
        raise Refusal("facts: target_bounds are for regression, and this is classification; give classes instead")
    if request.task == "regression" and facts.classes is not None:
        raise Refusal("facts: classes are for classification, and this is regression; give target_bounds instead")
    check_class_weight(request.class_weight, facts.classes)
    if request.class_weight is not None and request.task == "regression":
        raise Refusal("class_weight: is for classification, and this is regression; leave it out")
    if request.counted and request.batch is not None:
        raise DataError(
            f"batch={request.batch}: needs the nominal number of records, which is private unless declared; declare "
            "records, assume it public, or leave batch out to have the records counted privately"
        )
    if request.counted and request.sampling in ("fixed-size", "shuffle"):
        raise DataError(
            f"sampling={request.sampling!r}: makes the number of records public, so it must be declared; declare "
            "records, or use poisson, which keeps it private"
        )


def _check_model(request: Request) -> None:
    if request.module is not None:
        if not isinstance(request.module, nn.Module):
            raise TypeError(f"module={request.module!r}: must be a torch Module")
        if request.hidden is not None:
            raise Refusal(f"hidden={request.hidden}: is for confide's own network; leave it out beside module=")
    _check_hidden(request.hidden)
    if request.prior is not None and not hasattr(request.prior, "add_energy_gradient_"):
        raise TypeError(f"prior={request.prior!r}: must be one of confide.priors, such as priors.GaussianPrior(0.1)")
    check_name(request.likelihood, request.task)
    if not isinstance(request.likelihood, str | None) and request.noise_scale is not None:
        raise Refusal(f"noise_scale={request.noise_scale}: the likelihood says it already; leave one of them out")
    if isinstance(request.method, str):
        _check_name(request.method, request.prior)
        return
    check_method(request.method)
    if request.prior is not None:
        raise Refusal(f"prior={request.prior!r}: give it to the method itself, or name the method")


def _check_hidden(hidden: Any) -> None:
    if hidden is None:
        return
    listed = isinstance(hidden, Iterable) and not isinstance(hidden, str)
    if not listed or not all(is_whole(width) for width in hidden):
        raise TypeError(f"hidden={hidden!r}: must be widths of layers, such as (64, 64), or () for a linear model")


def _check_name(name: str, prior: Prior | None) -> None:
    """A method of that name is there, and has a prior if one is given; "auto" finds one that has."""
    if name == "auto":
        return
    cls = methods.get(name)
    if prior is not None and "prior" not in {one.name for one in fields(cls)}:
        raise Refusal(f"prior={prior!r}: {name} has no prior of its own; leave it out")


def _check_run(request: Request) -> None:
    if not isinstance(request.ledger, Ledger | str | os.PathLike | None):
        raise TypeError(f"ledger={request.ledger!r}: must be a Ledger or the path of one")
    if request.device is not None:
        named(request.device)
    chains: Any = request.chains
    if not (is_whole(chains) and chains >= 1):
        raise Refusal(f"chains={request.chains!r}: must be a whole number, at least 1")
    callbacks: Any = request.callbacks
    if not (isinstance(callbacks, Sequence) and all(callable(one) for one in callbacks)):
        raise TypeError(f"callbacks={request.callbacks!r}: must be a list of functions of a Moment")
    if not isinstance(request.checkpoint, str | os.PathLike | Checkpoints | None):
        raise TypeError(f"checkpoint={request.checkpoint!r}: must be the path of a directory, or confide.Checkpoints")
    if request.callbacks and request.chains > 1:
        raise Refusal(f"callbacks: are for one chain, and there are {request.chains}; leave them out")
    if request.checkpoint is None:
        return
    if request.counts_first:
        raise DataError(
            "checkpoint: needs the nominal number of records and the classes, for counts would be paid for again at "
            "every start and would differ; declare them, or leave the checkpoint out"
        )
