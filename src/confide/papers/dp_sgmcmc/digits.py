"""Table 1: MNIST by the paper's own settings, priced soundly, and by ours at the epsilon it claims, beside its rivals.

Networks, inputs and settings of our rows are those that dp-bnn's trials lie around, chosen by hand on images that are
assumed public; none of them was changed for this table but the passes of DP-SGD at its larger epsilon.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from confide.evaluate import metrics
from confide.models.predictive import of_classes
from confide.papers import protocol, sets
from confide.papers.base import Cell, Context, PaperMeasure, PaperOutcome, PaperTable
from confide.papers.dp_bnn.fits import DELTA, HIDDEN, Images, TableRow, load, train
from confide.papers.mnist_cnn import DESCRIPTION

CLAIMED, STATED, OPEN_STATED = 0.99, 0.9921, 0.9934
PRINTED_RATE, PRINTED_CLIP, PRINTED_BATCH, PRINTED_EPOCHS = 0.3, 0.3, 128, 20
LONGER = 40.0
"""Passes at epsilon 8: steps grow with epsilon, as on Adult, since less noise lets a run go further."""
ROWS: tuple[tuple[str, str, float, TableRow], ...] = (
    ("DP-SGLD, ours", f"{CLAIMED:g}", STATED, TableRow("SGLD", epsilon=CLAIMED)),
    ("DP-SGLD, ours, CNN", f"{CLAIMED:g}", STATED, TableRow("SGLD", "CNN", epsilon=CLAIMED)),
    ("DP-SGD", "0.5", 0.90, TableRow("SGD", prior="none", epsilon=0.5)),
    ("DP-SGD", "8", 0.97, TableRow("SGD", prior="none", epsilon=8.0, epochs=LONGER)),
    ("SGLD, not private", "none", OPEN_STATED, TableRow("SGLD", private=False)),
    ("SGLD, not private, CNN", "none", OPEN_STATED, TableRow("SGLD", "CNN", private=False)),
)
"""Title, epsilon in the paper, its accuracy, and the fit."""


@dataclass(frozen=True)
class AsPrinted:
    """The first row: accuracy over seeds, the plan, and its epsilon under both adjacencies."""

    accuracy: PaperMeasure
    plan: Any
    epsilon: float
    replaced: float


def run(context: Context) -> PaperOutcome:
    images = load(context)
    printed = _as_printed(images.found, context)
    first = ("DP-SGLD, the paper's settings", f"{CLAIMED:g}", STATED, printed.accuracy, printed.epsilon)
    rows: list[tuple[Cell, ...]] = [(*first, protocol.AS_PRINTED)]
    did = [f"{first[0]}: {protocol.ran(printed.plan, context.seeds)}."]
    for name, claimed, stated, asked in ROWS:
        fits = [train(_sized(asked, context), images, context, seed) for seed in context.seeds]
        ours = PaperMeasure(tuple(one.accuracy for one in fits))
        rows.append((name, claimed, stated, ours, max(one.epsilon for one in fits), protocol.ASSUMED_PUBLIC))
        did.append(f"{name}, {claimed}: {protocol.ran(fits[0].plan, context.seeds)}.")
        context.progress("MNIST", len(rows), len(ROWS) + 1)
    columns = ("method", "epsilon in the paper", "paper", "ours", "sound epsilon", protocol.CHOSEN_ON)
    title, notes = f"MNIST, test accuracy, delta {DELTA:g}", _notes(images, printed, did)
    return PaperOutcome((PaperTable(title, columns, tuple(rows), notes),))


def _sized(asked: TableRow, context: Context) -> TableRow:
    return replace(asked, epochs=2.0) if context.quick else asked


def _notes(images: Images, printed: AsPrinted, did: list[str]) -> tuple[str, ...]:
    noise = printed.plan.mechanism.noise_multiplier
    return (
        f"First row: step {PRINTED_RATE:g} and the update as the paper prints it, on pixels in [0, 1]. Ours: a hidden "
        f"layer of {HIDDEN} on images that are normalised one by one, where the paper has two convolutions and a layer "
        f"of ReLUs; CNN: {DESCRIPTION}. Settings are those that dp-bnn's trials lie around, but for the {LONGER:g} "
        "passes of DP-SGD at epsilon 8, which were not tried.",
        "The 99.21 % cannot be had this way. As they run here the paper's settings cost "
        f"{printed.epsilon:.2f} under add/remove and Poisson sampling and {printed.replaced:.2f} under the "
        f"replace-one adjacency it states, and a chain of gradients clipped to {PRINTED_CLIP:g} under noise of "
        f"{noise:.2g} times that stays far from its non-private accuracy, which the paper's comes within "
        "0.13 points of. Published sound results at epsilon 1 to 1.2 end near 98 %.",
        " ".join(did),
        "SVHN (91.89 % at a claimed 2.97) is not run: the batch is not given, and at 128 its settings cost an "
        "epsilon in the thousands.",
        *images.found.notes,
    )


def _as_printed(found: sets.Set, context: Context) -> AsPrinted:
    from confide.mechanism.plan import plan
    from confide.methods.sgld import SGLD
    from confide.models.networks import mlp
    from confide.privacy.step_sizes import dp_sgmcmc_noise_multiplier
    from confide.running.fit import fit
    from confide.workflow.network import generator_of

    grey = replace(found, x=(found.x + 1) / 2, x_test=(found.x_test + 1) / 2)  # by the declared bounds alone
    records, batch = found.records, min(PRINTED_BATCH, found.records // 8)
    noise = dp_sgmcmc_noise_multiplier(PRINTED_RATE, records, batch, PRINTED_CLIP)
    epochs = 2 if context.quick else PRINTED_EPOCHS
    made = plan(delta=DELTA, records=records, batch=batch, epochs=epochs, noise_multiplier=noise, clip=PRINTED_CLIP)
    # The paper's step multiplies the mean gradient; ours the sum.
    method = SGLD(step_size=PRINTED_RATE / records, convention="paper")
    classes = found.schema.class_count
    assert classes is not None  # the catalogue declares ten
    runs = []
    for seed in context.seeds:
        network = mlp(found.x[0].numel(), classes, hidden=(HIDDEN,), generator=generator_of(seed))
        runs.append(fit(method, network, grey.private(context), made, seed=seed))
    chances = [of_classes(one.posterior.predict(grey.x_test)).probabilities for one in runs]
    right = [metrics.accuracy(chance, found.y_test) for chance in chances]
    replaced = replace(runs[0].privacy, adjacency="replace-one").epsilon()
    return AsPrinted(PaperMeasure(tuple(right)), made, max(one.privacy.epsilon() for one in runs), replaced)
