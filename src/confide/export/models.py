"""Exports: a fitted model where confide, torch and scikit-learn are not.

    export_numpy(posterior, directory)      draws as one .npz, beside a module predict.py that needs numpy alone
    export_program(posterior, path)         the network at the posterior mean as a torch.export program (.pt2)

The numpy predictor averages over the same draws as the posterior and gives both kinds of uncertainty. The torch program
is one network: its outputs have no epistemic part, and are not the posterior predictive mean. `to_arviz` and the
posterior's own safetensors file need no export.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from confide.errors import Refusal
from confide.models.flat import flatten_
from confide.models.likelihoods import likelihood_to_dict
from confide.posteriors.base import Posterior
from confide.posteriors.drafts import sync
from confide.posteriors.prediction.stacked import chain_of
from confide.posteriors.variational import DropoutNetwork

FORMAT = 1  # raised when files that were written before could be misread
WEIGHTS, MODULE = "draws.npz", "predict.py"
_ACTIVATIONS = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid", nn.SiLU: "silu", nn.Identity: "identity"}

_LIKELIHOODS = ("categorical", "bernoulli", "gaussian", "heteroscedastic-gaussian")


def export_numpy(posterior: Posterior, directory: str | os.PathLike[str], encoder: Any = None) -> Path:
    """Write draws.npz and predict.py to a new directory, and return its path.

    encoder   of the run: its target's scale and centre are kept, so that numbers come out in the target's units; how
              raw columns become inputs is written to encoder.json for whoever prepares the inputs
    """
    target = Path(directory)
    if os.path.lexists(target):
        raise Refusal(f"directory={str(target)!r}: exists already; name a new one")
    arrays, about = _numpy_parts(posterior)
    if encoder is not None and encoder.schema.classes is None:
        about |= {"scale": float(encoder.target_scale), "centre": float(encoder.target_centre)}
    if encoder is not None and encoder.schema.classes is not None:
        about["classes"] = [str(label) for label in encoder.schema.classes]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".confide-export-", dir=target.parent) as base:
        draft = Path(base) / "export"
        draft.mkdir()
        np.savez(draft / WEIGHTS, about=np.array(json.dumps(about)), **arrays)
        shutil.copyfile(Path(__file__).with_name("numpy_predictor.py"), draft / MODULE)
        if encoder is not None:
            (draft / "encoder.json").write_text(json.dumps(encoder.to_dict(), indent=2), encoding="utf-8")
        for path in (*draft.iterdir(), draft):
            sync(path)
        draft.rename(target)
        sync(target.absolute().parent)
    return target


def _numpy_parts(posterior: Posterior) -> tuple[dict[str, Any], dict[str, Any]]:
    chain = chain_of(posterior.module, masked=isinstance(posterior, DropoutNetwork))
    if chain is None:
        raise Refusal(
            f"posterior: its network, {type(posterior.module).__name__}, is not a chain of linear layers and "
            "activations; export_program takes any network"
        )
    draws, weights = posterior.weighted_draws()
    arrays: dict[str, Any] = {"weights": weights.double().numpy()}
    layers: list[str] = []
    for layer in chain:
        if layer.weight is None:
            layers.append(_activation_name(layer.activation))
            continue
        place = len(layers)
        layers.append("linear")
        arrays[f"weight_{place}"] = draws[:, layer.weight].reshape(-1, *layer.shape).numpy()
        if layer.bias is not None:
            arrays[f"bias_{place}"] = draws[:, layer.bias].numpy()
    about: dict[str, Any] = {"format": FORMAT, "layers": layers, "likelihood": _likelihood(posterior)}
    return arrays, about


def _likelihood(posterior: Posterior) -> dict[str, Any]:
    values = likelihood_to_dict(posterior.likelihood)
    if values["name"] not in _LIKELIHOODS:
        raise Refusal(
            f"posterior: its likelihood, {values['name']}, has no numpy form; those that have are "
            f"{', '.join(_LIKELIHOODS)}, and load_posterior reads any"
        )
    if posterior.noise_scale is not None:
        values["noise_scale"] = posterior.noise_scale  # which the posterior may have learnt
    return values


def _activation_name(layer: nn.Module | None) -> str:
    if isinstance(layer, nn.GELU):
        return "gelu" if layer.approximate == "none" else "gelu_tanh"
    name = _ACTIVATIONS.get(type(layer))
    if name is None:
        known = ", ".join(kind.__name__ for kind in (*_ACTIVATIONS, nn.GELU))
        raise Refusal(f"posterior: the activation {layer} has no numpy form; those that have are {known}")
    return name


def mean_network(posterior: Posterior) -> nn.Module:
    """The network with its weights at their posterior mean, in the mode for predictions."""
    network: nn.Module = copy.deepcopy(posterior.module)
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
    torch.export.save(program, target, extra_files={"confide.json": json.dumps(_about(posterior))})
    return target


def _about(posterior: Posterior) -> Mapping[str, Any]:
    return {"format": FORMAT, "likelihood": likelihood_to_dict(posterior.likelihood), "network": "posterior mean"}
