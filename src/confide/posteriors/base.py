"""What every posterior offers: one protocol, which reports, exports, predictions and files are written against."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from confide.devices.default import default_aside
from confide.errors import Refusal
from confide.models.flat import trainable
from confide.models.likelihoods import Likelihood
from confide.models.predictive import Predictive
from confide.posteriors.prediction.summary import Summary
from confide.wording import html_table


@runtime_checkable
class Posterior(Protocol):
    """What a run leaves behind: a law over the flat parameter vector of a network.

    kind        its name in files
    module      the network; its own parameter values do not count
    likelihood  how the network's outputs explain targets
    facts       public remarks for the report: temperature, step size, number of draws
    """

    kind: ClassVar[str]

    @property
    def module(self) -> nn.Module: ...

    @property
    def likelihood(self) -> Likelihood: ...

    @property
    def facts(self) -> Mapping[str, Any]: ...

    @property
    def noise_scale(self) -> float | None:
        """Standard deviation of a Gaussian target around the network, given or learnt; None for other likelihoods."""

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """`count` parameter vectors, of shape (count, parameters)."""

    def mean(self) -> Tensor:
        """The mean parameter vector."""

    def weighted_draws(self) -> tuple[Tensor, Tensor]:
        """Parameter vectors that stand for the law, the same at every call, with weights that add up to one."""

    def predict(self, x: Any) -> Predictive:
        """The posterior predictive distribution at new inputs, given as records were to the boundary."""

    def summary(self, x: Any) -> Summary:
        """Probabilities or means with both kinds of uncertainty, in as little memory as can be."""

    def with_likelihood(self, likelihood: Likelihood, facts: Mapping[str, Any]) -> Self:
        """The same law under another likelihood, such as one whose noise has been learnt since, with these facts."""

    def to_arviz(self) -> Any:
        """Draws by parameter name in the `posterior` group of ArviZ's data tree; needs the extra confide[arviz]."""

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, which `load_posterior` reads."""

    @classmethod
    def rebuilt(
        cls, module: nn.Module, likelihood: Likelihood, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> Self:
        """The posterior from what `save` wrote."""


_DOORS = ("sample", "mean", "weighted_draws", "predict", "summary", "save", "named_draws", "to_arviz")


class Shown:
    """What Python and a notebook show of a posterior; what it warns of comes before anything else."""

    def __init_subclass__(cls) -> None:
        for name in vars(cls).keys() & set(_DOORS):
            setattr(cls, name, default_aside(vars(cls)[name]))

    def __repr__(self: Any) -> str:
        size = sum(parameter.numel() for parameter in trainable(self.module))
        about = f"{type(self).__name__}({type(self.module).__name__}, {size:,} parameters, {self.likelihood.name})"
        return "\n".join([*warnings_of(self), about])

    def _repr_html_(self: Any) -> str:
        size = sum(parameter.numel() for parameter in trainable(self.module))
        rows = [
            *(("warning", warning) for warning in warnings_of(self)),
            ("network", f"{type(self.module).__name__}, {size:,} parameters"),
            ("likelihood", self.likelihood.name),
            *((name.replace("_", " "), _short(value)) for name, value in self.facts.items() if name != "warning"),
        ]
        return html_table(f"Posterior: {self.kind}", rows)


def warnings_of(posterior: Any) -> tuple[str, ...]:
    """What a posterior says against itself, such as that its chain did not mix; none or one sentence."""
    said = posterior.facts.get("warning")
    return () if said is None else (str(said),)


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_count(count: int) -> None:
    if count < 1:
        raise Refusal(f"count={count}: must be at least 1")


def check_size(module: nn.Module, size: int) -> None:
    """Refuse a network that the parameter vectors of a file do not belong to."""
    own = sum(parameter.numel() for parameter in trainable(module))
    if own != size:
        raise Refusal(
            f"module={type(module).__name__}: has {own} trainable parameters, and this posterior's network has {size}; "
            "pass the network that was fitted"
        )
