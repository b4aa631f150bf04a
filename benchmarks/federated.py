"""What several owners lose by not pooling their records: power plant, SEP, epsilon 1, ten parties.

    python -m benchmarks.federated [--data DIR] [--parties 10] [--runs 3] [--steps 100] [--colluding 0] [--local 1]

RMSE on the first published splits, in the units of the target: central (one owner holds everything), "sum" (a secure
sum) and "nobody" (every party's own noise), with the ratio to central. Parties are in this process; the messages are
the ones that travel. To reach: 1.05 under "sum" and 1.10 under "nobody".
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

import confide
from confide.data import catalogue
from confide.data.preprocessing import Encoder
from confide.federated import Federation, InProcess, Party, Peers
from confide.federated.peers import new_secret, public_of

EPSILON, DELTA, HIDDEN = 1.0, 1e-5, (50,)


def records(split: int, directory: str | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], float]:
    """Training and test records of a split, and half the range of the target."""
    found = catalogue.load("power_plant", directory).split(split)
    assert found.schema is not None
    assert found.test is not None
    encoder = Encoder(found.schema.for_table(found.train))
    train, test = (
        tuple(torch.as_tensor(part, dtype=torch.float32) for part in encoder.encode(table, table.labels))
        for table in (found.train, found.test)
    )
    return train, test, encoder.target_scale


def parties_of(x: Tensor, y: Tensor, count: int, colluding: int) -> dict[str, Party]:
    secrets = {f"p{place:02d}": new_secret() for place in range(count)}
    public = {name: public_of(secret) for name, secret in secrets.items()}
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).tensor_split(count)
    return {
        name: Party(
            x[rows],
            y[rows],
            schema=confide.Schema(records=len(rows)),
            ledger=confide.Ledger(),
            name=name,
            least_noise=0.1,
            peers=Peers(public, secret, colluding=colluding),
        )
        for (name, secret), rows in zip(secrets.items(), mixed, strict=True)
    }


def source(trust: str, x: Tensor, y: Tensor, settings: argparse.Namespace) -> confide.PrivateData | Federation:
    if trust == "central":
        return confide.PrivateData(x, y, schema=confide.Schema(records=len(x)))
    parties = parties_of(x, y, settings.parties, settings.colluding)
    local = settings.local if trust == "nobody" else 1
    return Federation(InProcess(parties), trust=trust, local=local)  # type: ignore[arg-type]


def score(trust: str, split: int, settings: argparse.Namespace) -> tuple[float, float]:
    """RMSE and seconds of one run."""
    (x, y), (x_test, y_test), scale = records(split, settings.data)
    plan = confide.plan(
        epsilon=EPSILON, delta=DELTA, records=len(x), batch=max(256, len(x) // 20), steps=settings.steps
    )
    network = confide.networks.mlp(x.shape[1], 1, HIDDEN, generator=torch.Generator().manual_seed(split))
    started = time.perf_counter()
    run = confide.fit(confide.methods.SEP(), network, source(trust, x, y, settings), plan, seed=split)
    assert run.privacy.epsilon() <= EPSILON
    found = run.posterior.predict(x_test).mean.flatten()  # type: ignore[union-attr]
    return scale * math.sqrt(float(((found - y_test.flatten()) ** 2).mean())), time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="directory of the benchmark files")
    for name, usual in (("parties", 10), ("runs", 3), ("steps", 100), ("colluding", 0), ("local", 1)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    settings = parser.parse_args(arguments)
    central = 0.0
    for trust in ("central", "sum", "nobody") if settings.local == 1 else ("central", "nobody"):
        results = [score(trust, split, settings) for split in range(settings.runs)]
        mean = statistics.fmean(found for found, _ in results)
        central = central or mean
        each = " ".join(f"{found:.3f}" for found, _ in results)
        print(f"{trust:8} RMSE {mean:.3f} ({each})  ratio {mean / central:.3f}  {results[0][1]:.1f} s a run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
