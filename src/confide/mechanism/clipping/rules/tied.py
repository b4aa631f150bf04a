"""A table that is read twice: rows are looked up in it, and it is the weight of a linear layer (tied embeddings).

With A = sum_t g_t a_t^T from the linear layer and E = sum_s e_{index_s} h_s^T from the look-ups

    |A + E|^2 = |A|^2 + |E|^2 + 2 <A, E>,      <A, E> = sum_{t,s} g_t[index_s] (a_t . h_s),

so that no record's gradient, as large as the table, has to be formed.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from confide.mechanism.clipping.factors import guard
from confide.mechanism.clipping.rounding import lost_in_squares
from confide.mechanism.clipping.rules.embedding import MeanFieldRows, Rows
from confide.mechanism.clipping.rules.linear import OuterProduct, OuterSum, with_positions
from confide.mechanism.clipping.rules.registry import Contribution
from confide.mechanism.clipping.rules.squares import products, squared_norms_of


def tied_norms(members: Sequence[Contribution], terms: int) -> Tensor | None:
    """Squared norms of look-ups and a linear layer with one weight; None for other members.

    `terms` of one record meet in an entry of their sum.
    """
    looked_up = [one for one in members if isinstance(one, Rows) and not isinstance(one, MeanFieldRows)]
    linear = [one for one in members if isinstance(one, OuterProduct | OuterSum)]
    if len(members) != 2 or len(looked_up) != 1 or len(linear) != 1:
        return None
    rows, outer = looked_up[0], linear[0]
    left, right = with_positions(outer.left), with_positions(outer.right)
    norms = rows.squared_norms() + outer.squared_norms() + crossed(rows, left, right).mul_(2)
    # three norms, each off by its own rounding, of what the sum adds up in other products
    positions, lookups, features = left.shape[1], rows.index.shape[1], rows.values.shape[2]
    hidden = lost_in_squares(max(terms, features + positions + lookups), norms.dtype)
    norms.clamp_(min=0).add_((rows.spread() + outer.spread()).square_(), alpha=hidden)
    sizes = squared_norms_of(left).sqrt_().add_(1)
    return norms.add_(sizes, alpha=2 * guard(positions * lookups * features, norms.dtype))


def crossed(rows: Rows, left: Tensor, right: Tensor) -> Tensor:
    """<A, E> for every record."""
    index = rows.index.unsqueeze(1).expand(-1, left.shape[1], -1)
    crossing = products(right, rows.values.transpose(1, 2))
    return left.gather(2, index).mul_(crossing).sum(2).sum(1)
