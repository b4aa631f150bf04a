"""Per-record gradients, clipped and summed, at about the price of plain gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from confide.errors import Refusal
from confide.errors import UnclippableError as UnclippableError
from confide.mechanism.clipping import rules as rules
from confide.mechanism.clipping.engine import ClipBound, engine_of
from confide.mechanism.clipping.factors import STYLES as STYLES
from confide.mechanism.clipping.factors import Style as Style
from confide.mechanism.clipping.factors import check_clip, check_style
from confide.mechanism.clipping.rows import clipped_sum_of_rows as clipped_sum_of_rows
from confide.mechanism.clipping.rules.registry import Call as Call
from confide.mechanism.clipping.rules.registry import Contribution as Contribution
from confide.mechanism.clipping.rules.registry import rule_for as rule_for
from confide.mechanism.clipping.running import Inputs, Loss
from confide.mechanism.clipping.statistics import Recordwise as Recordwise
from confide.mechanism.clipping.statistics import isolated_rows as isolated_rows

MEMORY_BUDGET = 256 << 20  # Bytes for what a batch holds beside the network: larger batches are cut into pieces.


def clipped_sum(
    module: nn.Module,
    loss: Loss,
    x: Inputs,
    y: Any,
    *,
    clip: float,
    out: Tensor,
    style: Style = "flat",
    memory_budget: int = MEMORY_BUDGET,
    micro_batch: int | None = None,
    rehearsal: bool = False,
    weights: Tensor | None = None,
) -> Tensor:
    """Add the sum over records of their clipped gradients onto `out` and return the norms before clipping.

    `module(x)` gives outputs and `loss(output, y)` one loss per record (records on axis 0). A tuple x is given
    as several arguments, a dictionary by name.
    With g_i the gradient of loss i with respect to all trainable parameters and n_i = |g_i|, this computes

        out += sum_i g_i * min(1, clip / n_i)                        style="flat"
        out += sum_i g_i * clip / (n_i + 0.01)                       style="automatic"
        out += sum_i concat_k g_ik * min(1, clip / sqrt(K) / n_ik)   style="per-layer", K layers

    so that one record's term has a norm of at most `clip`, in every style, also where `weights`, between 0 and 1, scale
    these terms; and the sum as it is computed is within half
    a SHARE of `clip` of these terms (`rounding`). `out` is a flat vector over the trainable parameters in the order of
    `module.parameters()`; it may already hold noise, and is touched once. A record whose gradient is not finite counts
    as zero: it adds nothing and its norm is returned as 0; so does one for which the module or the loss raises. An
    empty batch adds nothing. Whether a module can be clipped at all is found out on made-up records at its first step,
    so no error depends on a private one. With `rehearsal` the records are made up: what they raise is raised.

    No record can see another. A module and a loss that are known to keep records apart run on the batch as it is; all
    other code runs on batches of one record, all at once where torch's vmap can (`isolation`), else one by one, which
    is slow and said once in a SpeedWarning. What a forward writes to (attributes, buffers, globals) is put back.

    `memory_budget` (bytes) limits the buffers of per-record gradients; `micro_batch` (records) also limits the
    activations, by running the batch in pieces. Without it a batch that would hold more than 256 MB of them goes in
    pieces that hold less. All of it is exact. The norms are private.
    """
    check_clip(clip, out.dtype)
    check_style(style)
    if memory_budget <= 0:
        raise Refusal(f"memory_budget={memory_budget}: must be a number of bytes > 0")
    if micro_batch is not None and micro_batch < 1:
        raise Refusal(f"micro_batch={micro_batch}: must be at least 1, or None")
    bound = ClipBound(clip, style, out, memory_budget, micro_batch, rehearsal, weights=weights)
    return engine_of(module).step(module, loss, x, y, bound)
