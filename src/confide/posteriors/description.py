"""What a posterior's file says beside its tensors: kind, likelihood, network and facts, as JSON and back; no pickle.

A network of confide's own is described by its recipe, if the recipe alone makes it: one with frozen or exchanged layers
counts as a network of one's own, like any other torch module. That, and a likelihood of one's own, cannot be written
down: they are given to `load_posterior` again. Of such a network the file holds what is not in the draws (`frozen`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from confide.devices import HOST, device_of, or_host
from confide.errors import Refusal
from confide.expectation.mixture import MixtureOfGaussians
from confide.models.additive import AdditiveNetwork, AdditiveRecipe
from confide.models.kernels import GaussianKernel, KernelNetwork
from confide.models.likelihoods import LearntNoise, Likelihood, likelihood_from_dict, likelihood_to_dict
from confide.models.networks import MLP, Recipe
from confide.models.programs import Program
from confide.models.tabular import TabularNetwork, TabularRecipe
from confide.posteriors.base import Posterior
from confide.posteriors.frozen import check_frozen, frozen_of, kept_apart, with_frozen

NUMBERS = {str(kind).removeprefix("torch."): kind for kind in (torch.float32, torch.float64, torch.float16)}
NUMBERS["bfloat16"] = torch.bfloat16
"""Types of a network's parameters that can be written down, by name."""
MOST_LAYERS = 1000
"""Far more than anybody fits; building a hundred thousand layers would take minutes."""
_MIXTURE = "mixture."
"""Beginning of the names of a mixture's tensors."""
_SCALE = "scale."
"""Beginning of the names of those of an additive model's scale."""
_KERNEL = "kernel."
"""Beginning of the names of those of a kernel."""

_TABLES: dict[type[nn.Module], str] = {AdditiveNetwork: "additive", TabularNetwork: "tabular"}
"""Networks of columns, whose scales are kept beside their weights."""

Prepare = Callable[[nn.Module], nn.Module]


class Damaged(Refusal):
    """What a file says of itself does not fit its contents; whoever read it adds its name."""


def save_posterior(
    posterior: Posterior, tensors: Mapping[str, Tensor], path: str | Path, prepare: Prepare | None = None
) -> None:
    """One safetensors file: tensors, and as metadata what is needed to build the posterior again.

    prepare   what the posterior does to the network of a recipe when it is rebuilt, if anything
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    own = _network_to_dict(posterior.module, prepare) is None
    everything = {**tensors, **_tensors_of(posterior.module), **(frozen_of(posterior.module) if own else {})}
    contiguous = {name: tensor.detach().contiguous().cpu() for name, tensor in everything.items()}
    about = description_of(posterior, prepare, kept_apart(posterior.module) if own else None)
    try:
        save_file(contiguous, str(path), metadata={"confide": about})
    except (OSError, SafetensorError) as error:
        raise Refusal(f"path={str(path)!r}: cannot be written ({one_sentence(error)}); save it elsewhere") from None


def description_of(posterior: Posterior, prepare: Prepare | None = None, frozen: str | None = None) -> str:
    """What is needed beside the tensors to build a posterior again, as JSON.

    frozen   the fingerprint of frozen parameters that the file does not hold
    """
    about = {
        "kind": posterior.kind,
        "likelihood": likelihood_to_dict(posterior.likelihood),
        "network": _network_to_dict(posterior.module, prepare),
        "facts": dict(posterior.facts),
    }
    if frozen is not None:
        about["frozen"] = frozen
    place = device_of(posterior.module)
    if place != HOST:
        about["device"] = str(place)
    return json.dumps(about, default=_plain)


def _plain(value: Any) -> Any:
    """A fact that JSON does not know: numbers as numbers, anything else in words. No fact may cost a paid posterior."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, set | frozenset | range):
        return list(value)
    return str(value)


def likelihood_of(about: Mapping[str, Any], given: Likelihood | None) -> Likelihood:
    """The given likelihood, or the one of confide's own that the file describes."""
    if given is None:
        return likelihood_from_dict(about["likelihood"])
    if given.name != about["likelihood"]["name"]:
        raise Refusal(f"likelihood={given.name!r}: this posterior was fitted with {about['likelihood']['name']!r}")
    return given


