"""The loop. Every method is this:

plan (calibrated) -> rehearse -> charge -> [ask -> answer -> tell -> keep] x T -> posterior
"""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from confide.data.schema import Schema
from confide.devices import HOST, computes_for, device_of, on_host
from confide.devices.default import default_aside
from confide.errors import Refusal, SpeedWarning, UnsupportedEvents
from confide.evaluate.mixing import with_mixing
from confide.layers.programs import program_of
from confide.mechanism.clipping.places import TOO_LATE, UNEVEN, assumed_of_places, hearing_of_uneven
from confide.mechanism.plan import Plan
from confide.methods.base import Method, Problem, check_method
from confide.models.additive import AdditiveNetwork
from confide.models.flat import check_initialised, flatten_, is_half, put_back_, training_, uncompiled, widened_
from confide.models.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from confide.models.networks import recipe_of
from confide.models.program_inputs import with_ids
from confide.models.program_sharpness import sharpness
from confide.models.programs import Program, ProgramLikelihood
from confide.models.tabular import TabularNetwork
from confide.posteriors.base import Posterior, warnings_of
from confide.posteriors.files import check_saveable
from confide.privacy.ledger.position import position_of
from confide.privacy.statement import Privacy
from confide.running.callbacks import CallbackWatch, Moment, Validation, check_callbacks, guarded, so_far
from confide.running.closing import Closing
from confide.running.crews import check_whole, kept_alike, shared_journal, start_alike, steps_between_looks
from confide.running.dress_rehearsal import Cast, dress_rehearsal
from confide.running.interrupts import held_back
from confide.running.journal import Attempt, CheckpointPlace, journal
from confide.running.own_copy import about_converted, check_copy
from confide.sources.base import Source
from confide.sources.queries import Origin, Query
from confide.wording import html_table

HALF = "half precision: what a record's gradient rounds to does not depend on the other records of its batch"
"""Three digits are so few that products which round in another order may matter; the statement says so."""
ROUNDING = (HALF, UNEVEN, TOO_LATE)
UNEVEN_HERE = b"1"  # what a rank tells the others


@dataclass(frozen=True)
class Run:
    """A finished fit: the posterior, what it cost, and how it was made.

    seconds   how long it took: it depends on the records, is outside the guarantee, and is not saved
    ledger    the head of the ledger's chain behind this run's charges, to be kept with it: a ledger that no longer
              holds it was rolled back. None where the ledger does not outlive the process
    """

    posterior: Posterior
    privacy: Privacy
    plan: Plan
    method: Method
    schema: Schema
    seconds: float
    ledger: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        """What the posterior warns of, then what was run; the statement of privacy is in `privacy`."""
        return "\n".join([*warnings_of(self.posterior), f"Run({self.method.name}, {self._learnt()})"])

    def _repr_html_(self) -> str:
        from confide.report.verdict import statement_of

        warned = (("warning", warning) for warning in warnings_of(self.posterior))
        rows = [*warned, ("method", self.method.name), ("steps", f"{self.plan.steps:,}"), ("learnt", self._learnt())]
        return html_table("Run", [*rows, ("privacy", statement_of(self.privacy))])

    def _learnt(self) -> str:
        return f"{type(self.posterior.module).__name__}, {self.posterior.kind}, {self.posterior.likelihood.name}"

    def save(
        self, directory: str | os.PathLike[str], *, test: tuple[Any, Any] | None = None, public: bool = False
    ) -> None:
        """Write posterior.safetensors, run.json and report.html to a new directory.

        test     inputs as the network sees them and their labels or values, as tensors or arrays: the report then
                 measures on them, without noise, so they must be public or separate from the records learnt from
        public   whether they are public; otherwise the report says that the guarantee does not cover them
        """
        from confide.running.artefacts import measured_on, save_run

        save_run(self, directory, evaluation=None if test is None else measured_on(self.posterior, test, public))


