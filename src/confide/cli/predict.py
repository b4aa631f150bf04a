"""`confide predict`: class probabilities or means for new records, with both kinds of uncertainty."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from confide.cli import options
from confide.cli.help_texts import teach
from confide.cli.options import OUTPUT, Json
from confide.cli.output import emit_json, one_line, output, progress_bar
from confide.cli.own_code import OwnModule, saved_run
from confide.errors import CommandError

if TYPE_CHECKING:
    from confide.data import Encoder
    from confide.models.predictive import ClassPredictive, RealPredictive
    from confide.posteriors.base import Posterior

EXAMPLE = "confide predict out/run new.csv --out predictions.csv"
ROWS_AT_ONCE = 2048  # So that progress is shown, and memory does not grow with the file.
FORMULA = ("=", "+", "-", "@")

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="A directory that `confide fit` wrote.", show_default=False)
]
Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="New records, with the columns of the training file; the target may be absent.",
        show_default=False,
    ),
]
Out = Annotated[
    Path,
    typer.Option(metavar="FILE.csv", help="Where the predictions go.", rich_help_panel=OUTPUT, show_default=False),
]
Level = Annotated[float, typer.Option(metavar="P", help="Probability inside the intervals.", rich_help_panel=OUTPUT)]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", metavar="", help="Replace the file if it exists.", rich_help_panel=OUTPUT)
]


def predict(
    directory: Directory,
    data: Data,
    out: Out,
    level: Level = 0.9,
    overwrite: Overwrite = False,
    module: OwnModule = None,
    as_json: Json = False,
) -> None:
    """Predict new records with a fitted model. It costs no budget.

    Classification: one probability per class, the predicted label, and an interval for its probability. Regression: the
    mean and an interval for a new observation. Both: epistemic uncertainty, which more data would reduce, and aleatoric
    uncertainty, which it would not (in nats for classes, as variances for numbers).
    """
    options.number("--level", level, above=0, below=1)
    _check_target(out, overwrite)
    from confide.data import Encoder, load_table

    saved = saved_run(directory, module)
    if saved.encoder is None:
        raise CommandError(
            f"DIR={directory}: its run does not say how records become inputs; fit again with `confide fit`"
        )
    encoder = Encoder.from_dict(saved.encoder)
    inputs = encoder.features(load_table(data, part="test", schema=encoder.schema, target_required=False))
    header = columns_of(encoder)
    with progress_bar("predict") as progress:
        _write(out, header, rows_of(saved.posterior, encoder, inputs, level, progress))
    if as_json:
        emit_json({"out": str(out), "rows": len(inputs), "columns": header, "level": level})
    else:
        output().print(f"{len(inputs)} predictions written to {escape(one_line(str(out)))}")


def _check_target(out: Path, overwrite: bool) -> None:
    if out.is_dir():
        raise CommandError(f"--out={out}: is a directory; name a file")
    if os.path.lexists(out) and not overwrite:
        raise CommandError(f"--out={out}: exists already; name a new file, or add --overwrite")
    if not out.absolute().parent.is_dir():
        raise CommandError(f"--out={out}: the folder {out.absolute().parent} does not exist; create it first")


def columns_of(encoder: Encoder) -> list[str]:
    """The header of the file."""
    uncertainty = ["epistemic", "aleatoric", "interval_low", "interval_high"]
    names = [name for name, _ in encoder.schema.targets]
    if names and encoder.schema.targets[0][1] is None:
        return [*(f"probability_{name}" for name in names), *uncertainty[:2]]
    if names:
        return [f"{name}_{part}" for name in names for part in ("mean", *uncertainty)]
    if encoder.schema.classes is None:
        return ["mean", *uncertainty]
    return [*(f"probability_{label}" for label in encoder.schema.classes), "predicted", *uncertainty]


def rows_of(
    posterior: Posterior, encoder: Encoder, inputs: Any, level: float, progress: Callable[[int, int], None]
) -> Iterator[list[Any]]:
    """One row of cells per record, a few thousand records at a time."""
    import torch

    from confide.models.predictive import LabelPredictive, RealPredictive, VectorPredictive, of_classes
    from confide.workflow.measure import in_units, numbers_in_units

    for start in range(0, len(inputs), ROWS_AT_ONCE):
        predictive = posterior.predict(torch.as_tensor(inputs[start : start + ROWS_AT_ONCE]))
        if isinstance(predictive, RealPredictive):
            yield from _real_rows(in_units(predictive, encoder), level)
        elif isinstance(predictive, LabelPredictive):
            parts = (predictive.probabilities, predictive.epistemic[:, None], predictive.aleatoric[:, None])
            yield from torch.cat(parts, 1).tolist()
        elif isinstance(predictive, VectorPredictive):
            units = numbers_in_units(predictive, encoder)
            every = [list(_real_rows(units.of(place), level)) for place in range(units.targets)]
            yield from ([cell for part in row for cell in part] for row in zip(*every, strict=True))
        else:
            yield from _class_rows(of_classes(predictive), encoder, level)
        progress(min(start + ROWS_AT_ONCE, len(inputs)), len(inputs))


def _real_rows(predictive: RealPredictive, level: float) -> Iterator[list[Any]]:
    low, high = predictive.interval(level).unbind(-1)
    parts = (predictive.mean, predictive.epistemic, predictive.aleatoric, low, high)
    yield from (list(row) for row in zip(*(part.tolist() for part in parts), strict=True))


def _class_rows(predictive: ClassPredictive, encoder: Encoder, level: float) -> Iterator[list[Any]]:
    labels = predictive.labels
    chosen = labels[:, None, None].expand(-1, 1, 2)
    interval = predictive.interval(level).gather(1, chosen).squeeze(1)
    uncertainty = zip(predictive.epistemic.tolist(), predictive.aleatoric.tolist(), interval.tolist(), strict=True)
    for probabilities, label, (epistemic, aleatoric, ends) in zip(
        predictive.probabilities.tolist(), labels.tolist(), uncertainty, strict=True
    ):
        yield [*probabilities, encoder.label_of(label), epistemic, aleatoric, *ends]


def _write(out: Path, header: list[str], rows: Iterator[list[Any]]) -> None:
    """The whole file or nothing: written under another name beside it and then renamed."""
    from confide.posteriors.drafts import draft_of, sync

    draft = draft_of(out)
    try:
        with draft.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([_harmless(cell) for cell in header])
            writer.writerows([_harmless(cell) for cell in row] for row in rows)
        sync(draft)
        draft.replace(out)
        sync(out.absolute().parent)
    finally:
        draft.unlink(missing_ok=True)


def _harmless(cell: Any) -> Any:
    """A label that a spreadsheet would take for a formula gets an apostrophe, which keeps it text there."""
    return f"'{cell}" if isinstance(cell, str) and cell.lstrip().startswith(FORMULA) else cell


def register(app: Any) -> None:
    teach(app, predict, [EXAMPLE])
