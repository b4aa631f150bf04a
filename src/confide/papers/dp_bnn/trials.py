"""The same trials for every private method on a network, at epsilon 1, on images that are assumed public.

SGLD's clip follows from its rate, so it tries scales of its prior where the others try clips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from confide.evaluate import metrics
from confide.papers import protocol
from confide.papers.base import Context
from confide.papers.dp_bnn.fits import (
    BATCH,
    EPOCHS,
    PRINTED,
    SETTINGS,
    Images,
    MethodName,
    NetworkName,
    Setting,
    TableRow,
    train,
)

RATES, OTHERS = (1.0, 0.5, 2.0), (1.0, 0.5)
"""Times those of the settings, which are the middle."""
TRIAL_SEED, SCORED = 90_001, 6
"""Which no row has; one in so many training images is not learnt from, and scores."""


def settled(rows: Sequence[TableRow], images: Images, context: Context) -> protocol.Protocol:
    """Trials for the methods and networks of these rows; the network as printed has the smaller one's settings."""
    public = _public(images)
    tried = dict.fromkeys((row.method, row.network) for row in rows if row.private and row.network != PRINTED)
    pairs: dict[tuple[str, ...], tuple[MethodName, NetworkName]] = {pair: pair for pair in tried}

    def score(key: tuple[str, ...], candidate: protocol.Candidate) -> float:
        method, network = pairs[key]
        row = TableRow(method, network, "none" if method == "SGD" else "Gaussian", **candidate)

        def compute() -> float:
            found = train(row, public, context, TRIAL_SEED)
            return metrics.nll(found.predicted, found.y)

        return context.part(float, ("dp-bnn", "trial", row), compute)

    learnt, held = public.found.records, len(public.found.y_test)
    about = (
        f"the last {held} training images, which are assumed public and train later; the trials learn from the other "
        f"{learnt} at epsilon 1"
    )
    offered = {key: _candidates(SETTINGS[pair], pair[0]) for key, pair in pairs.items()}
    before = {key: f"batch {BATCH}, {EPOCHS[network]:g} passes, the middle" for key, (_, network) in pairs.items()}
    return protocol.settle(offered, score, about=about, score="log loss", context=context, before=before)


def _public(images: Images) -> Images:
    """Training images alone: the last of them in the place of the test part."""
    given = images.found
    kept = len(given.x) - len(given.x) // SCORED
    x, y, schema = given.x[:kept], given.y[:kept], replace(given.schema, records=kept)
    return Images(replace(given, x=x, y=y, x_test=given.x[kept:], y_test=given.y[kept:], schema=schema), images.quick)


def _candidates(middle: Setting, method: MethodName) -> list[protocol.Candidate]:
    name, value = ("scale", middle.prior) if method == "SGLD" or middle.clip is None else ("clip", middle.clip)
    return [{"rate": rate * middle.rate, name: other * value} for rate in RATES for other in OTHERS]


def as_taken(row: TableRow, taken: protocol.Protocol) -> TableRow:
    """The row with what the trials chose; rows without privacy stay, and so do those of a network without trials."""
    known = row.private and (row.method, row.network) in taken.choices
    return replace(row, **taken.of(row.method, row.network)) if known else row
