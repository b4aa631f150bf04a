"""Records of several tensors: what is taken, what is kept of it, and what counts as zero."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import confide
from confide.data import Input, Schema, trees
from confide.data.fingerprint import fingerprint, sketch
from confide.errors import DataError, Refusal

KEY = b"a key of the tests, 32 bytes long"


def record_tree() -> dict[str, Any]:
    return {
        "ids": np.array([[1, 2], [3, 9], [0, -1], [4, 4]]),
        "mask": torch.tensor([[True, True], [True, False], [True, True], [True, True]]),
        "pixels": np.array([[0.5, 2.0], [0.1, 0.2], [0.3, 0.4], [np.nan, 0.0]]),
    }


def test_types_are_kept_and_ids_outside_of_the_vocabulary_take_their_record_out() -> None:
    said = Schema(inputs={"ids": Input(vocabulary=5), "pixels": Input(bounds=(0, 1))}).inputs
    kept, usable = trees.checked(trees.tree_of(record_tree()), said)
    assert isinstance(kept, dict)
    assert usable.tolist() == [True, False, False, False]
    assert [kept[name].dtype for name in kept] == [torch.int64, torch.bool, torch.float64]
    assert kept["pixels"].tolist() == [[0.5, 1.0], [0.1, 0.2], [0.3, 0.4], [0.0, 0.0]]


def test_columns_of_categories_have_a_vocabulary_each() -> None:
    """One vocabulary for both would let the second column's highest id through, or take good records out."""
    ids = torch.tensor([[3, 2], [2, 3], [4, 0], [0, 0]])
    said = Schema(inputs=Input(vocabulary=(4, 3))).inputs
    assert trees.checked(ids, said)[1].tolist() == [True, False, False, True]
    assert trees.made_up(ids, said).tolist() == [[0, 0], [3, 2]]
    drawn = trees.scattered(ids, said, 500)
    assert isinstance(drawn, torch.Tensor)
    assert drawn.amax(0).tolist() == [3, 2]
    schema = Schema(inputs={"kinds": Input(vocabulary=(4, 3))})
    assert Schema.from_dict(json.loads(json.dumps(schema.to_dict()))) == schema
    assert schema.public_facts()[-1].value == "ids below 4, 3"
    with pytest.raises(Refusal, match="2 vocabularies"):
        trees.checked(ids.repeat(1, 2), said)
    for wrong in ((), (3, 0), (3, True), (2.0, 2)):
        with pytest.raises(DataError, match="vocabulary"):
            Input(vocabulary=wrong)  # type: ignore[arg-type]


