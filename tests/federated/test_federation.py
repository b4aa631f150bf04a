"""The source that asks parties: sums, noise, prices, statements, and parties or couriers that fail."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import confide
from confide.errors import PartyLost, Refusal
from confide.federated import Federation, InProcess, Party, wire
from confide.federated.wire import Message
from confide.mechanism.clipping.places import UNEVEN
from confide.mechanism.gaussian import SampledGaussian
from confide.privacy.accountants import sound_epsilon
from confide.sources.replay import Recorder
from tests.federated.problems import federation_of, parties_of, plan_for, records_of

SGLD = confide.methods.SGLD()


def fitted(data: Federation, method: confide.methods.Method = SGLD, steps: int = 30, **options: object) -> confide.Run:
    return confide.fit(method, confide.networks.logistic(3), data, plan_for(data, steps, **options), seed=0)


class Failing(InProcess):
    """A courier that does something to replies."""

    def __init__(self, parties: Mapping[str, Party], step: int = 3) -> None:
        super().__init__(parties)
        self.calls, self.step = 0, step

    def exchange(self, frames: Mapping[str, bytes]) -> dict[str, bytes]:
        replies = super().exchange(frames)
        self.calls += 1
        return self.changed(replies) if self.calls - 3 == self.step else replies  # facts, try and open come first

    def changed(self, replies: dict[str, bytes]) -> dict[str, bytes]:
        raise NotImplementedError


class Dropping(Failing):
    def changed(self, replies: dict[str, bytes]) -> dict[str, bytes]:
        del replies["p1"]
        return replies


class Tampering(Failing):
    def changed(self, replies: dict[str, bytes]) -> dict[str, bytes]:
        bad = bytearray(replies["p1"])
        bad[-2] ^= 64  # in the middle of a number
        return {**replies, "p1": bytes(bad)}


class Replaying(Failing):
    """Gives the reply to an earlier step once more."""

    kept: bytes = b""

    def exchange(self, frames: Mapping[str, bytes]) -> dict[str, bytes]:
        replies = super().exchange(frames)
        self.kept = self.kept if self.calls != 4 else replies["p1"]
        return replies

    def changed(self, replies: dict[str, bytes]) -> dict[str, bytes]:
        return {**replies, "p1": self.kept}


class Lying(Failing):
    """One party says something else than it should, properly sealed."""

    def __init__(self, parties: Mapping[str, Party], step: int, header: dict[str, Any], tensors: Any = None) -> None:
        super().__init__(parties, step)
        self.header, self.tensors = header, tensors

    def exchange(self, frames: Mapping[str, bytes]) -> dict[str, bytes]:
        self.asked = frames
        return super().exchange(frames)

    def changed(self, replies: dict[str, bytes]) -> dict[str, bytes]:
        answers = wire.digest(self.asked["p1"])
        told = wire.unpacked(replies["p1"], answers=answers)
        header = {**told.header, **self.header}
        if "facts" in self.header:
            header["facts"] = {**told.header["facts"], **self.header["facts"]}
        sent = told.tensors if self.tensors is None else {"sum": self.tensors(told.tensors["sum"])}
        return {**replies, "p1": wire.packed(Message(header, sent), answers=answers)}


class TestFit:
    @pytest.mark.parametrize(
        "method",
        [SGLD, confide.methods.SGD(), confide.methods.SEP(), confide.methods.BBP()],
        ids=lambda one: one.name,
    )
    def test_methods_learn_over_parties(self, method: confide.methods.Method) -> None:
        data = federation_of(parties_of(3, 400, seed=5))
        run = fitted(data, method, steps=60, noise=None, epsilon=4)
        x, y = records_of(500, seed=99)
        right = (run.posterior.predict(x).probabilities[:, 1] > 0.5) == y.bool()
        assert float(right.double().mean()) > 0.8

    @pytest.mark.parametrize("said", [{}, {"alike": False}, {"alike": None}])
    def test_a_party_on_whose_machine_places_matter_is_stated(self, said: dict[str, Any]) -> None:
        """Or one that does not say, as those of before."""
        data = Federation(Lying(parties_of(2, 50), -1, said))
        assert (UNEVEN in fitted(data, steps=2).privacy.assumptions) is bool(said)

    def test_a_network_with_hidden_layers_and_a_real_target(self) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(400, 2, generator=generator) * 2 - 1
        schema = confide.Schema(records=200)
        from confide.privacy.ledger import Ledger

        halves = {
            f"h{k}": Party(x[k::2], x[k::2, 0], schema=schema, ledger=Ledger(), name=f"h{k}", least_noise=0.1, seed=k)
            for k in range(2)
        }
        data = Federation(InProcess(halves))
        plan = confide.plan(noise_multiplier=0.5, delta=1e-5, records=400, batch=100, steps=20)
        run = confide.fit(confide.methods.SEP(), confide.networks.mlp(2, 1, hidden=(8,)), data, plan, seed=0)
        assert bool(torch.isfinite(run.posterior.predict(x).mean).all())

    def test_what_is_stated_is_what_each_party_was_charged(self) -> None:
        parties = parties_of(3, 400)
        run = fitted(federation_of(parties))
        for name, party in parties.items():
            assert party.ledger.events(name) == run.privacy.events
        assert run.privacy.epsilon() == pytest.approx(sound_epsilon(plan_for(federation_of(parties)).events(), 1e-5))

    def test_the_statement_says_who_is_trusted(self) -> None:
        text = fitted(federation_of(parties_of(2, 100, vouched=("its columns are public",)))).privacy.statement()
        for words in ("trust: nobody", "two of the 2 parties", "p0: its columns are public"):
            assert words in text

    def test_the_method_knows_the_noise_of_the_sum(self) -> None:
        data = federation_of(parties_of(4, 100))
        recorder = Recorder(data)
        plan = plan_for(data, 5)
        run = confide.fit(SGLD, confide.networks.logistic(3), recorder, plan, seed=0)
        assert run.plan.mechanism.noise_std == pytest.approx(2 * plan.mechanism.noise_std)
        assert recorder.releases[0].noise_std == pytest.approx(2 * plan.mechanism.noise_std)
        assert data.within(run.plan) is run.plan, "noise is put on once"

    def test_seeded_parties_claim_nothing(self) -> None:
        run = fitted(federation_of(parties_of(2, 100, seed=1)))
        assert run.privacy.seeded


def spread_of(steps: int = 15) -> float:
    """Of the noise in a coordinate of the sum of four parties, in units of what is stated; eight records say little."""
    data = federation_of(parties_of(4, 2))
    recorder = Recorder(data)
    plan = confide.plan(noise_multiplier=1.0, delta=1e-5, records=8, batch=1, steps=steps)
    network = confide.networks.mlp(3, 1, hidden=(64,))  # 321 numbers a step
    confide.fit(confide.methods.SGD(learning_rate=1e-9), network, recorder, plan, seed=0)
    sums = torch.stack([release.sum for release in recorder.releases]).double()
    return float(sums.std() / recorder.releases[0].noise_std)


class TestNoise:
    def test_its_spread_is_what_is_stated(self) -> None:
        """4815 numbers: the standard error is 1 %; one party's noise more or less would be 12 %."""
        assert spread_of() == pytest.approx(1.0, abs=0.05)

    def test_a_party_without_noise_is_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from confide.mechanism.secure import LatticeNoise, lattice_for

        plain, calls = LatticeNoise.add_, [0]

        def every_other(self: LatticeNoise, total: torch.Tensor, mechanism: SampledGaussian) -> float:
            calls[0] += 1
            return lattice_for(mechanism, len(total)).std if calls[0] % 2 else plain(self, total, mechanism)

        monkeypatch.setattr(LatticeNoise, "add_", every_other)
        assert spread_of() != pytest.approx(1.0, abs=0.05)