@default_aside
def fit(
    method: Method,
    module: nn.Module,
    data: Source,
    plan: Plan,
    *,
    likelihood: Likelihood | None = None,
    seed: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    checkpoint: CheckpointPlace = None,
    secure: bool = False,
    closing: Closing | None = None,
    callbacks: Sequence[Callable[[Moment], Any]] = (),
    validation: Validation | None = None,
) -> Run:
    """Fit `module` to private data by `method` under `plan`.

    The module is copied and stays as it was. The whole way is gone on made-up records before anything is charged, and
    what could not be clipped, predict, be saved or be loaded is refused (`confide.running.dress_rehearsal`); then the
    whole plan is charged before the first record is read, so a budget that does not suffice refuses at once and nothing
    is spent. `seed` fixes the method's own randomness only; the noise that protects the records is never seeded here.
    `progress(done, total)` is called after every step. `checkpoint` names a directory from which a run that was killed
    goes on; see `confide.running.journal`. `secure` puts the noise on a lattice, against attacks on low-order bits;
    see `confide.mechanism.secure`. `callbacks` see the public state now and then, with predictions on `validation`,
    records that you declare to be public; see `confide.running.callbacks`. `closing` asks one question more, about the
    posterior after the last step, and is paid for with the plan.
    """
    started = time.perf_counter()
    if progress is not None and not callable(progress):
        raise TypeError(f"progress={progress!r}: must be a function of (done, total)")
    wanted = plan

    def given() -> Plan:
        check_method(method)
        check_module(module)
        check_plan(wanted)
        check_callbacks(callbacks, validation, method, data.crew.size == 1)
        return data.within(wanted.secured() if secure else wanted)

    plan = data.crew.together(given)  # what one rank is given wrong is an error on all
    likelihood = explained(module, data, plan, likelihood)
    _tell_of_host(method, module)
    problem, state = rehearse(method, module, data, plan, likelihood=likelihood, seed=seed)
    public = make_problem(method, module, data.schema, plan, likelihood, seed, HOST)  # never shown a record
    opened = journal if data.crew.size == 1 else shared_journal
    look = partial(_look, method, module, data.schema, plan, likelihood, problem)
    watch = CallbackWatch(callbacks, validation, method, checkpoint is not None, look, plan.steps)
    show = guarded(progress, checkpoint is not None)
    attempt = Attempt(method, problem, data, state, closing)
    with opened(checkpoint, attempt) as book, _interrupts(checkpoint) as interrupted, hearing_of_uneven() as uneven:
        book.charge(plan)  # before any record is read
        state = book.state
        for step, mechanism in book.left():
            book.moving()
            query = asked(method, problem, state)
            state = method.tell(problem, state, data.answer(query, mechanism, book.receipt))
            if step % steps_between_looks(query) == 0:
                state = kept_alike(data.crew, problem, state)
            book.keep(step, state)
            show(step, plan.steps)
            interrupted()
            if watch.after(step, state):
                break
        state = kept_alike(data.crew, problem, state, last=True)
        posterior = with_mixing(method.posterior(_moved(public, problem), on_host(state)), method.noise_in_width)
        put_back_(posterior.module, module)
        if watch.ended:
            posterior = posterior.with_likelihood(
                posterior.likelihood, {**posterior.facts, "stopped_after": watch.ended, "planned_steps": plan.steps}
            )
        if closing is not None:
            last = closing.ask(posterior)
            release = book.closed(lambda: data.answer(last, closing.mechanism, book.receipt))
            posterior = closing.tell(posterior, release)
    somewhere = UNEVEN_HERE in data.crew.everybody(UNEVEN_HERE if uneven else b"0", "places of records in batches")
    assumed = (*data.assumptions, *_coarse(problem, somewhere))
    privacy = stated(Privacy(book.events, plan.delta, plan.adjacency, data.seeded, assumed), data)
    head = head_behind(data, privacy)
    return Run(posterior, privacy, plan, method, data.schema, time.perf_counter() - started, head)


