"""A server says in which state a method is: whatever it says, one record moves an answer by the clip and no more."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import confide
from confide.federated import Federation, InProcess, Party, wire
from confide.federated.wire import Message
from confide.mechanism.clipping.evenly import even_size
from confide.methods import SEP
from confide.privacy.ledger import Ledger
from tests.federated.problems import parties_of, records_of

ROWS, STEPS, RUN, NOISE = 65, 400, "r" * 32, 1e-4  # one more than a batch that needs no filling up
NETWORKS = {
    "one layer": lambda: confide.networks.logistic(3),
    "hidden": lambda: confide.networks.mlp(3, 2, hidden=(4,)),
}


@functools.cache
def honest(network: str) -> tuple[dict[str, Any], list[Message]]:
    """How a run is opened, and the steps of one: the first, and those about covariances and with a metric."""
    seen: list[Message] = []

    class Listening(Federation):
        def _asked(self, requests: Any) -> Any:
            seen.extend(requests.values())
            return super()._asked(requests)

    data = Listening(InProcess(parties_of(1, ROWS)))
    options: dict[str, Any] = {"records": ROWS, "batch": ROWS, "sampling": "full-batch"}
    plan = confide.plan(noise_multiplier=0.5, delta=1e-5, steps=6, **options)
    confide.fit(SEP(), NETWORKS[network](), data, plan, seed=0)
    opening = next(dict(one.header) for one in seen if one.header["ask"] == "open" and "try" not in one.header)
    mechanism = {**opening["own"][0][0], "noise_multiplier": NOISE}
    steps = [one for one in seen if one.header["ask"] == "answer"]
    return {**opening, "run": RUN, "own": [[mechanism, STEPS]]}, [steps[0], steps[1], steps[-1]]


def party(opening: dict[str, Any], rows: slice) -> Party:
    x, y = records_of(ROWS, seed=0)
    schema = confide.Schema(classes=2, records=ROWS)
    made = Party(x[rows], y[rows], schema=schema, ledger=Ledger(), name="own", least_noise=NOISE / 2)
    assert asked(made, Message(opening)).header == {"open": True}
    return made


def asked(party: Party, message: Message) -> Message:
    frame = wire.packed(message)
    return wire.unpacked(party.respond(frame), b"", wire.digest(frame))


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda value: value,
    "for each record": lambda value: torch.stack([value] * even_size(ROWS)),
    "for each row": lambda value: torch.stack([value] * even_size(ROWS, 32)),
    "for each of one fewer": lambda value: torch.stack([value] * even_size(ROWS - 1)),
    "for one": lambda value: value[None],
    "no numbers": lambda value: value * float("nan"),
    "huge": lambda value: value * 1e300,
    "large": lambda value: value * 1e6,
    "nothing": lambda value: value * 0,
    "none of them": lambda value: value[:0],
    "one number": lambda value: value.flatten()[:1],
    "twice": lambda value: torch.cat([value, value]),
    "another type": lambda value: value.float(),
    "turned": lambda value: value.mT if value.dim() == 2 else value.flip(0),
}


def furthest(network: str, changes: Collection[str] = tuple(CHANGES)) -> dict[str, float]:
    """By what one record less moves the answer, in clips, for every field of a state and every change of it."""
    opening, steps = honest(network)
    whole, fewer = party(opening, slice(None)), party(opening, slice(1, None))
    clip, found, number = opening["own"][0][0]["clip"], {}, 0
    for message in steps:
        for name in (name for name in message.tensors if name.startswith("state.")):
            for what in changes:
                number += 1
                tensors = {**message.tensors, name: CHANGES[what](message.tensors[name])}
                sent = Message({**message.header, "run": RUN, "step": number}, tensors)
                one, two = (asked(each, sent) for each in (whole, fewer))
                assert one.header.keys() == two.header.keys(), (name, what)  # nor is a refusal about records
                if "sum" in one.tensors:
                    moved = (one.tensors["sum"] - two.tensors["sum"]).norm() / clip
                    found[f"{number} {name} {what}"] = float(moved)
    return found


@pytest.mark.parametrize("network", NETWORKS)
def test_one_record_moves_an_answer_by_the_clip(network: str) -> None:
    found = furthest(network)
    assert len(found) > 30
    assert max(found.values()) < 1.01, max(found, key=lambda name: found[name])


def test_a_state_that_nobody_looks_at_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state for each record: with one record less no answer fits, and all records are gone from the sum."""

    def believed(like: Any, shapes: Any, plain: dict[str, Any], tensor: Any) -> Any:
        named = {name: tensor(f"state.{name}") if isinstance(value, dict) else value for name, value in plain.items()}
        return replace(like, **named)

    monkeypatch.setattr(wire, "state_from_message", believed)
    assert max(furthest("hidden", ["for each record"]).values()) > 10


@pytest.mark.parametrize("said", [{"step": True}, {"step": 1.5}, {"reach": "1"}, {"theta": None}, {"precision": {}}])
def test_values_of_other_types_are_refused(said: dict[str, Any]) -> None:
    opening, steps = honest("hidden")
    header = {**steps[-1].header, "run": RUN, "step": 1}
    sent = Message({**header, "state": {**header["state"], **said}}, steps[-1].tensors)
    assert "must be of" in asked(party(opening, slice(None)), sent).header["refused"]


def test_a_network_whose_question_would_fill_the_memory_is_refused() -> None:
    opening, _ = honest("hidden")
    recipe = {**opening["question"]["network"]["recipe"], "hidden": [4000, 4000]}
    question = {**opening["question"], "network": {**opening["question"]["network"], "recipe": recipe}}
    x, y = records_of(ROWS, seed=0)
    schema = confide.Schema(classes=2, records=ROWS)
    made = Party(x, y, schema=schema, ledger=Ledger(), name="own", least_noise=NOISE / 2)
    assert "at most 4194304" in asked(made, Message({**opening, "question": question})).header["refused"]
