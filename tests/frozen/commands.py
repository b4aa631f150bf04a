"""Frozen command line: what `--json` prints, what a run leaves in its directory, and how bad input is refused.

All commands run in this process, in a folder of their own, so that the paths they print are the ones that were typed.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from confide.__main__ import main  # type: ignore[attr-defined]
from tests.frozen.tools import kinds, plain, without

FACTS = """
records = 120
target = "ill"
classes = ["no", "yes"]
[columns.age]
bounds = [0, 100]
[columns.dose]
bounds = [0, 1]
[columns.ward]
categories = ["north", "south"]
"""
HEIGHT_FACTS = 'records = 150\ntarget = "height"\ntarget_bounds = [100, 200]\nbounds = [-1, 1]\n'
OPEN_KINDS = {
    "seconds": kinds,
    "created": kinds,
    "time": kinds,
    "who": kinds,
    "head": kinds,
    "version": kinds,
    "versions": kinds,
    "sha256": kinds,
    "peak_mb": "<any>",
    "storage_mb": "<any>",  # a facts line is longer or shorter by a digit
}
"""What time, user and machine decide: the keys and types are frozen, the values are not."""


def kinds_of_facts(facts: Any) -> Any:
    """The facts of a posterior, with room for a warning; a configuration's `facts` is the name of a file."""
    return kinds({**facts, "warning": ""}) if isinstance(facts, dict) else facts


NOISY_KINDS = {**OPEN_KINDS, "metrics": kinds, "judgement": "<any>", "facts": kinds_of_facts}
"""What fresh noise decides as well, also whether a chain mixed and so whether it warns."""
COUNTED_KINDS = {**NOISY_KINDS, "records": kinds, "noise": kinds}
"""Where records are counted privately, everything that is divided by their number is noisy too."""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def call(*words: object) -> Result:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return Result(code, out.getvalue(), err.getvalue())


def patients(rows: int, seed: int) -> str:
    random = np.random.RandomState(seed)
    lines = ["age,dose,ward,ill"]
    for _ in range(rows):
        age, dose, ward = random.uniform(0, 100), random.uniform(), random.choice(["north", "south"])
        ill = age / 100 - dose + random.normal() * 0.1 > 0
        lines.append(f"{age:.2f},{dose:.3f},{ward},{'yes' if ill else 'no'}")
    return "\n".join(lines) + "\n"


def heights(rows: int, seed: int) -> str:
    random = np.random.RandomState(seed)
    lines = ["a,b,height"]
    for _ in range(rows):
        a, b = random.uniform(-1, 1, 2)
        lines.append(f"{a:.4f},{b:.4f},{150 + 30 * a - 10 * b + random.normal():.3f}")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A new folder with tables and facts, in which the commands run."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        here = Path(name)
        (here / "train.csv").write_text(patients(120, 0))
        (here / "test.csv").write_text(patients(60, 1))
        (here / "facts.toml").write_text(FACTS)
        (here / "heights.csv").write_text(heights(150, 0))
        (here / "more-heights.csv").write_text(heights(40, 1))
        (here / "heights.toml").write_text(HEIGHT_FACTS)
        yield here


def printed(words: str, names: dict[str, Any], code: int = 0) -> Any:
    """The one JSON object that a command printed, without the values that are not to be frozen."""
    result = call(*words.split(), "--json")
    assert result.code == code, f"{words}: exit code {result.code}, {result.err}"
    return plain(without(json.loads(result.out), names))


# -- what succeeds -------------------------------------------------------------------------------------------

ACCOUNT = "account --rate 0.01 --noise-multiplier 1.3 --steps 500 --delta 1e-5"
PLAN = "plan --epsilon 1 --delta 1e-5 --records 6000 --batch 256 --epochs 15"
BUDGET = "--epsilon 2 --delta 1e-3 --steps 20 --batch 30"
PATIENTS = f"fit train.csv --facts facts.toml --test test.csv {BUDGET}"
HEIGHTS = "fit heights.csv --facts heights.toml --test more-heights.csv --epsilon 8 --delta 1e-3 --steps 20 --batch 50"
DIGITS = "fit digits --epsilon 3 --delta 1e-4 --epochs 2"
COMPARE = f"compare train.csv --facts facts.toml --test test.csv {BUDGET} --seed 3"
OPEN, NOISY = OPEN_KINDS, NOISY_KINDS

