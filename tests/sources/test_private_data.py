"""The boundary: pay first, never show a record, clip and noise as stated."""

from __future__ import annotations

import copy
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import confide
from confide.data.schema import Schema
from confide.errors import Refusal
from confide.mechanism.clipping import statistics
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.noise import NoiseStream
from confide.mechanism.sampling import BatchSampler, poisson_batch
from confide.privacy.events import GaussianEvent, NonPrivateEvent, event_from_dict, event_to_dict
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, StatisticQuery


def private(x: Any, y: Any | None = None, **options: Any) -> PrivateData:
    x = torch.as_tensor(x)
    y = torch.zeros(len(x)) if y is None else y
    return PrivateData(x, y, schema=Schema(records=max(2, len(x))), **{"seed": 3, **options})


def full_batch(records: int, noise_multiplier: float = 1.0, clip: float = 1.0) -> SampledGaussian:
    return SampledGaussian(noise_multiplier, clip, 1.0, records, "full-batch")


def silent(records: int, clip: float = 1.0) -> SampledGaussian:
    return SampledGaussian(0.0, clip, 1.0, records, "full-batch", private=False)


def identity(x: Tensor, y: Tensor) -> Tensor:
    return x


class TestNothingShows:
    def test_records_cannot_be_taken_out(self) -> None:
        data = private(torch.full((4, 2), 42.0))
        for take in (iter, len, copy.copy, copy.deepcopy, pickle.dumps, lambda d: d[0], lambda d: 42.0 in d):
            with pytest.raises(TypeError, match="ask through answer"):
                take(data)
        assert "42" not in repr(data)
        assert "4" not in repr(data).replace("42", "")

    def test_no_public_attribute_holds_records(self) -> None:
        data = private(torch.full((4, 2), 42.0))
        public = [getattr(data, name) for name in vars(data) if not name.startswith("_")]
        assert not any(isinstance(value, Tensor | np.ndarray) for value in public)

    def test_a_wrong_shape_is_refused(self) -> None:
        with pytest.raises(ValueError, match="one row of x and one entry of y"):
            PrivateData(torch.zeros(3, 2), torch.zeros(4), schema=Schema(records=3))


