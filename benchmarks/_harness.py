"""How the benchmarks measure: contenders in turn within one run, ratios round by round, memory in processes apart.

A time on a shared machine says little, the ratio of two times taken one after the other says much. So in every round
each contender gets a turn, its time is divided by that of the reference in the same round, and the median and the
quartiles of those ratios are reported.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Step = Callable[[], None]
Clock = Callable[[], float]
Maker = Callable[[], Step]
Report = dict[str, Any]

TURN_SECONDS = 0.05  # a turn repeats a short step until it has lasted this long
MEMORY_STEPS = 4  # what is set up in the first is not repeated, what leaks from one to the next is seen
MEMORY_SECONDS = 120.0  # a process that measures memory is given up after this
SLOW_SECONDS = 0.5  # a step that takes longer need not be repeated when time is short
FEWEST_ROUNDS = 3  # for the others, however short the time: a median of one round is no median


@dataclass
class Record:
    """What one contender did: its time per step in every round it took part in, and how long it was at work."""

    step: Step
    first: float  # seconds of the first step, with compilation and first allocations
    seconds: dict[int, float] = field(default_factory=dict)
    used: float = 0.0

    @property
    def slow(self) -> bool:
        return min([self.first, *self.seconds.values()]) > SLOW_SECONDS

    def has_time(self, share: float) -> bool:
        """Whether another turn is due."""
        return self.used < share or (len(self.seconds) < FEWEST_ROUNDS and not self.slow)


def time_one(step: Step, clock: Clock) -> float:
    start = clock()
    step()
    return clock() - start


def time_turn(record: Record, clock: Clock) -> float:
    """Median seconds per step of one turn: three steps at least, unless they are long."""
    times = [time_one(record.step, clock)]
    while sum(times) < TURN_SECONDS or (len(times) < 3 and times[0] < 2 * TURN_SECONDS):
        times.append(time_one(record.step, clock))
    return statistics.median(times)


def race(
    makers: Mapping[str, Maker],
    seconds: float,
    reference: str | None,
    clock: Clock = time.perf_counter,
    wall: Clock = time.perf_counter,
) -> Report:
    """Let the contenders take turns until each has had its share of `seconds`; slow ones are done first.

    Steps are timed by `clock`, shares by the clock on the wall. A contender that cannot be made or that fails is
    reported with its reason and takes no further part.
    """
    failures: Report = {}
    runners: dict[str, Record] = {}
    for name, make in makers.items():
        try:
            step = make()
            runners[name] = Record(step, time_one(step, clock))
        except Exception as failure:
            failures[name] = {"error": reason(failure)}
    gc.collect()
    gc.freeze()  # so that collecting before every turn looks only at what the turns have left behind
    share = seconds / len(makers)
    for number in range(10_000):
        waiting = [name for name, record in runners.items() if record.has_time(share) and name not in failures]
        if not set(waiting) - {reference}:
            break
        for name in rotated(sorted({*waiting, reference or waiting[0]} & set(runners) - set(failures)), number):
            try:
                _take_turn(runners[name], number, clock, wall)
            except Exception as failure:
                failures[name] = {"error": reason(failure)}
    gc.unfreeze()
    base = runners[reference].seconds if reference in runners else None
    return {name: failures.get(name) or summary(runners[name].seconds, base) for name in makers}


def _take_turn(record: Record, number: int, clock: Clock, wall: Clock) -> None:
    gc.collect()
    start = wall()
    if not record.slow:
        record.step()  # untimed: it refills the caches that the others have emptied
    record.seconds[number] = time_turn(record, clock)
    record.used += wall() - start


def rotated(names: list[str], by: int) -> Iterator[str]:
    """A different one goes first in every round."""
    shift = by % len(names)
    yield from names[shift:] + names[:shift]


def summary(seconds: Mapping[int, float], base: Mapping[int, float] | None) -> Report:
    """Milliseconds per step, and the ratio to the reference with its quartiles."""
    result: Report = {"ms": 1e3 * statistics.median(seconds.values()), "rounds": len(seconds)}
    if base is not None:
        ratios = [time_ / base[number] for number, time_ in seconds.items() if number in base]
        low, middle, high = quartiles(ratios)
        result |= {"ratio": middle, "ratio_low": low, "ratio_high": high}
    return result


def quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def absent(row: Report) -> str:
    """Why a contender has no numbers, or nothing."""
    return str(row.get("error") or row.get("skipped") or "")


def reason(failure: BaseException) -> str:
    """One line on why a contender is missing."""
    text = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {text[0] if text else 'no message'}"[:200]


# Memory


Contenders = Callable[[], Mapping[str, Maker]]


def add_peak_memory(
    results: Report, contenders: Contenders, preload: list[str], tiny: Contenders | None = None, processes: int = 1
) -> None:
    """Add `peak_mb`, what a few steps need above the imports, each contender measured in processes of its own.

    The processes are forked from a server that has done the imports and nothing else. With `tiny`, the same contenders
    on tiny models, two steps of those come first: the code that is then read from the disk and what a library sets up
    once are no memory of a step. The median over the processes is reported.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    for name, result in results.items():
        if absent(result):
            continue
        answers = [_peak_in_process(context, (contenders, tiny, name)) for _ in range(processes)]
        peaks = [answer for answer in answers if isinstance(answer, float)]
        if len(peaks) == len(answers):
            result["peak_mb"] = statistics.median(peaks)
        else:
            result["peak_error"] = next(answer for answer in answers if not isinstance(answer, float))