# In this order, for later ones use what earlier ones left: name -> (command line, what is not frozen).
PRINTED: dict[str, tuple[str, dict[str, Any]]] = {
    "account": (ACCOUNT, OPEN),
    "account, replace-one": (f"{ACCOUNT} --adjacency replace-one", OPEN),
    "account, fixed size": (f"{ACCOUNT} --adjacency replace-one --sampling fixed-size --records 500", OPEN),
    "account, shuffle": (f"{ACCOUNT} --adjacency replace-one --sampling shuffle", OPEN),
    "account, full batch": (
        "account --noise-multiplier 10 --steps 200 --delta 0.004 --sampling full-batch",
        OPEN,
    ),
    "plan": (PLAN, OPEN),
    "plan, steps of sgld": (f"{PLAN} --method sgld --clip 1", OPEN),
    "plan, steps of sghmc": (f"{PLAN} --method sghmc --clip 1 --friction 0.1", OPEN),
    "plan, steps of sgnht": (f"{PLAN} --method sgnht --clip 1", OPEN),
    "ledger limit": ("ledger limit budget.db --epsilon 20 --delta 1e-3", OPEN),
    "fit": (f"{PATIENTS} --ledger seeded.db --name patients --seed 3 --out one", OPEN),
    "fit, noise not seeded": (f"{PATIENTS} --ledger budget.db --name patients --out fresh", NOISY),
    "fit, lattice noise": (f"{PATIENTS} --secure --seed 3 --out secure", OPEN),
    "fit, settings": (
        f"{PATIENTS} --method sgld --hidden 4 --clip 1 --prior-scale 2 --set decay=0.1 --seed 3 --out set",
        OPEN,
    ),
    "fit, facts assumed public": (
        f"fit train.csv --target ill --assume-public {BUDGET} --method bbp --seed 3 --out assumed",
        OPEN,
    ),
    "fit, regression": (f"{HEIGHTS} --method sgld --ledger seeded.db --seed 3 --out heights", OPEN),
    "fit, regression with noise given": (f"{HEIGHTS} --method sgd --noise-scale 0.2 --seed 3 --out given", OPEN),
    "fit, digits": (f"{DIGITS} --seed 3 --out digits", OPEN),
    "fit, diabetes": (
        "fit diabetes --method sep --set coordinates=natural --epsilon 3 --delta 1e-4 --steps 9 --seed 3 --out sugar",
        OPEN,
    ),
    "predict": ("predict one test.csv --out predicted.csv", OPEN),
    "predict, regression": ("predict heights more-heights.csv --level 0.5 --out means.csv", OPEN),
    "predict, digits": ("predict digits digits --out digits.csv", OPEN),
    "evaluate, public": ("evaluate one test.csv --public", OPEN),
    "evaluate": (
        "evaluate one train.csv --epsilon 1 --delta 1e-3 --records 120 --ledger seeded.db --name patients --seed 4",
        OPEN,
    ),
    "evaluate, counted": ("evaluate one train.csv --epsilon 1 --delta 1e-3 --seed 4", OPEN),
    "evaluate, noise not seeded": (
        "evaluate one train.csv --epsilon 1 --delta 1e-3 --metrics accuracy,brier",
        COUNTED_KINDS,
    ),
    "evaluate, regression": (
        "evaluate heights heights.csv --epsilon 1 --delta 1e-3 --records 150 --error-bound 40 --seed 4",
        OPEN,
    ),
    "compare": (f"{COMPARE} --methods all --ledger compared.db --out compared", OPEN),
    "compare, without a directory": (f"{COMPARE} --methods sgd --repeats 2", OPEN),
    "export": ("export one --to numpy --out deployed", OPEN),
    "export, torch": ("export one --to torch --out deployed-torch", OPEN),
    "ledger show": ("ledger show budget.db", OPEN),
    "ledger show, another delta": ("ledger show compared.db --delta 1e-4", OPEN),
    "papers list": ("papers list", OPEN),
    # A claim so high that twenty canaries cannot refute it: the exit code does not rest on luck.
    "audit": ("audit --method sgld --epsilon 8 --canaries 20 --steps 4", {"epsilon_lower": kinds}),
}
STRUCTURE_ONLY = ("audit",)
RUNS = {"one": OPEN, "fresh": NOISY, "set": OPEN, "assumed": OPEN, "heights": OPEN, "digits": OPEN, "sugar": OPEN}
COMMANDS = ("account", "plan", "fit", "predict", "evaluate", "compare", "export", "audit", "ledger show")
COMMANDS += ("ledger limit", "papers list", "papers run", "party serve", "party fit")  # type: ignore[assignment]


