"""trust="sum": one release from a roster, shares of noise that add up, and servers, parties or couriers that fail."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import confide
from confide.errors import PartyLost, Refusal
from confide.federated import Federation, InProcess, Party, Peers, wire
from confide.federated.peers import new_secret, public_of
from confide.federated.wire import Message
from confide.mechanism.secure import lattice_for
from confide.privacy.ledger import Ledger
from confide.sources.replay import Recorder
from tests.federated.problems import plan_for, records_of

SGLD = confide.methods.SGLD()


def peered(
    count: int, rows: int = 200, missing: int = 0, colluding: int = 0, seed: int | None = None
) -> dict[str, Party]:
    secrets = {f"p{place}": new_secret() for place in range(count)}
    public = {name: public_of(secret) for name, secret in secrets.items()}
    found = {}
    for place, (name, secret) in enumerate(secrets.items()):
        x, y = records_of(rows, seed=place)
        found[name] = Party(
            x,
            y,
            schema=confide.Schema(classes=2, records=rows),
            ledger=Ledger(),
            name=name,
            least_noise=0.3,
            peers=Peers(public, secret, missing, colluding),
            seed=None if seed is None else seed + place,
        )
    return found


class Unreliable(InProcess):
    """A courier that loses replies: at each step, those of the parties named for it."""

    def __init__(self, parties: Mapping[str, Party], lost: Mapping[int, set[str]]) -> None:
        super().__init__(parties)
        self.lost = lost

    def exchange(self, frames: Mapping[str, bytes]) -> dict[str, bytes]:
        replies = super().exchange(frames)
        header = wire.unpacked(next(iter(frames.values()))).header
        gone = self.lost.get(header.get("step", self.pinged), set())
        self.pinged = header.get("step", self.pinged)
        return {name: reply for name, reply in replies.items() if name not in gone}

    pinged = 0


def fitted(data: Federation, steps: int = 10, **options: Any) -> tuple[confide.Run, Recorder]:
    recorder = Recorder(data)
    plan = plan_for(data, steps, **options)
    return confide.fit(SGLD, confide.networks.logistic(3), recorder, plan, seed=0), recorder


class TestFit:
    @pytest.mark.parametrize("method", [SGLD, confide.methods.SGD(), confide.methods.SEP()], ids=lambda one: one.name)
    def test_methods_learn(self, method: confide.methods.Method) -> None:
        data = Federation(InProcess(peered(4, 400, colluding=1, seed=3)), trust="sum")
        run = confide.fit(method, confide.networks.logistic(3), data, plan_for(data, 40, noise=None, epsilon=4), seed=0)
        x, y = records_of(500, seed=99)
        assert float(((run.posterior.predict(x).probabilities[:, 1] > 0.5) == y.bool()).double().mean()) > 0.8

    def test_the_price_is_that_of_a_trusted_server(self) -> None:
        parties = peered(4, colluding=1)
        run, recorder = fitted(Federation(InProcess(parties), trust="sum"))
        plan = plan_for(recorder, 10)
        assert run.privacy.events == plan.events()
        for name, party in parties.items():
            assert party.ledger.events(name) == plan.events()
        lattice = lattice_for(plan.mechanism, 4)
        assert recorder.releases[0].noise_std == pytest.approx(lattice.std * (4 / 3) ** 0.5)
        assert run.plan.mechanism.noise_std == pytest.approx(recorder.releases[0].noise_std, rel=1e-5)

    def test_the_statement_says_who_is_trusted(self) -> None:
        text = fitted(Federation(InProcess(peered(3, missing=1, colluding=1)), trust="sum"), 2)[0].privacy.statement()
        assert "at most 1 told the server" in text
        assert "trust: sum" in text

    def test_the_sum_is_that_of_all_records(self) -> None:
        """Against the clipped gradients of the pooled records, with noise that is known to be small beside them."""
        data = Federation(InProcess(peered(3, 200, seed=1)), trust="sum")
        recorder = Recorder(data)
        plan = confide.plan(noise_multiplier=0.3, delta=1e-5, records=600, steps=1, sampling="full-batch", clip=1)
        confide.fit(SGLD, confide.networks.logistic(3), recorder, plan, seed=0)
        x, y = (torch.cat(parts) for parts in zip(*(records_of(200, seed=place) for place in range(3)), strict=True))
        rows = (torch.sigmoid(torch.zeros(600)) - y)[:, None] * torch.cat([x, torch.ones(600, 1)], 1)
        rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1)
        assert recorder.releases[0].sum == pytest.approx(rows.sum(0), abs=5 * 0.3)


class TestMissing:
    def test_a_missing_party_spoils_the_step_and_a_spare_one_is_asked(self) -> None:
        parties = peered(4, missing=1)
        data = Federation(Unreliable(parties, {3: {"p2"}, 4: {"p2"}}), trust="sum", spare=2)
        run, recorder = fitted(data, 6)
        assert [release.expected_batch for release in recorder.releases[:2]] == [100, 100]
        assert recorder.releases[2].expected_batch == pytest.approx(75)
        assert recorder.releases[-1].expected_batch == 100, "it came back"
        assert sum(event.count for event in run.privacy.events) == 8, "spare steps are paid for"
        assert parties["p0"].ledger.events("p0") == run.privacy.events

    def test_within_the_target(self) -> None:
        data = Federation(InProcess(peered(3, missing=1)), trust="sum", spare=5)
        run, _ = fitted(data, 6, noise=None, epsilon=1)
        assert run.privacy.epsilon() <= 1

    def test_without_a_spare_step_nothing_is_released(self) -> None:
        data = Federation(Unreliable(peered(4, missing=1), {6: {"p1"}}), trust="sum")
        with pytest.raises(PartyLost, match="spare steps are used up"):
            fitted(data, 6)

    def test_fewer_than_agreed_means_no_release(self) -> None:
        data = Federation(Unreliable(peered(4, missing=1), {3: {"p1", "p2"}, 4: {"p1", "p2"}}), trust="sum", spare=9)
        with pytest.raises(PartyLost, match="no answer from p1, p2, and 1 may be missing"):
            fitted(data, 6)


def asked(party: Party, header: dict[str, Any], **tensors: torch.Tensor) -> Message:
    frame = wire.packed(Message(header, tensors))
    return wire.unpacked(party.respond(frame), b"", wire.digest(frame))


class Watching(InProcess):
    """A courier that keeps the requests."""

    def __init__(self, parties: Mapping[str, Party]) -> None:
        super().__init__(parties)
        self.seen: list[dict[str, Any]] = []

    def exchange(self, frames: Mapping[str, bytes]) -> dict[str, bytes]:
        self.seen.append(dict(wire.unpacked(next(iter(frames.values()))).header))
        return super().exchange(frames)


class TestServersThatCheat:
    @pytest.fixture
    def parties(self) -> dict[str, Party]:
        return peered(4, missing=1)

    @pytest.fixture
    def opening(self, parties: dict[str, Party]) -> dict[str, Any]:
        courier = Watching(parties)
        fitted(Federation(courier, trust="sum"), 2)
        (found,) = [header for header in courier.seen if header["ask"] == "open" and "try" not in header]
        return {**found, "run": "r" * 32}

    def step(self, party: Party, roster: Any) -> str:
        header = {"ask": "answer", "run": "r" * 32, "step": 1, "roster": roster}
        return str(asked(party, header, position=torch.zeros(4)).header.get("refused", "answered"))

    @pytest.mark.parametrize(
        "roster",
        [
            ["p0"],
            ["p0", "p1"],
            ["p1", "p2", "p3"],
            ["p0", "p0", "p1", "p2"],
            ["p2", "p1", "p0"],
            ["p0", "p1", "made-up"],
            "p0,p1,p2",
            None,
            [1, 2, 3],
        ],
    )
    def test_rosters_that_were_not_agreed_on(self, parties: Any, opening: Any, roster: Any) -> None:
        asked(parties["p0"], opening)
        assert "roster" in self.step(parties["p0"], roster)
        assert self.step(parties["p0"], ["p0", "p1", "p2"]) == "answered", "a refusal costs no step"
        assert "answered before" in self.step(parties["p0"], ["p0", "p1", "p3"]), "and another roster is a replay"

    def test_other_numbers_of_parties(self, parties: Any, opening: Any) -> None:
        """Made-up parties would make everybody's share small."""
        many = [f"p{place}" for place in range(100)]
        for shares in ({"parties": many, "missing": 1, "colluding": 0}, None, {**opening["shares"], "missing": 0}):
            assert "shares" in asked(parties["p0"], {**opening, "shares": shares}).header["refused"]

    def test_answers_to_different_rosters_do_not_add_up(self, parties: Any, opening: Any) -> None:
        position = torch.zeros(4)
        parts = []
        for name, roster in (("p0", ["p0", "p1", "p2"]), ("p1", ["p0", "p1", "p2"]), ("p2", ["p0", "p1", "p2", "p3"])):
            asked(parties[name], opening)
            header = {"ask": "answer", "run": "r" * 32, "step": 1, "roster": roster}
            parts.append(asked(parties[name], header, position=position).tensors["sum"])
        total = sum(part.numpy().view("uint64") for part in parts)
        assert abs(total.view("int64").astype(float)).min() > 2.0**40, "no sum of records is as large as what is left"

    def summed(self, parties: Any, openings: dict[str, Any], positions: dict[str, torch.Tensor]) -> float:
        """The smallest number of what a server can add up."""
        parts = []
        for name in sorted(parties):
            assert asked(parties[name], openings[name]).header == {"open": True}
            header = {"ask": "answer", "run": "r" * 32, "step": 1, "roster": sorted(parties)}
            parts.append(asked(parties[name], header, position=positions[name]).tensors["sum"])
        total = sum(part.numpy().view("uint64") for part in parts)
        return float(abs(total.view("int64").astype(float)).max())

    def told_apart(self, parties: Any, opening: dict[str, Any], change: str) -> float:
        """p0 is told something else than the others, who would count their noise in other units."""
        other = copy.deepcopy(opening)
        positions = dict.fromkeys(parties, torch.zeros(4))
        if change == "clip":
            other["own"][0][0]["clip"] *= 1.99
        elif change == "noise":
            other["own"][0][0]["noise_multiplier"] *= 4
        elif change == "records":
            other["question"]["plan"]["blocks"][0][0]["records"] *= 1 << 12
        elif change == "position":
            positions["p0"] = torch.ones(4)
        openings = {name: other if name == "p0" else opening for name in parties}
        return self.summed(parties, openings, positions)

    @pytest.mark.parametrize("change", ["clip", "noise", "records", "position"])
    def test_parties_that_were_told_apart_give_nothing(self, parties: Any, opening: Any, change: str) -> None:
        """Else p0's records would be hidden by the noise of the others in smaller units than it has paid for."""
        assert self.told_apart(parties, opening, change) > 2.0**55

    def test_told_alike_they_add_up(self, parties: Any, opening: Any) -> None:
        assert self.told_apart(parties, opening, "") < 2.0**40

    def test_masks_that_do_not_know_what_was_asked_are_caught(
        self, parties: Any, opening: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Planted: masks by run, step and roster alone. The sum can then be read."""
        plain = Peers.masks
        monkeypatch.setattr(Peers, "masks", lambda self, run, step, roster, _: plain(self, run, step, roster))
        assert self.told_apart(parties, opening, "clip") < 2.0**40

    def test_less_noise(self, parties: Any, opening: Any) -> None:
        opening["own"][0][0]["noise_multiplier"] = 0.2
        assert "floor" in asked(parties["p0"], opening).header["refused"]


class TestPeers:
    def test_a_file(self, tmp_path: Path) -> None:
        secrets = [new_secret() for _ in range(2)]
        lines = "\n".join(f'h{place} = "{public_of(secret).hex()}"' for place, secret in enumerate(secrets))
        path = tmp_path / "peers.toml"
        path.write_text(f"missing = 0\ncolluding = 1\n[parties]\n{lines}\n")
        found = Peers.from_toml(path, secrets[1])
        assert (found.own, found.shares.counted) == ("h1", 1)
        assert secrets[1].hex() not in repr(found)
        with pytest.raises(Refusal, match="none has the public key"):
            Peers.from_toml(path, new_secret())
        path.write_text(f"surprise = 1\n[parties]\n{lines}\n")
        with pytest.raises(Refusal, match="nothing else"):
            Peers.from_toml(path, secrets[0])
        for text in ("", "[parties]\na = 3\n", "[parties]\na = 'zz'\n", "not toml"):
            path.write_text(text)
            with pytest.raises(Refusal, match="peers="):
                Peers.from_toml(path, secrets[0])

    def test_keys_that_are_none(self) -> None:
        secret = new_secret()
        with pytest.raises(Refusal, match="32 bytes"):
            Peers({"a": public_of(secret), "b": b"short"}, secret)
        with pytest.raises(Refusal, match="same key"):
            Peers({"a": public_of(secret), "b": public_of(secret)}, secret)
        with pytest.raises(Refusal, match="X25519"):
            Peers({"a": public_of(secret), "b": bytes(32)}, secret).masks("run", 1, ["a", "b"])

    def test_peers_that_differ(self) -> None:
        parties = peered(3)
        with pytest.raises(Refusal, match="other peers"):
            Federation(InProcess({name: parties[name] for name in ("p0", "p1")}), trust="sum")
        with pytest.raises(Refusal, match="call it by that name"):
            Federation(InProcess({"q0": parties["p0"], "p1": parties["p1"], "p2": parties["p2"]}), trust="sum")

    def test_parties_without_peers(self) -> None:
        from tests.federated.problems import parties_of

        with pytest.raises(Refusal, match="no peers"):
            Federation(InProcess(parties_of(2, 50)), trust="sum")


class TestClients:
    def plan(self, data: Federation, noise: float) -> confide.Plan:
        return confide.plan(
            noise_multiplier=noise, delta=0.01, records=data.schema.records, steps=3, sampling="full-batch", clip=1
        )

    def test_ten_hospitals_are_refused_with_the_number(self) -> None:
        data = Federation(InProcess(peered(10, 20)), trust="sum", level="client")
        plan = confide.plan(epsilon=1, delta=0.01, records=200, steps=20, sampling="full-batch")
        with pytest.raises(Refusal, match=r"with 10 parties .* is 0\.8\d of"):
            confide.fit(SGLD, confide.networks.logistic(3), data, plan)

    @pytest.mark.parametrize("trust", ["nobody", "sum"])
    def test_many_parties_each_answer_as_one(self, trust: Any) -> None:
        parties = peered(40, 5, seed=1)
        data = Federation(InProcess(parties), trust=trust, level="client")
        recorder = Recorder(data)
        run = confide.fit(SGLD, confide.networks.logistic(3), recorder, self.plan(data, 0.5), seed=0)
        std = 0.5 * (200 / 40) * (40**0.5 if trust == "nobody" else 1)
        assert recorder.releases[0].noise_std == pytest.approx(std, rel=1e-4)
        assert run.plan.mechanism.noise_std == pytest.approx(std, rel=1e-4)
        assert recorder.releases[0].expected_batch == 200
        assert "level: client" in run.privacy.statement()
        assert run.privacy.events == self.plan(data, 0.5).events()

    def test_a_party_with_many_records_moves_the_sum_by_no_more_than_the_clip(self) -> None:
        """A thousand records that all point one way, declared as two: still one answer of norm 1 at most."""
        data = confide.PrivateData(
            torch.full((1000, 3), 1.0), torch.ones(1000), schema=confide.Schema(classes=2, records=2), seed=0
        )
        network = confide.networks.logistic(3)
        likelihood = confide.likelihoods.Bernoulli()
        from confide.mechanism.gaussian import SampledGaussian
        from confide.sources.queries import GradientQuery

        mechanism = SampledGaussian(1e-3, 1.0, 1.0, 2, "full-batch")
        receipt = data.charge([(mechanism, 1)])
        total, std = data.answer_as_one(GradientQuery(network, likelihood.loss), mechanism, receipt, 2)
        assert std == pytest.approx(1e-3, rel=1e-4)
        assert float(total.norm()) == pytest.approx(1.0, abs=0.01)

    def test_samples_of_parties_are_refused(self) -> None:
        data = Federation(InProcess(peered(3, 20)), trust="sum", level="client")
        with pytest.raises(Refusal, match="no sample"):
            confide.fit(SGLD, confide.networks.logistic(3), data, plan_for(data, batch=10))
        with pytest.raises(Refusal, match="level"):
            Federation(InProcess(peered(3, 20)), level="owner")
