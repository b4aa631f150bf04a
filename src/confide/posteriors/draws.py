"""Posteriors: what a run leaves behind. Each can sample parameters, predict, save and load (safetensors, no pickle)."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from confide.errors import Refusal
from confide.models.flat import named_slices
from confide.models.likelihoods import likelihood_from_dict, likelihood_to_dict
from confide.models.networks import MLP, Recipe
from confide.models.predictive import Predictive
from confide.posteriors.prediction.stacked import outputs_of
from confide.posteriors.prediction.summary import Summary, predictive_of_draws, summary_of_draws

MAPPED_ABOVE = 1 << 28
"""Bytes of a file of draws above which it is read piece by piece instead of as a whole."""


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
            raise Refusal(f"count={count}: must be at least 1")
        chosen = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        return self.draws[chosen].to(self.weights.dtype)

    def mean(self) -> Tensor:
        total = torch.zeros(self.draws.shape[1], dtype=self.weights.dtype)
        start = 0
        for group in self.groups(64):
            total += self.weights[start : start + len(group)] @ group
            start += len(group)
        return total

    def covariance(self) -> Tensor:
        draws = self.draws.to(self.weights.dtype)
        centred = draws - self.weights @ draws
        return centred.T @ (centred * self.weights[:, None])

    def groups(self, size: int) -> Iterator[Tensor]:
        """The draws in order, at most `size` at a time, in the number type of the weights."""
        for group in self.draws.split(size):
            yield group.to(self.weights.dtype)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Predictive:
        return predictive_of_draws(self.module, self.groups, x, self.likelihood, self.weights)

    @torch.no_grad()
    def summary(self, x: Tensor) -> Summary:
        """Probabilities or means with both kinds of uncertainty, in memory that does not grow with the draws."""
        return summary_of_draws(self.module, self.groups, x, self.likelihood, self.weights)

    def named_draws(self) -> dict[str, Tensor]:
        """The draws by parameter name, each of shape (draws, *parameter shape)."""
        slices = named_slices(self.module)
        return {name: self.draws[:, part].reshape(-1, *shape) for name, (part, shape) in slices.items()}

    def to_arviz(self) -> Any:
        """The draws by parameter name in the `posterior` group of ArviZ's data tree, (chain, draw, *parameter shape).

        ArviZ knows no weights: where they differ, draws are repeated or left out in proportion to them, in order.
        """
        chains = int(self.facts.get("chains", 1))
        chosen = _evenly_weighted(self.weights.reshape(chains, -1))
        return to_arviz({name: draws[chosen] for name, draws in self.named_draws().items()}, self.facts)

    def save(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write one safetensors file; dtype=torch.bfloat16 halves it, at three significant digits per weight."""
        if dtype is not None and not dtype.is_floating_point:
            raise Refusal(f"dtype={dtype}: must be a floating point type, such as torch.bfloat16")
        save_posterior(self, {"draws": self.draws.to(dtype or self.draws.dtype), "weights": self.weights}, path)


def _evenly_weighted(weights: Tensor) -> Tensor:
    """Row numbers of as many draws as there are, of equal weight, chain by chain: systematic resampling."""
    chains, count = weights.shape
    if torch.allclose(weights, weights.mean()):
        return torch.arange(chains * count).reshape(chains, count)
    mass = weights.double().cumsum(1) / weights.double().sum(1, keepdim=True)
    ticks = ((torch.arange(count, dtype=torch.float64) + 0.5) / count).repeat(chains, 1)
    chosen = torch.searchsorted(mass, ticks).clamp(max=count - 1)
    return chosen + count * torch.arange(chains)[:, None]


def to_arviz(draws: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Any:
    """A data tree of draws by name, each of shape (chain, draw, *parameter shape); needs the extra confide[arviz]."""
    try:
        from arviz_base import from_dict
    except ImportError:
        raise ImportError("arviz_base: not installed; pip install 'confide[arviz]'") from None
    # Attributes of a netCDF file are texts and numbers.
    about = {name: value for name, value in facts.items() if isinstance(value, str | int | float)}
    arrays = {name: values.detach().cpu().numpy() for name, values in draws.items()}
    return from_dict({"posterior": arrays}, attrs={"posterior": {"inference_library": "confide", **about}})


def outputs_of_draws(module: nn.Module, draws: Tensor, x: Tensor) -> Tensor:
    """Network outputs for every draw and input: (draws, inputs, ...), in chunks of bounded memory."""
    return outputs_of(module, lambda size: iter(draws.split(size)), x, len(draws))


def description_of(posterior: Any) -> str:
    """What is needed beside the tensors to build a posterior again, as JSON."""
    recipe = getattr(posterior.module, "recipe", None)
    about = {
        "kind": posterior.kind,
        "likelihood": likelihood_to_dict(posterior.likelihood),
        "network": recipe.to_dict() if isinstance(recipe, Recipe) else None,
        "facts": dict(posterior.facts),
    }
    return json.dumps(about)


def save_posterior(posterior: Any, tensors: dict[str, Tensor], path: str | Path) -> None:
    """One safetensors file: tensors, and as metadata what is needed to build the posterior again."""
    from safetensors.torch import save_file

    contiguous = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    save_file(contiguous, str(path), metadata={"confide": description_of(posterior)})


Builder = Callable[[nn.Module, Any, dict[str, Tensor], Mapping[str, Any]], Any]


def _build_draws(module: nn.Module, likelihood: Any, tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> Draws:
    return Draws(module, likelihood, tensors["draws"], tensors["weights"], facts)


BUILDERS: dict[str, Builder] = {Draws.kind: _build_draws}


def _builder(kind: object) -> Builder | None:
    """What builds a posterior of that kind. Modules posteriors_*.py beside this one bring kinds of their own."""
    if kind not in BUILDERS:
        for info in pkgutil.iter_modules([str(Path(__file__).parent)]):
            if info.name.startswith("posteriors_"):
                importlib.import_module(f"confide.{info.name}")
    return BUILDERS.get(str(kind))


def load_posterior(path: str | Path, module: nn.Module | None = None) -> Any:
    """Read a posterior back. A network of confide's own is rebuilt; any other module must be given."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as archive:
            about = json.loads((archive.metadata() or {}).get("confide", "null"))
            kind = about.get("kind") if isinstance(about, dict) else None
            if kind == Draws.kind and Path(path).stat().st_size > MAPPED_ABOVE:
                from confide.posteriors.mapped import open_draws

                return open_draws(path, module)
            tensors = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise Refusal(f"path={str(path)!r}: not a readable posterior file ({error})") from None
    build = _builder(kind)
    if build is None:
        raise Refusal(f"path={str(path)!r}: not a posterior written by this version of confide")
    try:
        return build(network_of(about, module), likelihood_from_dict(about["likelihood"]), tensors, about["facts"])
    except (KeyError, IndexError, TypeError, AttributeError):
        pass
    raise Refusal(f"path={str(path)!r}: is damaged or incomplete; use another copy")


def network_of(about: Mapping[str, Any], module: nn.Module | None) -> nn.Module:
    """The given module, or the network of confide's own that the file describes."""
    if module is not None:
        return module
    if about["network"] is None:
        raise Refusal("module=None: this posterior belongs to a network of your own; pass it as module=")
    return MLP(Recipe.from_dict(about["network"]))
