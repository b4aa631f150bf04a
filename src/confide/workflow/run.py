"""From a request to its outcome, in the order that keeps data and budget safe:

check      the request, before any record is looked at
settle     which facts are public, and whose word they are
plan       the noise, from public sizes
rehearse   the whole fit on made-up records: what cannot work is refused here
charge     the ledger, for everything that will be released; then fit: no record is used before it is paid for

Where the number of records or the classes of pictures are not declared, they are counted privately first; what the fit
costs does not depend on them, so that counts and fit are one charge.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from confide.data.preprocessing import Encoder
from confide.data.roles import arranged
from confide.data.schema import LEARNT
from confide.data.table import Table
from confide.data.trees import tree_of
from confide.devices import named
from confide.devices.default import default_aside
from confide.errors import Refusal
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.methods.base import Method
from confide.models.likelihoods import Likelihood
from confide.models.networks import recipe_of
from confide.models.tabular import TabularNetwork
from confide.privacy.bayesian import BayesianEstimate
from confide.privacy.events import Event
from confide.running.callbacks import Validation
from confide.running.chains import check_draws, fit_chains
from confide.running.fit import Run, fit, head_behind, rehearse
from confide.sources.adaptive_clip import ADAPTED_CLIP, AdaptiveClip
from confide.sources.ahead import PaidAhead, Purse, pay_ahead
from confide.sources.base import Part, Source, priced
from confide.sources.hold_out import HoldOut
from confide.sources.private_data import PrivateData
from confide.sources.together import PaidTogether
from confide.workflow import classes, count, noise, recalibrate
from confide.workflow.calibrate import plan_of
from confide.workflow.choice import method_of
from confide.workflow.facts import Settled, assumptions_of, pictures_rule, settle, tell_of_features
from confide.workflow.measure import check_test
from confide.workflow.named_likelihood import made
from confide.workflow.network import clip_of, likelihood_of, network_of
from confide.workflow.request import Request

REHEARSED_RECORDS = 1000
"""Stands for the number of records while it is not known; nothing is charged for it."""
LAST_DIGITS = 1e-6
"""Of noise, as far as two processes may differ in it; everything else that is paid for has to be the same."""
CHECKED_DRAWS = 16
"""Draws that are looked at to see whether the posterior is made of finite numbers."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Job:
    """A settled request with its model and its price: what is fitted, and what will be released.

    counting    the mechanism that counts the records, or None
    labelling   the mechanism that counts the labels, for the classes, or None
    histogram   the mechanism that shows the noise of a regression target, or None
    probabilities   the mechanism that shows how far class probabilities are from right, or None
    """

    request: Request
    settled: Settled
    method: Method
    module: nn.Module
    likelihood: Likelihood
    plan: Plan
    counting: SampledGaussian | None
    histogram: SampledGaussian | None
    probabilities: SampledGaussian | None = None
    labelling: SampledGaussian | None = None

    @property
    def features(self) -> int:
        """Inputs of a flat network."""
        return self.settled.features

    @property
    def parts(self) -> tuple[Part, ...]:
        """Everything that the fit will ask of the records: mechanisms, and how many answers of each."""
        asked_once = (self.counting, self.labelling, self.histogram, self.probabilities)
        beside = ((mechanism, 1) for mechanism in asked_once if mechanism is not None)
        return (*beside, *(self.plan.blocks * self.request.chains))

    def paid_as(self, parts: Sequence[Part]) -> Job | None:
        """The same job with the noise that was paid for; None where something else was.

        Another process may find noise that differs in its last digits: it adds up in another order.
        """
        pairs = list(zip(self.parts, parts, strict=False))
        if len(parts) != len(self.parts) or not all(_alike(*mine, *paid) for mine, paid in pairs):
            return None
        given = iter(parts)

        def once(mechanism: SampledGaussian | None) -> SampledGaussian | None:
            return None if mechanism is None else next(given)[0]

        asked = ("counting", "labelling", "histogram", "probabilities")  # in the order of `parts`
        found: dict[str, Any] = {name: once(getattr(self, name)) for name in asked}
        spent = tuple(one.event() for one in found.values() if one is not None)
        plan = replace(self.plan, blocks=tuple(islice(given, len(self.plan.blocks))), spent=spent)
        return replace(self, plan=plan, **found)


def _alike(mine: SampledGaussian, answers: int, paid: SampledGaussian, answers_paid: int) -> bool:
    close = math.isclose(mine.noise_multiplier, paid.noise_multiplier, rel_tol=LAST_DIGITS)
    return close and answers == answers_paid and replace(mine, noise_multiplier=paid.noise_multiplier) == paid


@dataclass(frozen=True)
class Outcome:
    """A finished request. Holds no record.

    encoder  how raw records become inputs
    hidden   widths of the hidden layers; None for a network of the user's or of the method's own
    bayesian what the run costs records drawn like the public hold-out ones, beside the DP number
    """

    run: Run
    encoder: Encoder
    hidden: tuple[int, ...] | None
    bayesian: BayesianEstimate | None = None


