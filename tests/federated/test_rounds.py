"""Several steps of a party before it hears of the others: fewer messages, the same price, each step released once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import confide
from confide.errors import PartyLost, Refusal
from confide.federated import Federation, InProcess, Party, wire
from confide.federated.question import Inquiry
from confide.privacy.ledger import Ledger
from confide.sources.replay import Recorder
from tests.federated.problems import parties_of, plan_for, records_of

SEP, BBP = confide.methods.SEP(), confide.methods.BBP()


class Counting(InProcess):
    """Counts rounds of messages, and keeps the frames; a party can be away at one of them."""

    def __init__(self, parties: Mapping[str, Party], away: Mapping[int, str] | None = None) -> None:
        super().__init__(parties)
        self.frames: list[dict[str, bytes]] = []
        self.away = away or {}

    def exchange(self, frames: Mapping[str, bytes]) -> dict[str, bytes]:
        self.frames.append(dict(frames))
        gone = self.away.get(len(self.frames))
        return super().exchange({name: frame for name, frame in frames.items() if name != gone})


def halves(rows: int = 600) -> dict[str, Party]:
    """A curve, whose records are shared out by their first feature: the parties see different parts of it."""
    x = torch.rand(rows, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x = x[x[:, 0].argsort()]
    y = 0.5 * torch.sin(3 * x[:, 0]) - 0.3 * x[:, 1]
    return {
        f"h{k}": Party(
            x[rows // 2 * k : rows // 2 * (k + 1)],
            y[rows // 2 * k : rows // 2 * (k + 1)],
            schema=confide.Schema(records=rows // 2),
            ledger=Ledger(),
            name=f"h{k}",
            least_noise=0.01,
            seed=k,
        )
        for k in range(2)
    }


def error_of(run: confide.Run) -> float:
    x = torch.rand(500, 2, generator=torch.Generator().manual_seed(9)) * 2 - 1
    y = 0.5 * torch.sin(3 * x[:, 0]) - 0.3 * x[:, 1]
    found: Any = run.posterior.predict(x)
    return float((found.mean.flatten() - y).square().mean().sqrt())


def fitted(local: int, steps: int = 100) -> tuple[confide.Run, Counting]:
    courier = Counting(halves())
    plan = confide.plan(noise_multiplier=0.1, delta=1e-5, records=600, batch=300, steps=steps)
    network = confide.networks.mlp(2, 1, hidden=(8,), generator=torch.Generator().manual_seed(0))
    return confide.fit(SEP, network, Federation(courier, local=local), plan, seed=0), courier


def test_a_network_by_sep_in_a_third_of_the_messages() -> None:
    (one, often), (several, seldom) = fitted(1), fitted(100)
    assert len(seldom.frames) < 0.4 * len(often.frames)
    assert one.privacy.events == several.privacy.events
    assert error_of(several) < 1.3 * max(error_of(one), 0.05)
    assert error_of(several) < 0.15  # the curve has a deviation of about 0.4


def test_variational_inference_takes_the_others_to_be_where_they_were() -> None:
    parties = parties_of(3, 400)
    courier = Counting(parties)
    data = Federation(courier, local=10)
    plan = plan_for(data, steps=61, noise=None, epsilon=4)
    run = confide.fit(BBP, confide.networks.logistic(3), data, plan, seed=0)
    x, y = records_of(500, seed=99)
    found: Any = run.posterior.predict(x)
    assert float(((found.probabilities[:, 1] > 0.5) == y.bool()).double().mean()) > 0.8
    assert len(courier.frames) == 3 + 1 + 6  # facts, trial and payment; one step alone, then ten at a time
    for name, party in parties.items():
        assert party.ledger.claimed(str(party.ledger.entries()[0].run)) == 61
        assert party.ledger.events(name) == run.privacy.events


def test_a_party_that_is_away_misses_the_round_and_no_other() -> None:
    courier = Counting(parties_of(3, 400), away={5: "p1"})
    data = Federation(courier, local=10, missing=1)
    confide.fit(BBP, confide.networks.logistic(3), data, plan_for(data, steps=31), seed=0)
    courier = Counting(parties_of(3, 400), away={5: "p1"})
    data = Federation(courier, local=10)
    with pytest.raises(PartyLost, match="no answer from p1"):
        confide.fit(BBP, confide.networks.logistic(3), data, plan_for(data, steps=31), seed=0)


def test_a_round_is_answered_once_and_only_where_it_may_be() -> None:
    courier = Counting(parties_of(2, 100))
    data = Federation(courier, local=10)
    confide.fit(BBP, confide.networks.logistic(3), data, plan_for(data, steps=21), seed=0)
    frame = courier.frames[-1]["p0"]
    again = wire.unpacked(courier.exchange({"p0": frame})["p0"], b"", wire.digest(frame))
    assert again.header.get("replayed") is True
    asked = wire.unpacked(frame, b"")
    longer = wire.packed(wire.Message({**asked.header, "steps": 11, "step": 12}, asked.tensors), b"")
    told = wire.unpacked(courier.exchange({"p0": longer})["p0"], b"", wire.digest(longer))
    assert "refused" in told.header


def noise_is_fresh(sums: torch.Tensor) -> bool:
    """Variance 1, and steps that have nothing to do with each other, to five standard deviations."""
    variance = float(sums.square().mean()) - 1
    alike = float((sums[1:] * sums[:-1]).mean())
    return abs(variance) < 5 * math.sqrt(2 / sums.numel()) and abs(alike) < 5 / math.sqrt(sums.numel())


@pytest.mark.parametrize("planted", [False, True])
def test_every_step_of_a_round_has_noise_of_its_own(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = records_of(10, seed=0)
    schema = confide.Schema(classes=2, records=100)
    party = Party(x[:0], y[:0], schema=schema, ledger=Ledger(), name="p0", least_noise=0.5)
    if planted:  # a party that answers a round with one release over and over
        true, kept = confide.PrivateData.answer, list[Any]()

        def once(self: Any, *given: Any) -> Any:
            kept.append(true(self, *given))
            return kept[min(len(kept) - 1, 3)]

        monkeypatch.setattr(confide.PrivateData, "answer", once)
    data = Federation(InProcess({"p0": party}), local=500)
    recorder = Recorder(data)
    confide.fit(BBP, confide.networks.logistic(3), recorder, plan_for(data, steps=501), seed=0)
    seen = [release.sum / release.noise_std for release in recorder.releases]
    assert noise_is_fresh(torch.stack(seen)) is not planted


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"local": 0}, "local=0"),
        ({"local": 5, "trust": "sum"}, "whole noise"),
        ({"local": 5, "level": "client"}, "whole"),
    ],
)
def test_elsewhere_it_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal, match=words):
        Federation(InProcess(parties_of(2, 50)), **options)


def test_methods_say_how_long_a_party_may_be_alone() -> None:
    plan = confide.plan(noise_multiplier=1.0, delta=1e-5, records=600, batch=300, steps=100)
    network = confide.networks.mlp(2, 1, hidden=(8,))
    from confide.models.likelihoods import Gaussian

    problem = Inquiry(SEP, network.recipe, "float32", Gaussian(), plan).problem(confide.Schema(records=600))
    start = SEP.init(problem)
    assert SEP.steps_apart(problem, start) == 1, "moments of the inputs are everybody's"
    assert confide.methods.SGLD().steps_apart(problem, start) == 1
    assert math.isfinite(BBP.steps_apart(problem, start))
