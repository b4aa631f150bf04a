"""A paper run again: `confide papers run --from FILE --quick` runs a copy of this file where it lies.

Moved to src/confide/papers/, or named by an installed package under the entry point `confide.papers`, it is listed by
`confide papers list`. The paper's figure stands beside ours, at the sound epsilon of our own run.
"""

from __future__ import annotations

from confide.papers.base import Context, Experiment, Paper, PaperMeasure, PaperOutcome, PaperTable

EPSILON, DELTA = 1.0, 1e-3


def run_accuracy(context: Context) -> PaperOutcome:
    """Heavy imports and the work itself stand inside the function: listing the papers must stay quick."""
    from confide.evaluate import metrics
    from confide.mechanism.plan import plan
    from confide.methods.sgld import SGLD
    from confide.models.networks import softmax
    from confide.models.predictive import of_classes
    from confide.papers import sets
    from confide.running.fit import fit

    found = sets.load("mnist", context)
    made = plan(epsilon=EPSILON, delta=DELTA, records=found.records, batch=256, epochs=2 if context.quick else 20)
    accuracies, spent = [], []
    for seed in context.seeds:
        run = fit(SGLD(), softmax(found.x.shape[1], 10), found.private(context), made, seed=seed)
        probabilities = of_classes(run.posterior.predict(found.x_test)).probabilities
        accuracies.append(metrics.accuracy(probabilities, found.y_test))
        spent.append(run.privacy.epsilon())
    row = ("softmax regression", None, PaperMeasure(tuple(accuracies)), PaperMeasure(tuple(spent)))
    columns = ("network", "paper", "ours", "sound epsilon")
    return PaperOutcome(
        (PaperTable("Accuracy on digits", columns, (row,), ("The paper gives no figure for this network.",)),)
    )


PAPER = Paper(
    "skeleton",
    "A title, as printed",
    "Authors, venue, year",
    (Experiment("accuracy", "Table 1: accuracy at one epsilon", run_accuracy),),
)
