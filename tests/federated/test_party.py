"""A party keeps to its owner's terms, whatever a server asks, and across restarts."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import confide
from confide.errors import BudgetExceeded, Refusal
from confide.federated import InProcess, Party, wire
from confide.federated.federation import Federation
from confide.federated.wire import Message
from confide.mechanism.secure import lattice_for
from confide.privacy.ledger import Ledger
from confide.sources.private_data import PrivateData
from tests.federated.problems import federation_of, parties_of, plan_for, records_of


def asked(party: Party, header: dict[str, Any], **tensors: torch.Tensor) -> Message:
    frame = wire.packed(Message(header, tensors))
    return wire.unpacked(party.respond(frame), b"", wire.digest(frame))


def opening() -> dict[str, Any]:
    """What an honest server would send to open a run."""
    return copy.deepcopy(_opening())


@functools.cache
def _opening() -> dict[str, Any]:
    seen: list[dict[str, Any]] = []

    class Listening(Federation):
        def _everybody(self, request: Message) -> dict[str, Message]:
            seen.append(dict(request.header))
            return super()._everybody(request)

    data = Listening(InProcess(parties_of(1, 50)))
    plan = confide.plan(**PLAN)
    confide.fit(confide.methods.SGLD(), confide.networks.logistic(3), data, plan, seed=0)
    return {**seen[-1], "run": "r" * 32}


def one(ledger: Ledger | Path | None = None, **options: Any) -> Party:
    x, y = records_of(50, seed=0)
    settings = {"schema": confide.Schema(classes=2, records=50), "name": "own", "least_noise": 0.5, **options}
    return Party(x, y, ledger=ledger or Ledger(), **settings)


def step(number: int, **changes: Any) -> dict[str, Any]:
    return {"ask": "answer", "run": "r" * 32, "step": number, **changes}


POSITION = torch.zeros(4)
PLAN: dict[str, Any] = {"delta": 1e-5, "records": 50, "batch": 10, "steps": 5, "noise_multiplier": 1.0}


class TestReplays:
    def check(self, party: Party, again: Callable[[], Party] | None = None) -> None:
        """Refused: the same step, also by a party that was started again."""
        assert asked(party, opening()).header == {"open": True}
        assert "sum" in asked(party, step(1), position=POSITION).tensors
        party = again() if again is not None else party
        asked(party, opening())
        assert "answered before" in asked(party, step(1), position=POSITION).header["refused"]
        assert "sum" in asked(party, step(2), position=POSITION).tensors

    def test_a_step_is_answered_once(self) -> None:
        self.check(one())

    def test_also_after_a_restart(self, tmp_path: Path) -> None:
        path = tmp_path / "own.db"
        party = one(path)
        self.check(party, lambda: one(path))
        assert len(Ledger(path).entries()) == 1, "a run that is opened again is not paid for again"

    def test_a_party_that_forgets_is_caught(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Planted: steps are not claimed, so that a replay is answered with fresh noise at the price of one."""
        plain = PrivateData.charge

        def unclaimed(self: Any, parts: Any, purpose: str = "", stretch: Any = None) -> Any:
            if stretch is not None and stretch.claim is not None:
                return plain(self, stretch.parts, purpose)
            return plain(self, parts, purpose, stretch)

        monkeypatch.setattr(PrivateData, "charge", unclaimed)
        with pytest.raises(KeyError):
            self.check(one())

    def test_steps_may_be_left_out_and_taken_up_in_any_order(self) -> None:
        party = one()
        asked(party, opening())
        for number in (4, 1, 5):
            assert "sum" in asked(party, step(number), position=POSITION).tensors

    def test_the_last_step_is_the_last(self) -> None:
        party = one()
        asked(party, opening())
        assert "fewer steps" in asked(party, step(6), position=POSITION).header["refused"]