def network_of(about: Mapping[str, Any], given: nn.Module | None, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The given network, or the one of confide's own that the file describes, on its device if this machine has it."""
    network = about["network"]
    if network is not None and network["type"] == "program":
        return _program(network, given)
    if given is not None:
        check_frozen(given, about.get("frozen"))
        return with_frozen(given, tensors)
    if network is None:
        raise Refusal("module=None: this posterior belongs to a network of your own; pass it as module=")
    return _rebuilt(network, tensors).to(or_host(str(about.get("device", HOST))))


def _rebuilt(network: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """A network of confide's own, on the host."""
    if network["type"] == "mixture":
        return _mixture(tensors)
    if network["type"] == "kernel":
        return _kernel(network, tensors)
    if network["type"] == "additive":
        return _additive(network, tensors)
    if network["type"] == "tabular":
        return _tabular(network, tensors)
    recipe = Recipe.from_dict(network["recipe"])
    _check_room(recipe, max((tensor.numel() for tensor in tensors.values()), default=0))
    return _built(network["type"], recipe, NUMBERS[network["numbers"]])


def _program(network: Mapping[str, Any], given: nn.Module | None) -> Program:
    """The program, which is given again: a file holds no functions."""
    if given is None:
        raise Refusal("module=None: this posterior belongs to a program of your own; pass it as module=")
    if not isinstance(given, Program):
        raise Refusal(f"module={type(given).__name__}: this posterior belongs to a program; pass that one")
    if given.described() != network["parameters"]:
        raise Refusal(
            f"module: its parameters are {given.described()}, and those of the program that was fitted "
            f"{network['parameters']}, each with its shape and support; pass that one"
        )
    return given


def _check_room(recipe: Recipe, numbers: int) -> None:
    """Before anything is built: a file that asks for a network larger than itself did not come from `save`."""
    widths = (recipe.features, *recipe.hidden, recipe.outputs)
    if not all(type(width) is int for width in widths) or len(widths) > MOST_LAYERS:
        raise Damaged(f"recipe: must name whole numbers of units in at most {MOST_LAYERS} layers; the file is damaged")
    needed = sum((wide + 1) * narrow for wide, narrow in itertools.pairwise(widths))
    if needed > numbers:
        raise Damaged(
            f"recipe: its network has {needed} parameters and the file holds {numbers} numbers; it is damaged"
        )


def check_outputs(module: nn.Module, likelihood: Likelihood) -> None:
    """A network of confide's own has as many outputs as its likelihood reads."""
    outputs = module.recipe.outputs if type(module) is MLP else likelihood.outputs
    outputs = module.outputs if type(module) is KernelNetwork else outputs
    if outputs != likelihood.outputs:
        raise Damaged(
            f"recipe: its network has {outputs} outputs and the likelihood {likelihood.name!r} reads "
            f"{likelihood.outputs}; the file is damaged, or likelihood= is another one"
        )


def one_sentence(error: BaseException, limit: int = 160) -> str:
    """What a reader complained of, short and on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _network_to_dict(module: nn.Module, prepare: Prepare | None) -> dict[str, Any] | None:
    """None for a network that its recipe does not make."""
    if type(module) is MixtureOfGaussians:
        return {"type": "mixture"}
    if type(module) is KernelNetwork:
        return {"type": "kernel", "outputs": module.outputs}
    if isinstance(module, Program):
        return {"type": "program", "parameters": module.described()}
    if type(module) in (AdditiveNetwork, TabularNetwork):
        kept = str(next(module.parameters()).dtype).removeprefix("torch.")
        recipe: Any = module.recipe
        return {"type": _TABLES[type(module)], "recipe": recipe.to_dict(), "numbers": kept}
    kind, inner = ("learnt-noise", module.network) if type(module) is LearntNoise else ("mlp", module)
    if type(inner) is not MLP:
        return None
    numbers = next(inner.parameters()).dtype
    made = _built(kind, inner.recipe, numbers)
    made = made if prepare is None else prepare(made)
    if _anatomy(made) != _anatomy(module):
        return None
    return {"type": kind, "recipe": inner.recipe.to_dict(), "numbers": str(numbers).removeprefix("torch.")}


def _built(kind: str, recipe: Recipe, numbers: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):  # the values to start from do not count, so nobody's stream moves
        network = MLP(recipe).to(numbers)
        return LearntNoise(network) if kind == "learnt-noise" else network


def _anatomy(module: nn.Module) -> list[tuple[Any, ...]]:
    """Everything about a network but its values: layers, parameters, buffers."""
    layers = [(name, type(layer)) for name, layer in module.named_modules()]
    values = [(name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters(remove_duplicate=False)]
    return [*layers, *values, *((name, buffer.shape) for name, buffer in module.named_buffers())]


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """What a mixture is made of, or the scale of an additive model; its shape alone would not make it again."""
    if isinstance(module, AdditiveNetwork):
        return {f"{_SCALE}{name}": value for name, value in module.features.state_dict().items()}
    if isinstance(module, TabularNetwork):
        return {f"{_SCALE}{name}": value for name, value in module.named_buffers()}
    if isinstance(module, KernelNetwork):
        return {f"{_KERNEL}{name}": value for name, value in module[0].named_buffers()}
    if not isinstance(module, MixtureOfGaussians):
        return {}
    values = {f"{_MIXTURE}{name}": value for name, value in module.state_dict().items()}
    return {**values, f"{_MIXTURE}spread": torch.tensor([module.spread], dtype=torch.float64)}


def _additive(network: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> AdditiveNetwork:
    made = AdditiveNetwork(AdditiveRecipe.from_dict(network["recipe"])).to(NUMBERS[network["numbers"]])
    scale = {name.removeprefix(_SCALE): value for name, value in tensors.items() if name.startswith(_SCALE)}
    made.features.load_state_dict(scale)
    return made


def _tabular(network: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> TabularNetwork:
    recipe = TabularRecipe.from_dict(network["recipe"])
    _check_room(recipe.network, max((tensor.numel() for tensor in tensors.values()), default=0))
    with torch.random.fork_rng(devices=[]):
        made = TabularNetwork(recipe).to(NUMBERS[network["numbers"]])
    for name, buffer in made.named_buffers():
        if tensors[f"{_SCALE}{name}"].shape != buffer.shape:
            raise Damaged(f"{name}: does not fit the recipe; the file is damaged")
        buffer.copy_(tensors[f"{_SCALE}{name}"])
    return made


def _kernel(network: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> KernelNetwork:
    """Landmarks, directions and width are in the file; the linear layer is what the draws hold."""
    centre, turned, places, reach = (tensors[f"{_KERNEL}{name}"] for name in ("centre", "turned", "places", "reach"))
    outputs = network["outputs"]
    fits = turned.dim() == places.dim() == 2 and centre.shape == turned.shape[:1] and reach.dim() == 0
    if not fits or places.shape[1] != turned.shape[1]:
        raise Damaged("kernel: its landmarks do not fit its directions; the file is damaged")
    if type(outputs) is not int or not 0 < outputs * (len(places) + 1) <= max(map(Tensor.numel, tensors.values())):
        raise Damaged("kernel: its network is larger than the file; it is damaged")
    return KernelNetwork(GaussianKernel(centre, turned, places, reach), outputs)


def _mixture(tensors: Mapping[str, Tensor]) -> MixtureOfGaussians:
    parts = {name.removeprefix(_MIXTURE): value for name, value in tensors.items() if name.startswith(_MIXTURE)}
    mixture = MixtureOfGaussians(
        *parts["means"].shape,
        scale=parts["covariances"],
        weights=parts["weights"],
        centre=parts["centre"],
        spread=float(parts["spread"]),
    ).to(parts["means"].dtype)  # a device may have no doubles
    mixture.means.data.copy_(parts["means"])
    return mixture