class TestPayFirst:
    def test_a_refused_charge_reads_nothing(self) -> None:
        read: list[int] = []

        def spy(x: Tensor, y: Tensor) -> Tensor:
            read.append(len(x))
            return x

        ledger = confide.Ledger()
        ledger.limit(epsilon=0.5, delta=1e-6)
        data = private(torch.ones(10, 2), ledger=ledger)
        with pytest.raises(confide.BudgetExceeded):
            data.answer(StatisticQuery(spy, 2), full_batch(10))
        assert read == []
        assert not ledger.events("")

    @pytest.mark.parametrize("lie", ["noise_std", "event", "__eq__"])
    def test_a_mechanism_that_says_one_thing_and_does_another_is_refused(self, lie: str) -> None:
        """A class of its own could tell the ledger of noise that no sum has, or pass for what was paid."""
        lies = {
            "noise_std": property(lambda self: 1e-9),
            "event": lambda self, count=1: full_batch(10, 1e6).event(count),
            "__eq__": lambda self, other: True,
        }
        honest = full_batch(10)
        liar = type("Liar", (SampledGaussian,), {lie: lies[lie], "__hash__": lambda self: hash(honest)})
        data, query = private(torch.ones(10, 2)), StatisticQuery(lambda x, y: x, 2)
        receipt = data.charge([(honest, 1)])
        for paid in (None, receipt):
            with pytest.raises(Refusal, match="mechanism=Liar: must be SampledGaussian itself"):
                data.answer(query, liar(1e-3, 1.0, 1.0, 10, "full-batch"), paid)
        assert sum(event.count for event in data.ledger.events("")) == 1
        assert receipt.left == 1

    def test_a_network_that_cannot_be_clipped_costs_nothing(self) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        data = private(torch.ones(10, 2))
        plan = confide.plan(delta=1e-5, records=10, batch=5, steps=3, noise_multiplier=1.0)
        with pytest.raises(ValueError, match="GroupNorm"):
            confide.fit(confide.methods.SGD(), module, data, plan)
        assert not data.ledger.events("")

    def test_a_run_without_protection_may_leave_out_the_clip(self) -> None:
        plan = confide.plan(delta=1e-5, records=10, batch=5, steps=3, clip=float("inf"), private=False)
        run = confide.fit(confide.methods.SGD(), torch.nn.Linear(2, 1), private(torch.ones(10, 2)), plan)
        assert run.privacy.epsilon() == float("inf")

    def test_a_crash_after_the_charge_is_paid_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        at_once = statistics.rows_at_once

        def crash(function: Any, x: Any, y: Tensor, size: int) -> Tensor:
            if len(y) < 10:  # made-up records, before anything is paid
                return at_once(function, x, y, size)
            raise KeyboardInterrupt

        data = private(torch.ones(10, 2))
        monkeypatch.setattr(statistics, "rows_at_once", crash)  # the keyboard's; a statistic may not raise one
        with pytest.raises(KeyboardInterrupt):
            data.answer(StatisticQuery(lambda x, y: x, 2), full_batch(10))
        assert sum(event.count for event in data.ledger.events("")) == 1

    def test_a_record_that_raises_counts_as_zero(self) -> None:
        """Whether an answer comes must not depend on a record."""

        def picky(x: Tensor, y: Tensor) -> Tensor:
            if x[0, 0] < 0:
                raise RuntimeError("a record below zero")
            return x

        table = torch.ones(10, 2)
        table[3] = -1
        release = private(table).answer(StatisticQuery(picky, 2), silent(10, 2.0))
        assert release.sum.tolist() == pytest.approx([9.0, 9.0])

    def test_prepaid_answers_are_charged_once_and_the_next_again(self) -> None:
        data, mechanism = private(torch.ones(10, 2)), full_batch(10)
        data.charge([(mechanism, 3)])
        for _ in range(4):
            data.answer(StatisticQuery(identity, 2), mechanism)
        assert sum(event.count for event in data.ledger.events("")) == 4

    def test_a_prepaid_answer_of_another_mechanism_does_not_count(self) -> None:
        data = private(torch.ones(10, 2))
        data.charge([(full_batch(10, noise_multiplier=9.0), 3)])
        data.answer(StatisticQuery(identity, 2), full_batch(10, noise_multiplier=1.0))
        assert sum(event.count for event in data.ledger.events("")) == 4

    def test_shuffled_steps_are_paid_by_the_pass(self) -> None:
        mechanism = SampledGaussian(1.0, 1.0, 0.25, 12, "shuffle")
        data = private(torch.ones(12, 2))
        for _ in range(5):
            data.answer(StatisticQuery(identity, 2), mechanism)
        assert [event.count for event in data.ledger.events("")] == [1, 1] or sum(
            event.count for event in data.ledger.events("")
        ) == 2


class TestSensitivity:
    @settings(max_examples=60, deadline=None)
    @given(
        record=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=3, max_size=3),
        clip=st.floats(1e-3, 1e3),
    )
    def test_one_record_moves_a_statistic_by_at_most_the_clip(self, record: list[float], clip: float) -> None:
        others = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
        query = StatisticQuery(identity, 3)
        with_record = private(torch.cat([others, torch.tensor([record])]))
        moved = with_record.answer(query, silent(6, clip)).sum - private(others).answer(query, silent(6, clip)).sum
        assert torch.isfinite(moved).all()
        assert moved.norm() <= clip * (1 + 1e-6)

    @settings(max_examples=60, deadline=None)
    @given(
        record=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=3, max_size=3),
        clip=st.floats(1e-3, 1e2),
    )
    def test_one_record_moves_a_gradient_by_at_most_the_clip(self, record: list[float], clip: float) -> None:
        others = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
        module = confide.networks.mlp(3, 1, hidden=(4,), generator=torch.Generator().manual_seed(1))
        query = GradientQuery(module, confide.likelihoods.Gaussian(0.1).loss)
        with_record = private(torch.cat([others, torch.tensor([record])]))
        moved = with_record.answer(query, silent(6, clip)).sum - private(others).answer(query, silent(6, clip)).sum
        assert torch.isfinite(moved).all()
        assert moved.norm() <= clip * (1 + 1e-4)

    def test_a_clip_one_percent_off_is_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import confide.sources.answers as boundary

        right = boundary.clipped_sum_of_rows  # type: ignore[attr-defined]

        def loose(rows: Tensor, *, clip: float, out: Tensor) -> Tensor:
            return right(rows, clip=1.01 * clip, out=out)

        monkeypatch.setattr(boundary, "clipped_sum_of_rows", loose)
        moved = private(torch.full((1, 3), 50.0)).answer(StatisticQuery(identity, 3), silent(2)).sum
        assert moved.norm() > 1 + 1e-6

    def test_a_label_outside_the_classes_counts_as_zero(self) -> None:
        schema = Schema(classes=3, records=2)
        data = PrivateData(torch.ones(2, 2), torch.tensor([7, -1]), schema=schema, seed=1)
        assert torch.equal(data.answer(StatisticQuery(identity, 2), silent(2)).sum, torch.zeros(2).double())