class TestTerms:
    @pytest.mark.parametrize("noise", [0.49, 1e-9])
    def test_less_noise_than_the_floor_is_refused_and_costs_nothing(self, noise: float) -> None:
        party = one()
        low = opening()
        low["own"][0][0]["noise_multiplier"] = noise
        assert "floor" in asked(party, low).header["refused"]
        assert party.ledger.entries() == ()
        assert asked(party, step(1), position=POSITION).header == {"unknown": "unknown run"}

    @pytest.mark.parametrize(
        "change",
        [
            {"private": False, "noise_multiplier": 0.0},
            {"sampling": "fixed-size", "rate": 0.2},
            {"sampling": "shuffle", "rate": 0.2},
            {"clip": 0.0},
            {"clip": 1e400},
            {"noise_multiplier": "1"},
            {"noise_multiplier": -1.0},
            {"rate": 2.0},
            {"surprise": 1},
        ],
    )
    def test_other_mechanisms_are_refused(self, change: dict[str, Any]) -> None:
        party = one()
        bad = opening()
        bad["own"][0][0].update(change)
        if change.get("clip") == 1e400:
            with pytest.raises(ValueError):
                asked(party, bad)  # JSON has no infinity
            return
        assert "own: " in asked(party, bad).header["refused"]
        assert party.ledger.entries() == ()

    def test_a_run_that_is_opened_again_with_less_noise_is_refused(self) -> None:
        """A server that lowers the noise after the party has paid for more."""
        party = one()
        asked(party, opening())
        low = opening()
        low["own"][0][0]["noise_multiplier"] = 0.6
        assert "another plan" in asked(party, low).header["refused"]

    @pytest.mark.parametrize("change", ["network", "level", "clip", "method"])
    def test_a_run_that_is_opened_again_with_another_question_is_refused(self, tmp_path: Path, change: str) -> None:
        """At the same price: what was asked before the restart is not what is asked after it."""
        path = tmp_path / "own.db"
        whole = opening()
        whole["own"][0][0].update(sampling="full-batch", rate=1.0)
        asked(one(path), whole)
        party = one(path)
        other = copy.deepcopy(whole)
        if change == "network":
            other["question"]["network"]["recipe"]["hidden"] = [4]
        elif change == "level":
            other["level"] = "client"
        elif change == "clip":
            other["own"][0][0]["clip"] *= 2
        else:
            other["question"]["method"]["name"] = "sgd"
            other["question"]["method"]["settings"] = {}
        assert "opened with another question" in asked(party, other).header["refused"]
        assert asked(party, whole).header == {"open": True}

    def test_answers_are_on_a_lattice_whatever_the_server_says(self) -> None:
        """It sees every bit of them: floating-point noise would tell by which numbers it can reach."""
        party = one()
        asked(party, opening())
        found = asked(party, step(1), position=POSITION).tensors["sum"].double()
        places = found / lattice_for(confide.plan(**PLAN).mechanism, 4).spacing
        assert torch.equal(places, places.round())

    @pytest.mark.parametrize("change", [{"clip": 1e-44}, {"clip": 1e300}, {"clip": 10**400}, {"rate": 1e-300}])
    def test_numbers_at_which_arithmetic_gives_way_are_refused(self, change: dict[str, Any]) -> None:
        party = one()
        bad = opening()
        bad["own"][0][0].update(change)
        assert "refused" in asked(party, bad).header
        assert party.ledger.entries() == ()

    def test_many_blocks_are_refused_before_they_are_priced(self) -> None:
        bad = opening()
        bad["own"] = bad["own"] * 101
        assert "own: " in asked(one(), bad).header["refused"]

    def test_the_server_cannot_say_the_noise_of_a_step(self) -> None:
        party = one(seed=1)
        asked(party, opening())
        found = asked(party, step(1, noise_multiplier=0.0, own=[], clip=1e9), position=POSITION)
        assert found.header["std"] == pytest.approx(
            confide.plan(delta=1e-5, records=50, steps=1, noise_multiplier=1, sampling="full-batch").mechanism.noise_std
        )

    def test_the_ceiling_of_the_ledger_holds(self) -> None:
        ledger = Ledger()
        ledger.limit(0.5, 1e-5)
        party = one(ledger)
        found = asked(party, {**opening(), "try": True}).header
        assert "budget" in found
        assert "budget" in asked(party, opening()).header
        assert ledger.entries() == ()

    def test_a_floor_and_a_number_of_records_are_needed(self) -> None:
        with pytest.raises(Refusal, match="least_noise"):
            one(least_noise=0.0)
        with pytest.raises(Refusal, match="records"):
            one(schema=confide.Schema(classes=2))


