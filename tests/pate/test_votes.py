"""Votes of teachers: one record moves one vote, noise is as charged, every query is paid for; with planted faults."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from confide.data.schema import Schema
from confide.errors import BudgetExceeded, Refusal
from confide.mechanism import votes
from confide.mechanism.noise import NoiseStream
from confide.mechanism.votes import UNANSWERED, Votes, VotesAnswers, ballot, count_votes
from confide.privacy.accountants import epsilons, sound_epsilon
from confide.privacy.accountants.profiles import gaussian_epsilon
from confide.privacy.events import GaussianEvent, VotesEvent, event_from_dict, event_to_dict
from confide.privacy.ledger import Ledger
from confide.sources.private_data import PrivateData

CLASSES, QUERIES, TEACHERS, RECORDS = 3, 40, 7, 60
INPUTS = torch.arange(QUERIES, dtype=torch.float32)[:, None]


class Hashing:
    """Votes that turn over when any of its records changes, is added or taken away: the most that a teacher can do."""

    def votes(self, x: Tensor, y: Tensor, inputs: Tensor, classes: int) -> Tensor:
        key = int((x.double().sum() * 1009 + 17 * len(y) + y.sum()).abs())
        return torch.randint(classes, (len(inputs),), generator=torch.Generator().manual_seed(key))


def records(count: int = RECORDS) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    return torch.randint(1000, (count, 1), generator=made).float(), torch.randint(CLASSES, (count,), generator=made)


class Coins:
    """A stream whose coins are the same for the records that two data sets share."""

    def __init__(self, faces: Tensor) -> None:
        self.faces = faces.numpy()

    def integers(self, high: int, n: int) -> Any:
        return self.faces[:n] % high


def moved(split: Any, change: str) -> float:
    """How far all counts together move when one record changes, per query; the largest over queries and places."""
    x, y = records()
    faces = torch.randint(1000, (RECORDS + 1,), generator=torch.Generator().manual_seed(4))
    found = 0.0
    for place in range(0, RECORDS, 7):
        keep = torch.ones(RECORDS, dtype=torch.bool)
        other = (x.clone(), y.clone())
        other[0][place] = 5000.0
        keep[place] = change != "removed"
        pairs = {"replaced": (other[0], other[1], faces), "removed": (x[keep], y[keep], faces[:RECORDS][keep])}
        x2, y2, faces2 = pairs[change]
        one = count_votes(Hashing(), split(len(y), TEACHERS, Coins(faces)), x, y, INPUTS, CLASSES, QUERIES)
        two = count_votes(Hashing(), split(len(y2), TEACHERS, Coins(faces2)), x2, y2, INPUTS, CLASSES, QUERIES)
        found = max(found, float((one - two).norm(dim=1).max()))
    return found


def by_index(records: int, teachers: int, stream: Any) -> list[Tensor]:
    """The fault: equal parts by position, so that one record less moves others to other teachers."""
    return list(torch.arange(records).tensor_split(teachers))


def shared(records: int, teachers: int, stream: Any) -> list[Tensor]:
    """The fault: every record has two teachers."""
    parts = votes.split(records, teachers, stream)
    return [torch.cat([parts[place], parts[place - 1]]) for place in range(teachers)]


class TestSensitivity:
    @pytest.mark.parametrize("change", ["replaced", "removed"])
    def test_one_record_moves_one_vote_under_either_adjacency(self, change: str) -> None:
        assert 1 <= moved(votes.split, change) <= math.sqrt(2) + 1e-12

    @pytest.mark.parametrize(("fault", "change"), [(by_index, "removed"), (shared, "replaced"), (shared, "removed")])
    def test_planted_splits_are_caught(self, fault: Any, change: str) -> None:
        assert moved(fault, change) > math.sqrt(2) + 0.1

    def test_the_largest_count_moves_by_one(self) -> None:
        made = torch.Generator().manual_seed(0)
        for _ in range(200):
            said = torch.randint(4, (9,), generator=made)
            counts = torch.bincount(said, minlength=4)
            said[0] = (said[0] + 1) % 4
            assert abs(int(torch.bincount(said, minlength=4).max()) - int(counts.max())) <= votes.ONE_VOTE

    def test_a_teacher_cannot_tell_another_what_it_saw(self) -> None:
        """Catches a teacher that keeps records in an attribute, a class or a global: two teachers would change."""
        seen: list[float] = []

        class Telling(Hashing):
            told = 0.0

            def votes(self, x: Tensor, y: Tensor, inputs: Tensor, classes: int) -> Tensor:
                seen.append(float(x.sum()))
                Telling.told += float(x.sum())
                key = int(sum(seen) + Telling.told)
                return (torch.arange(len(inputs)) + key) % classes

        x, y = records()
        parts = votes.split(len(y), TEACHERS, NoiseStream(1))
        other = x.clone()
        other[parts[0][0]] += 1000
        changed = torch.zeros(TEACHERS)
        for place in range(1, TEACHERS):
            one, two = (count_votes(Telling(), parts[: place + 1], z, y, INPUTS, CLASSES, QUERIES) for z in (x, other))
            changed[place] = float((one - two).norm(dim=1).max())
        assert float(changed.max()) <= math.sqrt(2) + 1e-12
        assert not seen
        naive = Telling()
        naive.votes(x, y, INPUTS, CLASSES)
        assert seen, "as written it tells"

    def test_a_teacher_leaves_no_trace_in_the_interpreter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody can put the limit of recursion back: all teachers that come later would change their votes."""
        before = sys.getrecursionlimit()

        class Counting:
            def votes(self, x: Tensor, y: Tensor, inputs: Tensor, classes: int) -> Tensor:
                limit = sys.getrecursionlimit()
                if float(x.abs().amax()) > 1000:
                    sys.setrecursionlimit(limit + 1)
                return torch.full((len(inputs),), (limit - before) % classes)

        x, y = torch.ones(TEACHERS, 1), torch.zeros(TEACHERS, dtype=torch.int64)
        parts, other = list(torch.arange(TEACHERS)[:, None]), x.clone()
        other[0] = 2000.0
        monkeypatch.setattr("confide.mechanism.clipping.apart.is_possible", lambda: False)
        with pytest.raises(Refusal, match="recursionlimit"):
            votes.rehearse_votes(Counting(), x, y, INPUTS, CLASSES, QUERIES)
        # planted: the search begins at the teacher, and takes for what runs what runs of a network
        monkeypatch.setattr(votes, "_may_run", lambda teacher: (teacher,))
        one, two = (count_votes(Counting(), parts, z, y, INPUTS, CLASSES, QUERIES) for z in (x, other))
        sys.setrecursionlimit(before)
        assert float((one - two).norm(dim=1).max()) > 2 * math.sqrt(2)

    def test_a_teacher_that_interrupts_abstains(self) -> None:
        """An interrupt that a record raises is no interrupt of the curator's: the run goes on."""

        class Interrupting:
            def votes(self, x: Tensor, y: Tensor, inputs: Tensor, classes: int) -> Tensor:
                if float(x.sum()) > 3:
                    raise KeyboardInterrupt
                return torch.zeros(len(inputs), dtype=torch.int64)

        parts = [torch.tensor([0]), torch.tensor([1])]
        x, y = torch.tensor([[1.0], [9.0]]), torch.zeros(2, dtype=torch.int64)
        counts = count_votes(Interrupting(), parts, x, y, INPUTS, CLASSES, QUERIES)
        assert counts.sum(0).tolist() == [QUERIES, 0, 0]

    def test_coins_are_even_and_of_their_own(self) -> None:
        sizes = torch.tensor([len(part) for part in votes.split(70_000, 7, NoiseStream(5))])
        assert int(sizes.sum()) == 70_000
        assert float(((sizes - 10_000) ** 2 / 10_000).sum()) < 22.5, "chi square, 6 degrees, one in a thousand"

    def test_who_fails_or_says_nonsense_abstains(self) -> None:
        class Moody:
            def votes(self, x: Tensor, y: Tensor, inputs: Tensor, classes: int) -> Tensor:
                if float(x.sum()) > 3:
                    raise RuntimeError("of its records")
                return torch.tensor([0, classes, -5, 1])

        x, y = torch.tensor([[1.0], [2.0], [9.0]]), torch.zeros(3, dtype=torch.int64)
        parts = [torch.tensor([0]), torch.tensor([1]), torch.tensor([2])]
        counts = count_votes(Moody(), parts, x, y, torch.zeros(4, 1), 3, 4)
        assert counts.tolist() == [[2, 0, 0], [0, 0, 0], [0, 0, 0], [0, 2, 0]]

    @pytest.mark.parametrize(
        "said", [torch.zeros(3), torch.zeros(4), torch.zeros(4, 1, dtype=torch.int64), [1, 2, 3, 4], None]
    )
    def test_a_ballot_is_one_whole_number_each(self, said: Any) -> None:
        with pytest.raises(Refusal, match="one whole number"):
            ballot(said, 4, 3)