def command_values() -> dict[str, Any]:
    """Everything that commands print and leave, by name."""
    found: dict[str, Any] = {}
    with folder() as here:
        for name, (words, names) in PRINTED.items():
            value = printed(words, names)
            found[name] = kinds(value) if name in STRUCTURE_ONLY else value
        for run, names in RUNS.items():
            found[f"{run}/run.json"] = plain(without(json.loads((here / run / "run.json").read_text()), names))
        comparison = json.loads((here / "compared" / "comparison.json").read_text())
        found["compared/comparison.json"] = plain(without(comparison, OPEN))
        for table in ("predicted.csv", "means.csv", "digits.csv"):
            found[table] = _of_table(here / table)
        places = ("one", "compared", "deployed", ".")
        found["files"] = {place: sorted(path.name for path in (here / place).iterdir()) for place in places}
    for command in COMMANDS:
        shown = call(*command.split(), "--help")
        found[f"options of {command}"] = sorted(set(re.findall(r"--[a-z][a-z-]*", shown.out)))
    found["version"] = kinds(call("--version").out.split())
    return found


def _of_table(path: Path) -> dict[str, Any]:
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = list(csv.reader(file))
    return {"header": header, "rows": len(rows), "first": [[_cell(cell) for cell in row] for row in rows[:4]]}


def _cell(text: str) -> Any:
    try:
        return plain(float(text))
    except ValueError:
        return text


# -- what is refused -----------------------------------------------------------------------------------------

FIT = f"fit train.csv --facts facts.toml {BUDGET} --out new"
Change = Callable[[Path], object]


def _nothing(here: Path) -> None: ...


def _writes(name: str, text: str) -> Change:
    return lambda here: (here / name).write_text(text)


def _edits(name: str, old: str, new: str) -> Change:
    def change(here: Path) -> None:
        text = (here / name).read_text()
        assert old in text, f"{old!r} is not in {name}"
        (here / name).write_text(text.replace(old, new))

    return change


def _flips_the_last_bit(here: Path) -> None:
    path = here / "run" / "posterior.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def _edits_record(**changed: Any) -> Change:
    """A value of None stands for a key that is taken away."""

    def change(here: Path) -> None:
        path = here / "run" / "run.json"
        record = {**json.loads(path.read_text()), **changed}
        path.write_text(json.dumps({key: value for key, value in record.items() if value is not None}))

    return change


def _replaces_the_posterior(here: Path) -> None:
    """Garbage with the right hash: the check lets it pass, and the reader must not fall over it."""
    garbage = b"not a posterior" * 10
    (here / "run" / "posterior.safetensors").write_bytes(garbage)
    _edits_record(sha256={"posterior.safetensors": hashlib.sha256(garbage).hexdigest()})(here)


def _removes(name: str) -> Change:
    return lambda here: (here / name).unlink()


def _tampers(here: Path) -> None:
    with contextlib.closing(sqlite3.connect(here / "budget.db")) as database, database:
        database.execute("DROP TRIGGER entries_are_never_edited")
        database.execute("UPDATE entries SET body = replace(body, '\"count\":20', '\"count\":1')")


