"""What a noise-aware fit asks of one record: scores, curvature and the size of its residual, in one bounded answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from confide.errors import Refusal
from confide.methods.base import Problem
from confide.models.flat import trainable
from confide.models.networks import recipe_of

SCORE_SHARE, SPREAD_SHARE = 0.72, 0.04
"""Of an answer's squared norm; the rest is for the curvature. The size of residuals is asked of real targets only: it
is one number, known to a few per cent already at records * mu = 100."""
KINDS = ("gaussian", "bernoulli", "categorical")
MOST_WEIGHTS = 128
"""The curvature has a half of its square as many entries, for every record."""


@dataclass(frozen=True)
class Layout:
    """Parts of an answer. Inputs are those of the last layer, with the constant last.

    A record answers with w (r / reach) z / R, its score, and w a z z^T / (R^2 |a|), its curvature: r is the clipped
    residual, a the second derivative of the loss, R^2 = 1 + features / 2, w = min(1, R^2 / |z|^2). A weight that
    depends on inputs alone leaves the truth where it is. All parts together have norm 1 at most.

    pair   two outputs of a softmax, whose difference is one logit and all that records tell of them: it alone is
           learnt, half as many numbers, and what both have in common keeps its prior
    """

    kind: str
    outputs: int
    inputs: int
    pair: bool = False

    @classmethod
    def of(cls, problem: Problem) -> Layout:
        last = last_layer(problem.module)
        found = cls(problem.likelihood.name, last.out_features, last.in_features + 1)
        if (found.kind, found.outputs) == ("categorical", 2):
            found = cls("bernoulli", 1, found.inputs, pair=True)
        if found.kind not in KINDS:
            raise Refusal(f"likelihood={found.kind!r}: a noise-aware posterior is for {', '.join(KINDS)}")
        if found.weights > MOST_WEIGHTS:
            raise Refusal(
                f"module: its last layer has {found.weights} weights, and a noise-aware posterior is for at most "
                f"{MOST_WEIGHTS}, since it asks for their curvature; use method sgld, or fewer features"
            )
        return found

    @property
    def weights(self) -> int:
        return self.outputs * self.inputs

    @property
    def of_module(self) -> int:
        """Weights of the module's last layer."""
        return self.weights * (2 if self.pair else 1)

    @property
    def pairs(self) -> int:
        return self.weights * (self.weights + 1) // 2

    @property
    def size(self) -> int:
        return self.weights + self.pairs + (self.kind == "gaussian")

    @property
    def row(self) -> float:
        """R^2: more than nine in ten records have less if features fill [-1, 1] evenly or are one of several."""
        return 1 + (self.inputs - 1) / 2

    @property
    def curvature_bound(self) -> float:
        """R^2 |a|: p (1 - p) is at most 1/4, and diag(p) - p p^T has Frobenius norm 1/2 at most."""
        return self.row * {"gaussian": 1.0, "bernoulli": 0.25, "categorical": 0.5}[self.kind]

    def units(self, reaches: Tensor) -> tuple[Tensor, float, float]:
        """What 1 in an answer stands for: scores, curvature, squared residuals."""
        spread = SPREAD_SHARE if self.kind == "gaussian" else 0.0
        curvature = self.curvature_bound / math.sqrt(1 - SCORE_SHARE - spread)
        return reaches * math.sqrt(self.row / SCORE_SHARE), curvature, 1 / math.sqrt(SPREAD_SHARE)

    def split(self, answers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, packed curvature, squared residuals of stacked answers."""
        scores, curvature = answers[..., : self.weights], answers[..., self.weights : self.weights + self.pairs]
        return scores, curvature, answers[..., -1]

    def answer(self, module: nn.Module, x: Tensor, y: Tensor, at: Tensor, reach: float) -> Tensor:
        """(records, size), of rows with norm 1 at most."""
        z = inputs_of_last(module, x)
        counts = (self.row / z.square().sum(1, keepdim=True)).clamp(max=1)
        residual, across = self._residual(z @ at.mT, y, reach)
        score_unit, curvature_unit, spread_unit = self.units(torch.tensor(reach, dtype=torch.float64))
        score = (counts * residual / score_unit)[:, :, None] * z[:, None, :]
        rows, columns = torch.triu_indices(self.weights, self.weights)
        double = torch.where(rows == columns, 1.0, math.sqrt(2.0)).to(torch.float64) / curvature_unit
        curvature = (z[:, rows % self.inputs] * counts).mul_(z[:, columns % self.inputs]).mul_(double)
        if across is not None:
            curvature.mul_(across[:, rows // self.inputs, columns // self.inputs])
        parts = [score.flatten(1), curvature]
        if self.kind == "gaussian":
            parts.append((residual / reach).square() / spread_unit)
        return torch.cat(parts, 1)

    def _residual(self, outputs: Tensor, y: Tensor, reach: float) -> tuple[Tensor, Tensor | None]:
        """Clipped residuals, and second derivatives of the loss in the outputs; None: one."""
        if self.kind == "gaussian":
            return (y.to(torch.float64).reshape(len(outputs), 1) - outputs).clamp(-reach, reach), None
        if self.kind == "bernoulli":
            p = outputs.sigmoid()
            return y.to(torch.float64).reshape(len(outputs), 1) - p, (p * (1 - p))[:, :, None]
        p = outputs.softmax(1)
        hot = torch.nn.functional.one_hot(y.reshape(len(outputs)), self.outputs).to(torch.float64)
        return hot - p, torch.diag_embed(p) - p[:, :, None] * p[:, None, :]

    def symmetric(self, packed: Tensor) -> Tensor:
        """Matrices from their packed upper triangles, in which entries off the diagonal stand times the root of two."""
        rows, columns = torch.triu_indices(self.weights, self.weights)
        values = packed * torch.where(rows == columns, 1.0, math.sqrt(0.5)).to(torch.float64)
        whole = torch.zeros(*packed.shape[:-1], self.weights, self.weights, dtype=torch.float64)
        whole[..., rows, columns] = values
        whole[..., columns, rows] = values
        return whole

    def to_module(self, vectors: Tensor, common: Tensor | None = None) -> Tensor:
        """Weights output by output, the constant's last, as the layer's matrix and then its bias.

        common   of a pair: the mean of both outputs' weights; none: zero
        """
        split = vectors.reshape(-1, self.outputs, self.inputs)
        if self.pair:
            split = torch.cat([-split, split], 1) / 2
            split = split if common is None else split + common.reshape(-1, 1, self.inputs)
        return torch.cat([split[:, :, :-1].flatten(1), split[:, :, -1]], 1)


def last_layer(module: nn.Module) -> nn.Linear:
    """The linear layer that ends the network; its weights must be the last of all that are trained."""
    layers = list(module.children()) if isinstance(module, nn.Sequential) else [module]
    last = layers[-1] if layers else module
    own = trainable(module)[-2:]
    if not isinstance(last, nn.Linear) or len(own) < 2 or own[0] is not last.weight or own[1] is not last.bias:
        raise Refusal(
            f"module={type(module).__name__}: a noise-aware posterior is for networks that end in a trained linear "
            "layer with a bias: nn.Linear, an nn.Sequential with one last, or those of confide.networks"
        )
    return last


def inputs_of_last(module: nn.Module, x: Tensor) -> Tensor:
    """What the last layer sees of every record, with the constant behind it, in double precision."""
    if recipe_of(module) is not None:
        x = x.flatten(1)
    if isinstance(module, nn.Sequential):
        for layer in list(module.children())[:-1]:
            x = layer(x)
    x = x.to(torch.float64).reshape(len(x), -1)
    return torch.cat([x, torch.ones_like(x[:, :1])], 1)
