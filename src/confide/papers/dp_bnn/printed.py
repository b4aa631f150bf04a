"""Networks and settings as Zhang, Bu, Chen and Long print them: the time of an epoch, and figure 4's family."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from confide.papers.base import Cell, Context, PaperMeasure, PaperOutcome, PaperTable
from confide.papers.dp_bnn.fits import (
    DELTA,
    HIDDEN,
    METHODS,
    PRINTED_HIDDEN,
    QUICK_HIDDEN,
    SETTINGS,
    Images,
    MethodName,
    TableRow,
    load,
    method_for,
    scored,
)

PRINTED_BATCH, TIMED_STEPS = 256, 20
"""The paper's batch; so many steps are timed, of which an epoch has more."""
PAPER_SECONDS: dict[MethodName, float] = {"SGLD": 10.0, "BBP": 480.0}
FAMILY_CLIP, FAMILY_NOISE, FAMILY_EPOCHS, FAMILY_RATE = 1.5, 1.3, 15.0, 0.25
CLIPS, NOISES, EPOCH_COUNTS = (0.5, 1.0, 1.5, 2.0, 5.0), (0.5, 0.9, 1.3, 2.0, 3.0), (5.0, 10.0, 15.0)
FALLING = (3.0, 1.5, 0.75)
"""A clip that changes over time: each for a third of the steps."""


def run_seconds(context: Context) -> PaperOutcome:
    """Processor seconds of an epoch of every method on the network as printed, and their ratio to DP-SGLD's."""
    images = load(context)
    found = {method: _seconds(method, images, context) for method in METHODS}
    rows: list[tuple[Cell, ...]] = []
    for method, (seconds, epsilon) in found.items():
        stated = PAPER_SECONDS.get(method)
        theirs = None if stated is None else stated / PAPER_SECONDS["SGLD"]
        rows.append((method, stated, seconds, theirs, round(seconds / found["SGLD"][0], 2), epsilon))
    hidden = QUICK_HIDDEN if context.quick else PRINTED_HIDDEN
    steps = math.ceil(images.found.records / PRINTED_BATCH)
    table = PaperTable(
        "Seconds of an epoch, MLP as printed",
        ("method", "paper", "ours", "paper, over SGLD", "ours, over SGLD", "sound epsilon"),
        tuple(rows),
        (
            f"Hidden layers of {' and '.join(map(str, hidden))}, batches of {PRINTED_BATCH}; processor time "
            f"of {TIMED_STEPS} steps for the {steps} of an epoch, without the noise's calibration. The paper's seconds "
            "are those of a graphics card, so that only the ratios compare: its BBP clips record by record, ours by "
            "the same outer products as SGLD. The epsilon is that of the steps that were timed.",
            *images.found.notes,
        ),
    )
    return PaperOutcome((table,))


def _seconds(method: MethodName, images: Images, context: Context) -> tuple[float, float]:
    from confide.mechanism.plan import plan
    from confide.models.networks import mlp
    from confide.running.fit import fit
    from confide.sources.private_data import PrivateData

    x, _ = images.inputs("MLP")
    found, setting = images.found, SETTINGS[method, "MLP"]
    hidden = QUICK_HIDDEN if context.quick else PRINTED_HIDDEN
    batch = min(PRINTED_BATCH, found.records)
    made = plan(delta=DELTA, records=found.records, batch=batch, steps=TIMED_STEPS, noise_multiplier=1.3, clip=1.5)
    network = mlp(x.shape[1], found.schema.class_count or 2, hidden, "relu", torch.Generator().manual_seed(0))
    data = PrivateData(x, found.y, schema=found.schema, name=found.name, seed=context.noise_seed)
    chosen = method_for(TableRow(method), setting, made)
    marks: list[float] = []
    run = fit(chosen, network, data, made, seed=0, progress=lambda done, total: marks.append(time.process_time()))
    each = (marks[-1] - marks[0]) / (len(marks) - 1)  # the first step warms up what is kept between steps
    return each * found.records / batch, run.privacy.epsilon()


def run_family(context: Context) -> PaperOutcome:
    """Figure 4: clip, noise and epochs, one at a time, and a clip that falls by a public schedule."""
    images = load(context)
    rows: list[tuple[Cell, ...]] = []
    did = []
    for setting, value, row in _family(context):
        fits = [scored(row, images, context, seed) for seed in context.seeds]
        accuracy = PaperMeasure(tuple(one.accuracy for one in fits))
        rows.append((f"{row.method}, {setting} {value}", None, accuracy, max(one.epsilon for one in fits)))
        did.append(row)
        context.progress("family", len(rows), len(_family(context)))
    table = PaperTable(
        "MNIST, clip, noise and epochs (figure 4; the paper prints no numbers)",
        ("setting", "paper", "ours", "sound epsilon"),
        tuple(rows),
        (
            f"MLP of {HIDDEN} units (the paper: a CNN), rate {FAMILY_RATE:g}; where one setting varies the others are "
            f"clip {FAMILY_CLIP:g}, noise multiplier {FAMILY_NOISE:g} and {_epochs(FAMILY_EPOCHS, context):g} epochs. "
            "What SGLD's release lacks of its noise is added. A falling clip has each of its values for a like part of "
            "the steps; noise falls with it, so that its epsilon is that of a fixed one.",
            f"{len(did)} settings, seeds {', '.join(map(str, context.seeds))}.",
            *images.found.notes,
        ),
    )
    return PaperOutcome((table,))


def _family(context: Context) -> list[tuple[str, str, TableRow]]:
    def row(method: MethodName, **change: Any) -> TableRow:
        settings: dict[str, Any] = {"clip": FAMILY_CLIP, "noise_multiplier": FAMILY_NOISE, "rate": FAMILY_RATE}
        settings |= {"batch": PRINTED_BATCH, "epochs": _epochs(FAMILY_EPOCHS, context), **change}
        return TableRow(method, **settings)

    methods: tuple[MethodName, ...] = ("SGD",) if context.quick else ("SGD", "SGLD")
    found = []
    for method in methods:
        found += [("clip", f"{clip:g}", row(method, clip=clip)) for clip in CLIPS]
        found += [("noise", f"{noise:g}", row(method, noise_multiplier=noise)) for noise in NOISES]
        found += [("epochs", f"{n:g}", row(method, epochs=_epochs(n, context))) for n in EPOCH_COUNTS]
        falling = ", ".join(f"{clip:g}" for clip in FALLING)
        found.append(("clip falling over", falling, row(method, clips=FALLING)))
    return found[::13] if context.quick else found


def _epochs(count: float, context: Context) -> float:
    return count / 5 if context.quick else count
