"""`confide export`: a fitted model for places without confide."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from confide.cli import options
from confide.cli.help_texts import teach
from confide.cli.options import OUTPUT, Json
from confide.cli.output import emit_json, one_line, output
from confide.errors import CommandError

EXAMPLES = (
    "confide export out/run --form numpy --out out/deploy",
    "confide export out/run --form torch --out out/model.pt2",
)
FORMS = ("numpy", "torch")

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="A directory that `confide fit` wrote.", show_default=False)
]
Form = Annotated[
    str,
    typer.Option(
        "--form",
        metavar="F",
        help="numpy: all draws with a module that needs numpy alone. torch: the posterior-mean network as .pt2.",
        rich_help_panel=OUTPUT,
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        metavar="PATH", help="New directory (numpy) or file (torch).", rich_help_panel=OUTPUT, show_default=False
    ),
]


def export(directory: Directory, *, out: Out, form: Form = "numpy", as_json: Json = False) -> None:
    """Write a fitted model for deployment. It costs no budget.

    numpy keeps the whole posterior and both kinds of uncertainty. torch keeps one network, at the posterior mean,
    without epistemic uncertainty.
    """
    options.choice("--form", form, FORMS)
    from confide.cli.paths import check_writable

    check_writable("--out", out)
    if out.exists():
        raise CommandError(f"--out={out}: exists already; name a new one")
    if form == "torch" and out.suffix != ".pt2":
        raise CommandError(f"--out={out}: torch programs are .pt2 files; name one")
    from confide.running.artefacts import load_run

    saved = load_run(directory)
    files = _numpy(saved, out) if form == "numpy" else _torch(saved, out)
    if as_json:
        emit_json({"form": form, "out": str(out), "files": files})
    else:
        output().print(f"Written: {escape(one_line(', '.join(files)))}")


def _numpy(saved: Any, out: Path) -> list[str]:
    from confide.data import Encoder
    from confide.export.models import export_numpy

    encoder = None if saved.encoder is None else Encoder.from_dict(saved.encoder)
    return sorted(str(path) for path in export_numpy(saved.posterior, out, encoder).iterdir())


def _torch(saved: Any, out: Path) -> list[str]:
    import torch

    from confide.export.models import export_program

    features = saved.posterior.module.recipe.features
    return [str(export_program(saved.posterior, out, torch.zeros(2, features)))]


def register(app: Any) -> None:
    teach(app, export, EXAMPLES)
