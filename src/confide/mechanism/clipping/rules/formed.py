"""Gradients that are formed, record by record, for their norms: what was formed is what counts.

Where a layer's norms are those of gradients in full, these are kept for the sum where there is room for all of them,
and formed once more where there is not. How much room there is follows from how many other records there are, so that
a sum of other products, or a second look in double precision, must not take their place in one case alone: parts that
cancel would be others then. (One record more, for which there was no room, moved a sum of forty by 36 C; and one whose
norm was no number by as much, since the sides of the others were kept for its sake.) So a formed gradient is a function
of its record, bit by bit, and norm, spread, sum and row are those of it, in all ways alike.

What is no number in the type of the layer is formed anew in double precision, record by record: that too depends on
the record alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def in_double(found: dict[str, Tensor], anew: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What was formed, in double precision; `anew` forms those records in that which are no numbers otherwise."""
    whole = torch.stack([torch.isfinite(values).flatten(1).all(1) for values in found.values()]).all(0)
    wide = {name: values.double() for name, values in found.items()}
    if bool(whole.all()):
        return wide
    lost = (~whole).nonzero().flatten()
    return wide | {name: wide[name].index_copy(0, lost, values.double()) for name, values in anew(lost).items()}
