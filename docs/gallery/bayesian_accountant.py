"""What a run costs records drawn like these: the Bayesian accountant beside the DP number of the same run.

    python docs/gallery/bayesian_accountant.py

Fits logistic regression to the embedded digits by DP-SGLD, while a watch keeps the clipped norms of every batch and
some fresh records, never trained on, are looked at along the run. Then every rule prices the run.
"""

from __future__ import annotations

import torch

import confide
from confide.data import prepare
from confide.data.embedded import load
from confide.models.predictive import ClassPredictive
from confide.privacy import bayesian
from confide.sources.hold_out import HoldOut, Watch

DELTA, TRAIN = 1e-5, 1000

digits = prepare(load("digits"))  # 1437 records: the first 1000 train, the others are held out
schema = confide.Schema(classes=10, records=TRAIN, bounds=(0, 1))

watch = Watch()
data = confide.PrivateData(digits.x[:TRAIN], digits.y[:TRAIN], schema=schema, name="digits", watch=watch)
source = HoldOut(data, digits.x[TRAIN:], digits.y[TRAIN:])
plan = confide.plan(epsilon=4, delta=DELTA, records=TRAIN, batch=250, epochs=40, clip=4.0)
run = confide.fit(confide.methods.SGLD(), confide.networks.softmax(64, 10), source, plan, seed=0)

predictive = run.posterior.predict(torch.as_tensor(digits.x_test))
assert isinstance(predictive, ClassPredictive)
accuracy = (predictive.labels.numpy() == digits.y_test).mean()
print(f"accuracy on the test part {accuracy:.3f}; {run.privacy.epsilon():.3f} is the epsilon to rely on\n")

estimates = {
    "paper's product rule": bayesian.product(watch.distances(), DELTA),
    "Hoelder's inequality": bayesian.hoelder(watch.distances(), DELTA),
    "averaged over fresh records": bayesian.averaged(source.sequences(), DELTA),
}
print(estimates["averaged over fresh records"], "\n")  # it shows nothing until it is told why it may

print(f"{'rule':28} {'Bayesian':>9} {'DP':>7}   attacker: P(A) and tight, Bayesian | DP")
for name, estimate in estimates.items():
    shown = estimate.release(acknowledge="the digits are public")
    here, anyone = shown.attack["bayesian"], shown.attack["dp"]
    tight = "  -  " if here.tight is None else f"{here.tight:.3f}"
    print(
        f"{name:28} {shown.bayesian.epsilon:9.3f} {shown.dp.epsilon:7.3f}   "
        f"{here.naive:.3f} {tight} | {anyone.naive:.3f} {anyone.tight:.3f}"
    )
print(f"\nThe last one is {shown.bayesian.kind}: {shown.bayesian.note}.")

# The same number for a public report, paid for by the fresh records instead of the user's word.
ledger = confide.Ledger()
paid = estimates["averaged over fresh records"].noisy(
    1.0, lambda event: ledger.charge(event, "Bayesian estimate", "held-out digits")
)
print(f"\nPaid for with noise: {paid.bayesian.epsilon:.3f} ({paid.disclosure})")
