"""Likelihoods of sequences: sums over tokens, tokens without a label, the next token."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from confide.errors import Refusal
from confide.models.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Tokens,
    likelihood_from_dict,
    likelihood_to_dict,
)
from confide.models.tokens import logits_of


def logits() -> torch.Tensor:
    return torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))


def test_a_records_loss_is_the_sum_over_its_labelled_tokens() -> None:
    y = torch.tensor([[0, 1, 2, 3, 0], [1, -100, -100, 2, 3], [-100] * 5])
    found = Tokens(4).loss(logits(), y)
    for record in range(3):
        kept = y[record] != -100
        expected = F.cross_entropy(logits()[record][kept], y[record][kept], reduction="sum")
        assert torch.allclose(found[record], expected, atol=1e-6)
    assert torch.allclose(Tokens(4, length=5).loss(logits(), y), found / 5)


def test_shifted_labels_explain_the_token_after() -> None:
    y = torch.tensor([[0, 1, 2, 3, 0]] * 3)
    expected = F.cross_entropy(logits()[0, :-1], y[0, 1:], reduction="sum")
    assert torch.allclose(Tokens(4, shifted=True).loss(logits(), y)[0], expected)


def test_outputs_may_come_as_logits_beside_other_things() -> None:
    output = torch.randn(3, 2)
    y = torch.tensor([0, 1, 1])
    for given in (SimpleNamespace(logits=output), OrderedDict(logits=output, loss=None)):
        assert torch.equal(Categorical(2).loss(given, y), Categorical(2).loss(output, y))
    one = SimpleNamespace(logits=output[:, :1])
    assert torch.equal(Bernoulli().loss(one, y), Bernoulli().loss(output[:, :1], y))
    assert torch.equal(Gaussian().loss(one, y.float()), Gaussian().loss(output[:, :1], y.float()))
    with pytest.raises(Refusal, match="without logits"):
        logits_of((output, output))


def test_what_cannot_be_labels_of_tokens_is_refused() -> None:
    with pytest.raises(Refusal, match="classes="):
        Tokens(4).loss(logits(), torch.zeros(3, 5))
    with pytest.raises(Refusal, match="per token"):
        Tokens(4).loss(logits(), torch.zeros(3, dtype=torch.long))
    for wrong in ({"classes": 1}, {"classes": 3, "length": 0.0}):
        with pytest.raises(Refusal):
            Tokens(**wrong)


def test_predictions_have_probabilities_at_every_position() -> None:
    outputs = torch.randn(6, 3, 5, 4)
    found = Tokens(4).predictive(outputs, torch.full((6,), 1 / 6))
    assert found.probabilities.shape == (3, 5, 4)
    assert torch.allclose(found.probabilities, outputs.softmax(-1).mean(0), atol=1e-6)
    assert found.epistemic.shape == found.aleatoric.shape == (3, 5)
    assert found.interval().shape == (3, 5, 4, 2)


def test_it_survives_its_description() -> None:
    one = Tokens(40, shifted=True, length=16)
    assert likelihood_from_dict(likelihood_to_dict(one)) == one
