"""Several chains of one method: each is a run of its own, and each is charged.

    plan = confide.plan(epsilon=1, delta=1e-5, records=n, batch=256, epochs=10, chains=4)
    run = confide.fit_chains(method, module, data, plan, chains=4)

`plan(..., chains=4)` gives the plan of one chain with the noise that keeps all four together within epsilon. All chains
are charged before the first one starts: a budget that does not suffice for all of them refuses, and nothing is spent.

With a checkpoint all chains are one run of one method, `ChainsInTurn`: what was killed goes on in the chain and at the
step where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from confide import methods
from confide.errors import Refusal
from confide.evaluate.chains import effective_sample_size, split_r_hat
from confide.evaluate.mixing import with_mixing
from confide.mechanism.plan import Plan
from confide.methods.base import Method, Problem, check_method
from confide.models.likelihoods import Likelihood
from confide.posteriors.base import Posterior
from confide.posteriors.draws import Draws
from confide.privacy.statement import Privacy
from confide.running.closing import Closing
from confide.running.fit import ROUNDING, Run, fit, head_behind, rehearse, stated
from confide.running.journal import CheckpointPlace
from confide.running.processes import in_processes
from confide.sources.ahead import PaidAhead, Purse, pay_ahead
from confide.sources.base import Source
from confide.sources.queries import Query, Release
from confide.sources.together import PaidTogether

FEWEST_DRAWS = 4
"""Of each chain: R-hat compares the variances of its halves."""


def fit_chains(
    method: Method,
    module: nn.Module,
    data: Source,
    plan: Plan,
    *,
    chains: int = 4,
    likelihood: Likelihood | None = None,
    seed: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    jobs: int = 1,
    reopen: Callable[[], Source] | None = None,
    checkpoint: CheckpointPlace = None,
    closing: Closing | None = None,
) -> Run:
    """Run the plan `chains` times and pool the draws; facts state the largest R-hat and the smallest sample size.

    `checkpoint` names a directory from which chains that were killed go on, as for `fit`; so does a `closing` question
    about all chains together, which needs one.

    With `jobs` > 1 so many chains run at a time, in processes of their own (joblib's). `reopen` is called there and
    gives the same records, with the same ledger by its path: none is passed from one process to another. All chains are
    paid for here, before the first starts.
    """
    if chains < 2:
        raise Refusal(f"chains={chains}: must be at least 2; use fit for one chain")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress={progress!r}: must be a function of (done, total)")
    if jobs > 1 and reopen is None:
        raise Refusal(f"jobs={jobs}: other processes open the records by themselves; give reopen=, or jobs=1")
    check_draws(method, plan)
    if checkpoint is not None:
        if jobs > 1:
            raise Refusal(f"jobs={jobs}: a checkpoint keeps chains that follow one another; give one of the two")
        one = ChainsInTurn(method, chains, plan.steps)
        whole = replace(plan, blocks=plan.blocks * chains, chains=1)
        options: dict[str, Any] = {"likelihood": likelihood, "seed": seed, "progress": progress}
        run = fit(one, module, data, whole, checkpoint=checkpoint, closing=closing, **options)
        return replace(run, plan=plan, method=method)
    if closing is not None:
        raise Refusal("closing: is asked after chains of a checkpoint; give checkpoint=, or ask it afterwards")
    started = time.perf_counter()
    seeds = [None if seed is None else seed + chain for chain in range(chains)]
    if jobs == 1:
        source, runs = PaidTogether(data, times=chains), []
        for chain, own in enumerate(seeds):
            shown = None if progress is None else _offset(progress, chain * plan.steps, chains * plan.steps)
            runs.append(fit(method, module, source, plan, likelihood=likelihood, seed=own, progress=shown))
    else:
        rehearse(method, module, data, plan, likelihood=likelihood, seed=seed)
        runs = _in_workers(partial(_one_chain, reopen, method, module, plan, likelihood), data, plan, seeds, jobs)
    found: list[Any] = [run.posterior for run in runs]
    posterior = _pooled(found[0], [one.draws for one in found], [one.weights for one in found])
    events = tuple(event for run in runs for event in run.privacy.events)  # what sources charge beside the plan, too
    coarse = dict.fromkeys(one for run in runs for one in run.privacy.assumptions if one in ROUNDING)
    assumed = (*data.assumptions, *coarse)
    privacy = stated(Privacy(events, plan.delta, plan.adjacency, data.seeded, assumed), data)
    seconds = time.perf_counter() - started
    return Run(posterior, privacy, runs[0].plan, method, data.schema, seconds, head_behind(data, privacy))


@dataclass(frozen=True)
class ChainsState:
    """Functions of releases alone.

    inner      of the chain that runs
    start      the position at which every chain starts
    finished   draws of the chains before it, with their weights in `shares`
    """

    step: int
    inner: Any
    start: Tensor = field(repr=False)
    finished: tuple[Tensor, ...] = field(default=(), repr=False)
    shares: tuple[Tensor, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class ChainsInTurn(Method):
    """Several chains of a sampler as one run, one after the other: its plan has the steps of all of them.

    length   steps of one chain
    """

    method: Method
    chains: int
    length: int

    @property
    def name(self) -> str:  # type: ignore[override]
        """As the ledger and refusals say it."""
        return self.method.name

    @property
    def on_host(self) -> bool:  # type: ignore[override]
        return self.method.on_host

    def prepare(self, module: nn.Module) -> nn.Module:
        return self.method.prepare(module)

    def init(self, problem: Problem) -> ChainsState:
        start = problem.position.clone()
        return ChainsState(0, self.method.init(self._one(problem)), start)

    def ask(self, problem: Problem, state: ChainsState) -> Query:
        return self.method.ask(self._one(problem), state.inner)

    def tell(self, problem: Problem, state: ChainsState, release: Release) -> ChainsState:
        alone = self._one(problem)
        state = replace(state, step=state.step + 1, inner=self.method.tell(alone, state.inner, release))
        if state.step % self.length or state.step >= self.chains * self.length:
            return state
        over: Any = self.method.posterior(alone, state.inner)
        problem.position.copy_(state.start)
        return replace(
            state,
            inner=self.method.init(alone),
            finished=(*state.finished, over.draws.cpu().clone()),
            shares=(*state.shares, over.weights.cpu().clone()),
        )

    def posterior(self, problem: Problem, state: ChainsState) -> Posterior:
        last: Any = self.method.posterior(self._one(problem), state.inner)
        if not state.finished:  # a run that is rehearsed, or looked at, in its first chain
            found: Posterior = last
            return found
        return _pooled(last, [*state.finished, last.draws], [*state.shares, last.weights])

    def _one(self, problem: Problem) -> Problem:
        """The problem of one chain; a rehearsal has fewer steps than one."""
        plan = problem.plan
        if plan.steps <= self.length:
            return problem
        return replace(problem, plan=replace(plan, blocks=plan.blocks[: len(plan.blocks) // self.chains]))


def check_draws(method: Method, plan: Plan) -> None:
    """Refuse what `_pooled` could not pool, before anything is charged."""
    check_method(method)
    draws = method.draws_of(plan.steps)
    if draws is None:
        raise Refusal(
            f"method={method.name!r}: chains need a sampler, which says by draws_of(steps) how many draws it keeps; "
            f"use one of {', '.join(methods.samplers())}"
        )
    if draws < FEWEST_DRAWS:
        raise Refusal(
            f"steps={plan.steps}: this sampler would keep {draws} draws of a chain, and R-hat needs {FEWEST_DRAWS}; "
            "plan more steps, or give the method a smaller burn_in or thinning"
        )


def _in_workers(
    chain: Callable[[int | None, str, int], Run], data: Source, plan: Plan, seeds: Sequence[int | None], jobs: int
) -> list[Run]:
    """All chains are paid for under one name; each takes up its own steps of it, in another process."""
    import joblib

    if jobs < 1:
        raise Refusal(f"jobs={jobs}: must be at least 1")
    if data.ledger is None or not data.ledger.outlives_the_process:
        raise Refusal(f"jobs={jobs}: other processes cannot see a ledger in memory; give PrivateData the path of one")
    run = pay_ahead(data, plan.blocks * len(seeds), f"{len(seeds)} chains").run
    calls = [joblib.delayed(chain)(seed, run, number * plan.steps) for number, seed in enumerate(seeds)]
    return list(in_processes(calls, jobs, in_order=True))


def _one_chain(
    reopen: Callable[[], Source] | None,
    method: Method,
    module: nn.Module,
    plan: Plan,
    likelihood: Likelihood | None,
    seed: int | None,
    run: str,
    claimed: int,
) -> Run:
    """In another process: the records anew, and the steps after `claimed` of what was paid."""
    assert reopen is not None
    source = PaidAhead(reopen(), Purse(run, plan.blocks, claimed))
    return fit(method, module, source, plan, likelihood=likelihood, seed=seed)


def _offset(progress: Callable[[int, int], None], before: int, total: int) -> Callable[[int, int], None]:
    return lambda done, _: progress(before + done, total)


def _pooled(first: Any, draws: Sequence[Tensor], weights: Sequence[Tensor]) -> Draws:
    """All chains as one law, with what they say of each other where they are equally long."""
    facts = {**first.facts, "chains": len(draws), "draws": sum(map(len, draws))}
    if len({len(one) for one in draws}) == 1:
        stacked = torch.stack(list(draws))
        facts["largest_r_hat"] = split_r_hat(stacked).max().item()
        facts["smallest_effective_sample_size"] = effective_sample_size(stacked).min().item()
    shares = torch.cat(list(weights)) / len(weights)
    return with_mixing(Draws(first.module, first.likelihood, torch.cat(list(draws)), shares, facts))
