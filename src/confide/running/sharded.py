"""A fit of a network that `fully_shard` has spread over the ranks: the loop of `fit`, on each rank's own numbers.

    with confide.distributed.start() as ranks:
        for layer in network:
            fully_shard(layer)
        fully_shard(network)
        data = ranks.private(records, schema=schema, ledger="budget.db", name="patients")
        run = confide.fit_sharded(method, network, data, plan, draws="draws.safetensors", checkpoint="DIR")

Position, release, the method's state and its draws are this rank's part of the vector. Draws are written by the first
rank as they come, one weight after the other, and nobody holds two of them: what is kept are the trainable parameters.
Methods must move every coordinate by that coordinate's own release; their own random numbers differ from rank to rank.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from confide.data import trees
from confide.distributed.ranks import Ranks
from confide.distributed.spread import SpreadNetwork, is_spread
from confide.errors import Refusal
from confide.mechanism.clipping import Recordwise
from confide.mechanism.clipping.places import UNEVEN
from confide.mechanism.plan import Plan
from confide.methods._chain import ChainState
from confide.methods.base import Method, Problem, check_method
from confide.methods.sgd import SGD
from confide.methods.sghmc import SGHMC
from confide.methods.sgld import SGLD
from confide.models.likelihoods import Likelihood
from confide.models.priors import PRIORS
from confide.posteriors.draws import Draws
from confide.posteriors.files import check_saveable
from confide.posteriors.mapped import DrawWriter, MappedDraws, open_draws
from confide.privacy.statement import Privacy
from confide.running.crews import digest_of, versions_here
from confide.running.fit import Run, check_sizes, default_likelihood, head_behind, stated
from confide.running.journal import Attempt, CheckpointPlace, Journal, KeptJournal
from confide.running.sharded_journal import spread_journal
from confide.sources.base import Source
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, Query, StatisticQuery

SPREAD: tuple[type[Method], ...] = (SGLD, SGHMC, SGD)
"""Methods that move every coordinate by itself, from the release in that coordinate."""


def fit_sharded(
    method: Method,
    module: nn.Module,
    data: Source,
    plan: Plan,
    *,
    draws: str | os.PathLike[str],
    likelihood: Likelihood | None = None,
    seed: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    secure: bool = False,
    checkpoint: CheckpointPlace = None,
) -> Run | None:
    """Fit a network that fully_shard has spread over the ranks; the run on rank 0, which has the file, else None.

    draws        a new file of draws, which rank 0 writes while the run lasts; see `confide.posteriors.mapped`
    checkpoint   a directory from which a run that was killed goes on, with as many ranks: each keeps its own part there
    Everything else is as for `confide.fit`. The network stays as it was.
    """
    started = time.perf_counter()
    ranks = _ranks_of(data)
    plan = plan.secured() if secure else plan
    network, problem, query = _prepared(method, module, data, plan, likelihood, seed, ranks)
    place = Path(draws)
    state = ranks.together(lambda: method.init(problem))
    _rehearse(network, problem, query, data)
    attempt, writing = Attempt(method, problem, data, state), _Writing(ranks)
    with spread_journal(checkpoint, attempt, network, writing.flush) as book, writing:
        writing.open(place, method, problem, book)
        book.charge(plan)  # before any record is read
        state = book.state
        for step, mechanism in book.left():
            with network.whole(problem.position):
                release = data.answer(query, mechanism, book.receipt)
            state = method.tell(problem, state, release)
            state = _handed_over(network, state, writing.write)
            book.keep(step, state)
            if progress is not None:
                progress(step, plan.steps)
        if not isinstance(state, ChainState):
            average = getattr(state, "average", None)
            writing.write(network.pieces(problem.position if average is None else average), 1.0)
    assumed = (*data.assumptions, UNEVEN)  # nobody has looked at products of weights that are spread
    privacy = stated(Privacy(book.events, plan.delta, plan.adjacency, data.seeded, assumed), data)
    head = head_behind(data, privacy)
    public = network.fresh()  # never shown a record
    posterior: MappedDraws | None = ranks.together(
        lambda: open_draws(place, public, likelihood=problem.likelihood) if ranks.leads else None
    )
    if posterior is None:
        return None
    return Run(posterior, privacy, plan, method, data.schema, time.perf_counter() - started, head)


def _ranks_of(data: Source) -> Ranks:
    if type(data) is not PrivateData or not isinstance(data.crew, Ranks):
        raise Refusal(f"data={type(data).__name__}: a sharded network needs a source from ranks.private(...)")
    return data.crew


def _prepared(
    method: Method,
    module: nn.Module,
    data: Source,
    plan: Plan,
    likelihood: Likelihood | None,
    seed: int | None,
    ranks: Ranks,
) -> tuple[SpreadNetwork, Problem, GradientQuery]:
    """This rank's side of the fit, once all ranks are about to make the same one."""

    def made() -> tuple[SpreadNetwork, Problem]:
        _check_method(method)
        check_sizes(data.schema, plan)
        if not is_spread(module):
            raise Refusal("module: is whole on every rank; call fully_shard on it, or use confide.fit")
        network = SpreadNetwork(module, ranks)
        explained = default_likelihood(network.plain, data.schema) if likelihood is None else likelihood
        problem = Problem(network.plain, network.position(), explained, plan, _generator(seed, ranks.rank))
        check_saveable(network.plain, explained, method.posterior)
        return network, problem

    network, problem = ranks.together(made)
    whole = [(name, value) for name, value in module.named_buffers()]
    whole += [(name, value) for name, value in module.named_parameters() if type(value) is nn.Parameter]
    ranks.agree(
        {
            "method": repr(method),
            "plan": repr(plan),
            "schema": repr(data.schema),
            "likelihood": repr(problem.likelihood),
            "network": repr(network.plain),
            "parts": repr(network.parts),
            "buffers": " ".join(f"{name} {digest_of(value)}" for name, value in whole if not value.requires_grad),
            "seed": str(seed),
            "versions": versions_here(),
        }
    )
    return network, problem, replace(problem.gradient_query, parts=network.parts)


