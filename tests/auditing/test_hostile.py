"""Hostile records: whatever a record holds, it moves a sum by at most C, nothing raises, and the answer is finite."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import confide
from confide.mechanism.clipping import clipped_sum
from confide.mechanism.clipping.engine import ClipBound, Engine
from confide.mechanism.gaussian import CLIPPING_STYLES, SampledGaussian
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, Query, StatisticQuery

QUICK, SLOW = 200, 5000
FEATURES, CLASSES, OTHERS = 3, 3, 4
ROUNDING = 2e-4
EXTREMES = [
    np.nan,
    np.inf,
    -np.inf,
    0.0,
    -0.0,
    5e-324,
    1e-310,
    1e-45,
    1e-38,
    1e-20,
    1.0,
    -1.0,
    1e10,
    1e19,
    1e30,
    3e38,
    -3e38,
    1e200,
    1e308,
    -1e308,
]
LABELS = [0, 1, 2, 3, -1, 99, 0.5, 2.0000001, 2**40, -(2**62), 1e308, -1e308, np.nan, np.inf, -np.inf]
values = st.one_of(st.sampled_from(EXTREMES), st.floats(width=64), st.integers(-(2**40), 2**40).map(float))
numbers = st.lists(values, min_size=FEATURES, max_size=FEATURES)
dtypes = st.sampled_from(["float16", "float32", "float64"])
scales = st.sampled_from([1.0, 0.0, 1e-30, 1e-45, 1e10, 1e19, 1e30, 1e38, 1e300])


@dataclass(frozen=True)
class Attack:
    """A hostile record among others that may be hostile too."""

    record: list[float]
    label: float
    others: list[list[float]]
    labels: list[float]
    dtype: str
    clip: float
    style: Any
    scale: float
    wide: bool

    def rows(self) -> tuple[Any, Any]:
        with np.errstate(over="ignore"):
            x = np.asarray([*self.others, self.record], dtype=np.float64).astype(self.dtype)
        return x, np.asarray([*self.labels, self.label], dtype=np.float64)


attacks = st.builds(
    Attack,
    record=numbers,
    label=st.sampled_from(LABELS),
    others=st.lists(numbers, min_size=OTHERS, max_size=OTHERS),
    labels=st.lists(st.sampled_from(LABELS), min_size=OTHERS, max_size=OTHERS),
    dtype=dtypes,
    clip=st.sampled_from([1e-3, 0.1, 1.0, 50.0, 1e4]),
    style=st.sampled_from(CLIPPING_STYLES),
    scale=scales,
    wide=st.booleans(),
)


def network(wide: bool) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    module = confide.networks.mlp(FEATURES, CLASSES, hidden=(4,), generator=generator)
    return module.double() if wide else module


NETWORKS = {wide: network(wide) for wide in (False, True)}


def answers(attack: Attack, query: Query, sigma: float = 0.0) -> tuple[Tensor, Tensor]:
    """The answer with the record, and the answer without it."""
    x, y = attack.rows()
    mechanism = SampledGaussian(sigma, attack.clip, 1.0, len(x), "full-batch", attack.style, private=sigma > 0)
    schema = confide.Schema(classes=CLASSES, records=len(x))
    found = []
    for features, targets in ((x, y), (x[:-1], y[:-1])):
        data = PrivateData(features, targets, schema=schema, seed=1)
        found.append(data.answer(query, mechanism).sum.double().clone())
    return found[0], found[1]


def check(attack: Attack, query: Query) -> None:
    with_record, without = answers(attack, query)
    assert torch.isfinite(with_record).all()
    assert (with_record - without).norm() <= attack.clip * (1 + ROUNDING)


def adversarial_loss(scale: float) -> Any:
    """A loss that makes gradients vanish or overflow."""
    plain = confide.likelihoods.Categorical(CLASSES).loss
    return lambda output, y: plain(output, y) * scale


def check_gradient(attack: Attack) -> None:
    if attack.dtype == "float64" and not attack.wide:
        attack = Attack(**{**vars(attack), "dtype": "float32"})
    module = NETWORKS[attack.wide]
    query = GradientQuery(module, adversarial_loss(attack.scale))
    if attack.wide:
        attack = Attack(**{**vars(attack), "dtype": "float64"})
    check(attack, query)


def check_statistic(attack: Attack) -> None:
    dtype = torch.float64 if attack.wide else torch.float32
    style: Any = "flat"

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x * attack.scale, x.square(), y[:, None].to(x.dtype)], 1)

    check(Attack(**{**vars(attack), "style": style}), StatisticQuery(function, 2 * FEATURES + 1, dtype))


calm = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=QUICK, **calm)
@given(attack=attacks)
def test_a_hostile_record_in_a_gradient(attack: Attack) -> None:
    check_gradient(attack)


@settings(max_examples=QUICK, **calm)
@given(attack=attacks)
def test_a_hostile_record_in_a_statistic(attack: Attack) -> None:
    check_statistic(attack)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # five thousand runs, beside others twenty minutes of them
@settings(max_examples=SLOW, **calm)
@given(attack=attacks)
def test_5000_hostile_gradients(attack: Attack) -> None:
    check_gradient(attack)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # five thousand runs, beside others twenty minutes of them
@settings(max_examples=SLOW, **calm)
@given(attack=attacks)
def test_5000_hostile_statistics(attack: Attack) -> None:
    check_statistic(attack)


@settings(max_examples=60, **calm)
@given(
    values=st.lists(
        st.sampled_from([0, 1, -1, 127, -128, 2**31 - 1, -(2**31), 2**62, -(2**63), 2**63 - 1]),
        min_size=6,
        max_size=6,
    ),
    kind=st.sampled_from(["int8", "int16", "int32", "int64", "uint8", "bool"]),
    label=st.sampled_from(["int8", "int32", "int64", "uint8", "bool", "float16", "float64"]),
)
def test_any_kind_of_number_is_taken(values: list[int], kind: str, label: str) -> None:
    """Integers of every width as features and labels: huge ones, duplicate columns, constant columns."""
    whole = np.asarray(values, dtype=np.int64)
    x = np.stack([whole, whole, np.ones_like(whole)], 1).astype(kind)
    with np.errstate(over="ignore"):
        y = whole.astype(label)
    data = PrivateData(x, y, schema=confide.Schema(classes=CLASSES, records=6), seed=1)
    mechanism = SampledGaussian(1.0, 2.0, 1.0, 6, "full-batch")
    query = StatisticQuery(lambda x, y: x.double(), 3)
    assert torch.isfinite(data.answer(query, mechanism).sum).all()


class TestTheFuzzingCanFail:
    """Broken clips that the checks above must not let pass."""

    def attack(self, **changes: Any) -> Attack:
        usual = {
            "record": [1e19, 1.0, -1.0],
            "label": 1,
            "others": [[0.1, 0.2, 0.3]] * OTHERS,
            "labels": [0.0] * OTHERS,
            "dtype": "float32",
            "clip": 1.0,
            "style": "flat",
            "scale": 1.0,
            "wide": False,
        }
        return Attack(**{**usual, **changes})

    def test_a_clip_that_trusts_the_norm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Norms in float32 overflow at 1e19 and the factor becomes zero or not a number."""

        def naive(rows: Tensor, *, clip: float, out: Tensor) -> Tensor:
            norms = rows.float().norm(dim=1)
            out.add_((rows.float() * (clip / norms).clamp(max=1)[:, None]).sum(0))
            return norms

        import confide.sources.answers as boundary

        monkeypatch.setattr(boundary, "clipped_sum_of_rows", naive)
        with pytest.raises(AssertionError):
            check_statistic(self.attack(record=[3e38, 1.0, 1.0], scale=1e38))

    def test_a_clip_one_percent_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import confide.sources.answers as boundary

        def loose(*arguments: Any, clip: float, **options: Any) -> Tensor:
            return clipped_sum(*arguments, clip=1.01 * clip, **options)

        monkeypatch.setattr(boundary, "clipped_sum", loose)
        with pytest.raises(AssertionError):
            check_gradient(self.attack(record=[3.0, 1.0, -1.0], scale=100.0))

    def test_records_that_were_not_set_aside(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A label outside the classes must count as zero, not as an error of the loss."""
        import confide.sources.records as boundary

        def careless(targets: Tensor, schema: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            return targets.to(torch.int64), torch.ones(len(targets), dtype=torch.bool)

        def strict(self: Engine, anatomy: Any, examined: Any, asked: Any, bound: ClipBound) -> Tensor | None:
            return answered(self, anatomy, examined, asked, dataclasses.replace(bound, strict=True))

        answered = Engine._tried
        monkeypatch.setattr(boundary, "_as_targets", careless)
        check_gradient(self.attack(label=99))  # the engine counts it as zero all the same
        monkeypatch.setattr(Engine, "_tried", strict)
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            check_gradient(self.attack(label=99))