@default_aside
def run_request(request: Request, progress: Progress | None = None) -> Outcome:
    """Settle, plan, rehearse, charge, fit. Whatever can be refused is refused before the first charge."""
    request.check()
    return carry_out(job_of(request, settle(request)), progress)


def job_of(request: Request, settled: Settled) -> Job:
    """The model and the plan of a settled request. No record is read for it."""
    request = replace(request, likelihood=made(request.likelihood, settled.schema, request.noise_scale))
    labelling = classes.mechanism_of(request)
    known = _with_made_up_classes(request, settled)
    known = known if known.schema.records is not None else known.with_records(REHEARSED_RECORDS)
    tell_of_features(request, settled)
    request = replace(request, method=pictures_rule(request, settled))
    method = method_of(request, known.schema, settled.features)
    module = network_of(request, known.schema, settled.features, method, settled.encoder.output_shape)
    if request.device is not None:
        module = copy.deepcopy(module).to(named(request.device))
    counting, histogram = count.mechanism_of(request), noise.mechanism_of(request, settled.task, method)
    probabilities = recalibrate.mechanism_of(request, settled.task, method)
    asked_once = (counting, labelling, histogram, probabilities)
    spent = tuple(mechanism.event() for mechanism in asked_once if mechanism is not None)
    records = known.schema.records
    assert records is not None  # declared, assumed, counted or made up for the rehearsal
    clip = clip_of(request, known.schema, settled.features, method)
    plan = plan_of(replace(request, clip=clip), records, method, spent)
    likelihood = likelihood_of(request, known.schema, module)
    return Job(request, settled, method, module, likelihood, plan, counting, histogram, probabilities, labelling)


def _with_made_up_classes(request: Request, settled: Settled) -> Settled:
    """The same, with some classes where they are not known yet."""
    awaited = request.learns_classes and settled.schema.source_of("classes") != LEARNT
    return settled.with_classes(range(classes.REHEARSED_CLASSES)) if awaited else settled


def rehearse_job(job: Job) -> None:
    """Refuse whatever a fit would refuse before its charge, and charge nothing."""
    job = replace(job, settled=_with_made_up_classes(job.request, job.settled))
    if job.request.chains > 1:
        check_draws(job.method, job.plan)
    rehearse(job.method, job.module, records_of(job), job.plan, likelihood=job.likelihood, seed=job.request.seed)


@default_aside
def carry_out(job: Job, progress: Progress | None = None, purse: Purse | None = None) -> Outcome:
    """Rehearse, charge and fit. With a purse the fit takes what was paid for with others', see `sources.ahead`."""
    started = time.perf_counter()
    validation = validation_of(job)
    data = records_of(job)
    spent: tuple[Event, ...] = ()
    if job.request.counts_first:
        assert purse is None  # fits that are paid for with others have declared records and classes
        rehearse_job(job)
        spent = tuple(one.event() for one in (job.counting, job.labelling) if one is not None)
        purse = pay_ahead(data, job.parts, _purpose_of(job))
        job = _counted(job, PaidAhead(data, purse))
        data = records_of(job, data)
    watching = None if job.request.hold_out is None else _watching(job, data, job.request.hold_out)
    run = _fitted(job, data if watching is None else watching, progress, purse, validation)
    _check_finite(run)
    vouched = (*run.privacy.assumptions, *assumptions_of(job.settled.schema))
    privacy = replace(run.privacy, events=(*spent, *run.privacy.events), assumptions=vouched)
    head = head_behind(data, privacy) if spent else run.ledger  # the count is a part of this run as well
    run = replace(run, privacy=privacy, ledger=head, seconds=time.perf_counter() - started)
    hidden = None if job.request.module is not None else _hidden(job.module)
    return Outcome(run, job.settled.encoder, hidden, None if watching is None else _averaged(watching, job))


def _watching(job: Job, data: PrivateData, table: Table) -> HoldOut:
    """A source that looks at the hold-out records along the run; they answer for themselves and are not learnt from."""
    encoder = job.settled.encoder
    table = arranged(table, encoder.schema)
    if table.labels is None:
        raise Refusal("hold_out: has no target column, and how far a record moves an answer depends on its target")
    x, y = encoder.training(table)
    return HoldOut(data, x, y, seed=job.request.seed)


def _averaged(watching: HoldOut, job: Job) -> BayesianEstimate:
    from confide.privacy import bayesian

    return bayesian.averaged(watching.sequences(), job.request.delta).release("the hold-out records are public")


def _hidden(module: nn.Module) -> tuple[int, ...] | None:
    """Widths of the hidden layers of a network of confide's own."""
    recipe = module.recipe if isinstance(module, TabularNetwork) else recipe_of(module)
    return None if recipe is None else recipe.hidden