PREDICT, EVALUATE = "predict run test.csv --out new.csv", "evaluate run train.csv"
# name -> (command line, what is done to the folder before it).
REFUSED: dict[str, tuple[str, Change]] = {
    "no command": ("--json", _nothing),
    "unknown command": ("learn train.csv", _nothing),
    "no file": ("fit absent.csv --facts facts.toml --epsilon 1 --out new", _nothing),
    "no facts": ("fit train.csv --target ill --epsilon 1 --out new", _nothing),
    "no target": ("fit train.csv --assume-public --epsilon 1 --out new", _nothing),
    "no epsilon": ("fit train.csv --facts facts.toml --out new", _nothing),
    "no directory": ("sample train.csv --facts facts.toml --epsilon 1", _nothing),
    "unknown option": (f"{FIT} --unknown 1", _nothing),
    "a word too many": (f"{FIT} another", _nothing),
    "epsilon is not positive": (f"{FIT} --epsilon -1", _nothing),
    "epsilon is not a number": (f"{FIT} --epsilon much", _nothing),
    "delta is too large for the records": (f"{FIT} --delta 0.01", _nothing),
    "steps and epochs": (f"{FIT} --epochs 3", _nothing),
    "batch is too large": (f"{FIT} --batch 121", _nothing),
    "unknown method": (f"{FIT} --method nonsense", _nothing),
    "a method for another task": (f"{FIT} --method em", _nothing),
    "unknown setting": (f"{FIT} --set nonsense=1", _nothing),
    "a setting out of range": (f"{FIT} --set decay=5", _nothing),
    "a setting without a value": (f"{FIT} --set decay", _nothing),
    "hidden layers that are no numbers": (f"{FIT} --hidden a,b", _nothing),
    "a network beyond all use": (f"{FIT} --hidden 99999,2000", _nothing),
    "unknown sampling": (f"{FIT} --sampling random", _nothing),
    "sampling without a sound bound": (f"{FIT} --sampling shuffle", _nothing),
    "unknown task": (f"{FIT} --task clustering", _nothing),
    "unknown target": (f"{FIT} --target nonsense", _nothing),
    "no test file": (f"{FIT} --test absent.csv", _nothing),
    "the training file as test file": (f"{FIT} --test train.csv", _nothing),
    "no facts file": (f"{FIT} --facts absent.toml", _nothing),
    "no folder for the ledger": (f"{FIT} --ledger absent/budget.db", _nothing),
    "a split of a file": (f"{FIT} --split 1", _nothing),
    "the directory exists": (f"{FIT} --out run", _nothing),
    "the directory cannot be written": (f"{FIT} --out train.csv/new", _nothing),
    "a benchmark without a directory": ("fit adult --epsilon 1 --out new", _nothing),
    "an unknown kind of file": (FIT.replace("train.csv", "train.txt"), _writes("train.txt", "1")),
    "an empty table": (FIT, _writes("train.csv", "")),
    "a table without records": (FIT, _writes("train.csv", "age,dose,ward,ill\n")),
    "a missing column": (FIT, _edits("train.csv", "dose", "doses")),
    "a missing target": (FIT, _edits("train.csv", "ill", "sick")),
    "facts that are not TOML": (FIT, _writes("facts.toml", "records = = 3")),
    "an unknown fact": (FIT, _edits("facts.toml", "records", "rekords")),
    "bounds the wrong way round": (FIT, _edits("facts.toml", "[0, 100]", "[100, 0]")),
    "a column left open": (FIT, _edits("facts.toml", "[columns.dose]\nbounds = [0, 1]\n", "")),
    "a column that is not there": (FIT, _edits("facts.toml", "[columns.dose]", "[columns.height]")),
    "a ceiling": (f"{FIT} --ledger budget.db --name train.csv --epsilon 9", _nothing),
    "a ceiling for many": (
        "compare train.csv --facts facts.toml --test test.csv --epsilon 2 --delta 1e-3 --steps 5"
        " --methods sgld,sgd --ledger budget.db",
        _nothing,
    ),
    "a damaged ledger": (f"{FIT} --ledger budget.db", _writes("budget.db", "not a ledger" * 1000)),
    "a ledger that was edited": ("ledger show budget.db", _tampers),
    "no ledger": ("ledger show absent.db", _nothing),
    "a ceiling of nothing": ("ledger limit budget.db --epsilon 0 --delta 1e-5", _nothing),
    "no run": (PREDICT.replace("run", "absent"), _nothing),
    "a file instead of a run": (PREDICT.replace("run", "train.csv"), _nothing),
    "a run without its record": (PREDICT, _removes("run/run.json")),
    "a run without its posterior": (PREDICT, _removes("run/posterior.safetensors")),
    "a posterior that was changed": (PREDICT, _flips_the_last_bit),
    "a posterior that is garbage": (PREDICT, _replaces_the_posterior),
    "a record with metrics of text": (PREDICT, _edits_record(metrics={"accuracy": "good"})),
    "a record with an encoder of text": (PREDICT, _edits_record(encoder="nonsense")),
    "a record that is not JSON": (PREDICT, _writes("run/run.json", "{")),
    "a record of another format": (PREDICT, _edits_record(format=99)),
    "a record without events": (PREDICT, _edits_record(events=None)),
    "a record with an unknown event": (PREDICT, _edits_record(events=[{"kind": "magic"}])),
    "a record with a broken schema": (PREDICT, _edits_record(schema={"nonsense": 1})),
    "a record with a broken encoder": (PREDICT, _edits_record(encoder={"nonsense": 1})),
    "no records to predict": (PREDICT.replace("test.csv", "absent.csv"), _nothing),
    "records without a column": (PREDICT, _writes("test.csv", "age,dose\n1,2\n")),
    "predictions exist": (PREDICT.replace("new.csv", "train.csv"), _nothing),
    "no folder for predictions": (PREDICT.replace("new.csv", "absent/new.csv"), _nothing),
    "a level of one": (f"{PREDICT} --level 1", _nothing),
    "private records unpaid": (EVALUATE, _nothing),
    "public records paid": (f"{EVALUATE} --public --epsilon 1", _nothing),
    "training records called public": (f"{EVALUATE} --public", _nothing),
    "an unknown metric": (f"{EVALUATE} --epsilon 1 --metrics nonsense", _nothing),
    "a comparison without a test": ("compare train.csv --facts facts.toml --epsilon 2 --delta 1e-3", _nothing),
    "a comparison of unknown methods": (
        "compare train.csv --facts facts.toml --test test.csv --epsilon 2 --delta 1e-3 --methods oracle",
        _nothing,
    ),
    "an unknown form": ("export run --to pickle --out new", _nothing),
    "an export that exists": ("export run --out train.csv", _nothing),
    "account without noise": ("account --rate 0.1 --steps 10 --delta 1e-5", _nothing),
    "account beyond all use": (
        "account --rate 0.1 --steps 1000000000000 --delta 1e-5 --noise-multiplier 1",
        _nothing,
    ),
    "plan without a sound bound": (f"{PLAN} --sampling fixed-size", _nothing),
    "plan for an unknown method": (f"{PLAN} --method nonsense", _nothing),
    "unknown paper": ("papers run nonsense --quick", _nothing),
    "a paper without data": ("papers run dp-bnn", _nothing),
    "an odd number of steps": ("audit --steps 3", _nothing),
    "an unknown attack": ("audit --attack grey-box", _nothing),
}