class TestNoise:
    SIZE = 40_000

    def ratio(self, claimed: float, added: float) -> float:
        """Standardised distance between the claimed and the observed noise: about N(0, 1) when they agree."""
        data = private(torch.zeros(4, self.SIZE))
        noise = data.answer(StatisticQuery(identity, self.SIZE), full_batch(4, added)).sum
        observed = noise.square().mean().sqrt().item() / claimed
        return (observed - 1) * np.sqrt(2 * self.SIZE)

    def test_noise_is_as_stated(self) -> None:
        assert abs(self.ratio(claimed=1.3, added=1.3)) < 4

    @pytest.mark.parametrize("factor", [0.97, 1.03])
    def test_noise_three_percent_off_is_caught(self, factor: float) -> None:
        assert abs(self.ratio(claimed=1.3, added=1.3 * factor)) > 4

    def test_noise_is_scaled_by_the_clip_and_fresh_at_every_step(self) -> None:
        data, mechanism = private(torch.zeros(4, self.SIZE)), full_batch(4, 1.0, clip=5.0)
        first = data.answer(StatisticQuery(identity, self.SIZE), mechanism)
        one = first.sum.clone()
        two = data.answer(StatisticQuery(identity, self.SIZE), mechanism).sum
        assert first.noise_std == 5.0
        assert abs(one.std().item() - 5) < 0.1
        assert abs((one * two).mean().item() / 25) < 5 / np.sqrt(self.SIZE)

    def test_unseeded_runs_differ(self) -> None:
        answers = [
            private(torch.zeros(4, 3), seed=None).answer(StatisticQuery(identity, 3), full_batch(4)).sum
            for _ in range(2)
        ]
        assert not torch.equal(*answers)


class TestSampling:
    def test_every_record_joins_with_the_stated_rate(self) -> None:
        stream, size, rate, repeats = NoiseStream(1), 50, 0.13, 6000
        counts = np.zeros(size)
        sizes = np.zeros(repeats)
        for repeat in range(repeats):
            batch = poisson_batch(stream, size, rate)
            assert len(np.unique(batch)) == len(batch)
            counts[batch] += 1
            sizes[repeat] = len(batch)
        deviation = (counts - repeats * rate) / np.sqrt(repeats * rate * (1 - rate))
        assert np.abs(deviation).max() < 4.2
        # Batch sizes are binomial: fixed-size batches, the commonest substitute, have no variance at all.
        assert abs(sizes.var() / (size * rate * (1 - rate)) - 1) < 0.1

    def test_a_rate_of_one_takes_everybody_and_an_empty_set_nobody(self) -> None:
        assert len(poisson_batch(NoiseStream(1), 9, 1.0)) == 9
        assert len(poisson_batch(NoiseStream(1), 0, 0.5)) == 0

    def test_a_shuffled_pass_uses_every_record_once(self) -> None:
        sampler = BatchSampler(10, NoiseStream(1))
        mechanism = SampledGaussian(1.0, 1.0, 0.3, 10, "shuffle")
        batches = [sampler.draw(mechanism) for _ in range(mechanism.batches_per_pass)]
        assert sorted(np.concatenate(batches)) == list(range(10))

    def test_fixed_size_batches_have_distinct_records(self) -> None:
        sampler = BatchSampler(10, NoiseStream(1))
        batch = sampler.draw(SampledGaussian(1.0, 1.0, 0.3, 10, "fixed-size"))
        assert len(np.unique(batch)) == 3

    @pytest.mark.parametrize("sampling", ["fixed-size", "shuffle"])
    def test_sampling_that_reveals_the_size_needs_the_declared_one(self, sampling: Any) -> None:
        sampler = BatchSampler(11, NoiseStream(1))
        mechanism = SampledGaussian(1.0, 1.0, 0.3, 10, sampling)
        with pytest.raises(ValueError, match="use poisson sampling"):
            sampler.draw(mechanism)
        data = PrivateData(torch.zeros(11, 1), torch.zeros(11), schema=Schema(records=10), seed=1)
        with pytest.raises(ValueError, match="use poisson sampling"):
            data.charge([(mechanism, 3)])
        assert not data.ledger.entries(), "refused before it was paid for"


