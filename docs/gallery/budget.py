"""One budget over many runs: the run that would pass the ceiling is refused before a record is read."""

import tempfile
from pathlib import Path

import confide
from confide.data import load_dataset, prepare

digits = prepare(load_dataset("digits"))
schema = digits.encoder.schema
assert schema.records is not None  # the catalogue declares it; a size read off the records would not be public
plan = confide.plan(epsilon=1, delta=1e-4, records=schema.records, batch=256, epochs=10)
with tempfile.TemporaryDirectory() as folder, confide.Ledger(Path(folder) / "budget.db") as ledger:
    ledger.limit(epsilon=1.5, delta=1e-4)
    data = confide.PrivateData(digits.x, digits.y, schema=schema, ledger=ledger, name="digits")
    for attempt in range(1, 4):
        try:
            confide.fit(confide.methods.SGLD(), confide.networks.softmax(64, 10), data, plan)
            print(f"run {attempt}: done, {len(ledger.entries())} entries in the ledger")
        except confide.BudgetExceeded as refusal:
            print(f"run {attempt}: {refusal}")
            break