@contextlib.contextmanager
def _good_folder() -> Iterator[Path]:
    """A folder with a fitted run and a ledger whose ceiling is nearly reached."""
    with folder() as here:
        assert call("ledger", "limit", "budget.db", "--epsilon", 2.5, "--delta", 1e-3).code == 0
        fitted = call(*f"fit train.csv --facts facts.toml {BUDGET} --ledger budget.db --out run".split())
        assert fitted.code == 0, fitted.err
        yield here


def refusal_values() -> dict[str, Any]:
    """Exit code and sentence of every bad input; whatever a case did to the folder is undone before the next."""
    found: dict[str, Any] = {}
    with _good_folder() as good, tempfile.TemporaryDirectory() as place:
        for number, (name, (words, change)) in enumerate(REFUSED.items()):
            here = Path(shutil.copytree(good, Path(place) / str(number)))
            change(here)
            before = _names(here)
            with contextlib.chdir(here):
                result = call(*words.split())
            sentence = result.err.replace(str(here.resolve()), "FOLDER").replace(str(here), "FOLDER")
            found[name] = {
                "code": result.code,
                "sentence": sentence,
                "printed": bool(result.out),
                "new files": sorted(_names(here) - before),
            }
    return found | unforeseen_values()


def unforeseen_values() -> dict[str, Any]:
    """What nobody foresaw: told apart from a refusal by the place that it comes from, which is outside the package."""
    found: dict[str, Any] = {}
    for error in (ValueError("nonsense"), KeyError("nonsense"), KeyboardInterrupt()):
        with mock.patch("json.dumps", side_effect=error):
            result = call(*ACCOUNT.split(), "--json")
        name = f"{type(error).__name__} from elsewhere"
        found[name] = {"code": result.code, "sentence": result.err, "printed": bool(result.out), "new files": []}
    return found


def _names(here: Path) -> set[str]:
    """SQLite's own side files come and go."""
    paths = (str(path.relative_to(here)) for path in here.rglob("*"))
    return {path for path in paths if not path.endswith(("-wal", "-shm"))}