def _check_method(method: Method) -> None:
    check_method(method)
    if type(method) not in SPREAD:
        names = ", ".join(known.name for known in SPREAD)
        raise Refusal(f"method={method.name!r}: looks at several coordinates at once; a sharded network takes {names}")
    prior = getattr(method, "prior", None)
    if type(prior) not in PRIORS.values():
        raise Refusal(f"prior={prior!r}: may look at several coordinates at once; use one of confide's own")


def _generator(seed: int | None, rank: int) -> torch.Generator:
    """The method's own randomness, apart on every rank: their coordinates must not move alike."""
    generator = torch.Generator()
    drawn = secrets.token_bytes(16) if seed is None else f"seed {seed} of rank {rank}".encode()
    return generator.manual_seed(int.from_bytes(hashlib.sha256(drawn).digest()[:7]))


def _rehearse(network: SpreadNetwork, problem: Problem, query: GradientQuery, data: Source) -> None:
    """On made-up records: what could not be clipped, or could not predict, is refused before the charge."""

    plain, likelihood = network.plain, problem.likelihood  # the weights that are spread are out of its reach

    def predicted(x: Any, _: Tensor) -> Tensor:
        draw = torch.cat([value.detach().reshape(-1) for value in plain.parameters() if value.requires_grad])
        Draws(plain, likelihood, draw[None], torch.ones(1, dtype=draw.dtype)).predict(x)
        return torch.zeros(trees.size_of(x), 1, dtype=torch.float64)

    queries: tuple[Query, ...] = (query, StatisticQuery(Recordwise(predicted), 1))
    with network.whole(problem.position):
        for one in queries:
            data.crew.together(lambda one=one: data.rehearse(one))  # type: ignore[misc]


def _handed_over(network: SpreadNetwork, state: Any, write: Callable[[Iterator[Tensor], float], None]) -> Any:
    """A sampler's state without the draw that it has just kept, which is written down."""
    if not isinstance(state, ChainState) or not state.draws:
        return state
    (draw,) = state.draws
    write(network.pieces(draw), state.weights[-1])
    return replace(state, draws=())


class _Writing(ExitStack):
    """A way to write draws that every rank takes part in; the first one has the file."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        self._writer: DrawWriter | None = None

    def open(self, place: Path, method: Method, problem: Problem, book: Journal) -> None:
        """Refuse a file that cannot be written, before the charge; go on with the draws that the journal knows of."""

        def opened() -> DrawWriter | None:
            if not self._ranks.leads:
                return None
            folder = place.absolute().parent
            if place.exists():
                raise Refusal(f"draws={str(place)!r}: exists already; name a new file")
            if not folder.is_dir():
                raise Refusal(f"draws={str(place)!r}: the folder {folder} does not exist; make it first")
            count = method.draws_of(problem.plan.steps) or 1
            kept = folder / f".{place.name}.{book.what[:16]}.unfinished" if isinstance(book, KeptJournal) else None
            shape: dict[str, Any] = {"dtype": problem.position.dtype, "facts": _facts(method, problem, count)}
            made = DrawWriter(place, problem.module, problem.likelihood, count, draft=kept, **shape)
            writer = self.enter_context(made)
            writer.go_on(book.state.weights if isinstance(book.state, ChainState) else ())
            return writer

        self._writer = self._ranks.together(opened)

    def write(self, pieces: Iterator[Tensor], weight: float) -> None:
        if self._writer is not None:
            self._writer.add_pieces(pieces, weight)
        else:
            for _ in pieces:
                pass

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()


def _facts(method: Method, problem: Problem, count: int) -> dict[str, Any]:
    """What a posterior of the method says of itself; none of it depends on the network, so that a small one does."""
    small = nn.Linear(1, 1, bias=False)
    like = Problem(small, torch.zeros(1), problem.likelihood, problem.plan, torch.Generator())
    state = method.init(like)
    if isinstance(state, ChainState):
        state = replace(state, step=problem.plan.steps, draws=(torch.zeros(1),) * count, weights=(1.0,) * count)
    return {"noise_in_width": method.noise_in_width, **method.posterior(like, state).facts}