def _coarse(problem: Problem, uneven: bool) -> tuple[str, ...]:
    """What is taken for granted about how numbers are rounded; see docs/soundness.md, section 1."""
    device = problem.position.device
    if problem.rounded is not None or torch.is_autocast_enabled(device.type):
        return (HALF,)
    if device != HOST:
        return (UNEVEN,)
    return assumed_of_places(uneven)


def stated(privacy: Privacy, data: Source) -> Privacy:
    """The statement with what the ledger has proven about everything charged to the same records."""

    def standing() -> Any:
        if data.ledger is None or data.seeded:
            return None
        try:
            found = data.ledger.standing(data.name)
        except UnsupportedEvents:
            return None  # a ledger of an earlier time, whose ceiling has no bound for what was charged
        return [list(found.assumptions()), found.sentence()]

    known = data.crew.led("standing", standing)  # of several processes the first one keeps the ledger
    if known is None:
        return privacy
    return replace(privacy, assumptions=(*privacy.assumptions, *known[0]), ledger=known[1])


def head_behind(data: Source, privacy: Privacy) -> dict[str, Any] | None:
    """Where the ledger stands, and where this run stands in it, for a record that is kept elsewhere."""

    def head() -> Any:
        if data.ledger is None or not data.ledger.outlives_the_process:
            return None
        position = None
        if not data.seeded:
            position = asdict(position_of(data.ledger, data.name, privacy.events, privacy.delta, privacy.adjacency))
        return {"dataset": data.name, **data.ledger.head_record(), "position": position}

    found: dict[str, Any] | None = data.crew.led("head", head)
    return found


def _interrupts(checkpoint: Any) -> AbstractContextManager[Callable[[], None]]:
    """Without a checkpoint nothing could be kept, so that nothing waits."""
    return held_back() if checkpoint is not None else nullcontext(lambda: None)


def _look(
    method: Method,
    module: nn.Module,
    schema: Schema,
    plan: Plan,
    likelihood: Likelihood | None,
    problem: Problem,
    state: Any,
) -> tuple[Posterior, bool]:
    """What has been learnt so far, over a module that never saw a record."""
    with torch.random.fork_rng(devices=[]):
        public = make_problem(method, module, schema, plan, likelihood, 0, HOST)
        posterior, ready = so_far(method, _moved(public, problem), on_host(state))
    put_back_(posterior.module, module)
    return posterior, ready


def _moved(public: Problem, problem: Problem) -> Problem:
    """The problem as it was before the first record, at the position of the last step.

    A forward may have written anything into the module that saw the records, so that one never leaves.
    """
    public.position.copy_(problem.position)
    return replace(public, generator=problem.generator)


def rehearse(
    method: Method,
    module: nn.Module,
    data: Source,
    plan: Plan,
    *,
    likelihood: Likelihood | None = None,
    seed: int | None = None,
) -> tuple[Problem, Any]:
    """Everything that a fit refuses before it charges, and nothing else: the problem and the method's first state."""
    likelihood = explained(module, data, plan, likelihood)

    def checked() -> Problem:
        check_method(method)
        check_module(module)
        check_whole(module)
        check_sizes(data.schema, plan)
        problem = make_problem(method, module, data.schema, plan, likelihood, seed)
        check_saveable(problem.module, problem.likelihood, method.posterior)
        return problem

    def tried() -> Any:
        runs = check_copy(module, data, likelihood)
        state = method.init(problem)
        with about_converted(method.name, module, problem.module) if runs else nullcontext():
            for each in (state, *method.later(problem, state)):
                data.rehearse(asked(method, problem, each))
        cast = Cast(method, module, problem.likelihood)
        dress_rehearsal(cast, lambda p: make_problem(method, module, data.schema, p, likelihood, 0, HOST), data, plan)
        return state

    problem = data.crew.together(checked)
    start_alike(method, problem, data)
    return problem, data.crew.together(tried)