class HalfNoise(Votes):
    """The fault: half of the noise that is charged for."""

    def release(self, counts: Tensor, stream: NoiseStream) -> VotesAnswers:
        return Votes(self.teachers, self.queries, self.noise / 2, releases=self.releases).release(counts, stream)


def only_answered(self: Votes) -> tuple[VotesEvent, ...]:
    """The fault: queries that failed the test are not charged."""
    return tuple(replace(event, count=max(1, event.count // 2)) for event in EVENTS(self))


EVENTS = Votes.events


def noise_ratio(kind: type[Votes]) -> float:
    """Squared noise of a released histogram over what its event says."""
    mechanism = kind(10, 4000, 6.0, releases="histograms")
    released = mechanism.release(torch.zeros(4000, 5, dtype=torch.float64), NoiseStream(7)).histograms
    assert released is not None
    return float(released.square().mean()) / mechanism.events()[-1].noise ** 2


def charged() -> dict[float, int]:
    """Counts of events in the ledger after a poll in which most queries fail the test."""
    ledger, (x, y) = Ledger(), records()
    data = PrivateData(x, y, schema=Schema(RECORDS, (0, 1, 2)), ledger=ledger)
    mechanism = Votes(TEACHERS, QUERIES, 2.0, threshold=6.0, test_noise=1.0)
    answers = data.poll(mechanism, Hashing(), INPUTS)
    assert bool((answers.labels == UNANSWERED).any())
    return {entry.event.moved: entry.event.count for entry in ledger.entries() if isinstance(entry.event, VotesEvent)}


class TestRelease:
    def test_noise_is_as_charged_and_half_of_it_is_caught(self) -> None:
        assert noise_ratio(Votes) == pytest.approx(1, abs=0.04)
        assert noise_ratio(HalfNoise) < 0.5

    def test_every_test_and_answer_is_charged_and_less_is_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        every = {votes.ONE_VOTE: QUERIES, votes.MOVED_VOTE: QUERIES}
        assert charged() == every
        monkeypatch.setattr(Votes, "events", only_answered)
        assert charged() != every

    def test_queries_below_the_threshold_show_nothing(self) -> None:
        counts = torch.tensor([[100.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
        mechanism = Votes(100, 2, 1.0, threshold=50.0, test_noise=1.0, releases="histograms")
        found = mechanism.release(counts, NoiseStream(1))
        assert found.labels.tolist() == [0, UNANSWERED]
        assert found.histograms is not None
        assert found.histograms[1].tolist() == [0, 0]
        assert Votes(100, 2, 1.0).release(counts, NoiseStream(1)).histograms is None

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            ({"teachers": 0}, "teachers=0"),
            ({"queries": 0}, "queries=0"),
            ({"noise": math.inf}, "noise=inf"),
            ({"threshold": 3.0}, "a test needs both"),
            ({"threshold": 3.0, "test_noise": -1.0}, "test_noise=-1"),
            ({"releases": "all"}, "releases='all'"),
        ],
    )
    def test_bad_settings_get_one_sentence(self, change: dict[str, Any], complaint: str) -> None:
        with pytest.raises(Refusal, match=complaint):
            Votes(**{"teachers": 3, "queries": 2, "noise": 1.0, **change})


class TestPrice:
    EVENTS = Votes(250, 100, 40.0, threshold=200.0, test_noise=150.0).events()

    def test_it_is_never_doubled(self) -> None:
        """Catches an accountant that takes votes for sums of records, which a replaced one moves twice as far."""
        mu = math.sqrt(100 * (2 / 40**2 + 1 / 150**2))
        for adjacency in ("add-remove", "replace-one"):
            found = sound_epsilon(self.EVENTS, 1e-5, adjacency)  # type: ignore[arg-type]
            assert found == pytest.approx(gaussian_epsilon(mu, 1e-5), rel=1e-6)
            assert found >= gaussian_epsilon(mu, 1e-5) * (1 - 1e-12)

    def test_every_accountant_prices_it_soundly(self) -> None:
        for adjacency in ("add-remove", "replace-one"):
            found = epsilons(self.EVENTS, 1e-5, adjacency)  # type: ignore[arg-type]
            least = found["pld"].epsilon
            assert least is not None
            assert {name for name, one in found.items() if one.epsilon is not None} >= {"pld", "rdp", "gdp_clt", "zcdp"}
            assert all(one.epsilon is None or one.epsilon >= least * (1 - 1e-9) for one in found.values())

    def test_it_composes_with_sums(self) -> None:
        alone = sound_epsilon(self.EVENTS, 1e-5)
        both = sound_epsilon((*self.EVENTS, GaussianEvent(5.0, "poisson", 0.01, 100)), 1e-5)
        assert both > alone

    def test_it_is_kept_in_files(self) -> None:
        for event in self.EVENTS:
            assert event_from_dict(event_to_dict(event)) == event


class TestDoor:
    def data(self, **options: Any) -> PrivateData:
        x, y = records()
        return PrivateData(x, y, schema=Schema(RECORDS, (0, 1, 2)), **options)

    def test_a_ceiling_refuses_before_a_record_is_read(self) -> None:
        ledger, met = Ledger(), []
        ledger.limit(0.5, 1e-5)

        class Watching(Hashing):
            def votes(self, x: Tensor, y: Tensor, inputs: Tensor, classes: int) -> Tensor:
                met.append(len(y))
                return super().votes(x, y, inputs, classes)

        with pytest.raises(BudgetExceeded):
            self.data(ledger=ledger).poll(Votes(TEACHERS, QUERIES, 1.0), Watching(), INPUTS)
        assert not [entry for entry in ledger.entries() if entry.event is not None]

    def test_a_teacher_that_cannot_work_is_refused_before_the_charge(self) -> None:
        class Broken:
            def votes(self, x: Tensor, y: Tensor, inputs: Tensor, classes: int) -> Tensor:
                return torch.zeros(3, dtype=torch.int64)

        ledger = Ledger()
        with pytest.raises(Refusal, match="one whole number"):
            self.data(ledger=ledger).poll(Votes(TEACHERS, QUERIES, 1.0), Broken(), INPUTS)
        assert not ledger.entries()

    def test_a_mechanism_of_somebody_else_is_refused(self) -> None:
        """Catches a subclass that says a smaller price than it takes."""
        ledger = Ledger()
        with pytest.raises(Refusal, match="mechanism=HalfNoise"):
            self.data(ledger=ledger).poll(HalfNoise(TEACHERS, QUERIES, 1.0), Hashing(), INPUTS)
        assert not ledger.entries()

    def test_inputs_are_as_many_as_queries(self) -> None:
        with pytest.raises(Refusal, match="40 of them for queries=41"):
            self.data().poll(Votes(TEACHERS, QUERIES + 1, 1.0), Hashing(), INPUTS)

    def test_a_regression_has_no_classes(self) -> None:
        x, y = records()
        data = PrivateData(x, y.float(), schema=Schema(RECORDS, None, target_bounds=(0, 3)))
        with pytest.raises(Refusal, match="teachers vote for classes"):
            data.poll(Votes(TEACHERS, QUERIES, 1.0), Hashing(), INPUTS)

    def test_two_polls_of_one_data_set_differ(self) -> None:
        data, mechanism = self.data(), Votes(TEACHERS, QUERIES, 5.0, releases="histograms")
        one, two = (data.poll(mechanism, Hashing(), INPUTS).histograms for _ in range(2))
        assert one is not None
        assert two is not None
        assert not np.allclose(one.numpy(), two.numpy())
