"""What it costs to carry the Bayesian accountant: `python -m benchmarks.bayesian_accountant [--json] [--quick]`.

Whole steps of DP-SGD through the boundary (sampling, clipping, noise, update), ratios to the same step without:

    watch       the norms of every batch are kept, for the rules of the paper
    hold_out    beside that, fresh records are looked at, as many per step as a batch has: about one more batch

Steps with and without the watch alternate in many short turns, and the median of the ratios of neighbouring turns is
what counts: it must stay below 1.05. Watching costs less than single ratios scatter, so its own time is measured too,
as a share of the step. After a run: seconds for each rule on 3516 steps of 256 records, or 10 000 hold-out records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch

import confide
from benchmarks import _harness, _models
from benchmarks._harness import Clock, Maker, Report, Step
from confide.mechanism.gaussian import SampledGaussian
from confide.methods.sgd import SGD
from confide.privacy import bayesian
from confide.privacy.events import GaussianEvent
from confide.running.fit import make_problem
from confide.sources.base import Source
from confide.sources.hold_out import HoldOut, Watch

MODELS = ("logistic", "cnn", "mlp1200")
BUDGET = 1.05  # what a step may cost with the watch, as a ratio
BATCHES = 16  # records in the data set, in batches
RUN = GaussianEvent(1.3, "poisson", 256 / 60_000, 3516)


def step_of(model: str, wrap: Callable[[_models.Case, Watch | None], Source], watched: bool) -> Step:
    """One step of SGD on this model, with or without somebody watching."""
    case = _models.build(model)
    source = wrap(case, Watch() if watched else None)
    records = BATCHES * case.batch
    plan = confide.plan(records=records, batch=case.batch, steps=10_000_000, noise_multiplier=1.0, delta=1e-5)
    problem = make_problem(SGD(), case.module, source.schema, plan, likelihood=_Loss(case))  # type: ignore[arg-type]
    method, state = SGD(), SGD().init(problem)
    source.charge(plan.blocks)

    def step() -> None:
        method.tell(problem, state, source.answer(method.ask(problem, state), plan.mechanism))

    return step


class _Loss:
    """The case's own loss, in the place of a likelihood."""

    def __init__(self, case: _models.Case) -> None:
        self.loss = case.loss


def private_data(case: _models.Case, watch: Watch | None) -> Source:
    x, y = (torch.cat([part] * BATCHES) for part in (case.x, case.y))
    classes = None if y.is_floating_point() else 10
    schema = confide.Schema(classes=classes, records=len(x))
    return confide.PrivateData(x, y, schema=schema, watch=watch)


def with_hold_out(case: _models.Case, watch: Watch | None) -> Source:
    x, y = (torch.cat([part] * BATCHES) for part in (case.x, case.y))
    return HoldOut(private_data(case, watch), x, y, looks=1 / BATCHES)


def contenders_of(model: str) -> tuple[Mapping[str, Maker], Mapping[str, Maker]]:
    """Two races, each against the step without: a third contender would lie between the neighbours."""
    without = {"without": partial(step_of, model, private_data, False)}
    return (
        {**without, "watch": partial(step_of, model, private_data, True)},
        {**without, "hold_out": partial(step_of, model, with_hold_out, True)},
    )


def watching(batch: int, clock: Clock, calls: int = 1 << 14) -> float:
    """Milliseconds of a call of the watch, with its share of joining what it has kept."""
    watch, mechanism = Watch(), SampledGaussian(1.0, 1.0, 0.1, 10 * batch)
    norms = [torch.rand(batch) for _ in range(calls)]
    start = clock()
    for each in norms:
        watch(mechanism, each)
    return 1e3 * (clock() - start) / calls


def rules(steps: int) -> Report:
    """Seconds for each rule after a run of so many steps."""
    random = np.random.default_rng(0)
    event = GaussianEvent(RUN.noise_multiplier, "poisson", RUN.rate)
    observed = [bayesian.Distances(event, random.beta(1, 3, 256)) for _ in range(steps)]
    shares = random.dirichlet(np.full(65, 0.3), 10_000)
    sequences = bayesian.Sequences(bayesian.level_kinds(event, 64), random.multinomial(steps, shares))
    work: dict[str, Callable[[], object]] = {
        "product": lambda: bayesian.product(observed, 1e-5),
        "hoelder": lambda: bayesian.hoelder(observed, 1e-5),
        "averaged": lambda: bayesian.averaged(sequences, 1e-5),
    }
    result: Report = {}
    for name, compute in work.items():
        start = time.perf_counter()
        compute()
        result[name] = {"seconds": time.perf_counter() - start}
    return result


def run(quick: bool, clock: Clock) -> Report:
    result: Report = {"machine": _harness.machine(), "models": {}, "watch_alone": {}, "within_budget": True}
    _harness.warn_if_busy(result["machine"])
    for model in MODELS:
        _harness.say(f"{model} ...")
        close, wide = contenders_of(model)
        rows = _harness.race(close, 4.0 if quick else 20.0, "without", clock)
        rows |= {"hold_out": _harness.race(wide, 2.0 if quick else 6.0, "without", clock)["hold_out"]}
        alone = watching(_models.build(model).batch, clock)
        result["models"][model] = rows
        result["within_budget"] &= rows["watch"]["ratio"] < BUDGET
        result["watch_alone"][model] = {"ms": alone, "share": alone / rows["without"]["ms"]}
    result["rules"] = rules(RUN.count)
    return result


def main() -> None:
    arguments = _harness.parser(__doc__)
    arguments.add_argument("--one-thread", action="store_true", help="processor time on one thread: for a busy machine")
    options = arguments.parse_args()
    clock = _harness.use_one_thread() if options.one_thread else time.perf_counter
    result = run(options.quick, clock)
    if options.json:
        _harness.print_json(result)
        return
    for model, rows in result["models"].items():
        _harness.print_table(f"{model} (ratio to the step without an accountant)", rows)
        alone = result["watch_alone"][model]
        print(f"  the watch alone: {1e3 * alone['ms']:.1f} microseconds, {100 * alone['share']:.2f} % of the step")
    print(
        f"\nevery step with the watch below {BUDGET} of the step without: {'yes' if result['within_budget'] else 'no'}"
    )
    print("\nafter a run of 3516 steps")
    for name, row in result["rules"].items():
        print(f"  {name:24}{row['seconds']:9.2f} s")


if __name__ == "__main__":
    main()
