"""Mean-field forms of look-up tables, and of linear layers that keep their weight the other way round.

MeanFieldEmbedding          nn.Embedding
MeanFieldTransposedLinear   Conv1D of the transformers library, (inputs, outputs), as GPT-2 has it
"""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.layers.bayesian import MeanFieldLinear, Norms, Source, _MeanFieldLayer


class MeanFieldEmbedding(_MeanFieldLayer, nn.Embedding):  # type: ignore[override]
    """A table whose rows have independent Gaussian entries. The row of the padding, if any, has its mean alone."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        initial_rho: float = -5.0,
        norms: Norms = "exact",
    ) -> None:
        super().__init__((num_embeddings, embedding_dim), False, initial_rho, norms)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.apart = False  # whether the last call was given draw by draw
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False

    def sample_(self, generator: Source = None, draws: int = 1) -> Self:
        super().sample_(generator, draws)
        if self.padding_idx is not None and self.weight_noise is not None:
            self.weight_noise[:, self.padding_idx] = 0
        return self

    def forward(self, input: Tensor) -> Tensor:
        """Indices that are not given draw by draw, such as positions, meet the first draw."""
        weight, _ = self.drawn()
        self.apart = self.draws > 1 and len(input) % self.draws == 0
        if not self.apart:
            return F.embedding(input, weight[0], self.padding_idx)
        rows = input.reshape(self.draws, -1)
        first = torch.arange(self.draws, device=input.device).unsqueeze(1) * self.num_embeddings
        found = F.embedding((rows + first).reshape(input.shape), weight.flatten(0, 1))
        if self.padding_idx is None:
            return found
        return torch.where((input == self.padding_idx).unsqueeze(-1), found.detach(), found)


class MeanFieldTransposedLinear(MeanFieldLinear):
    """In place of a layer of type `original` whose weight is (inputs, outputs); kept here as (outputs, inputs)."""

    def __init__(self, original: type[nn.Module], inputs: int, outputs: int, **options: Any) -> None:
        super().__init__(inputs, outputs, True, **options)
        self.original, self.nx, self.nf = original, inputs, outputs

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return super().weight.t()

    def ordinary(self) -> Any:
        """A layer of the original type, of this size."""
        with torch.random.fork_rng(devices=[]):  # it draws weights to start from, which do not count
            return self.original(self.nf, self.nx)


def is_transposed_linear(layer: nn.Module) -> bool:
    """Known by its name: the library need not be installed."""
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
