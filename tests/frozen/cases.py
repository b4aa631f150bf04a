"""Behaviour as it is, frozen in golden files, so that files of the package can be re-arranged without changing it.

`python -m tests.frozen.cases` makes the golden files anew and prints what changed in them. Do that only for a change of
behaviour that is wanted, and read what is printed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

import confide
from confide import data, likelihoods, methods, networks, priors
from tests.frozen import commands, fits
from tests.frozen.tools import differences

GOLDEN = Path(__file__).parent / "golden"


def _all_of(cases: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    return {name: case() for name, case in cases.items()}


def public_names() -> dict[str, Any]:
    """What a user can import."""
    shown: dict[str, tuple[Any, tuple[str, ...]]] = {
        "confide.networks": (networks, ("linear", "logistic", "mlp", "softmax")),
        "confide.likelihoods": (likelihoods, ("Bernoulli", "Categorical", "Gaussian", "HeteroscedasticGaussian")),
        "confide.priors": (priors, ("Flat", "Gaussian", "Laplace", "LogUniform", "ScaleMixture")),
    }
    return {
        "confide": sorted(confide.__all__),
        "confide.data": sorted(data.__all__),
        "confide.methods": {name: methods.get(name).__name__ for name in methods.names()},
        **{name: [word for word in words if hasattr(module, word)] for name, (module, words) in shown.items()},
    }


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "names": public_names,
    "posteriors": lambda: _all_of(fits.posterior_cases()),
    "ledgers": lambda: _all_of(fits.ledger_cases()),
    "commands": commands.command_values,
    "refusals": commands.refusal_values,
    "library-refusals": lambda: _all_of(fits.refusal_cases()),
}


@cache
def now(section: str) -> dict[str, Any]:
    """What the package does today, on one thread, in the types that JSON gives back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # The size of a terminal and a switch for tracebacks are no part of what is frozen.
    kept = {name: os.environ.pop(name, None) for name in ("CONFIDE_DEBUG", "CONFIDE_DATA", "COLUMNS")}
    os.environ["COLUMNS"] = "80"
    try:
        # Nothing private draws from torch's own stream, but dropout does while it predicts.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            found: dict[str, Any] = json.loads(json.dumps(SECTIONS[section](), allow_nan=False))
        return found
    finally:
        torch.set_num_threads(threads)
        os.environ.pop("COLUMNS")
        os.environ.update({name: value for name, value in kept.items() if value is not None})


def frozen(section: str) -> dict[str, Any]:
    """What it did when the golden file was made."""
    path = GOLDEN / f"{section}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def main() -> None:
    """Make the golden files anew, and say what changed."""
    GOLDEN.mkdir(exist_ok=True)
    for section in SECTIONS:
        before, after = frozen(section), now(section)
        changes = list(differences(before, after))
        for change in changes:
            sys.stdout.write(f"{section}{change}\n")
        sys.stdout.write(f"{section}: {len(changes)} changes\n")
        if changes:  # a value within the tolerance keeps its digits, so that files change only for a reason
            lines = (f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in after.items())
            (GOLDEN / f"{section}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