def _purpose_of(job: Job) -> str:
    """Of one charge for everything."""
    first = ((job.counting, count.PURPOSE), (job.labelling, classes.PURPOSE))
    before = " and ".join(purpose for mechanism, purpose in first if mechanism is not None)
    after = f" and {noise.PURPOSE}" if job.histogram is not None else ""
    after = f" and {recalibrate.PURPOSE}" if job.probabilities is not None else after
    return f"{before}, then fit {job.method.name}{after}"


def _counted(job: Job, source: PaidAhead) -> Job:
    """The same job with its records and classes counted: another network, maybe, at the price that was paid."""
    settled = job.settled
    if job.counting is not None:
        settled = settled.with_records(count.count_records(source, job.counting))
    if job.labelling is not None:
        settled = settled.with_classes(classes.learn_classes(source, job.labelling))
        classes.tell_of_lost(job.settled.y, settled.y)
    found = job_of(job.request, settled)
    if priced(found.parts) != priced(job.parts):
        raise AssertionError("the price of a fit follows its counts; it is paid for before they are known")
    return found


def validation_of(job: Job) -> Validation | None:
    """The public records for callbacks as the network sees them; what cannot be measured is refused here."""
    table, encoder = job.request.validation, job.settled.encoder
    if table is None:
        return None
    check_test(table, encoder)
    table = arranged(table, encoder.schema)
    return tree_of(encoder.features(table)), torch.as_tensor(encoder.targets(table.labels))


def _fitted(
    job: Job, data: PrivateData | HoldOut, progress: Progress | None, purse: Purse | None, validation: Validation | None
) -> Run:
    """The fit, or the chains, and then the noise of a regression target: all of it charged in one go."""
    request = job.request
    source: Source = data if purse is None else PaidAhead(data, purse)
    if request.adaptive_clip is not None:
        source = _adapting(job, source, request.adaptive_clip)
    closing = None if job.histogram is None else noise.closing_of(job.histogram, job.plan)
    if job.probabilities is not None:
        closing = recalibrate.closing_of(job.probabilities, job.plan)
    shared: dict[str, Any] = {"likelihood": job.likelihood, "seed": request.seed, "progress": progress}
    kept: dict[str, Any] = {"checkpoint": request.checkpoint, "closing": closing}
    if request.chains == 1:
        seen: dict[str, Any] = {"callbacks": request.callbacks, "validation": validation}
        return _with_clip(fit(job.method, job.module, source, job.plan, **kept, **seen, **shared), source)
    if request.checkpoint is not None:
        return fit_chains(job.method, job.module, source, job.plan, chains=request.chains, **kept, **shared)
    if closing is None:
        return fit_chains(job.method, job.module, source, job.plan, chains=request.chains, **shared)
    source = PaidTogether(source, beside=[closing.part], purpose=closing.purpose)
    run = fit_chains(job.method, job.module, source, job.plan, chains=request.chains, **shared)
    release = data.answer(closing.ask(run.posterior), closing.mechanism, purpose=closing.purpose)
    return replace(run, posterior=closing.tell(run.posterior, release))


def _adapting(job: Job, source: Source, quantile: float) -> Source:
    """Counts go with the steps of one block; a question beside them would need counts that no target covers."""
    if len(job.plan.blocks) > 1:
        raise Refusal(f"adaptive_clip={quantile}: {job.method.name} has steps of its own kind; name another method")
    if job.histogram is not None:
        raise Refusal(f"adaptive_clip={quantile}: the noise of the target is learnt beside the fit; give noise_scale")
    if job.probabilities is not None:
        raise Refusal(f"adaptive_clip={quantile}: {job.method.name} asks about its probabilities; name another method")
    return AdaptiveClip(source, quantile=quantile)


def _with_clip(run: Run, source: Source) -> Run:
    """Where a clip that adapts itself ended, which is a function of releases, among the posterior's facts."""
    if not isinstance(source, AdaptiveClip):
        return run
    facts = {**run.posterior.facts, ADAPTED_CLIP: run.plan.mechanism.clip * source.factor}
    return replace(run, posterior=run.posterior.with_likelihood(run.posterior.likelihood, facts))


def records_of(job: Job, before: PrivateData | None = None) -> PrivateData:
    """The records behind the boundary, with fresh noise; `before`: charged where the same records were before."""
    request, settled = job.request, job.settled
    options: dict[str, Any] = {
        "schema": settled.schema,
        "ledger": before.ledger if before is not None and before.crew.leads else request.ledger,
        "name": request.name,
        "seed": request.seed,
        "read": request.data,
        "weights": settled.weights,
    }
    if request.ranks is not None:
        return request.ranks.private(settled.x, settled.y, whole=True, **options)
    return PrivateData(settled.x, settled.y, **options)


def _check_finite(run: Run) -> None:
    if not bool(torch.isfinite(run.posterior.sample(CHECKED_DRAWS)).all()):
        raise Refusal(
            f"method={run.method.name!r}: ran away, its draws are not finite; the run stays charged, and a smaller "
            "step size or learning rate among the method's settings keeps the next one within bounds"
        )
