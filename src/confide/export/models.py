"""Exports: a fitted model where confide is not. One folder, self-contained, that takes raw rows.

    export_numpy(posterior, directory)      draws.npz: all draws, for numpy alone
    export_onnx(posterior, directory)       model.onnx: all draws and the encoder as one graph, for onnxruntime
    export_torch(posterior, directory)      model.pt2: all draws as a torch.export program
    export_program(posterior, path)         any network at the posterior mean as a .pt2 file

Every folder holds predict.py, which reads all three kinds, takes dicts, frames and CSV files by the declared facts, and
gives probabilities or means with both kinds of uncertainty. The first three average over the draws of the
posterior; one that is a law and not a list, such as that of an additive model, is exported as a hundred draws of it, so
that predictions differ from confide's own by what a hundred draws leave open (some thousandths of a probability). What
is written was released and paid for, or declared public; `to_arviz` and the posterior's own safetensors file need no
export.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from confide.data.pictures import channels_last
from confide.data.preprocessing import Encoder, middle_and_half
from confide.errors import Refusal
from confide.export.assembly import predictor_source
from confide.export.stacked_draws import StackedDraws, stacked_draws
from confide.models.flat import copied, flatten_
from confide.models.likelihoods import likelihood_to_dict
from confide.posteriors.base import Posterior
from confide.posteriors.drafts import make_folder, sync
from confide.posteriors.variational import DropoutNetwork

FORMAT = 2  # raised when files that were written before could be misread
WEIGHTS, GRAPH, PROGRAM, MODULE, CARD = "draws.npz", "model.onnx", "model.pt2", "predict.py", "MODEL_CARD.md"


def export_numpy(
    posterior: Posterior, directory: str | os.PathLike[str], encoder: Encoder | None = None, card: str = ""
) -> Path:
    """Write draws.npz, predict.py and, if there is one, the model card to a new directory, and return its path.

    encoder   of the run: how raw rows become inputs, and in which units predictions come out; without it predict.py
              takes encoded inputs
    card      the text of MODEL_CARD.md
    """
    draws = stacked_draws(posterior)
    about = about_of(posterior, draws, encoder)

    def write(draft: Path) -> None:
        np.savez(draft / WEIGHTS, about=np.array(json.dumps(about)), **draws.arrays())

    return _written(directory, card, write)


def export_onnx(
    posterior: Posterior, directory: str | os.PathLike[str], encoder: Encoder | None = None, card: str = ""
) -> Path:
    """Write model.onnx, predict.py and the model card to a new directory; see `confide.export.onnx_graph`."""
    from confide.export.onnx_graph import graph_of

    draws = stacked_draws(posterior)
    model = graph_of(draws, about_of(posterior, draws, encoder))
    return _written(directory, card, lambda draft: _save_bytes(draft / GRAPH, model))


def export_torch(
    posterior: Posterior, directory: str | os.PathLike[str], encoder: Encoder | None = None, card: str = ""
) -> Path:
    """Write model.pt2, predict.py and the model card to a new directory: encoded inputs to centre and uncertainties."""
    from confide.export.torch_program import AveragedDraws

    draws = stacked_draws(posterior)
    about = about_of(posterior, draws, encoder)
    network = AveragedDraws(draws, about).eval()
    with torch.no_grad():
        shapes = ({0: torch.export.Dim.AUTO},)
        program = torch.export.export(network, (torch.zeros(2, draws.features),), dynamic_shapes=shapes)

    def write(draft: Path) -> None:
        torch.export.save(program, draft / PROGRAM, extra_files={"confide.json": json.dumps(about)})

    return _written(directory, card, write)


def _save_bytes(path: Path, model: Any) -> None:
    path.write_bytes(model.SerializeToString())


def _written(directory: str | os.PathLike[str], card: str, write: Callable[[Path], None]) -> Path:
    """A new directory with what `write` puts there, the module and the card: all of it or nothing."""
    target = Path(directory)
    if os.path.lexists(target):
        raise Refusal(f"directory={str(target)!r}: exists already; name a new one")
    make_folder(target.parent)
    with tempfile.TemporaryDirectory(prefix=".confide-export-", dir=target.parent) as base:
        draft = Path(base) / "export"
        draft.mkdir()
        write(draft)
        (draft / MODULE).write_text(predictor_source(), encoding="utf-8")
        if card:
            (draft / CARD).write_text(card, encoding="utf-8")
        for path in (*draft.iterdir(), draft):
            sync(path)
        draft.rename(target)
        sync(target.absolute().parent)
    return target


def about_of(posterior: Posterior, draws: StackedDraws, encoder: Encoder | None) -> dict[str, Any]:
    """What predict.py has to know: the likelihood, the layers, and how raw rows become inputs."""
    values = likelihood_to_dict(draws.likelihood)
    if posterior.noise_scale is not None:
        values["noise_scale"] = float(posterior.noise_scale)  # which the posterior may have learnt
    about: dict[str, Any] = {"format": FORMAT, "features": draws.features, "layers": draws.layers, "likelihood": values}
    if draws.columns is not None:
        about["waves"] = draws.columns.waves
    if encoder is None:
        return about
    schema = encoder.schema
    about |= _target(encoder)
    if schema.columns:
        about["columns"] = [_column(encoder, place) for place in range(len(schema.columns))]
    else:
        pixels = encoder.layout == "features" and schema.shape is not None
        count = math.prod(schema.shape or ()) if pixels else draws.features
        about |= {"bounds": [schema.bounds_of(place) for place in range(count)], "missing": schema.missing}
        if pixels and schema.shape is not None:
            about["picture"] = {
                "shape": list(schema.shape),
                "last": len(schema.shape) == 3 and channels_last(schema.shape),
            }
    return about


def _target(encoder: Encoder) -> dict[str, Any]:
    """The labels, or the units of what is predicted."""
    schema = encoder.schema
    if schema.classes is not None:
        return {"classes": [str(label) for label in schema.classes]}
    if not schema.targets:
        return {"scale": float(encoder.target_scale), "centre": float(encoder.target_centre)}
    names, bounds = [name for name, _ in schema.targets], [pair for _, pair in schema.targets]
    known = [pair for pair in bounds if pair is not None]
    if not known:  # labels, of which any may hold
        return {"targets": names}
    units = [middle_and_half(*pair) for pair in known]
    return {"targets": names, "scale": [float(half) for _, half in units], "centre": [float(mid) for mid, _ in units]}


def _column(encoder: Encoder, place: int) -> dict[str, Any]:
    column = encoder.schema.columns[place]
    about: dict[str, Any] = {"name": column.name, "kind": column.kind, "missing": column.missing}
    if column.date:
        about |= {"of": column.raw, "date": column.date, "part": column.part}
    elif column.buckets:
        about |= {"of": column.raw, "buckets": column.buckets}
    elif column.of:
        about["of"] = column.of
    if column.kind == "categorical":
        return {**about, "categories": list(column.categories)}
    bounds = encoder.schema.bounds_of(place, column)
    assert bounds is not None  # an encoder has them
    return {**about, "low": bounds[0], "high": bounds[1]}


def mean_network(posterior: Posterior) -> nn.Module:
    """The network with its weights at their posterior mean, in the mode for predictions."""
    network: nn.Module = copied(posterior.module)
    if isinstance(posterior, DropoutNetwork):
        from confide.layers.dropout import SharedDropout

        for layer in network.modules():
            if isinstance(layer, SharedDropout):
                layer.use_mean_()
    position = flatten_(network)
    position.copy_(posterior.mean())
    for parameter in network.parameters():
        parameter.data = parameter.data.clone()  # of its own again: exported programs store no views
    network.eval()
    return network


def export_program(posterior: Posterior, path: str | os.PathLike[str], example: Tensor) -> Path:
    """Write the posterior-mean network as a torch.export program, for any number of inputs.

    Its outputs have no epistemic part, and are not the posterior predictive mean.

    example   a few inputs, such as zeros: their shape counts and not their values; at least 2
    """
    target = Path(path)
    if target.suffix != ".pt2":
        raise Refusal(f"path={str(target)!r}: torch.export writes .pt2 files; name one")
    if os.path.lexists(target):
        raise Refusal(f"path={str(target)!r}: exists already; name a new file")
    if len(example) < 2:
        raise Refusal(f"example of shape {tuple(example.shape)}: give at least 2 inputs, or the number 1 is built in")
    network = mean_network(posterior)
    kind = next(network.parameters()).dtype
    inputs = (example.to(kind),)
    with torch.no_grad():
        program = torch.export.export(network, inputs, dynamic_shapes=({0: torch.export.Dim.AUTO},))
    torch.export.save(program, target, extra_files={"confide.json": json.dumps(_about_mean(posterior))})
    return target


def _about_mean(posterior: Posterior) -> Mapping[str, Any]:
    return {"format": FORMAT, "likelihood": likelihood_to_dict(posterior.likelihood), "network": "posterior mean"}
