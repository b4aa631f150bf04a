"""Private training steps against the peers: `python -m benchmarks.clipping [--json] [--quick] [--only NAME ...]`.

Every contender does a whole step (clipping, noise, update) on the same weights and records; ratios are to the plain,
non-private SGD step of the same model in the same round. `bbp`, `bbp_resnet18_gn` and `variational_dropout` compare
Bayesian layers with confide's own DP-SGD step on the same network; `scaling` fits how the time grows with the batch and
with the model.
Memory is the peak of resident memory over the first steps, in a fresh process for every contender, above what the
process held after all imports and two steps on a tiny model of the same kind; for plain SGD and confide the median
of several processes.
On a busy machine --one-thread measures processor time instead of wall-clock time.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial

from benchmarks import _bayesian, _harness, _models
from benchmarks._contenders import CONTENDERS
from benchmarks._harness import Clock, Maker, Report, Step
from benchmarks._scaling import scaling

CONFIDE = ["confide", "confide.mechanism.clipping", "confide.mechanism.noise", "confide.models.flat"]
PRELOAD = ["torch", "torch.func", "torch._dynamo", "opacus", "jax", "benchmarks._bayesian", *CONFIDE]
BAYESIAN = {
    "bbp": _bayesian.bayes_by_backprop,
    "bbp_resnet18_gn": _bayesian.residual_network,
    "variational_dropout": _bayesian.variational_dropout,
}
NAMES = [*_models.BUILDERS, *BAYESIAN, "scaling"]
QUICK_SECONDS, FULL_SECONDS = 2.0, 25.0  # for one model, shared by its contenders
# Gigabytes and seconds for each step, or for a compilation: in a quick run one contender on one model is enough to
# show it.
QUICK_SKIPS = {"mlp1200": ("vmap", "jax"), "mlp1000": ("opacus_hooks", "vmap", "jax"), "transformer": ("jax",)}
PROCESSES = 3  # in which memory is measured; one for the others, and in a quick run
TARGETED = ("plain", "confide")
QUICK_MEMORY = {"mlp1200": ("plain", "confide", "opacus_ghost")}


def contenders_of(model: str, tiny: bool = False) -> Mapping[str, Maker]:
    """Makers of every contender's step on one model."""
    return {name: partial(_make, make, model, tiny) for name, make in CONTENDERS.items()}


def _make(make: Callable[[_models.Case], Step], model: str, tiny: bool) -> Step:
    return make(_models.build(model, tiny))


def add_memory(results: Report, contenders: Callable[..., Mapping[str, Maker]], quick: bool) -> None:
    """Peaks above the imports and what a tiny model of the same kind needs."""
    for who, row in results.items():
        processes = PROCESSES if who in TARGETED and not quick else 1
        _harness.add_peak_memory({who: row}, contenders, PRELOAD, partial(contenders, tiny=True), processes)


def compare_model(name: str, quick: bool, clock: Clock) -> Report:
    """Ratios and memory of all contenders on one model."""
    makers = contenders_of(name)
    skipped = QUICK_SKIPS.get(name, ()) if quick else ()
    racing = {who: make for who, make in makers.items() if who not in skipped}
    results = _harness.race(racing, QUICK_SECONDS if quick else FULL_SECONDS, "plain", clock)
    measured = {who: row for who, row in results.items() if not quick or who in QUICK_MEMORY.get(name, ())}
    add_memory(measured, partial(contenders_of, name), quick)
    return {who: results.get(who, {"skipped": "left out of a quick run"}) for who in makers}


def compare_bayesian(name: str, quick: bool, clock: Clock) -> Report:
    results = _harness.race(BAYESIAN[name](), QUICK_SECONDS if quick else FULL_SECONDS, "dp_sgd", clock)
    if not quick:
        add_memory(results, BAYESIAN[name], quick)
    return results


def run(names: list[str], quick: bool, clock: Clock, show: Callable[[str, Report], None]) -> Report:
    """All that is asked for; `show` is given each part as soon as it is there."""
    result: Report = {"machine": _harness.machine(), "models": {}}
    _harness.warn_if_busy(result["machine"])
    start = time.perf_counter()
    for number, name in enumerate(names, 1):
        _harness.say(f"{name} ({number} of {len(names)}, {time.perf_counter() - start:.0f} s so far) ...")
        if name in BAYESIAN:
            result[name] = compare_bayesian(name, quick, clock)
        elif name == "scaling":
            result[name] = scaling(QUICK_SECONDS if quick else FULL_SECONDS, clock)
        else:
            result["models"][name] = compare_model(name, quick, clock)
        show(name, result[name] if name in result else result["models"][name])
    result["machine"]["load_after"] = _harness.machine()["load"]
    return result


def print_part(name: str, rows: Report) -> None:
    if name != "scaling":
        _harness.print_table(f"{name} (ratio to {'DP-SGD' if name in BAYESIAN else 'plain SGD'})", rows)
        return
    for what, lines in rows.items():
        print(f"\nstep time against {what}, log-log slope")
        for who, row in lines.items():
            print(f"  {who:24}{row['error'] if 'error' in row else format(row['slope'], '9.2f')}", flush=True)


def show_nothing(name: str, rows: Report) -> None:
    """With --json the result is printed whole, at the end."""


def main() -> None:
    arguments = _harness.parser(__doc__)
    arguments.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    _harness.add_clock(arguments)
    options = arguments.parse_args()
    warnings.simplefilter("ignore")  # of the peers, about their own future
    clock = _harness.use_one_thread() if options.one_thread else time.perf_counter
    result = run(options.only, options.quick, clock, show_nothing if options.json else print_part)
    if options.json:
        _harness.print_json(result)


if __name__ == "__main__":
    main()
