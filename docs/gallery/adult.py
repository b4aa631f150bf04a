"""Income from the census (UCI Adult): `python docs/gallery/adult.py DATA OUT`; DATA holds adult_{train,test}.csv.gz."""

import sys
from dataclasses import replace

import pandas as pd

from confide import PrivateBayesClassifier
from confide.data import Column, catalogue

train, test = (pd.read_csv(f"{sys.argv[1]}/adult_{part}.csv.gz", na_values="?") for part in ("train", "test"))
# Public facts: ranges and categories as the census defines them. Gains above 20 000 dollars count as 20 000.
facts = catalogue.schema("adult")
gain = Column("capital_gain", bounds=(0, 20_000))
facts = replace(facts, columns=tuple(gain if column.name == gain.name else column for column in facts.columns))
model = PrivateBayesClassifier(epsilon=1.0, delta=1e-5, schema=facts, clip=3.0)
model.fit(train.drop(columns="income"), train["income"])
print(f"accuracy {model.score(test.drop(columns='income'), test['income']):.4f}")
print(model.privacy_.statement())
model.save(sys.argv[2])