def asked(method: Method, problem: Problem, state: Any) -> Query:
    """What the method asks of one record, and where the question comes from."""
    problem.settle()
    return replace(method.ask(problem, state), origin=Origin(method, problem, state))


def check_module(module: object) -> None:
    """Refuse what is no network, in one sentence."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module={module!r:.60}: must be a torch.nn.Module, such as torch.nn.Linear(features, classes)")


def check_plan(plan: object) -> None:
    """Refuse what is no plan, in one sentence."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan={plan!r:.60}: must be a plan, such as confide.plan(epsilon=1, ...) gives")


def check_sizes(schema: Schema, plan: Plan) -> None:
    if schema.records is not None and schema.records != plan.records:
        raise Refusal(
            f"records={plan.records} in the plan but {schema.records} in the schema: declare one nominal size in both"
        )


def make_problem(
    method: Method,
    module: nn.Module,
    schema: Schema,
    plan: Plan,
    likelihood: Likelihood | None = None,
    seed: int | None = None,
    device: torch.device | None = None,
) -> Problem:
    """The public side of a fit, from a copy of the user's module that the method may have prepared for itself.

    device   where the copy is; None: where the module is
    """
    check_initialised(module)
    clips = {mechanism.clip for mechanism, _ in plan.blocks}
    if len(clips) > 1 and not method.follows_clip:
        raise Refusal(f"clips={sorted(clips)}: {method.name} has one unit for all steps; give a plan with one clip")
    where = computes_for(device_of(module))
    own = training_(method.prepare(uncompiled(module).to(HOST)))  # what a method puts in is made on the host
    own.to(HOST if method.on_host else where if device is None else device)
    if device is not None or method.on_host:  # nothing is evaluated with it but what a posterior is made of
        widened_(own)
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    explained = default_likelihood(own, schema) if likelihood is None else copy.deepcopy(likelihood)
    if program_of(own) is not None and not isinstance(explained, ProgramLikelihood):
        raise Refusal(f"likelihood={explained.name!r}: the program has a log-likelihood of its own; leave this out")
    vector = flatten_(own)
    if is_half(vector.dtype):
        return Problem(own, vector.float(), explained, plan, generator, rounded=vector)
    return Problem(own, vector, explained, plan, generator)


def _tell_of_host(method: Method, module: nn.Module) -> None:
    where = device_of(module)
    if computes_for(where) != where and not method.on_host:
        warnings.warn(
            f"module: it is on {str(where)!r}, which has no double precision, and the bound on what one record can do "
            "needs it; the run is made on the host, and the posterior predicts on the device",
            SpeedWarning,
            stacklevel=3,
        )


def explained(module: nn.Module, data: Source, plan: Plan, likelihood: Likelihood | None) -> Likelihood | None:
    """For a program its own likelihood, with how sharp it is for records of this form; steps follow from that."""
    form = data.form() if isinstance(module, Program) and likelihood is None else None
    if form is None or not isinstance(module, Program):
        return likelihood
    form = with_ids(module, *form), form[1]
    classes, clip = data.schema.class_count, max(mechanism.clip for mechanism, _ in plan.blocks)
    return ProgramLikelihood(sharpness(module, *form, classes, clip), (*form, classes))


def default_likelihood(module: nn.Module, schema: Schema) -> Likelihood:
    """Categorical for declared classes (Bernoulli for a network with one logit), Gaussian for a real target.

    A program brings its own along.
    """
    count = schema.class_count
    if program_of(module) is not None:
        return ProgramLikelihood()
    if count is None:
        return Gaussian()
    return Bernoulli() if count == 2 and _outputs_of(module) == 1 else Categorical(count)


def _outputs_of(module: nn.Module) -> int | None:
    """Of a network of confide's own."""
    if isinstance(module, AdditiveNetwork | TabularNetwork):
        return module.recipe.outputs
    recipe = recipe_of(module)
    return None if recipe is None else recipe.outputs
