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
from confide.cli.own_code import OwnModule, saved_run

EXAMPLES = (
    "confide export out/run --to numpy --out out/deploy",
    "confide export out/run --to onnx --out out/deploy-onnx",
)
KINDS = ("numpy", "torch", "onnx")

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="A directory that `confide fit` wrote.", show_default=False)
]
Kind = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="K",
        help="numpy (draws.npz), torch (model.pt2) or onnx (model.onnx, with the encoder in the graph).",
        rich_help_panel=OUTPUT,
    ),
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="New directory.", rich_help_panel=OUTPUT, show_default=False)]


def export(
    directory: Directory, *, out: Out, to: Kind = "numpy", module: OwnModule = None, as_json: Json = False
) -> None:
    """Write a fitted model for deployment. It costs no budget.

    The new directory holds the whole posterior as one file, predict.py, which takes raw rows (a dict, a frame, a CSV
    file) and gives probabilities or means with both kinds of uncertainty, and MODEL_CARD.md with the privacy statement
    and the metrics.
    """
    options.choice("--to", to, KINDS)
    from confide.cli.paths import check_new_directory

    check_new_directory("--out", out)
    from confide.data import Encoder
    from confide.export import models
    from confide.export.agreement import agreement
    from confide.export.card import model_card

    saved = saved_run(directory, module)
    encoder = None if saved.encoder is None else Encoder.from_dict(saved.encoder)
    write = {"numpy": models.export_numpy, "torch": models.export_torch, "onnx": models.export_onnx}[to]
    card = model_card(saved, files=agreement(saved.posterior, encoder))
    files = sorted(str(path) for path in write(saved.posterior, out, encoder, card).iterdir())
    if as_json:
        emit_json({"to": to, "out": str(out), "files": files})
    else:
        output().print(f"Written: {escape(one_line(', '.join(files)))}")


def register(app: Any) -> None:
    teach(app, export, EXAMPLES)
