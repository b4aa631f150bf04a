"""Posteriors: what a run leaves behind. Each can sample parameters, predict, save and load (safetensors, no pickle)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from confide.models.flat import flatten_, named_slices
from confide.models.likelihoods import likelihood_from_dict, likelihood_to_dict
from confide.models.networks import MLP, Recipe
from confide.models.predictive import Predictive

_ELEMENTS_AT_ONCE = 1 << 24  # outputs and weights held in one chunk of predictions: about 64 MB of float32


@runtime_checkable
class Posterior(Protocol):
    """What every posterior offers. `facts` are public remarks for the report: temperature, step size, draws."""

    kind: ClassVar[str]

    @property
    def facts(self) -> Mapping[str, Any]: ...

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """`count` parameter vectors, of shape (count, parameters)."""

    def predict(self, x: Tensor) -> Predictive:
        """The posterior predictive distribution at new inputs."""

    def save(self, path: str | Path) -> None:
        """Write one safetensors file."""


@dataclass(frozen=True)
class Draws:
    """Weighted draws of the flat parameter vector; a point estimate is a single draw.

    draws    (number of draws, parameters)
    weights  non-negative, one per draw, adding up to one
    """

    module: nn.Module
    likelihood: Any
    draws: Tensor
    weights: Tensor
    facts: Mapping[str, Any] = field(default_factory=dict)
    kind: ClassVar[str] = "draws"

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        if count < 1:
            raise ValueError(f"count={count}: must be at least 1")
        chosen = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        return self.draws[chosen]

    def mean(self) -> Tensor:
        return self.weights @ self.draws

    def covariance(self) -> Tensor:
        centred = self.draws - self.mean()
        return centred.T @ (centred * self.weights[:, None])

    @torch.no_grad()
    def predict(self, x: Tensor) -> Predictive:
        predictive: Predictive = self.likelihood.predictive(outputs_of_draws(self.module, self.draws, x), self.weights)
        return predictive

    def named_draws(self) -> dict[str, Tensor]:
        """The draws by parameter name, each of shape (draws, *parameter shape)."""
        slices = named_slices(self.module)
        return {name: self.draws[:, part].reshape(-1, *shape) for name, (part, shape) in slices.items()}

    def save(self, path: str | Path) -> None:
        save_posterior(self, {"draws": self.draws, "weights": self.weights}, path)


def outputs_of_draws(module: nn.Module, draws: Tensor, x: Tensor) -> Tensor:
    """Network outputs for every draw and input: (draws, inputs, ...), in chunks of bounded memory."""
    network = copy.deepcopy(module).eval()
    position = flatten_(network)
    rows = max(1, _ELEMENTS_AT_ONCE // max(1, x[:1].numel()))
    collected = []
    for draw in draws:
        position.copy_(draw)
        collected.append(torch.cat([network(part) for part in x.to(position.dtype).split(rows)]))
    return torch.stack(collected)


def save_posterior(posterior: Any, tensors: dict[str, Tensor], path: str | Path) -> None:
    """One safetensors file: tensors, and as metadata what is needed to build the posterior again."""
    from safetensors.torch import save_file

    recipe = getattr(posterior.module, "recipe", None)
    about = {
        "kind": posterior.kind,
        "likelihood": likelihood_to_dict(posterior.likelihood),
        "network": recipe.to_dict() if isinstance(recipe, Recipe) else None,
        "facts": dict(posterior.facts),
    }
    contiguous = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    save_file(contiguous, str(path), metadata={"confide": json.dumps(about)})


Builder = Callable[[nn.Module, Any, dict[str, Tensor], Mapping[str, Any]], Any]


def _build_draws(module: nn.Module, likelihood: Any, tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> Draws:
    return Draws(module, likelihood, tensors["draws"], tensors["weights"], facts)


BUILDERS: dict[str, Builder] = {Draws.kind: _build_draws}


def load_posterior(path: str | Path, module: nn.Module | None = None) -> Any:
    """Read a posterior back. A network of confide's own is rebuilt; any other module must be given."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as archive:
            about = json.loads((archive.metadata() or {}).get("confide", "null"))
            tensors = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"path={str(path)!r}: not a readable posterior file ({error})") from None
    if not isinstance(about, dict) or about.get("kind") not in BUILDERS:
        raise ValueError(f"path={str(path)!r}: not a posterior written by this version of confide")
    if module is None:
        if about["network"] is None:
            raise ValueError("module=None: this posterior belongs to a network of your own; pass it as module=")
        module = MLP(Recipe.from_dict(about["network"]))
    return BUILDERS[about["kind"]](module, likelihood_from_dict(about["likelihood"]), tensors, about["facts"])
