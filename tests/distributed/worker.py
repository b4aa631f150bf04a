"""What one rank does in the tests: python -m tests.distributed.worker FOLDER TIMEOUT [[LABEL, CASE, OPTIONS], ...].

Starting a process costs seconds, so one start does many cases in turn. A case is a function of (ranks, folder,
options) with a folder of its own; what it returns, or the error it ends in, is written to said-RANK.json by its label.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import confide
from confide.distributed import Ranks, memory, start
from confide.distributed.spread import SpreadNetwork
from confide.mechanism.clipping import Recordwise
from confide.mechanism.gaussian import SampledGaussian
from confide.models import networks
from confide.running.checkpoint_files import sealed, unsealed, write
from confide.running.closing import Closing
from confide.running.fit import default_likelihood
from confide.running.journal import JOURNAL, Checkpoints
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, StatisticQuery
from tests.distributed import problems
from tests.distributed.faults import planted

Case: TypeAlias = Callable[[Ranks, Path, dict[str, Any]], Any]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def save(ranks: Ranks, path: Path, tensor: Tensor) -> None:
    if ranks.leads:
        np.save(path, tensor.numpy())


# -- one release -------------------------------------------------------------------------------------------------------


@case
def sums(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """The sum over uneven shards without noise, of gradients and of a statistic."""
    found: dict[str, Any] = {}
    for kind in ("float32", "float64"):
        dtype = getattr(torch, kind)
        x, y = problems.records(dtype)
        own = problems.shard(ranks.rank, ranks.size, options.get("empty", False))
        data = ranks.private(x[own], y[own], schema=problems.SCHEMA)
        total = data.answer(problems.gradient(dtype), problems.OFF).sum
        found[kind] = digest(total)
        save(ranks, folder / f"{kind}.npy", total)
        # A vector that is shorter than there are ranks.
        count = StatisticQuery(lambda x, y: torch.ones(len(x), 1, dtype=torch.float64), 1)
        found[f"{kind}, count"] = data.answer(count, replace(problems.OFF, clip=1.0)).sum.tolist()
    return found


@case
def noise(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """Releases of nothing but noise."""
    x, y = problems.records(torch.float64)
    own = problems.shard(ranks.rank, ranks.size)
    data = ranks.private(x[own][:4], y[own][:4], schema=problems.SCHEMA, seed=options.get("seed"))
    mechanism = SampledGaussian(1.3, 0.7, 1.0, len(x), "full-batch", secure=options.get("secure", False))
    data.charge([(mechanism, problems.ROUNDS)])
    releases = [data.answer(problems.ZEROS, mechanism) for _ in range(problems.ROUNDS)]
    save(ranks, folder / "noise.npy", torch.stack([each.sum for each in releases]) / mechanism.noise_std)
    return [digest(each.sum) for each in releases]


@case
def batches(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """How many records of each rank answer at every step, told without noise; the shards are of one size."""
    x, y = problems.records(torch.float64)
    own = slice(len(x) * ranks.rank // ranks.size, len(x) * (ranks.rank + 1) // ranks.size)
    data = ranks.private(x[own], y[own], schema=problems.SCHEMA)
    rank, size = ranks.rank, ranks.size
    mine = StatisticQuery(lambda a, b: torch.eye(size, dtype=torch.float64)[rank].expand(len(a), size), size)
    step = SampledGaussian(0.0, 10.0, problems.RATE, len(x), "poisson", private=False)
    data.charge([(step, problems.STEPS)])
    counts = torch.stack([data.answer(mine, step).sum for _ in range(problems.STEPS)])
    save(ranks, folder / "counts.npy", counts)
    ranks.agree({"counts": digest(counts)})
    return digest(counts)


@case
def ways(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """One sum through memory in common, over the wire, and where a rank does not reach the memory; ranks may dawdle."""
    found: dict[str, Any] = {}
    for way in ("memory", "wire", "one is apart"):
        ranks._common, ranks._apart = None, way == "wire"
        blind = (
            patch.object(memory, "opened", lambda *_: None) if way == "one is apart" and ranks.rank else nullcontext()
        )
        sums = []
        with blind:
            for length in (30_001, 70_000, 30_001):
                own = ranks.blank(length, torch.float32)
                own += torch.randn(length, generator=torch.Generator().manual_seed(ranks.rank))
                time.sleep(0.05 * (ranks.rank == length % 2))  # whoever is late is waited for, before and after
                sums.append(digest(ranks.add_up(own, "ways", torch.ones)))
        found[way] = [sums, ranks._common is not None]
    ranks._common, ranks._apart = None, False
    found["left"] = Path("/proc/self/maps").read_text().count("memfd:confide")
    return found


# -- whole runs --------------------------------------------------------------------------------------------------------


def ledger_of(ranks: Ranks, folder: Path, every: bool = False) -> confide.Ledger | None:
    return confide.Ledger(folder / "budget.db") if ranks.leads or every else None


def charged(ranks: Ranks, folder: Path) -> list[Any]:
    """What the ledger holds: purpose and steps of every entry."""
    if not ranks.leads or not (folder / "budget.db").exists():
        return []
    with confide.Ledger(folder / "budget.db") as ledger:
        return [[entry.purpose, entry.event.count] for entry in ledger.entries()]


def private(ranks: Ranks, folder: Path, **options: Any) -> PrivateData:
    x, y = problems.records(torch.float32)
    ledger = ledger_of(ranks, folder)
    return ranks.private(x, y, whole=True, schema=problems.SCHEMA, ledger=ledger, name="d", **options)


def bits(run: confide.Run) -> str:
    """Of what the run predicts."""
    found = run.posterior.predict(problems.records(torch.float32)[0][:5])
    return digest(torch.as_tensor(np.asarray(found.probabilities)))


@case
def fit(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """A fit with a network of each rank's own, of which rank 0's is taken."""
    method = getattr(confide.methods, options["method"])()
    plan = problems.plan(noise=options.get("noise", [1.0])[-ranks.rank :][0])
    network = networks.mlp(problems.FEATURES, 3, hidden=(16,))
    run = confide.fit(method, network, private(ranks, folder), plan, secure=options.get("secure", False))
    return [bits(run), run.privacy.epsilon(), charged(ranks, folder), list(run.privacy.assumptions)]


@case
def drifting(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """Rank 1 computes otherwise than rank 0, as another processor or another number of threads does."""
    kind = getattr(confide.methods, options["method"])
    tell = kind.tell

    def otherwise(self: Any, problem: Any, state: Any, release: Any) -> Any:
        found = tell(self, problem, state, release)
        problem.position.mul_(1 + 1e-3 * ranks.rank)
        return replace(found, theta=found.theta * (1 + 1e-3 * ranks.rank)) if "theta" in vars(found) else found

    network = networks.mlp(problems.FEATURES, 3, hidden=(8,))
    with patch.object(kind, "tell", otherwise):
        return bits(confide.fit(kind(), network, private(ranks, folder), problems.plan(steps=20)))


@case
def renamed(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """Records that were fitted before, under another name and with each part on another rank; the name of each fit."""
    x, y = problems.records(torch.float32)
    names = []
    for turn, name in enumerate(("before", "again")):
        own = problems.shard((ranks.rank + turn) % ranks.size, ranks.size)
        data = ranks.private(x[own], y[own], schema=problems.SCHEMA, ledger=ledger_of(ranks, folder), name=name)
        names.append(data.name)
        confide.fit(confide.methods.SGD(), networks.linear(problems.FEATURES, 3), data, problems.plan(steps=2))
    return names


@case
def chains(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """Two chains that are paid for together."""
    network = networks.mlp(problems.FEATURES, 3, hidden=(8,))
    run = confide.fit_chains(confide.methods.SGLD(), network, private(ranks, folder), problems.plan(steps=20), chains=2)
    return [bits(run), charged(ranks, folder)]


class BrokenOffError(Exception):
    """What ends a run between two steps."""


def breaking_at(step: int) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done == step:
            raise BrokenOffError

    return progress


def broken_off(work: Callable[[], Any]) -> None:
    try:
        work()
    except BrokenOffError:
        return
    raise AssertionError("the run was to break off")


@case
def resumed(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """A run that breaks off after step 7 of 12 with a checkpoint after every 3, and goes on."""
    network = networks.mlp(problems.FEATURES, 3, hidden=(16,))
    arguments = (confide.methods.SGLD(), network, private(ranks, folder), problems.plan())
    checkpoint = Checkpoints(folder / f"checkpoints-{0 if ranks.leads else 'none'}", every=3)
    broken_off(lambda: confide.fit(*arguments, checkpoint=checkpoint, progress=breaking_at(7)))
    before = charged(ranks, folder)
    run = confide.fit(*arguments, checkpoint=checkpoint)
    steps = sum(event.count for event in run.privacy.events)
    return [bits(run), before, charged(ranks, folder), steps, Path(checkpoint.directory).exists()]


@case
def closed(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """A closing question with checkpoints, asked by all ranks and kept by the first; then the same run again."""
    answers: list[float] = []

    def ask(posterior: Any) -> StatisticQuery:
        return StatisticQuery(Recordwise(lambda x, _: torch.ones(len(x), 1, dtype=torch.float64)), 1)

    def tell(posterior: Any, release: Any) -> Any:
        answers.append(release.sum.item())
        return posterior

    closing = Closing(SampledGaussian(2.0, 1.0, 1.0, 1, "full-batch"), "a count", ask, tell)
    network = networks.mlp(problems.FEATURES, 3, hidden=(4,))
    checkpoint = Checkpoints(folder / f"checkpoints-{0 if ranks.leads else 'none'}", every=5)
    for _ in range(2):
        source = private(ranks, folder)
        confide.fit(
            confide.methods.SGLD(), network, source, problems.plan(), seed=3, checkpoint=checkpoint, closing=closing
        )
    return [answers, charged(ranks, folder)]


# -- refusals ----------------------------------------------------------------------------------------------------------


@case
def overspent(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """A ceiling that does not suffice, with or without checkpoints."""
    if ranks.leads:
        with confide.Ledger(folder / "budget.db") as ledger:
            ledger.limit(0.01, 1e-5)
    found = []
    for checkpoint in (None, folder / "checkpoints"):
        try:
            network = networks.linear(problems.FEATURES, 3)
            confide.fit(confide.methods.SGD(), network, private(ranks, folder), problems.plan(), checkpoint=checkpoint)
        except confide.BudgetExceeded as error:
            found.append(str(error))
    return [found, charged(ranks, folder)]


@case
def same_shard(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """Parts that share `shared` of their rows; the rest is each rank's own."""
    x, y = problems.records(torch.float32)
    own, size = torch.arange(len(x)), len(x) // (2 * ranks.size)
    common = round(size * options["shared"])
    start = size * (ranks.rank + 1)
    mine = torch.cat([own[:common], own[start : start + size - common]])
    return list(ranks.private(x[mine], y[mine], schema=problems.SCHEMA).assumptions)


