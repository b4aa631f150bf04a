"""Code of the user's own that a command names as FILE.py:NAME: the file is run, as `python FILE.py` would."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from confide.cli.options import DATA
from confide.errors import CommandError, Refusal

if TYPE_CHECKING:
    from torch import nn

    from confide.running.artefacts import SavedRun

OwnModule = Annotated[
    str | None,
    typer.Option(
        "--module",
        metavar="FILE:NAME",
        help="The network that was fitted, for a run of `confide fit --module`. The file is run.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]


def own_module(given: str | None, seed: int | None = None) -> nn.Module | None:
    """The network NAME of FILE: a torch module, or a class or function without arguments that gives one.

    seed   of its first weights, where the run is to be reproducible
    """
    if given is None:
        return None
    import torch
    from torch import nn

    if seed is not None:
        torch.manual_seed(seed)
    found = load("--module", given)
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise CommandError(f"--module={given}: is {type(found).__name__}; name a torch module, or what gives one")
    try:
        made = found()
    except Exception as error:
        raise CommandError(
            f"--module={given}: calling it without arguments raises {type(error).__name__}: {error}; name a module, or "
            "a function without arguments that gives one"
        ) from error
    if not isinstance(made, nn.Module):
        raise CommandError(f"--module={given}: gives {type(made).__name__}; it must give a torch module")
    return made


def saved_run(directory: Path, given: str | None) -> SavedRun:
    """The run of a directory, with the network that it was fitted with, where that is the user's own."""
    import json

    from confide.data import Encoder
    from confide.models.flat import shaped
    from confide.running.artefacts import RECORD, load_run

    module = own_module(given)
    with suppress(Exception):  # what is wrong with a record is said below
        encoder = Encoder.from_dict(json.loads((directory / RECORD).read_text(encoding="utf-8"))["encoder"])
        names = encoder.feature_names
        module = module and shaped(module, (len(names),) if names else encoder.output_shape or ())
    try:
        return load_run(directory, module)
    except Refusal as error:
        if given is None and str(error).startswith("module=None"):
            raise CommandError(
                f"--module: the run in {directory} is of a network of your own; name the one that it was fitted with, "
                "as FILE.py:NAME"
            ) from None
        raise


def load(option: str, given: str) -> Any:
    """The object NAME of the Python file FILE, which is run."""
    path, _, name = given.rpartition(":")
    if not path or not name.isidentifier():
        raise CommandError(f"{option}={given}: must be FILE.py:NAME")
    if not Path(path).is_file():
        raise CommandError(f"{option}={given}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"own_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise CommandError(f"{option}={given}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CommandError(f"{option}={given}: running {path} raises {type(error).__name__}: {error}") from error
    if name not in vars(module):
        raise CommandError(f"{option}={given}: {path} defines no {name}")
    return vars(module)[name]