class TestRefusedBeforeTheCharge:
    """What shows only when the first such record is read would cost the whole plan."""

    plan = confide.plan(delta=1e-5, records=20, batch=5, steps=3, noise_multiplier=1.0)

    def test_a_network_with_fewer_outputs_than_classes(self) -> None:
        data = PrivateData(torch.zeros(20, 2), torch.zeros(20), schema=Schema(classes=4, records=20), seed=1)
        with pytest.raises(ValueError, match="outputs=3: the network has too few"):
            confide.fit(confide.methods.SGLD(), torch.nn.Linear(2, 3), data, self.plan)
        assert not data.ledger.entries()

    def test_progress_that_cannot_be_called(self) -> None:
        data = PrivateData(torch.zeros(20, 2), torch.zeros(20), schema=Schema(classes=2, records=20), seed=1)
        with pytest.raises(TypeError, match="progress="):
            confide.fit(confide.methods.SGLD(), torch.nn.Linear(2, 2), data, self.plan, progress=True)  # type: ignore[arg-type]
        assert not data.ledger.entries()


class TestMechanism:
    def test_the_event_is_what_ran(self) -> None:
        assert SampledGaussian(1.5, 3.0, 0.1, 50).event(7) == GaussianEvent(1.5, "poisson", 0.1, 7)
        assert full_batch(50, 2.0).event(3) == GaussianEvent(2.0, "full-batch", 1.0, 3)
        assert SampledGaussian(1.0, 1.0, 0.1, 50, "shuffle").event(11).count == 2
        assert isinstance(silent(5).event(), NonPrivateEvent)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"noise_multiplier": 0.0}, r"noise_multiplier=0.0: must be > 0 \(0 only with private=False\)"),
            ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
            ({"clip": 0.0}, "clip=0.0"),
            ({"clip": float("inf")}, "clip=inf"),
            ({"rate": 1.5}, "rate=1.5"),
            ({"records": 0}, "records=0"),
            ({"sampling": "sometimes"}, "sampling='sometimes'"),
            ({"sampling": "full-batch"}, "the rate must be 1"),
        ],
    )
    def test_bad_settings_name_the_argument(self, options: dict[str, Any], message: str) -> None:
        settings = {"noise_multiplier": 1.0, "clip": 1.0, "rate": 0.5, "records": 10, **options}
        with pytest.raises(ValueError, match=message):
            SampledGaussian(**settings)

    @given(records=st.integers(2, 10**12), data=st.data())
    def test_rates_of_fixed_size_batches_are_exact_fractions(self, records: int, data: st.DataObject) -> None:
        batch = data.draw(st.integers(1, records))
        mechanism = SampledGaussian(1.0, 1.0, batch / records, records, "fixed-size")
        event = mechanism.event(3)
        assert isinstance(event, GaussianEvent)
        assert mechanism.batch == event.batch == mechanism.expected_batch == batch
        assert 0 <= Fraction(event.rate) - Fraction(batch, records) <= Fraction(batch, records) / 2**52
        assert event_from_dict(event_to_dict(event)) == event

    @pytest.mark.parametrize("rate", [0.3 + 1e-9, 0.3 - 1e-12, 1e-8])
    def test_a_rate_that_is_no_whole_batch_is_refused(self, rate: float) -> None:
        """Off by less than a millionth of the records, it passed: the batch was larger than the price said."""
        with pytest.raises(ValueError, match="must be a whole number of records"):
            SampledGaussian(1.0, 1.0, rate, 10**7, "fixed-size")
        with pytest.raises(ValueError, match="must be a whole number of records"):
            GaussianEvent(1.0, "fixed-size", rate, 1, 10**7)