@case
def sharded_network(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """A network that other means have spread over the processes."""
    network: torch.nn.Module = torch.nn.Linear(problems.FEATURES, 3)
    if options["by"] == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        fully_shard(network)
    elif options["by"] == "ddp":
        network = torch.nn.parallel.DistributedDataParallel(network)
    else:
        network = torch.nn.Sequential(network, torch.nn.SyncBatchNorm(3))
    confide.fit(confide.methods.SGD(), network, private(ranks, folder), problems.plan())


def spread_out(network: torch.nn.Module, apart: bool = True) -> torch.nn.Module:
    """As users of fully_shard do: every layer that has weights by itself, then the whole."""
    from torch.distributed.fsdp import fully_shard

    for layer in network.children():
        if apart and any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(network)
    return network


def local_parts(network: Any) -> list[Tensor]:
    """This rank's numbers of every weight."""
    return [value.to_local().clone() for value in network.parameters()]


@case
def sharded_fit(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """A fit of a network that is spread over the ranks; what rank 0 has of it, beside one process without noise."""
    dtype = getattr(torch, options.get("kind", "float32"))
    x, y = problems.records(dtype)
    data = ranks.private(x, y, whole=True, schema=problems.SCHEMA, ledger=ledger_of(ranks, folder), name="d")
    network = spread_out(problems.foreign(options["network"]).to(dtype), options["network"] == "plain")
    problems.SCRIPT["network"] = network
    before = local_parts(network)
    arguments = (problems.METHODS[options["method"]], network, data, problems.sharded_plan(options["method"]))
    more: dict[str, Any] = {"draws": folder / "draws.safetensors", "secure": options.get("secure", False)}
    if "broken" in options:  # every rank has a disk of its own
        more["checkpoint"] = Checkpoints(folder / f"checkpoints-{ranks.rank}", every=2)
        broken_off(lambda: confide.fit_sharded(*arguments, **more, progress=breaking_at(options["broken"])))
        if options.get("lost") and not ranks.leads:
            shutil.rmtree(folder / f"checkpoints-{ranks.rank}")
        if options.get("written_by") and ranks.leads:
            note = folder / "checkpoints-0" / JOURNAL
            write(note, sealed({**(unsealed(note) or {}), "ranks": options["written_by"]}))
    run = confide.fit_sharded(*arguments, **more)
    same = all(torch.equal(a, b) for a, b in zip(before, local_parts(network), strict=True))
    if run is None:
        return [same, charged(ranks, folder)]
    posterior: Any = run.posterior
    np.save(folder / "draws.npy", posterior.draws.numpy())
    return [same, charged(ranks, folder), posterior.predict(x[:5]).probabilities.tolist(), dict(posterior.facts)]


@case
def sharded_noise(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """Releases of nothing but noise, each rank's own numbers of them."""
    x, y = problems.records(torch.float32)
    data = ranks.private(x[:0], y[:0], schema=problems.SCHEMA)
    network = SpreadNetwork(spread_out(networks.mlp(problems.FEATURES, 3, hidden=(4001,))), ranks)
    mechanism = SampledGaussian(1.3, 0.7, 1.0, len(x), "full-batch", secure=options.get("secure", False))
    data.charge([(mechanism, problems.ROUNDS)])
    loss = default_likelihood(network.plain, problems.SCHEMA).loss
    own = []
    for _ in range(problems.ROUNDS):
        with network.whole(network.position()) as plain:
            query = GradientQuery(plain, loss, network.parts)
            own.append(data.answer(query, mechanism).sum / mechanism.noise_std)
    np.save(folder / f"noise-{ranks.rank}.npy", torch.stack(own).numpy())
    return [len(own[0]), sum(map(sum, network.parts))]


@case
def sharded_refusal(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """Networks, methods and files that cannot be had."""
    from torch.distributed.fsdp import fully_shard

    network, method, place = problems.foreign("plain"), problems.METHODS["SGD"], folder / "draws.safetensors"
    if options["what"] == "a parted tie":
        network = problems.foreign("tied")
        fully_shard(network.first)
        fully_shard(network.again)
    if options["what"] == "half a network":
        fully_shard(network[0])
    elif options["what"] != "a plain network":
        fully_shard(network)
    if options["what"] == "a method of many coordinates":
        method = confide.methods.SGNHT()
    if options["what"] == "no folder":
        place = folder / "none" / "draws.safetensors"
    try:
        confide.fit_sharded(method, network, private(ranks, folder), problems.plan(), draws=place)
    finally:
        assert charged(ranks, folder) == []


@case
def other_table(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """whole=True with tables that differ in one number."""
    x, y = problems.records(torch.float32)
    x[7, 3] += ranks.rank
    ranks.private(x, y, whole=True, schema=problems.SCHEMA)


@case
def other_schema(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    x, y = problems.records(torch.float32)
    schema = confide.Schema(records=problems.RECORDS, classes=3 + ranks.rank)
    ranks.private(x, y, whole=True, schema=schema)


@case
def other_version(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """Rank 1 runs another confide."""
    with nullcontext() if ranks.leads else patch("confide.running.crews.VERSION", "0.0.1"):
        network = networks.mlp(problems.FEATURES, 3, hidden=(8,))
        confide.fit(confide.methods.SGD(), network, private(ranks, folder), problems.plan())


@case
def other_type(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """Numbers without a type of their own are of double precision on rank 1."""
    torch.set_default_dtype(torch.float32 if ranks.leads else torch.float64)
    try:
        network = networks.mlp(problems.FEATURES, 3, hidden=(8,)).float()
        confide.fit(confide.methods.SGD(), network, private(ranks, folder), problems.plan())
    finally:
        torch.set_default_dtype(torch.float32)


@case
def other_sampling(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """Sampling that needs the sizes of the shards, and an answer that another rank does not ask for."""
    data = private(ranks, folder)
    data.charge([(SampledGaussian(1.0, 1.0, 0.1, problems.RECORDS, options["sampling"]), 10)])


@case
def other_answer(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """Both mechanisms are paid for; one rank asks for the one with less noise."""
    data = private(ranks, folder)
    kinds = [SampledGaussian(noise, 1.0, 1.0, problems.RECORDS, "full-batch") for noise in (50.0, 1.0)]
    data.charge([(kind, 1) for kind in kinds])
    data.answer(problems.ROWS, kinds[ranks.rank % 2])


@case
def plain(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """A source that knows nothing of the other ranks."""
    x, y = problems.records(torch.float32)
    PrivateData(x, y, schema=problems.SCHEMA)


@case
def no_module(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """Something that is no network, or no plan, on one rank."""
    network: Any = networks.linear(problems.FEATURES, 3) if ranks.leads or "plan" in options else None
    plan: Any = problems.plan() if ranks.leads or "plan" not in options else options["plan"]
    confide.fit(confide.methods.SGD(), network, private(ranks, folder), plan)


@case
def failing_rank(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """A network that cannot be fitted, on one rank."""
    network = networks.linear(problems.FEATURES + ranks.rank, 3)
    confide.fit(confide.methods.SGD(), network, private(ranks, folder), problems.plan())


@case
def parquet(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """Row groups dealt out to the ranks, of files that a rank may see otherwise than the others."""
    pattern = str(folder / ("*.parquet" if not options.get("apart") else f"{ranks.rank}.parquet"))
    records = confide.data.from_parquet(pattern, target="y", schema=problems.SCHEMA, shard=ranks)
    data = ranks.private(records, schema=problems.SCHEMA)
    total = data.answer(problems.gradient(torch.float32), problems.OFF).sum
    save(ranks, folder / "sum.npy", total)
    return [digest(total), len(records.usable), list(data.assumptions)]


@case
def forked(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """A child that leaves the block of `start`, and Python: it must not wait for threads that it does not have."""
    child = os.fork()
    if child == 0:
        raise SystemExit(5)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return len(ranks.everybody(b"still here", "forked"))
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "the child waited for ever"


# -- failures ----------------------------------------------------------------------------------------------------------


@case
def lost(ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    """The last rank is killed or stopped after some steps, by its own hand; the others say how long they waited."""
    last = [0.0]

    def progress(done: int, total: int) -> None:
        last[0] = time.monotonic()
        if done == 5 and ranks.rank == ranks.size - 1:
            os.kill(os.getpid(), getattr(signal, options["signal"]))

    try:
        network = networks.linear(problems.FEATURES, 3)
        confide.fit(confide.methods.SGD(), network, private(ranks, folder), problems.plan(steps=50), progress=progress)
    except confide.distributed.RankLost as error:
        return [str(error), time.monotonic() - last[0], charged(ranks, folder)]


def main() -> None:
    folder, timeout, wanted = Path(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    if "TESTS_JOINED" in os.environ:  # as Ray Train leaves it
        torch.distributed.init_process_group("gloo")
    time.sleep(float(os.environ.get("TESTS_LATE", "0")))
    said: dict[str, Any] = {}
    rank = os.environ.get("RANK", "0")
    try:
        with start(timeout=timeout) as ranks:
            for label, name, options in wanted:
                (folder / label).mkdir(exist_ok=True)
                try:
                    with planted(options.get("fault", ""), ranks):
                        said[label] = CASES[name](ranks, folder / label, options)
                except (ValueError, RuntimeError, TypeError) as error:
                    said[label] = {"error": type(error).__name__, "text": str(error)}
    finally:
        (folder / f"said-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # all is written; threads of a group that lost a rank may abort a process that ends slowly