class TestHostileQuestions:
    @pytest.mark.parametrize(
        ("path", "value"),
        [
            (("method", "name"), "os.system"),
            (("method", "name"), "em"),
            (("method", "settings"), {"prior": {"prior": "Evil", "scale": 1.0}}),
            (("method", "settings"), {"burn_in": [1]}),
            (("method", "settings"), None),
            (("network", "recipe"), {"features": 10**9, "outputs": 10**9}),
            (("network", "recipe"), {"features": 3, "outputs": 1, "hidden": [1] * 5000}),
            (("network", "recipe"), {"features": "3", "outputs": 1}),
            (("network", "recipe"), {"features": 7, "outputs": 1}),
            (("network", "numbers"), "object"),
            (("likelihood",), {"name": "__import__"}),
            (("likelihood",), {"name": "bernoulli", "evil": 1}),
            (("plan", "blocks"), []),
            (("plan", "blocks"), [[{}, 5]]),
            (("plan", "delta"), 2),
        ],
    )
    def test_are_refused_in_a_sentence_and_cost_nothing(self, path: tuple[str, ...], value: Any) -> None:
        party = one()
        bad = opening()
        place = bad["question"]
        for word in path[:-1]:
            place = place[word]
        place[path[-1]] = value
        said = asked(party, bad).header["refused"]
        assert "could not answer" not in said
        assert party.ledger.entries() == ()

    @pytest.mark.parametrize(
        "header", [{}, {"ask": "records"}, {"ask": 3}, {"ask": "answer"}, {"ask": "open", "run": "x"}, {"ask": "open"}]
    )
    def test_bad_messages_are_one_sentence(self, header: dict[str, Any]) -> None:
        assert asked(one(), header).header["refused"].startswith(("message: ", "question"))

    def test_a_position_of_another_size_costs_nothing(self) -> None:
        party = one()
        asked(party, opening())
        assert "position" in asked(party, step(1), position=torch.zeros(5)).header["refused"]
        assert "sum" in asked(party, step(1), position=POSITION).tensors

    def test_positions_that_are_no_numbers_are_answered_by_noise(self) -> None:
        """What a gradient becomes there is nobody's business: such a record counts as zero."""
        party = one(seed=0)
        asked(party, opening())
        found = asked(party, step(1), position=torch.full((4,), float("nan")))
        assert bool(torch.isfinite(found.tensors["sum"]).all())

    def test_an_error_nobody_foresaw_tells_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        party = one()

        def breaks(_: Message) -> Message:
            raise KeyError("a secret of record 7")

        party._answers["facts"] = breaks
        assert "secret" not in str(asked(party, {"ask": "facts"}).header)
        assert "secret" not in capsys.readouterr().err


def test_a_refusal_of_one_party_costs_the_others_nothing() -> None:
    poor = Ledger()
    poor.limit(0.1, 1e-5)
    parties = parties_of(3, 400, ledgers={"p1": poor})
    data = federation_of(parties)
    with pytest.raises(BudgetExceeded, match="party p1"):
        confide.fit(confide.methods.SGLD(), confide.networks.logistic(3), data, plan_for(data))
    assert all(party.ledger.entries() == () for party in parties.values())


def test_a_party_that_dies_between_the_claim_and_the_reply_has_answered(tmp_path: Path) -> None:
    """Whether the answer left is not known to a restart, so it counts as answered; the run goes on with the next."""
    path = tmp_path / "own.db"
    party = one(path)
    asked(party, opening())

    def dies(*_: Any) -> Any:
        raise SystemExit

    party._data.answer = dies  # type: ignore[method-assign, assignment]
    with pytest.raises(SystemExit):
        asked(party, step(1), position=POSITION)
    again = one(path)
    asked(again, opening())
    assert "answered before" in asked(again, step(1), position=POSITION).header["refused"]
    assert "sum" in asked(again, step(2), position=POSITION).tensors
    assert len(Ledger(path).entries()) == 1


def test_two_servers_at_once_pay_each_for_theirs() -> None:
    """Threads of two servers, each with a run of its own; a third that knows the first one's run has what is left."""
    party = one()
    answered: list[tuple[str, int]] = []

    def ask_all(run: str) -> None:
        asked(party, {**opening(), "run": run})
        for number in range(1, 6):
            if "sum" in asked(party, step(number, run=run), position=POSITION).tensors:
                answered.append((run, number))

    threads = [threading.Thread(target=ask_all, args=(name * 32,)) for name in "aba"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answered) == [(name * 32, number) for name in "ab" for number in range(1, 6)]
    assert len(party.ledger.entries()) == 2