class TestFailures:
    def test_a_missing_party_ends_the_run(self) -> None:
        with pytest.raises(PartyLost, match="step 3: no answer from p1"):
            fitted(Federation(Dropping(parties_of(3, 100))))

    def test_one_may_be_missing_where_that_was_said(self) -> None:
        data = Federation(Dropping(parties_of(3, 100)), missing=1)
        recorder = Recorder(data)
        plan = plan_for(data, 5)
        confide.fit(SGLD, confide.networks.logistic(3), recorder, plan, seed=0)
        whole, less = recorder.releases[0], recorder.releases[2]
        assert less.expected_batch == pytest.approx(whole.expected_batch * 2 / 3)
        assert less.noise_std == pytest.approx(whole.noise_std * math.sqrt(2 / 3))
        assert recorder.releases[3].expected_batch == whole.expected_batch, "it came back"

    @pytest.mark.parametrize("courier", [Tampering, Replaying])
    def test_replies_that_were_changed_or_kept_are_found(self, courier: type[Failing]) -> None:
        with pytest.raises(Refusal, match="party p1: message: its seal"):
            fitted(Federation(courier(parties_of(3, 100))))

    @pytest.mark.parametrize(
        "facts",
        [
            {"shape": [10**9, 10**9]},
            {"shape": [-3]},
            {"shape": [3.7]},
            {"protocol": "\x1b[2J"},
            {"schema": {"records": 10**30}},
            {"schema": None},
            {"peers": 5},
            {"least_noise": "much"},
        ],
        ids=str,
    )
    def test_facts_that_are_none_are_one_sentence_with_a_name(self, facts: dict[str, Any]) -> None:
        with pytest.raises(Refusal, match=r"^party p1: [ -~]*$"):
            Federation(Lying(parties_of(3, 50), -2, {"facts": facts}))

    @pytest.mark.parametrize(
        "header",
        [{"refused": "no", "budget": ["a", 1, []]}, {"refused": {"a": 1}}, {"refused": "\x1b[31mred\nand new lines"}],
        ids=str,
    )
    def test_a_refusal_that_is_none_is_one_sentence_with_a_name(self, header: dict[str, Any]) -> None:
        with pytest.raises(Refusal, match=r"^party p1: [ -~]*$"):
            Federation(Lying(parties_of(3, 50), -2, header))

    @pytest.mark.parametrize(
        "change",
        [
            lambda value: value * math.nan,
            lambda value: value * math.inf,
            lambda value: value[:-1],
            lambda value: value[None],
            lambda value: torch.cat([value, value]),
            lambda value: value.double(),
        ],
    )
    def test_answers_that_are_none_end_the_run_with_a_name(self, change: Any) -> None:
        with pytest.raises(Refusal, match=r"^party p1: "):
            fitted(Federation(Lying(parties_of(3, 50), 2, {}, change)))

    @pytest.mark.parametrize("std", [0.0, -1.0, 1e9, "1", None, True])
    def test_noise_that_is_none_of_what_was_asked_ends_the_run(self, std: Any) -> None:
        with pytest.raises(Refusal, match=r"^party p1: says that its noise"):
            fitted(Federation(Lying(parties_of(3, 50), 2, {"std": std})))

    def test_without_the_seal_they_would_not_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Planted: seals are not compared. The tampered number is then learnt from."""
        monkeypatch.setattr("confide.federated.wire.hmac.compare_digest", lambda *_: True)
        fitted(Federation(Tampering(parties_of(3, 100))))

    def test_a_party_that_forgot_the_run_is_told_again(self) -> None:
        parties = parties_of(2, 100)

        class Forgetting(Failing):
            def changed(self, replies: dict[str, bytes]) -> dict[str, bytes]:
                parties["p1"]._runs.clear()
                return replies

        fitted(Federation(Forgetting(parties)), steps=6)
        assert len(parties["p1"].ledger.entries()) == 1

    def test_keys_must_be_the_same(self) -> None:
        parties = parties_of(2, 100, key=b"a" * 32)
        with pytest.raises(Refusal, match="seal"):
            federation_of(parties)
        fitted(federation_of(parties, keys=dict.fromkeys(parties, b"a" * 32)), steps=2)


class TestRefusals:
    def test_networks_and_likelihoods_of_ones_own(self) -> None:
        data = federation_of(parties_of(2, 100))
        own = torch.nn.Sequential(torch.nn.Linear(3, 1))
        with pytest.raises(Refusal, match="code is not sent"):
            confide.fit(SGLD, own, data, plan_for(data))
        exchanged = confide.networks.mlp(3, 1, hidden=(4,))
        exchanged[0].weight.requires_grad_(False)
        with pytest.raises(Refusal, match="recipe"):
            confide.fit(SGLD, exchanged, data, plan_for(data))

    def test_methods_that_parties_do_not_know(self) -> None:
        data = federation_of(parties_of(2, 100))
        with pytest.raises(Refusal, match="parties know"):
            confide.fit(confide.methods.MCDropout(), confide.networks.logistic(3), data, plan_for(data))

    @pytest.mark.parametrize("options", [{"sampling": "shuffle"}, {"private": False, "noise_multiplier": None}])
    def test_other_samplings_and_no_noise(self, options: dict[str, object]) -> None:
        data = federation_of(parties_of(2, 100))
        goal = {"noise_multiplier": 1.0, **options}
        plan = confide.plan(delta=1e-5, records=200, batch=20, steps=4, adjacency="replace-one", **goal)
        with pytest.raises(Refusal, match="poisson or full-batch"):
            confide.fit(SGLD, confide.networks.logistic(3), data, plan)

    def test_facts_that_differ(self) -> None:
        parties = parties_of(2, 100)
        x, y = records_of(100, 5)
        schema = confide.Schema(classes=3, records=100)
        parties["p1"] = Party(x, y, schema=schema, ledger=confide.Ledger(), name="p1", least_noise=1)
        with pytest.raises(Refusal, match="p1: declares other facts than p0"):
            federation_of(parties)

    def test_checkpoints_and_draws(self, tmp_path) -> None:
        data = federation_of(parties_of(2, 100))
        with pytest.raises(Refusal, match="checkpoint"):
            confide.fit(SGLD, confide.networks.logistic(3), data, plan_for(data), checkpoint=tmp_path / "kept")

    def test_trust_and_missing(self) -> None:
        with pytest.raises(Refusal, match="trust"):
            federation_of(parties_of(2, 100), trust="everybody")
        with pytest.raises(Refusal, match="missing"):
            federation_of(parties_of(2, 100), missing=2)
