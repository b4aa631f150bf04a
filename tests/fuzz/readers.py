"""Everything that reads a file, fed with bytes: the outcome is a clear refusal or a value, and nothing is executed.

    python -m tests.fuzz.readers [options of libFuzzer]      with atheris installed: fuzzing guided by coverage

The first byte picks the reader, the rest is the file. `SEEDS` are sound files to start from.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

import confide
from confide.data import Schema, load_dataset, load_table
from confide.data.streaming import from_parquet
from confide.posteriors.files import load_posterior
from confide.posteriors.mapped import open_draws
from confide.privacy.ledger import Ledger
from confide.running.artefacts import load_run, save_run
from confide.running.checkpoint_files import unsealed

REFUSALS = (ValueError, TypeError)  # the family of errors that a user is promised; their messages are one sentence


def _table(name: str) -> Callable[[Path], Any]:
    return lambda path: load_table(path.rename(path.with_name(name)), "y")


def _run(path: Path) -> Any:
    """A record of a run beside a posterior that does not fit it: both must be looked at before either is used."""
    directory = path.with_name("run")
    directory.mkdir()
    path.rename(directory / "run.json")
    (directory / "posterior.safetensors").write_bytes(b"")
    return load_run(directory)


def _ledger(path: Path) -> Any:
    with Ledger(path, timeout=0) as ledger:
        return ledger.entries()


READERS: dict[str, Callable[[Path], Any]] = {
    "csv": _table("t.csv"),
    "csv.gz": _table("t.csv.gz"),
    "parquet": _table("t.parquet"),
    "npz": lambda path: load_dataset(str(path.rename(path.with_name("t.npz")))),
    "streamed parquet": lambda path: from_parquet(path, target="y", schema=Schema(records=10)),
    "toml": lambda path: Schema.from_toml(path),
    "posterior": load_posterior,
    "mapped posterior": open_draws,
    "run": _run,
    "journal": unsealed,
    "ledger": _ledger,
}
NAMES = tuple(READERS)


def read(data: bytes) -> Any:
    """One input. An exception that is not a refusal, or a refusal of several lines, is a finding."""
    name = NAMES[data[0] % len(NAMES)] if data else NAMES[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(data[1:])
        try:
            return READERS[name](path)
        except REFUSALS as refusal:
            if not str(refusal):
                raise RuntimeError(f"{name}: a refusal that says nothing") from refusal
            return None


def seeds() -> dict[str, bytes]:
    """One sound file for each reader."""
    text = b"a,b,y\n1,2,0.5\n3,4,1.5\n,x,2\n"
    table, arrays = io.BytesIO(), io.BytesIO()
    found: dict[str, Any] = {}
    parquet.write_table(pa.table({"a": [1.0, None], "b": [1, 2], "y": [0.5, 1.5]}), table)
    np.savez(arrays, x_train=np.eye(3), y_train=np.arange(3.0), x_test=np.eye(3), y_test=np.arange(3.0))
    found |= {
        "csv": text,
        "csv.gz": gzip.compress(text, mtime=0),
        "parquet": table.getvalue(),
        "npz": arrays.getvalue(),
    }
    found["streamed parquet"] = table.getvalue()
    found["toml"] = b'records = 10\ntarget = "y"\n[columns.a]\nbounds = [0, 1]\n[columns.b]\ncategories = ["p", "q"]\n'
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        data = confide.PrivateData(torch.eye(4), torch.ones(4), schema=Schema(records=4), seed=1)
        plan = confide.plan(noise_multiplier=1.0, delta=1e-5, records=4, batch=2, steps=2)
        run = confide.fit(
            confide.methods.SGD(), confide.networks.linear(4), data, plan, seed=0, checkpoint=base / "kept"
        )
        save_run(run, base / "run")
        with Ledger(base / "budget.db") as ledger:
            ledger.charge(plan.events()[0])
        found["posterior"] = (base / "run" / "posterior.safetensors").read_bytes()
        found["mapped posterior"] = found["posterior"]
        found["run"] = (base / "run" / "run.json").read_bytes()
        found["journal"] = (base / "kept" / "journal.json").read_bytes()
        found["ledger"] = (base / "budget.db").read_bytes()
    return {name: bytes([place]) + found[name] for place, name in enumerate(NAMES)}


def mutated(data: bytes, random: np.random.Generator) -> bytes:
    """Cut, flip, repeat or overwrite; numbers that overflow and signs of pickles among what is written."""
    body = bytearray(data[1:])
    for _ in range(int(random.integers(1, 4))):
        place, length = int(random.integers(0, len(body) + 1)), int(random.integers(1, 9))
        kind = random.integers(0, 5)
        if kind == 0:
            del body[place:]
        elif kind == 1 and place < len(body):
            body[place] ^= 1 << int(random.integers(0, 8))
        elif kind == 2:
            body[place : place + length] = random.bytes(length)
        elif kind == 3:
            body[place:place] = body[place : place + 8 * length]
        else:
            odd = (b"1e999", b"-1", b"\x80\x04\x95", b"\xff" * 8, b"null", b"NaN", b'"', b"9" * 400, b"../../x")
            body[place : place + length] = odd[int(random.integers(0, len(odd)))]
    return data[:1] + bytes(body)


ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 10**12, 10**4000, 1.5, -0.0, 1e308, float("inf"), "", "x" * 5000, "../../x", [], [1] * 100_000,
    {}, {"name": "x"}, [[]], [None], "\ud800",
)  # fmt: skip


def with_an_odd_value(value: Any, random: np.random.Generator) -> Any:
    """The same JSON with one value, anywhere in it, replaced, taken away or added."""
    if isinstance(value, dict) and value and random.random() < 0.8:
        name = list(value)[int(random.integers(len(value)))]
        if random.random() < 0.1:
            return {key: inner for key, inner in value.items() if key != name}
        return {**value, name: with_an_odd_value(value[name], random)}
    if isinstance(value, list) and value and random.random() < 0.8:
        place = int(random.integers(len(value)))
        return [*value[:place], with_an_odd_value(value[place], random), *value[place + 1 :]]
    return ODD_VALUES[int(random.integers(len(ODD_VALUES)))]


def own_functions() -> list[FunctionType]:
    """The functions and methods of confide that are loaded: guidance by those of torch would take an hour to set up."""
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "confide"]
    holders: list[Any] = [*modules, *(kind for module in modules for kind in vars(module).values())]
    found = [
        value
        for holder in holders
        if isinstance(holder, type | ModuleType)
        for value in vars(holder).values()
        if isinstance(value, FunctionType) and value.__module__.split(".")[0] == "confide"
    ]
    return list(dict.fromkeys(found))


def main() -> None:
    import atheris

    folder = Path(tempfile.mkdtemp(prefix="confide-corpus-"))
    for name, data in seeds().items():
        (folder / name.replace(" ", "-")).write_bytes(data)
    sys.stderr.write(json.dumps({"corpus": str(folder)}) + "\n")
    for function in own_functions():
        atheris.instrument_func(function)
    atheris.Setup([*sys.argv, str(folder)], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
