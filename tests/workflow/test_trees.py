"""The estimators with a network of one's own whose records are several tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import confide
from confide.data import Input
from confide.errors import DataError, Refusal

WORDS, RECORDS = 12, 400


class Texts(nn.Module):
    """The mean of the words that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        there = mask.unsqueeze(2).to(self.words.weight.dtype)
        found: Tensor = self.head((self.words(ids) * there).sum(1) / there.sum(1).clamp(min=1))
        return found


def records() -> tuple[dict[str, Any], Any]:
    random = np.random.default_rng(0)
    ids, mask = random.integers(0, WORDS, (RECORDS, 5)), random.random((RECORDS, 5)) > 0.2
    y = np.where((ids < WORDS // 2).mean(1) > 0.5, "low", "high")
    return {"ids": ids, "mask": mask}, y


SCHEMA = confide.Schema(
    records=RECORDS, classes=["high", "low"], inputs={"ids": Input(vocabulary=WORDS), "mask": Input(vocabulary=2)}
)


def estimator(**options: Any) -> confide.PrivateBayesClassifier:
    torch.manual_seed(0)
    settings = {
        "module": Texts(),
        "schema": SCHEMA,
        "epsilon": 50.0,
        "delta": 1e-4,
        "batch": 100,
        "steps": 60,
        "seed": 1,
    }
    return confide.PrivateBayesClassifier(**settings | options)


def test_an_estimator_takes_a_dictionary_or_a_tuple_and_learns(tmp_path: Path) -> None:
    x, y = records()
    model = estimator().fit(x, y)
    found = model.predict_proba(x)
    assert found.shape == (RECORDS, 2)
    assert (model.predict(x) == y).mean() > 0.7
    assert model.predictive({name: part[:3] for name, part in x.items()}).epistemic.shape == (3,)
    model.save(tmp_path / "run", test=(x, y))
    places = confide.Schema(records=RECORDS, classes=["high", "low"], inputs=[one for _, one in SCHEMA.inputs])
    other = estimator(schema=places).fit((x["ids"], x["mask"]), y)
    assert np.allclose(other.predict_proba((x["ids"], x["mask"])), found)


def test_the_number_of_records_is_counted_privately() -> None:
    x, y = records()
    schema = confide.Schema(classes=["high", "low"], inputs=dict(SCHEMA.inputs))
    model = estimator(schema=schema, batch=None, steps=5).fit(x, y)
    assert abs(model.schema_.records - RECORDS) < 40


def test_what_is_not_declared_is_refused_before_anything_is_charged() -> None:
    x, y = records()
    ledger = confide.Ledger()
    with pytest.raises(DataError, match=r"Schema\(inputs"):
        estimator(schema=confide.Schema(records=RECORDS, classes=2), bounds=(0, 1), ledger=ledger).fit(x, y)
    with pytest.raises(DataError, match="module="):
        estimator(module=None, ledger=ledger).fit(x, y)
    small = estimator(ledger=ledger)
    small.module.words = nn.Embedding(WORDS - 1, 8)  # a table with too few rows: found out on made-up records
    with pytest.raises((Refusal, IndexError)):
        small.fit(x, y)
    assert not ledger.entries()