def _peak_in_process(context: Any, arguments: tuple[Contenders, Contenders | None, str]) -> float | str:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_peak, args=(sender, *arguments))
    process.start()
    sender.close()
    answer: Any = "no answer"
    if receiver.poll(MEMORY_SECONDS):
        try:
            answer = receiver.recv()
        except EOFError:
            answer = "the process died"
    process.join(1.0)
    process.kill()
    return answer if isinstance(answer, float) else str(answer)


def _send_peak(sender: Any, contenders: Contenders, tiny: Contenders | None, name: str) -> None:
    warnings.simplefilter("ignore")
    try:
        if tiny is not None:
            _warm_up(tiny()[name]())
        gc.collect()
        before = _reset_peak()
        step = contenders()[name]()
        start = time.perf_counter()
        step()
        if time.perf_counter() - start < SLOW_SECONDS:
            for _ in range(MEMORY_STEPS - 1):
                step()
        sender.send((_status("VmHWM") - before) / 1024)
    except Exception as failure:
        sender.send(reason(failure))


def _warm_up(step: Step) -> None:
    step()
    step()


def _reset_peak() -> float:
    """Forget the peak of the imports; return the memory in use, in kB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(entry: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(entry + ":"))


# Input and output


def parser(description: str | None) -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments.add_argument("--quick", action="store_true", help="finish within a minute")
    return arguments


def machine() -> Report:
    """What the numbers were measured on, and whether somebody else was at work there."""
    load = os.getloadavg()[0]
    processors = os.cpu_count() or 1
    return {"processors": processors, "load": load, "busy": load > 0.5 * processors}


def warn_if_busy(state: Report) -> None:
    if state["busy"]:
        say(f"warning: the machine is busy (load {state['load']:.1f}); ratios will scatter, times mean little")


def add_clock(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument("--one-thread", action="store_true", help="processor time on one thread: for a busy machine")


def use_one_thread() -> Clock:
    """For a busy machine: everything on one thread, timed by the processor time of this process.

    To be called before JAX is imported, which reads its settings only then.
    """
    import torch

    torch.set_num_threads(1)
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    return time.process_time


def say(text: str) -> None:
    """Progress and warnings, beside the results."""
    print(text, file=sys.stderr, flush=True)


def main(
    description: str | None,
    run: Callable[[float, Clock], Report],
    seconds: tuple[float, float],
    show: Callable[[Report], None],
) -> None:
    """A race from the command line: `seconds` for --quick and without it, the result as JSON or as `show` prints it."""
    arguments = parser(description)
    add_clock(arguments)
    options = arguments.parse_args()
    clock = use_one_thread() if options.one_thread else time.perf_counter
    result = run(seconds[0] if options.quick else seconds[1], clock)
    (print_json if options.json else show)(result)


def print_json(result: Report) -> None:
    print(json.dumps(rounded(result)))


def rounded(value: Any) -> Any:
    """Four significant digits everywhere."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def print_table(title: str, results: Report) -> None:
    """One line per contender: ratio with its quartiles, milliseconds, memory, or the reason why it is missing."""
    print(f"\n{title}")
    print(f"  {'':24}{'ratio':>9}  {'quartiles':>17}{'ms':>11}{'peak MB':>10}{'rounds':>8}")
    for name, row in results.items():
        if absent(row):
            print(f"  {name:24}{absent(row)}")
            continue
        ratio = f"{row['ratio']:9.2f}" if "ratio" in row else f"{'':9}"
        spread = f"{row['ratio_low']:8.2f} {row['ratio_high']:8.2f}" if "ratio" in row else f"{'':17}"
        memory = f"{row['peak_mb']:10.0f}" if "peak_mb" in row else f"{'-':>10}"
        print(f"  {name:24}{ratio}  {spread}{row['ms']:11.2f}{memory}{row['rounds']:8}")
        if "peak_error" in row:
            print(f"  {'':24}no memory measured: {row['peak_error']}")
    sys.stdout.flush()
