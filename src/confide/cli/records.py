"""Where the records are, as typed: a file, an embedded set or a benchmark, with the facts that are public."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from confide.cli.paths import same_file
from confide.data import DataSet, Schema, catalogue, load_dataset, load_table
from confide.data.embedded import NAMES as EMBEDDED
from confide.data.loaders import load_parts
from confide.data.pictures import is_picture
from confide.data.schema import Task
from confide.data.table import Table
from confide.errors import CommandError
from confide.report.evaluation import PUBLIC, SEPARATE
from confide.workflow.request import Request

_DECLARE = (
    "declare the public facts in a file with --facts FILE.toml, or say with --assume-public that the ranges of the "
    "columns, the classes and the number of records are public"
)


@dataclass(frozen=True)
class Records:
    """The options that name the records, and whose word the public facts about them are."""

    train: str
    target: str | None
    test: Path | None
    facts: Path | None
    assume_public: bool
    directory: Path | None
    split: int | None
    task: Task | None
    more: tuple[str, ...] = ()  # further files of the same table

    @classmethod
    def of_parts(cls, typed: Sequence[str], *others: Any) -> Records:
        """From files as typed; a pattern that the shell has left alone stands for the files that it names."""
        found = []
        for text in typed:
            named = [text] if os.path.exists(text) or not glob.has_magic(text) else sorted(glob.glob(text))
            if not named:
                raise CommandError(f"TRAIN={text}: names no file")
            found += named
        return replace(cls(found[0], *others), more=tuple(found[1:]))

    @property
    def is_benchmark(self) -> bool:
        return self.train in catalogue.names()

    @property
    def has_own_facts(self) -> bool:
        return self.is_benchmark or self.train in EMBEDDED

    @property
    def _has_facts(self) -> bool:
        return self.facts is not None or self.assume_public or self.has_own_facts

    @property
    def _is_arrays(self) -> bool:
        return self.train.lower().endswith(".npz")

    @property
    def needs_no_target(self) -> bool:
        """Arrays and pictures come with their labels."""
        return self._is_arrays or Path(self.train).is_dir()

    @property
    def test_source(self) -> str:
        """Why the test records may be looked at."""
        return PUBLIC if self.has_own_facts and self.test is None else SEPARATE

    def check(self) -> None:
        """What can be said before a file is opened."""
        if self.is_benchmark and self.directory is None and not os.environ.get(catalogue.ENVIRONMENT):
            raise CommandError(f"--data: missing; {self.train} is read from a directory of yours, named by --data DIR")
        if self.split is not None and not self.is_benchmark:
            raise CommandError(f"--split={self.split}: {self.train} has no published splits; leave it out")
        if self.test is not None and any(same_file(self.test, part) for part in (self.train, *self.more)):
            raise CommandError(
                f"--test={self.test}: is the training file; what is measured on private records would publish them"
            )
        if not self._has_facts and not self._is_arrays:
            raise CommandError(f"--facts: missing; {_DECLARE}")

    def load(self) -> DataSet:
        """The records, their test part if there is one, and the facts that were declared or come with them."""
        declared = None if self.facts is None else Schema.from_toml(self.facts)
        target = self.target or (declared.target if declared else None)
        if self.more:
            if target is None:
                raise CommandError("--target: missing; name the column to predict")
            table = load_parts((self.train, *self.more), target, schema=declared)
            found = DataSet(f"{Path(self.train).name} and {len(self.more)} more", table, None, declared)
        elif self.is_benchmark:
            found = catalogue.load(self.train, self.directory)
            found = found.split(self.split or 0) if found.splits else found
        elif target is None and not self._names_a_target(declared):
            raise CommandError("--target: missing; name the column to predict")
        else:
            found = load_dataset(self.train, target, schema=declared)
        facts = declared or found.schema
        if facts is None and not self.assume_public and not _say_themselves(found.train):
            raise CommandError(
                f"--facts: missing; only pictures of bytes (uint8) with whole numbers as labels need none; {_DECLARE}"
            )
        if self.has_own_facts and self.target is not None and facts is not None and self.target != facts.target:
            raise CommandError(f"--target={self.target}: the target of {self.train} is {facts.target}; leave it out")
        held_out = found.test
        if self.test is not None:
            held_out = load_table(self.test, target or found.train.target, part="test", schema=facts)
        return DataSet(found.name, found.train, held_out, facts)

    def request(self, dataset: DataSet, name: str | None, **chosen: Any) -> Request:
        """One fit of the training part, by the facts that were declared or come with it."""
        facts = dataset.schema or Schema()
        said: dict[str, Any] = {"facts": facts, "assume_public": self.assume_public, "task": self.task}
        return Request(dataset.train, **chosen, **said, name=name or dataset.name)

    def _names_a_target(self, declared: Schema | None) -> bool:
        several = declared is not None and bool(declared.targets)
        return several or self.has_own_facts or self.needs_no_target

    def typed(self) -> dict[str, Any]:
        """What was typed, for the record of the run."""
        paths = {"test": self.test, "facts": self.facts, "data": self.directory}
        return {
            "train": self.train,
            **({"more": list(self.more)} if self.more else {}),
            **{name: None if path is None else str(path) for name, path in paths.items()},
            "assume_public": self.assume_public,
            "split": self.split,
        }


def _say_themselves(table: Table) -> bool:
    """Whether the types of the arrays say what pixels and labels may be, as with pictures of bytes in classes."""
    block = table.block
    return block is not None and block.dtype == np.uint8 and is_picture(block.shape[1:]) and table.whole_labels