def test_a_table_with_fewer_rows_than_ids_is_one_sentence_before_the_charge() -> None:
    class Kinds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Embedding(4, 2), torch.nn.Embedding(3, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.first(ids[:, 0]) + self.second(ids[:, 1])

    x, y = torch.zeros(8, 2, dtype=torch.long), torch.zeros(8, dtype=torch.long)
    plan = confide.plan(records=8, batch=4, steps=1, epsilon=10.0, delta=1e-2)
    data = confide.PrivateData(x, y, schema=Schema(records=8, classes=2, inputs=Input(vocabulary=4)))
    with pytest.raises(Refusal, match="0 has ids below 4"):
        confide.fit(confide.methods.SGLD(), Kinds(), data, plan)
    assert not data.ledger.entries()
    data = confide.PrivateData(x, y, schema=Schema(records=8, classes=2, inputs=Input(vocabulary=(4, 3))))
    confide.fit(confide.methods.SGLD(), Kinds(), data, plan)


class ByLength(torch.nn.Module):
    """Divides a record's sum by its declared length, which an assertion wants to be above zero."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3, 2)

    def forward(self, values: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        if (length < 1).any():
            raise ValueError("a length below one")
        return self.head(values) / length[:, None]


@pytest.mark.parametrize(
    ("module", "x", "said"),
    [
        (torch.nn.Linear(5, 2), torch.zeros(8, 3), r"RuntimeError \(mat1 and mat2 shapes"),
        (ByLength(), (torch.zeros(8, 3), torch.ones(8, dtype=torch.long)), r"ValueError \(a length below one"),
    ],
)
@pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning")  # a branch on values
def test_what_a_network_raises_about_made_up_records_is_one_sentence_before_the_charge(
    module: torch.nn.Module, x: Any, said: str
) -> None:
    plan = confide.plan(records=8, batch=4, steps=1, epsilon=10.0, delta=1e-2)
    data = confide.PrivateData(x, torch.zeros(8, dtype=torch.long), schema=Schema(records=8, classes=2))
    with pytest.raises(Refusal, match=rf"module, likelihood: raised {said}.* nothing was charged$") as refused:
        confide.fit(confide.methods.SGLD(), module, data, plan)
    assert refused.value.__cause__ is not None
    assert not data.ledger.entries()


def test_a_plain_tensor_is_the_simplest_tree() -> None:
    for tree in (torch.arange(6).reshape(3, 2), (torch.arange(3), torch.ones(3, 2)), {"a": torch.zeros(3)}):
        assert trees.size_of(tree) == 3
        assert trees.size_of(trees.rows_of(tree, slice(0, 2))) == 2
        assert trees.size_of(trees.rows_of(tree, torch.tensor([1]))) == 1
    assert trees.called(lambda one: ("one", one), 1) == ("one", 1)
    assert trees.called(lambda one, two: (two, one), (1, 2)) == (2, 1)
    assert trees.called(lambda *, one, two: (two, one), {"two": 2, "one": 1}) == (2, 1)


def test_a_tuple_of_rows_is_one_table_as_it_was() -> None:
    found = trees.tree_of(((1.0, 2.0), (3.0, 4.0)))
    assert isinstance(found, torch.Tensor)
    assert found.shape == (2, 2)


def test_made_up_records_stand_at_both_ends_of_what_is_declared() -> None:
    said = Schema(inputs={"ids": Input(vocabulary=5), "pixels": Input(bounds=(-1, 1))}).inputs
    made = trees.made_up(trees.tree_of(record_tree()), said)
    assert isinstance(made, dict)
    assert made["ids"].tolist() == [[0, 0], [4, 4]]
    assert made["pixels"].tolist() == [[-1, -1], [1, 1]]
    assert made["mask"].dtype == torch.bool


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ({"a": torch.zeros(3), "b": torch.zeros(4)}, "one row per record"),
        ({}, "0 tensors"),
        ({1: torch.zeros(3)}, "name each of them"),
        ({"a": np.array(["text"])}, "encode them"),
        (torch.tensor(1.0), "one row per record"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "ordinary tensor"),
    ],
)
def test_what_is_no_tree_of_records_is_refused(x: Any, words: str) -> None:
    with pytest.raises(Refusal, match=words):
        trees.tree_of(x)


def test_what_is_declared_must_be_there() -> None:
    tree = trees.tree_of(record_tree())
    with pytest.raises(Refusal, match="'words'"):
        trees.declared_for(tree, Schema(inputs={"words": Input(vocabulary=5)}).inputs)
    with pytest.raises(Refusal, match="whole numbers"):
        trees.declared_for(tree, Schema(inputs={"pixels": Input(vocabulary=5)}).inputs)
    for wrong in ({}, {"vocabulary": 3, "bounds": (0, 1)}, {"vocabulary": 0}, {"vocabulary": True}):
        with pytest.raises(DataError):
            Input(**wrong)
    with pytest.raises(DataError, match="inputs"):
        Schema(inputs={"ids": 5})
    with pytest.raises(DataError, match="give one"):
        Schema(inputs=Input(vocabulary=5), bounds=(0, 1))


def test_declared_inputs_survive_their_file_and_stand_in_the_report() -> None:
    schema = Schema(classes=2, inputs={"ids": Input(vocabulary=5), "pixels": Input(bounds=(0, 1))})
    assert Schema.from_dict(schema.to_dict()) == schema
    assert "inputs" not in Schema(classes=2).to_dict()
    assert {fact.fact: fact.value for fact in schema.public_facts()}["input ids"] == "ids below 5"
    assert Schema(inputs=[Input(vocabulary=2)]).inputs == (("0", Input(vocabulary=2)),)


def test_copies_of_a_tree_are_recognised() -> None:
    generator = torch.Generator().manual_seed(0)
    ids, y = torch.randint(0, 50, (40, 6), generator=generator), torch.zeros(40)
    mask = torch.ones(40, 6, dtype=torch.bool)
    one = sketch({"ids": ids, "mask": mask}, y, KEY)
    assert np.array_equal(one, sketch((ids.int(), mask), y, KEY))
    assert not np.array_equal(one, sketch((ids + 1, mask), y, KEY))
    assert fingerprint({"ids": ids, "mask": mask}, y, KEY) != fingerprint({"ids": ids + 1, "mask": mask}, y, KEY)


def test_nothing_of_a_tensor_of_ones_own_kind_comes_along() -> None:
    class Spy(torch.Tensor):
        seen: list[str] = []  # noqa: RUF012 - the spy of all of them

        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.seen.append(function.__name__)
            return super().__torch_function__(function, types, args, kwargs)

    given = torch.zeros(3, 2).as_subclass(Spy)
    Spy.seen.clear()
    kept, _ = trees.checked(trees.tree_of({"a": given}), ())
    assert isinstance(kept, dict)
    assert type(kept["a"]) is torch.Tensor
    assert not Spy.seen
